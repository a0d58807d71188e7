"""Rules about rewards that a policy cannot learn from, or has lost: it fell, it hardly differs,
every prompt gets one answer, the gradient is 0, one part is constant, no answer reaches 1. No MLX.
`health` lists these rules, and has the others."""

import math
import re

from mlx_parallm.rl_training.monitor.evidence import (
    FEWEST_STEPS,
    SAME_REWARD,
    WINDOW,
    Evidence,
    Sign,
    reward_limit,
    values_of,
)
from mlx_parallm.rl_training.step.batch import ONE_ANSWER

HARDLY = 1e-3
"""Deviation of the rewards over the larger of 1 and their mean. A reward model that tells answers
apart differs by tenths; rounding in bfloat16 alone makes 1e-3."""
MOST_UNSCORED = 0.5
"""Share of the answers of a window without a score. A judge that is away at times leaves few."""
NO_ROOM = 0.05
"""A reward this close to 1 has no room to gain."""
PART = re.compile(r"rewards/(.+)/mean")
PENALTY = re.compile(r"overlong(#\d+)?|.*penalt.*", re.IGNORECASE)
"""Parts whose best score is 0: the built-in one, and functions that are called so."""


def reward_fell(evidence: Evidence) -> Sign | None:
    """The policy earns clearly less than at first."""
    if not evidence.fell or not evidence.has_enough_groups:
        return None
    then, now = evidence.first("reward_mean") or 0.0, evidence.mean("reward_mean") or 0.0
    numbers = {"reward_first": then, "reward_mean": now}
    numbers |= evidence.means("groups_all_wrong", "rollout_entropy", "learning_rate")
    return Sign(
        f"reward fell: {now:.3g} in {evidence.steps} after {then:.3g} at first; the policy has"
        " forgotten what it could do",
        numbers,
    )


def hardly_differs(evidence: Evidence) -> Sign | None:
    """Rewards of a group differ by next to nothing: they teach noise."""
    spread, mean = evidence.mean("reward_std"), evidence.mean("reward_mean")
    differ = 1.0 - (evidence.mean("groups_without_variance") or 0.0)
    if spread is None or mean is None or not 0 < spread <= HARDLY * max(1.0, abs(mean)):
        return None
    if evidence.gained or evidence.fell or not differ or not evidence.has_enough_groups:
        return None
    return Sign(
        f"reward hardly differs: {mean:.3g} on average with a deviation of {spread:.1g}, so noise"
        " decides which answer is the better one",
        {"reward_mean": mean, "reward_std": spread},
    )


def one_answer(evidence: Evidence) -> Sign | None:
    """Whatever is asked, the policy answers the same."""
    share, reward = evidence.mean("most_frequent_answer"), evidence.mean("reward_mean")
    if share is None or reward is None or share < ONE_ANSWER or not evidence.has_enough_groups:
        return None
    if reward >= 1 - NO_ROOM or evidence.gained:
        return None
    first = evidence.first("most_frequent_answer") or 0.0
    numbers = {"most_frequent_answer_first": first, "most_frequent_answer": share}
    return Sign(
        f"one answer for every prompt: {share:.0%} of the answers are one and"
        f" the same; at first {first:.0%}",
        numbers | evidence.means("reward_mean", "rollout_entropy"),
    )


def not_scored(evidence: Evidence) -> Sign | None:
    """Many answers have no score: the numbers are of the others alone, so they say little."""
    share = evidence.mean("unscored_fraction")
    if share is None or share < MOST_UNSCORED or not evidence.total("sequences"):
        return None
    return Sign(
        f"not scored: {share:.0%} of the answers got None or NaN from every reward function",
        {"unscored_fraction": share} | evidence.means("sequences", "reward_mean"),
    )


