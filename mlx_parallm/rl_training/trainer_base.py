"""The name of the trainer that stays; it is in `step.trainer` and knows no algorithm."""

from mlx_parallm.rl_training.step.algorithms import Algorithm
from mlx_parallm.rl_training.step.trainer import StepResult, Trainer

__all__ = ["Algorithm", "StepResult", "Trainer"]
