"""The policy losses a second time: numpy, float64, each formula as its paper has it. `frozen` are the log-probabilities
again, wherever a formula takes no gradient through them; so a difference quotient in `new` is its gradient."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.losses import fixtures

Array = np.ndarray
LENGTHS = np.array(fixtures.LENGTHS, float)[:, None]


def _mean(values: Array) -> Array:
    return np.where(fixtures.MASK, values, 0).sum(1, keepdims=True) / LENGTHS


def _ratio(level: str, new: Array, frozen: Array, old: Array) -> Array:
    if level == "token":
        return np.exp(new - old)
    if level == "sequence":
        return np.exp(_mean(new - old)) * np.ones_like(new)
    return np.exp(_mean(frozen - old)) * np.exp(new - frozen)


def _bounds(clip_ratio: float, clip_ratio_high: float | None) -> tuple[float, float]:
    return 1 - clip_ratio, 1 + (clip_ratio if clip_ratio_high is None else clip_ratio_high)


def _dual(ratio: Array, advantages: Array, low: float, high: float, c: float) -> Array:
    upper = np.maximum(-ratio * advantages, -np.clip(ratio, low, high) * advantages)
    return np.where(advantages < 0, np.minimum(upper, -c * advantages), upper)


def token_values(
    loss: str, level: str, settings: dict[str, Any], new: Array, frozen: Array, old: Array
) -> tuple[Array, Array]:
    """[B, T] each: the loss, and what no sampler correction multiplies."""
    ratio, held = _ratio(level, new, frozen, old), _ratio(level, frozen, frozen, old)
    advantages = fixtures.ADVANTAGES
    low, high = _bounds(settings.get("clip_ratio", 0), settings.get("clip_ratio_high"))
    moved = np.exp(frozen) - np.exp(old)
    formulas: dict[str, Callable[[], Array]] = {
        "clip": lambda: -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages),
        "dual_clip": lambda: _dual(ratio, advantages, low, high, settings["dual_clip"]),
        "two_sided": lambda: (
            -np.minimum(np.minimum(ratio, settings["ratio_delta"]) * advantages, np.clip(ratio, low, high) * advantages)
        ),
        "cispo": lambda: -np.clip(held, low, high) * advantages * new,
        "sapo": lambda: np.where(
            advantages > 0,
            *(
                -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantages
                for tau in (settings["sapo_tau_positive"], settings["sapo_tau_negative"])
            ),
        ),
        "dppo": lambda: np.where(
            np.where(advantages > 0, moved > settings["dppo_high"], moved < -settings["dppo_low"]),
            0,
            -ratio * advantages,
        ),
        "reinforce": lambda: -advantages * new,
        "importance_sampling": lambda: -ratio * advantages,
    }
    return formulas[loss](), settings["dppo_kl"] * (new - old) ** 2 if loss == "dppo" else np.zeros_like(new)


KL: dict[str, Callable[[Array], Array]] = {  # of d = ref - new
    "k1": lambda d: -d,
    "abs": np.abs,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(d) - 1 - d,
}
AGGREGATIONS: dict[str, Callable[[Array], float]] = {
    "token": lambda values: values.sum() / 20,
    "sequence": lambda values: (values.sum(1, keepdims=True) / LENGTHS).mean(),
    "sequence_sum": lambda values: values.sum(1).mean(),
    "constant": lambda values: values.sum() / (6 * fixtures.MAX_LENGTH),
}


def loss_of(
    new: Array,
    *,
    loss: str,
    scale: float,
    level: str = "token",
    aggregation: str = "token",
    settings: dict[str, Any],
    weights: Array | float = 1.0,
    kl_beta: float = 0.0,
    kl_estimator: str = "k3",
    entropy_weight: float = 0.0,
    frozen: Array = fixtures.NEW,
) -> float:
    """`registry.policy_loss` on the fixtures' inputs."""
    values, unweighted = token_values(loss, level, settings, new, frozen, fixtures.rollout_logprobs(scale))
    total = weights * values + unweighted + kl_beta * KL[kl_estimator](fixtures.REF - new)
    total = total - entropy_weight * fixtures.ENTROPY
    return float(AGGREGATIONS[aggregation](np.where(fixtures.MASK, total, 0)))


def gradient(function: Callable[[Array], float], at: Array = fixtures.NEW, step: float = 1e-6) -> Array:
    """Central differences: off by about 1e-10 here."""
    found = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        shift = np.zeros_like(at)
        shift[index] = step
        found[index] = (function(at + shift) - function(at - shift)) / (2 * step)
    return found
