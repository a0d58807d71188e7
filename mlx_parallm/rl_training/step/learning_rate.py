"""The schedule of the learning rate: warm-up, then constant, linear or cosine."""

import math

from mlx_parallm.config.training import LearningSection


def learning_rate_at(
    step: int, training: LearningSection, *, update: int = 0, updates: int = 1
) -> float:
    """Return the learning rate of a step (1, 2, …). A schedule counts steps, so that update_epochs
    and batch_size do not move it.

    Warm-up: step / (warmup_steps + 1) of the peak, so the first step already learns and the
    peak comes at warmup_steps + 1. After it: constant, or linear or cosine down to lr_final,
    which the step after total_steps would have: the last one still learns.

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
    progress = min((passed - warmup) / max(total - warmup, 1), 1.0)
    share = (
        1.0 - progress
        if training.lr_schedule == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return training.lr_final + (peak - training.lr_final) * share
