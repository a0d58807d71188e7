"""Checkpoints: complete, atomic, and the record of consumed groups.

    checkpoints/<run>/step_000100/         an adapter (mlx-lm's format) or full weights (Hugging
                                           Face layout)
                        optimizer.safetensors · trainer_state.json · SHA256SUMS, of all of them
                     /step_000100_mb0003/  100 steps and 3 mini-batches of the next (a shutdown
                                           inside a step)
                     /latest → step_…      /final/  the same, at total_steps
                     /best → step_…        the one with the best score; kept however old it is
    checkpoints/latest → <run>/latest    checkpoints/final → <run>/final    of the last to save

`Checkpointer.save` writes a directory under a temporary name and renames it; a kill -9 or a full
disk leaves the ones before it as they were. `find_checkpoint` says what `--resume` means.
`Checkpointer.resume` puts everything back: weights, optimizer, random states, consumed groups to
waiting, metrics lines cut. The rest is in `TrainerState`.
"""

import os
import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import structlog

from mlx_parallm.environments.base import Learner
from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.models.parameters import to_host
from mlx_parallm.rl_training.step.optimizer import HostCopy, PolicyOptimizer
from mlx_parallm.rl_training.step.policy import TrainedPolicy, read_tensors
from mlx_parallm.run_files.best_checkpoint import Judge, score
from mlx_parallm.run_files.checksums import (
    check_files,
    write_checksums,
)
from mlx_parallm.run_files.directory import (
    BEST,
    FINAL,
    LATEST,
    checkpoints,
    moment,
)
from mlx_parallm.run_files.directory import find_checkpoint as find_checkpoint  # promised here
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.run_files.trainer_state import STATE_FILE, TrainerState
from mlx_parallm.system.files import free_bytes, in_gb, point, remove_leftovers, write_directory

OPTIMIZER_FILE = "optimizer.safetensors"
LEARNERS = "learners"  # a directory of it for each learner beside the policy
SUPERSEDED = "superseded_"
# if the server answers with older weights: inside a step, or a publish is due
SERVED_FILE = "served.safetensors"
# bytes of a checkpoint's small files: configuration, random states, each file's last blocks
STATE_BYTES = 64 << 10

MOST_KEPT = 512 << 20
"""Bytes of the copies for a fault of the GPU: an adapter with its optimizer. Larger ones would take
memory that the model needs."""
KEPT_SHARE = 0.005
"""Of the time that these copies may take: a large adapter is not copied after each step."""

log = structlog.get_logger(__name__)


class ConsumedGroups(Protocol):
    """The part of `rollout_store.store.RolloutStore` that a resume needs."""

    def restore(self, consumed_up_to_step: int, *, keep_drops_of: int | None = None) -> int: ...


