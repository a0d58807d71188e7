"""Atropos' real queue server and real environments in subprocesses, from what
scripts/setup_atropos has made."""

import os
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.processes import free_port
from tests.signals_reset import default_signals

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build" / "atropos" / "bin"
EXAMPLES = ROOT / "examples" / "atropos"
OFFLINE = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}

LOGGED = """
import logging, runpy, sys
logging.basicConfig()  # atroposlib logs each answer of the queue, and shows nothing unless someone asks for it
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

needs_atropos = pytest.mark.skipif(
    not (PROGRAMS.parent / ".ready").exists(),
    reason="build/atropos is missing: scripts/setup_atropos makes it",
)


class Watched:
    """A subprocess whose lines are kept with the time (monotonic) at which each came. Killed on
    the way out."""

    def __init__(
        self, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=default_signals,
            env=os.environ | OFFLINE | (env or {}),
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    @property
    def output(self) -> str:
        return "".join(line for _, line in list(self.lines))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class RunApi:
    """`run-api` on its own port that it gets again when it is started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._run: Watched | None = None

    def __enter__(self) -> "RunApi":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, timeout: float = 60) -> None:
        run = self._run = Watched(
            str(PROGRAMS / "run-api"), "--host", "127.0.0.1", "--port", str(self.port)
        )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                httpx.get(self.url).raise_for_status()
                return
            except httpx.TransportError:
                assert run.process.poll() is None, run.output
                time.sleep(0.05)
        raise AssertionError(f"run-api is not up in time:\n{run.output}")

    def kill(self) -> None:
        if self._run is not None:
            self._run.kill()


class Environment(threading.Thread):
    """An environment under a supervisor that starts it again whenever it ends: a real one dies
    with run-api."""

    def __init__(
        self,
        script: Path,
        queue: str,
        server: str,
        *flags: str,
        path: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._cwd = cwd
        where = ["--env.rollout_server_url", queue, "--openai.base_url", f"{server}/v1"]
        self._command = [
            str(PROGRAMS / "python"),
            "-c",
            LOGGED,
            str(script),
            "serve",
            *where,
            *flags,
        ]
        self._env = {"PYTHONPATH": str(path)} if path else {}
        self._ended = threading.Event()
        self.runs: list[Watched] = []

    def __enter__(self) -> "Environment":
        self.start()
        return self

    def __exit__(self, fault: object, *_: object) -> None:
        self._ended.set()
        while self.is_alive():
            self.kill()
            self.join(0.1)
        if fault:
            print(self.output[-6000:])

    def run(self) -> None:
        while not self._ended.is_set():
            self.runs.append(Watched(*self._command, env=self._env, cwd=self._cwd))
            self.runs[-1].process.wait()

    def kill(self) -> None:
        """Ends the one that runs now; the next one starts at once."""
        if self.runs:
            self.runs[-1].kill()

    def times(self, text: str) -> list[float]:
        """When lines with this text came, over all starts."""
        return [when for run in list(self.runs) for when, line in list(run.lines) if text in line]

    @property
    def output(self) -> str:
        return "\n--- started again ---\n".join(run.output for run in self.runs)

    def wait_for(self, text: str, *, since: float = 0.0, timeout: float = 60) -> float:
        """The time of the first such line that came after `since`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if found := [when for when in self.times(text) if when > since]:
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} from the environment in time:\n{self.output[-4000:]}")
