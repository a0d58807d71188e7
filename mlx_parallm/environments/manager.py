"""RolloutManager: plays environments against the engine, many episodes at once (`scheduler.py`
decides which).

A run that trains gives it a `sink` (the durable store) and requests groups as it needs them; a
program without one calls `collect_rollouts`, for which a `Collector` holds finished groups.
"""

import dataclasses
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from mlx_parallm.config.environment import EnvironmentConfig, unique_names
from mlx_parallm.environments.base import AnyEnvironment, EnvironmentSource, PolicyInference
from mlx_parallm.environments.episode import failed_trajectories
from mlx_parallm.environments.prompt_room import check_room
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult, MakePlayer
from mlx_parallm.environments.scheduler import RolloutScheduler
from mlx_parallm.environments.state import BaseEnvironment, StateSource
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, EnvironmentFailedError, RolloutRejectedError
from mlx_parallm.system.log import FILE_ONLY, get_logger, words_of
from mlx_parallm.system.terminal import Console
from mlx_parallm.types import ChatTokenizer, PolicyClient, RolloutGroup, Trajectory

log = get_logger("environments")

Group = tuple[Trajectory, ...]

SIGNALS_SEEN_WITHIN_S = 0.5


@dataclass(frozen=True)
class RolloutConfig:
    """Raises ConfigError: a number out of its range, or an option that earlier versions had."""

    num_parallel: int = 32
    """Episodes in flight, in whole groups (one at least)."""
    maintain_parallel_count: bool = False
    """True: this many are in flight all the time, beyond what was requested; `collect_rollouts`
    returns while they are under way, and the next call returns them. False: nothing is in flight
    when it returns."""
    seed: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    max_token_length: int | None = None
    """Most tokens of one sequence, its prompt included; None: the model's context."""
    group_size: int = 1
    """Rollouts of one prompt. This and the next four are for a `BaseEnvironment`; a source has
    its configuration."""
    max_tokens: int = 256
    """Most tokens of one turn."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    prompt_format: Literal["text", "chat"] = "text"
    """A prompt that is a string goes to the model as it is (text), or as one message of the
    user's (chat)."""
    timeout_s: float = 600.0
    """Longest time of one episode."""
    enable_progress_bar: bool = False
    """Shown where stderr is a terminal."""
    verbose: bool = False
    """Logs every finished trajectory."""
    offload_to_disk: dataclasses.InitVar[None] = None
    max_trajectory_buffer: dataclasses.InitVar[None] = None
    """These two have been removed, and are refused with the reason."""

    def __post_init__(self, offload_to_disk: None, max_trajectory_buffer: None) -> None:
        removed = {
            "offload_to_disk": offload_to_disk,
            "max_trajectory_buffer": max_trajectory_buffer,
        }
        for name, value in removed.items():
            if value is not None:
                raise ConfigError(
                    f"RolloutConfig({name}=…) has been removed: finished trajectories wait in"
                    " memory. Collect fewer in"
                    " one call, or take them one by one from iterate_rollouts"
                )
        counts = {
            "num_parallel": self.num_parallel,
            "group_size": self.group_size,
            "max_tokens": self.max_tokens,
        }
        for name, count in counts.items():
            if count < 1:
                raise ConfigError(f"RolloutConfig: {name} = {count}: expected at least 1")
        if self.temperature < 0 or self.timeout_s <= 0:
            raise ConfigError(
                f"RolloutConfig: temperature = {self.temperature}, timeout_s = {self.timeout_s}:"
                " expected at least 0,"
                " and more than 0"
            )

    def environment_config(self, name: str) -> EnvironmentConfig:
        """Return these settings as an [[environments]] entry; unlike there, a group may have a
        single rollout."""
        settings = {
            "group_size": self.group_size,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "prompt_format": self.prompt_format,
            "timeout_s": self.timeout_s,
        }
        return EnvironmentConfig(kind=name, name=name).model_copy(update=settings)


