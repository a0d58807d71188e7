"""Write the files of this process's runs, on a separate thread, so that neither the event loop nor
the learner waits.

    sampling.py ──Drawn──┐                      rollouts.sqlite   samples, and each step's groups
    run_log.py ──Stepped─┼─► RunRecorder ──►    tokens.sqlite     their tokens' numbers
    service.py ──end()───┘   (one thread)       spans.jsonl       when was trained and sampled
                                                metrics.jsonl     a line for each optimizer step

They are the files of a training run, by the same writers, so the dashboard and `mlx_parallm
rollouts`, `explain` and `compare` read them. A failure costs one warning (`RunEvents.emit`) and
never an answer.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import StoreError
from mlx_parallm.faces.tinker.checkpoints import Checkpoints, TinkerRun
from mlx_parallm.faces.tinker.data import DatumBatch
from mlx_parallm.faces.tinker.groups import (
    SOURCE,
    UNUSED,
    DrawnAnswer,
    LiveGroup,
    LiveGroups,
    SampleRecord,
    StepGroups,
    TrainedAnswer,
    group_of,
    step_groups,
    trained_answers,
)
from mlx_parallm.faces.tinker.learner import LearnedModel, Output
from mlx_parallm.rl_training.events import RunEvents, SpanEnded, StepFinished
from mlx_parallm.rl_training.metrics import METRICS_FILE, MetricsFile, complete
from mlx_parallm.rl_training.monitor.spans import SpanLog
from mlx_parallm.rl_training.monitor.tokens import TokenLog
from mlx_parallm.rl_training.run_directory import CONFIG_FILE, STORE_FILE, RunDirectory
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.files import GB, reserve_bytes
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import RolloutGroup

FLUSH_S = 1.0  # between two writings of samples that no step has trained on
MOST_WAITING = 256 << 20  # bytes of what is not written yet, of all runs
MOST_TOKENS = 50_000  # whose numbers are kept of a step, beside those in the rollouts
PRUNED_EVERY = 16  # steps
MOST_SHOWN = 26  # runs
MISSED = "a step trained on it, or on others of its group, which could not be written"

log = get_logger("tinker")


@dataclass(frozen=True)
class TrainedRequest:
    """A forward_backward of a step: what was sent, and what the learner made of it."""

    loss: str
    batch: DatumBatch
    output: Output


@dataclass(frozen=True)
class Drawn:
    """Samples that have ended. `began`, `ended`: Unix times of their request."""

    answers: tuple[DrawnAnswer, ...]
    began: float
    ended: float


@dataclass(frozen=True)
class Stepped:
    """An optimizer step is made.

    Attributes:
        weights, generation: steps of the weights that it started from, and how often a checkpoint
            was loaded.
        values: of its line.
        trained: Unix times of its passes.
        size: of the requests, in bytes.
    """

    step: int
    weights: int
    values: Mapping[str, float | str | None]
    requests: tuple[TrainedRequest, ...]
    trained: tuple[tuple[float, float], ...]
    size: int = 0
    generation: int = 0


@dataclass(frozen=True)
class RecorderOptions:
    """Settings of the files of all runs.

    Attributes:
        tokens_gb: logging.tokens_gb.
        saved: (name of a run, its own keys of [rl_training]) → its configuration as TOML.
    """

    rollouts: RolloutsConfig
    tokens_gb: float
    saved: Callable[[str, Mapping[str, Any]], str]


class RunRecorder:
    """One thread for all runs, from its making until `close`.

    Attributes:
        directories: of the newest runs, the newest first.
    """

    def __init__(self, options: RecorderOptions, checkpoints: Checkpoints) -> None:
        self._options, self._checkpoints = options, checkpoints
        earlier = (checkpoints.run_directory(run.run_id) for run in checkpoints.runs())
        shown = (path for path in earlier if (path / CONFIG_FILE).is_file())
        self.directories: tuple[Path, ...] = tuple(islice(shown, MOST_SHOWN))
        self._work: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting, self._full = 0, False
        self._open: set[RecordedRun] = set()  # the recorder's thread
        # runs with samples to write, and when; the recorder's thread
        self._due: dict[RecordedRun, float] = {}
        self._thread = threading.Thread(target=self._main, name="tinker-recorder", daemon=True)
        self._thread.start()

    def begin(
        self, run: TinkerRun, learned: LearnedModel, find: Callable[[str], SampleRecord | None]
    ) -> "RecordedRun":
        """Write what is known of a new run, and what it does from now on."""
        directory, run_id = self._checkpoints.run_directory(run.run_id), run.run_id
        settings = {**learned.settings, "checkpoint_dir": self._checkpoints.root}
        text = self._options.saved(directory.name, settings)
        with self._lock:
            self.directories = (directory, *self.directories)[:MOST_SHOWN]

        def find_of_run(sequence_id: str) -> SampleRecord | None:
            record = find(sequence_id)
            return record if record is not None and record.run == run_id else None

        return RecordedRun(self, directory, text, self._options, find_of_run)

    def post(self, work: Callable[[], None], size: int = 0) -> bool:
        """Do it after what was posted before; `size`: bytes that it holds. False: there is no
        room for it."""
        with self._lock:
            fits = not size or self._waiting + size <= MOST_WAITING
            warn = not fits and not self._full
            self._full = not fits if size else self._full  # a line always fits
            self._waiting += size if fits else 0
        if fits:
            self._work.put((work, size))
        elif warn:
            log.warning("samples and groups are not written: the disk is slower than the training")
        return fits

    def opened(self, run: "RecordedRun") -> None:
        """Note an open run. This and the next two run on the recorder's thread."""
        self._open.add(run)

    def closed(self, run: "RecordedRun") -> None:
        self._open.discard(run)

    def write_soon(self, run: "RecordedRun") -> None:
        self._due.setdefault(run, time.monotonic() + FLUSH_S)

    def close(self) -> None:
        """Write what was posted and end the thread. May be called again."""
        self._work.put(None)
        self._thread.join()

    def _main(self) -> None:
        while True:
            due = min(self._due.values(), default=math.inf)
            try:
                entry = self._work.get(
                    timeout=None if math.isinf(due) else max(due - time.monotonic(), 0.0)
                )
            except queue.Empty:
                entry = (lambda: None), 0
            if entry is None:
                for run in list(self._open):
                    run.end_now()
                return
            work, size = entry
            work()
            with self._lock:
                self._waiting -= size
            self._write_due(time.monotonic())

    def _write_due(self, now: float) -> None:
        for run in [run for run, due in self._due.items() if due <= now]:
            del self._due[run]
            run.write_live()


