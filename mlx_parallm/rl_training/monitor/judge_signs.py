"""Rules about a judge of groups: it sees no difference, it scores the length, it disagrees with
itself. No MLX. `health` has the other rules, and lists these."""

import re

from mlx_parallm.rl_training.monitor.evidence import FEWEST_STEPS, Evidence, Sign

NUMBER = re.compile(
    r"metrics/(?P<judge>.+)/(?P<kind>score_spread|length_correlation|order_agreement)/mean"
)
NO_SPREAD = 1e-3
"""Standard deviation of the scores of different answers."""
PERFECT = 0.95
"""From this score on, equal scores may be right, if they differed at first."""
FOLLOWS = 0.8
"""Rank correlation of score and length, mean over groups: nearly the same order."""
AGREES = 0.65
"""Share of the pairs of answers in the same order by both judgements; a coin gives ½."""


def judge_constant(evidence: Evidence) -> Sign | None:
    """Different answers get one score."""
    for judge, spread in _numbers(evidence, "score_spread").items():
        key = f"rewards/{judge}/mean"
        score = mean if (mean := evidence.mean(key)) is not None else evidence.mean("reward_mean")
        at_first = evidence.first(f"metrics/{judge}/score_spread/mean") or 0.0
        if spread <= NO_SPREAD and ((score or 0.0) < PERFECT or at_first <= NO_SPREAD):
            return Sign(
                f"judge constant: {judge} gave all answers of a group the same score in"
                f" {evidence.steps}, though they differ",
                {f"{judge}/score_spread": spread} | evidence.means(key, "reward_mean"),
            )
    return None


def judge_follows_length(evidence: Evidence) -> Sign | None:
    """The longer answer, or the shorter one, is the better one."""
    for judge, r in _numbers(evidence, "length_correlation").items():
        if abs(r) >= FOLLOWS:
            which = "longer" if r > 0 else "shorter"
            return Sign(
                f"judge follows length: {judge} scores the {which} answer higher (rank correlation"
                f" of score and length {r:.2f})",
                {f"{judge}/length_correlation": r} | evidence.means("completion_tokens_mean"),
            )
    return None


def judge_disagrees(evidence: Evidence) -> Sign | None:
    """Shown in the reverse order, the same answers are put into another order."""
    for judge, share in _numbers(evidence, "order_agreement").items():
        if share <= AGREES and not evidence.gained:
            keys = ("order_difference", "position_bias")
            means = ((key, evidence.mean(f"metrics/{judge}/{key}/mean")) for key in keys)
            numbers = {f"{judge}/{key}": mean for key, mean in means if mean is not None}
            return Sign(
                f"judge disagrees with itself: {judge} puts {share:.0%} of the pairs of answers"
                " into the same order when they are shown the other way round; a coin does 50%",
                {f"{judge}/order_agreement": share} | numbers,
            )
    return None


def _numbers(evidence: Evidence, kind: str) -> dict[str, float]:
    """Return one number of each judge: the mean of the steps that have it, if they are enough."""
    keys = (NUMBER.fullmatch(key) for line in evidence.window for key in line)
    judges = dict.fromkeys(key["judge"] for key in keys if key and key["kind"] == kind)
    values = {judge: evidence.values(f"metrics/{judge}/{kind}/mean") for judge in judges}
    return {
        judge: sum(each) / len(each) for judge, each in values.items() if len(each) >= FEWEST_STEPS
    }


JUDGE_RULES = (
    (
        "judge-constant",
        "a sharper rubric or a stronger judge; read its reasons"
        " (mlx_parallm rollouts RUN --show GROUP)",
        judge_constant,
    ),
    (
        "judge-follows-length",
        "say in the rubric what length is worth, or judge by criteria one by one"
        ' (aggregation = "explicit")',
        judge_follows_length,
    ),
    (
        "judge-disagrees",
        "both_orders = 1 takes out the position; else a smaller group_size, or a stronger judge",
        judge_disagrees,
    ),
)