@dataclass
class CollectionStatistics:
    """Sums over all trajectories that were collected; lengths are steps of an episode."""

    lengths: Counter[int] = field(default_factory=Counter)
    failed: int = 0
    truncated: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0  # spent collecting

    def add(self, trajectory: Trajectory) -> None:
        self.failed += trajectory.error is not None
        self.truncated += trajectory.truncated
        self.sampled_tokens += trajectory.rollout.sampled_tokens
        if trajectory.error is None:
            self.lengths[trajectory.step_count] += 1

    def as_dict(self) -> dict[str, Any]:
        """Failed trajectories count in the totals, not in the lengths."""
        finished, steps = (
            self.lengths.total(),
            sum(length * count for length, count in self.lengths.items()),
        )
        mean = steps / finished if finished else 0.0
        squares = sum(count * (length - mean) ** 2 for length, count in self.lengths.items())
        total = finished + self.failed
        return {
            "total_trajectories": total,
            "failed_trajectories": self.failed,
            "truncated_trajectories": self.truncated,
            "total_steps": steps,
            "avg_trajectory_length": mean,
            "std_trajectory_length": math.sqrt(squares / finished) if finished else 0.0,
            "min_trajectory_length": min(self.lengths, default=0),
            "max_trajectory_length": max(self.lengths, default=0),
            "length_histogram": {
                str(length): self.lengths[length] for length in sorted(self.lengths)
            },
            "sampled_tokens": self.sampled_tokens,
            "seconds": self.seconds,
            "trajectories_per_second": total / self.seconds if self.seconds else 0.0,
            "steps_per_second": steps / self.seconds if self.seconds else 0.0,
        }


