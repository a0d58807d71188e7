"""How long the good runs of the traces are learned before a policy is trained on a learned reward.

A round is `ROUND` steps. Where good answers are long or of an unusual form, calls of tools above
all, one round is not enough: the policy would write none of them, and rewards would have nothing to
compare.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

ROUND, MOST_ROUNDS = 160, 4
EVALUATIONS = 8  # of the held-out rows, in a round
WRITTEN = 0.5
"""The share of held-out answers that sampling writes whole; more is left to the rewards."""
LEAST_FALL = 0.1  # of the held-out loss, over two evaluations


def still_learns(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether another round is worth it, by the metrics lines of the earlier ones: the
    held-out loss still falls, and held-out answers are not yet written whole.

    Worked: 0.3 nats a token and 60 tokens an answer: exp(−18) of the samples are the whole answer.
    """
    losses = [float(line["eval/loss"]) for line in lines if line.get("eval/loss") is not None]
    if len(losses) < 3:
        return False
    tokens = [line.get("completion_tokens_mean") or 0.0 for line in lines]
    written = math.exp(-max(0.0, losses[-1]) * sum(tokens) / len(tokens))
    return written < WRITTEN and losses[-1] < (1 - LEAST_FALL) * losses[-3]
