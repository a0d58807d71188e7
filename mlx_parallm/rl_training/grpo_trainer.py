"""The name of GRPO that stays: an algorithm for the one `Trainer`, made in `step.algorithms`."""

from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.algorithms import ALGORITHMS, policy_gradient

__all__ = ["ALGORITHMS", "make_algorithm", "policy_gradient"]
