"""Policy versions that lie in a run's checkpoints: what `weights.PolicyHistory` reads older ones from."""

from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.rl_training.checkpoints.trainer_state import STATE_FILE, TrainerState


class CheckpointVersions:
    """Args: run: the directory whose step_* hold adapters. Any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        # A checkpoint is complete from the start and never changes; a rollback may put another in its place.
        self._known: dict[tuple[Path, int], int | None] = {}

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
        self._known = {key: self._known[key] if key in self._known else _version(key[0]) for key in present}
        return {version: path for (path, _), version in self._known.items() if version is not None}


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
