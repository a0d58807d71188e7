"""Does a pretrained model learn here with the defaults of `train --model --data --reward`, and with
what variants?

    .venv/bin/python -m scripts.bench.real_model_learning --model DIR --out RESULTS [--task instruction_following]
        [--variants float32 bf16 …] [--seeds 0 1 2] [--problems 60] [--set key=value …]
    .venv/bin/python -m scripts.bench.real_model_learning --out RESULTS --table     # of the finished runs, runs nothing

Each run is one process of the real command; its result is RESULTS/<task>-<variant>-<seed>.json, and
a run that has one is not made again. After each run RESULTS/table.md and RESULTS/<task>.png are
made from all finished ones. A task is one entry of TASKS. Intervals: 95%, bootstrap over the
held-out problems. Read the answers with full marks, which the JSON keeps under "best", before you
believe a curve.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.instruction_following import make_rows
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import difference, estimate
from scripts.bench.dry_run import wait_for

ROOT = Path(__file__).parents[2]
BEST = 12  # answers with full marks that are kept
TIMES = ("time_rollout_s", "time_train_s", "time_publish_s")


@dataclass(frozen=True)
class Task:
    """`write` puts train.jsonl and heldout.jsonl into a directory: (directory, held-out rows,
    seed)."""

    write: Callable[[Path, int, int], None]
    reward: str
    settings: tuple[str, ...] = ()


def _instructions(directory: Path, heldout: int, seed: int) -> None:
    make_rows.write_rows(directory, heldout=heldout, seed=seed)


def _tool_calling(directory: Path, heldout: int, seed: int) -> None:
    """Copy the rows of the repository, so that nothing is downloaded."""
    rows = ROOT / "examples" / "tool_calling"
    shutil.copy(rows / "train.jsonl", directory)
    lines = (rows / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (directory / "heldout.jsonl").write_text("".join(lines[:heldout]), encoding="utf-8")


TASKS: Mapping[str, Task] = {
    "instruction_following": Task(
        _instructions, f"{ROOT}/examples/instruction_following/rewards.py:score"
    ),
    "tool_calling": Task(
        _tool_calling,
        "builtin:tool_call",
        (
            'environments.0.tool_choice="required"',
            "environments.0.max_tokens=96",
            "rl_training.atropos.max_token_length=1024",
        ),
    ),
}
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bf16": ('model.dtype="bfloat16"',),
    "4-bit": ("rl_training.lora.quantize_base=true",),
    "full": ("rl_training.lora.enabled=false", "rl_training.learning_rate=4.7e-5"),
    "on-policy": ("rl_training.max_staleness=0",),
    "stale4": ("rl_training.max_staleness=4",),
}


def run(
    task: Task, variant: str, seed: int, args: argparse.Namespace, directory: Path
) -> dict[str, Any]:
    """Train once in `directory` and return the result. Raises SystemExit: the command failed;
    its output is named."""
    # the same rows for all seeds: only the training differs
    task.write(directory, args.problems, 0)
    settings = settings_of(task, variant, seed, args, directory)
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "mlx_parallm",
        "train",
        "--model",
        str(Path(args.model).resolve()),
    ]
    command += ["--data", "train.jsonl", "--reward", task.reward]
    command += [part for setting in settings for part in ("--set", setting)]
    with (directory / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
        resident = wait_for(process)
    if process.returncode:
        sys.exit(
            f"{variant}, seed {seed}: exit {process.returncode}; see {directory / 'output.txt'}"
        )
    [made] = (directory / "checkpoints").glob("train-*")  # beside it: which one is the latest
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "settings": settings, "resident_gb": resident / 1e9} | read_run(
        made
    )


def settings_of(
    task: Task, variant: str, seed: int, args: argparse.Namespace, directory: Path
) -> list[str]:
    """Return what a run sets on top of `train --model --data --reward`."""
    return [
        f"environments.0.heldout_data={json.dumps(str((directory / 'heldout.jsonl').resolve()))}",
        f"evaluation.problems={args.problems}",
        f"rl_training.seed={seed}",
        *task.settings,
        *VARIANTS[variant],
        *args.set,
    ]


def read_run(made: Path) -> dict[str, Any]:
    """Return what a run directory says: held-out scores of each problem, curve, seconds a step,
    memory, answers.

    Raises SystemExit: the run has not been evaluated before and after training, or a held-out
    answer has no score.
    """
    evaluations = [line for line in _lines(made / "evaluations.jsonl") if "skipped" not in line]
    metrics = _lines(made / "metrics.jsonl")
    if len(evaluations) < 2 or evaluations[-1]["step"] != metrics[-1]["step"]:
        sys.exit(f"{made}: needs an evaluation before the first and one after the last step")
    first, last = (
        next(iter(line["environments"].values())) for line in (evaluations[0], evaluations[-1])
    )
    before, after = (
        {problem["key"]: problem["greedy"] for problem in evaluation["problems"]}
        for evaluation in (first, last)
    )
    if missing := [key for key in before if before[key] is None or after.get(key) is None]:
        sys.exit(
            f"{made}: {len(missing)} held-out problems have no score, the first is {missing[0]}"
        )
    return {
        "before": [before[key] for key in before],
        "after": [after[key] for key in before],
        "curve": [line["reward_mean"] for line in metrics],
        "heldout": [(line["step"], line["score"]) for line in evaluations],
        "answers": [line["sequences"] for line in metrics],  # groups that were dropped are counted
        "times": [sum(line[key] for key in TIMES) for line in metrics],
        "step_s": statistics.median(
            line["time_rollout_s"] + line["time_train_s"] for line in metrics
        ),
        "memory_gb": max(line["memory_gb"] for line in metrics),
        "best": [example for example in last["examples"] if example["reward"] == 1.0][:BEST],
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_atomically(file: Path, text: str) -> None:
    """Write a whole file or none."""
    temporary = file.with_suffix(".partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def finished(out: Path) -> list[dict[str, Any]]:
    """Return the results under a directory, sorted by file name."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("*.json"))]


