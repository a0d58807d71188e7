"""The registry of environment kinds: makes a source from a configured kind or from the user's
class."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from mlx_parallm.config.environment import SCORING_KEYS, EnvironmentConfig, unique_names
from mlx_parallm.config.leaves import imported, leaves
from mlx_parallm.environments.base import AnyEnvironment, EnvironmentSource
from mlx_parallm.environments.curriculum.order import with_curriculum
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.state import BaseEnvironment, construct
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import did_you_mean, is_reference, load, user_code
from mlx_parallm.rewards.functions import TrainingProgress

ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "dataset": "dataset:DatasetSource",
        "tasks": "tasks:TasksSource",
        "reasoning_gym": "reasoning_gym:ReasoningGymSource",
        "simple_text": "simple_text:SimpleTextEnvironment",
        "conversation": "conversation:ConversationEnvironment",
        "svrl": "svrl:SVRLEnvironment",
        "gymnasium": "gymnasium:GymnasiumEnvironment",
        "tools": "tools:ToolsEnvironment",
        **{kind: place for leaf in leaves() for kind, place in leaf.environments.items()},
    }
)
"""Kinds and their classes, each imported on demand, since some need further packages."""
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
        if is_reference(config.kind):
            cls = _user_class(config)
            with user_code(f"environments: {config.kind}"):
                source = with_curriculum(config, partial(cls.from_entry, seed=seed, name=name))
        else:
            cls = class_of(config.kind)
            source = with_curriculum(config, partial(cls.from_entry, seed=seed, name=name))
        source.progress = progress
        source.take_tools(tools)
        if config.kind == "tools" and source.tools is None and config.tools != ():
            raise ConfigError(
                'kind = "tools" needs tools: set [[tools.mcp]] or tools.functions (docs/tools.md)'
            )
        sources.append(source)
    return tuple(sources)


def create_environment(kind: str, **options: Any) -> BaseEnvironment:
    """Make an environment of a kind, such as "simple_text". Raises ConfigError: no such kind, or
    an option that it does not have."""
    cls, what = class_of(kind), f"create_environment({kind!r})"
    if not issubclass(cls, BaseEnvironment):
        raise ConfigError(
            f"{what}: an episode of this kind is played with an engine; put it into"
            " [[environments]]"
        )
    return construct(cls, options, what)


def class_of(kind: str) -> type[AnyEnvironment]:
    """Return the class of a kind of `ENVIRONMENTS`. Raises ConfigError: no such kind."""
    if kind not in ENVIRONMENTS:
        raise _unknown(kind)
    place = ENVIRONMENTS[kind]
    whole = place if place.startswith("mlx_parallm.") else f"{__package__}.kinds.{place}"
    cls: type[AnyEnvironment] = imported(whole)
    return cls


def _unknown(kind: str) -> ConfigError:
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
        f"environments: unknown kind {kind!r}{did_you_mean(kind, list(ENVIRONMENTS)) or '.'} There"
        f' are: {", ".join(ENVIRONMENTS)}, and "python:file.py:Class"'
    )


def _user_class(config: EnvironmentConfig) -> type[AnyEnvironment]:
    """Return a class of the user's. Raises ConfigError: it is no environment, or one that cannot
    work."""
    cls, what = load(config.kind, "environments: kind"), f"environments: kind: {config.kind}"
    if not isinstance(cls, type) or not issubclass(cls, BaseEnvironment | EnvironmentSource):
        raise ConfigError(
            f"{what} is a subclass neither of mlx_parallm.environments.state.BaseEnvironment nor of"
            " mlx_parallm.environments.base.EnvironmentSource"
        )
    cls.check_class(what)
    wrong = config.model_dump(include=set(SCORING_KEYS), exclude_defaults=True)
    if wrong and issubclass(cls, EnvironmentSource):
        raise ConfigError(
            f"{what} is an EnvironmentSource, which scores its tasks"
            f" itself: {min(wrong)} has no effect"
        )
    return cls
