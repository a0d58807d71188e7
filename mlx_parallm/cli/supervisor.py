"""`--restarts N`: a small parent that starts the daemon again after a fault of the GPU, a death
that Python cannot catch, or a hang. No MLX.

    Supervisor.run    starts `mlx_parallm train` as a child, listens to it, decides
    a thread          passes SIGINT, SIGTERM and SIGHUP on to the child, each one

Answered by a new start from the newest checkpoint:

* the exit code `EXIT_AGAIN`: the GPU has failed, or memory was running out, and the child has saved
  what was whole
* death by a signal: SIGSEGV, SIGABRT, the out-of-memory killer's SIGKILL
* silence: a child whose signs of life stop (system/device/heartbeat.py) is killed
* the exit code 0: a child that has done its work ends with `DONE`, so a reward function or
  environment has called `os._exit(0)`
* the exit code `PAUSED` (rl_training.restart_every), which is not a failure and does not count

Other exit codes are passed on: 2 (an error in words), 1 (a bug). So is the end after a signal that
was sent to the parent. stdout, stderr and the terminal are the child's.
"""

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.errors import EXIT_AGAIN, ConfigError
from mlx_parallm.run_files.directory import newest_checkpoint
from mlx_parallm.system.device.heartbeat import (
    ENGINE,
    EVERY_S,
    PAUSED,
    PROCESS,
    TRAINER,
    WRITER,
    Listener,
)
from mlx_parallm.system.hardware import launched_rank
from mlx_parallm.system.log import RunLog, get_logger
from mlx_parallm.system.signals import SHUTDOWN_SIGNALS, block_shutdown_signals

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
SHOW_CURSOR = "\x1b[?25h\n"  # a live display that was killed has hidden it
REASONS = {
    signal.SIGABRT: "aborted, as by a failed assertion in native code",
    signal.SIGKILL: "killed, as by the system when memory runs out",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGBUS: "a fault in native code, or a full disk under a memory map",
}
DONE = 79
WORDS = {
    PROCESS: "the process",
    ENGINE: "the engine, with work,",
    TRAINER: "the trainer, in a step,",
    WRITER: "the trainer, writing a checkpoint,",
}
HEARTBEAT = "{heartbeat}"  # in a command: the directory of the signs of life
CHILD = f"""
from pathlib import Path
from mlx_parallm.cli import train
from mlx_parallm.system.device import heartbeat
from mlx_parallm.system.signals import EndLimit
EndLimit.exit_code = {DONE}
heartbeat.Heartbeat.directory = Path({HEARTBEAT!r})
heartbeat.beat_for_process()
raise SystemExit(train() or {DONE})
"""

log = get_logger("supervisor")


def supervise(
    arguments: Sequence[str],
    server: ServerConfig,
    run: Path,
    *,
    resume: str | None,
    restarts: int,
    run_log: RunLog | None = None,
    rest_s: float = 0.0,
    silence_s: float = 0.0,
) -> int:
    """`mlx_parallm train --restarts N`: every start has the name and, if it was 0, the port
    of the first. `rest_s`, `silence_s`: as in `Supervisor`."""
    if launched_rank() is not None:
        raise ConfigError(
            "--restarts starts one process anew: under mlx.launch start"
            " all of them with --resume auto"
        )
    arguments = [*arguments, "--restarts", "0", *same_run(server, run, resume)]
    return Supervisor(
        arguments,
        run,
        restarts=restarts,
        resume=resume,
        run_log=run_log,
        rest_s=rest_s,
        silence_s=silence_s,
    ).run()


def same_run(server: ServerConfig, run: Path, resume: str | None) -> list[str]:
    """Return the arguments that give every start the name and, if it was 0, the port of the
    first."""
    fixed: list[str] = []
    if resume is None or resume == "auto":
        fixed += ["--set", f"rl_training.run_name={json.dumps(run.name)}"]
    if server.port == 0:
        # here, because uvicorn takes long to import
        from mlx_parallm.server.thread import bind_socket

        listener = bind_socket(server.host, 0)
        fixed += ["--set", f"server.port={listener.getsockname()[1]}"]
        listener.close()
    return fixed


def resume_again(first: str | None, run: Path, at_start: str | None, now: str | None) -> list[str]:
    """Return the arguments of a later start, whose first one resumed `first`. A run that did not
    get as far as its resume tries the same one again: it may name an older step."""
    if first in (None, "auto"):  # `same_run` has fixed its name; --data takes no directory
        return ["--resume", "auto"]
    return [] if now == at_start else ["--resume", str(run)]


def signals_to_pass_on() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup
    return [number for number in SHUTDOWN_SIGNALS if not (ignored and number == signal.SIGHUP)]


