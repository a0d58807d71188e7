"""Policy versions that lie in a run's checkpoints: what `weights.PolicyHistory` reads older ones from."""

from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.lora import LoraPair, load_adapter
from mlx_parallm.rl_training.trainer_state import STATE_FILE, TrainerState


class CheckpointVersions:
    """Args: run: the directory whose step_* hold adapters. Any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known: dict[Path, int | None] = {}  # a checkpoint is complete from the start and never changes

    def versions(self) -> list[int]:
        return sorted(self._paths())

    def load(self, version: int) -> Mapping[str, LoraPair]:
        path = self._paths().get(version)
        if path is None:
            raise AdapterError(f"{self._run}: no checkpoint of version {version}")
        return load_adapter(path).layers

    def _paths(self) -> dict[int, Path]:
        present = [state.parent for state in self._run.glob(f"step_*/{STATE_FILE}")]
        self._known = {path: self._known[path] if path in self._known else _version(path) for path in present}
        return {version: path for path, version in self._known.items() if version is not None}


def _version(checkpoint: Path) -> int | None:
    """The version under which a checkpoint's weights were served; None when they never were."""
    try:
        state = TrainerState.read(checkpoint)
    except CheckpointError:
        return None
    return None if state.unpublished else state.policy_version
