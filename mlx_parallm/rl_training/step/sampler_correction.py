"""Weights for the gap between the distribution that was sampled from and the same weights as the trainer computes them.

Engine and trainer add the same numbers up in another order and, below float32, round differently; after an optimizer
step more tokens stand apart. With a correction on, the trainer scores every sequence before the step's first update
(`old_logprobs`); the loss's ratio is against those, and each token's loss is multiplied by a constant made of
exp(old_logprobs - rollout_logprobs). Without one, the ratio is against `rollout_logprobs` itself and contains that
factor already: the two are never used together.

`rollout_logprobs` are those *before* top-k, top-p and the like, as the trainer's are: the same function of the weights,
so that ratio and weight are 1 where nothing but a filter stands between sampler and trainer. The log-probabilities
after the filter would multiply every ratio by the mass that the filter kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.config.algorithm import sampler_bounds
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.execution.user_code import is_reference
from mlx_parallm.losses.kl import LOG_RATIO_LIMIT

MISMATCH_BOUND = 1e-3
"""Mean |trainer - engine| in nats a token on the same weights, from which on "auto" corrects: a thousandth of the
sampled tokens' probability on average, two orders below what the ratio's clipping (0.2) notices. It lies between
float32 (at most 1.3e-5) and what is narrower (at least 2e-3), whatever the model's size."""
MEASURED_MISMATCH: Mapping[tuple[mx.Dtype, bool], float] = {
    (mx.float32, False): 1.3e-5,
    (mx.float32, True): 1.2e-5,
    (mx.float16, False): 5.7e-3,
    (mx.float16, True): 6.6e-3,
    (mx.bfloat16, False): 5.2e-2,
    (mx.bfloat16, True): 4.7e-2,
}
"""Mean |trainer - engine| by (dtype of the activations, 4-bit weights): the largest of the models that
`scripts/bench/mismatch.py` measured on a CPU (docs/off_policy.md). `mlx_parallm_doctor --contracts` measures it for any
model and device."""


@dataclass(frozen=True)
class SamplerCorrection:
    """`floor` is read by "mis" alone."""

    kind: Literal["tis", "mis"]
    level: Literal["token", "sequence"]
    cap: float
    floor: float = 0.0

    def weights(
        self, old_logprobs: np.ndarray, rollout_logprobs: np.ndarray, lengths: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Both [N] → weights [N] float32, and which were cut or dropped [N] bool. `lengths`: tokens of each row.

        With w = exp(old - rollout) of a token, or of a sequence's sum: TIS is min(w, cap) (truncated importance
        sampling, Yao et al. 2025, fengyao.notion.site/off-policy-rl); MIS is w where floor ≤ w ≤ cap and 0 elsewhere
        (masked importance sampling, IcePop: arXiv:2510.18855). Sums stay in log space and are bounded by ±20.

        Worked, cap 2, floor 0.5, a sequence with old - rollout = [0, 1, -1]: w = [1, 2.718, 0.368] → TIS [1, 2, 0.368],
        MIS [1, 0, 0]; the sequence's w is 1, so with level "sequence" all three are 1.
        """
        log_weights: np.ndarray = old_logprobs.astype(np.float64) - rollout_logprobs.astype(np.float64)
        if self.level == "sequence":
            rows = np.repeat(np.arange(len(lengths)), np.array(lengths, np.int64))
            sums: np.ndarray = np.bincount(rows, weights=log_weights, minlength=len(lengths))
            log_weights = sums[rows]
        weights = np.exp(np.clip(log_weights, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        cut = weights > self.cap
        if self.kind == "tis":
            return np.minimum(weights, self.cap).astype(np.float32), cut
        cut |= weights < self.floor
        return np.where(cut, 0.0, weights).astype(np.float32), cut


def sampler_correction(config: RLTrainingConfig, model: nn.Module) -> SamplerCorrection | None:
    """The configured correction; "auto" is TIS where `MEASURED_MISMATCH` of this model is above `MISMATCH_BOUND`, and
    none for a loss of the user's own, which need not know of weights.
    """
    kind = config.sampler_correction
    if kind == "auto":
        own_loss = config.loss is not None and is_reference(config.loss)
        kind = "tis" if not own_loss and expected_mismatch(model) > MISMATCH_BOUND else "none"
    if kind == "none":
        return None
    cap, floor = sampler_bounds(config)
    return SamplerCorrection(kind, config.sampler_correction_level, cap, floor)


def expected_mismatch(model: nn.Module) -> float:
    """The row of `MEASURED_MISMATCH` of a tree, adapters aside: they are float32 whatever the base is."""
    base = [(name, array) for name, array in tree_flatten(model.parameters()) if ".lora_" not in name]
    floats = [array for _, array in base if mx.issubdtype(array.dtype, mx.floating)]
    dtype = max(floats, key=lambda array: array.nbytes).dtype
    return MEASURED_MISMATCH[dtype, any(name.endswith(".scales") for name, _ in base)]
