"""The seam for what a companion of sequences takes in memory."""

from typing import ClassVar

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LearningSection
from mlx_parallm.rl_training.plan.model_shape import ModelShape
from mlx_parallm.rl_training.step.memory import Lengths


class PlannedCompanion:
    """One part of the memory estimate, under the name that the plan prints."""

    part: ClassVar[str]

    def weights(self, training: LearningSection, model: ModelConfig) -> int:
        """Return the bytes of models that it has in this process. `model`: the policy's. Raises
        ModelError, ConfigError: one cannot be loaded."""
        return 0

    def held(self, training: LearningSection, shape: ModelShape, longest: Lengths) -> int:
        """Return all its bytes in a step whose sequences are as long as `longest`. `shape.beside`
        has its `weights`."""
        return shape.beside.get(self.part, 0)
