"""Real signals to every command that serves or trains: each ends in order, with exit code 0, while
it serves, while it loads, and while foreign code runs in it."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mlx_parallm.cli.table import COMMANDS
from tests.signals_reset import default_signals

pytestmark = pytest.mark.slow
ENDS_IN_S, STARTS_IN_S = 40.0, 90.0
ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "mlx_parallm")
TINY = ("--set", "model.base_path=builtin:tiny", "--set", "server.port=0")
ROWS = "".join(json.dumps({"prompt": f"Sum: {n}+1", "answer": str(n + 1)}) + "\n" for n in range(8))
FOREIGN = """
import sys, time
def wait():
    print("foreign", file=sys.stderr, flush=True)
    time.sleep(600)
def spin():
    print("foreign", file=sys.stderr, flush=True)
    while True: pass
{at_import}
def score(completions, **columns):
    {at_call}
    return [0.0] * len(completions)
def rule(trace):
    {at_call}
"""
TRACE = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@dataclass(frozen=True)
class Case:
    """A command in its own directory.

    Attributes:
        ready: a part of what it prints before the signal is sent; or "file:PATH", which is there.
        first: a command that runs to its end before it.
        at_import, at_call: what foreign.py does.
        after: looks at what it left.
    """

    words: tuple[str, ...]
    ready: str
    at_import: str = ""
    at_call: str = "pass"
    after: Callable[[Path], None] = lambda directory: None
    before: Callable[[Path, str], None] = lambda directory, output: None
    stdin: bytes = b""
    first: tuple[str, ...] = ()


EXPERT = (sys.executable, str(ROOT / "examples" / "experts" / "train_simple_expert.py"))
TOOL_SERVER = (sys.executable, "-m", "mlx_parallm.systems.orchestrator.tool_server")
TRAIN = (
    *COMMAND,
    *("train", "--model", "builtin:tiny", "--data", "rows.jsonl", "--reward", "foreign.py:score"),
    *("--set", "server.port=0", "--set", "rl_training.run_name=run", "--set"),
    *("rl_training.checkpoint_dir=runs", "--set", "rl_training.total_steps=100000"),
)
EVALUATE = (*COMMAND, "eval", "--config", "eval.toml", "--problems", "2")
DISTILL = (
    *(*COMMAND, "distill-data", "--teacher", "builtin:tiny", "--data", "rows.jsonl"),
    *("--reward", "foreign.py:score", "--form", "sft", "--n", "1", "--output", "out.jsonl"),
)
PIPELINE = (
    *(*COMMAND, "pipeline", "--traces", "traces.jsonl", "--base-model", "builtin:tiny"),
    *("--method", "sft", "--name", "agent", "--rule", "foreign.py:rule"),
)
MCP_PING = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'


def saved_a_policy(directory: Path) -> None:
    assert list((directory / "policy").rglob("*.safetensors")), "no checkpoint"


def learn(directory: Path, output: str) -> None:
    url = output.split("started at ")[1].split()[0]
    body = {"embedding": [0.1] * 8, "action": 0, "reward": 1.0}
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200, body


def check_expert(directory: Path) -> None:
    again = (*EXPERT, "--resume", "--timesteps", "1", "--checkpoint-dir", str(directory))
    subprocess.run(again, check=True, timeout=60, capture_output=True)


def saved_a_step(directory: Path) -> None:
    assert (directory / "runs" / "run" / "latest").exists()


CASES: dict[str, Case] = {
    "train": Case(TRAIN, "step 1", after=saved_a_step),
    "train that loads": Case(TRAIN, "foreign", at_import="wait()"),
    "train that loads, spinning": Case(TRAIN, "foreign", at_import="spin()"),
    "train with a reward that never ends": Case(TRAIN, "foreign", at_call="wait()"),
    "serve": Case((*COMMAND, "serve", "--model-path", "builtin:tiny", *TINY), "url="),
    "prompt-policy": Case(
        (*COMMAND, "prompt-policy", "--server", "0", "--checkpoint-dir", "policy"),
        "started at",
        before=learn,
        after=saved_a_policy,
    ),
    "prompt-policy, the demonstration": Case((*COMMAND, "prompt-policy"), "\n"),
    "dashboard": Case((*COMMAND, "dashboard", "run", "--port", "0"), "/dashboard"),
    "mcp over HTTP": Case((*COMMAND, "mcp", "--http", "0"), "/mcp"),
    "mcp": Case((*COMMAND, "mcp"), '"id":1', stdin=MCP_PING),
    "traces": Case(
        (
            *COMMAND,
            *[
                "traces",
                "record",
                "--upstream",
                "http://127.0.0.1:9/v1",
                "--dir",
                "s",
                "--port",
                "0",
            ],
        ),
        "recording",
    ),
    "eval that scores": Case(EVALUATE, "foreign", at_call="wait()"),
    "eval that loads": Case(EVALUATE, "foreign", at_import="wait()"),
    "eval that loads, spinning": Case(EVALUATE, "foreign", at_import="spin()"),
    "distill-data": Case(DISTILL, "foreign", at_call="wait()"),
    "pipeline": Case(PIPELINE, "foreign", at_call="wait()"),
    "replay": Case(
        (*COMMAND, "replay", "runs/run", *("--variant", "rl_training.learning_rate=1e-3") * 200),
        "1",
        first=(*TRAIN, "--set", "rl_training.total_steps=4"),
    ),
    "expert": Case(
        (*EXPERT, "--timesteps", "1000000000", "--checkpoint-dir", "expert"),
        "file:expert/latest",
        after=lambda directory: check_expert(directory / "expert"),
    ),
    "tool server": Case((*TOOL_SERVER, "--port", "0"), "/mcp"),
}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=(pytest.mark.long,) if long else ())
        for name in CASES
        for number, long in (
            (signal.SIGTERM, False),
            (signal.SIGINT, name not in ("train", "serve", "dashboard")),  # the same way
        )
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_a_signal_ends_it_in_order(name: str, number: signal.Signals, tmp_path: Path) -> None:
    case = CASES[name]
    prepare(tmp_path, case)
    if case.first:
        subprocess.run(case.first, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    given = set(tmp_path.rglob("*"))
    code, output = run(case, tmp_path, number)
    assert code == 0, output
    assert "Traceback" not in output, output
    # SECURITY.md: what was asked and answered is readable by this user
    assert (
        case.words[:3] != COMMAND
        or [
            path
            for path in set(tmp_path.rglob("*")) - given
            if path.lstat().st_mode & 0o077 and not path.is_symlink()
        ]
        == []
    )
    case.after(tmp_path)


def prepare(directory: Path, case: Case) -> None:
    (directory / "rows.jsonl").write_text(ROWS)
    (directory / "traces.jsonl").write_text((json.dumps(TRACE) + "\n") * 4)
    (directory / "foreign.py").write_text(
        FOREIGN.format(at_import=case.at_import, at_call=case.at_call)
    )
    (directory / "eval.toml").write_text(
        '[model]\nbase_path = "builtin:tiny"\n[[environments]]\nkind = "dataset"\n'
        'data = "rows.jsonl"\nheldout_fraction = 0.5\nmax_tokens = 4\n'
        'rewards = ["python:foreign.py:score"]\n'
    )
    run_directory = directory / "run"
    run_directory.mkdir()
    (run_directory / "config.toml").write_text("")
    (run_directory / "metrics.jsonl").write_text("")


def run(case: Case, directory: Path, number: signal.Signals) -> tuple[int, str]:
    """Send the signal once the command is ready; return its exit code and what it printed."""
    with subprocess.Popen(
        case.words,
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=default_signals,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(case.stdin)
            process.stdin.flush()
            output = read_until(process, case.ready, directory)
            case.before(directory, output)
            process.send_signal(number)
            rest, _ = process.communicate(timeout=ENDS_IN_S)
            return process.returncode, output + rest.decode(errors="replace")
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[bytes]", wanted: str, directory: Path) -> str:
    assert process.stdout is not None
    output, end = "", time.monotonic() + STARTS_IN_S
    file = directory / wanted.removeprefix("file:") if wanted.startswith("file:") else None
    while wanted not in output and not (file is not None and file.exists()):
        assert time.monotonic() < end, output
        if not select.select([process.stdout], [], [], 0.1)[0]:
            continue
        read = os.read(process.stdout.fileno(), 65536)
        assert read, f"ended before it was ready:\n{output}"
        output += read.decode(errors="replace")
    return output


def test_every_command_that_ends_in_order_is_in_the_table() -> None:
    tried = {case.words[3] for case in CASES.values() if case.words[1:3] == COMMAND[1:3]}
    assert tried == {each.name for each in COMMANDS if each.ends_in_order}
