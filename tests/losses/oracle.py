"""The policy losses a second time: numpy, float64, each formula as its paper has it. `frozen`
are the log-probabilities again, wherever a formula takes no gradient through them; so a
difference quotient in `new` is its gradient."""

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


class Terms:
    """What the formulas read. `frozen` holds no gradient: see the top."""

    def __init__(
        self, level: str, settings: dict[str, Any], new: Array, frozen: Array, old: Array
    ) -> None:
        self.new, self.settings, self.advantages = new, settings, fixtures.ADVANTAGES
        self.log_ratio, self.held_log_ratio = new - old, frozen - old
        self.ratio, self.held = _ratio(level, new, frozen, old), _ratio(level, frozen, frozen, old)
        self.bounds = _bounds(settings.get("clip_ratio", 0), settings.get("clip_ratio_high"))
        self.moved = np.exp(frozen) - np.exp(old)

    def below(self, ceiling: float) -> Array:
        """The clipped surrogate, of a ratio of at most `ceiling`."""
        unclipped = np.minimum(self.ratio, ceiling) * self.advantages
        return -np.minimum(unclipped, np.clip(self.ratio, *self.bounds) * self.advantages)


def _dual_clip(t: Terms) -> Array:
    upper = np.maximum(-t.ratio * t.advantages, -np.clip(t.ratio, *t.bounds) * t.advantages)
    return np.where(
        t.advantages < 0, np.minimum(upper, -t.settings["dual_clip"] * t.advantages), upper
    )


def _sapo(t: Terms) -> Array:
    tau = np.where(
        t.advantages > 0, t.settings["sapo_tau_positive"], t.settings["sapo_tau_negative"]
    )
    return -4 / tau / (1 + np.exp(-tau * (t.ratio - 1))) * t.advantages


def _dppo(t: Terms) -> Array:
    too_far = np.where(
        t.advantages > 0, t.moved > t.settings["dppo_high"], t.moved < -t.settings["dppo_low"]
    )
    return np.where(too_far, 0, -t.ratio * t.advantages)


def _gmpo(t: Terms) -> Array:
    low, high = -t.settings["clip_ratio"], t.settings["clip_ratio_high"]
    new, held = (
        np.where(t.advantages > 0, np.minimum(ratio, high), np.maximum(ratio, low))
        for ratio in (t.log_ratio, t.held_log_ratio)
    )
    return -np.exp(_mean(held)) * np.exp(new - held) * t.advantages


def _vespo(t: Terms) -> Array:
    weight = np.exp(_mean(t.held_log_ratio) * LENGTHS)
    sign = np.where(t.advantages >= 0, "positive", "negative")
    k, decay = (
        np.vectorize(lambda s, name=name: t.settings[f"vespo_{name}_{s}"])(sign)
        for name in ("k", "lambda")
    )
    return -(weight**k) * np.exp(decay * (1 - weight)) * t.advantages * t.new


FORMULAS: dict[str, Callable[[Terms], Array]] = {
    "clip": lambda t: t.below(np.inf),
    "dual_clip": _dual_clip,
    "two_sided": lambda t: t.below(t.settings["ratio_delta"]),
    "cispo": lambda t: -np.clip(t.held, *t.bounds) * t.advantages * t.new,
    "sapo": _sapo,
    "dppo": _dppo,
    "gmpo": _gmpo,
    "vespo": _vespo,
    "clip_cov": lambda t: np.where(fixtures.SELECTED > 0, 0, t.below(np.inf)),
    "kl_cov": lambda t: (
        -t.ratio * t.advantages + fixtures.SELECTED * t.settings["cov_weight"] * np.abs(t.log_ratio)
    ),
    "reinforce": lambda t: -t.advantages * t.new,
    "importance_sampling": lambda t: -t.ratio * t.advantages,
}
SETTINGS: dict[str, dict[str, Any]] = {  # at which a bound of every kind acts in set B
    "clip": {"clip_ratio": 0.2, "clip_ratio_high": 0.28},
    "dual_clip": {"clip_ratio": 0.2, "clip_ratio_high": 0.28, "dual_clip": 1.5},
    "two_sided": {"clip_ratio": 0.2, "clip_ratio_high": 0.28, "ratio_delta": 1.7},
    "cispo": {"clip_ratio": 0.4, "clip_ratio_high": 1.0},
    "sapo": {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05},
    "dppo": {"dppo_low": 0.1, "dppo_high": 0.15, "dppo_kl": 0.02},
    "gmpo": {"clip_ratio": 0.4, "clip_ratio_high": 0.5},
    "vespo": {
        **{"vespo_k_positive": 2.0, "vespo_lambda_positive": 3.0},
        **{"vespo_k_negative": 3.0, "vespo_lambda_negative": 2.0},
    },
    "clip_cov": {"clip_ratio": 0.2, "clip_ratio_high": 0.28},
    "kl_cov": {"cov_weight": 0.7},
    "reinforce": {},
    "importance_sampling": {},
}


def token_values(
    loss: str, level: str, settings: dict[str, Any], new: Array, frozen: Array, old: Array
) -> tuple[Array, Array]:
    """[B, T] each: the loss, and what no sampler correction multiplies."""
    values = FORMULAS[loss](Terms(level, settings, new, frozen, old))
    return values, settings["dppo_kl"] * (new - old) ** 2 if loss == "dppo" else np.zeros_like(new)


KL: dict[str, Callable[[Array, Array], Array]] = {  # of d = ref - new, and of the ratio
    "k1": lambda d, _: -d,
    "abs": lambda d, _: np.abs(d),
    "k2": lambda d, _: d**2 / 2,
    "k3": lambda d, _: np.exp(d) - 1 - d,
    "k3_ratio": lambda d, ratio: ratio * (np.exp(d) - 1 - d),
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
    entropy_aggregation: str = "token",
    frozen: Array = fixtures.NEW,
) -> float:
    """`registry.policy_loss` on the fixtures' inputs."""
    values, unweighted = token_values(
        loss, level, settings, new, frozen, fixtures.rollout_logprobs(scale)
    )
    kl = KL[kl_estimator](
        fixtures.REF - new, _ratio(level, new, frozen, fixtures.rollout_logprobs(scale))
    )
    total = weights * values + unweighted + kl_beta * kl
    bonus = entropy_weight * AGGREGATIONS[entropy_aggregation](
        np.where(fixtures.MASK, fixtures.ENTROPY, 0)
    )
    return float(AGGREGATIONS[aggregation](np.where(fixtures.MASK, total, 0)) - bonus)


def gradient(
    function: Callable[[Array], float], at: Array = fixtures.NEW, step: float = 1e-6
) -> Array:
    """Central differences: off by about 1e-10 here."""
    found = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        shift = np.zeros_like(at)
        shift[index] = step
        found[index] = (function(at + shift) - function(at - shift)) / (2 * step)
    return found
