"""kill -9 of deterministic runs at random moments: does the resumed run write the numbers that it
would have written?

    .venv/bin/python -m tests.soak.resume_bits --kills 10

One run goes from start to end and is the reference. For each kill another one starts, is killed
once (a third of them while a step is trained, a third while a checkpoint is written, the others
anywhere after the start), continues with `--resume auto` to the end, and its metrics.jsonl is
compared with the reference's, line by line and bit by bit, but for times, tokens served a second,
and memory.
"""

import argparse
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.environments.curriculum.log import DRAWS_FILE
from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.run_files.metrics import TIMES
from mlx_parallm.system.files import TEMPORARY

MOMENTS = ("in a step", "in a checkpoint", "anywhere")
CONFIG = """
[model]
base_path = "{model}"

[server]
port = {port}
batch_size = 32

[rl_training]
deterministic = true
max_staleness = 0
total_steps = {steps}
checkpoint_interval = 2
checkpoint_dir = "{directory}/checkpoints"
run_name = "run"
learning_rate = 2e-3
batch_size = 8
update_epochs = 2
kl_beta = 0.01
seed = 5
{training}

[rl_training.lora]
rank = 4

[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 128

[[environments]]
kind = "tasks"
name = "reverse"
group_size = 4
max_tokens = 12

[[environments]]
kind = "dataset"
data = "{directory}/rows.jsonl"
curriculum = "adaptive"
rewards = ["python:tests.soak.resume_bits:right"]
group_size = 4
max_tokens = 12
"""


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the row's answer."""
    return [
        float(completion[-1]["content"].strip() == wanted)
        if isinstance(completion, list)
        else float(completion.strip() == wanted)
        for completion, wanted in zip(completions, answer, strict=True)
    ]


Line = dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """`step`: the last one in metrics.jsonl then. `differences`: "step: key" of what differs
    from the reference."""

    moment: str
    after_s: float
    step: int
    differences: list[str]


class Run:
    """One run directory, with one daemon after the other."""

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        training: str = "",
        model: str | Path = "builtin:tiny",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "checkpoints" / "run"
        self.output = directory / "output.txt"
        self.config = directory / "run.toml"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        problems = [make_problem("sort", index, seed=0, split="train") for index in range(30)]
        rows = [
            {"prompt": each.messages[-1]["content"], "answer": each.answer} for each in problems
        ]
        (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config.write_text(
            CONFIG.format(
                port=port, directory=directory, steps=steps, training=training, model=model
            )
        )

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        command = [
            str(Path(sys.executable).parent / "mlx_parallm_train"),
            "--config",
            str(self.config),
        ]
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [*command, "--resume", "auto", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )

    def finish(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300,
    ) -> None:
        """Raises AssertionError when it does not end well."""
        process = self.start(*arguments, environment=environment)
        try:
            code = process.wait(timeout=timeout_s)
            assert code == 0, self.output.read_text()[-2000:]
        finally:
            process.kill()

    def lines(self) -> list[Line]:
        file = self.path / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def draws(self) -> dict[int, str]:
        """Return the row of each group of the data set."""
        lines = map(json.loads, (self.path / DRAWS_FILE).read_text().splitlines())
        return {line["group"]: line["row"] for line in lines if "row" in line}

    def step_in_work(self) -> int:
        """The step whose groups are taken and whose line is not written; 0 = none is trained
        now."""
        file = self.path / "rollouts.sqlite"
        if not file.exists():
            return 0
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            try:
                (taken,) = connection.execute(
                    "SELECT MAX(step) FROM groups WHERE state = 'taken'"
                ).fetchone()
            except sqlite3.OperationalError:  # being made
                return 0
        return taken if taken and taken > len(self.lines()) else 0

    def is_saving(self) -> bool:
        return any(self.path.glob(f"step_*{TEMPORARY}*"))


def without_times(lines: list[Line]) -> list[Line]:
    """Leave out the numbers that depend on a clock or on the lock."""
    return [
        {key: value for key, value in line.items() if key not in (*TIMES, "publish_timeouts")}
        for line in lines
    ]


def differences(run: list[Line], reference: list[Line]) -> list[str]:
    if [line["step"] for line in run] != [line["step"] for line in reference]:
        return [f"steps {[line['step'] for line in run]}"]
    return [
        f"{ours['step']}: {key} {ours.get(key)!r} {other.get(key)!r}"
        for ours, other in zip(without_times(run), without_times(reference), strict=True)
        for key in ours | other
        if ours.get(key) != other.get(key)
    ]


def kill_once(run: Run, moment: str, generator: random.Random, *, steps: int) -> tuple[float, int]:
    """Start and kill it; (seconds after the start, last recorded step). Raises AssertionError:
    it ended before."""
    after_step = generator.randrange(0, steps - 1)
    conditions: dict[str, Callable[[], bool]] = {
        "in a step": lambda: run.step_in_work() > after_step,
        "in a checkpoint": lambda: len(run.lines()) > after_step and run.is_saving(),
        "anywhere": lambda: len(run.lines()) > after_step,
    }
    process, started = run.start(), time.monotonic()
    try:
        while not conditions[moment]():
            assert process.poll() is None, (
                f"ended before the kill:\n{run.output.read_text()[-2000:]}"
            )
            time.sleep(0.0005 if moment == "in a checkpoint" else 0.005)
        if moment != "in a checkpoint":
            time.sleep(generator.uniform(0.0, 0.3 if moment == "anywhere" else 0.05))
    finally:
        process.kill()
        process.wait()
    return time.monotonic() - started, len(run.lines())


def run_kills(
    directory: Path, kills: int, *, seed: int = 0, steps: int = 8, training: str = ""
) -> Iterator[Kill]:
    """One after the other. Raises AssertionError when a daemon fails by itself."""
    reference = Run(directory / "reference", steps=steps, training=training)
    reference.finish()
    generator = random.Random(seed)
    for number in range(kills):
        run, moment = (
            Run(directory / f"kill-{number}", steps=steps, training=training),
            MOMENTS[number % len(MOMENTS)],
        )
        after_s, step = kill_once(run, moment, generator, steps=steps)
        run.finish()
        yield Kill(moment, after_s, step, differences(run.lines(), reference.lines()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", default="", help="more lines of [rl_training]")
    args = parser.parse_args()
    print("kill  moment           seconds after start  last step  differences", flush=True)
    identical = 0
    with tempfile.TemporaryDirectory() as directory:
        kills = run_kills(
            Path(directory), args.kills, seed=args.seed, steps=args.steps, training=args.training
        )
        for number, kill in enumerate(kills, 1):
            identical += not kill.differences
            differing = "; ".join(kill.differences[:4]) or "none"
            print(
                f"{number:4}  {kill.moment:15}  {kill.after_s:19.2f}  {kill.step:9}  {differing}",
                flush=True,
            )
    print(f"{identical} of {args.kills} identical")
    raise SystemExit(identical < args.kills)


if __name__ == "__main__":
    main()
