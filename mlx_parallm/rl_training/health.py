"""The health line: what is wrong with a run, in words, from the metrics of its last steps. Pure functions.

Each check looks at a window of metrics lines (newest last) and returns one sentence or None; `diagnose` puts the
sentences together, the gravest first. Keys that a line does not have are not judged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Metrics = Mapping[str, Any]
Window = Sequence[Metrics]

HEALTHY = "healthy"
WINDOW = 5
"""Steps that are looked at."""
LOGPROB_MISMATCH = 0.05
"""Largest healthy |logprobs - rollout_logprobs| on the same weights; float32 keeps 1e-4, bfloat16 a few hundredths."""
KL_HIGH = 0.5
"""Nats a token."""
KL_GROWTH = 4.0
KL_WORTH_WATCHING = 0.1
RATIO_OFF = 0.1
MOST_GROUPS = 0.8
TRUNCATED = 0.2
STALE = 0.25
ENDS = 0.05
"""A mean reward this close to 0 or 1 counts as 0 or 1."""


def diagnose(window: Window, sources: Sequence[str | None] = ()) -> str:
    """One line for people.

    Args:
        window: metrics of the last steps, newest last; only the last `WINDOW` count. `skipped_steps`,
            `publish_timeouts` and `dropped_stale` are the numbers of that step.
        sources: what the sources of rollouts say of themselves (`RolloutManager.health()`); None = well.
    """
    recent = list(window)[-WINDOW:]
    sentences = [source for source in sources if source]
    sentences += [sentence for check in CHECKS if recent and (sentence := check(recent))]
    return "; ".join(sentences) or HEALTHY


def _skipped(window: Window) -> str | None:
    count = round(sum(_values(window, "skipped_steps")))
    if not count:
        return None
    return f"loss or gradient not finite: {count} updates skipped in {len(window)} steps (lower learning_rate)"


def _logprob_mismatch(window: Window) -> str | None:
    largest = max(_values(window, "logprob_diff_max"), default=0.0)
    if largest <= LOGPROB_MISMATCH:
        return None
    return f"log-probability mismatch: engine and trainer differ by up to {largest:.2g} on the same weights"


def _kl(window: Window) -> str | None:
    values = _values(window, "kl")
    if not values:
        return None
    last, least = values[-1], max(min(values), 1e-9)
    if last <= KL_HIGH and not (last > KL_WORTH_WATCHING and last > KL_GROWTH * least):
        return None
    return f"KL running away: {last:.2g} nats a token from the reference (lower learning_rate or raise kl_beta)"


def _ratio(window: Window) -> str | None:
    mean = _mean(window, "ratio_mean")
    if mean is None or abs(mean - 1.0) <= RATIO_OFF:
        return None
    return f"ratio far from 1: mean {mean:.2f} (stale rollouts or too large a step)"


def _variance(window: Window) -> str | None:
    share = _mean(window, "groups_without_variance")
    if share is None or share < MOST_GROUPS:
        return None
    reward = _mean(window, "reward_mean")
    why = "every answer to a prompt earns the same"
    if reward is not None and reward <= ENDS:
        why = "no answer is right: the task is too hard, or the reward never fires"
    elif reward is not None and reward >= 1 - ENDS:
        why = "every answer is right: the task is solved"
    how_many = "all groups" if share >= 1.0 else f"{share:.0%} of the groups"
    return f"{how_many} without variance: {why}"


def _truncation(window: Window) -> str | None:
    share = _mean(window, "truncated_fraction")
    if share is None or share < TRUNCATED:
        return None
    return f"truncation: {share:.0%} of the answers hit the length limit (raise max_tokens)"


def _publish_timeouts(window: Window) -> str | None:
    count = round(sum(_values(window, "publish_timeouts")))
    if not count:
        return None
    return f"weights not published {count} times in {len(window)} steps: the lock was busy (raise lock_timeout_ms)"


def _stale(window: Window) -> str | None:
    dropped, groups = sum(_values(window, "dropped_stale")), sum(_values(window, "groups"))
    if not dropped or (groups and dropped / (dropped + groups) < STALE):
        return None
    return f"{round(dropped)} groups dropped as stale in {len(window)} steps: rollouts come slower than max_staleness"


CHECKS: tuple[Callable[[Window], str | None], ...] = (
    _skipped,
    _logprob_mismatch,
    _kl,
    _ratio,
    _variance,
    _truncation,
    _publish_timeouts,
    _stale,
)


def _values(window: Window, key: str) -> list[float]:
    numbers = (line.get(key) for line in window)
    return [float(number) for number in numbers if isinstance(number, int | float) and math.isfinite(number)]


def _mean(window: Window, key: str) -> float | None:
    values = _values(window, key)
    return sum(values) / len(values) if values else None