class Checkpointer:
    """Writes and restores the checkpoints of one run directory."""

    def __init__(
        self,
        run_directory: Path,
        policy: TrainedPolicy,
        optimizer: PolicyOptimizer,
        *,
        keep: int,
        keep_best: bool = False,
        judge: Judge | None = None,
        learners: Mapping[str, Learner] | None = None,
    ) -> None:
        """`learners`: of the environments, by name; each has a directory in every checkpoint."""
        self.run_directory, self._learners = run_directory, learners or {}
        self._policy, self._optimizer = policy, optimizer
        self._keep, self._keep_best, self._judge = keep, keep_best, judge
        self._kept_moment: tuple[TrainerState, HostCopy, dict[str, np.ndarray]] | None = None
        self._keeps_again_at = 0.0
        run_directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(run_directory)

    # ------------------------------------------------------------------ save

    def save(
        self,
        state: TrainerState,
        *,
        final: bool = False,
        best: bool = False,
        served: Mapping[str, mx.array] | None = None,
    ) -> Path:
        """Writes the checkpoint of `state`, points `latest` at it, removes the oldest beyond `keep`
        but for the best.

        `best`: this checkpoint is the best one, whatever the scores say. `best` is then a directory
        of its own, and the scores no longer change it. `served`: the weights of `policy_version`,
        if the policy's are newer. Raises
        CheckpointError (a full disk, a run directory that was removed, …): the earlier checkpoints
        are as they were, and `latest` is one of them.
        """
        path = self.run_directory / state.checkpoint_name
        try:
            saved = self._save(path, state, final=final, best=best, served=served or {})
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        self._kept_moment = None  # no newer one
        return saved

    def _save(
        self,
        path: Path,
        state: TrainerState,
        *,
        final: bool,
        best: bool,
        served: Mapping[str, mx.array],
    ) -> Path:
        left = max((rollback["step"] for rollback in state.rollbacks), default=0)
        latest_score = score(self.run_directory / METRICS_FILE, state.step, after=left)
        state = replace(_complete(state), score=latest_score)
        if not (path.is_dir() and self._same(path, state)):
            self._check_room(path, served)
            write_directory(path, lambda directory: self._fill(directory, state, served))
        point(self.run_directory / LATEST, path.name)
        self._point_beside(LATEST)
        if final:
            write_directory(
                self.run_directory / FINAL, lambda directory: _link_all(path, directory)
            )
            self._point_beside(FINAL)
        if best:
            if not self._best_is_fixed:
                (self.run_directory / BEST).unlink(missing_ok=True)
            write_directory(self.run_directory / BEST, lambda directory: _link_all(path, directory))
        kept = self.point_at_best()
        for old in checkpoints(self.run_directory)[: -self._keep]:
            if old != kept and not (
                self._judge is not None and self._judge.awaited(moment(old)[0])
            ):
                shutil.rmtree(old, ignore_errors=True)
        return path

    # ------------------------------------------------------------------ for a fault of the GPU

    def keep(self, state: TrainerState, served: Mapping[str, mx.array] | None) -> None:
        """Copy a checkpoint's arrays into host memory, unless they are large:
        the policy and its optimizer, and no learner or reference beside them. Else the last
        checkpoint counts. An earlier copy stays where another one would take too much time.

        The device was synchronised, and had no fault. After one no array may be read from it.
        """
        started = time.monotonic()
        if self._kept_moment is not None and started < self._keeps_again_at:
            return
        self._kept_moment = None
        if self._learners or self._policy.keeps_reference:
            return
        copy = self._optimizer.host_copy(MOST_KEPT)
        if copy is not None:
            copies = {name: to_host(array) for name, array in (served or {}).items()}
            self._kept_moment = (_complete(state), copy, copies)
        ended = time.monotonic()
        self._keeps_again_at = ended + (ended - started) / KEPT_SHARE

    def save_kept(self) -> Path | None:
        """Write what `keep` has copied as a checkpoint, by the CPU alone; the policy is that of
        then. None: there is no copy. Raises CheckpointError, as `save`."""
        if self._kept_moment is None:
            return None
        mx.set_default_device(mx.cpu)
        state, copy, copies = self._kept_moment
        self._optimizer.put_back(copy)
        served = {name: mx.array(array) for name, array in copies.items()}
        return self.save(state, served=served or None)

    def point_at_best(self) -> Path | None:
        """Point `best` at the checkpoint with the highest score (of equal ones the newest); None
        if none has one."""
        there = (
            checkpoints(self.run_directory) if self._keep_best and not self._best_is_fixed else []
        )
        scores = {
            path: checkpoint_score
            for path in there
            if (checkpoint_score := self._score_of(path)) is not None
        }
        best = max(scores, key=lambda path: (scores[path], moment(path)), default=None)
        if best is not None:
            point(self.run_directory / BEST, best.name)
        return best

    @property
    def _best_is_fixed(self) -> bool:
        link = self.run_directory / BEST
        return link.is_dir() and not link.is_symlink()

    def _score_of(self, checkpoint: Path) -> float | None:
        """Return the score of a checkpoint; None for one inside a step, which is not a
        candidate."""
        try:
            state = TrainerState.read(checkpoint)
        except CheckpointError:
            return None
        if moment(checkpoint)[1]:
            return None
        if self._judge is not None and self._judge.decides:
            return (
                None if state.unpublished else self._judge.score(state.step, state.policy_version)
            )
        return state.score

    def _check_room(self, path: Path, served: Mapping[str, mx.array]) -> None:
        """Raise CheckpointError before the first byte is written if the disk has no room."""
        optimizer = sum(array.nbytes for array in self._optimizer.state().values())
        needed = (
            self._policy.saved_bytes()
            + optimizer
            + STATE_BYTES
            + sum(array.nbytes for array in served.values())
        )
        if (free := free_bytes(self.run_directory)) < needed:
            kept = ", ".join(old.name for old in checkpoints(self.run_directory)) or "none"
            raise CheckpointError(
                f"{path} needs {in_gb(needed)} and {in_gb(free)} are free: it was not begun. Free"
                " some space and continue with --resume"
                f" {self.run_directory} (checkpoints there: {kept})"
            )

    def _fill(self, directory: Path, state: TrainerState, served: Mapping[str, mx.array]) -> None:
        self._policy.save(directory)
        if served:
            mx.save_safetensors(str(directory / SERVED_FILE), dict(served))
        kind = {"optimizer": self._optimizer.kind}
        mx.save_safetensors(str(directory / OPTIMIZER_FILE), self._optimizer.state(), metadata=kind)
        (directory / STATE_FILE).write_text(state.to_text(), encoding="utf-8")
        for name, learner in self._learners.items():
            learner_directory = directory / LEARNERS / name
            learner_directory.mkdir(parents=True)
            learner.save(learner_directory)
        write_checksums(directory)

    def _same(self, path: Path, state: TrainerState) -> bool:
        """A checkpoint of this very moment lies there already: it was resumed from, or just
        written."""
        try:
            there = TrainerState.read(path)
        except CheckpointError:
            return False
        return there.same_moment(state)

    def _point_beside(self, name: str) -> None:
        """checkpoints/latest and checkpoints/final, the paths that the specification prints, mean
        the newest run's.

        A file or directory of that name stays, and so does a link that does not point into a run:
        it is the user's.
        """
        link = self.run_directory.parent / name
        is_ours = link.is_symlink() and link.readlink().parts[1:] == (name,)
        if is_ours or not os.path.lexists(link):
            point(link, f"{self.run_directory.name}/{name}")

    # ------------------------------------------------------------------ resume

    def resume(self, checkpoint: Path, store: ConsumedGroups, metrics: MetricsFile) -> TrainerState:
        """Puts everything back to the checkpoint's moment. Make the RolloutBuffer only afterwards.

        Later checkpoints of this run belong to a timeline that ends here: the newest is kept as
        `superseded_…`, the others go. Raises CheckpointError, AdapterError: the checkpoint or
        metrics.jsonl is damaged, or of another model; weights may be half-loaded then, and nothing
        on the disk has changed.
        """
        state = TrainerState.read(checkpoint)
        check_files(checkpoint)
        self._policy.load(checkpoint)
        self._optimizer.restore(read_tensors(checkpoint / OPTIMIZER_FILE))
        restore_random_state(state.random_state, checkpoint)
        for name, learner in self._learners.items():
            learner.load(checkpoint / LEARNERS / name, state.step)
        lines = metrics.cut(state.step, one_a_step=True)  # first, for it may find a damaged line
        if lines < state.step:
            log.warning(
                "lines of metrics are missing: the curves begin later, or have a hole",
                file=str(metrics.path),
                lines=lines,
                steps=state.step,
            )
        store.restore(
            state.step, keep_drops_of=state.in_progress.step if state.in_progress else None
        )
        later = [
            path
            for path in checkpoints(self.run_directory)
            if moment(path) > (state.step, state.mini_batches)
        ]
        if later:
            _set_aside(later, keep=checkpoint)
        if (self.run_directory / state.checkpoint_name).is_dir():
            point(self.run_directory / LATEST, state.checkpoint_name)
        if self.point_at_best() is None and not self._best_is_fixed:
            (self.run_directory / BEST).unlink(missing_ok=True)  # it was set aside
        log.info(
            "resumed", checkpoint=checkpoint.name, steps=state.step, mini_batches=state.mini_batches
        )
        return state

    def served(self, checkpoint: Path, state: TrainerState) -> dict[str, mx.array]:
        """Return the weights that the server answered with, if the checkpoint's are newer;
        else, or if an older version wrote it, nothing. Raises CheckpointError."""
        file, trained = checkpoint / SERVED_FILE, self._policy.full_parameters()
        if not (state.unpublished and file.is_file()):
            return {}
        tensors = read_tensors(file)
        if tensors.keys() != trained.keys():
            raise CheckpointError(
                f"{file}: its weights are not those of this model: {sorted(tensors)[:1]} …"
            )
        mx.eval(tensors)  # the file may be pruned before they are used
        return {name: tensors[name] for name in trained}

    def set_aside(self, name: str, *, forget: bool = True) -> None:
        """The checkpoint of that name, if there is one, belongs to a timeline that a rollback
        left. A resume finds it until the next `save` takes its place; `superseded_…`
        keeps it. `forget`: not those before it."""
        if (path := self.run_directory / name).is_dir():
            for earlier in self.run_directory.glob(
                f"{SUPERSEDED}*" if forget else SUPERSEDED + name
            ):
                shutil.rmtree(earlier, ignore_errors=True)
            write_directory(
                path.with_name(SUPERSEDED + name), lambda directory: _link_all(path, directory)
            )


