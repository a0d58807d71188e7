"""kind → source: the one list of environment kinds."""

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mlx_parallm.config import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.builtin import TasksSource
from mlx_parallm.environments.reasoning_gym_env import ReasoningGymSource
from mlx_parallm.errors import ConfigError

KINDS: Mapping[str, Callable[..., EnvironmentSource]] = MappingProxyType(
    {"tasks": TasksSource, "reasoning_gym": ReasoningGymSource}
)


def build_sources(configs: Sequence[EnvironmentConfig], *, seed: int) -> tuple[EnvironmentSource, ...]:
    """One source for each [[environments]] entry, in their order; a name that comes again becomes "name#2".

    Raises ConfigError: an unknown kind (the message names the known ones), or what the source itself refuses.
    """
    seen: Counter[str] = Counter()
    sources = []
    for config in configs:
        if config.kind not in KINDS:
            near = difflib.get_close_matches(config.kind, KINDS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"environments: unknown kind {config.kind!r}; did you mean {near!r}? There are: {', '.join(KINDS)}"
            )
        seen[config.name] += 1
        name = config.name if seen[config.name] == 1 else f"{config.name}#{seen[config.name]}"
        sources.append(KINDS[config.kind](config, seed=seed, name=name))
    return tuple(sources)
