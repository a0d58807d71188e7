"""An optimizer of mlx.optimizers, made by somebody else, as keys of [rl_training].

It is read for its numbers and made again: the trainer's works on float32 masters, and in groups (optimizer_groups.py).
"""

from typing import Any

import mlx.optimizers as optimizers
import numpy as np

from mlx_parallm.config.load import parse_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.parameters import scalar
from mlx_parallm.rl_training.step.optimizer_groups import make_optimizer

KINDS = {optimizers.Adam: "adamw", optimizers.AdamW: "adamw", optimizers.Lion: "lion", optimizers.Muon: "muon"}


def optimizer_keys(optimizer: optimizers.Optimizer) -> dict[str, Any]:
    """Adam becomes AdamW without a decay; both correct their bias. Raises ConfigError: it is none of KINDS, its rate is
    a schedule, or one of its numbers would get lost."""
    kind = KINDS.get(type(optimizer))
    if kind is None:
        known = ", ".join(known.__name__ for known in KINDS)
        raise ConfigError(f"optimizer = {type(optimizer).__name__}: expected one of mlx.optimizers' {known}")
    if optimizer._schedulers:
        raise ConfigError("the optimizer's learning rate is a schedule; give a number")
    keys = {"optimizer": kind, "learning_rate": scalar(optimizer.learning_rate)}
    keys["weight_decay"] = float(getattr(optimizer, "weight_decay", 0.0))
    if kind == "adamw":
        keys["adam_beta1"], keys["adam_beta2"] = (float(beta) for beta in optimizer.betas)
    made = make_optimizer(kind, parse_config({"rl_training": keys}, "optimizer").rl_training)
    for name, value in vars(optimizer).items():
        if name.startswith("_") or name in ("bias_correction", "weight_decay"):
            continue
        kept = getattr(made, name)
        if not np.array_equal(value, kept):
            raise ConfigError(
                f"the optimizer's {name} = {value} would get lost (the trainer's is {kept}): leave it out"
            )
    return keys
