"""Tinker's losses over flat arrays: a number a token in, one number out. Sums over tokens, never
means.

    lp   log-probability of each target under the weights that are trained, at temperature 1
    q    `logprobs` of the datum: the sampler's
    A    `advantages`; w `weights`; r = exp(lp - q); sg = stop_gradient

    cross_entropy         Σ -lp · w                                  w = 1 if it is not sent
    importance_sampling   -Σ r · A
    ppo                   -Σ min(r · A, clip(r, low, high) · A)      low and high: 0.8 and 1.2
    cispo                 -Σ sg(clip(r, low, high)) · lp · A         0 and 4
    dro                   -Σ [lp · A - beta / 2 · (lp - q)²]         beta 0.05
    gspo                  as ppo with r = s · exp(lp - sg(lp)), s = exp(mean of sg(lp) - q over
                          `sequence_ratio_mask`); the service's thresholds are not published, so
                          both must be sent

Source: Tinker's documentation, "Losses"; PPO arXiv:1707.06347, CISPO arXiv:2506.13585, GSPO
arXiv:2507.18071.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import RequestError
from mlx_parallm.losses.types import Number
from mlx_parallm.models.blockwise import Objective
from mlx_parallm.models.ops import as_data
from mlx_parallm.rl_training.step.collate import MicroBatch

Columns = Mapping[str, mx.array]
"""The datums' inputs of the tokens of a micro-batch by name, [N] float32, and "datum", [N]
int32: which is whose."""
Settings = Mapping[str, Number]
"""The loss's configuration by name."""
REFUSED = {
    "stable_reinforce": "its formula is not published; importance_sampling, ppo, cispo, dro and"
    " gspo are off-policy"
    " losses that this server has (in a cookbook recipe: loss_fn=importance_sampling)",
}


@dataclass(frozen=True)
class LossKind:
    """`inputs`: fields that each datum must bring, beside target_tokens; `optional`: that it may.
    `settings`: keys of the configuration and their defaults, None = must be sent. `idle`: where
    these are 0 a position changes nothing."""

    function: Callable[[mx.array, Columns, Settings], mx.array]
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    settings: Mapping[str, float | None] | None = None
    idle: tuple[str, ...] = ()


def cross_entropy(lp: mx.array, columns: Columns, settings: Settings) -> mx.array:
    """Σ -lp · w [N] → one number."""
    return -(lp * columns["weights"]).sum()


def importance_sampling(lp: mx.array, columns: Columns, settings: Settings) -> mx.array:
    """-Σ exp(lp - q) · A."""
    return -(_ratio(lp, columns) * columns["advantages"]).sum()


def ppo(lp: mx.array, columns: Columns, settings: Settings) -> mx.array:
    """-Σ min(r · A, clip(r) · A), r = exp(lp - q).

    Worked: r = 1.5, A = 2 and bounds 0.8, 1.2: -min(3, 2.4) = -2.4, slope 0; A = -2: -min(-3, -2.4)
    = 3."""
    return _clipped(_ratio(lp, columns), columns["advantages"], settings)


def cispo(lp: mx.array, columns: Columns, settings: Settings) -> mx.array:
    """-Σ sg(clip(r)) · lp · A."""
    ratio = mx.clip(
        _ratio(lp, columns), settings["clip_low_threshold"], settings["clip_high_threshold"]
    )
    return -(mx.stop_gradient(ratio) * lp * columns["advantages"]).sum()


def dro(lp: mx.array, columns: Columns, settings: Settings) -> mx.array:
    """-Σ [lp · A - beta / 2 · (lp - q)²]; the quadratic term counts at every token, those with A
    = 0 too."""
    quadratic = 0.5 * settings["beta"] * mx.square(lp - columns["logprobs"])
    return -(lp * columns["advantages"] - quadratic).sum()


def gspo(lp: mx.array, columns: Columns, settings: Settings) -> mx.array:
    """PPO's objective with one ratio a sequence: s · exp(lp - sg(lp)), s = exp(mean over the
    mask of sg(lp) - q)."""
    fixed, mask, datum = mx.stop_gradient(lp), columns["sequence_ratio_mask"], columns["datum"]
    zeros = mx.zeros_like(fixed)  # at least as many as datums
    apart = mx.where(mask != 0, (fixed - columns["logprobs"]) * mask, 0.0)
    sums, tokens = zeros.at[datum].add(apart), zeros.at[datum].add(mask)
    means = sums / mx.maximum(tokens, 1e-20)
    ratio = mx.exp(means)[datum] * mx.exp(lp - fixed)
    return _clipped(ratio, columns["advantages"], settings)


