"""Runs untrusted code (a model's answers) in a restricted process. No MLX.

`Sandbox.run` → `sandbox_launcher.py`, which applies the kernel's restrictions → the code. Four
protections:

    files      the code reads only the system's libraries and the interpreter, and writes only to a
               temporary directory
    network    no connection to anywhere, this machine included
    processes  the code sees and signals no other process, and no process that it starts outlives it
    limits     of memory, CPU time, processes, open files and written bytes

`Sandbox()` tries the ways of this machine once and raises if one of `require` is missing; each run
checks again before the code starts. The time-out and the limit of the output always hold.
"""

import asyncio
import functools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from mlx_parallm.errors import ConfigError, SandboxError
from mlx_parallm.execution.sandbox.sandbox_launcher import user_of

Language = Literal["python", "bash"]
Outcome = Literal["ended", "timeout", "output", "memory", "disk"]

PROTECTIONS = ("files", "network", "processes", "limits")
MACOS = sys.platform == "darwin"
WAYS: tuple[str, ...] = ("seatbelt",) if MACOS else ("namespaces", "landlock")
WATCH_MEMORY = MACOS  # on Linux the launcher watches it
PACKAGE = str(Path(__file__).resolve().parent)
# Imported, for then its bytecode is kept; the package itself is not, nor does its directory hide a
# standard module.
LAUNCH = (
    f"import sys; sys.path.append({PACKAGE!r}); import sandbox_launcher; sandbox_launcher.main()"
)
SANDBOX_EXEC = "/usr/bin/sandbox-exec"
GRACE_S = 0.4  # for the launcher to end its processes
# the same on a machine so busy that it takes longer, before the launcher itself is killed
LAST_S = 20.0
WATCH_S = 0.05
LEAST_MEMORY_MB = 64  # an idle interpreter's
TRIAL_S = 30.0


@dataclass(frozen=True, slots=True)
class SandboxRun:
    """The result of one run."""

    outcome: Outcome  # "output", "memory", "disk": over output_kb, memory_mb, disk_mb
    returncode: int | None  # negative: the signal that ended it; None unless it "ended"
    stdout: str  # up to the limit
    stderr: str
    seconds: float  # wall time, the start of the process included
    protections: frozenset[str]  # in force during this run

    @property
    def ok(self) -> bool:
        return self.outcome == "ended" and self.returncode == 0


@dataclass(frozen=True, slots=True)
class _Limits:
    timeout_s: float
    memory: int  # bytes
    processes: int
    disk: int  # bytes
    output: int  # bytes of either stream


