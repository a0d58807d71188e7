"""RunningRun, the last stage of a run: the loop with all that watches it.

    display, logs, trackers, … (watchers.py) → evaluation at the start → TrainingLoop
    → last evaluation → report (report.py)

All of it is on the trainer's thread.
"""

from typing import Any

from mlx_parallm.errors import EXIT_AGAIN, DeviceFaultError, MemoryShortError
from mlx_parallm.rl_training.evaluation.schedule import FallGuard
from mlx_parallm.rl_training.events import EvaluationFinished, RunEvents, RunFinished, RunStarted
from mlx_parallm.rl_training.loop import RunControl, TrainingLoop
from mlx_parallm.rl_training.monitor import report
from mlx_parallm.rl_training.run.report import print_run_report, run_info
from mlx_parallm.rl_training.run.start import StartedRun
from mlx_parallm.rl_training.run.watchers import watch
from mlx_parallm.rl_training.until import ENDED
from mlx_parallm.run_files.directory import newest_checkpoint
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.system.device.heartbeat import PAUSED, supervised
from mlx_parallm.system.log import get_logger

END_S = 60.0  # after the last checkpoint, beside the drain: trackers, pictures, joins
log = get_logger("train")


class RunningRun:
    """A run whose loop comes before its first step. Main thread only.

    Args:
        ends_process: the process has nothing else to do, and ends even if something blocks.

    Attributes:
        paused: whether it has stopped for a new process to continue (rl_training.restart_every).
    """

    def __init__(self, started: StartedRun, *, ends_process: bool) -> None:
        self._started, self._prepared = started, started.prepared
        self._ends_process = ends_process
        self.paused = False
        events, checkpointer = self._prepared.events, started.parts.checkpointer
        metrics = MetricsFile(started.opened.path / METRICS_FILE)
        watch(started)
        self._evaluations = started.evaluations
        events.subscribe(
            EvaluationFinished, lambda event: checkpointer and checkpointer.point_at_best()
        )
        self._guard_falls(events)
        events.subscribe(
            RunFinished, lambda event: print_run_report(started, metrics, event.outcome)
        )
        lines = list(metrics.read())
        events.emit(RunStarted(run_info(started), lines))
        self._evaluations.begin(started.state, lines)
        self._loop = TrainingLoop(
            started.parts, control=self._control(), events=events, state=started.state
        )
        self._prepared.live.trains(self._loop)
        if started.state is None and started.config.evaluation.max_fall is not None:
            self._loop.save_now()  # the weights at the start may turn out to be the best

    def run(self) -> None:
        """Train to the end or to the stop, and report. Raises DeviceFaultError: the last moment
        that was whole is saved."""
        try:
            self._run()
        except Exception as error:
            if self._prepared.serving.turns.faults.note(error, ends=True) is None:
                raise
            raise self._after_fault() from error

    def _run(self) -> None:
        started, prepared = self._started, self._prepared
        try:
            outcome = self._loop.run()
        finally:
            started.rollbacks.close()
            started.commands.close()
        if outcome == "stopped":
            self._end_soon()
        self._evaluations.finish()
        prepared.events.emit(RunFinished(outcome))
        self._end_soon()
        prepared.serving.check_memory()
        prepared.ranks.check()

    def _after_fault(self) -> DeviceFaultError:
        """Save what was whole, and return the error of the first fault, with a remedy."""
        run, fault = self._started.opened.path, self._prepared.serving.turns.faults.first
        assert fault is not None, "it was noted"
        try:
            saved = self._loop.save_proved()
        except Exception as error:  # noqa: BLE001 - boundary: the checkpoints are there anyway
            log.warning("what was in memory could not be saved", reason=repr(error))
            saved = None
        place = saved.name if saved is not None else newest_checkpoint(run)
        log.error("the GPU has failed", kind=fault.kind.name, fault=fault.text, saved=place)
        begins = "nothing was saved yet" if place is None else f"{place} is saved"
        again = f"{report.our_command()} train --resume {run}"
        plan = f"{begins}: continue with `{again}` (--restarts N does this by itself)"
        return DeviceFaultError(fault, f"{plan}; {fault.kind.advice}")

    def _control(self) -> RunControl:
        started, prepared = self._started, self._prepared
        serving, ranks = prepared.serving, prepared.ranks
        return RunControl(
            should_stop=prepared.stop.is_set,
            before_step=started.opened.disk.check,
            between_steps=lambda: started.commands.perform(self._loop, started.keep_settings),
            while_waiting=started.check,
            training=serving.turns.training,
            publishing=serving.turns.publishing,
            writing=serving.turns.writing,
            faults=serving.turns.faults,
            measure=self._measure,
            measure_end=self._measure_end,
            after_step=self._after_step,
            served_tokens=lambda: serving.client.stats().generation_tokens + ranks.served_tokens(),
        )

    def _after_step(self, line: dict[str, Any]) -> bool:
        """Return whether to save; after every n-th step of restart_every also stop."""
        prepared, step = self._prepared, line["step"]
        wanted = self._evaluations.wants_checkpoint(step) or prepared.wants_checkpoint()
        every = self._started.config.rl_training.restart_every
        if not (every and self._ends_process and supervised()) or step % every:
            return wanted
        if step < self._started.config.rl_training.total_steps and ENDED not in line:
            self.paused = True
            prepared.stop.set()
        return True

    def _measure(self, step: int) -> dict[str, Any]:
        """Return a metrics line's values beside the trainer's."""
        heldout, tools = self._started.heldout, self._prepared.tools
        return {
            **(heldout.measure(step) if heldout is not None else {}),
            **self._evaluations.measure(step),
            **self._started.sources.numbers(),
            **(tools.new_counts() if tools is not None else {}),
        }

    def _measure_end(self, step: int) -> dict[str, Any]:
        """Return what a run measures at its end, if this step is the last before total_steps."""
        heldout = self._started.heldout
        return {
            **(heldout.measure_end(step) if heldout is not None else {}),
            **self._evaluations.measure_end(step),
        }

    def _guard_falls(self, events: RunEvents) -> None:
        """Let the weights go back to the best ones when an evaluation falls, if that is
        asked for."""
        started = self._started
        if (most := started.config.evaluation.max_fall) is None:
            return

        def roll_back(version: int) -> None:
            started.rollbacks.request(version=version)

        FallGuard(started.evaluation_log, most, roll_back).subscribe(events)

    def _end_soon(self) -> None:
        """The last checkpoint is written: the rest must be short, if the process has
        nothing else to do."""
        if not self._ends_process:
            return
        event, why = (
            "ended at once",
            "the end took too long: does a reward function or environment not return?",
        )
        seconds = END_S + self._started.config.server.drain_timeout_s
        self._prepared.end.start(
            seconds, lambda: log.warning(event, reason=why, seconds=seconds), self._exit_code()
        )

    def _exit_code(self) -> int | None:
        """Return the exit code if another process is to continue the run, else None."""
        if self.paused:
            return PAUSED
        try:
            self._prepared.serving.check_memory()
        except MemoryShortError:
            return EXIT_AGAIN
        return None
