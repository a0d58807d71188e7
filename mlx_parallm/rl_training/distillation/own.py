"""Teachers that are the policy's own weights: the base, a saved version, the moving average, and
the policy as it is now (behind a prompt that says more). They cost no second model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx

from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.errors import AdapterError, CheckpointError, ConfigError
from mlx_parallm.rl_training.checkpoint import CheckpointVersions
from mlx_parallm.rl_training.distillation.scoring import Answer, Scored, forward
from mlx_parallm.rl_training.run_directory import FINAL, LATEST
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.files import local_path

Weights = Callable[[], AbstractContextManager[None]]


class OwnWeights:
    """The policy's tree with other weights in it for the length of a scoring."""

    def __init__(self, name: str, trainer: Trainer, weights: Weights) -> None:
        self.name = name
        self._trainer, self._weights = trainer, weights

    @property
    def reads_images(self) -> bool:
        return self._trainer.images is not None

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        trainer = self._trainer
        with self._weights():
            return forward(
                trainer.model,
                answers,
                lambda rows: trainer.collate(rows, range(len(rows)), together=1),
                keep,
                should_stop,
                seeing=trainer.seeing,
            )

    def close(self) -> None:
        """Do nothing: the weights belong to the trainer."""


def own_teacher(config: TeacherConfig, trainer: Trainer) -> OwnWeights:
    """The teacher of one of these kinds: call it before a checkpoint is resumed, for "base" is the
    weights that the run began with. Raises ConfigError: no such checkpoint, or one that does not
    fit."""
    policy = trainer.policy
    if config.kind == "policy":
        return OwnWeights(config.name, trainer, nullcontext)
    if config.kind == "ema":
        return OwnWeights(config.name, trainer, policy.reference)
    if config.kind == "base":
        first = [] if policy.lora else policy.slots.read()
        return OwnWeights(config.name, trainer, lambda: policy.base(first))
    arrays = _saved(config, trainer)
    return OwnWeights(config.name, trainer, lambda: policy.slots.bound(arrays))


def _saved(config: TeacherConfig, trainer: Trainer) -> list[mx.array]:
    where = f"distillation: teacher {config.name!r}"
    path = local_path(config.path)
    if config.policy_version is not None:
        versions = CheckpointVersions(path)
        step = versions.path(config.policy_version)
        if step is None:
            saved = ", ".join(map(str, versions.versions())) or "none"
            raise ConfigError(
                f"{where}: {path} has no checkpoint of policy version {config.policy_version};"
                f" it has: {saved}"
            )
        path = step
    for newest in (FINAL, LATEST):
        if (path / newest).is_dir():
            path = path / newest
            break
    try:
        return trainer.policy.saved(path)
    except (AdapterError, CheckpointError) as error:
        raise ConfigError(f"{where}: {error}") from error
