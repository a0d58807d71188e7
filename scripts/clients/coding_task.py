"""The task that each coding agent gets, the model that solves it, and the look at what is left in
the directory.

The script has three steps: write a function with a fault and its test, run the test (it fails),
mend the fault and run the test again. Then the model says that it is done. Only an agent that sends
each result back gets to the end.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.clients.scripted_model import make_scripted_model
from scripts.server_process import command, server_process

# node_modules of the clients, ignored by git
CLIENTS = Path(__file__).resolve().parents[2] / ".clients"
PROMPT = (
    "Write calc.py with a function mean(numbers) that gives 0 for an empty list, and a test for"
    " it. Run the test."
)
FAULTY = "def mean(numbers):\n    return sum(numbers) / len(numbers)\n"
TEST = (
    "from calc import mean\nassert mean([1, 2, 3]) == 2\nassert mean([]) == 0\nprint('all right')\n"
)
MENDED = "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0\n"
AGENT_S = 300
STEPS = 4  # with the last answer
DONE = "Done: mean() gives 0 for an empty list, and the test passes."


@dataclass(frozen=True)
class Task:
    directory: Path
    url: str
    sessions: Path  # what the server has recorded
    steps: int
    model: str = "default"

    def problems(self, output: str) -> list[str]:
        """Return the faults after the agent's run; [] when the task is solved. `output`: what
        the agent printed."""
        calc, run = self.directory / "calc.py", None
        faults = (
            []
            if calc.is_file() and calc.read_text() == MENDED
            else [f"{calc} is not the mended one"]
        )
        if (self.directory / "test_calc.py").is_file():
            command = [sys.executable, "test_calc.py"]
            run = subprocess.run(
                command, cwd=self.directory, capture_output=True, text=True, check=False
            )
        if run is None or run.stdout != "all right\n":
            faults.append("test_calc.py does not pass")
        turns = [
            json.loads(line)
            for file in self.sessions.glob("*.jsonl")
            for line in file.read_text().splitlines()
        ]
        trained = [turn for turn in turns if (turn.get("tokens") or {}).get("completion")]
        if len(trained) < self.steps:
            faults.append(
                f"{len(trained)} answers were recorded with their tokens, not {self.steps} or more"
            )
        if DONE not in output:
            faults.append("the agent did not show the last answer")
        return faults


@contextlib.contextmanager
def coding_task(
    answers: Callable[[Path], list[str]], *, counted_text: str | None = None, steps: int = STEPS
) -> Iterator[Task]:
    """A server of the scripted model, and an empty directory to work in.

    Args:
        answers: of a directory, the script.
        counted_text: as in `make_scripted_model`.
        steps: answers that the agent gets, at least.
    """
    with tempfile.TemporaryDirectory(prefix="coding_task_") as name:
        directory = Path(name) / "work"
        directory.mkdir()
        model = make_scripted_model(
            Path(name) / "model", answers(directory), counted_text=counted_text
        )
        traces = f'traces.directory="{name}/traces"'
        with serve(str(model), Path(name, "server.log"), "--set", traces) as url:
            yield Task(directory, url, Path(name, "traces", "sessions"), steps)


@contextlib.contextmanager
def serve(model: str, log_file: Path, *words: str) -> Iterator[str]:
    """The address of a server of this model, which ends with the block. Raises SystemExit when
    it does not start."""
    fixed = [command("mlx_parallm"), "serve", "--model-path", model, *words]
    with server_process(lambda port: [*fixed, "--port", str(port)], log_file) as (url, _):
        yield url


def node_client(package: str, version: str, command: str) -> str:
    """The path of an npm package's command; it is installed into .clients once."""
    if shutil.which("npm") is None:
        raise SystemExit(f"{command} needs Node.js with npm")
    directory = CLIENTS / command
    manifest = directory / "node_modules" / package / "package.json"
    if not manifest.is_file() or json.loads(manifest.read_text())["version"] != version:
        directory.mkdir(parents=True, exist_ok=True)
        install = [
            "npm",
            "install",
            "--no-fund",
            "--no-audit",
            "--silent",
            "--prefix",
            str(directory),
        ]
        subprocess.run([*install, f"{package}@{version}"], check=True)
    return str(directory / "node_modules" / ".bin" / command)


def run_agent(
    name: str, task: Task, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run the agent in the task's directory, and report."""
    began = time.perf_counter()
    run = subprocess.run(
        command,
        cwd=task.directory,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=AGENT_S,
        check=False,
    )
    report(name, task, run.stdout + run.stderr, time.perf_counter() - began)


def report(client: str, task: Task, output: str, seconds: float) -> None:
    """Print what became of it; exit code 1 unless the task is solved."""
    problems = task.problems(output)
    print(output)
    print(f"{client}: " + ("; ".join(problems) if problems else f"solved in {seconds:.1f} s"))
    if problems:
        raise SystemExit(1)