class Collector:
    """Hands out finished groups in the order in which they were started: in the order in which they
    finish, the first ones collected would be the shortest episodes.

    `started`, `add` and `end` are called by the scheduler, `take` by one thread of the user's at a
    time.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        on_start: Callable[[str], None] | None,
        on_complete: Callable[[Trajectory], None] | None,
    ) -> None:
        self.statistics = CollectionStatistics()
        self._config, self._on_start, self._on_complete = config, on_start, on_complete
        self._changed = threading.Condition()  # guards what follows
        # groups that were started and are not ready, in their order
        self._order: deque[str] = deque()
        self._early: dict[str, Group] = {}  # finished groups that wait for an earlier one
        self._ready: deque[Group] = deque()
        self._outstanding = 0  # groups that were requested and not taken
        self._ended = self._closed = False

    # --- the scheduler's side

    def begin(self) -> None:
        """Raises RuntimeError: it is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("this manager is closed")
            self._ended = False

    def started(self, plans: Sequence[GroupPlan]) -> None:
        with self._changed:
            self._order.extend(plan.group_id for plan in plans)
        if self._on_start is not None:
            for plan in plans:
                for number in range(plan.size):
                    self._on_start(f"{plan.group_id}/{number}")

    def add(self, result: GroupResult) -> None:
        """Take a finished group; the trajectories of a failed one say why it failed."""
        group = _trajectories(result, self._config.temperature)
        for trajectory in group:
            if self._config.verbose:
                log.info(
                    "rollout finished",
                    rollout=trajectory.group_id,
                    steps=trajectory.step_count,
                    tokens=trajectory.rollout.sampled_tokens,
                    error=trajectory.error,
                )
            if self._on_complete is not None:
                self._on_complete(trajectory)
        with self._changed:
            self._early[result.plan.group_id] = group
            while self._order and self._order[0] in self._early:
                self._ready.append(self._early.pop(self._order.popleft()))
            self._changed.notify_all()

    def end(self) -> None:
        """Expect no more: groups that were started and have not finished will not come."""
        with self._changed:
            self._ready.extend(self._early.pop(name) for name in self._order if name in self._early)
            self._order.clear()
            self._outstanding, self._ended = len(self._ready), True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop groups that were not taken."""
        with self._changed:
            self._closed = True
            self._ready.clear()

    # --- the user's side

    def take(
        self, wanted: int, request: Callable[[int], None], *, largest: int, ahead: int
    ) -> Iterator[Trajectory]:
        """Yield whole groups until there are `wanted` trajectories; stop early after `end`.

        Args:
            request: starts this many more groups.
            largest: most trajectories of one group.
            ahead: groups that are to be in flight beyond the wanted ones.
        """
        taken, began = 0, time.monotonic()
        try:
            with self._progress_bar(wanted) as advance:
                while taken < wanted:
                    with self._changed:
                        missing = max(
                            0, math.ceil((wanted - taken) / largest) + ahead - self._outstanding
                        )
                        self._outstanding += missing
                    request(missing)
                    group = self._next()
                    if group is None:
                        return
                    taken += len(group)
                    for trajectory in group:
                        self.statistics.add(trajectory)
                        advance()
                    yield from group
        finally:
            self.statistics.seconds += time.monotonic() - began

    def _next(self) -> Group | None:
        with self._changed:
            # A signal that comes just before a wait is only seen after it (CPython), so no wait is
            # longer than that.
            while not self._changed.wait_for(
                lambda: self._ready or self._ended, SIGNALS_SEEN_WITHIN_S
            ):
                pass
            if not self._ready:
                return None
            self._outstanding -= 1
            return self._ready.popleft()

    @contextmanager
    def _progress_bar(self, wanted: int) -> Iterator[Callable[[], None]]:
        console = Console(stderr=True)
        shown = self._config.enable_progress_bar and console.is_terminal
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not shown) as progress:
            task = progress.add_task("rollouts", total=wanted)
            yield lambda: progress.advance(task)


class RolloutManager(RolloutScheduler):
    """A scheduler of rollouts that delivers finished groups: to `sink`, or by `collect_rollouts`
    if there is none. Callbacks are called on the scheduler's thread."""

    def __init__(
        self,
        environments: AnyEnvironment | Sequence[AnyEnvironment],
        config: RolloutConfig | None = None,
        *,
        num_parallel: int | None = None,
        inference: PolicyInference | None = None,
        client: PolicyClient | None = None,
        tokenizer: ChatTokenizer | None = None,
        adapter: str | None = None,
        sink: Callable[[RolloutGroup], bool | None] | None = None,
        on_failure: Callable[[RolloutGroup, str], None] | None = None,
        on_times: Callable[[str, tuple[float, float]], None] | None = None,
        on_rollout_start: Callable[[str], None] | None = None,
        on_rollout_complete: Callable[[Trajectory], None] | None = None,
        fixed_order: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        stall_after_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        players: Sequence[MakePlayer] = (),
    ) -> None:
        """
        Args:
            num_parallel: replaces the configuration's.
            inference: the engine that samples; default: the first environment's. Other
                environments without one get it too.
            client, tokenizer, adapter: replace those of `inference`. The tokenizer is used on other
                threads.
            sink: takes a finished group for good. False = the store has it already (another group
                is played instead); RolloutRejectedError = it may not be trained on; any other
                exception stops the manager.
            on_failure: takes a group that may not be trained on, and why.
            on_times: takes the times in which a group was sampled (rl.sample) and scored
                (rl.reward), Unix seconds.
            on_rollout_start, on_rollout_complete: for `collect_rollouts`; take "<group
                id>/<number>", the trajectory.
            fixed_order, stall_after_s, clock, players: see `RolloutScheduler`.

        Raises ConfigError: an environment that cannot be played, or no engine in this process to
        play it.
        """
        config = config or RolloutConfig()
        if num_parallel is not None:
            config = dataclasses.replace(config, num_parallel=num_parallel)
        played: list[Any] = [environments]
        if isinstance(environments, Iterable) and not isinstance(environments, AnyEnvironment):
            played = list(environments)
        sources = _as_sources(played, config)
        super().__init__(
            sources,
            seed=config.seed,
            num_parallel=config.num_parallel,
            fixed_order=fixed_order,
            stall_after_s=stall_after_s,
            clock=clock,
            players=players,
        )
        self.environments = tuple(played)
        first: Any = next(
            (each.inference for each in played if isinstance(each, BaseEnvironment)), None
        )
        self.inference: PolicyInference | None = inference or first
        self._config, self._adapter, self._template_kwargs = config, adapter, template_kwargs
        self._client, self._tokenizer = _engine(self.inference, client, tokenizer)
        self._sink, self._on_failure, self._on_times = sink, on_failure, on_times
        self._logged_reasons: set[str] = set()
        self._episodes: EpisodeRunner | None = None
        self._collector = (
            Collector(config, on_start=on_rollout_start, on_complete=on_rollout_complete)
            if sink is None
            else None
        )
        if self.inference is not None:
            for source in sources:
                source.attach(self.inference)

    # --- collecting, on one thread at a time

    def collect_rollouts(
        self,
        min_trajectories: int,
        max_steps_per_rollout: int | None = None,
        *,
        group_size: int | None = None,
    ) -> list[Trajectory]:
        """Return at least so many trajectories, in whole groups (`group_id`), in the order in which
        they were started.

        Args:
            max_steps_per_rollout: an episode that is not over after so many steps is `truncated`.
            group_size: rollouts of one prompt; replaces the configuration's. Both hold for groups
                that start from now on.

        A failed episode is a trajectory with an `error`. Raises EnvironmentFailedError: all of them
        failed, or the manager has given up. If another thread calls `cancel`, it returns what
        has finished.
        """
        collected = list(
            self.iterate_rollouts(min_trajectories, max_steps_per_rollout, group_size=group_size)
        )
        if collected and all(trajectory.error is not None for trajectory in collected):
            raise EnvironmentFailedError(
                f"all {len(collected)} rollouts failed, the last one: {collected[-1].error}"
            )
        return collected

    def iterate_rollouts(
        self,
        min_trajectories: int,
        max_steps_per_rollout: int | None = None,
        *,
        group_size: int | None = None,
    ) -> Iterator[Trajectory]:
        """Yield what `collect_rollouts` returns, each trajectory as soon as it and all before it
        have finished; the other episodes continue meanwhile."""
        if self._collector is None:
            raise RuntimeError("this manager hands its groups to a sink")
        if self._stopping and self._failure is None:  # stopped, and wanted again
            self.cancel()
        for queue in self._queues:
            queue.limit(group_size=group_size, max_steps=max_steps_per_rollout)
        if self._thread is None:
            self.start()
        elif self._episodes is not None:  # training may have begun meanwhile
            self._episodes.use_adapter(self._adapter_now)
        largest = max(queue.group_size for queue in self._queues)
        ahead = self._max_in_flight if self._config.maintain_parallel_count else 0
        try:
            yield from self._collector.take(
                min_trajectories, self.request_groups, largest=largest, ahead=ahead
            )
        except KeyboardInterrupt:
            self.cancel()
            raise
        self.check()

    def get_statistics(self) -> dict[str, Any]:
        """Return `CollectionStatistics.as_dict` of all trajectories that were collected, e.g.
        "avg_trajectory_length" in steps. Empty if they go to a sink."""
        return self._collector.statistics.as_dict() if self._collector is not None else {}

    def start(self) -> None:
        """Start the threads; `collect_rollouts` does it by itself."""
        if self._collector is not None:
            self._collector.begin()
        super().start()

    def use_temperature(self, temperature: float) -> None:
        """Sample at `temperature` in the groups that start from now on."""
        self._config = dataclasses.replace(self._config, temperature=temperature)
        for player in self._players:
            player.use_temperature(temperature)

    def stop(self, timeout_s: float = 10.0) -> None:
        try:
            super().stop(timeout_s)
        finally:
            if self._collector is not None:
                self._collector.end()

    def close(self) -> None:
        """`stop`, for good: groups that were not taken are dropped."""
        try:
            self.stop()
        finally:
            if self._collector is not None:
                self._collector.close()

    def __enter__(self) -> "RolloutManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what `RolloutScheduler` calls

    @property
    def _adapter_now(self) -> str | None:
        return self._adapter or getattr(self.inference, "adapter", None)

    def check_room(self, limit: str) -> None:
        """Raises ConfigError: no prompt of an environment leaves room for an answer; `limit`
        names the setting."""
        check_room([queue.source for queue in self._queues], self._policy(), limit)

    def _runner(self) -> EpisodeRunner:
        self._episodes = EpisodeRunner(self._policy())
        return self._episodes

    def _policy(self) -> EpisodePolicy:
        return EpisodePolicy(
            self._client,
            self._tokenizer,
            temperature=self._config.temperature,
            max_token_length=self._config.max_token_length or self._client.max_model_len,
            adapter=self._adapter_now,
            template_kwargs=self._template_kwargs or {},
        )

    def _begun(self, plans: Sequence[GroupPlan]) -> None:
        if self._collector is not None:
            self._collector.started(plans)

    def _deliver(self, result: GroupResult) -> tuple[str | None, bool]:
        """Hand a result to the collector, to the sink, or to `on_failure`."""
        if self._on_times is not None:
            for name, times in result.times.items():
                self._on_times(name, times)
        if self._collector is not None:
            self._collector.add(result)
            return None, True
        reason = result.failure
        if reason is None:
            try:
                stored = self._sink is not None and self._sink(result.group) is False
            except RolloutRejectedError as error:
                reason = str(error)
        if reason is None:
            return None, not stored
        # a reason is shown once; run.log has every group
        words = words_of(reason)
        hidden = words in self._logged_reasons or self._may_end_now(result)
        if not hidden:
            self._logged_reasons.add(words)
        shown = {FILE_ONLY: True} if hidden else {}
        log.warning("group dropped", group=result.group.group_id, reason=reason, **shown)
        if self._on_failure is not None:
            self._on_failure(result.group, reason)
        return reason, False

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if self._collector is not None:
            self._collector.end()


