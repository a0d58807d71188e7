"""Rules about parts that not every run has: the experts of a mixture, of which a router may come to
use fewer; tools that do not answer, and delegations that fail. No MLX. `health` has the
other rules, and lists these."""

import re

from mlx_parallm.rl_training.monitor.evidence import FEWEST_STEPS, Evidence, Sign
from mlx_parallm.rl_training.monitor.judge_signs import JUDGE_RULES

ENTROPY_LOST = 0.1
"""Bound on the entropy of the load, whose highest is 1. A pretrained router that is not trained
keeps it to a hundredth from step to step (docs/algorithms.md#mixtures-of-experts)."""
UNUSED_MORE = 0.15
"""Share of the experts: so many more than in the first steps get no token. Fewer tokens reach fewer
experts too, so steps are compared with the first ones of the same run."""


def experts_collapse(evidence: Evidence) -> Sign | None:
    """Fewer experts do the work than when the run began."""
    then, now = evidence.first("expert_load_entropy"), evidence.mean("expert_load_entropy")
    unused_then, unused = evidence.first("experts_unused"), evidence.mean("experts_unused")
    if then is None or now is None or unused_then is None or unused is None:
        return None
    if len(evidence.window) < FEWEST_STEPS:
        return None
    if then - now <= ENTROPY_LOST and unused - unused_then <= UNUSED_MORE:
        return None
    numbers = {"expert_load_entropy_first": then, "expert_load_entropy": now}
    return Sign(
        f"experts collapse: {unused:.0%} of them get no token ({unused_then:.0%} in the first"
        f" steps), the entropy of their load went from {then:.2f} to {now:.2f} of its highest",
        numbers | {"experts_unused": unused} | evidence.means("expert_load_max"),
    )


EXPERT_RULES = (
    (
        "experts-collapse",
        "leave the routers out of lora.target_modules, or lower learning_rate",
        experts_collapse,
    ),
)


UNLIKE, UNLIKE_MORE = 0.5, 0.3
"""Share of the answers that are like none that a learned reward was fitted on, and how much more
than in the first steps."""


def unlike_the_labels(evidence: Evidence) -> Sign | None:
    """The policy has left the distribution that the reward was fitted on."""
    key = "metrics/learned/unknown/mean"
    then, now = evidence.first(key), evidence.mean(key)
    if then is None or now is None or len(evidence.window) < FEWEST_STEPS:
        return None
    if now < UNLIKE or now - then < UNLIKE_MORE:
        return None
    return Sign(
        f"unlike the labels: {now:.0%} of the answers are like none that the learned reward was"
        f" fitted on ({then:.0%} in the first steps), so it cannot judge them",
        {"learned_unknown_first": then, "learned_unknown": now} | evidence.means("reward_mean"),
    )


EXAMINER_RULES = (
    (
        "unlike-the-labels",
        "label such answers and fit the reward again, or raise kl_beta",
        unlike_the_labels,
    ),
)

OWNER = re.compile(r"tools/(?P<kind>unanswered|failed)/(?P<owner>.+)")
STALLS, FAILS, FEWEST_CALLS = 0.2, 0.9, 10
"""Shares of the calls of one server or function: without an answer; with an error of the tool."""


def tool_stalls(evidence: Evidence) -> Sign | None:
    """A tool server, or a function, does not answer."""
    return _tools(evidence, "unanswered", STALLS, "stalls", "got no answer in time")


def tool_fails(evidence: Evidence) -> Sign | None:
    """Nearly every call of a server's tools, or of a function, is answered by an error."""
    return _tools(evidence, "failed", FAILS, "fails", "ended in an error of the tool")


def _tools(evidence: Evidence, kind: str, bound: float, verb: str, words: str) -> Sign | None:
    owners = {
        match["owner"]
        for line in evidence.window
        for key in line
        if (match := OWNER.fullmatch(key)) and match["kind"] == kind
    }
    worst = (0.0, "", 0, 0)
    for owner in owners:
        calls = evidence.total(f"tools/calls/{owner}")
        count = evidence.total(f"tools/{kind}/{owner}")
        if calls >= FEWEST_CALLS and count >= bound * calls:
            worst = max(worst, (count / calls, owner, count, calls))
    share, owner, count, calls = worst
    if not owner:
        return None
    return Sign(
        f"tool {verb}: {count} of {calls} calls of {owner} {words} ({share:.0%})",
        {f"tools/{kind}/{owner}": count, f"tools/calls/{owner}": calls},
    )


DELEGATIONS = "metrics/failed_delegations/mean"


def delegations_fail(evidence: Evidence) -> Sign | None:
    """Nearly all delegations to experts end in an error."""
    share = evidence.mean(DELEGATIONS)
    if share is None or share < FAILS or not evidence.has_enough_groups:
        return None
    return Sign(
        f"delegations fail: {share:.0%} of the delegations to experts end in an error",
        {"failed_delegations": share} | evidence.means("reward_mean"),
    )


FAILURE_RULES = (
    (
        "tool-stalls",
        "see that server or function; its timeout_s bounds a call",
        tool_stalls,
    ),
    (
        "tool-fails",
        "call it by hand with the arguments of an answer (mlx_parallm rollouts RUN --worst)",
        tool_fails,
    ),
    (
        "delegations-fail",
        "see the reason in run.log: the tool that the expert's loop calls, or its result",
        delegations_fail,
    ),
)

PART_RULES = (*EXPERT_RULES, *EXAMINER_RULES, *JUDGE_RULES)
