"""Rules about runs that learn from rows of a file (SFT, DPO and kin, KTO, reward models) and about
pairs of a policy's own answers (online DPO). No MLX. `health` lists these rules.

Their numbers are losses, log-probabilities of whole answers (`logps/…`) and shares of pairs in the
right order (`rewards/accuracies`): a run can end with a loss near 0, every pair in order, and a
model that says nothing any more.
"""

from statistics import mean

from mlx_parallm.rl_training.monitor.evidence import (
    FEWEST_STEPS,
    WINDOW,
    Evidence,
    Sign,
    Window,
    mean_of,
    values_of,
)

LOST_NATS, LOST_SHARE = 5.0, 0.5
"""Loss of a chosen answer's log-probability, in nats and as a share of its first value. DPO
lowers it by a few nats on long answers; e^-5 is an answer that is not sampled any more."""
LOSS_ROSE, STEPS_LOSS_ROSE = 0.1, 0.5
"""Share of the loss before training, on the same held-out rows; and of that of the first steps,
whose rows are others."""
BY_CHANCE = 0.05
"""From a half: of the pairs in the right order."""
ENOUGH_STEPS, ENOUGH_PAIRS = 20, 100
"""Least steps and rows of a run before its pairs count as not told apart."""


def chosen_unlikely(evidence: Evidence) -> Sign | None:
    """Chosen answers become unlikely: of two answers the chosen one is still the likelier, and the
    model gives neither."""
    for key, then, now in _compared(evidence, "logps/chosen"):
        if not is_lost(then, now):
            continue
        numbers = {f"{key}_first": then, key: now}
        numbers |= evidence.means("rewards/accuracies", "logps/rejected", "learning_rate")
        return Sign(
            f"chosen answers become unlikely: their log-probability went from {then:.3g} to"
            f" {now:.3g}, so the model gives them no more",
            numbers,
        )
    return None


def is_lost(then: float, now: float) -> bool:
    """Whether answers of the log-probability `then` have become so unlikely that the model gives
    them no more."""
    return then - now >= max(LOST_NATS, LOST_SHARE * abs(then))


def loss_rises(evidence: Evidence) -> Sign | None:
    """The loss is higher than before training, on held-out rows, or else on those of the steps."""
    if not _of_rows(evidence):
        return None
    # a loss that may rise while the rows become likelier comes with their own (`dft_loss`)
    key = "nll" if evidence.mean("nll") is not None else "loss"
    held_out = _held_out(evidence, key)
    pair, share = (held_out, LOSS_ROSE) if held_out else (_trained(evidence, key), STEPS_LOSS_ROSE)
    if pair is None or pair[1] <= pair[0] + share * max(abs(pair[0]), 0.1):
        return None
    in_order = _held_out(evidence, "rewards/accuracies")
    if in_order is not None and in_order[1] > in_order[0] + BY_CHANCE:
        return None  # pairs are told apart better than before: the margins are too sure of it
    where = "held-out rows" if held_out else "the rows of the steps"
    return Sign(
        f"loss rises: from {pair[0]:.3g} to {pair[1]:.3g} on {where}",
        {f"{key}_first": pair[0], key: pair[1]} | evidence.means("learning_rate", "grad_norm"),
    )


def not_told_apart(evidence: Evidence) -> Sign | None:
    """After many steps a pair's better answer is found as by tossing a coin."""
    if not _of_rows(evidence) or len(evidence.window) < WINDOW:
        return None
    if (evidence.window[-1].get("step") or 0) < ENOUGH_STEPS:
        return None
    right, pairs = evidence.mean("rewards/accuracies"), evidence.total("sequences") / 2
    if right is None or pairs < ENOUGH_PAIRS or right > 0.5 + BY_CHANCE:
        return None
    held = values_of(evidence.lines, "heldout_score")
    if held and held[-1] > 0.5 + BY_CHANCE:
        return None
    return Sign(
        f"not told apart: {right:.0%} of the pairs are in the right order after step"
        f" {evidence.window[-1]['step']}, as by chance",
        {"rewards/accuracies": right} | evidence.means("rewards/margins", "learning_rate"),
    )


def _compared(evidence: Evidence, key: str) -> list[tuple[str, float, float]]:
    """Return a metric's first and newest value, by name: on the held-out rows, if there are some,
    and of the training steps."""
    pairs = []
    if (held_out := _held_out(evidence, key)) is not None:
        pairs.append((f"eval/{key}", *held_out))
    lines = [line for line in (*evidence.start, *evidence.window) if line.get(key)]
    steps = sorted({int(line.get("step") or 0) for line in lines})
    few = FEWEST_STEPS if len(steps) >= 2 * FEWEST_STEPS else 1
    if len(steps) > FEWEST_STEPS:
        first, now = (
            [line for line in lines if line.get("step") in part]
            for part in (steps[:few], steps[-few:])
        )
        then = (mean_of(first, key) or 0.0) * _length(now) / _length(first)
        pairs.append((key, then, mean_of(now, key) or 0.0))
    return pairs


def _length(lines: Window) -> float:
    """The mean tokens of an answer: a sum over longer ones is lower."""
    return mean_of(lines, "completion_tokens_mean") or 1.0


def _held_out(evidence: Evidence, key: str) -> tuple[float, float] | None:
    """A number of the held-out rows before training and in the newest evaluation."""
    before, after = (
        values_of(evidence.lines, f"eval_before/{key}"),
        values_of(evidence.window, f"eval/{key}"),
    )
    return (before[0], after[-1]) if before and after else None


def _trained(evidence: Evidence, key: str) -> tuple[float, float] | None:
    """The loss of the first steps and of the last ones, if there are enough of both and no
    held-out rows to judge by."""
    if len(evidence.window) < WINDOW or not evidence.start:
        return None
    if (evidence.window[-1].get("step") or 0) < 2 * WINDOW:
        return None
    first, now = values_of(evidence.start, key), values_of(evidence.window, key)
    if not first or not now or values_of(evidence.start, f"eval_before/{key}"):
        return None
    # small batches differ: each of the last ones has to be worse than each of the first
    return (mean(first), mean(now)) if min(now) > max(first) else None


def _of_rows(evidence: Evidence) -> bool:
    return all(line.get("sequences") and line.get("groups") == 0 for line in evidence.window)
