"""Prometheus metrics of one server. Engine counters are read from `engine.stats()` when a scrape
asks for them, so generation pays nothing; HTTP times and publishes are observed as they happen.
Each app has its own registry."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.system.footprint import MemoryGuard
from mlx_parallm.types import EngineStats

PREFIX = "mlx_parallm"
_PUBLISH_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_REQUEST_BUCKETS = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
_COUNTERS = {
    "prompt_tokens": "Tokens of all admitted prompts",
    "prefill_tokens": "Prompt tokens really computed (n choices of one prompt count once)",
    "prefix_cache_query_tokens": "Tokens of the prompts that were looked up in the prefix cache",
    "prefix_cache_hit_tokens": "How many of them it held",
    "prefix_disk_hit_tokens": "Prompt tokens that were read from disk (server.prefix_disk_bytes)",
    "prefix_disk_corrupt_files": "Stored prefixes that were damaged, and removed",
    "prefix_disk_refused_files": "Prefixes that the disk did not take: it is full, or read-only",
    "prefix_disk_dropped_bytes": "Prefixes that were not kept: the disk did not keep up with them",
    "prefix_disk_failed_reads": "Stored prefixes that gave nothing: no answer in time, or an error",
    "generation_tokens": "Tokens sampled",
    "draft_tokens": "Tokens guessed by prompt lookup",
    "accepted_draft_tokens": "How many of them were sampled",
    "requests_finished": "Generation requests that ended normally",
    "requests_failed": "Generation requests that ended with an error",
    "requests_aborted": "Generation requests given up (client gone, shutdown)",
}

_MEMORY = {
    "prefix_disk_used_bytes": "Bytes of prefixes on disk",
    "prefix_disk_stuck_files": "Stored prefixes that could not be removed when they were to be",
    "prefix_disk_seconds_saved": "What computing the tokens read from disk would have taken longer",
    "kv_tokens": "Positions of the running sequences, shared ones counted in each",
    "kv_bytes": "Memory of their keys and values, with the room that is kept for more",
    "kv_bytes_shared": "What they would hold besides without sharing prompts",
}
_OF_A_RANK: dict[str, type[CounterMetricFamily] | type[GaugeMetricFamily]] = {
    "prompt_tokens": CounterMetricFamily,
    "generation_tokens": CounterMetricFamily,
    "requests_finished": CounterMetricFamily,
    "running": GaugeMetricFamily,
    "waiting": GaugeMetricFamily,
    "policy_version": GaugeMetricFamily,
}
_TOOL_COUNTERS = {
    "calls": "Calls of tools in episodes and rewards",
    "timeouts": "Calls of tools that were not answered in time",
    "restarts": "Starts of MCP servers after their first one",
    "cache_hits": "Calls of read-only tools that were answered from the cache",
    "seconds": "Time of all calls of tools, summed",
}


class ServerMetrics:
    """Histograms of this process's server. Thread-safe; `observe_publish` is called by the
    trainer's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Histogram(
            f"{PREFIX}_http_request_seconds",
            "Time from a request's arrival to the end of its answer",
            ["route", "status"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._first_token = Histogram(
            f"{PREFIX}_first_token_seconds",
            "Time from a streamed request's submission to its first token",
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._publish = Histogram(
            f"{PREFIX}_weight_publish_seconds",
            (
                "Time of one publish of new weights: evaluation, lock wait, rebinding; without a"
                " drain before it"
            ),
            buckets=_PUBLISH_BUCKETS,
            registry=self.registry,
        )
        self.http_in_flight = Gauge(
            f"{PREFIX}_generation_requests_in_flight",
            "HTTP generation requests being answered",
            registry=self.registry,
        )
        self.malformed_tool_calls = Counter(
            f"{PREFIX}_malformed_tool_calls",
            "Texts between tool-call markers that were no call, and were given as content",
            registry=self.registry,
        )
        self.resampled_choices = Counter(
            f"{PREFIX}_resampled_choices",
            "Choices that did not match their JSON schema or grammar and were sampled again",
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_publish(self, seconds: float) -> None:
        """Called by the weight updater after each publish, retried ones too."""
        self._publish.observe(seconds)

    def watch_engine(
        self, stats: Callable[[], EngineStats], ranks: Callable[[], Mapping[int, EngineStats]]
    ) -> None:
        """Add the engine's counters; once. `ranks`: those of each rank, where `stats` are their
        sums."""
        self.registry.register(_EngineCollector(stats, ranks))

    def watch_tools(self, counts: Callable[[], Mapping[str, float]]) -> None:
        """Add the counts of a run's tool client; once."""
        self.registry.register(_ToolsCollector(counts))

    def watch_memory(self, guard: MemoryGuard) -> None:
        """Add the process's memory, beside the guard's marks; once."""
        self.watch(lambda: _memory_metrics(guard))

    def watch(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        """Add counts of a part outside of the server, read at each scrape."""
        self.registry.register(_PartCollector(metrics))

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


def _memory_metrics(guard: MemoryGuard) -> Iterator[Metric]:
    taken = GaugeMetricFamily(
        f"{PREFIX}_footprint_bytes", "What the process takes of a memory", labels=["place"]
    )
    whole = GaugeMetricFamily(f"{PREFIX}_memory_bytes", "How large it is", labels=["place"])
    for use in guard.measure():
        taken.add_metric([use.place], use.used)
        whole.add_metric([use.place], use.whole)
    marks = GaugeMetricFamily(
        f"{PREFIX}_memory_mark", "Share of it at which the guard acts", labels=["mark"]
    )
    marks.add_metric(["pause"], guard.pause)
    marks.add_metric(["stop"], guard.stop)
    yield from (taken, whole, marks)
    yield GaugeMetricFamily(
        f"{PREFIX}_memory_paused",
        "1 while new requests wait for memory",
        value=int(guard.paused),
    )


class _EngineCollector(Collector):
    def __init__(
        self, stats: Callable[[], EngineStats], ranks: Callable[[], Mapping[int, EngineStats]]
    ) -> None:
        self._stats, self._ranks = stats, ranks

    def describe(self) -> list[Metric]:
        return []  # registering must not need a running engine

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", meaning, value=getattr(stats, name))
        yield CounterMetricFamily(f"{PREFIX}_engine_steps", "Engine steps", value=stats.steps)
        for name, meaning in _MEMORY.items():
            yield GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=getattr(stats, name))
        seconds = CounterMetricFamily(
            f"{PREFIX}_step_seconds", "Time of all engine steps, by part", labels=["part"]
        )
        for part, spent in stats.step_seconds.items():
            seconds.add_metric([part], spent)
        yield seconds
        yield InfoMetricFamily(
            f"{PREFIX}_engine", "How it was started", value={"kv_layout": stats.kv_layout}
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_requests_running", "Sequences being generated", value=stats.running
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_requests_waiting", "Sequences waiting for a slot", value=stats.waiting
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_policy_version", "Version of the served policy", value=stats.policy_version
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_engine_alive", "1 while the engine thread runs", value=int(stats.alive)
        )
        if ranks := self._ranks():
            for name, family in _OF_A_RANK.items():
                metric = family(
                    f"{PREFIX}_rank_{name}",
                    f"{name.replace('_', ' ')}, of each rank",
                    labels=["rank"],
                )
                for rank, rank_stats in ranks.items():
                    metric.add_metric([str(rank)], getattr(rank_stats, name))
                yield metric


class _PartCollector(Collector):
    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []  # registering must not ask the part

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics()


class _ToolsCollector(Collector):
    def __init__(self, counts: Callable[[], Mapping[str, float]]) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        return []  # registering must not ask a client

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        for name, meaning in _TOOL_COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_tool_{name}", meaning, value=counts[name])
        errors = CounterMetricFamily(
            f"{PREFIX}_tool_errors", "Calls of tools that failed, by kind", labels=["kind"]
        )
        for name, value in counts.items():
            if name.startswith("errors/"):
                errors.add_metric([name.removeprefix("errors/")], value)
        yield errors
