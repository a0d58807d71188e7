"""Rules about a step's updates: too small to move the weights, taken back, not published, clipped,
or none at all. No MLX. `health` lists these rules, and has the others."""

from mlx_parallm.rl_training.monitor.distillation_signs import learns_from_one
from mlx_parallm.rl_training.monitor.evidence import (
    FEWEST_STEPS,
    Evidence,
    Metrics,
    Sign,
    values_of,
)

SMALL_UPDATE = 1e-6
"""An update's norm over the weights' norm. A thousand such updates in one direction move the
weights by 0.1 %; learning rates that work reach 1e-5 (all weights) to 1e-2 (a young adapter)."""
FEW_MOVED = 1e-4
"""Share of the weights that an update changes in the model's own dtype. 1e-6 on bfloat16
weights, a usual rate for all weights, moves almost 1 % of them; the rest waits in the float32
copy."""
JUDGED_RATE = 0.1
"""Share of the highest rate: smaller rates, in a warm-up or at the end of a schedule, are not
judged."""
NO_UPDATE = 0.4
"""Share of the steps; with max_staleness = 1 every second step has rollouts of an older policy."""
SEQUENCES_CLIPPED = 0.2
"""Share of the tokens, if a ratio is of a whole answer (GSPO): its paper has 0.15. The bounds
are those of answers of thousands of tokens."""


def small_updates(evidence: Evidence) -> Sign | None:
    """Updates that do not move the weights, or not in the precision that they are served in."""
    peak = max(values_of([*evidence.start, *evidence.window], "learning_rate"), default=0.0)
    rate = max(evidence.values("learning_rate"), default=0.0)
    norms = [
        (line["update_norm"], line["weight_norm"])
        for line in evidence.window
        if line.get("update_norm") is not None and line.get("weight_norm") and _may_move(line)
    ]
    if not norms or len(evidence.window) < FEWEST_STEPS or rate < JUDGED_RATE * peak:
        return None
    size = max(update / weight for update, weight in norms)
    moved = max(evidence.values("weights_moved"), default=1.0)
    if size >= SMALL_UPDATE and moved >= FEW_MOVED:
        return None
    rounding = (
        f"; {moved:.1g} of the weights changed in the model's dtype" if moved < FEW_MOVED else ""
    )
    return Sign(
        (
            f"learning rate too small: an update moves the weights by {size:.1g} of their"
            f" size{rounding}"
        ),
        {"learning_rate": rate, "update_to_weight": size, "weights_moved": moved},
    )


def _may_move(line: Metrics) -> bool:
    """Whether the rate decides how far a step moves the weights: not if there is no gradient, as
    with advantages that are all 0."""
    alike = line.get("groups_without_variance") == 1.0 and not learns_from_one(line)
    return line.get("grad_norm") != 0.0 and not (alike and line.get("groups"))


def publishes_refused(evidence: Evidence) -> Sign | None:
    count, kl = (
        evidence.total("publishes_refused"),
        max(evidence.values("publish_kl"), default=None),
    )
    if not count:
        return None
    numbers = {"publishes_refused": count} | evidence.means("learning_rate")
    words = f"update refused: {count} in {evidence.steps} were taken back and not published"
    if kl is None:
        return Sign(f"{words}, the weights were not finite", numbers)
    words = f"{words}, KL up to {kl:.2g} nats a token from the served version"
    numbers["publish_kl"] = kl
    return Sign(words, numbers, "lower learning_rate, or raise weight_updates.max_publish_kl")


def publish_timeouts(evidence: Evidence) -> Sign | None:
    count = evidence.total("publish_timeouts")
    words = f"weights not published {count} times in {evidence.steps}: the lock was busy"
    return Sign(words, {"publish_timeouts": count}) if count else None


def sequences_clipped(evidence: Evidence) -> Sign | None:
    clipped = evidence.mean("sequence_clip_fraction")
    if clipped is None or clipped <= SEQUENCES_CLIPPED or len(evidence.window) < FEWEST_STEPS:
        return None
    return Sign(
        f"sequences clipped: {clipped:.0%} of the tokens belong to answers whose ratio is outside"
        " the bounds, which are too narrow for answers this short",
        {"sequence_clip_fraction": clipped} | evidence.means("completion_tokens_mean"),
    )


def no_update(evidence: Evidence) -> Sign | None:
    steps, kl = len(evidence.window), evidence.mean("stopped_at_kl")
    without = sum(
        line.get("stopped_at_kl") is not None and not line["optimizer_updates"]
        for line in evidence.window
    )
    if kl is None or steps < FEWEST_STEPS or without < NO_UPDATE * steps:
        return None
    words = (
        f"no update in {without} of {steps} steps: a KL of {kl:.2g} is beyond"
        " target_kl before the first one"
    )
    return Sign(words, {"stopped_at_kl": kl})
