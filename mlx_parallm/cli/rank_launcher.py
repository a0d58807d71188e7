"""`--ranks N`: a small parent that starts N ranks on this machine, over MLX's ring, and ends them
together. No MLX.

    LocalRanks.run    starts `mlx_parallm train` N times with the two variables that `mlx.launch`
                      sets, waits, decides
    a thread          passes SIGINT, SIGTERM and SIGHUP on to every rank
    end_with_parent   in a rank: asks it to stop when the parent has died

`mlx.launch` itself is not called: its threads poll without a pause (up to a core), it wants a fixed
port, it ends with exit code 0 whatever the ranks end with, and rank 0 has no terminal there.

When a rank ends with an error or dies of a signal, all others are asked to stop: those that have
joined save, those that wait for it end at once. Ranks that the user has stopped are not asked
again, for a second signal ends them at once. With `on_rank_lost = "continue"` the death of a rank
is answered by a new start with as many ranks fewer, from the newest checkpoint; rank 0 saves one
when it notices. If none has died and a sum has stalled (EXIT_AGAIN), all are started again,
at most STANDSTILLS times without a new checkpoint.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from mlx_parallm.cli.supervisor import (
    REASONS,
    resume_again,
    same_run,
    signals_to_pass_on,
)
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.errors import EXIT_AGAIN, ConfigError, RankLostError
from mlx_parallm.run_files.directory import newest_checkpoint
from mlx_parallm.system.hardware import detect, launched_rank
from mlx_parallm.system.log import RunLog, get_logger
from mlx_parallm.system.signals import SHUTDOWN_SIGNALS, block_shutdown_signals

CHILD = """
from mlx_parallm.cli import train
from mlx_parallm.cli.rank_launcher import end_with_parent
end_with_parent()
raise SystemExit(train())
"""
HOSTFILE, RANK = "MLX_HOSTFILE", "MLX_RANK"
PARENT = "MLX_PARALLM_PARENT"  # file descriptor of a pipe that the parent alone can write to
STANDSTILLS = 3
LATE_S = 60.0  # after the end of a rank: who has not ended yet is named

log = get_logger("ranks")


def run_ranks(
    arguments: Sequence[str],
    server: ServerConfig,
    run: Path,
    *,
    resume: str | None,
    count: int,
    continues: bool,
    run_log: RunLog,
) -> int:
    """`mlx_parallm train --ranks N`: every start has the name and, if it was 0, the port of the
    first.

    Raises ConfigError: this process is a rank already, or the ranks would share one CUDA GPU.
    """
    if launched_rank() is not None:
        raise ConfigError(
            "--ranks starts ranks on this machine: under mlx.launch their number is that of -n"
        )
    if detect().backend == "cuda":
        raise ConfigError(
            f"--ranks {count} would share one GPU: start a rank for each GPU with mlx.launch"
            f" --backend nccl -n {count}"
        )
    arguments = [*arguments, *same_run(server, run, resume)]
    return LocalRanks(
        arguments, run, count, resume=resume, continues=continues, run_log=run_log
    ).run()


class LocalRanks:
    """Single use, main thread.

    Args:
        arguments: of `mlx_parallm train`; a later `--ranks` and `--resume` override theirs.
        run: the run's directory, perhaps not there yet.
        resume: what the first start resumes.
        continues: continue with fewer ranks when one has died.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        run: Path,
        count: int,
        *,
        resume: str | None = None,
        continues: bool = False,
        command: Sequence[str] = (sys.executable, "-P", "-c", CHILD),
        run_log: RunLog | None = None,
    ) -> None:
        self._arguments, self._directory, self._count = list(arguments), run, count
        self._first, self._continues, self._command = resume, continues, list(command)
        self._run_log = run_log or RunLog()
        self._children: list[subprocess.Popen[bytes]] = []
        # nothing is written: it closes when this process ends, however that is
        self._alive = os.pipe()
        self._asked = 0  # the last signal that was sent to us
        self._stopping = threading.Event()

    def run(self) -> int:
        """Return the exit code: 0, that of a rank that failed, or 128 + the signal that ended it.

        Raises RankLostError: a rank cannot be started.
        """
        block_shutdown_signals()
        threading.Thread(target=self._pass_on, name="signals", daemon=True).start()
        at_start, resume = newest_checkpoint(self._directory), list[str]()
        before, stood_still = at_start, 0
        while not self._stopping.is_set():
            codes = self._run_once(resume)
            lost = [
                rank
                for rank, code in enumerate(codes)
                if code < 0 and -code not in SHUTDOWN_SIGNALS
            ]
            left = self._count - len(lost)
            now = newest_checkpoint(self._directory)
            stood_still = 0 if now != before or EXIT_AGAIN not in codes else stood_still + 1
            again = not lost and EXIT_AGAIN in codes and stood_still <= STANDSTILLS
            goes_on = (
                bool((lost and left) or again) and self._continues and not self._stopping.is_set()
            )
            before = now
            if again and goes_on:
                log.warning(
                    "memory was short, or a sum stalled: starting all ranks again",
                    checkpoint=now,
                )
            for rank in lost:
                self._tell(rank, signal.Signals(-codes[rank]), now, left if goes_on else 0)
            if not goes_on:
                failed = next(
                    (code for code in codes if code > 0), next((code for code in codes if code), 0)
                )
                return failed if failed >= 0 else 128 - failed
            self._count = left
            resume = resume_again(self._first, self._directory, at_start, now)
        return 128 + self._asked

    def _run_once(self, resume: Sequence[str]) -> list[int]:
        """Start all ranks and wait for their ends; return their exit codes (negative: a signal)."""
        codes: dict[int, int] = {}
        ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="mlx_parallm_ranks_") as scratch:
            environment = os.environ | {PARENT: str(self._alive[0])}
            if self._count > 1:
                hosts = Path(scratch, "hosts.json")
                hosts.write_text(
                    json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(self._count)])
                )
                environment[HOSTFILE] = str(hosts)
            command = [*self._command, *self._arguments, "--ranks", "1", *resume]
            for rank in range(self._count):
                self._start(rank, command, environment, ended)
            if self._stopping.is_set():  # a signal that came while they were being started
                self._send(self._asked)
            while len(codes) < self._count:
                try:
                    rank, code = ended.get(timeout=LATE_S if codes else None)
                except queue.Empty:
                    late = [rank for rank in range(self._count) if rank not in codes]
                    log.warning("waiting: other ranks have ended, these have not", ranks=late)
                    self._kill_stopped(late)
                    continue
                if code and not any(codes.values()) and not self._stopping.is_set():
                    self._send(signal.SIGTERM)
                codes[rank] = code
        self._children.clear()
        return [codes[rank] for rank in range(self._count)]

    def _kill_stopped(self, ranks: Sequence[int]) -> None:
        """A process that is stopped (SIGSTOP) takes no other signal, and would be waited for for
        ever."""
        for rank in ranks:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if psutil.Process(self._children[rank].pid).status() == psutil.STATUS_STOPPED:
                    log.error(
                        "killed: it is stopped (SIGSTOP), and the others have ended", rank=rank
                    )
                    self._children[rank].kill()

    def _start(
        self,
        rank: int,
        command: Sequence[str],
        environment: dict[str, str],
        ended: "queue.SimpleQueue[tuple[int, int]]",
    ) -> None:
        rank_environment = environment | ({RANK: str(rank)} if self._count > 1 else {})
        try:
            child = subprocess.Popen(command, env=rank_environment, pass_fds=self._alive[:1])
            self._children.append(child)
            threading.Thread(target=lambda: ended.put((rank, child.wait())), daemon=True).start()
        except (OSError, RuntimeError) as error:  # too many processes, or threads
            self._send(signal.SIGTERM)
            for child in self._children:
                child.wait()
            raise RankLostError(
                f"rank {rank} of {self._count} cannot be started: {error}"
            ) from error

    def _send(self, number: int) -> None:
        for child in list(self._children):
            child.send_signal(number)  # does nothing if it has ended

    def _pass_on(self) -> None:
        wanted = signals_to_pass_on()
        while True:
            self._asked = signal.sigwait(wanted)
            self._stopping.set()
            self._send(self._asked)

    def _tell(self, rank: int, number: signal.Signals, checkpoint: str | None, left: int) -> None:
        reason = REASONS.get(number)
        event = f"rank {rank} of {self._count} died of {number.name}" + (
            f" ({reason})" if reason else ""
        )
        place = checkpoint or "the beginning: there is no checkpoint yet"
        plan = (
            f"starting again with {left} from {place}" if left else "start again with --resume auto"
        )
        # closed again: rank 0 writes too
        with self._run_log if self._directory.is_dir() else contextlib.nullcontext():
            if self._directory.is_dir():
                self._run_log.open(self._directory)
            (log.warning if left else log.error)(event, plan=plan)


def end_with_parent() -> None:
    """Stop this rank when its parent has died: it sends itself SIGTERM, which asks it to stop."""
    alive = int(os.environ.pop(PARENT))
    os.set_inheritable(alive, False)

    def wait() -> None:
        os.read(alive, 1)  # returns at the end of the parent
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(end.getsockname()[1]) for end in sockets]
    for end in sockets:
        end.close()
    return ports
