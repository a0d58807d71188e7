"""Commands and tests in a task's files: each run is its own sandbox, which gets the files and
gives them back. No MLX.

The directories that the task knows (/app, /tests, /logs) lie below the sandbox's own: their names
are replaced in commands and tests, and back in the shown output.
"""

import base64
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.environments.task_folders.folder import LARGEST, TaskFolder
from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.sandbox.sandbox import PROTECTIONS, Sandbox

PROGRAM = """
import base64, json, os, re, subprocess, sys

job = json.loads(%r)
here, roots = os.getcwd(), job["roots"]
pattern = re.compile(r"(?<![\\w./-])(" + "|".join(map(re.escape, roots)) + r")(?![\\w.-])")


def inside(text):
    return pattern.sub(lambda match: here + match[1], text)


def outside(text):
    for root in roots:
        text = text.replace(here + root, root)
    return text


def put(root, files, mapped):
    os.makedirs(here + root, exist_ok=True)
    for name, data in files.items():
        path, content = f"{here}{root}/{name}", base64.b64decode(data)
        if mapped:
            try:
                content = inside(content.decode()).encode()
            except UnicodeDecodeError:
                pass
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def kept(root):
    files = {}
    for folder, _, names in os.walk(here + root):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    data = base64.b64encode(file.read()).decode()
                files[os.path.relpath(path, here + root)] = data
    return files


put(job["workdir"], job["files"], False)
put("/tests", job["tests"], True)
os.makedirs(here + "/logs/verifier")
environment = {**os.environ, **{key: inside(value) for key, value in job["environment"].items()}}
try:
    done = subprocess.run(
        ["/bin/bash", "-c", inside(job["command"])],
        cwd=here + job["workdir"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=job["timeout_s"],
    )
    output, code = done.stdout, done.returncode
except subprocess.TimeoutExpired as error:
    output, code = error.stdout or b"", None
answer = {
    "output": outside(output.decode(errors="replace"))[-job["output"] :],
    "code": code,
    "files": kept(job["workdir"]) if job["keeps"] else {},
    "logs": kept("/logs/verifier"),
}
sys.stdout.write("\\n" + job["word"] + json.dumps(answer))
"""
FUNCTION = """
import inspect, json, pathlib, sys
sys.path.insert(0, "/tests")
import verifier
known = {"workspace": pathlib.Path("%s"), "task_data": {}, "response": None}
known["state"] = {"workspace": known["workspace"]}
wanted = inspect.signature(verifier.verify).parameters
value = verifier.verify(*[known[name] for name in wanted])
name = "reward.json" if isinstance(value, dict) else "reward.txt"
pathlib.Path("/logs/verifier").joinpath(name).write_text(json.dumps(value))
"""
TESTS = """
import pathlib, sys, traceback
sys.path.insert(0, "/tests")
failed = 0
for file in sorted(pathlib.Path("/tests").glob("test_*.py")):
    try:
        module = __import__(file.stem)
    except BaseException:
        failed += 1
        traceback.print_exc()
        continue
    for name, test in list(vars(module).items()):
        if name.startswith("test") and inspect_is_function(test):
            try:
                test()
            except BaseException:
                failed += 1
                traceback.print_exc()
pathlib.Path("/logs/verifier/reward.txt").write_text(str(int(not failed)))
""".replace("inspect_is_function(test)", "type(test) is type(lambda: 0)")


@dataclass(frozen=True, slots=True)
class CommandRun:
    """`code` None: it ran out of time. `files`: of the working directory afterwards."""

    output: str
    code: int | None
    files: dict[str, bytes]
    logs: dict[str, bytes]


