"""RolloutManager: plays environments against the engine, many episodes at once (`group_manager.py`).

A run that trains gives it a `sink` (the durable store) and allows groups as it needs them; a program without one calls
`collect_rollouts`.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.config.environment import unique_names
from mlx_parallm.environments.base import EnvironmentSource, PolicyInference
from mlx_parallm.environments.collecting import Collector
from mlx_parallm.environments.collecting_config import RolloutConfig
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult
from mlx_parallm.environments.scheduler import GroupManager
from mlx_parallm.environments.state import BaseEnvironment
from mlx_parallm.environments.state_source import StateSource
from mlx_parallm.environments.worker import SharedTokenizer
from mlx_parallm.errors import ConfigError, EnvironmentFailedError, RolloutRejectedError
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import ChatTokenizer, PolicyClient, RolloutGroup, Trajectory

log = get_logger("environments")

AnyEnvironment = BaseEnvironment | EnvironmentSource


class RolloutManager(GroupManager):
    """With a `sink`, finished groups go there; without one, `collect_rollouts` returns them. What is given to be called
    is called on the manager's own thread."""

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
        on_rollout_start: Callable[[str], None] | None = None,
        on_rollout_complete: Callable[[Trajectory], None] | None = None,
        fixed_order: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        stall_after_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            num_parallel: instead of the configuration's.
            inference: the engine that plays; default: the first environment's own. Others without one get it too.
            client, tokenizer, adapter: instead of those of `inference`. The tokenizer is used on other threads.
            sink: takes a finished group for good. False = it was there already (another one is played instead);
                RolloutRejectedError = it may not be trained on; any other exception stops the manager.
            on_failure: takes a group that may not be trained on, and why.
            on_rollout_start, on_rollout_complete: of `collect_rollouts`; take "<group id>/<number>", the trajectory.
            fixed_order, stall_after_s, clock: see `GroupManager`.

        Raises ConfigError: an environment that cannot be played, or no engine in this process to play it.
        """
        config = config or RolloutConfig()
        if num_parallel is not None:
            config = dataclasses.replace(config, num_parallel=num_parallel)
        given = [environments] if isinstance(environments, BaseEnvironment | EnvironmentSource) else list(environments)
        sources = _as_sources(given, config)
        super().__init__(
            sources,
            seed=config.seed,
            num_parallel=config.num_parallel,
            fixed_order=fixed_order,
            stall_after_s=stall_after_s,
            clock=clock,
        )
        self.environments = tuple(given)
        own: Any = next((e.inference for e in given if isinstance(e, BaseEnvironment)), None)
        self.inference: PolicyInference | None = inference or own
        self._config, self._adapter, self._template_kwargs = config, adapter, template_kwargs
        self._client, self._tokenizer = _engine(self.inference, client, tokenizer)
        self._sink, self._on_failure = sink, on_failure
        self._episodes: EpisodeRunner | None = None
        self._collector = (
            Collector(config, on_start=on_rollout_start, on_complete=on_rollout_complete) if sink is None else None
        )
        if self.inference is not None:
            for source in sources:
                source.attach(self.inference)

    # --- collecting, on one thread at a time

    def collect_rollouts(
        self, min_trajectories: int, max_steps_per_rollout: int | None = None, *, group_size: int | None = None
    ) -> list[Trajectory]:
        """At least so many trajectories, in whole groups (`group_id`), in the order in which they were started.

        Args:
            max_steps_per_rollout: an episode that is not over after so many steps is `truncated`.
            group_size: rollouts of one prompt, instead of the configuration's. Both hold for groups that start from now
                on.

        A failed episode is a trajectory with an `error`. Raises EnvironmentFailedError: all of them failed, or the
        manager has given up. Where another thread calls `cancel`, it returns what there is.
        """
        collected = list(self.iterate_rollouts(min_trajectories, max_steps_per_rollout, group_size=group_size))
        if collected and all(trajectory.error is not None for trajectory in collected):
            raise EnvironmentFailedError(f"all {len(collected)} rollouts failed, the last one: {collected[-1].error}")
        return collected

    def iterate_rollouts(
        self, min_trajectories: int, max_steps_per_rollout: int | None = None, *, group_size: int | None = None
    ) -> Iterator[Trajectory]:
        """As `collect_rollouts`, each as soon as it and all before it have finished; the others play on meanwhile."""
        if self._collector is None:
            raise RuntimeError("this manager hands its groups to a sink")
        if self._stopping and self._failure is None:  # stopped, and wanted again
            self.cancel()
        for lane in self._lanes:
            lane.limit(group_size=group_size, max_steps=max_steps_per_rollout)
        if self._thread is None:
            self.start()
        elif self._episodes is not None:  # what is trained may have begun meanwhile
            self._episodes.use_adapter(self._adapter_now)
        largest = max(lane.group_size for lane in self._lanes)
        ahead = self._max_in_flight if self._config.maintain_parallel_count else 0
        try:
            yield from self._collector.take(min_trajectories, self.request_groups, largest=largest, ahead=ahead)
        except KeyboardInterrupt:
            self.cancel()
            raise
        self.check()

    def get_statistics(self) -> dict[str, Any]:
        """Of all trajectories that were collected, e.g. "avg_trajectory_length" in steps: see
        `rollout_config.CollectionStatistics`. Empty where they go to a sink."""
        return self._collector.statistics.as_dict() if self._collector is not None else {}

    def save_statistics(self, path: Path | str) -> None:
        """`get_statistics` as JSON."""
        if self._collector is not None:
            self._collector.statistics.save(path)

    def start(self) -> None:
        """Starts the threads; `collect_rollouts` does it by itself."""
        if self._collector is not None:
            self._collector.begin()
        super().start()

    def stop(self, timeout_s: float = 10.0) -> None:
        try:
            super().stop(timeout_s)
        finally:
            if self._collector is not None:
                self._collector.end()

    def close(self) -> None:
        """`stop`, for good: what nobody took is gone."""
        try:
            self.stop()
        finally:
            if self._collector is not None:
                self._collector.close()

    def __enter__(self) -> "RolloutManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what `GroupManager` asks

    @property
    def _adapter_now(self) -> str | None:
        return self._adapter or getattr(self.inference, "adapter", None)

    def _runner(self) -> EpisodeRunner:
        self._episodes = EpisodeRunner(
            self._client,
            self._tokenizer,
            temperature=self._config.temperature,
            max_token_length=self._config.max_token_length or self._client.max_model_len,
            adapter=self._adapter_now,
            template_kwargs=self._template_kwargs,
        )
        return self._episodes

    def _begun(self, plans: Sequence[GroupPlan]) -> None:
        if self._collector is not None:
            self._collector.started(plans)

    def _deliver(self, result: GroupResult) -> tuple[str | None, bool]:
        """To the collector, to the sink, or to `on_failure`."""
        if self._collector is not None:
            self._collector.add(result)
            if result.failure is None:
                self._monitor.delivered(result, known=False)
            else:
                self._monitor.failed(result, result.failure)
            return None, True
        reason = result.failure
        if reason is None:
            try:
                known = self._sink is not None and self._sink(result.group) is False
            except RolloutRejectedError as error:
                reason = str(error)
        if reason is None:
            self._monitor.delivered(result, known=known)
            return None, not known
        self._monitor.failed(result, reason)
        log.warning("group dropped", group=result.group.group_id, reason=reason)
        if self._on_failure is not None:
            self._on_failure(result.group, reason)
        return reason, False

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if self._collector is not None:
            self._collector.end()


def _engine(
    inference: PolicyInference | None, client: PolicyClient | None, tokenizer: ChatTokenizer | None
) -> tuple[PolicyClient, SharedTokenizer]:
    client = client or getattr(inference, "client", None)
    tokenizer = tokenizer or getattr(inference, "tokenizer", None)
    if client is None or tokenizer is None:
        raise ConfigError(
            "RolloutManager: no engine in this process: give the environment (or `inference`) an InferenceModule that"
            " has one. Over an OpenAI endpoint the tokens that were sampled are not known"
        )
    return client, SharedTokenizer(tokenizer)


def _as_sources(environments: Sequence[AnyEnvironment], config: RolloutConfig) -> list[EnvironmentSource]:
    """Each environment with the settings of `config`; a source has its own."""
    entries = [
        environment.config
        if isinstance(environment, EnvironmentSource)
        else config.of_environment(type(environment).__name__)
        for environment in environments
    ]
    return [
        environment
        if isinstance(environment, EnvironmentSource)
        else StateSource(entry, _giving(environment), seed=config.seed, name=name)
        for environment, entry, name in zip(environments, entries, unique_names(entries), strict=True)
    ]


def _giving(environment: BaseEnvironment) -> Callable[[], BaseEnvironment]:
    return lambda: environment