def zero_advantages(evidence: Evidence) -> Sign | None:
    """Rewards differ and advantages do not; or the steps train on them and their gradient is 0."""
    if len(evidence.window) < FEWEST_STEPS:
        return None
    differ = min(evidence.values("reward_std_in_groups"), default=0.0)
    if min(evidence.values("groups_without_variance"), default=0.0) == 1.0 and differ > SAME_REWARD:
        return Sign(
            f"advantages are 0: the rewards of a group differ (by {differ:.2g} or more in each of"
            f" {evidence.steps}) and no group has an advantage; the learning rate is innocent",
            {"reward_std_in_groups": differ} | evidence.means("groups_without_variance"),
        )
    varied = [
        line
        for line in evidence.window
        if line.get("optimizer_updates")
        and (line.get("groups_without_variance") or 0.0) < 1.0
        and line.get("groups")
    ]
    gradients = values_of(varied, "grad_norm")
    if len(gradients) < FEWEST_STEPS or max(gradients) > 0.0:
        return None
    return Sign(
        f"advantages are 0: the gradient of {len(gradients)} steps is 0 though rewards differ; the"
        " learning rate is innocent",
        {"grad_norm": 0.0} | evidence.means("reward_std", "groups_without_variance"),
    )


def constant_part(evidence: Evidence) -> Sign | None:
    """One of several reward parts is constant: the same value below 1 for every answer, in the
    first steps and in the last ones."""
    parts = {
        key: match[1] for line in evidence.lines for key in line if (match := PART.fullmatch(key))
    }
    if len(parts) < 2 or len(evidence.window) < WINDOW or not evidence.has_enough_groups:
        return None
    constant = {}
    for key, name in parts.items():
        scores, spreads = (
            values_of(evidence.lines, key),
            values_of(evidence.lines, f"rewards/{name}/std"),
        )
        same = bool(spreads) and max(*spreads, max(scores) - min(scores)) <= SAME_REWARD
        if same and scores[0] < 1 and (scores[0] != 0 or not PENALTY.fullmatch(name)):
            constant[name] = scores[0]
    if not constant:
        return None
    earned = " and ".join(f"{value:.3g} from {name}" for name, value in constant.items())
    words = (
        f"reward part constant: every answer earned {earned} in the first and the last"
        f" {evidence.steps}"
    )
    return Sign(words, {f"rewards/{name}/mean": value for name, value in constant.items()})


def reward_below_one(evidence: Evidence) -> Sign | None:
    """The best answer of most steps earned the same, and no answer more: a limit below what
    accuracy calls right."""
    environments = evidence.window[-1].get("environments") or {}
    for name in environments if len(evidence.window) >= WINDOW else ():
        accuracy = values_of(evidence.lines, f"eval/{name}/accuracy")
        limit, times, of = reward_limit(evidence.lines, name)
        if 0 < limit < 1 - SAME_REWARD and times > of / 2 and accuracy and not any(accuracy):
            words = (
                f"reward below 1: no answer of {name} earned more than {limit:.3g}, so its"
                " accuracy stays 0"
            )
            return Sign(
                words, {"reward_max": limit, "eval/accuracy": 0.0} | evidence.means("reward_mean")
            )
    return None


HARDER = "harder problems; or dynamic_sampling = false, or a smaller max_oversampling"
EASIER = (
    "easier problems, a reward that gives part of a point, or a larger group_size; or"
    " dynamic_sampling = false"
)
FINER = (
    "a reward that tells answers apart, or temperature = 1; or dynamic_sampling = false, or a"
    " smaller max_oversampling"
)


def advice(evidence: Evidence) -> str:
    """Return what to change where most groups have one reward for all their answers: harder
    problems, easier ones, or another reward."""
    right = evidence.mean("groups_all_right") or 0.0
    wrong = evidence.mean("groups_all_wrong") or 0.0
    equal = max((evidence.mean("groups_without_variance") or 0.0) - right - wrong, 0.0)
    if math.isclose(max(right, wrong, equal), 0.0):
        return FINER
    return max(((right, HARDER), (wrong, EASIER), (equal, FINER)), key=lambda entry: entry[0])[1]