class Sandbox:
    """Run programs of Python (the standard library of the interpreter under this one's virtual
    environment) and bash.

    `protections`: those in force here (on macOS bash lacks "processes", because it has to fork).
    Thread-safe.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        processes: int = 16,
        disk_mb: int = 64,
        output_kb: int = 1024,
        concurrency: int | None = None,
        require: Collection[str] = PROTECTIONS,
    ) -> None:
        """
        Args:
            timeout_s: wall time after which a run is killed, with all processes that it started.
            memory_mb: bound on the memory of all its processes, which ends the run, and (Linux) the
            address
                space of each one, which is a MemoryError.
            processes: processes and threads at once.
            disk_mb: bytes that it may write (macOS: to each file). More is an OSError, or ends the
                run.
            output_kb: bytes of stdout and of stderr; more ends the run.
            concurrency: runs at once, others wait; default: one for each core.
            require: protections without which no code runs.

        Raises ConfigError: a value out of range, or a required protection that this machine does
        not have.
        """
        if unknown := sorted(set(require) - set(PROTECTIONS)):
            raise ConfigError(
                f"sandbox: require: there is no {unknown[0]!r}; choose from"
                f" {', '.join(PROTECTIONS)}"
            )
        least = {
            "timeout_s": 0.1,
            "memory_mb": LEAST_MEMORY_MB,
            "processes": 1,
            "disk_mb": 1,
            "output_kb": 1,
        }
        values = {
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "processes": processes,
            "disk_mb": disk_mb,
        }
        for name, value in (values | {"output_kb": output_kb}).items():
            if not value >= least[name]:
                raise ConfigError(f"sandbox: {name} = {value}; it has to be {least[name]} or more")
        concurrency = (os.cpu_count() or 1) if concurrency is None else concurrency
        if concurrency < 1:
            raise ConfigError(f"sandbox: concurrency = {concurrency}; it has to be 1 or more")
        self._limits = _Limits(
            timeout_s, memory_mb << 20, processes, disk_mb << 20, output_kb << 10
        )
        self._require = frozenset(require)
        self._way, self.protections = _way_with(self._require)
        self._slots = threading.BoundedSemaphore(concurrency)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="sandbox")

    def run(self, code: str, *, language: Language = "python", stdin: str = "") -> SandboxRun:
        """Run a program to its end, or to a limit. Blocks for at most `timeout_s` + 1 s after its
        turn has come.

        Raises SandboxError: the program could not start (no process, no memory, a missing
        protection).
        """
        with self._slots:
            return _run(self._way, self._limits, self._require, code, language, stdin)

    async def arun(
        self, code: str, *, language: Language = "python", stdin: str = ""
    ) -> SandboxRun:
        """Do the same without blocking the event loop. After a cancellation the program runs
        until its time-out."""
        work = functools.partial(self.run, code, language=language, stdin=stdin)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _way_with(require: frozenset[str]) -> tuple[str, frozenset[str]]:
    """Return the first way with all of `require`, and its protections. Raises ConfigError."""
    tried: dict[str, tuple[frozenset[str] | None, str]] = {}
    for way in WAYS:
        protections, _ = tried[way] = _trial(way)
        if protections is not None and require <= protections:
            return way, protections
    best = max(
        (names or frozenset() for names, _ in tried.values()),
        key=lambda names: len(names & require),
    )
    missing = ", ".join(name for name in PROTECTIONS if name in require - best)
    reasons = "; ".join(f"{way}: {why}" for way, (_, why) in tried.items())
    if all(names is None for names, _ in tried.values()):
        raise ConfigError(f"the sandbox cannot run code on this machine ({reasons})")
    raise ConfigError(
        f"the sandbox has no protection of {missing} on this machine ({reasons}); to run without"
        " it, remove it from"
        f" require = {json.dumps(PROTECTIONS)} (docs/rewards.md#built-in-parts)"
    )


@functools.cache
def _trial(way: str) -> tuple[frozenset[str] | None, str]:
    """Return the protections of a way on this machine, None if it runs no code; and which ones
    are missing, and why."""
    limits = _Limits(TRIAL_S, 512 << 20, 16, 1 << 20, 1 << 20)
    try:
        run = _run(way, limits, frozenset(), "pass", "python", "")
    except SandboxError as error:
        return None, str(error)
    if not run.ok:
        return None, (
            f"an empty program ended with {run.returncode} ({run.outcome}):"
            f" {run.stderr.strip()[-200:]}"
        )
    return run.protections, "lacks " + ", ".join(
        name for name in PROTECTIONS if name not in run.protections
    )


def _run(
    way: str, limits: _Limits, require: frozenset[str], code: str, language: Language, stdin: str
) -> SandboxRun:
    if language not in get_args(Language):
        raise SandboxError(f"the sandbox runs python and bash, not {language!r}")
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefixes = sorted(
        {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    )
    specification = {
        "way": way,
        "language": language,
        "code": code,
        "stdin": stdin,
        "python": python,
        "prefixes": prefixes,
        "require": sorted(require),
        "timeout_s": limits.timeout_s,
        "memory": limits.memory,
        "processes": limits.processes,
        "disk": limits.disk,
    }
    command = [python, "-I", "-S", "-c", LAUNCH]
    started = time.monotonic()
    try:
        directory = specification["directory"] = os.path.realpath(
            tempfile.mkdtemp(prefix="mlx_parallm_sandbox_")
        )
        try:
            if way == "seatbelt":
                specification["closed"] = [
                    n for n in PROTECTIONS if n != "processes" or language == "python"
                ]
                command = [SANDBOX_EXEC, "-p", _profile(directory, prefixes, language), *command]
            cut, returncode, streams = _start(command, specification, limits)
        finally:
            _remove(directory)
    except OSError as error:
        raise SandboxError(f"the sandbox cannot be started: {error}") from error
    return _result(cut, returncode, streams, time.monotonic() - started)


def _remove(directory: str) -> None:
    """Remove a directory that may be deeper than a path or a stack is long: what lies deep is
    moved up first."""
    top = Path(directory)
    token, number, waiting = secrets.token_hex(8), 0, [top]
    with suppress(OSError):  # files that cannot be removed stay
        top.chmod(0o700)  # the code may have closed it
        while waiting:
            here = waiting.pop()
            for entry in list(here.iterdir()):
                if entry.is_symlink() or not entry.is_dir():
                    entry.unlink()
                    continue
                number += 1
                entry.chmod(0o700)
                waiting.append(entry.rename(top / f"{token}-{number}"))
            if here != top:
                here.rmdir()
        top.rmdir()


def _start(
    command: list[str], specification: Mapping[str, Any], limits: _Limits
) -> tuple[Outcome | None, int, list[bytes]]:
    """Return the limit that ended it, the launcher's exit code, and the bytes of stdout, stderr
    and the report."""
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writing,),
            start_new_session=True,
            env={},
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        with suppress(BrokenPipeError), process.stdin:  # it has ended at once; its stderr says why
            process.stdin.write(json.dumps(specification).encode())
        streams = {
            file: bytearray()
            for file in (process.stdout.fileno(), process.stderr.fileno(), reading)
        }
        cut = _read(process, streams, limits)
        return cut, process.wait(), [bytes(text) for text in streams.values()]
    finally:
        _kill(process)
        os.close(reading)
        for pipe in (process.stdout, process.stderr):
            pipe.close()


def _read(
    process: "subprocess.Popen[bytes]", streams: Mapping[int, bytearray], limits: _Limits
) -> Outcome | None:
    """Read until all streams are closed, which means that no process is left; end the run at a
    limit."""
    cut: Outcome | None = None
    # Linux: the launcher's own comes first
    end = time.monotonic() + limits.timeout_s + (0.0 if MACOS else GRACE_S)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0 and cut is not None:
                _kill(process)
                break
            if left <= 0:
                cut, end = "timeout", _stop(process)
                continue
            for key, _ in selector.select(min(left, WATCH_S) if WATCH_MEMORY else left):
                data = os.read(key.fd, 1 << 16)
                streams[key.fd].extend(data[: max(0, limits.output + 1 - len(streams[key.fd]))])
                if not data:
                    selector.unregister(key.fd)
            too_much: Outcome | None = None
            if any(len(text) > limits.output for text in streams.values()):
                too_much = "output"
            elif WATCH_MEMORY and _resident(process.pid) > limits.memory:
                too_much = "memory"
            if too_much is not None and cut is None:
                cut, end = too_much, _stop(process)
    return cut


def _stop(process: "subprocess.Popen[bytes]") -> float:
    """Ask the launcher to end its processes. Returns when its time for that is over
    (time.monotonic)."""
    process.terminate()
    return time.monotonic() + GRACE_S


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the launcher, with all that it has started.

    On Linux the code leads its own session: a signal to the launcher's group does not reach
    it. A launcher that is killed while it ends a fork bomb leaves the bomb behind. It gets LAST_S,
    which only a busy machine needs. Remaining processes are ended by their user, if they have one
    of their own (this process is root's).
    """
    if process.returncode is None:
        late = False
        if not MACOS:
            process.terminate()
            try:
                process.wait(LAST_S)
            except subprocess.TimeoutExpired:
                late = True
        with suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if late and os.getuid() == 0:
            # one call reaches all of them, those that fork meanwhile too
            subprocess.run(
                ["/bin/sh", "-c", "kill -9 -1"],
                user=user_of(process.pid),
                check=False,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def _resident(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes."""
    try:
        process = psutil.Process(pid)
        return sum(
            int(one.memory_info().rss) for one in (process, *process.children(recursive=True))
        )
    except psutil.Error:
        return 0  # it has ended


def _result(
    cut: Outcome | None, returncode: int, streams: list[bytes], seconds: float
) -> SandboxRun:
    stdout, stderr, reported = streams
    report: dict[str, Any] = {}
    for line in reported.splitlines():
        report |= json.loads(line)
    if "error" in report:
        raise SandboxError(report["error"])
    if report.get("missing"):
        names = ", ".join(report["missing"])
        raise SandboxError(
            f"the sandbox has no protection of {names}: {report['lacking'] or 'bash forks'}"
        )
    # Without either, the launcher was killed while the code ran, and the code with it (by the
    # kernel, out of memory).
    code = report.get("exit", returncode if MACOS else -signal.SIGKILL)
    outcome: Outcome = cut or (report.get("limit") if "exit" not in report else None) or "ended"
    if "protections" not in report and cut == "timeout":
        raise SandboxError(f"the sandbox had not started its code after {seconds:.1f} s")
    if "protections" not in report:
        raise SandboxError(
            f"the sandbox ended with {returncode}: {stderr.decode(errors='replace').strip()[-300:]}"
        )
    texts = [text.decode(errors="replace") for text in (stdout, stderr)]
    ended = code if outcome == "ended" else None
    return SandboxRun(outcome, ended, texts[0], texts[1], seconds, frozenset(report["protections"]))


def _profile(directory: str, prefixes: list[str], language: Language) -> str:
    """Return a profile for sandbox-exec, written from Apple's own ones. The last rule that
    matches decides."""

    def places(*paths: str) -> str:
        return " ".join(f"(subpath {json.dumps(path)})" for path in paths)

    homes = (
        "/Users",
        "/Volumes",
        "/private/tmp",
        "/private/var/folders",
        "/private/var/root",
        str(Path.home()),
    )
    rules = [
        "(version 1)",
        "(allow default)",
        "(deny network*)",
        "(deny appleevent-send)",
        "(deny lsopen)",
        "(deny signal)",
        "(allow signal (target same-sandbox))",
        "(deny file-write*)",
        f'(allow file-write* {places(directory)} (literal "/dev/null"))',
        f"(deny file-read-data {places(*homes)})",
        f"(allow file-read-data {places(directory, PACKAGE, *prefixes)})",
    ]
    if language == "python":
        rules.append("(deny process-fork)")
    return "\n".join(rules)
