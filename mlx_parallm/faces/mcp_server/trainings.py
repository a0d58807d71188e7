"""Trainings: real `mlx_parallm train` processes that are started, watched and ended by name.

    DIRECTORY/NAME/training.json   the started process, port, configuration
    DIRECTORY/NAME/exit_code       written by the shell around the process when it ends
    DIRECTORY/NAME/train.log       its output
    DIRECTORY/NAME/run             its run directory
    DIRECTORY/current              the training that is meant when no name is sent

Nothing is kept in memory alone: a training continues while its starter restarts, and is read again
from there.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from mlx_parallm.config.load import load_config
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.processes import of_no_family

State = Literal["starting", "running", "completed", "stopped", "failed"]

RECORD, EXIT_CODE, LOG, RUN, CONFIG, CURRENT = (
    "training.json",
    "exit_code",
    "train.log",
    "run",
    "config.toml",
    "current",
)
STOP_TIMEOUT_S = 90.0  # for the last checkpoint; then the process is killed
LOG_LINES = 20
MOST_LOG_LINES, MOST_LOG_BYTES = 1000, 1 << 20
LONGEST_TEXT = 1 << 20  # characters of a configuration
SHOWN = (
    "step",
    "reward_mean",
    "loss",
    "kl",
    "grad_norm",
    "tokens",
    "time_rollout_s",
    "time_train_s",
)
# The shell outlives a SIGTERM to the group, so that it can write the exit code of the process that
# it has started.
_SHELL = """trap : TERM INT HUP
"$@" & child=$!
while :; do wait $child; code=$?; kill -0 $child 2>/dev/null || break; done
echo $code > "$0.new"; mv "$0.new" "$0"
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Training:
    """The content of training.json. `pid` is that of the shell, which leads the process group."""

    name: str
    pid: int
    port: int
    total_steps: int
    started_at: float
    stop_requested: bool = False


