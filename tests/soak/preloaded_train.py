"""`mlx_parallm_train` whose supervised processes are forks of this one, in which everything is
loaded: a start then costs a third. For `gpu_faults`.

    python -m tests.soak.preloaded_train FAULTS [arguments of mlx_parallm_train]

FAULTS is a directory of `faulty_evaluations.planned`. The supervisor, its signals, exit codes and
heartbeats are the package's own; MLX has computed nothing when a process is forked.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence

import mlx_parallm.daemon  # noqa: F401  what a run loads at its start
from mlx_parallm.cli import supervisor, train
from tests.soak import faulty_evaluations

LATER = (
    "mlx_parallm.rl_training.run.start",
    "mlx_parallm.engine.starting",
    "mlx_parallm.server.thread",
    "uvicorn.protocols.http.h11_impl",
)
LOOK_S = 0.05


class Fork:
    """A process, as `subprocess.Popen` is one."""

    faults = ""

    def __init__(self, command: Sequence[str]) -> None:
        self.args, self.returncode = command, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(list(command))

    def _become(self, command: list[str]) -> None:
        code = command.index("-c") + 1
        sys.argv = ["-c", *command[code + 1 :]]
        status = 1
        try:
            faulty_evaluations.take_next(self.faults)
            exec(command[code], {"__name__": "__main__"})
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - boundary: the end of a process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            else:
                time.sleep(LOOK_S)  # waitpid has no time limit
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> int:
    Fork.faults = sys.argv[1]
    sys.argv = ["mlx_parallm_train", *sys.argv[2:]]
    for name in LATER:
        importlib.import_module(name)
    supervisor.LONGEST_PAUSE_S = 2.0
    supervisor.subprocess.Popen = Fork  # type: ignore[misc,assignment]  # a stand-in with what the supervisor calls
    return train()


if __name__ == "__main__":
    raise SystemExit(main())
