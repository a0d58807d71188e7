"""`with_curriculum`: what an [[environments]] entry says of the order of its tasks (`curriculum`,
`levels`) becomes the order of its rows, or the draws of its source."""

import json
from collections.abc import Callable, Sequence

from mlx_parallm.config.environment import PASS_RATE, EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.curriculum.draws import RowDraws
from mlx_parallm.environments.curriculum.levels import LevelsSource
from mlx_parallm.environments.dataset_rows import Arrange, DataRow
from mlx_parallm.environments.kinds.dataset import DatasetSource
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.files import is_directory, local_path


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
            rows.arrange = _easy_first(config, rows.train)
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
        rates=_measured_rates(config, rows),
    )


def _easy_first(config: EnvironmentConfig, rows: Sequence[DataRow]) -> Arrange:
    """Return the order of an epoch: the highest pass rate first, rows without one last. Raises
    ConfigError: no row has one."""
    measured = _measured_rates(config, rows)
    if all(rate is None for rate in measured):
        where = (
            f"{config.data} has no column {PASS_RATE!r}"
            if config.pass_rates is None
            else "none is of its prompts"
        )
        raise ConfigError(
            f'environments: curriculum = "easy_first" needs pass rates, but {where}:'
            " measure them with"
            " `mlx_parallm eval --output DIR` on these rows (heldout_fraction = 1) and set"
            " pass_rates = DIR"
        )
    ease = [-1.0 if rate is None else rate for rate in measured]
    return lambda order, source: sorted(order, key=ease.__getitem__, reverse=True)


def _measured_rates(config: EnvironmentConfig, rows: Sequence[DataRow]) -> list[float | None]:
    """Return the pass rate of each row, measured before; None: it was not. Raises ConfigError."""
    if config.pass_rates is None:
        return [_of_its_column(row) for row in rows]
    return _of_results(config.pass_rates, rows)


def _of_its_column(row: DataRow) -> float | None:
    rate = row.columns.get(PASS_RATE)
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigError(
            f"environments: {row.where}: column {PASS_RATE!r} is {rate!r};"
            " expected a number from 0 to 1"
        )
    return float(rate)


def _of_results(results: str, rows: Sequence[DataRow]) -> list[float | None]:
    """The mean reward of the rows' prompts, by an evaluation: of its sampled answers, else of
    the greedy one."""
    file = local_path(results)
    file = file / "results.json" if is_directory(file) else file
    try:
        environments = json.loads(file.read_text(encoding="utf-8"))["environments"].values()
        problems = [problem for environment in environments for problem in environment["problems"]]
        answers = {p["key"].rpartition(":")[2]: p["sampled"] or [p["greedy"]] for p in problems}
        scored = {key: [r for r in rewards if r is not None] for key, rewards in answers.items()}
        rates = {key: sum(map(float, r)) / len(r) for key, r in scored.items() if r}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"environments: pass_rates = {results!r}: these are not results of `mlx_parallm"
            f" eval` ({error})"
        ) from error
    row_rates = [rates.get(row.key) for row in rows]
    for row, rate in zip(rows, row_rates, strict=True):
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigError(
                f"environments: pass_rates = {results!r}: the rewards of a prompt have the mean"
                f" {rate:g}; a pass rate"
                f" is from 0 to 1, so evaluate with a reward that is ({str(row.prompt)[:80]!r})"
            )
    return row_rates
