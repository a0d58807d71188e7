"""Write the files of clients' runs by the writers of a training run: each optimizer step is a
`StepFinished`.

    metrics.jsonl    a line for each optimizer step
    spans.jsonl      when was sampled and trained
    config.toml      the run's settings

A failure costs one warning (`RunEvents.emit`) and never an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ParallmError
from mlx_parallm.faces.tinker.checkpoints import Checkpoints, TinkerRun
from mlx_parallm.faces.tinker.learner import LearnedModel
from mlx_parallm.rl_training.events import RunEvents, SpanEnded, StepFinished
from mlx_parallm.rl_training.monitor.recording import record_spans
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch
from mlx_parallm.run_files.directory import CONFIG_FILE, RunDirectory
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile, complete
from mlx_parallm.run_files.spans import SpanLog
from mlx_parallm.system.log import get_logger

MOST_SHOWN = 26  # runs

log = get_logger("tinker")


@dataclass(frozen=True)
class RecorderOptions:
    """Settings of the files of all runs.

    Attributes:
        min_free_gb: rollouts.min_free_gb.
        spans_bytes: the most that a run's spans take.
        saved: (name of a run, its own keys of [rl_training]) → its configuration as TOML.
    """

    min_free_gb: float | None
    spans_bytes: int
    saved: Callable[[str, Mapping[str, Any]], str]


class RunRecorder:
    """Opens the files of runs. It belongs to the learner's thread.

    Attributes:
        directories: of the newest runs, the newest first. Any thread may read it.
    """

    def __init__(self, options: RecorderOptions, checkpoints: Checkpoints) -> None:
        self._options, self._checkpoints = options, checkpoints
        earlier = (checkpoints.run_directory(run.run_id) for run in checkpoints.runs())
        shown = (path for path in earlier if (path / CONFIG_FILE).is_file())
        self.directories: tuple[Path, ...] = tuple(islice(shown, MOST_SHOWN))
        self._runs = list[RecordedRun]()

    def begin(self, run: TinkerRun, learned: LearnedModel) -> "RecordedRun":
        directory = self._checkpoints.run_directory(run.run_id)
        settings = {**learned.settings, "checkpoint_dir": self._checkpoints.root}
        text = self._options.saved(directory.name, settings)
        recorded = RecordedRun(directory, text, self._options.spans_bytes)
        self._runs = [each for each in self._runs if each.held] + [recorded]
        self.directories = (directory, *self.directories)[:MOST_SHOWN]
        return recorded

    def close(self) -> None:
        """End all runs, after the learner's thread has ended."""
        for run in self._runs:
            run.end()


class RecordedRun:
    """The files of one run. `sampled`: any thread; the rest belongs to the learner's.

    Args:
        text: its configuration.
    """

    def __init__(self, directory: Path, text: str, spans_bytes: int) -> None:
        self._spans = SpanLog(directory, most_bytes=spans_bytes)
        self._metrics = MetricsFile(directory / METRICS_FILE)
        self._events = RunEvents()
        record_spans(self._events, self._spans)
        self._events.subscribe(StepFinished, self._write_line)  # last: it shows the step
        self.held: RunDirectory | None = None
        try:
            self.held = RunDirectory.hold(directory)
            self.held.write_config(text)
        except (ParallmError, OSError) as error:
            log.warning("the run's directory cannot be written", path=directory, reason=str(error))

    def sampled(self, began: float, ended: float) -> None:
        """Take the Unix times of a request for samples."""
        self._spans.add("rl.sample", (began, ended))

    def stepped(
        self, step: int, values: Mapping[str, Any], trained: Sequence[tuple[float, float]]
    ) -> None:
        """Write an optimizer step.

        Args:
            values: its metrics.
            trained: Unix times of its passes.
        """
        for began, ended in trained:
            self._events.emit(SpanEnded("train", step, began, ended))
        line = complete({"step": step, "judged_by": "loss", **values})
        self._events.emit(StepFinished(line, TrainBatch(step, (), (), BatchStatistics())))

    def end(self) -> None:
        """The model is gone: let the directory go."""
        held, self.held = self.held, None
        if held is not None:
            held.close()

    def _write_line(self, event: StepFinished) -> None:
        self._metrics.append(event.line)
