"""Random batches of GRPO, the same from a seed everywhere: ragged completions, rows that are masked
whole, advantages of 0, old log-probabilities far away or the policy's own. Imports numpy alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """float64, [B, T]; `advantages` [B]. `weights`: of a sampler correction, or None."""

    logprobs: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    entropies: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray | None


def make_batch(seed: int, *, corrected: bool = False) -> Batch:
    random = np.random.default_rng(seed)
    rows, width = int(random.integers(2, 6)), int(random.integers(2, 6))
    shape = (rows, width)
    lengths = random.integers(0, width + 1, rows)
    lengths[0] = width
    mask = np.arange(width) < lengths[:, None]
    if seed % 3 == 0:
        mask &= random.random(shape) < 0.8  # tokens of tools
        mask[0, 0] = True
    logprobs = -np.round(random.exponential(1.0, shape), 3)
    apart = (0.0, 0.05, 0.5, 2.0)[seed % 4]
    old = np.minimum(logprobs + np.round(apart * random.standard_normal(shape), 3), 0.0)
    reference = np.minimum(logprobs + np.round(0.3 * random.standard_normal(shape), 3), 0.0)
    entropies = np.round(random.exponential(1.0, shape), 3)
    advantages = np.round(random.standard_normal(rows), 3) * (random.random(rows) < 0.8)
    weights = np.minimum(np.exp(random.standard_normal(shape)), 2.0).round(3)
    return Batch(
        logprobs, old, reference, entropies, mask, advantages, weights if corrected else None
    )


@dataclass(frozen=True)
class PairBatch:
    """float64, [2P, T]; row 2i is chosen, 2i + 1 rejected. `collision`: -log Σ p² of each token."""

    logprobs: np.ndarray
    reference: np.ndarray
    collision: np.ndarray
    mask: np.ndarray


def make_pairs(seed: int) -> PairBatch:
    random = np.random.default_rng(seed)
    rows, width = 2 * int(random.integers(1, 5)), int(random.integers(2, 7))
    shape = (rows, width)
    mask = np.arange(width) < random.integers(1, width + 1, rows)[:, None]
    logprobs = -np.round(random.exponential(1.0, shape), 3)
    reference = np.minimum(logprobs + np.round(0.4 * random.standard_normal(shape), 3), 0.0)
    return PairBatch(logprobs, reference, np.round(random.exponential(0.5, shape), 3), mask)
