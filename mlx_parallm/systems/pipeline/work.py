"""The work directory of a pipeline: which stage is done with which inputs, and what its files were.

    WORK/state.json      stage → the hash of its inputs, its result, its files with their digests
    WORK/<stage>/        the files of a stage; `log.txt` is what its command printed

A stage is skipped when the hash of its inputs is the recorded one and its files are as they were. A
stage that was cut off begins anew, in an empty directory; one that `resumes` continues in its own,
if the inputs are still the same.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mlx_parallm import __version__
from mlx_parallm.errors import CheckpointError, ParallmError
from mlx_parallm.run_files.directory import LOCK_FILE, RunDirectory
from mlx_parallm.system.files import sha256_of, write_atomically
from mlx_parallm.system.log import get_logger

STATE_FILE = "state.json"
LOG_FILE = "log.txt"
WATCH_S = 0.5
# bytes; of a larger file the size and the time of the last change stand for the content
HASHED_WHOLE = 64 << 20
ERROR = "error: "
SAME_PROCESS_S = 2.0  # the clock may have been set since, and a process's start is reckoned by it

Json = dict[str, Any]
Watch = Callable[[], None]
log = get_logger("pipeline")


class StageFailedError(ParallmError):
    """A stage of a pipeline has failed; the message names it and says what to do."""


@dataclass(frozen=True)
class PipelineStage:
    """One stage.

    Attributes:
        inputs: everything that its result depends on; a Path stands for the content of that file or
            directory.
        run: does the work in its directory, and returns the result.
        files: those of its directory that later stages read.
        resumes: a stage that was cut off continues where it stood.
    """

    name: str
    about: str
    inputs: Callable[[], Any]
    run: Callable[[Path], Json]
    files: tuple[str, ...] = ()
    resumes: bool = False


@dataclass(frozen=True)
class StageOutcome:
    stage: str
    about: str
    seconds: float
    skipped: bool
    inputs: str
    result: Json


class WorkDirectory:
    """Hold a work directory: one pipeline at a time.

    Raises CheckpointError: another one works in it, or it holds files that no pipeline has written
    (a stage that begins empties its directory).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if (
            path.is_dir()
            and not (path / STATE_FILE).exists()
            and {file.name for file in path.iterdir()} - {LOCK_FILE}
        ):
            raise CheckpointError(
                f"{path} holds other files: choose a directory that is empty or not there yet"
            )
        self._held = RunDirectory.hold(path)
        self._file = path / STATE_FILE
        self._state: Json = {"done": {}, "begun": {}, "child": None}
        if self._file.is_file():
            try:
                self._state |= json.loads(self._file.read_text(encoding="utf-8"))
            except (OSError, ValueError, TypeError) as error:
                self.close()
                raise CheckpointError(
                    f"{self._file} is damaged: {error}; remove it to begin anew"
                ) from error
        self._end_orphan()
        self._write()

    def close(self) -> None:
        self._held.close()

    def directory(self, stage: str) -> Path:
        return self.path / stage

    def carry_out(self, stage: PipelineStage) -> StageOutcome:
        """Do a stage, or skip it. Raises what the stage raises, StageFailedError in the place of
        an OSError; the next call begins it again."""
        try:
            return self._carry_out(stage)
        except OSError as error:
            raise StageFailedError(f"{stage.name}: {error}") from error

    def _carry_out(self, stage: PipelineStage) -> StageOutcome:
        key, directory = fingerprint([__version__, stage.inputs()]), self.directory(stage.name)
        done = self._state["done"].get(stage.name)
        if (
            done is not None
            and done["inputs"] == key
            and done["files"] == _digests(directory, stage.files)
        ):
            return StageOutcome(stage.name, stage.about, done["seconds"], True, key, done["result"])
        if not stage.resumes or self._state["begun"].get(stage.name) != key:
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        self._state["done"].pop(stage.name, None)
        self._state["begun"][stage.name] = key
        self._write()
        began = time.monotonic()
        result = stage.run(directory)
        seconds = round(time.monotonic() - began, 3)
        entry = {
            "inputs": key,
            "seconds": seconds,
            "result": result,
            "files": _digests(directory, stage.files),
        }
        self._state["done"][stage.name] = entry
        self._write()
        return StageOutcome(stage.name, stage.about, seconds, False, key, result)

    def command(self, stage: str, arguments: Sequence[object], watch: Watch = lambda: None) -> None:
        """Run `mlx_parallm ARGUMENTS` and add what it prints to the stage's log. `watch` is called
        now and then.

        Raises StageFailedError: its exit code is not 0.
        """
        words = [sys.executable, "-m", "mlx_parallm", *map(str, arguments)]
        file = self.directory(stage) / LOG_FILE
        with file.open("ab") as output:
            began = output.tell()
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal comes once, from here
            )
            self._state["child"] = {
                "pid": process.pid,
                "since": psutil.Process(process.pid).create_time(),
            }
            self._write()
            try:
                while True:
                    try:
                        code = process.wait(WATCH_S)
                        break
                    except subprocess.TimeoutExpired:
                        watch()
            finally:
                if process.poll() is None:  # Ctrl-C
                    process.terminate()  # training saves where it is
                    process.wait()
                self._state["child"] = None
                self._write()
        if code != 0:
            raise StageFailedError(f"{stage}: {_reason(file, began)} (all of it: {file})")

    def _end_orphan(self) -> None:
        """A kill -9 of the pipeline leaves its command running: end it in order, before it is
        begun again."""
        child = self._state["child"]
        if child is None:
            return
        try:
            process = psutil.Process(child["pid"])
            if abs(process.create_time() - child["since"]) < SAME_PROCESS_S:
                log.info("ending the command that a killed pipeline left", pid=child["pid"])
                process.terminate()
                process.wait()
        except psutil.NoSuchProcess:
            pass
        self._state["child"] = None

    def _write(self) -> None:
        write_atomically(self._file, (json.dumps(self._state, indent=1) + "\n").encode())


def fingerprint(value: Any) -> str:
    """SHA-256 of a JSON value, in hexadecimal; a Path in it stands for its content."""
    text = json.dumps(value, sort_keys=True, default=lambda path: digest_of(Path(path)))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(path: Path) -> str:
    """Return what stands for the content of a file or a directory; "missing" if there is
    none."""
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        listed = [f"{file.relative_to(path)} {digest_of(file)}" for file in inside]
        return hashlib.sha256("\n".join(listed).encode()).hexdigest()
    if not path.is_file():
        return "missing"
    status = path.stat()
    if status.st_size > HASHED_WHOLE:
        return f"{status.st_size} {status.st_mtime_ns}"
    return sha256_of(path)


def _digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: digest_of(directory / name) for name in names}


def _reason(file: Path, began: int) -> str:
    """The error line of a command, else the last line that it printed."""
    with file.open("rb") as output:
        output.seek(began, os.SEEK_SET)
        lines = [
            line.strip()
            for line in output.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
    wrong = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return (wrong or lines or ["it ended without a word"])[-1]