def _set_aside(later: list[Path], *, keep: Path) -> None:
    """Renames the newest of `later` and removes the others, and those set aside before but
    for `keep`."""
    *others, newest = later
    earlier = [
        path for path in newest.parent.glob(f"{SUPERSEDED}*") if path.resolve() != keep.resolve()
    ]
    for path in (*earlier, *others):
        shutil.rmtree(path, ignore_errors=True)
    newest.rename(newest.with_name(SUPERSEDED + newest.name))


def _link_all(source: Path, directory: Path) -> None:
    """`final` shares its files with the last step: full weights are not written twice."""
    for file in source.iterdir():
        if file.is_dir():
            (directory / file.name).mkdir()
            _link_all(file, directory / file.name)
            continue
        try:
            os.link(file, directory / file.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(file, directory / file.name)


def _complete(state: TrainerState) -> TrainerState:
    """Return the state with the random states of now, if it has none yet."""
    return state if state.random_state else replace(state, random_state=random_state())


def random_state() -> dict[str, Any]:
    """The random states of MLX (this thread's), numpy and Python, as JSON."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    mlx_keys: Any = mx.random.state
    version, internal, gauss = random.getstate()
    return {
        "mlx": [array.tolist() for array in mlx_keys],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def restore_random_state(state: Mapping[str, Any], checkpoint: Path) -> None:
    """The counterpart of `random_state`; also of this thread. Raises CheckpointError: those of
    `checkpoint` are damaged."""
    try:
        [(high, low)] = state["mlx"]
        mx.random.seed(high << 32 | low)  # MLX's key of a 64-bit seed is its two halves
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE} is damaged: random_state: {error!r}"
        ) from error


class CheckpointVersions:
    """Args: run: the directory whose step_* hold adapters. Any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        # A checkpoint is complete from the start and never changes; a rollback may put another in
        # its place.
        self._version_of: dict[tuple[Path, int], int | None] = {}

    def versions(self) -> list[int]:
        return sorted(self._paths())

    def path(self, version: int) -> Path | None:
        """The checkpoint of that version."""
        return self._paths().get(version)

    def load(self, version: int) -> Mapping[str, LoraPair]:
        path = self.path(version)
        if path is None:
            raise AdapterError(f"{self._run}: no checkpoint of version {version}")
        return load_adapter(path).layers

    def _paths(self) -> dict[int, Path]:
        present = {(file.parent, _changed(file)) for file in self._run.glob(f"step_*/{STATE_FILE}")}
        self._version_of = {
            key: self._version_of[key] if key in self._version_of else _version(key[0])
            for key in present
        }
        return {
            version: path for (path, _), version in self._version_of.items() if version is not None
        }


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:  # removed meanwhile
        return 0


def _version(checkpoint: Path) -> int | None:
    """The version under which a checkpoint's weights were served; None when they never were."""
    try:
        state = TrainerState.read(checkpoint)
    except CheckpointError:
        return None
    return None if state.unpublished else state.policy_version