class RecordedRun:
    """The files of one run. `drawn`, `stepped` and `end`: any thread; the rest is on the
    recorder's.

    Args:
        text: its configuration.
        find: what is known of a sample of this run, by its sequence id.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        directory: Path,
        text: str,
        options: RecorderOptions,
        find: Callable[[str], SampleRecord | None],
    ) -> None:
        self._recorder, self._path, self._find = recorder, directory, find
        self._text, self._kept = text, options.rollouts
        self._live = LiveGroups()
        self._store: RolloutStore | None = None
        self._held: RunDirectory | None = None
        self._groups: StepGroups | None = None  # of the step that is being written
        self._taken: list[str] = []  # samples that it trained on
        self._last_step = 0
        self._ended = False
        self._tokens = TokenLog(directory, most_bytes=round(options.tokens_gb * GB))
        self._spans = SpanLog(directory, most_bytes=round(options.tokens_gb * GB / 16))
        self._events = RunEvents()
        self._events.subscribe(_Begun, lambda event: self._begin())
        self._events.subscribe(Drawn, self._take_in)
        self._events.subscribe(_Due, lambda event: self._write_live())
        steps = (
            self._form_groups,
            self._write_groups,
            self._write_tokens,
            self._write_spans,
            self._write_line,
        )
        for subscriber in steps:
            self._events.subscribe(Stepped, subscriber)
        self._events.subscribe(_Ended, lambda event: self._end())
        self._spans.subscribe(self._events)
        recorder.post(lambda: self._events.emit(_Begun()))

    def drawn(self, drawn: Drawn) -> None:
        size = sum(answer.size for answer in drawn.answers)
        self._recorder.post(lambda: self._events.emit(drawn), size)

    def stepped(self, stepped: Stepped) -> None:
        if not self._recorder.post(lambda: self._events.emit(stepped), stepped.size):
            line = replace(stepped, requests=(), size=0)
            self._recorder.post(lambda: self._events.emit(line))

    def end(self) -> None:
        """The model is gone: write what there is, and close the files."""
        self._recorder.post(self.end_now)

    # ------------------------------------------------------------------ the recorder's thread

    def write_live(self) -> None:
        self._events.emit(_Due())

    def end_now(self) -> None:
        self._events.emit(_Ended())

    def _begin(self) -> None:
        self._recorder.opened(self)
        self._held = RunDirectory.hold(self._path)
        self._held.write_config(self._text)

    def _opened(self) -> RolloutStore:
        if self._store is None:
            reserve = reserve_bytes(self._path, self._kept.min_free_gb)
            self._store = RolloutStore(self._path / STORE_FILE, min_free_bytes=reserve)
        return self._store

    def _take_in(self, drawn: Drawn) -> None:
        if self._ended:
            return
        for answer in drawn.answers:
            self._live.add(answer, self._last_step)
        self._spans.add("rl.sample", (drawn.began, drawn.ended))
        self._recorder.write_soon(self)

    def _write_live(self) -> None:
        """Write the samples that wait: a group that has got more is written anew. What fails is
        tried again."""
        try:
            if changed := self._live.changed():
                groups = [self._as_written(group) for group in changed]
                gone = [group.group_id for group in changed if group.written]
                self._opened().replace(
                    gone, [group for group in groups if group is not None], source=SOURCE
                )
                for group, written in zip(changed, groups, strict=True):
                    group.noted(written)
            self._drop(self._live.too_old(self._last_step))
        finally:
            self._drop(self._live.make_room())

    def _as_written(self, group: LiveGroup) -> RolloutGroup | None:
        """Return a group as it is written. None: its tokens are forgotten here, and pruned in
        the store."""
        if group.answers:
            return group.group()
        try:
            [stored] = self._opened().groups([group.group_id])
        except StoreError:
            return None
        return group.left_of(stored)

    def _drop(self, groups: Sequence[LiveGroup]) -> None:
        for reason in {group.unused for group in groups if group.written}:
            written = [
                group.group_id for group in groups if group.written and group.unused == reason
            ]
            self._opened().drop(written, self._last_step, reason)
        self._live.dropped(groups)

    def _form_groups(self, stepped: Stepped) -> None:
        """Put the step's answers into groups by their prompts."""
        self._groups, self._last_step = None, stepped.step
        by_prompt: dict[tuple[str, bytes], list[TrainedAnswer]] = {}
        for request in stepped.requests:
            for answer in trained_answers(
                request.batch, request.output, self._find, self._live.claim
            ):
                by_prompt.setdefault((request.loss, answer.prompt), []).append(answer)
        self._taken = [
            name
            for answers in by_prompt.values()
            for answer in answers
            for name in answer.sequences
        ]
        homes = self._live.homes(self._taken)
        left = self._live.left_by(self._taken)
        groups, claimed = [], set[str]()
        for (loss, prompt), answers in by_prompt.items():
            group_id = next(
                (homes[name].group_id for name in answers[0].sequences if name in homes), ""
            )
            if not group_id or group_id in claimed or group_id in left:
                group_id = self._live.new_id(prompt)
            claimed.add(group_id)
            groups.append((group_of(group_id, answers, loss), answers))
        self._groups = step_groups(
            stepped.step, groups, weights=stepped.weights, generation=stepped.generation
        )

    def _write_groups(self, stepped: Stepped) -> None:
        if self._groups is None or not self._groups.batch.groups:
            return
        homes, left = set(self._live.homes(self._taken).values()), self._live.left_by(self._taken)
        gone = [home.group_id for home in homes if home.written and home.group_id not in left]
        for home in homes:
            home.unused = MISSED
        store = self._opened()
        store.replace(gone, self._groups.batch.groups, source=SOURCE, taken_by=stepped.step)
        for home in homes:
            home.unused = UNUSED
        self._live.take(self._taken)
        self._recorder.write_soon(self)  # what is left of other groups
        if stepped.step % PRUNED_EVERY == 0:
            kept = self._kept
            always = -1 if kept.keep == "all" else stepped.step - kept.keep
            store.prune(
                stepped.step - 1, always_up_to_step=always, max_bytes=round(kept.max_gb * GB)
            )

    def _write_tokens(self, stepped: Stepped) -> None:
        """Write the tokens of the first groups of the step."""
        if self._groups is None or not self._groups.batch.groups:
            return
        batch, shown, tokens = self._groups.batch, list[str](), 0
        for group in batch.groups:
            tokens += sum(len(rollout.tokens) for rollout in group.rollouts)
            if shown and tokens > MOST_TOKENS:
                break
            shown.append(group.group_id)
        self._tokens.write(batch, self._groups.tokens, shown)

    def _write_spans(self, stepped: Stepped) -> None:
        for began, ended in stepped.trained:
            self._events.emit(SpanEnded("train", stepped.step, began, ended))
        if self._groups is not None:
            self._events.emit(StepFinished({}, self._groups.batch, self._groups.tokens))

    def _write_line(self, stepped: Stepped) -> None:
        """Last: who sees the step's point finds its groups."""
        groups, self._groups = self._groups, None
        values = dict(stepped.values)
        if groups is not None and groups.batch.groups:
            values = groups.numbers() | values | {"groups": len(groups.batch.groups)}
        MetricsFile(self._path / METRICS_FILE).append(
            complete({"step": stepped.step, "judged_by": "loss"} | values)
        )

    def _end(self) -> None:
        """Each part, whatever another one raises."""
        self._recorder.closed(self)
        self._ended = True
        with ExitStack() as last_first:
            for held in (self._held, self._tokens):
                if held is not None:
                    last_first.callback(held.close)
            last_first.callback(self._close_store)
            last_first.callback(lambda: self._drop(self._live.waiting()))
            last_first.callback(self._write_live)
            self._held = None

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None


@dataclass(frozen=True)
class _Begun:
    pass


@dataclass(frozen=True)
class _Due:
    pass


@dataclass(frozen=True)
class _Ended:
    pass
