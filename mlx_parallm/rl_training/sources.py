"""RolloutSource: a place that the rollouts of a run come from. `Sources` starts, asks and ends all
of them.

    InProcessEnvironments, RewardsById    here
    DataSource                            rl_training/data/source.py: rows of a file in the place of
                                          rollouts
    EmbeddedQueue, ExternalAPI            faces/atropos/source.py

A source writes scored groups into the store of the run, from which the `RolloutBuffer` makes
batches. A kind of source is a function of the `SourceContext` that returns the source, or None
where the configuration does not ask for it; the kinds of the core are listed in
`daemon.training_run`, a leaf brings its own as a hook. Nothing here knows what the server makes of
a source.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.config.load import Config
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.group_order import group_id
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.runner import MakePlayer
from mlx_parallm.environments.task_draws import TaskDraws
from mlx_parallm.errors import EnvironmentFailedError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.rollout_buffer import Minimum
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.completions import KeptCompletions
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import RolloutGroup
from mlx_parallm.weights import SharedWeights

log = get_logger("train")

POLICY = "policy"  # the adapter's name in /v1/models
ENVIRONMENTS = "environments"  # the in-process source, in the store and in a checkpoint
EMBEDDED = "embedded"  # rl_training.atropos.api_url: no external API


class Served(Protocol):
    """The running engine, as far as a source samples from it."""

    @property
    def client(self) -> EngineClient: ...
    @property
    def weights(self) -> SharedWeights: ...
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class SourceContext:
    """Hold what a source may use of the run.

    `players`: play groups of the in-process environments in other processes, beside this one.
    `current_step`, `policy_version`: asked from any thread at any time. `on_reward`: sources that
    want to know that a reward came by id add a function here. `group_sizes`: a source that makes
    groups by itself adds their size. `on_times`: takes the times of a
    group (`run_files.spans`), on any thread. `experts`: (layers, experts a token, experts) that the
    trainer repeats, once there is one. `image_reader`: the model's; None: it reads texts alone.
    """

    config: Config
    directory: Path
    store: RolloutStore
    vocab_size: int
    environments: Sequence[EnvironmentSource]
    current_step: Callable[[], int]
    policy_version: Callable[[], int]
    on_reward: list[Callable[[], None]] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)
    on_times: Callable[[str, tuple[float, float]], None] | None = None
    players: Callable[[], Sequence[MakePlayer]] = tuple
    experts: Callable[[], tuple[int, int, int] | None] = lambda: None
    image_reader: ImageReader | None = None


class RolloutSource:
    """The face of every source; a subclass replaces the methods that mean something for it. Main
    thread only."""

    name = ""
    """In the store, and of its state in a checkpoint."""
    router: Any = None
    """The `AddedRouter` through which its groups come over HTTP; None = no routes."""

    def start(self, served: Served, state: TrainerState | None) -> None:
        """Start to make rollouts, from the position of a resumed checkpoint."""

    def request(self, groups: int) -> None:
        """Allow so many more groups; a source without requests ignores it."""

    def use_temperature(self, temperature: float) -> None:
        """Sample at `temperature` from now on; a source whose clients sample ignores it."""

    def minimums(self) -> Mapping[str, Minimum]:
        """Return the least parts of a batch of environments that deliver now, by name."""
        return {}

    def health(self) -> str | None:
        """Return a fault in words, or None."""
        return None

    def check(self) -> None:
        """Raise the error that ended the source for good."""

    def stop(self) -> None:
        """End its threads."""

    def state(self) -> dict[str, Any] | None:
        """Return its state for a checkpoint, or None."""
        return None

    def numbers(self) -> dict[str, Any]:
        """Return numbers for the line of a step in metrics.jsonl."""
        return {}


SourceKind = Callable[[SourceContext], RolloutSource | None]


class Sources:
    """The sources of one run, asked and ended together. Main thread only."""

    def __init__(self, sources: Iterable[RolloutSource | None]) -> None:
        self._sources = [source for source in sources if source is not None]

    def __iter__(self) -> Iterator[RolloutSource]:
        return iter(self._sources)

    def start(self, served: Served, state: TrainerState | None) -> None:
        for source in self._sources:
            source.start(served, state)

    def request(self, groups: int) -> None:
        for source in self._sources:
            source.request(groups)

    def use_temperature(self, temperature: float) -> None:
        for source in self._sources:
            source.use_temperature(temperature)

    def minimums(self) -> dict[str, Minimum]:
        return {
            name: minimum for source in self._sources for name, minimum in source.minimums().items()
        }

    def health(self) -> list[str | None]:
        return [source.health() for source in self._sources]

    def check(self) -> None:
        for source in self._sources:
            source.check()

    def stop(self) -> None:
        for source in self._sources:
            source.stop()

    def numbers(self) -> dict[str, Any]:
        return together(source.numbers() for source in self._sources)

    def keeping_state(self) -> dict[str, RolloutSource]:
        """Return the started sources that a checkpoint keeps something of, by name."""
        return {source.name: source for source in self._sources if source.state() is not None}


def together(numbers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of all: those of one name are added, in tables too."""
    total: dict[str, Any] = {}
    for key, value in (item for each in numbers for item in each.items()):
        is_table = isinstance(value, Mapping)
        total[key] = (
            together([total.get(key, {}), value]) if is_table else total.get(key, 0) + value
        )
    return total


