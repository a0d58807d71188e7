"""A user's first ten minutes: a model directory, 200 rows of JSONL, a five-line reward function,
one command.

    .venv/bin/python scripts/bench/own_data.py [--task sort] [--command path/to/mlx_parallm_train] [--set key=value …]

Prints the seconds from the command to the first training step, and greedy accuracy on the held-out
rows before and after. No file is written by hand but the rows and the function.
"""

import argparse
import importlib.resources
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlx_parallm.environments.kinds.tasks import make_problem

ROWS = 200
REWARD = """\
def correct(prompts, completions, answer, **columns):
    scores = []
    for completion, right in zip(completions, answer):
        scores.append(1.0 if completion.strip() == right else 0.0)
    return scores
"""
RESULT = re.compile(r"^rows: ([\d.]+) -> ([\d.]+) \(.*\) on (\d+) problems", re.MULTILINE)


def prepare(directory: Path, task: str) -> None:
    """model/, rows.jsonl and score.py, as a user would bring them."""
    tiny = Path(str(importlib.resources.files("mlx_parallm"))) / "models" / "tiny"
    shutil.copytree(tiny, directory / "model")
    rows: dict[str, str] = {}
    index = 0
    while len(rows) < ROWS:
        problem = make_problem(task, index, seed=1, split="train")
        rows[problem.messages[0]["content"]] = problem.answer
        index += 1
    lines = [
        json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows.items()
    ]
    (directory / "rows.jsonl").write_text("".join(lines))
    (directory / "score.py").write_text(REWARD)


def measure(directory: Path, command: str, overrides: list[str]) -> tuple[float, float, str]:
    """Run the one command. (seconds to the first training step, seconds in all, what it
    printed)"""
    flags = ["--model", "model", "--data", "rows.jsonl", "--reward", "score.py:correct"]
    flags += [part for override in overrides for part in ("--set", override)]
    started, first = time.perf_counter(), 0.0
    with (directory / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [command, *flags], cwd=directory, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if not first and any(
                file.stat().st_size for file in directory.glob("checkpoints/*/metrics.jsonl")
            ):
                first = time.perf_counter() - started
            time.sleep(0.05)
    seconds, text = time.perf_counter() - started, (directory / "output.txt").read_text()
    if process.returncode:
        sys.exit(f"ended with {process.returncode}:\n{text}")
    return first, seconds, text


def main() -> None:
    parser = argparse.ArgumentParser(
        description="One command on an own model, own rows and an own reward function."
    )
    parser.add_argument("--task", default="reverse")
    parser.add_argument("--command", default=str(Path(sys.executable).parent / "mlx_parallm_train"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory, args.task)
        first, seconds, text = measure(directory, args.command, args.set)
        result = RESULT.search(text)
        if result is None:
            sys.exit(f"no held-out result in:\n{text}")
        [run] = (directory / "checkpoints").glob("rows-*")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = float(result[1]), float(result[2])
    rewards = [line["reward_mean"] for line in lines]
    head, tail = sum(rewards[:5]) / len(rewards[:5]), sum(rewards[-5:]) / len(rewards[-5:])
    print(
        f"{args.task}: {ROWS} rows, {len(lines)} steps in {seconds:.0f} s; first training step"
        f" after {first:.1f} s"
    )
    print(
        f"held-out accuracy {before:.3f} -> {after:.3f} ({after - before:+.3f}) on {result[3]} rows"
    )
    print(f"reward of the first and the last five steps {head:.3f} -> {tail:.3f}")


if __name__ == "__main__":
    main()
