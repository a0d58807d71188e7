"""Memory of recorded experts."""

from mlx_parallm.config.training import LearningSection
from mlx_parallm.rl_training.plan.companion import PlannedCompanion
from mlx_parallm.rl_training.plan.model_shape import ModelShape
from mlx_parallm.rl_training.step.memory import Lengths, recorded_bytes


class PlannedExperts(PlannedCompanion):
    """The recorded experts of a step's rollouts."""

    part = "recorded experts"

    def held(self, training: LearningSection, shape: ModelShape, longest: Lengths) -> int:
        return recorded_bytes(
            shape.routes,
            longest.completion + training.router_replay_prompts * longest.prompt,
            rollouts=training.atropos.rollout_batch_size,
            examples=training.batch_size,
        )
