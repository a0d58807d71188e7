"""The report at the end of a run: the reward curve as a PNG, the same prompts before and after,
and what to do next."""

import itertools
import math
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mlx_parallm.environments.estimates import difference
from mlx_parallm.environments.evaluate import SOLVED
from mlx_parallm.rl_training.metrics import words_of
from mlx_parallm.rl_training.monitor.drawing import by_option, command_lines
from mlx_parallm.rl_training.monitor.health import find
from mlx_parallm.system.terminal import Console, beginning_of
from mlx_parallm.types import BETWEEN

SMOOTHING = 10  # steps on each side of a mean, fewer in a short run
SHOWN = 60  # characters of a text
FEWER = 0.1
"""A larger share of steps without all their rollouts is worth a word; one in quickstart's 180 is
not."""
INK, RAW, SECOND, THIRD = "#1b3a57", "#9dbad5", "#b3541e", "#4b7f52"
INKS = (INK, SECOND, THIRD, "#7a4b94", "#c49a1a", "#3a8c9e", "#a83250", "#6b6b6b")
"""Of several runs, one each."""


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
            ("") if row else title, loc="left", fontsize=13, fontweight="bold", parse_math=False
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


Line = Mapping[str, Any]  # of evaluations.jsonl
BEFORE = "before"
SHOWN_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """One environment's held-out problems before and after.

    Args:
        rewards: (before, after) of each problem that was answered both times.
        examples: answers to some of them, as in a line of evaluations.jsonl.
        greedy: whether a reward is that of the greedy answer, and not the mean of sampled ones.
    """

    environment: str
    rewards: tuple[tuple[float, float], ...]
    examples: tuple[tuple[Line, Line], ...] = ()
    greedy: bool = True

    @property
    def measured(self) -> Iterator[tuple[str, list[float], list[float]]]:
        """Yield (name, before, after): accuracy where 1 is the full reward, and the mean reward
        where it differs."""
        before, after = ([pair[side] for pair in self.rewards] for side in (0, 1))
        every = [*before, *after]
        judged = self.greedy and max(every) <= 1 and (max(every) >= SOLVED or not any(every))
        if judged:
            right, now_right = (
                [float(reward >= SOLVED) for reward in side] for side in (before, after)
            )
            yield self.environment, right, now_right
        if not judged or any(0 != reward < SOLVED for reward in every):
            yield f"{self.environment} (mean reward)", before, after


def compare(before: Line, after: Line) -> list[Comparison]:
    """Pair the answers of two evaluations; leave out a problem that was answered only once."""
    comparisons = []
    for name, now in after["environments"].items():
        then = before["environments"].get(name, {"problems": [], "examples": []})
        earlier, texts = (
            {p["key"]: p for p in then["problems"]},
            {e["key"]: e for e in then[("examples")]},
        )
        rewards = [
            (reward_of(earlier[p["key"]]), reward_of(p))
            for p in now[("problems")]
            if p["key"] in earlier
        ]
        examples = [
            (texts[e["key"]], e) for e in now["examples"][:SHOWN_EXAMPLES] if e["key"] in texts
        ]
        if rewards:
            greedy = all(problem["greedy"] is not None for problem in now["problems"])
            comparisons.append(Comparison(name, tuple(rewards), tuple(examples), greedy))
    return comparisons


def reward_of(problem: Line) -> float:
    """Return the reward of the greedy answer to a problem, else the mean of the sampled ones."""
    sampled: Sequence[float] = problem["sampled"]
    return (
        float(problem[("greedy")]) if problem["greedy"] is not None else sum(sampled) / len(sampled)
    )


