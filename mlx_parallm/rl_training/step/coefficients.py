"""Weights of the loss's terms that adapt while a run trains: the KL's after each step, the entropy
bonus' after each update. No MLX."""

import math
from collections.abc import Mapping
from typing import Any

from mlx_parallm.config.training import LearningSection


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, horizon: int, sequences: int
) -> float:
    """The next coefficient of the KL: coefficient · (1 + clip(kl / target - 1, ±0.2) · sequences /
    horizon).

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2; also verl's and TRL's.

    Worked: coefficient 0.1, kl 0.3, target 0.1 → the error 2 is clipped to 0.2; with 128 sequences
    of a horizon of 10,000: 0.1 · (1 + 0.2 · 0.0128) = 0.100256.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * sequences / horizon)


class Coefficients:
    """`kl`: of the KL to the reference. `entropy`: of the entropy bonus."""

    def __init__(self, options: LearningSection) -> None:
        self.kl, self.entropy = options.kl_beta, options.entropy_weight
        self._newest_entropy = math.inf  # of the newest update, nats a token

    def bonus(self, options: LearningSection) -> float | None:
        """Return the weight of the entropy bonus in the next update: 0 as long as the newest
        update's entropy was above the target, and in the first update, as in TRL. None: there is
        no target."""
        if options.entropy_target is None:
            return None
        return self.entropy if self._newest_entropy <= options.entropy_target else 0.0

    def after_update(self, entropy: float, options: LearningSection) -> None:
        """Move the entropy's by entropy_delta, up if the update's mean entropy was at the target or
        below, else down (Skywork-OR1, arXiv:2505.22312; TRL's use_adaptive_entropy).

        Worked: weight 0.1, target 0.2, delta 0.005: entropy 0.15 → 0.105, which the next update
        has; entropy 0.3 → 0.095, and the next update has 0.
        """
        if options.entropy_target is None:
            return
        self._newest_entropy = entropy
        if entropy <= options.entropy_target:
            self.entropy = min(self.entropy + options.entropy_delta, options.entropy_max)
        else:
            self.entropy = max(self.entropy - options.entropy_delta, options.entropy_min)

    def after_step(self, kl: float | None, sequences: int, options: LearningSection) -> None:
        """Adapt the KL's by the mean KL of a step."""
        if options.kl_target is not None and kl is not None:
            self.kl = adapted_coefficient(
                self.kl,
                kl,
                target=options.kl_target,
                horizon=options.kl_horizon,
                sequences=sequences,
            )

    def state(self, options: LearningSection) -> dict[str, Any]:
        """Return what a resume needs; as JSON."""
        state: dict[str, Any] = {"kl_coefficient": self.kl}
        if options.entropy_target is not None:
            newest = self._newest_entropy if math.isfinite(self._newest_entropy) else None
            state |= {"entropy_coefficient": self.entropy, "newest_entropy": newest}
        return state

    def restore(self, state: Mapping[str, Any], options: LearningSection) -> None:
        """Load what `state()` returned. One that does not adapt is the configuration's."""
        if options.kl_target is not None:
            self.kl = state.get("kl_coefficient", self.kl)
        if options.entropy_target is not None:
            self.entropy = state.get("entropy_coefficient", self.entropy)
            newest = state.get("newest_entropy")
            self._newest_entropy = math.inf if newest is None else newest

    def metrics(self, options: LearningSection) -> dict[str, float | None]:
        """Return the columns of metrics.jsonl: null, or none, where there is no such term."""
        columns: dict[str, float | None] = {
            "kl_coefficient": self.kl if options.kl_beta > 0 else None
        }
        if options.entropy_target is not None:
            columns["entropy_coefficient"] = self.entropy
        return columns
