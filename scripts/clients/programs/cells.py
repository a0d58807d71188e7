"""Parts that the Python programs here share: where the servers are, one tool, and the report of a
cell.

A program runs in its own environment, so this file needs the standard library only.
"""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Literal

MODEL = os.environ["MODEL"]
URL = os.environ["TINY_URL"]  # a server of builtin:tiny: any answer does
# one that calls get_weather("Paris"), then answers ANSWER
SCRIPTED_URL = os.environ["SCRIPTED_URL"]
V1, SCRIPTED = f"{URL}/v1", f"{SCRIPTED_URL}/v1"
QUESTION = "What is the weather in Paris?"
ANSWER = {"city": "Paris", "sunny": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris"]},
        "sunny": {"type": "boolean", "enum": [True]},
    },
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
# Only Paris: a grammar forces what has no choice, character by character, and the script does not
# speak in characters.
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS},
}
SECONDS = 60  # of one cell
calls: list[str] = []


def get_weather(city: Literal["Paris"]) -> str:
    """The weather of a city.

    Args:
        city: the city's name.
    """
    calls.append(city)
    return "sunny"


def cell(name: str) -> Callable[[Callable[[], object]], None]:
    """Run the function, which may be a coroutine's, and print ✓ (no error) or the error as one
    JSON line."""

    def run(function: Callable[[], object]) -> None:
        calls.clear()
        signal.signal(signal.SIGALRM, _expired)
        signal.alarm(SECONDS)
        why = None
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:  # noqa: BLE001 - another program: what it raises is the result
            why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        finally:
            signal.alarm(0)
        print(json.dumps({"cell": name, "why": why}), flush=True)

    return run


def _expired(*_: object) -> None:
    raise TimeoutError(f"not done in {SECONDS} s")


def check(condition: object, seen: object) -> None:
    """Raise AssertionError that shows `seen`, unless the condition holds."""
    if not condition:
        raise AssertionError(f"unexpected: {seen!r}")


def check_loop(answer: object) -> None:
    """The tool has run once, for Paris, and its result led to the last answer."""
    check(calls == ["Paris"], f"the tool ran for {calls}")
    check("Paris" in str(answer), answer)


def check_json(text: str | None) -> None:
    """The text is an object of SCHEMA."""
    value = json.loads(text or "")
    check(value == ANSWER, value)


def check_idle() -> None:
    """The server has stopped generating. Raises TimeoutError after 10 s."""
    for _ in range(100):
        with urllib.request.urlopen(f"{URL}/metrics") as page:
            running = re.findall(
                r"^\S*requests_running\S* (\S+)$", page.read().decode(), re.MULTILINE
            )
        if running and not any(map(float, running)):
            return
        time.sleep(0.1)  # another process: its /metrics is all that says so
    raise TimeoutError("the server still generates 10 s after the client has gone")


def command(name: str, *words: str, **environment: str) -> str:
    """The output of a command of this environment. Raises RuntimeError with its last lines."""
    run = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *words],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}: {(run.stdout + run.stderr)[-300:]}")
    return run.stdout + run.stderr
