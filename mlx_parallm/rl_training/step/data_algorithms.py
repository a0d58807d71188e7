"""Algorithms on rows of a file: a loss, and whether it reads the reference. `algorithms.py` merges them in.

One more is a function in `losses.preference`, a line in `LOSSES`, and its name (with its options) in `config_data`.
"""

from collections.abc import Callable
from functools import partial

from mlx_parallm.config.data import BETAS, PAIRED, USES_REFERENCE, PreferenceConfig
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.losses.preference import cpo_loss, dpo_loss, kto_loss, nll_loss, orpo_loss, simpo_loss
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.step.trainer import Algorithm

LOSSES: dict[str, Callable[[PreferenceConfig, float], Callable[[LossInputs], LossOutputs]]] = {
    "dpo": lambda own, beta: partial(dpo_loss, beta=beta, loss_type=own.loss_type, label_smoothing=own.label_smoothing),
    "kto": lambda own, beta: partial(kto_loss, beta=beta),
    "orpo": lambda own, beta: partial(orpo_loss, beta=beta),
    "simpo": lambda own, beta: partial(simpo_loss, beta=beta, gamma=own.gamma),
    "cpo": lambda own, beta: partial(cpo_loss, beta=beta, nll_weight=own.nll_weight),
    "sft": lambda own, beta: nll_loss,
}


def on_rows(config: RLTrainingConfig) -> Algorithm:
    """The configured algorithm on rows."""
    name, own = config.algorithm, config.preference
    beta = BETAS.get(name, 0.0) if own.beta is None else own.beta
    return Algorithm(
        name=name,
        loss=LOSSES[name](own, beta),
        advantages=lambda rewards: None,  # there are no groups of rewards
        needs_reference=name in USES_REFERENCE,
        on_data=True,
        rows_per_example=2 if name in PAIRED else 1,
        entropy_slope=False,
    )


DATA_ALGORITHMS: dict[str, Callable[[RLTrainingConfig], Algorithm]] = dict.fromkeys(LOSSES, on_rows)
