"""From the configuration to an `Algorithm`. `ALGORITHMS` is the registry: one function a line.

The algorithms that learn from rollouts differ in what their presets say (`config.algorithm.PRESETS`, filled into the
configuration as it is read), so `policy_gradient` makes them all; those that learn from rows of a file are
`data_algorithms`' own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from mlx_parallm.config.algorithm import LOSS_SETTINGS, PRESETS
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.execution.user_code import is_reference
from mlx_parallm.losses.advantages import AdvantageKind, Estimator, group_advantages, raw_rewards, to_go, whiten
from mlx_parallm.losses.gae import ppo
from mlx_parallm.losses.registry import policy_loss
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.step.custom_loss import own_advantage, own_loss
from mlx_parallm.rl_training.step.data_algorithms import DATA_ALGORITHMS
from mlx_parallm.rl_training.step.prepare import PreparedBatch
from mlx_parallm.rl_training.step.trainer import Algorithm


def policy_gradient(config: RLTrainingConfig) -> Algorithm:
    """The configured loss on the configured advantages, functions of the user's own included. Raises ConfigError."""
    return Algorithm(
        name=config.algorithm,
        loss=_loss(config),
        advantages=_estimator(config),
        needs_reference=config.kl_beta > 0,
        finish=whitened if config.advantage_whiten else None,
        entropy_slope=config.entropy_weight > 0 or is_reference(cast(str, config.loss)),
    )


ALGORITHMS: dict[str, Callable[[RLTrainingConfig], Algorithm]] = {
    **dict.fromkeys(PRESETS, policy_gradient),
    "ppo": lambda config: ppo(policy_gradient(config), config),
    **DATA_ALGORITHMS,
}


def make_algorithm(config: RLTrainingConfig) -> Algorithm:
    """The configured algorithm, with the user's own advantage and loss where they are set. Raises ConfigError."""
    return ALGORITHMS[config.algorithm](config)


def whitened(prepared: PreparedBatch) -> PreparedBatch:
    """REINFORCE++ (arXiv:2501.03262): each token's reward-to-go, with the KL in it where kl_in = "reward", whitened
    over the tokens of the step. With group means taken off first (advantage = "mean") it is REINFORCE++-baseline."""
    values = prepared.advantages.astype(np.float64)
    if prepared.kl_penalty is not None:
        values = values - to_go(prepared.kl_penalty, prepared.lengths)
    return replace(prepared, advantages=whiten(values).astype(np.float32))


def _loss(config: RLTrainingConfig) -> Callable[[LossInputs], LossOutputs]:
    name = cast(str, config.loss)  # every preset has one
    if is_reference(name):
        return own_loss(name)
    return partial(
        policy_loss,
        loss=name,
        ratio_level=config.ratio_level or "token",
        aggregation=config.loss_aggregation or "token",
        kl_estimator=config.kl_estimator,
        entropy_weight=config.entropy_weight,
        **{key: getattr(config, key) for key in LOSS_SETTINGS[name]},
    )


def _estimator(config: RLTrainingConfig) -> Estimator:
    if config.advantage is not None and is_reference(config.advantage):
        return own_advantage(config.advantage)
    if config.advantage is None or (config.advantage == "none" and config.advantage_whiten):
        return raw_rewards  # the baseline is the batch's, or the value head's
    return partial(group_advantages, kind=cast(AdvantageKind, config.advantage))
