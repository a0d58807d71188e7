"""`with_curriculum`: what an [[environments]] entry says of the order of its tasks (`curriculum`,
`levels`) becomes the order of its rows, or the draws of its source."""

from collections.abc import Callable

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.curriculum.draws import RowDraws
from mlx_parallm.environments.curriculum.levels import LevelsSource
from mlx_parallm.environments.curriculum.order import easy_first, measured_rates
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.errors import ConfigError


def with_curriculum(
    config: EnvironmentConfig, make: Callable[[EnvironmentConfig], EnvironmentSource]
) -> EnvironmentSource:
    """Make the source of an entry, of all its levels if it has any. Raises ConfigError: as `make`
    does, for the level that it names; a bad pass rate, or no such reward."""
    if config.levels:
        levels = range(len(config.levels))
        return LevelsSource(config, [_level(config, number, make) for number in levels])
    source = make(config)
    if isinstance(source, DatasetSource) and config.curriculum != "none" and source.rows.train:
        rows = source.rows
        if config.curriculum == "easy_first":
            rows.arrange = easy_first(config, rows.train)
        else:
            source.draws = _draws(source)
            rows.arrange = lambda order, _: sorted(order)  # the draws name the row of each group
    return source


def _level(
    config: EnvironmentConfig, number: int, make: Callable[[EnvironmentConfig], EnvironmentSource]
) -> EnvironmentSource:
    options = config.options | config.levels[number]
    try:
        return make(config.model_copy(update={"options": options}))
    except ConfigError as error:
        raise ConfigError(f"environments: {config.name}: levels[{number}]: {error}") from error


def _draws(source: DatasetSource) -> RowDraws:
    config, rows, names = source.config, source.rows.train, source.rewards.names
    if not names or config.adaptive.reward not in ("reward", *names):
        raise ConfigError(
            f'environments: {source.name}: curriculum = "adaptive" goes by the reward'
            f" {config.adaptive.reward!r} (adaptive.reward), and there is no reward"
            f" {config.adaptive.reward!r}; there are: {', '.join(names) or 'none'}"
        )
    return RowDraws(
        source.name,
        [row.key for row in rows],
        config.adaptive,
        group_size=config.group_size,
        seed=source.seed,
        rates=measured_rates(config, rows),
    )