def _trajectories(result: GroupResult, temperature: float) -> Group:
    plan, group, failure = result.plan, result.trajectories, result.failure
    if failure is None or any(trajectory.error is not None for trajectory in group):
        return group
    if not group:
        return failed_trajectories(plan.group_id, plan.size, temperature, failure)
    # the reward failed
    marked = (dataclasses.replace(trajectory.rollout, error=failure) for trajectory in group)
    return tuple(
        dataclasses.replace(each, rollout=rollout)
        for each, rollout in zip(group, marked, strict=True)
    )


def _engine(
    inference: PolicyInference | None, client: PolicyClient | None, tokenizer: ChatTokenizer | None
) -> tuple[PolicyClient, ChatTokenizer]:
    client = client or getattr(inference, "client", None)
    tokenizer = tokenizer or getattr(inference, "tokenizer", None)
    if client is None or tokenizer is None:
        raise ConfigError(
            "RolloutManager: no engine in this process: give the environment (or `inference`) an"
            " InferenceModule that"
            " has one. Over an OpenAI endpoint the tokens that were sampled are not known"
        )
    return client, tokenizer


def _as_sources(
    environments: Sequence[AnyEnvironment], config: RolloutConfig
) -> list[EnvironmentSource]:
    """Return each environment as a source, a BaseEnvironment with the settings of `config`."""
    entries = [
        environment.config
        if isinstance(environment, EnvironmentSource)
        else config.environment_config(type(environment).__name__)
        for environment in environments
    ]
    return [
        _as_source(environment, entry, seed=config.seed, name=name)
        for environment, entry, name in zip(
            environments, entries, unique_names(entries), strict=True
        )
    ]


def _as_source(
    environment: AnyEnvironment, entry: EnvironmentConfig, *, seed: int, name: str
) -> EnvironmentSource:
    if isinstance(environment, EnvironmentSource):
        return environment
    if not isinstance(environment, BaseEnvironment):
        raise ConfigError(f"RolloutManager: {environment!r} is no instance of a BaseEnvironment")
    return StateSource(entry, lambda: environment, seed=seed, name=name)