def _clipped(ratio: mx.array, advantages: mx.array, settings: Settings) -> mx.array:
    clipped = mx.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -mx.minimum(ratio * advantages, clipped * advantages).sum()


def _ratio(lp: mx.array, columns: Columns) -> mx.array:
    """exp(lp - q) if A is not 0; otherwise it has no effect and might overflow."""
    return mx.exp(mx.where(columns["advantages"] != 0, lp - columns["logprobs"], 0.0))


_POLICY, _IDLE = ("logprobs", "advantages"), ("advantages",)
LOSSES: Mapping[str, LossKind] = {
    "cross_entropy": LossKind(cross_entropy, (), ("weights",), idle=("weights",)),
    "importance_sampling": LossKind(importance_sampling, _POLICY, idle=_IDLE),
    "ppo": LossKind(
        ppo, _POLICY, settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, idle=_IDLE
    ),
    "cispo": LossKind(
        cispo, _POLICY, settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, idle=_IDLE
    ),
    "dro": LossKind(dro, _POLICY, settings={"beta": 0.05}),
    "gspo": LossKind(
        gspo,
        (*_POLICY, "sequence_ratio_mask"),
        settings={"clip_low_threshold": None, "clip_high_threshold": None},
        idle=("advantages", "sequence_ratio_mask"),
    ),
}


def find_loss(name: str) -> LossKind:
    """Raises RequestError: a name that is not offered."""
    if name in LOSSES:
        return LOSSES[name]
    if name in REFUSED:
        raise RequestError(f"loss_fn {name!r} is not offered: {REFUSED[name]}", param="loss_fn")
    raise RequestError(
        f"loss_fn {name!r} is unknown; there are {', '.join(LOSSES)}", param="loss_fn"
    )


def loss_settings(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """The configuration with its defaults. Raises RequestError: an unknown or missing key, no
    finite number."""
    defaults = find_loss(name).settings or {}
    for key, value in config.items():
        if key not in defaults:
            readable = (
                f"it reads {', '.join(defaults)}" if defaults else "it reads no configuration"
            )
            raise RequestError(f"loss_fn_config of {name} has the unknown key {key!r}; {readable}")
        if isinstance(value, str) or not math.isfinite(value):
            raise RequestError(f"loss_fn_config: {key} = {value!r} is not a finite number")
    values = {key: config.get(key, default) for key, default in defaults.items()}
    if missing := [key for key, value in values.items() if value is None]:
        raise RequestError(
            f"loss_fn_config of {name} needs {' and '.join(missing)}: bounds of the ratio,"
            " such as 0.9997 and 1.0004"
        )
    settings = {key: float(value) for key, value in values.items() if value is not None}
    low, high = (
        settings.get("clip_low_threshold", 0.0),
        settings.get("clip_high_threshold", math.inf),
    )
    if low > high:
        raise RequestError(
            f"loss_fn_config: clip_low_threshold {low:g} is above clip_high_threshold {high:g}"
        )
    return settings


@dataclass(frozen=True)
class DatumLoss:
    """A loss over all datums of a request, for `Trainer.accumulate`.

    Attributes:
        columns: the datums' inputs, [N] float32 over all tokens, one datum after the other.
        datums: [N] which datum a token is of.
    """

    kind: LossKind
    settings: Mapping[str, float]
    columns: Mapping[str, np.ndarray]
    datums: np.ndarray

    @property
    def metric_names(self) -> list[str]:
        return []

    @property
    def fuse(self) -> bool:
        return True

    def measure(self, micro_batch: MicroBatch) -> None:
        """No further scores."""

    def objective(self, micro_batch: MicroBatch) -> Objective:
        """(logprobs, entropy; each [N]) → (loss, (no metrics, no mismatch, logprobs, entropy))."""
        rows = micro_batch.columns
        longer = {
            name: mx.array(np.pad(column[rows], (0, 1))) for name, column in self.columns.items()
        }
        _, numbers = np.unique(self.datums[rows], return_inverse=True)
        longer["datum"] = mx.array(np.pad(numbers.astype(np.int32), (0, 1)))

        def objective(
            logprobs: mx.array, entropy: mx.array
        ) -> tuple[mx.array, tuple[mx.array, ...]]:
            # one of one number is data so
            columns = {name: column[:-1] for name, column in longer.items()}
            settings = {name: as_data(number) for name, number in self.settings.items()}
            loss = self.kind.function(logprobs, columns, settings)
            scores = mx.stop_gradient(logprobs), mx.stop_gradient(entropy)
            return loss, (mx.zeros((0,)), mx.zeros((8,)), *scores)

        return objective


def join_columns(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One datum after the other, flat."""
    return (
        np.concatenate([array.reshape(-1) for array in arrays])
        if arrays
        else np.zeros(0, np.float32)
    )
