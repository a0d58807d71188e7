"""Teachers, plugged in: [rl_training.distillation] is the core's, who scores is this folder's."""

from mlx_parallm.config.leaves import Leaf

LEAF = Leaf("distillation", companion="mlx_parallm.rl_training.distillation.companion:teachers_of")