class Trainings:
    """The trainings of a directory. Any number of threads may call it."""

    def __init__(self, directory: Path, *, most_running: int = 1) -> None:
        self.directory, self._most_running = directory.absolute(), most_running
        self._lock = threading.Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--directory {directory} cannot be made: {error.strerror or error}"
            ) from error

    def start(self, name: str, config: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Start a training; return its status.

        Args:
            config: a TOML file, the name of a shipped configuration, or TOML text.
            overrides: "section.key=value".

        Raises ConfigError: a name that is taken or no file name, a bad configuration, too many
        trainings.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name {name!r}: letters, digits, points, - and _, at"
                " most 64, beginning with no sign"
            )
        if name.casefold() == CURRENT:  # some file systems do not tell "Current" from "current"
            raise ConfigError(f"name {name!r}: the file {CURRENT} says which training is meant")
        for text in (config, *overrides):
            _check_text(text)
        if "\n" in config:
            loaded = load_config(None, list(overrides), text=config)
        else:
            loaded = load_config(config, list(overrides))
        with self._lock:
            home = self.directory / name
            if home.exists():
                raise ConfigError(f"there is a training {name!r} already: choose another name")
            running = [
                each["name"] for each in self.all() if each["state"] in ("starting", "running")
            ]
            if len(running) >= self._most_running:
                raise ConfigError(
                    f"{', '.join(running)} is running, and at most"
                    f" {self._most_running} may: stop one"
                )
            try:
                home.mkdir()
            except OSError as error:
                raise ConfigError(f"{home} cannot be made: {error.strerror or error}") from error
            file = home / CONFIG
            if "\n" in config:
                file.write_text(config, encoding="utf-8")
            port = _free_port()
            settings = [
                *overrides,
                f"server.port={port}",
                f"rl_training.checkpoint_dir={home}",
                f"rl_training.run_name={RUN}",
            ]
            command = [
                sys.executable,
                "-m",
                "mlx_parallm",
                "train",
                "--config",
                str(file if "\n" in config else config),
            ]
            command += [part for setting in settings for part in ("--set", setting)]
            with (home / LOG).open("wb") as log:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _SHELL, str(home / EXIT_CODE), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=of_no_family(),  # it continues when an agent's client ends this server
                )
            self._children[name] = process
            self._write(
                Training(name, process.pid, port, loaded.rl_training.total_steps, time.time())
            )
            write_atomically(self.directory / CURRENT, name.encode())
        return self.status(name)

    def stop(self, name: str = "") -> dict[str, Any]:
        """Ask a training to save and end; kill it if it does not within STOP_TIMEOUT_S. Return its
        status.

        Raises ConfigError: unknown name.
        """
        training = self._read(name or self.current())
        if (process := self._process(training)) is not None:
            self._write(Training(**{**asdict(training), "stop_requested": True}))
            _signal(training, signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                _signal(training, signal.SIGKILL)
                process.wait(STOP_TIMEOUT_S)
        return self.status(training.name)

    def switch(self, name: str) -> dict[str, Any]:
        """Make a training the current one; return its status. Raises ConfigError: unknown
        name."""
        training = self._read(name)
        write_atomically(self.directory / CURRENT, training.name.encode())
        return self.status(training.name)

    def all(self) -> list[dict[str, Any]]:
        """Return the status of every training, the newest first."""
        names = [path.parent.name for path in self.directory.glob(f"*/{RECORD}")]
        return sorted(map(self._listed, names), key=lambda status: -status["started_at"])

    def _listed(self, name: str) -> dict[str, Any]:
        """The status of one; of one whose record is damaged or was removed, why."""
        try:
            return self.status(name)
        except ConfigError as error:
            return {"name": name, "state": "damaged", "reason": str(error), "started_at": 0.0}

    def status(self, name: str = "") -> dict[str, Any]:
        """Return state, step, metrics of the last step and address of a training, and after a
        failure the end of its log. Raises ConfigError: unknown name."""
        training = self._read(name or self.current())
        state, lines = self._state(training), self._lines(training.name)
        last = lines[-1] if lines else {}
        status: dict[str, Any] = {
            "name": training.name,
            "state": state,
            "current": training.name == self._current(),
            "step": last.get("step", 0),
            "total_steps": training.total_steps,
            "metrics": {key: last[key] for key in SHOWN if last.get(key) is not None},
            "url": f"http://127.0.0.1:{training.port}/v1" if state == "running" else None,
            "run": str(self.directory / training.name / RUN),
            "started_at": training.started_at,
        }
        if state == "failed":
            status["log"] = self.log(training.name)
        return status

    def log(self, name: str = "", lines: int = LOG_LINES) -> str:
        """Return the end of a training's output. Raises ConfigError: unknown name."""
        path = self.directory / self._read(name or self.current()).name / LOG
        wanted = min(max(lines, 1), MOST_LOG_LINES)
        try:
            with path.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - MOST_LOG_BYTES, 0))
                text = file.read().decode(errors="replace")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        return "\n".join(text.splitlines()[-wanted:])

    def running(self, name: str = "") -> Training:
        """Return a training that serves. Raises ConfigError: unknown name, or it
        does not run."""
        training = self._read(name or self.current())
        if (state := self._state(training)) != "running":
            raise ConfigError(f"training {training.name!r} is {state}: only one that runs answers")
        return training

    def current(self) -> str:
        """Raises ConfigError: no training was started."""
        if name := self._current():
            return name
        raise ConfigError("there is no training yet: start one, or say its name")

    def _current(self) -> str:
        path = self.directory / CURRENT
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def _state(self, training: Training) -> State:
        if self._process(training) is not None:
            return "running" if self._serves(training) else "starting"
        path = self.directory / training.name / EXIT_CODE
        # none: killed, or the machine went down
        code = path.read_text().strip() if path.is_file() else ""
        lines = self._lines(training.name)
        if code == "0":
            done = lines and (lines[-1]["step"] >= training.total_steps or lines[-1].get("ended"))
            return "completed" if done else "stopped"
        return "stopped" if training.stop_requested else "failed"

    def _serves(self, training: Training) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", training.port), timeout=1.0):
                return True
        except OSError:
            return False

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            return MetricsFile(self.directory / name / RUN / METRICS_FILE).last(1)
        except CheckpointError:  # it is being written
            return []

    def _process(self, training: Training) -> psutil.Process | None:
        """Return the running process; collect one that has ended."""
        child = self._children.get(training.name)
        if child is not None:
            child.poll()
        try:
            process = psutil.Process(training.pid)
            # Its arguments name the training: the time of its beginning changes when a person sets
            # the clock.
            words = process.cmdline()
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            # for a moment of its start a process has no words: the system is replacing it
            same = str(self.directory / training.name / EXIT_CODE) in (words or process.cmdline())
            return process if same else None
        except psutil.Error:
            return None

    def _read(self, name: str) -> Training:
        """Raises ConfigError."""
        path = self.directory / name / RECORD
        if not _NAME.fullmatch(name) or not path.is_file():
            names = (
                ", ".join(
                    sorted(record.parent.name for record in self.directory.glob(f"*/{RECORD}"))
                )
                or "none"
            )
            raise ConfigError(f"there is no training {name!r}; there are: {names}")
        try:
            data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return Training(
                **{
                    key: value
                    for key, value in data.items()
                    if key in Training.__dataclass_fields__
                }
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged, or was removed: {error}") from error

    def _write(self, training: Training) -> None:
        write_atomically(
            self.directory / training.name / RECORD, (json.dumps(asdict(training)) + "\n").encode()
        )


def _check_text(text: str) -> None:
    """Raises ConfigError: no argument of a process can hold it, or no file."""
    if len(text) > LONGEST_TEXT or "\0" in text:
        raise ConfigError(
            f"a configuration has at most {LONGEST_TEXT} characters, and no null byte"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            "a configuration is valid Unicode: this one holds half a surrogate pair"
        ) from error


def _signal(training: Training, number: int) -> None:
    try:
        os.killpg(training.pid, number)
    except ProcessLookupError:  # it has ended meanwhile
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
