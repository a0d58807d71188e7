"""The registry of environment kinds: makes a source from a configured kind or from the user's
class."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from mlx_parallm.config.environment import SCORING_KEYS, EnvironmentConfig, unique_names
from mlx_parallm.config.leaves import imported, leaves
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.environments.kinds.reasoning_gym import ReasoningGymSource
from mlx_parallm.environments.kinds.tasks import TasksSource
from mlx_parallm.environments.state import BaseEnvironment
from mlx_parallm.environments.state_source import StateSource, check_environment
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import (
    check_call,
    did_you_mean,
    is_reference,
    load,
    user_code,
)
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress

KINDS: Mapping[str, Callable[..., EnvironmentSource]] = MappingProxyType(
    {"dataset": DatasetSource, "tasks": TasksSource, "reasoning_gym": ReasoningGymSource}
)
ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "simple_text": "simple_text:SimpleTextEnvironment",
        "conversation": "conversation:ConversationEnvironment",
        "svrl": "svrl:SVRLEnvironment",
        "gymnasium": "gymnasium:GymnasiumEnvironment",
        "tools": "tools:ToolsEnvironment",
        **{kind: place for leaf in leaves() for kind, place in leaf.environments.items()},
    }
)
"""Kinds imported on demand, since some need further packages: each a `BaseEnvironment`, or, in a
leaf, an `EnvironmentSource`."""
SEPARATE_PROCESS = "verifiers"
"""A name that people try as a kind; such an environment runs in its own process."""


def build_sources(
    configs: Sequence[EnvironmentConfig],
    *,
    seed: int,
    progress: Callable[[], TrainingProgress] = TrainingProgress,
    tools: EpisodeTools | None = None,
) -> tuple[EnvironmentSource, ...]:
    """Make one source for each [[environments]] entry, in their order; a repeated name becomes
    "name#2".

    Args:
        progress: tells reward functions how far the training is.
        tools: those of the configuration, for all of the sources.

    Raises ConfigError: an unknown kind (the message lists the known ones), or options that the
    source itself refuses.
    """
    sources = []
    for config, name in zip(configs, unique_names(configs), strict=True):
        make = _user_class(config) if is_reference(config.kind) else _builtin(config.kind)
        with (
            user_code(f"environments: {config.kind}")
            if is_reference(config.kind)
            else nullcontext()
        ):
            source = make(config, seed=seed, name=name)
        source.progress = progress
        source.use_tools(tools)
        if config.kind == "tools" and source.tools is None and config.tools != ():
            raise ConfigError(
                'kind = "tools" needs tools: set [[tools.mcp]] or tools.functions (docs/tools.md)'
            )
        sources.append(source)
    return tuple(sources)


def create_environment(kind: str, **options: Any) -> BaseEnvironment:
    """Make an environment of a kind, such as "simple_text". Raises ConfigError: no such kind, or
    an option that it does not have."""
    environment = _environment(kind)
    return _construct(environment, options, f"create_environment({kind!r})")


def _builtin(kind: str) -> Callable[..., EnvironmentSource]:
    if kind in ENVIRONMENTS:
        cls = class_of(kind)
        if issubclass(cls, EnvironmentSource):
            return cls
        return functools.partial(_state_source, cls)
    if kind not in KINDS:
        raise _unknown(kind, [*KINDS, *ENVIRONMENTS])
    return KINDS[kind]


def class_of(kind: str) -> type[BaseEnvironment] | type[EnvironmentSource]:
    """Return the class of a kind of `ENVIRONMENTS`."""
    place = ENVIRONMENTS[kind]
    whole = place if place.startswith("mlx_parallm.") else f"{__package__}.kinds.{place}"
    cls: type[BaseEnvironment] | type[EnvironmentSource] = imported(whole)
    return cls


def _environment(kind: str) -> type[BaseEnvironment]:
    if kind not in ENVIRONMENTS:
        raise _unknown(kind, list(ENVIRONMENTS))
    cls = class_of(kind)
    if issubclass(cls, EnvironmentSource):
        raise ConfigError(
            f"create_environment({kind!r}): an episode of this kind is played with an engine; put"
            " it into [[environments]]"
        )
    return cls


def _unknown(kind: str, kinds: Sequence[str]) -> ConfigError:
    if ":" in kind:
        return ConfigError(
            f'environments: unknown kind {kind!r}; a class of yours is "python:{kind}"'
        )
    if kind == SEPARATE_PROCESS:
        return ConfigError(
            f"environments: {kind!r} is not a kind: such an environment runs in its own process"
            " and comes over HTTP"
            " (docs/environments.md#verifiers)"
        )
    return ConfigError(
        f"environments: unknown kind {kind!r}{did_you_mean(kind, kinds) or '.'} There are:"
        f" {', '.join(kinds)},"
        ' and "python:file.py:Class"'
    )


def _state_source(
    environment: type[BaseEnvironment],
    config: EnvironmentConfig,
    *,
    seed: int,
    name: str | None = None,
) -> StateSource:
    """Raises ConfigError: options that the constructor does not take, or nothing to score with."""
    what = f"environments: {config.kind}"
    scored = config.rewards or environment.default_rewards
    if not scored and not environment.rewards_turns:
        raise ConfigError(
            f"{what}: an environment does not score itself: it needs rewards ="
            ' ["python:file.py:function"]'
        )
    options = dict(config.options)
    if "seed" in inspect.signature(environment).parameters:
        options.setdefault("seed", seed)
    return StateSource(
        config,
        lambda: _construct(environment, options, what),
        seed=seed,
        name=name,
        rewards=RewardFunctions.from_config(
            config, columns=None, default=environment.default_rewards
        )
        if scored
        else RewardFunctions.none(),
    )


def _construct(
    environment: type[BaseEnvironment], options: Mapping[str, Any], what: str
) -> BaseEnvironment:
    check_call(inspect.signature(environment), (), what, keywords=tuple(options))
    with user_code(what):
        return environment(**options)


def _user_class(config: EnvironmentConfig) -> Callable[..., EnvironmentSource]:
    """Return what makes the source from a class of the user's. Raises ConfigError: it is no
    environment, or one that cannot work."""
    reference = config.kind
    cls, what = load(reference, "environments: kind"), f"environments: kind: {reference}"
    if isinstance(cls, type) and issubclass(cls, BaseEnvironment):
        check_environment(cls, what)
        return functools.partial(_state_source, cls)
    if not isinstance(cls, type) or not issubclass(cls, EnvironmentSource):
        raise ConfigError(
            f"{what} is a subclass neither of mlx_parallm.environments.state.BaseEnvironment nor of"
            " mlx_parallm.environments.base.EnvironmentSource"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"{what} does not define {', '.join(missing)}(index, split)")
    if inspect.iscoroutinefunction(cls.task):
        raise ConfigError(f"{what}.task is async; it has to be a plain function")
    check_call(inspect.signature(cls.task), ("self", "index", "split"), f"{what}.task")
    check_call(inspect.signature(cls), ("config",), what, keywords=("seed", "name"))
    if wrong := config.model_dump(include=set(SCORING_KEYS), exclude_defaults=True):
        raise ConfigError(
            f"{what} is an EnvironmentSource, which scores its tasks"
            f" itself: {min(wrong)} has no effect"
        )
    return cls
