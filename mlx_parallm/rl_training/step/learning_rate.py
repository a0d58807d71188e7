"""The schedule of the learning rate: warm-up, then constant or one of `SHAPES`."""

import math
from collections.abc import Callable, Mapping

from mlx_parallm.config.training import LearningSection

SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Progress of a decay from 0 to 1 → the share that is left."""
TIMESCALE = 10_000  # transformers', of "inverse_sqrt" without a warm-up


def learning_rate_at(
    step: int, training: LearningSection, *, update: int = 0, updates: int = 1
) -> float:
    """Return the learning rate of a step (1, 2, …). A schedule counts steps, so that update_epochs
    and batch_size do not move it.

    Warm-up: step / (warmup_steps + 1) of the peak, so the first step already learns and the
    peak comes at warmup_steps + 1. After it: constant, or linear or cosine down to lr_final,
    which the step after total_steps would have: the last one still learns. "inverse_sqrt": peak /
    sqrt(1 + passed / warmup_steps), passed since the peak. "wsd" (warm-up, stable, decay): the peak
    up to lr_decay_steps before the end, then down to lr_final in lr_decay_shape. All as
    transformers has them.

    With `lr_per_update` it counts updates, and the first one of a warm-up has the rate 0, as in
    transformers' trainer.

    Args:
        update: which of the step's `updates` (0, 1, …); read with `lr_per_update` alone.
    """
    peak, warmup = training.learning_rate, training.warmup_steps
    passed, total = step - 1, training.total_steps
    if training.lr_per_update:
        passed, total = passed * updates + update, total * updates
    if passed < warmup:
        begins_at_0 = training.lr_per_update
        return peak * (passed / warmup if begins_at_0 else (passed + 1) / (warmup + 1))
    if training.lr_schedule == "constant":
        return peak
    if training.lr_schedule == "inverse_sqrt":
        return peak / math.sqrt(1.0 + (passed - warmup) / (warmup or TIMESCALE))
    wsd = training.lr_schedule == "wsd"
    begin = max(warmup, total - (training.lr_decay_steps or 0)) if wsd else warmup
    progress = min(max((passed - begin) / max(total - begin, 1), 0.0), 1.0)
    share = SHAPES[training.lr_decay_shape if wsd else training.lr_schedule](progress)
    return training.lr_final + (peak - training.lr_final) * share