class InProcessEnvironments(RolloutSource):
    """The environments of [[environments]], played in threads of this process."""

    name = ENVIRONMENTS

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._manager: RolloutManager | None = None
        context.group_sizes.extend(source.config.group_size for source in context.environments)

    @classmethod
    def of(cls, context: SourceContext) -> "InProcessEnvironments | None":
        return cls(context) if context.environments else None

    def start(self, served: Served, state: TrainerState | None) -> None:
        config, store, vocab_size = (
            self._context.config,
            self._context.store,
            self._context.vocab_size,
        )
        training = config.rl_training

        def keep(group: RolloutGroup) -> bool:
            check_group(
                group,
                vocab_size=vocab_size,
                max_token_length=training.atropos.max_token_length,
                missing_logprobs=training.atropos.missing_logprobs,
            )
            return store.add(group, source=self.name)

        def refuse(group: RolloutGroup, reason: str) -> None:
            store.reject(group, source=self.name, reason=reason)

        players = self._context.players()
        settings = RolloutConfig(
            num_parallel=max(
                config.server.batch_size * (1 + len(players)), training.atropos.rollout_batch_size
            ),
            seed=training.seed,
            temperature=training.temperature,
            max_token_length=training.atropos.max_token_length,
        )
        manager = self._manager = RolloutManager(
            self._context.environments,
            settings,
            inference=policy_inference(
                served,
                lora=training.lora.enabled,
                template_kwargs=config.model.chat_template_kwargs,
                run=self._context.directory,
            ),
            sink=keep,
            on_failure=refuse,
            on_times=self._context.on_times,
            fixed_order=training.deterministic,
            template_kwargs=config.model.chat_template_kwargs,
            players=players,
        )
        for draws in self._draws():
            draws.keep(self._context.directory)
        manager.check_room("rl_training.atropos.max_token_length")
        if state is not None and self.name in state.sources:
            manager.restore(state.sources[self.name])
        if training.deterministic:
            self._play_again(manager.state()["next_group"])
        manager.skip(store.known_ids())
        manager.start()

    def _play_again(self, cursors: Mapping[str, int]) -> None:
        """Forget groups that came after the checkpoint: they are sampled again, in the same
        company as the first time, because the last bits of a log-probability depend on how many
        rows the engine had."""
        store = self._context.store
        for source in self._context.environments:
            name, first = source.name, cursors[source.name]
            prefix = group_id(name, self._context.config.rl_training.seed, 0).removesuffix("0")
            stored = [
                key for key in store.known_ids(prefix) if key.removeprefix(prefix).isdecimal()
            ]
            store.database.forget([key for key in stored if int(key.removeprefix(prefix)) >= first])

    def request(self, groups: int) -> None:
        if self._manager is not None:
            self._manager.request_groups(groups)

    def use_temperature(self, temperature: float) -> None:
        if self._manager is not None:
            self._manager.use_temperature(temperature)

    def health(self) -> str | None:
        return self._manager.health() if self._manager is not None else None

    def check(self) -> None:
        if self._manager is not None:
            self._manager.check()

    def stop(self) -> None:
        if self._manager is None:
            return
        try:
            self._manager.stop()
        except EnvironmentFailedError as error:
            # An environment that blocks its thread must not turn a saved run into a failed one; it
            # is a daemon.
            log.warning(str(error))

    def state(self) -> dict[str, Any] | None:
        return self._manager.state() if self._manager is not None else None

    def numbers(self) -> dict[str, Any]:
        return together(draws.numbers() for draws in self._draws())

    def _draws(self) -> list[TaskDraws]:
        return [each.draws for each in self._context.environments if each.draws is not None]


class RewardsById(RolloutSource):
    """Answers of this server that a client rewards afterwards, by their ids. `completions` is
    the function that the route calls."""

    name = "rewards"

    def __init__(self, context: SourceContext) -> None:
        server, training = context.config.server, context.config.rl_training
        self.completions = KeptCompletions(
            context.store,
            policy_adapter=POLICY if training.lora.enabled else None,
            max_bytes=server.kept_completions_bytes,
            max_age_s=server.kept_completions_s,
            batch_size=training.atropos.rollout_batch_size,
            max_token_length=training.atropos.max_token_length,
            vocab_size=context.vocab_size,
            on_reward=self._rewarded,
        )
        self._listeners = context.on_reward

    def _rewarded(self) -> None:
        for listener in self._listeners:
            listener()


def policy_inference(
    served: Served,
    *,
    lora: bool,
    template_kwargs: Mapping[str, Any],
    run: Path | None = None,
) -> InferenceModule:
    """Return the run's engine, for environments and rewards that generate themselves. `lora`: an
    adapter is trained; `run`: the run's directory, if this process writes in it."""
    adapter = POLICY if lora else None
    return InferenceModule.over(
        served.client,
        served.tokenizer(),
        adapter,
        weights=served.weights,
        template_kwargs=template_kwargs,
        run=run,
    )
