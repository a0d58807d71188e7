"""`RowDraws` of an environment and of a run: the draws of a data set's rows, their file in the
run's directory, and their numbers in metrics.jsonl."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.curriculum.draws import RowDraws
from mlx_parallm.environments.curriculum.log import DRAWS_FILE, DrawLog
from mlx_parallm.environments.dataset_rows import DataRow, measured_rates
from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.system.log import get_logger

log = get_logger("environments")


class RowSource(Protocol):
    """The part of an `EnvironmentSource` with rows that `draws_of_rows` uses."""

    config: EnvironmentConfig
    name: str
    seed: int
    rewards: RewardFunctions


def draws_of_rows(source: RowSource, rows: Sequence[DataRow]) -> RowDraws | None:
    """Return the draws of an environment's training rows; None: it has none, for it is evaluated
    alone. Raises ConfigError: no such reward, or a bad pass rate."""
    config, names = source.config, source.rewards.names
    if not rows:
        return None
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


def keep_draws(run: Path, draws: Iterable[RowDraws | None]) -> None:
    """Let draws continue where the run in a directory has left them, and keep them there. Raises
    CheckpointError: a damaged file, or one of other rows."""
    by_name = {each.environment: each for each in draws if each is not None}
    kept = DrawLog(run / DRAWS_FILE)
    others: Counter[str] = Counter()
    for _, entry in kept.read() if by_name else ():
        if entry["environment"] in by_name:
            by_name[entry["environment"]].replay(entry)
        else:
            others[entry["environment"]] += 1
    for name, entries in others.items():
        log.info("draws of an environment that draws no rows now", environment=name, lines=entries)
    for each in by_name.values():
        each.continue_in(kept)


def row_numbers(draws: Iterable[RowDraws | None]) -> dict[str, Any]:
    """Return the numbers of a metrics line about the rows that are drawn; nothing if none are."""
    kinds = {each.environment: asdict(each.kinds()) for each in draws if each is not None}
    if not kinds:
        return {}
    names = next(iter(kinds.values()))
    totals = {f"rows_{name}": sum(counts[name] for counts in kinds.values()) for name in names}
    return totals | {"rows_by_environment": kinds}