class Workspace:
    """Runs commands on the files of tasks. Thread-safe.

    Raises ConfigError: the sandbox lacks a protection.
    """

    def __init__(self, *, timeout_s: float, memory_mb: int, output: int) -> None:
        self._timeout_s, self._output = timeout_s, output
        self._memory_mb = memory_mb
        self._sandboxes: dict[float, Sandbox] = {}
        self._sandbox(timeout_s)

    def command(
        self, folder: TaskFolder, files: Mapping[str, bytes], command: str
    ) -> CommandRun | str:
        """Run a command of the policy; a text: why there is no result, and the files are as they
        were. Raises SandboxError."""
        return self._run(folder, files, command, self._timeout_s, tests={}, keeps=True)

    def verify(self, folder: TaskFolder, files: Mapping[str, bytes]) -> tuple[float, str]:
        """Run the task's tests on the files; return the reward and the tests' output.

        Raises RolloutRejectedError: they wrote no reward; SandboxError.
        """
        commands = {
            "script": "bash /tests/test.sh",
            "function": _python(FUNCTION % folder.workdir),
            "tests": _python(TESTS),
        }
        command = commands[folder.verifier]
        run = self._run(folder, files, command, folder.verifier_s, tests=folder.tests, keeps=False)
        if isinstance(run, str):
            return 0.0, run
        if run.code is None:
            return 0.0, f"{run.output}\n(the tests ran out of time)".strip()
        return _reward(run, folder.name), run.output

    def _run(
        self,
        folder: TaskFolder,
        files: Mapping[str, bytes],
        command: str,
        timeout_s: float,
        *,
        tests: Mapping[str, bytes],
        keeps: bool,
    ) -> CommandRun | str:
        word = secrets.token_hex(16)
        job = {
            "roots": [folder.workdir, "/tests", "/logs"],
            "workdir": folder.workdir,
            "files": _encoded(files),
            "tests": _encoded(tests),
            "environment": dict(folder.environment),
            "command": command,
            "timeout_s": timeout_s,
            "output": self._output,
            "keeps": keeps,
            "word": word,
        }
        run = self._sandbox(timeout_s).run(PROGRAM % json.dumps(job))
        _, mark, text = run.stdout.rpartition(f"\n{word}")
        if not mark:
            return f"(the sandbox ended it: {run.outcome})"
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:  # a program that outlived its block wrote behind it
            return "(the sandbox's answer was disturbed: the files are as they were before)"
        kept = {name: base64.b64decode(data) for name, data in answer["files"].items()}
        if sum(map(len, kept.values())) > LARGEST:
            return f"(the files are larger than {LARGEST} bytes: they are as they were before)"
        logs = {name: base64.b64decode(data) for name, data in answer["logs"].items()}
        return CommandRun(answer["output"], answer["code"], kept, logs)

    def _sandbox(self, timeout_s: float) -> Sandbox:
        if timeout_s not in self._sandboxes:
            self._sandboxes[timeout_s] = Sandbox(
                timeout_s=timeout_s + 5.0,  # the program's own limit comes first
                memory_mb=self._memory_mb,
                output_kb=4 * LARGEST >> 10,
                processes=64,
                require=PROTECTIONS,
            )
        return self._sandboxes[timeout_s]


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def _python(program: str) -> str:
    return f"python3 - <<'END_OF_PROGRAM'\n{program}\nEND_OF_PROGRAM"


def _reward(run: CommandRun, name: str) -> float:
    """Read reward.json, whose "reward" or only number counts, or reward.txt. Raises
    RolloutRejectedError."""
    try:
        if (data := run.logs.get("reward.json")) is not None:
            value = json.loads(data)
            if isinstance(value, Mapping):
                value = value["reward"] if "reward" in value else _only(value)
            return _finite(float(value))
        if (data := run.logs.get("reward.txt")) is not None:
            return _finite(float(data.decode().strip()))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RolloutRejectedError(f"{name}: its tests wrote no reward: {error}") from error
    raise RolloutRejectedError(f"{name}: its tests wrote no reward: {run.output[-200:]}")


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a reward")
    return value


def _only(values: Mapping[str, Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f'reward.json has {sorted(values)} and no "reward"')
    return next(iter(values.values()))
