"""Rules about teachers: one whose signal is constant, and one that is no better than the student.
No MLX. `health` has the other rules, and lists these."""

from mlx_parallm.rl_training.monitor.evidence import FEWEST_STEPS, Evidence, Sign

SAME_SIGNAL = 1e-3
"""Nats: the deviation of log π - log π_teacher over the tokens. float32 keeps 1e-5 between two
passes of the same weights; a teacher that is worth its time differs by tenths."""
NO_BETTER = 0.05
"""Correlation of an answer's reward with the teacher's preference for it. Of a finished quickstart
run with its student it is 0.3 to 0.8 in each step (docs/distillation.md)."""
FEWEST_SCORED = 5


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
