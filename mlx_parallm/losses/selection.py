"""Tokens of a step that its loss leaves out, or holds back, by their entropy or their covariance.
No MLX.

All of them are chosen before the step's first update, over all its trained tokens: neither what
micro-batches and ranks it is cut into, nor what its earlier updates have changed, moves any.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


def high_entropy(entropies: np.ndarray, share: float) -> np.ndarray:
    """Return which tokens [N] are of the `share` with the highest entropies [N]: at least their
    quantile 1 - share, linear between neighbours (arXiv:2506.01939, TRL's top_entropy_quantile).

    Worked, share 0.5: entropies [1, 2, 3, 5] → quantile 2.5: [no, no, yes, yes].
    """
    return np.asarray(entropies >= np.quantile(entropies, 1.0 - share))


def covariances(advantages: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Return (A - mean A) · (log π - mean log π) of each token, [N] float64 (arXiv:2505.22617,
    eq. 10).

    Worked: A [1, -1], log π [-1, -3] → [1, 1].
    """
    a, logp = advantages.astype(np.float64), logprobs.astype(np.float64)
    return np.asarray((a - a.mean()) * (logp - logp.mean()))


def clip_cov(covariances: np.ndarray, random: np.random.Generator, **settings: float) -> np.ndarray:
    """Return which tokens [N] Clip-Cov detaches: `cov_share` of all, at least one, at random among
    those whose covariance lies between cov_low and cov_high."""
    between = (covariances > settings["cov_low"]) & (covariances < settings["cov_high"])
    count = max(int(len(covariances) * settings["cov_share"]), 1)
    chosen = np.zeros(len(covariances), bool)
    chosen[random.permutation(np.flatnonzero(between))[:count]] = True
    return chosen


def kl_cov(covariances: np.ndarray, random: np.random.Generator, **settings: float) -> np.ndarray:
    """Return which tokens [N] KL-Cov holds back: the `cov_share` of all, at least one, with the
    largest covariances; of equal ones the first."""
    count = max(int(len(covariances) * settings["cov_share"]), 1)
    chosen = np.zeros(len(covariances), bool)
    chosen[np.argsort(-covariances, kind="stable")[:count]] = True
    return chosen


BY_COVARIANCE = {"clip_cov": clip_cov, "kl_cov": kl_cov}
"""By the names of their losses."""
SELECTING = ("cov_share", "cov_low", "cov_high")
"""Settings of losses that choose their tokens."""


@dataclass(frozen=True)
class Selection:
    """The tokens of each step that are chosen so.

    `loss`: whose `BY_COVARIANCE` is, with its `settings`. `top_entropy`: share of the tokens whose
    policy loss counts; None: of all.
    """

    loss: str
    settings: dict[str, Any] = field(default_factory=dict)
    top_entropy: float | None = None
    seed: int = 0

    @property
    def by_covariance(self) -> bool:
        return self.loss in BY_COVARIANCE

    def covariant(self, advantages: np.ndarray, logprobs: np.ndarray, step: int) -> np.ndarray:
        """Return the tokens [N] that the loss treats in its own way."""
        random = np.random.default_rng([self.seed & 0xFFFFFFFF, step])
        choose = BY_COVARIANCE[self.loss]
        return choose(covariances(advantages, logprobs), random, **self.settings)