def table(results: list[dict[str, Any]]) -> str:
    """Return one Markdown row for each finished run. "arrays": the peak of MLX's; "process": of
    the resident set."""
    lines = [
        (
            "| task | variant | seed | before | after | points | s a step |"
            " arrays, GB | process, GB | minutes |"
        )
    ]
    lines += ["|---" * 10 + "|"]
    for result in results:
        before, after = (estimate(result[key]) for key in ("before", "after"))
        gain = difference(result["before"], result["after"])
        shown = [f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]" for e in (before, after)]
        points = f"{100 * gain.mean:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        cells = [
            result["task"],
            result["variant"],
            str(result["seed"]),
            *shown,
            points,
            f"{result['step_s']:.1f}",
        ]
        cells += [
            "" if result.get(key) is None else f"{result[key]:.2f}"
            for key in ("memory_gb", "resident_gb")
        ]
        lines.append("| " + " | ".join([*cells, f"{result['seconds'] / 60:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Draw the mean reward of the sampled answers, one line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    variants = dict.fromkeys([*VARIANTS, *(result["variant"] for result in results)])
    colours = {variant: f"C{index}" for index, variant in enumerate(variants)}
    for result in results:
        label = result["variant"] if result["seed"] == min(r["seed"] for r in results) else None
        axes.plot(
            range(1, len(result["curve"]) + 1),
            result["curve"],
            color=colours[result["variant"]],
            label=label,
        )
    axes.set(xlabel="step", ylabel="mean reward of sampled answers", ylim=(0, 1))
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)


def report(out: Path) -> None:
    """Make table.md and the curves again from all finished runs."""
    results = finished(out)
    write_atomically(out / "table.md", table(results))
    for task in sorted({result["task"] for result in results}):
        draw([result for result in results if result["task"] == task], out / f"{task}.png")
    print(table(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", help="a directory or hub id")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="instruction_following")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["float32"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", action="store_true", help="only from the finished runs")
    args = parser.parse_args()
    if not args.table and args.model is None:
        parser.error("--model is needed: a directory or hub id")
    args.out.mkdir(parents=True, exist_ok=True)
    for seed, variant in [] if args.table else [(s, v) for s in args.seeds for v in args.variants]:
        name = f"{args.task}-{variant}-{seed}"
        if (args.out / f"{name}.json").exists():
            continue
        directory = args.out / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory.mkdir(parents=True)
        result = run(TASKS[args.task], variant, seed, args, directory)
        result = {"task": args.task, "variant": variant, "seed": seed} | result
        write_atomically(args.out / f"{name}.json", json.dumps(result, indent=1))
        report(args.out)
    if args.table:
        report(args.out)


if __name__ == "__main__":
    main()
