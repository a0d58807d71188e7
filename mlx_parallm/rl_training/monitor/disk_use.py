"""What a run does to its disk: prunes rollouts after a checkpoint, ends in order before it is full. No MLX."""

from pathlib import Path

from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import CheckpointError
from mlx_parallm.rl_training.events import CheckpointSaved, RunEvents
from mlx_parallm.rl_training.run_directory import checkpoints, moment
from mlx_parallm.rollout_store.disk import GB, shortage
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.log import get_logger

log = get_logger("train")


class DiskUse:
    """`keep`: how many of the newest checkpoints can ask for rollouts again. An older one that is kept for being the
    best cannot: a resume from it samples anew."""

    def __init__(self, run: Path, store: RolloutStore, config: RolloutsConfig, *, keep: int) -> None:
        self._run, self._store, self._config, self._keep = run, store, config, keep
        self._told = False

    def subscribe(self, events: RunEvents) -> None:
        events.subscribe(CheckpointSaved, lambda event: self.prune())

    def check(self) -> None:
        """Raises CheckpointError when the reserve is touched: the time to save and to end."""
        if fault := shortage(self._run, self._store.min_free_bytes):
            raise CheckpointError(f"training stops: {fault}, then go on with --resume {self._run}")

    def prune(self) -> None:
        """Prunes consumed rollouts that no recent checkpoint of the run can bring back."""
        kept = [moment(path)[0] for path in checkpoints(self._run)[-self._keep :]]
        if not kept:
            return
        keep, bound = self._config.keep, round(self._config.max_gb * GB)
        always = -1 if keep == "all" else max(kept) - keep
        pruned = self._store.prune(min(kept), always_up_to_step=always, max_bytes=bound)
        if pruned:
            log.info("consumed rollouts pruned", groups=pruned, file_gb=self._store.size_bytes() / GB)
        elif bound and (used := self._store.database.size_bytes(used=True)) > bound and not self._told:
            self._told = True
            log.warning(
                "rollouts.sqlite is larger than rollouts.max_gb, and all in it waits or may be needed by a resume:"
                " fewer keep_checkpoints or a shorter checkpoint_interval make it smaller",
                gb=used / GB,
                max_gb=self._config.max_gb,
            )
