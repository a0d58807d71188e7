"""Memory of teachers."""

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LearningSection
from mlx_parallm.rl_training.plan.companion import PlannedCompanion
from mlx_parallm.rl_training.plan.model_shape import FLOAT, ModelShape, loaded_weights
from mlx_parallm.rl_training.step.distillation import scores_bytes
from mlx_parallm.rl_training.step.memory import Lengths


class PlannedTeachers(PlannedCompanion):
    """Weights of teachers, older ones of the policy, and what a step keeps of their scores. A
    teacher's forward pass needs less than the training step that comes after it."""

    part = "teachers"

    def weights(self, training: LearningSection, model: ModelConfig) -> int:
        models = [each for each in training.distillation.teachers if each.kind == "model"]
        return sum(
            loaded_weights(
                model.model_copy(update={"base_path": each.path, "revision": each.revision}),
                quantize=each.quantize,
            )
            for each in models
        )

    def held(self, training: LearningSection, shape: ModelShape, longest: Lengths) -> int:
        if not training.distillation.active:
            return 0
        lora, kinds = training.lora.enabled, [each.kind for each in training.distillation.teachers]
        older = kinds.count("checkpoint") + (not lora and "base" in kinds)
        width = FLOAT if lora else shape.width
        tokens = training.atropos.rollout_batch_size * longest.completion
        scores = scores_bytes(training.distillation, tokens, shape.vocab)
        return super().held(training, shape, longest) + older * shape.trained * width + scores
