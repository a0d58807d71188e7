"""Inputs of the reference values: B = 6 rows, T = 5, written out by their formulas."""

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config.algorithm import bounds_of
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.losses.policy_gradient import LossOptions
from mlx_parallm.losses.types import LossInputs
from mlx_parallm.rl_training.step.algorithms import loss_options

LENGTHS = [5, 3, 4, 2, 5, 1]
MAX_LENGTH = 8.0
_I, _T = np.meshgrid(np.arange(6), np.arange(5), indexing="ij")
NEW = -(0.3 + 0.17 * ((3 * _I + 5 * _T) % 7))
REF = NEW + 0.05 * (((_I + 4 * _T) % 5) - 2)
ENTROPY = -NEW
MASK = np.array([[t < length for t in range(5)] for length in LENGTHS])
ADVANTAGES = np.repeat(np.array([1, -0.5, -0.5, 0.2, -0.7, 0.5])[:, None], 5, axis=1)
SELECTED = ((_I + 2 * _T) % 3 == 0).astype(float)
WEIGHTS = 0.5 + 0.25 * ((_I + _T) % 4)


def rollout_logprobs(scale: float) -> np.ndarray:
    """scale 0.1 = set A (no clip binds), 0.6 = set B (4 tokens clipped high, 5 low)."""
    return NEW + scale * (((2 * _I + 3 * _T) % 5) - 2)


def options(loss: str = "clip", **settings: Any) -> LossOptions:
    """The configuration's for this loss, with other settings."""
    bounds = {key: settings.pop(key) for key in bounds_of(loss) if key in settings}
    configured = loss_options(RLTrainingConfig(loss=loss))
    return replace(configured, token_loss=partial(configured.token_loss, **bounds), **settings)


def inputs(
    scale: float,
    *,
    rows: slice | list[int] = slice(None),
    new: np.ndarray = NEW,
    pad: int = 0,
    **more: Any,
) -> LossInputs:
    """`rows`: a micro-batch of these. `more`: further fields; arrays [B, T] are cut and padded
    too."""

    def array(values: np.ndarray) -> mx.array:
        return mx.array(np.pad(values[rows], ((0, 0), (0, pad))).astype(np.float32))

    fields = {
        "logprobs": new,
        "rollout_logprobs": rollout_logprobs(scale),
        "ref_logprobs": REF,
        "advantages": ADVANTAGES,
        "entropy": ENTROPY,
        "selected": SELECTED,
    } | more
    return LossInputs(
        **{
            name: array(value) if isinstance(value, np.ndarray) else value
            for name, value in fields.items()
        },
        mask=array(MASK) > 0,
        token_normalizer=float(MASK.sum()),
        sequence_normalizer=6.0,
        max_length=MAX_LENGTH,
    )
