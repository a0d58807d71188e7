"""Finished runs of scripts/bench/real_model_learning.py, as rows of the page and as curves."""

from pathlib import Path
from typing import Any

from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import (
    Estimate,
    difference,
    estimate,
)


def name_of(run: dict[str, Any]) -> str:
    """Return the name of a run's row."""
    return f"{run['task']}, {run['variant']}, seed {run['seed']}"


def row_of(run: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a run: scores with 95 % intervals, curve, costs."""
    return {
        "task": run["task"],
        "variant": run["variant"],
        "seed": run["seed"],
        "problems": len(run["before"]),
        "before": _numbers(estimate(run["before"])),
        "after": _numbers(estimate(run["after"])),
        "gain": _numbers(difference(run["before"], run["after"])),
        "right": [sum(marks) for marks in full_marks(run)],
        "right_gain": _numbers(difference(*full_marks(run))),
        "curve": [round(reward, 4) for reward in run["curve"]],
        "answers": sum(run["answers"]),
        "step_s": round(run["step_s"], 1),
        "memory_gb": round(run["memory_gb"], 2),
        "resident_gb": round(run["resident_gb"], 2),
        "minutes": round(run["seconds"] / 60, 1),
        "settings": [s for s in run["settings"] if "heldout_data" not in s],
    }


def full_marks(run: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return 1 or 0 for each problem, before and after. Of tool calls it is BFCL's accuracy."""
    before, after = ([float(score == 1.0) for score in run[key]] for key in ("before", "after"))
    return before, after


def _numbers(value: Estimate) -> list[float]:
    return [round(number, 4) for number in (value.mean, value.low, value.high)]


def table(rows: dict[str, Any]) -> list[str]:
    """Return the lines of the table, a run each."""
    lines = [
        "| task | variant | seed | held-out score before | after | points | full marks, points | steps, answers"
        " | s a step | MLX's arrays, process |",
        "|" + "---|" * 10,
    ]
    for row in sorted(rows.values(), key=lambda row: (row["task"], row["variant"] != "float32")):
        before, after = (_interval(row[key]) for key in ("before", "after"))
        gain = _points(row["gain"])
        right = " → ".join(f"{count:.0f}/{row['problems']}" for count in row["right"])
        if "right_gain" in row:
            right += ", " + _points(row["right_gain"])
        lines.append(
            f"| {row['task'].replace('_', ' ')} | {row['variant']} | {row['seed']} | {before} |"
            f" {after} | **{gain}** | {right} | {len(row['curve'])}, {row['answers']:,} |"
            f" {row['step_s']:g} | {row['memory_gb']:g} GB, {row['resident_gb']:g} GB |"
        )
    return lines


def _points(numbers: list[float]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * number for number in numbers))


def _interval(numbers: list[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*numbers)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the mean reward of the sampled answers, a line a run, a picture a task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = sorted({row["task"] for row in rows})
    figure, every = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    for axes, task in zip(every[0], tasks, strict=True):
        for row in rows:
            if row["task"] == task:
                steps = range(1, len(row["curve"]) + 1)
                axes.plot(steps, row["curve"], label=f"{row['variant']}, seed {row['seed']}")
        axes.set(title=task.replace("_", " "), xlabel="step", ylabel="mean reward", ylim=(0, 1))
        axes.legend()
    partial = file.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110, bbox_inches="tight")
    plt.close(figure)
    partial.replace(file)
