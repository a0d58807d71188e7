"""`mlx_parallm compare`: two training runs or more, side by side. Reads only, also while they go
on. No MLX.

    Run → ComparedRun → one table (settings that differ, training, held-out problems),
    curves on common axes, and how the held-out answers of each further run differ from the first
    one's

The difference of two evaluations is that of `mlx_parallm eval --compare`: paired by problem, with
its interval.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.evaluation import comparison
from mlx_parallm.rl_training.monitor import report
from mlx_parallm.rl_training.monitor.display import headline
from mlx_parallm.rl_training.monitor.drawing import BLOCKS, began_and_now, scale_of
from mlx_parallm.runs.run import Metrics, Run, open_run
from mlx_parallm.system.terminal import Console

MOST = 26
"""Runs in one comparison: each is a letter."""
OF_THE_RUN = ("rl_training.run_name", "rl_training.checkpoint_dir", "server.port")
"""Settings that differ and say nothing about a run."""
THERE = "there"
"""Value of an entry of a list of tables, such as one environment, beside its own settings."""
CURVES = (("KL", "kl"), ("entropy", "entropy"))
CURVE_ROOM = 36
"""Characters of a line of curves besides the curve."""
FEW_POINTS = 2
HELD_OUT = "held out"
WIDEST_CURVE = 80
UNKNOWN = "–"


Settings = Mapping[str, Any]
"""A resolved configuration, flat."""


@dataclass(frozen=True)
class ComparedRun:
    """`settings`: the resolved configuration, flat; None if it cannot be read, which `fault`
    explains."""

    letter: str
    run: Run
    settings: Settings | None
    fault: str
    lines: Sequence[Metrics]
    evaluations: Sequence[Metrics]

    @property
    def name(self) -> str:
        return self.run.name

    def values(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of each step that has the number; "headline": the number that the
        run is judged by."""
        points = (
            (int(line["step"]), headline(line)[1] if key == "headline" else line.get(key))
            for line in self.lines
        )
        return [(step, float(value)) for step, value in points if isinstance(value, int | float)]

    @property
    def headline(self) -> str:
        return headline(self.lines[-1])[0] if self.lines else "reward"


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs at these paths, to be compared. Raises as `open_run` and `compared`."""
    if len(paths) > MOST:
        raise ConfigError(f"{len(paths)} runs: at most {MOST} can be compared at once")
    return compared([open_run(path) for path in paths])


def compared(runs: Sequence[Run]) -> list[ComparedRun]:
    """Raises ConfigError: a run that is named twice. CheckpointError: a damaged file."""
    for number, run in enumerate(runs):
        if any(earlier.path == run.path for earlier in runs[:number]):
            raise ConfigError(f"{run.path} is named twice")
    return [_read(chr(ord("A") + number), run) for number, run in enumerate(runs)]


def settings_of(run: Run) -> tuple[Settings | None, str]:
    """Return the resolved configuration, flat, and ""; or None and why it cannot be read."""
    try:
        return dict(_flat(run.load_config().redacted())), ""
    except ConfigError as error:
        return None, str(error)


def _read(letter: str, run: Run) -> ComparedRun:
    return ComparedRun(letter, run, *settings_of(run), run.metrics, run.evaluations)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `section.key` and value; an entry of a list of tables is called by its name, else by
    its number."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        names = [entry.get("name") for entry in value]
        for number, entry in enumerate(value):
            unique = names[number] and names.count(names[number]) == 1
            place = f"{key}.{names[number] if unique else number}"
            yield place, THERE
            yield from _flat(entry, place)
    else:
        yield key, value


def differing(runs: Sequence[Settings | None]) -> dict[str, list[str]]:
    """Return the settings whose values are not the same in all runs that have a configuration."""
    readable = [settings for settings in runs if settings is not None]
    keys = dict.fromkeys(key for settings in readable for key in settings if key not in OF_THE_RUN)
    different = [
        key
        for key in keys
        if any(_shown(settings, key) != _shown(readable[0], key) for settings in readable)
    ]
    lacking = tuple(
        f"{key}." for key in different if any(settings.get(key) == THERE for settings in readable)
    )
    different = [key for key in different if not key.startswith(lacking)]
    return {
        key: [UNKNOWN if settings is None else _shown(settings, key) for settings in runs]
        for key in different
    }


def _shown(settings: Mapping[str, Any], key: str) -> str:
    if settings.get(key) is None:
        return UNKNOWN
    return (
        settings[key]
        if isinstance(settings[key], str)
        else json.dumps(settings[key], ensure_ascii=False)
    )


# ---------------------------------------------------------------------- the table


def draw(runs: Sequence[ComparedRun]) -> Iterator[RenderableType]:
    for run in runs:
        yield Text(f"{run.letter}  ", style="bold").append(str(run.run.path), style="not bold")
    yield _table(runs)
    yield Text(
        (
            "\ncurves: the same axes for all runs with that number; the"
            " scale is beside them, from ▁ to █"
        ),
        style="bold",
    )
    yield from _curves(runs)
    yield from _differences(runs)
    for run in runs:
        if run.fault:
            yield Text(f"{run.letter}: its settings are not known: {run.fault}", style="yellow")


def _table(runs: Sequence[ComparedRun]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for run in runs:
        table.add_column(run.letter, overflow="fold")
    settings = differing([run.settings for run in runs])
    several_readable = sum(run.settings is not None for run in runs) > 1
    _section(
        table,
        "settings that differ"
        if settings
        else "no setting differs"
        if several_readable
        else "settings are not known",
    )
    for key, values in settings.items():
        table.add_row(Text(key), *map(Text, values))
    _section(table, "training")
    judged = _judged_by(runs)
    for label, value in ROWS.items():
        table.add_row(Text(label.format(judged=judged)), *(value(run) for run in runs))
    _section(table, "held out, at the last evaluation [95% interval]")
    last = [run.evaluations[-1] if run.evaluations else None for run in runs]
    table.add_row("step", *(UNKNOWN if line is None else str(line["step"]) for line in last))
    for environment in dict.fromkeys(
        name for line in last if line for name in line["environments"]
    ):
        numbers = [
            (line or {}).get("environments", {}).get(environment, {}).get("numbers", {})
            for line in last
        ]
        for metric in dict.fromkeys(
            key.removesuffix("_low") for row in numbers for key in row if key.endswith("_low")
        ):
            if metric != "reward" or any(
                row.get("reward") != row.get("accuracy") for row in numbers
            ):
                table.add_row(
                    Text(f"{environment} {metric}"),
                    *(_with_interval(row, metric) for row in numbers),
                )
    return table


def _section(table: Table, title: str) -> None:
    if table.row_count:
        table.add_row("")
    table.add_row(Text(title, style="bold"))


def _with_interval(numbers: Metrics, metric: str) -> str:
    if f"{metric}_low" not in numbers:
        return UNKNOWN
    value, low, high = (numbers[f"{metric}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _steps(run: ComparedRun) -> str:
    of = "" if run.run.total_steps is None else f" of {run.run.total_steps}"
    ended = "" if run.run.ended is None else f" ({run.run.ended})"
    return f"{run.run.steps}{of}, {run.run.state}{ended}"


def _judged_by(runs: Sequence[ComparedRun]) -> str:
    return " / ".join(dict.fromkeys(run.headline for run in runs))


def _best(run: ComparedRun) -> str:
    """Return the highest mean of as many steps as `began_and_now` takes together: a single step
    may be lucky."""
    points = run.values("headline")
    if not points:
        return UNKNOWN
    *_, count = began_and_now([value for _, value in points])
    means = [
        (math.fsum(value for _, value in points[end - count : end]) / count, points[end - 1][0])
        for end in range(count, len(points) + 1)
    ]
    best, step = min(means) if run.headline == "loss" else max(means)
    return f"{best:.3f} (to step {step})"


def _began_to_now(points: Sequence[tuple[int, float]], decimals: int) -> str:
    if not points:
        return UNKNOWN
    began, now, _ = began_and_now([value for _, value in points])
    return f"{_fixed(began, decimals)} → {_fixed(now, decimals)}"


def _fixed(value: float, decimals: int) -> str:
    """Return the number with so many decimals; one that would read as 0 in powers of ten:
    0.00003 → "3.0e-05"."""
    text = f"{value:.{decimals}f}"
    return f"{value:.1e}" if value and float(text) == 0 else text


def _total(run: ComparedRun, *keys: str) -> float:
    return math.fsum(value for key in keys for _, value in run.values(key))


def _wall_time(run: ComparedRun) -> str:
    seconds = _total(run, "time_rollout_s", "time_train_s", "time_publish_s")
    return f"{seconds:,.0f} s ({seconds / len(run.lines):.3g} a step)" if run.lines else UNKNOWN


ROWS: Mapping[str, Callable[[ComparedRun], str]] = {
    "steps": _steps,
    "{judged}, began → now": lambda run: _began_to_now(run.values("headline"), 3),
    "{judged}, best": _best,
    "KL, began → now": lambda run: _began_to_now(run.values("kl"), 4),
    "entropy, began → now": lambda run: _began_to_now(run.values("entropy"), 3),
    "tokens trained": lambda run: f"{_total(run, 'tokens'):,.0f}",
    "updates": lambda run: f"{_total(run, 'optimizer_updates'):,.0f}",
    "time of the steps": _wall_time,
}


# ---------------------------------------------------------------------- curves


def _curves(runs: Sequence[ComparedRun]) -> Iterator[RenderableType]:
    width = max(10, min(Console().width - CURVE_ROOM, WIDEST_CURVE))
    drawn: list[tuple[str, list[tuple[ComparedRun, list[tuple[int, float]]]]]] = [
        (judged, [(run, run.values("headline")) for run in runs if run.headline == judged])
        for judged in dict.fromkeys(run.headline for run in runs)
    ]
    drawn.append((HELD_OUT, [(run, _scores(run)) for run in runs]))
    drawn += [(label, [(run, run.values(key)) for run in runs]) for label, key in CURVES]
    grid = Table.grid(padding=(0, 1))
    for _ in range(5):
        grid.add_column(no_wrap=True)
    for label, series in drawn:
        every = [point for _, points in series for point in points]
        values = [value for _, value in every]
        ends = (
            (min(values, default=0.0), max(values, default=0.0))
            if label in dict(CURVES)
            else scale_of(values)
        )
        if every:
            _add_curves(grid, label, series, every, ends, width)
    yield grid


def _scores(run: ComparedRun) -> list[tuple[int, float]]:
    return [(int(line["step"]), float(line["score"])) for line in run.evaluations]


def _add_curves(
    grid: Table,
    label: str,
    series: Sequence[tuple[ComparedRun, Sequence[tuple[int, float]]]],
    every: Sequence[tuple[int, float]],
    ends: tuple[float, float],
    width: int,
) -> None:
    """Add the rows of one number: a row for each run, with the label and the scale before them."""
    scale = f"{ends[0]:.2g} to {ends[1]:.2g}"
    names = [label, scale] if len(series) > 1 else [f"{label}, {scale}"]
    for number, (run, points) in enumerate(series):
        values = [value for _, value in points]
        began, now = (
            (_fixed(end, 3) for end in began_and_now(values)[:2]) if values else ("", UNKNOWN)
        )
        name = names[number] if number < len(names) else ""
        # A line through two points would be flat and then jump: print the steps.
        few = Text(", ".join(f"step {step}: {value:.3f}" for step, value in points), style="dim")
        line = (
            few
            if label == HELD_OUT and len(points) <= FEW_POINTS
            else curve(points, every, ends, width)
        )
        grid.add_row(Text(name), run.letter, began, line, now)


def curve(
    points: Sequence[tuple[int, float]],
    every: Sequence[tuple[int, float]],
    ends: tuple[float, float],
    width: int,
) -> str:
    """Draw (step, value) as block characters between the `ends`, ▁ and █, in the steps of `every`
    point.

    A character is the mean of its steps, or the one before if the run has none there: one for
    each step, at most `width`. [(1, 0), (3, 1)] of [(1, 0), (3, 1), (4, 1)] from 0 to 1 in 4
    characters: "▁▁█ ".
    """
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    low, high = ends
    width = min(width, last - first + 1)
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        columns[min(width - 1, (step - first) * width // (last - first + 1))].append(value)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    means = [math.fsum(values) / len(values) if values else None for values in columns]
    drawn = [" " if mean is None else BLOCKS[round((mean - low) * scale)] for mean in means]
    for column in range(1, len("".join(drawn).rstrip())):
        drawn[column] = drawn[column - 1] if means[column] is None else drawn[column]
    return "".join(drawn)


def write_png(runs: Sequence[ComparedRun], path: Path) -> None:
    """Draw the curves of all runs over each other. Raises ConfigError: nothing to draw; the file
    cannot be written."""
    series = {
        f"{run.letter}: {run.name}": [
            {**line, "reward_mean": headline(line)[1]} for line in run.lines
        ]
        for run in runs
    }
    judged = dict(zip(series, (run.headline for run in runs), strict=True))
    try:
        report.write_curves(series, path, title="runs compared", judged=judged)
    except ValueError as error:
        raise ConfigError(f"--png {path}: no run has made a step: nothing to draw") from error
    except OSError as error:
        raise ConfigError(f"--png {path}: {error.strerror or error}") from error


# ---------------------------------------------------------------------- differences


def _differences(runs: Sequence[ComparedRun]) -> Iterator[RenderableType]:
    """Compare the last evaluation of each run with that of the first run that has one."""
    evaluated = [run for run in runs if run.evaluations]
    for run in evaluated[1:]:
        first = evaluated[0]
        comparisons = comparison.compare(first.evaluations[-1], run.evaluations[-1])
        yield Text("")
        if not comparisons:
            yield Text(
                f"{first.letter} and {run.letter} answered no held-out"
                " problem in common: not comparable"
            )
            continue
        steps = ", ".join(
            f"{one.letter} after step {one.evaluations[-1]['step']}" for one in (first, run)
        )
        letters = (first.letter, run.letter, f"{run.letter} - {first.letter}")
        yield comparison.accuracy_table(
            comparisons, f"held-out problems that both answered ({steps})", letters
        )
        yield Text(comparison.verdict(comparisons, first.letter, run.letter))
