"""RunEvents: everything that happens in a training run, as one stream that displays, trackers and
reports subscribe to.

    event               emitted                                               carries
    RunStarted          before the first step of this process                 RunInfo, metrics
    Waiting             at least twice a second while a step waits            step, seconds so far
    BatchReady          the groups of a step are there, before training       the batch
    WeightsPublished    new weights serve: after a step, a retry, a rollback  step, version, report
    RolledBack          a rollback is in a checkpoint                         steps, target, version
    StepFinished        trained, published, metrics line on the disk          metrics line, batch
    SamplesWritten      after a StepFinished whose samples were kept          step and completions
    EvaluationFinished  a line was added to evaluations.jsonl                 that line
    CheckpointSaved     a checkpoint is complete on the disk                  step, path
    SpanEnded           a timed part of a step is over                        name, step, Unix times
    Noted               something to read that is none of the above           a sentence
    Warned              something that needs attention; also in the log       a sentence, numbers
    RunFinished         after the last step of this process                   finished or stopped

Subscribers are called on the trainer's thread in the order in which they subscribed, so they must
be quick: hand slow work to a thread, as `monitor.trackers` does. A subscriber that fails costs one
warning and never the run. What may end a run (a full disk, a dead environment) is a check of
`loop.RunControl` and not a subscriber.

The arrays of a batch are plain tuples of numbers: a subscriber may keep an event, or read it on
another thread.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.run_files.samples import Sample
from mlx_parallm.system.log import get_logger

if TYPE_CHECKING:  # they import MLX, which the readers of a finished run do without
    from mlx_parallm.rl_training.step.prepare import StepTokens
    from mlx_parallm.weights import PublishReport

Line = Mapping[str, Any]
Outcome = Literal["finished", "stopped"]
SpanName = Literal["wait", "train", "publish", "checkpoint", "evaluate"]

log = get_logger("train")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts that do not change during a run."""

    run_name: str
    model: str
    base_url: str  # the server's, without /v1; empty: no server
    total_steps: int
    # a message's content; empty: what the model writes means nothing, it learns to judge
    example_prompt: Any
    start_step: int = 0
    model_name: str = "default"
    needs_key: bool = False
    checkpoint_every: int = 0  # steps; 0 = none is saved
    evaluate_every: int = 0  # steps; 0 = not during the run
    evaluates_at_end: bool = False

    def next_checkpoint(self, step: int) -> int | None:
        """Return the next step that is saved after `step` is made, or None."""
        return _next(
            step, self.checkpoint_every, self.total_steps, at_end=bool(self.checkpoint_every)
        )

    def next_evaluation(self, step: int) -> int | None:
        """Return the next step whose weights are evaluated, or None."""
        return _next(step, self.evaluate_every, self.total_steps, at_end=self.evaluates_at_end)


@dataclass(frozen=True, slots=True)
class RunStarted:
    info: RunInfo
    lines: Sequence[Line] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchReady:
    batch: TrainBatch


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    step: int
    report: "PublishReport"


@dataclass(frozen=True, slots=True)
class RolledBack:
    step: int
    to: str  # "version 12" or a checkpoint's name
    version: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    line: Line
    batch: TrainBatch
    tokens: "StepTokens | None" = None  # None: the step learned from rows of a file


@dataclass(frozen=True, slots=True)
class SamplesWritten:
    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class EvaluationFinished:
    line: Line


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class SpanEnded:
    name: SpanName
    step: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Noted:
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    text: str
    numbers: Line


@dataclass(frozen=True, slots=True)
class RunFinished:
    outcome: Outcome


E = TypeVar("E")


class RunEvents:
    """The stream of one run. Single-threaded: `emit` is called by the trainer's thread only."""

    def __init__(self) -> None:
        self._subscribers: defaultdict[type, list[Callable[[Any], object]]] = defaultdict(list)
        self._failed: set[Callable[[Any], object]] = set()

    def subscribe(self, kind: type[E], subscriber: Callable[[E], object]) -> None:
        """Call `subscriber` with every event of this class from now on."""
        self._subscribers[kind].append(subscriber)

    def emit(self, event: object) -> None:
        """Hand the event to its subscribers. Raises nothing that they raise."""
        for subscriber in self._subscribers[type(event)]:
            try:
                subscriber(event)
            except Exception as error:  # noqa: BLE001
                self._report(subscriber, event, error)

    def warn(self, text: str, **numbers: Any) -> None:
        """Write a warning to the log and emit it."""
        log.warning(text, **numbers)
        self.emit(Warned(text, numbers))

    @contextmanager
    def span(self, name: SpanName, step: int) -> Iterator[None]:
        """Time the block; nothing is emitted when it raises."""
        began = time.time()
        yield
        self.emit(SpanEnded(name, step, began, time.time()))

    def _report(self, subscriber: Callable[[Any], object], event: object, error: Exception) -> None:
        if subscriber not in self._failed:
            self._failed.add(subscriber)
            name = getattr(subscriber, "__qualname__", repr(subscriber))
            problem = f"{type(error).__name__}: {error}"
            log.warning(
                "an event was not handled",
                subscriber=name,
                of=type(event).__name__,
                problem=problem,
            )


def _next(step: int, every: int, last: int, *, at_end: bool) -> int | None:
    """Return the next multiple of `every` (0 = none), or the last step `at_end`, whichever comes
    first."""
    regular = (step // every + 1) * every if every else last + 1
    due = min(regular, last) if at_end else regular
    return due if step < due <= last else None
