"""The report at the end of a run: the reward curve as a PNG, the same prompts before and after,
and what to do next."""

import itertools
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from mlx_parallm.rl_training.evaluation.comparison import (
    BEFORE,
    Comparison,
    Line,
    accuracy_table,
    answers_table,
    plain_report,
)
from mlx_parallm.rl_training.monitor.drawing import by_option, command_lines
from mlx_parallm.rl_training.monitor.health import find
from mlx_parallm.system.log import words_of
from mlx_parallm.system.terminal import Console

SMOOTHING = 10  # steps on each side of a mean, fewer in a short run
SHOWN = 60  # characters of a text
FEWER = 0.1
"""A larger share of steps without all their rollouts is worth a word; one in quickstart's 180 is
not."""
INK, RAW, SECOND, THIRD = "#1b3a57", "#9dbad5", "#b3541e", "#4b7f52"
INKS = (INK, SECOND, THIRD, "#7a4b94", "#c49a1a", "#3a8c9e", "#a83250", "#6b6b6b")
"""Colours of several runs."""


def write_reward_curve(metrics: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> Path:
    """Draw `reward_mean` over the steps, raw and smoothed, with KL and entropy below; replace
    `path` atomically.

    Raises ValueError: no step has a reward. OSError: `path` cannot be written.
    """
    return write_curves({"": metrics}, path, title=title)


def write_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path,
    *,
    title: str,
    judged: Mapping[str, str] | None = None,
) -> Path:
    """Draw the same of several runs over each other, each in its colour.

    `judged`: what `reward_mean` is in each run; runs with different ones are drawn on axes of their
    own.
    """
    points = {name: _series(metrics, "reward_mean") for name, metrics in runs.items()}
    if not any(steps for steps, _ in points.values()):
        raise ValueError("no step has a reward_mean: nothing to draw")
    from matplotlib.figure import Figure  # here, because it takes a second and only this needs it

    labels = {
        name: (judged or {}).get(name, "mean reward of the rollouts")
        for name in runs
        if points[name][0]
    }
    rows = list(dict.fromkeys(labels.values()))
    figure = Figure(figsize=(9, 3 + 3 * len(rows)), dpi=120, layout="constrained")
    grid = figure.add_gridspec(len(rows) + 1, 2, height_ratios=(*[3] * len(rows), 1.2))
    window = min(SMOOTHING, max(1, max(len(steps) for steps, _ in points.values()) // 8))
    alone = len(runs) == 1
    inks = dict(zip(runs, itertools.cycle(INKS), strict=False))
    for row, judged_by in enumerate(rows):
        top = figure.add_subplot(grid[row, :])
        shown = {name: points[name] for name, label in labels.items() if label == judged_by}
        for name, (steps, values) in shown.items():
            label = f"mean of ±{window} steps" if alone else name
            raw = (
                {"color": RAW, "label": "each step"}
                if alone
                else {"color": inks[name], "alpha": 0.25}
            )
            top.plot(steps, values, linewidth=1, **raw)
            top.plot(steps, smooth(values, window), color=inks[name], linewidth=2.4, label=label)
        top.set_title(
            "" if row else title, loc="left", fontsize=13, fontweight="bold", parse_math=False
        )
        top.set_ylabel(judged_by, parse_math=False)
        top.set_xlabel("training step")
        if all(0 <= value <= 1 for _, values in shown.values() for value in values):
            top.set_ylim(-0.02, 1.02)
        for text in top.legend(frameon=False, loc="best").get_texts():
            text.set_parse_math(False)
    for position, (key, label, color) in enumerate(
        (
            ("kl", "KL to the reference\n(nats a token)", SECOND),
            ("entropy", "entropy\n(nats a token)", THIRD),
        )
    ):
        small = figure.add_subplot(grid[1, position])
        curves = {name: _series(metrics, key) for name, metrics in runs.items()}
        for name, (x, y) in curves.items():
            small.plot(x, y, color=color if alone else inks[name], linewidth=1.4)
        small.set_ylabel(label, fontsize=9)
        small.set_xlabel("training step", fontsize=9)
        if not any(x for x, _ in curves.values()):
            small.text(
                0.5,
                0.5,
                "not measured",
                ha="center",
                va="center",
                transform=small.transAxes,
                color="grey",
            )
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving mean over up to `window` neighbours on each side."""
    return [
        sum(part) / len(part)
        for part in (
            values[max(0, position - window) : position + window + 1]
            for position in range(len(values))
        )
    ]


def problems_of(lines: Sequence[Line], run: Path) -> list[str]:
    """Return faults of a run that ends here, in its last steps or in how its steps were
    filled."""
    problems = [
        f"{diagnosis}; see {diagnosis.page}"
        for diagnosis in find(lines, lines)
        if not diagnosis.good
    ]
    full_reasons = {
        words_of(line["gave_up"]): line["gave_up"] for line in lines if line.get("gave_up")
    }
    reasons = Counter(words_of(line["gave_up"]) for line in lines if line.get("gave_up"))
    for reason, count in reasons.most_common(1) if reasons.total() > FEWER * len(lines) else ():
        problems.append(
            f"{reasons.total()} of {len(lines)} steps had fewer rollouts, {count} because of:"
            f" {full_reasons[reason]}"
        )
    if not has_trained(lines) and lines:
        nothing = f"nothing was learned: none of the {len(lines)} steps has changed the weights"
        problems[:1] = ["; ".join([nothing, *problems[:1]])]
    if not problems:
        return []
    others = f"{len(problems) - 1} more, and the steps" if len(problems) > 1 else "the steps"
    return [*problems, f"{others}: {our_command()} explain {shlex.quote(str(run))}"]


def has_trained(lines: Sequence[Line]) -> bool:
    """Return whether any step has changed the weights."""
    return any(line.get("optimizer_updates") for line in lines)


def successes_of(lines: Sequence[Line]) -> list[str]:
    """Return successes of a run that ends here: it has learned its task."""
    return [str(diagnosis) for diagnosis in find(lines, lines) if diagnosis.good]


def our_command() -> str:
    """Return how a shell runs `mlx_parallm`: its name if it is on PATH, else the path beside
    this Python."""
    name = "mlx_parallm"
    beside = Path(sys.executable).parent / name
    return (
        name if shutil.which(name) or not beside.exists() else shlex.quote(os.path.relpath(beside))
    )


def next_commands(run_dir: Path, base_path: str, *, lora: bool, scores: bool = False) -> list[str]:
    """Return shell commands that serve or merge the result of a run. `scores`: it is a reward
    model, which a server has beside the model that it answers with."""
    final, base = shlex.quote(str(run_dir / "final")), shlex.quote(base_path)
    if scores:
        run = shlex.quote(str(run_dir))
        return [f"{our_command()} serve --model-path {base} --reward-model {run}"]
    if not lora:
        return [f"{our_command()} serve --model-path {final}"]
    merged = shlex.quote(str(run_dir / "merged"))
    return [
        f"{our_command()} serve --model-path {base} --lora-path {final}",
        f"{our_command()} merge --base-model {base} --lora-path {final} --output-path {merged}",
    ]


def print_report(
    console: Console,
    comparisons: Sequence[Comparison],
    commands: Sequence[str],
    curve: Path | None,
    samples: Path | None = None,
    problems: Sequence[str] = (),
    successes: Sequence[str] = (),
    *,
    first: str = BEFORE,
    results: str | None = None,
) -> None:
    """Print the report. In a terminal no line breaks inside a word, and a command in several lines
    can be pasted.

    Args:
        commands: what to do next; the first is printed.
        problems: faults of the run, a sentence each, the last one names the page to read; the
            first and the last are printed. successes: a sentence each.
        first: when the earlier answers of `comparisons` were given.
        results: the numbers of held-out rows, if a run learned from rows.
    """
    if results is not None:
        console.print(Text(results), soft_wrap=not console.is_terminal)
    if comparisons:
        if console.is_terminal:
            console.print(answers_table(comparisons, first))
            columns = (first, "after" if first == BEFORE else "at the end", "change")
            console.print(accuracy_table(comparisons, columns=columns))
        else:
            console.print(
                plain_report(comparisons, first), soft_wrap=True, markup=False, highlight=False
            )
    # one finding: the gravest, and the line that says where the others are
    shown = [*problems[:1], *problems[1:][-1:]]
    doubts = [f"{row.environment}: {row.doubt}" for row in comparisons if row.doubt]
    if console.is_terminal:  # `plain_report` has them
        shown = [*doubts, *shown]
    sentences = [(success, "bold green") for success in successes if not doubts] + [
        (problem, "bold red") for problem in shown
    ]
    for sentence, style in sentences:
        console.print(Text(sentence, style=style), soft_wrap=not console.is_terminal)
    for name, file in (("reward curve", curve), ("samples", samples)):
        if file is not None:
            _print_whole(console, f"{name}:", [str(file)])
    for command in commands[:1]:
        _print_whole(console, "next:", by_option(command))


def _print_whole(console: Console, lead: str, parts: Sequence[str]) -> None:
    """Print a path or the parts of a command behind `lead`, or below it if they are too wide
    for the terminal."""
    line = f"{lead} {' '.join(parts)}"
    if console.is_terminal and cell_len(line) > console.width:
        line = f"{lead}\n{command_lines(parts, console.width) if len(parts) > 1 else parts[0]}"
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [
        (int(line["step"]), float(line[key]))
        for line in metrics
        if isinstance(line.get(key), int | float)
    ]
    return [step for step, _ in points], [value for _, value in points]
