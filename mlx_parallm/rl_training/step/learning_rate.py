"""The schedule of the learning rate: warm-up, then constant, linear or cosine."""

import math

from mlx_parallm.config.training import LearningSection


def learning_rate_at(step: int, training: LearningSection) -> float:
    """Return the learning rate of all updates of a step (1, 2, …). Schedules count steps, not
    updates, so that update_epochs and batch_size do not move them.

    Warm-up: step / (warmup_steps + 1) of the peak, so the first step already learns and the
    peak comes at warmup_steps + 1. After it: constant, or linear or cosine down to lr_final,
    which the step after total_steps would have: the last one still learns.
    """
    peak = training.learning_rate
    if step <= training.warmup_steps:
        return peak * step / (training.warmup_steps + 1)
    if training.lr_schedule == "constant":
        return peak
    first = training.warmup_steps + 1
    progress = min((step - first) / max(training.total_steps + 1 - first, 1), 1.0)
    share = (
        1.0 - progress
        if training.lr_schedule == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return training.lr_final + (peak - training.lr_final) * share
