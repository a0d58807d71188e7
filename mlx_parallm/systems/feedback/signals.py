"""Numbers for what a user's doing says about an answer: pure functions, no MLX.

A signal has a kind and a value of -1 to 1. The strongest kind decides the reward of an answer; a
running mean of the rewards of its task is what it is compared with, because a chat has one answer
to its prompt and no group.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["thumb", "edit", "message", "regenerate", "tool"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The strongest first."""


@dataclass(frozen=True, slots=True)
class ReplySignal:
    """`value`: -1 to 1; None: not judged yet. `detail`: the user's words, redacted."""

    answer: str
    kind: Kind
    value: float | None
    detail: str = ""


def strongest(values: Mapping[str, float]) -> tuple[Kind, float] | None:
    """Return the kind that decides, and its value; None: no signal decides.

    Worked: {"message": 1, "thumb": -1} → ("thumb", -1).
    """
    return next(((kind, values[kind]) for kind in KINDS if kind in values), None)


def edit_value(answer: str, edited: str) -> float | None:
    """Return minus the share of an answer that an edit changed; None: only white space differs.

    The share is 1 - 2 M / T: M characters of their longest common subsequence, T characters of
    both texts. Worked: "abcd" → "abxd" has M = 3 (abd), T = 8: -(1 - 6/8) = -0.25.
    """
    if answer.split() == edited.split():
        return None
    return 2 * _common(answer, edited) / (len(answer) + len(edited)) - 1.0


def _common(first: str, second: str) -> int:
    """Return the length of the longest common subsequence.

    A row of its table is the bits of one number (Hyyrö 2004), so that any two texts of 4,000
    characters take some 5 ms. difflib's blocks take seconds for "a a a …".
    """
    places: dict[str, int] = defaultdict(int)
    for place, sign in enumerate(first):
        places[sign] |= 1 << place
    every = row = (1 << len(first)) - 1  # a 0 bit: the length grows there
    for sign in second:
        kept = row & places.get(sign, 0)
        row = (row + kept) | (row - kept)
    return len(first) - (row & every).bit_count()


@dataclass(frozen=True, slots=True)
class Baseline:
    """A running mean of rewards in which older ones count less, and which begins at 0.

    `mass` w and `total` s after rewards r_1 … r_n with decay d: w = Σ d^(n-i), s = Σ d^(n-i) r_i.
    The mean is s / (w + 1): one imagined reward of 0 keeps the first from being compared with
    itself.

    Worked, d = 0.5: after 1: w 1, s 1, mean 1/2; after 1, 0: w 1.5, s 0.5, mean 0.2.
    """

    mass: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / (self.mass + 1.0)

    def after(self, reward: float, decay: float) -> "Baseline":
        """Return the baseline with one reward more."""
        return Baseline(decay * self.mass + 1.0, decay * self.total + reward)


def releasable(batches: int, released_at: Iterable[float], most: float | None, now: float) -> int:
    """Return how many of the waiting batches may be handed to the trainer at Unix time `now`.

    Args:
        released_at: when earlier ones were.
        most: in any hour; below 1 it is one batch in 1/most hours. None: no bound.

    Worked: most 2, one released 30 minutes ago, five waiting → 1. most 0.5, one 90 minutes ago → 0.
    """
    if most is None:
        return batches
    window = 3600.0 if most >= 1 else 3600.0 / most
    recent = sum(1 for at in released_at if now - at < window)
    return max(0, min(batches, int(max(most, 1.0)) - recent))
