"""kind → source: the one list of environment kinds, and the user's own classes."""

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType

from mlx_parallm.config import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.builtin import TasksSource
from mlx_parallm.environments.dataset import DatasetSource
from mlx_parallm.environments.reasoning_gym_env import ReasoningGymSource
from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.user_code import check_call, is_reference, load, user_code

KINDS: Mapping[str, Callable[..., EnvironmentSource]] = MappingProxyType(
    {"dataset": DatasetSource, "tasks": TasksSource, "reasoning_gym": ReasoningGymSource}
)


def build_sources(
    configs: Sequence[EnvironmentConfig], *, seed: int, progress: Callable[[], TrainingProgress] = TrainingProgress
) -> tuple[EnvironmentSource, ...]:
    """One source for each [[environments]] entry, in their order; a name that comes again becomes "name#2".

    `progress` is what reward functions are told of the training.

    Raises ConfigError: an unknown kind (the message names the known ones), or what the source itself refuses.
    """
    seen: Counter[str] = Counter()
    sources = []
    for config in configs:
        make = _own_class(config.kind) if is_reference(config.kind) else _known(config.kind)
        seen[config.name] += 1
        name = config.name if seen[config.name] == 1 else f"{config.name}#{seen[config.name]}"
        with user_code(f"environments: {config.kind}") if is_reference(config.kind) else nullcontext():
            source = make(config, seed=seed, name=name)
        source.progress = progress
        sources.append(source)
    return tuple(sources)


def _known(kind: str) -> Callable[..., EnvironmentSource]:
    if kind not in KINDS:
        if ":" in kind:
            raise ConfigError(f'environments: unknown kind {kind!r}; a class of yours is "python:{kind}"')
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"environments: unknown kind {kind!r}; did you mean {near!r}? There are: {', '.join(KINDS)},"
            ' and "python:file.py:Class"'
        )
    return KINDS[kind]


def _own_class(reference: str) -> type[EnvironmentSource]:
    """A subclass of EnvironmentSource of the user's. Raises ConfigError: it is none, or is one that cannot work."""
    own = load(reference, "environments: kind")
    if not isinstance(own, type) or not issubclass(own, EnvironmentSource):
        raise ConfigError(
            f"environments: kind: {reference} is not a subclass of mlx_parallm.environments.base.EnvironmentSource"
        )
    if missing := sorted(own.__abstractmethods__):
        raise ConfigError(f"environments: kind: {reference} does not define {', '.join(missing)}(index, split)")
    if inspect.iscoroutinefunction(own.task):
        raise ConfigError(f"environments: kind: {reference}.task is async; it has to be a plain function")
    check_call(inspect.signature(own.task), ("self", "index", "split"), f"environments: kind: {reference}.task")
    check_call(inspect.signature(own.environment), ("self", "task"), f"environments: kind: {reference}.environment")
    what = f"environments: kind: {reference}"
    check_call(inspect.signature(own), ("config",), what, keywords=("seed", "name"))
    return own