class Supervisor:
    """Single use, main thread. `restarts`: in a row, without a new checkpoint in between.

    Each new checkpoint gives the full number back, so a run that makes progress continues to its
    end, and one that dies at the same place again and again ends after `restarts` tries.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        run: Path,
        *,
        restarts: int,
        resume: str | None = None,
        command: Sequence[str] = (sys.executable, "-P", "-c", CHILD),
        pause_s: float = FIRST_PAUSE_S,
        run_log: RunLog | None = None,
        rest_s: float = 0.0,
        silence_s: float = 0.0,
    ) -> None:
        """Take the command of the run.

        Args:
            arguments: of `mlx_parallm train`, without `--restarts`; a later `--resume` overrides
                theirs.
            run: the run's directory, perhaps not there yet.
            resume: what the first start resumes.
            command: `HEARTBEAT` in it becomes the directory in which the child gives signs of life.
            pause_s: before the first restart after a failure.
            rest_s: before a start after the exit code `PAUSED`.
            silence_s: after so long without a sign of life the child is killed; 0 = never.
        """
        self._arguments, self._directory, self._restarts, self._first = (
            list(arguments),
            run,
            restarts,
            resume,
        )
        self._command, self._pause_s, self._run_log = list(command), pause_s, run_log or RunLog()
        self._rest_s, self._silence_s = rest_s, silence_s
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = 0  # the last signal that was sent to us
        self._stopping = threading.Event()

    def run(self) -> int:
        """Return the exit code: the child's, or 128 + the signal that ended it."""
        block_shutdown_signals()
        threading.Thread(target=self._pass_on, name="signals", daemon=True).start()
        with tempfile.TemporaryDirectory(prefix="mlx_parallm_heartbeat_") as heartbeat:
            return self._run(Path(heartbeat))

    def _run(self, heartbeat: Path) -> int:
        at_start, resume = newest_checkpoint(self._directory), list[str]()
        left, pause, before = self._restarts, self._pause_s, at_start
        while not self._stopping.is_set():
            code, hang = self._one_start(resume, heartbeat)
            if code == DONE or (code == PAUSED and self._stopping.is_set()):
                return 0
            failed = code <= 0 or code in (EXIT_AGAIN, PAUSED)
            if self._stopping.is_set() or not failed:
                return code if code > 0 else 128 - code if code else 1
            now = newest_checkpoint(self._directory)
            if now != before:
                left, pause, before = self._restarts, self._pause_s, now
            resume = resume_again(self._first, self._directory, at_start, now)
            if code == PAUSED:
                self._say(log.info, "the daemon has ended at a checkpoint", self._plan(now))
                if self._stopping.wait(self._rest_s):
                    return 0
                continue
            self._tell(hang or _why(code), now, left, pause)
            if left == 0:
                return code if code > 0 else 128 - code if code else 1
            left -= 1
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return 128 + self._asked

    def _one_start(self, resume: Sequence[str], heartbeat: Path) -> tuple[int, str]:
        """Start the child and wait for its end. Return its code as `subprocess` gives it, and what
        is said of a hang."""
        for file in heartbeat.iterdir():
            file.unlink()
        command = [part.replace(HEARTBEAT, str(heartbeat)) for part in self._command]
        self._child = child = subprocess.Popen([*command, *self._arguments, *resume])
        if self._stopping.is_set():  # a signal that came while the child was being started
            child.send_signal(self._asked)
        listener, silence = Listener(heartbeat, self._silence_s), ""
        while True:
            try:
                code = child.wait(EVERY_S if self._silence_s else None)
                break
            except subprocess.TimeoutExpired:
                if (hangs := listener.look()) is not None:
                    part, seconds = hangs
                    silence = f"the daemon hung: {WORDS[part]} gave no sign for {seconds:.0f} s"
                    child.kill()
        return code, silence

    def _plan(self, checkpoint: str | None) -> str:
        return f"starting it again in {self._rest_s:g} s from {checkpoint}"

    def _pass_on(self) -> None:
        wanted = signals_to_pass_on()
        while True:
            self._asked = signal.sigwait(wanted)
            self._stopping.set()
            if self._child is not None:
                self._child.send_signal(self._asked)

    def _tell(self, event: str, checkpoint: str | None, left: int, pause: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        place = checkpoint or "the beginning: there is no checkpoint yet"
        say: Callable[..., None] = log.warning
        if left:
            number_of = f"restart {self._restarts - left + 1} of {self._restarts}"
            plan = f"starting it again in {pause:g} s from {place}; {number_of}"
        else:
            say = log.error
            plan = f"not started again: {self._restarts} restarts brought no new checkpoint"
        self._say(say, event, plan)

    def _say(self, say: Callable[..., None], event: str, plan: str) -> None:
        say(event, plan=plan)
        if self._directory.is_dir():
            with self._run_log:  # closed again: the next child writes there too
                self._run_log.open(self._directory)


def _why(code: int) -> str:
    """Say how a child has ended that is started again."""
    if code == EXIT_AGAIN:
        return (
            "the daemon saved what was whole and ended, because the GPU has"
            " failed or memory was running out"
        )
    if code == 0:
        why = "does a reward function or environment call os._exit?"
        return f"the daemon ended with exit code 0, but is not done ({why})"
    number = signal.Signals(-code)
    reason = REASONS.get(number)
    return f"the daemon died of {number.name}" + (f" ({reason})" if reason else "")
