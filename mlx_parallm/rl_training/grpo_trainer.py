"""GRPO: advantages relative to the group, clipped ratio against the behaviour policy, KL to the reference.

`ALGORITHMS` is the registry: an algorithm is one function here (a loss and an advantage) and one line there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.losses.policy_gradient import grpo_loss
from mlx_parallm.rl_training.advantages import group_advantages
from mlx_parallm.rl_training.own_functions import own_advantage, own_loss
from mlx_parallm.rl_training.trainer_base import Algorithm
from mlx_parallm.user_code import is_reference


def grpo(config: RLTrainingConfig) -> Algorithm:
    """GRPO (arXiv:2402.03300) with DAPO's token mean over the mini-batch and clip-higher (arXiv:2503.14476)."""
    return Algorithm(
        name="grpo",
        loss=partial(
            grpo_loss,
            clip_low=config.clip_ratio,
            clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            kl_beta=config.kl_beta,
            kl_estimator=config.kl_estimator,
            entropy_weight=config.entropy_weight,
            aggregation=config.loss_aggregation,
        ),
        advantages=partial(group_advantages, kind="mean" if config.advantage == "mean" else "std"),
        needs_reference=config.kl_beta > 0,
    )


ALGORITHMS: dict[str, Callable[[RLTrainingConfig], Algorithm]] = {"grpo": grpo}


def make_algorithm(config: RLTrainingConfig) -> Algorithm:
    """The configured algorithm, with the user's own advantage and loss where they are set. Raises ConfigError."""
    algorithm = ALGORITHMS[config.algorithm](config)
    if is_reference(config.advantage):
        algorithm = replace(algorithm, advantages=own_advantage(config.advantage))
    if config.loss is not None:
        algorithm = replace(algorithm, loss=own_loss(config.loss))
    return algorithm
