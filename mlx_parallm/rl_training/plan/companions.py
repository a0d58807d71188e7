"""The companions of sequences that take memory, a line each."""

from mlx_parallm.rl_training.plan.companion import PlannedCompanion
from mlx_parallm.rl_training.plan.distillation import PlannedTeachers
from mlx_parallm.rl_training.plan.routing import PlannedExperts

COMPANIONS: tuple[PlannedCompanion, ...] = (
    PlannedTeachers(),
    PlannedExperts(),
)
