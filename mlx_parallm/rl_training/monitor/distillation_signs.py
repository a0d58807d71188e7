"""Rules about teachers whose signal is constant, nonsense, missing, or no better than the student.
No MLX. `health` lists these."""

from collections.abc import Mapping
from typing import Any

from mlx_parallm.rl_training.monitor.evidence import FEWEST_STEPS, Evidence, Sign

SAME_SIGNAL = 1e-3
"""Nats: the deviation of log π - log π_teacher over the tokens. float32 keeps 1e-5 between two
passes of the same weights; a teacher that is worth its time differs by tenths."""
NO_BETTER = 0.05
"""Correlation of an answer's reward with the teacher's preference for it. Of a finished quickstart
run with its student it is 0.3 to 0.8 in each step (docs/distillation.md)."""
FEWEST_SCORED = 5


def learns_from_one(line: Mapping[str, Any]) -> bool:
    """Return whether a teacher scored tokens of this step."""
    return bool(line.get("teacher_share"))


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
    if mean > NO_BETTER or teacher_nonsense(evidence):
        return None
    return Sign(
        "teacher no better: it does not prefer the answers of a group that earn"
        f" more (correlation {mean:.2f})",
        {"teacher_reward_r": mean} | evidence.means("teacher_kl", "reward_mean"),
    )


NONSENSE_NATS, NONSENSE_AGREES = 4.0, 0.05
"""Nats a token by which the teacher thinks less of the student's tokens, and the share of them that
are its best. Chance among 320 tokens is 5.8 nats and 0.003; an untrained student and a trained
teacher begin at 1 to 2 nats (docs/distillation.md)."""
SILENT = 0.05
"""Share of the trained tokens that have a score."""


def teacher_silent(evidence: Evidence) -> Sign | None:
    """No token has a score: the teacher does not answer, or answers no numbers."""
    share = evidence.mean("teacher_share")
    answers, missing = evidence.total("teacher_sequences"), evidence.total("teacher_unscored")
    if share is None or share > SILENT or not (answers or missing):
        return None
    words = f"{missing} of {max(answers, missing)} answers came back without a score"
    if not missing:
        words = f"it was asked about {answers} answers and sent no number for any token"
    return Sign(
        f"teacher silent: {share:.0%} of the trained tokens have its log-probability; {words}",
        {"teacher_share": share, "teacher_sequences": answers, "teacher_unscored": missing},
    )


def teacher_nonsense(evidence: Evidence) -> Sign | None:
    """The teacher likes no token of the student's, and does not come to: another vocabulary, other
    tokens, or a model that speaks at random."""
    kl, agrees = evidence.mean("teacher_kl"), evidence.mean("teacher_agreement")
    if kl is None or len(evidence.window) < FEWEST_STEPS or kl <= NONSENSE_NATS:
        return None
    # unknown if the teacher sends no best tokens: then only what no teacher has says it
    if (agrees > NONSENSE_AGREES) if agrees is not None else kl <= 2 * NONSENSE_NATS:
        return None
    best = "" if agrees is None else f", and {agrees:.1%} of the tokens are its best"
    return Sign(
        f"teacher talks nonsense: it gives the policy's tokens e^-{kl:.1f} of the policy's own"
        f" probability{best}",
        {"teacher_kl": kl} | evidence.means("teacher_agreement", "teacher_spread"),
    )


LEAST_ALIGNED = 0.9
"""Share of the answers' text that a teacher of another family should read as it is. Of tokenizers
with bytes for what they do not know it is 1 (docs/distillation.md)."""


def teacher_misaligned(evidence: Evidence) -> Sign | None:
    """A teacher with a tokenizer of its own reads other text than was sampled."""
    share = evidence.mean("teacher_aligned")
    if share is None or share >= LEAST_ALIGNED or len(evidence.window) < FEWEST_STEPS:
        return None
    return Sign(
        f"teacher misaligned: {share:.0%} of the answers' text could be aligned with the teacher's"
        " tokens; the rest has no signal",
        {"teacher_aligned": share} | evidence.means("teacher_share"),
    )


NO_SIGNAL_RULES = (
    (
        "teacher-silent",
        "see the teacher's server and run.log, which names the reason",
        teacher_silent,
    ),
    (
        "teacher-nonsense",
        "take a teacher with the policy's tokens and chat template; ask it by hand first",
        teacher_nonsense,
    ),
)

SIGNAL_RULES = (
    (
        "teacher-constant",
        "take another teacher, or a prompt that tells it more than the student knows",
        teacher_constant,
    ),
    (
        "teacher-misaligned",
        "look at an answer with the teacher's tokenizer; run.log names what was left out",
        teacher_misaligned,
    ),
    ("teacher-no-better", "take a better teacher, or lower distillation.weight", teacher_no_better),
)
