"""Weights & Biases, trackio, TensorBoard: every metrics line and every sample table, under the same
names. No MLX.

    Trackers    hands lines to its own thread, so that a slow or dead network never delays a step
    Tracker     the client of one service; an error in it becomes one warning, and the run continues

A resumed run continues the same tracker run: `trackers.json` in the run directory keeps its id.
"""

import contextlib
import json
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from mlx_parallm.config.training import LoggingConfig
from mlx_parallm.errors import CheckpointError
from mlx_parallm.rl_training.events import RunEvents, SamplesWritten, StepFinished
from mlx_parallm.run_files.samples import Sample, number_of
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.packages import require

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}
IDS_FILE = "trackers.json"
WAITING_LINES = 1000  # for a tracker that lags behind; later ones are dropped, with a warning
CLOSE_SECONDS = 30.0

_IDS = TypeAdapter(dict[str, str])

log = get_logger("trackers")


@dataclass(frozen=True)
class TrackedRun:
    """`config`: with secrets hidden. `step`: the last one before a resume, or 0."""

    directory: Path
    project: str
    config: Mapping[str, Any]
    step: int = 0

    @property
    def name(self) -> str:
        return self.directory.name


class Tracker(Protocol):
    def log(self, step: int, line: Mapping[str, Any]) -> None: ...

    def samples(self, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


def check_installed(config: LoggingConfig) -> None:
    """Raises ConfigError: the package of a tracker is missing."""
    for name in config.trackers:
        require(f"logging.trackers: {name!r}", PACKAGES[name])


class Trackers:
    """Single use. `log` and `samples` are called on the trainer's thread; they never wait and
    never raise."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        *,
        makers: Mapping[str, Callable[[TrackedRun], Tracker]] | None = None,
    ) -> None:
        self._makers = {name: (makers or MAKERS)[name] for name in names}
        self._run = run
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(WAITING_LINES)
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        if names:
            self._thread.start()

    def subscribe(self, events: RunEvents) -> None:
        events.subscribe(StepFinished, lambda event: self.log(event.line))
        events.subscribe(SamplesWritten, lambda event: self.samples(event.step, event.samples))

    def log(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        step = int(line["step"])
        self._put(lambda tracker: tracker.log(step, line))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._put(lambda tracker: tracker.samples(step, samples))

    def close(self) -> None:
        """Send what waits, for at most CLOSE_SECONDS. May be called again."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(
                "trackers",
                f"not finished within {CLOSE_SECONDS:.0f} s: the last lines may be missing",
            )

    def _put(self, work: Callable[[Tracker], None]) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self._warn(
                "trackers",
                f"{WAITING_LINES} lines behind: some are left out (metrics.jsonl has them all)",
            )

    def _work(self) -> None:
        trackers = {}
        for name, make in self._makers.items():
            if (tracker := self._attempt(name, lambda make=make: make(self._run))) is not None:  # type: ignore[misc]
                trackers[name] = tracker
        while (work := self._waiting.get()) is not None:
            for name, tracker in trackers.items():
                self._attempt(name, lambda work=work, tracker=tracker: work(tracker))  # type: ignore[misc]
        for name, tracker in trackers.items():
            self._attempt(name, tracker.close)

    def _attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """Boundary: a tracker that fails must not stop the training."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001
            self._warn(name, f"{type(error).__name__}: {error}")
            return None

    def _warn(self, name: str, problem: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "tracker failed; training continues, metrics.jsonl is complete",
                tracker=name,
                problem=problem,
            )


def flat(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a metrics line without its nulls; nested names are joined by "/":
    reward_by_environment/reverse."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{inner}", item) for inner, item in flat(value))
        elif value is not None:
            yield key, value


class _TensorBoard:
    """Event files under `tensorboard/` of the run directory; steps after the one resumed from
    are hidden."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=run.step + 1, flush_secs=10
        )
        if not run.step:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```", 0)

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        for name, value in flat(line):
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            else:
                self._writer.add_text(name, str(value), step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [
            f"**{s.which}** · reward {number_of(s.reward)}\n\n"
            f"```\n{s.prompt}\n```\n```\n{s.completion}\n```"
            for s in samples
        ]
        self._writer.add_text("samples", "\n\n".join(texts), step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """W&B's interface, which trackio has too, but for two calls.

    Args:
        make_table: rows → a table; trackio takes the names of columns from the rows, W&B as an
            argument.
        log_values: sends the values of a step.
    """

    def __init__(
        self,
        run: Any,
        make_table: Callable[[list[dict[str, str]]], Any],
        log_values: Callable[[int, dict[str, Any]], object],
    ) -> None:
        self._run, self._make_table, self._log = run, make_table, log_values

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        self._log(step, {name: value for name, value in flat(line) if name != "step"})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [
            {name: str(value) for name, value in sample.to_json().items()} for sample in samples
        ]
        self._log(step, {"samples": self._make_table(rows)})

    def close(self) -> None:
        self._run.finish()


def _open_wandb(run: TrackedRun) -> Tracker:
    """`step` is an ordinary metric and the x axis: W&B's own step cannot go back, as a resume
    does."""
    import wandb

    offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
    if not offline and not wandb.login(prompt=False, verify=False):
        raise RuntimeError(
            "not logged in: run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
        )
    opened = wandb.init(
        project=run.project,
        name=run.name,
        id=_kept_id(run.directory, "wandb"),
        resume="allow",
        dir=str(run.directory),
        config=dict(run.config),
        settings=wandb.Settings(
            console="off", silent=True, x_disable_meta=True, disable_git=True, save_code=False
        ),
    )
    opened.define_metric("*", step_metric="step")
    log.info("W&B", run=opened.id, url=None if offline else opened.url, files=opened.dir)

    def table(rows: list[dict[str, str]]) -> Any:
        return wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    return _Wandb(opened, table, lambda step, values: opened.log({"step": step} | values))


def _open_trackio(run: TrackedRun) -> Tracker:
    """A local dashboard (`trackio show`), in the folder that TRACKIO_DIR names."""
    import trackio

    name = f"{run.name}-{_kept_id(run.directory, 'trackio')}"
    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    opened = trackio.init(
        project=run.project, name=name, resume="allow", config=dict(run.config), **quiet
    )
    return _Wandb(
        opened,
        lambda rows: trackio.Table(data=rows),
        lambda step, values: opened.log(values, step=step),
    )


MAKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": _open_wandb,
    "tensorboard": _TensorBoard,
    "trackio": _open_trackio,
}


def _kept_id(directory: Path, name: str) -> str:
    """Return the tracker's id of this run: made at the first start, read at every later one. Raises
    CheckpointError: the file of ids is damaged."""
    file = directory / IDS_FILE
    try:
        ids = _IDS.validate_json(file.read_bytes(), strict=True) if file.is_file() else {}
    except ValidationError as error:
        raise CheckpointError(
            f"{file} is damaged: {error.errors()[0]['msg']}: without it a"
            " new run of the tracker begins"
        ) from error
    if name not in ids:
        ids[name] = uuid.uuid4().hex[:8]
        write_atomically(file, json.dumps(ids).encode())
    return ids[name]
