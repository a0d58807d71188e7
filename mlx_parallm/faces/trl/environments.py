"""TRL's `environment_factory`: an instance for each rollout, whose methods are tools.

    reset(**row) → its text behind the prompt → the model → calls of its methods → … → an answer
    without a call → get_reward()

`with_environments` makes an entry of [[environments]] of such rollouts out of one of rows. As in
TRL, an instance is made once and reset often: it is free again when no code holds the rollout that
it played any more, so reward functions find it in their argument `environments`.
"""

import asyncio
import copy
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.config.environment import DATASET_KEYS, SCORING_KEYS, EnvironmentConfig
from mlx_parallm.environments.base import Task
from mlx_parallm.environments.episode import CURRENT, Episode
from mlx_parallm.environments.episode_tools import EpisodeTools, SourceTools
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.tool_calls import tool_definition
from mlx_parallm.execution.tool_results import CallsBefore, ToolResult, as_json, bounded
from mlx_parallm.execution.user_code import is_async, name_of, reference_to, user_code

Factory = Callable[[], Any]
ENVIRONMENT = "environment"  # column of the rows that names one of several
NOT_TOOLS = ("reset", "get_reward")
EMPTY = {"prompt": [{"role": "user", "content": ""}]}
"""The row if the environments bring the prompts."""


