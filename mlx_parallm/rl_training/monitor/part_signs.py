"""Rules about parts that not every run has: the experts of a mixture, of which a router may come to
use fewer; teachers whose signal is constant, or no better than the student. No MLX. `health` has
the other rules, and lists these."""

from mlx_parallm.rl_training.monitor.evidence import FEWEST_STEPS, Evidence, Sign

ENTROPY_LOST = 0.1
"""Of the entropy of the load, whose highest is 1. A pretrained router that is not trained keeps it
to a hundredth from step to step (docs/router_replay.md)."""
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


SAME_SIGNAL = 1e-3
"""Nats: the deviation of log π - log π_teacher over the tokens. float32 keeps 1e-5 between two
passes of the same weights; a teacher that is worth its time differs by tenths."""
NO_BETTER = 0.05
"""Correlation of an answer's reward with the teacher's preference for it. Of a finished quickstart
run with its student it is 0.3 to 0.8 in each step (docs/distillation.md)."""
FEWEST_SCORED = 5


def is_taught(evidence: Evidence) -> bool:
    """Return whether a teacher scores: groups whose answers earn the same still learn from it."""
    return bool(evidence.mean("teacher_share"))


def teacher_constant(evidence: Evidence) -> Sign | None:
    """The teacher and the student say the same of every token."""
    spread, numbers = evidence.mean("teacher_spread"), evidence.means("teacher_kl")
    if spread is None or spread > SAME_SIGNAL or len(evidence.window) < FEWEST_STEPS:
        return None
    return Sign(
        "teacher constant: its log-probabilities are those of the policy at every token, or differ"
        f" by the same everywhere (deviation {spread:.1g} nats)",
        {"teacher_spread": spread} | numbers,
    )


def teacher_no_better(evidence: Evidence) -> Sign | None:
    """Answers with more reward are not more to the teacher's liking."""
    correlations, spread = evidence.values("teacher_reward_r"), evidence.mean("teacher_spread")
    if len(correlations) < FEWEST_SCORED or spread is None or spread <= SAME_SIGNAL:
        return None
    mean = sum(correlations) / len(correlations)
    if mean > NO_BETTER:
        return None
    return Sign(
        "teacher no better: it does not prefer the answers of a group that earn more (correlation"
        f" {mean:.2f})",
        {"teacher_reward_r": mean} | evidence.means("teacher_kl", "reward_mean"),
    )


TEACHER_RULES = (
    (
        "teacher-constant",
        "take another teacher, or a prompt that tells it more than the student knows",
        teacher_constant,
    ),
    ("teacher-no-better", "take a better teacher, or lower distillation.weight", teacher_no_better),
)
