"""TrainingRun: one run of `mlx_parallm train`, in three stages.

    PreparedRun   run/prepare.py   configuration checked, environments built, port taken
    StartedRun    run/start.py     run directory, sources of rollouts, HTTP, model, trainer, engine
    RunningRun    run/running.py   the loop, those who watch it, evaluations, report

The daemon chooses the serving half and the kinds of sources, and connects them to routes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mlx_parallm.errors import DeviceFaultError
from mlx_parallm.rl_training.run.prepare import PreparedRun
from mlx_parallm.rl_training.run.running import RunningRun
from mlx_parallm.rl_training.run.start import StartedRun, start_run


class TrainingRun:
    """Take a prepared run through its stages, and stop their threads and processes. Main thread
    only."""

    def __init__(self, prepared: PreparedRun) -> None:
        self.prepared = prepared

    def execute(self, loads: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool:
        """Train to total_steps or to the stop; leave a checkpoint either way. The process should
        end after it. Return whether a new one is to continue (rl_training.restart_every). `loads`:
        is entered for the time before there is anything to save. Raises DeviceFaultError."""
        try:
            with loads():
                started = self.start()
            if started is None:
                return False
            running = RunningRun(started, ends_process=True)
        except Exception as error:
            if (fault := self.prepared.serving.turns.faults.note(error)) is None:
                raise
            raise DeviceFaultError(fault, f"Start it again: {fault.kind.advice}") from error
        running.run()
        return running.paused

    def start(self) -> StartedRun | None:
        """Build everything and start the sources; None: a stop was requested meanwhile."""
        return start_run(self.prepared)

    def train(self, started: StartedRun) -> None:
        """Train what `start` has built; the process continues."""
        RunningRun(started, ends_process=False).run()

    def close(self) -> None:
        """End every thread that was started, also after a failure half way. A start that failed
        leaves no directory."""
        self.prepared.closing.close()
