"""`rl_training.advantage` and `rl_training.loss` as functions of the user: loaded and checked before a model is, and
what they return is checked at every call. See docs/your_environment.md."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import load_function_of, user_code
from mlx_parallm.losses.advantages import Estimator
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.metrics import KEYS

LOSS_METRICS = ("kl", "entropy", "clip_fraction", "ratio_mean")  # columns of metrics.jsonl that a loss may fill


def own_advantage(reference: str) -> Estimator:
    """Rewards of one group → one number each, or None (nothing to learn). Raises ConfigError, here and when called."""
    key = f"rl_training.advantage: {reference}"
    function = load_function_of(("rewards",), reference, "rl_training.advantage")

    def advantages(rewards: Sequence[float]) -> tuple[float, ...] | None:
        with user_code(key):
            values = function(list(rewards))
            numbers = None if values is None else tuple(float(value) for value in values)
        if numbers is None:
            return None
        if len(numbers) != len(rewards) or not all(map(math.isfinite, numbers)):
            raise ConfigError(
                f"{key} returned {values!r} for {len(rewards)} rewards: expected a finite number for each"
            )
        return numbers if any(numbers) else None

    return advantages


def own_loss(reference: str) -> Callable[[LossInputs], LossOutputs]:
    """LossInputs of one micro-batch → LossOutputs (or the bare loss). Raises ConfigError, here and when called."""
    key = f"rl_training.loss: {reference}"
    function = load_function_of(("inputs",), reference, "rl_training.loss")

    def loss(inputs: LossInputs) -> LossOutputs:
        with user_code(key):
            outputs = function(inputs)
        if isinstance(outputs, mx.array):
            outputs = LossOutputs(outputs)
        given = outputs.loss if isinstance(outputs, LossOutputs) else outputs
        if not isinstance(outputs, LossOutputs) or not isinstance(given, mx.array) or given.ndim != 0:
            shape = list(given.shape) if isinstance(given, mx.array) else type(given).__name__
            raise ConfigError(f"{key} returned {shape}: expected LossOutputs with a loss of one number (see aggregate)")
        if taken := [name for name in outputs.metrics if name in KEYS and name not in LOSS_METRICS]:
            raise ConfigError(f"{key} returned the metric {taken[0]!r}, which is a column of metrics.jsonl already")
        with user_code(key):
            metrics = {name: mx.array(value) for name, value in outputs.metrics.items()}
        if wrong := [name for name, value in metrics.items() if value.ndim != 0]:
            raise ConfigError(
                f"{key}: the metric {wrong[0]!r} has the shape {list(metrics[wrong[0]].shape)}, not one number"
            )
        return LossOutputs(outputs.loss, metrics or {"policy_loss": outputs.loss})

    return loss