class Factories:
    """The environments of a trainer, by name; the one of a single factory is None.

    Raises ConfigError: one cannot be made, has no `reset`, or a method that is not a tool.
    """

    def __init__(self, factory: Factory | Mapping[str, Factory]) -> None:
        self.several = isinstance(factory, Mapping)
        self._factories: dict[str | None, Factory] = {}
        if isinstance(factory, Mapping):
            self._factories.update(factory.items())
        else:
            self._factories[None] = factory
        self._free: dict[str | None, deque[Any]] = {}
        self.definitions: dict[str | None, list[dict[str, Any]]] = {}
        self.scored: dict[type, str] = {}  # classes with get_reward → the name of their reward
        for name, make in self._factories.items():
            what = "environment_factory" if name is None else f"environment_factory[{name!r}]"
            if not callable(make):
                raise ConfigError(f"{what}: {make!r} cannot be called")
            with user_code(what):
                instance = make()
            if not callable(getattr(instance, "reset", None)):
                raise ConfigError(f"{what}: {type(instance).__name__} has no method reset")
            self._free[name] = deque([instance])
            self.definitions[name] = [tool_definition(m) for m in methods(instance).values()]
            if hasattr(instance, "get_reward"):
                self.scored[type(instance)] = type(instance).__name__

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raises ConfigError: a row that names none of several environments."""
        if self.several and row.get(ENVIRONMENT) not in self._factories:
            raise ConfigError(
                f"{where}: its column {ENVIRONMENT!r} is {row.get(ENVIRONMENT)!r}: expected one of"
                f" {', '.join(map(str, self._factories))}"
            )

    def name(self, row: Mapping[str, Any]) -> str | None:
        return row.get(ENVIRONMENT) if self.several else None

    def take(self, name: str | None) -> "Instance":
        """Return a free instance."""
        try:
            made = self._free[name].popleft()
        except IndexError:
            with user_code("environment_factory", RolloutRejectedError):
                made = self._factories[name]()
        return Instance(made, self._free[name])


class Instance:
    """An environment in use: when nothing refers to this any more, it is free."""

    def __init__(self, environment: Any, free: deque[Any]) -> None:
        self.environment = environment
        weakref.finalize(self, free.append, environment).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Instance":
        return self

    def __repr__(self) -> str:
        return type(self.environment).__name__


class RewardView:
    """The part of an episode that rewards see."""

    def __init__(self, columns: Mapping[str, Any], instance: Instance) -> None:
        self.metadata: dict[str, Any] = {**columns, "environments": instance, "get_reward": None}


class FactoryEnvironments(DatasetSource):
    """Rows that are played with an environment each. `entry` and `factories` are of a subclass."""

    opens_together = False
    entry: Mapping[str, Any]
    factories: Factories

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """`config` is the place of the entry; `self.entry` holds its rows and rewards."""
        super().__init__(EnvironmentConfig(**self.entry), seed=seed, name=name or config.name)
        self._client = SourceTools(self.call)
        self._standing: EpisodeTools | None = None
        self.playing: dict[str, Instance] = {}

    def take_tools(self, tools: EpisodeTools | None) -> None:
        """Take the tools that belong to no environment (the trainer's `tools`)."""
        super().take_tools(tools)
        self._standing = tools

    def tools_of(self, task: Task) -> EpisodeTools | None:
        methods_of_it = self.factories.definitions[self.factories.name(task.columns)]
        if self._standing is None:
            return EpisodeTools(self._client, tuple(methods_of_it)) if methods_of_it else None
        return EpisodeTools(
            self._client,
            (*self._standing.definitions, *methods_of_it),
            self._standing.formats,
            self._standing.max_rounds,
        )

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        """Play one rollout."""
        name = self.factories.name(task.columns)
        instance = self.factories.take(name)
        columns = dict(copy.deepcopy(dict(task.columns)))
        arguments = {
            key: value for key, value in columns.items() if name is None or key != ENVIRONMENT
        }
        episode.played = played = RewardView(columns, instance)
        shown = await _called(instance, instance.environment.reset, "reset", arguments)
        if shown is not None and not isinstance(shown, str):
            raise RolloutRejectedError(
                f"{instance!r}.reset returned {type(shown).__name__}: expected a text or None"
            )
        *before, last = task.messages
        self.playing[episode.name] = instance
        try:
            await episode.turn(
                (*before, {**last, "content": f"{last['content']}{shown or ''}"}),
            )
        finally:
            del self.playing[episode.name]
        if type(instance.environment) in self.factories.scored:
            played.metadata["get_reward"] = await _called(
                instance, instance.environment.get_reward, "get_reward", {}
            )

    async def call(
        self, name: str, arguments: Mapping[str, Any], before: CallsBefore | None
    ) -> ToolResult:
        """Call a method of the running rollout's environment, or one of the trainer's tools."""
        episode = CURRENT.get()
        assert episode is not None, "tools are called in episodes"
        instance = self.playing[episode.name]
        method = methods(instance.environment).get(name)
        if method is None and self._standing is not None:
            return await self._standing.client.acall(name, arguments, before=before)
        assert method is not None, "EpisodeTools knows the names"
        try:
            value = await _called(instance, method, name, arguments)
        except RolloutRejectedError as error:
            return ToolResult(str(error), error="tool")
        return bounded(name, ToolResult(value if isinstance(value, str) else as_json(value)))


def with_environments(entry: Mapping[str, Any], of: Factories) -> dict[str, Any]:
    """Return an entry of [[environments]] whose rows are played with environments."""

    class PlayedRollout(FactoryEnvironments):
        pass

    PlayedRollout.factories = of
    return played_by(PlayedRollout, entry, f"environments_of_{entry['name']}")


def played_by(source: Any, entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an entry of [[environments]] of which a class of this process plays the rows: it
    finds them in its `entry`."""
    source.entry = dict(entry)
    here = {
        key: value
        for key, value in entry.items()
        if key not in (*DATASET_KEYS, *SCORING_KEYS, "data")
    }
    return here | {"kind": reference_to(source, name)}


def rewards_of(of: Factories) -> tuple[list[Callable[..., Any]], list[str]]:
    """Return the rewards that environments give themselves, one for each class, and their names."""

    def reward_of(kind: type) -> Callable[..., Any]:
        def get_reward(trajectories: Sequence[Any], **_: Any) -> list[Any]:
            return [
                t.metadata["get_reward"]
                if type(t.metadata["environments"].environment) is kind
                else None
                for t in trajectories
            ]

        get_reward.__name__ = kind.__name__
        return get_reward

    return [reward_of(kind) for kind in of.scored], list(of.scored.values())


def sees_environments(function: Any) -> Any:
    """Return a reward function that gets `environments`, as TRL passes it, if it takes that."""
    parameters = inspect.signature(function).parameters if callable(function) else {}
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "environments" not in parameters and not every:
        return function

    def arguments_of(trajectories: Sequence[Any], others: Mapping[str, Any]) -> dict[str, Any]:
        instances = [t.metadata["environments"].environment for t in trajectories]
        values = {**others, "trajectories": trajectories, "environments": instances}
        return {name: value for name, value in values.items() if every or name in parameters}

    if is_async(function):

        async def scored_later(trajectories: Sequence[Any], **others: Any) -> Any:
            return await function(**arguments_of(trajectories, others))

        scored: Any = scored_later
    else:

        def scored_now(trajectories: Sequence[Any], **others: Any) -> Any:
            return function(**arguments_of(trajectories, others))

        scored = scored_now
    scored.__name__ = name_of(function)
    return scored


def methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an environment that are tools, by name, as TRL finds them."""
    return {
        name: getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if name not in NOT_TOOLS and not name.startswith("_")
    }


async def _called(
    instance: Instance, method: Callable[..., Any], what: str, arguments: Mapping[str, Any]
) -> Any:
    """Call a method of an instance, a plain one on a thread. Raises RolloutRejectedError.

    The thread holds the instance: if the episode is cut off meanwhile, it is not free before the
    method returns.
    """
    with user_code(f"environment_factory: {what}", RolloutRejectedError):
        if is_async(method):
            return await method(**arguments)
        return await asyncio.to_thread(lambda _held: method(**arguments), instance)