def accuracy_table(
    comparisons: Sequence[Comparison],
    title: str = "answers to held-out problems",
    columns: tuple[str, str, str] = (BEFORE, "after", "change"),
) -> Table:
    """Held-out accuracy of each environment, before and after, with the 95% interval and p of
    the difference."""
    table = Table(title=Text(title), title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("environment")
    for name in ("problems", *columns, "95% interval", "p"):
        table.add_column(name, justify="right")
    for name, before, after in (measure for row in comparisons for measure in row.measured):
        gain = difference(before, after)
        change = Text(f"{gain.mean:+.3f}", style="green" if gain.mean >= 0 else "red")
        interval = f"{gain.low:+.3f} to {gain.high:+.3f}" if gain.enough else "too few"
        p = "–" if gain.p is None else "<0.001" if gain.p < 0.001 else f"{gain.p:.3g}"
        means = (f"{_mean(values):.3f}" for values in (before, after))
        table.add_row(Text(name), str(len(before)), *means, change, interval, p)
    return table


def verdict(comparisons: Sequence[Comparison], a: str, b: str) -> str:
    """Say in a sentence which of the differences are significant, by
    `estimates.Difference.significant`."""
    better: list[str] = []
    worse: list[str] = []
    unclear: list[str] = []
    for name, before, after in (measure for row in comparisons for measure in row.measured):
        gain = difference(before, after)
        (unclear if not gain.significant else better if gain.mean > 0 else worse).append(name)
    parts = [
        (better, f"{b} is better than {a}"),
        (worse, f"{b} is worse than {a}"),
        (unclear, "no significant difference"),
    ]
    sentence = "; ".join(f"{words}: {', '.join(names)}" for names, words in parts if names)
    return f"{sentence} (at the 5% level each: of twenty such lines one differs by chance)"


def answers_table(comparisons: Sequence[Comparison], first: str = BEFORE) -> Table:
    """Return the first answers of each environment, not selected ones. `first`: when the earlier
    ones were given."""
    last = "after" if first == BEFORE else "at the end"
    table = Table(title=f"the same prompts, {first} and {last}", title_justify="left")
    for name in ("prompt", "expected", first, last):
        table.add_column(name, overflow="fold")
    for row in comparisons:
        for before, after in row.examples:
            prompt, expected = (
                Text(beginning_of(after[key] or "", SHOWN)) for key in ("prompt", "expected")
            )
            table.add_row(prompt, expected, _mark(before), _mark(after))
    return table


def plain_report(comparisons: Sequence[Comparison], first: str = BEFORE) -> str:
    """Return both tables as plain text, for logs and files."""
    lines = [] if first == BEFORE else [f"the same prompts, {first} -> at the end:"]
    for row in comparisons:
        for name, before, after in row.measured:
            gain = difference(before, after)
            interval = "too few for an interval"
            if gain.enough:
                interval = f"95% interval {gain.low:+.3f} to {gain.high:+.3f}"
            problems = "1 problem" if len(before) == 1 else f"{len(before)} problems"
            change = f"({gain.mean:+.3f}, {interval}) on {problems}"
            lines.append(f"{name}: {_mean(before):.3f} -> {_mean(after):.3f} {change}")
        for then, now in row.examples:
            prompt = (
                f"{beginning_of(now['prompt'], SHOWN)} "
                f" [{beginning_of(now['expected'] or '', SHOWN)}]"
            )
            lines.append(f"  {prompt}  {_plain(then)} -> {_plain(now)}")
    return "\n".join(lines)


def problems_of(lines: Sequence[Line], run: Path) -> list[str]:
    """Return what is wrong with a run that ends here, in its last steps or in how its steps were
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
        problems.insert(
            0, f"nothing was learned: none of the {len(lines)} steps has changed the weights"
        )
    return [*problems, f"more: {our_command()} explain {shlex.quote(str(run))}"] if problems else []


def has_trained(lines: Sequence[Line]) -> bool:
    """Return whether any step has changed the weights."""
    return any(line.get("optimizer_updates") for line in lines)


def successes_of(lines: Sequence[Line]) -> list[str]:
    """Return what is good about a run that ends here: it has learned what there was to learn."""
    return [str(diagnosis) for diagnosis in find(lines, lines) if diagnosis.good]


def our_command() -> str:
    """Return how a shell runs `mlx_parallm`: its name where it is on PATH, else the path beside
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
) -> None:
    """Print the report. In a terminal no line breaks inside a word, and a command in several lines
    can be pasted.

    Args:
        problems: what is wrong with the run, a sentence each. successes: what is good about it.
        first: when the earlier answers of `comparisons` were given.
    """
    if comparisons:
        if console.is_terminal:
            console.print(answers_table(comparisons, first))
            columns = (first, "after" if first == BEFORE else "at the end", "change")
            console.print(accuracy_table(comparisons, columns=columns))
        else:
            console.print(
                plain_report(comparisons, first), soft_wrap=True, markup=False, highlight=False
            )
    sentences = [(success, "bold green") for success in successes] + [
        (problem, "bold red") for problem in problems
    ]
    for sentence, style in sentences:
        console.print(Text(sentence, style=style), soft_wrap=not console.is_terminal)
    for name, file in (("reward curve", curve), ("samples", samples)):
        if file is not None:
            _print_whole(console, f"{name}:", [str(file)])
    for lead, command in zip(
        itertools.chain(["next:"], itertools.repeat("  or:")), commands, strict=False
    ):
        _print_whole(console, lead, by_option(command))


def _print_whole(console: Console, lead: str, parts: Sequence[str]) -> None:
    """Print a path or the parts of a command behind `lead`, or below it where they are too wide
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


def _mean(values: Sequence[float]) -> float:
    """Return the mean, rounded as `estimates.estimate` rounds it: a plain sum may be 0.9694999
    where the other tables show 0.970."""
    return math.fsum(values) / len(values)


def _one_line(answer: Line) -> str:
    """Return an answer on one line; of several turns their beginning and the last one."""
    before, mark, last = (answer["error"] or answer["text"]).rpartition(BETWEEN[-1])
    return (
        (f"{beginning_of(before + mark, SHOWN)} {beginning_of(last, SHOWN)}")
        if mark
        else beginning_of(last, SHOWN)
    )


def _mark(answer: Line) -> Text:
    style = "green" if answer["reward"] >= SOLVED else "red" if answer["reward"] == 0 else ""
    sign = {"right": "✓", "wrong": "✗"}.get(_verdict(answer), f"reward {_verdict(answer)}:")
    return Text(f"{sign} {_one_line(answer)}", style=style)


def _plain(answer: Line) -> str:
    return f"{_one_line(answer)} ({_verdict(answer)})"


def _verdict(answer: Line) -> str:
    """Return right, wrong, or the reward in between."""
    reward = answer["reward"]
    if reward in (0.0, 1.0) or SOLVED <= reward < 1:
        return "right" if reward else "wrong"
    return f"{reward:.3g}"
