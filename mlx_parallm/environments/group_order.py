"""The environment of group k, and its seed: pure functions of (run seed, weights, k).

A low-discrepancy sequence (Weyl's, with the golden ratio) picks the environments, so that every
stretch of groups holds them nearly in proportion to their weights. Each environment counts its
tasks alone, so a finite data set is used up before it repeats, whatever it is mixed with.
"""

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Sequence

GOLDEN = 0.6180339887498949
SEED_BITS = 31


class Schedule:
    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        if not weights:
            raise ValueError("no environments")
        total = sum(weights)
        self._bounds = [bound / total for bound in itertools.accumulate(weights)][:-1]
        self._phase = derive_seed("schedule", seed) / 2**SEED_BITS

    def environment_of(self, index: int) -> int:
        """Return the environment of group `index`."""
        return bisect.bisect_right(self._bounds, (self._phase + index * GOLDEN) % 1.0)

    def groups_of(self, environment: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the groups of one environment from index `first` on, without end: (index, number
        of its task)."""
        indices = (
            index for index in itertools.count() if self.environment_of(index) == environment
        )
        return ((index, task) for task, index in enumerate(indices) if index >= first)


def derive_seed(purpose: str, *parts: int) -> int:
    """Return a seed of 31 bits, the same on every machine."""
    text = "/".join([purpose, *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> (32 - SEED_BITS)


def group_id(environment: str, seed: int, index: int) -> str:
    """Return the name of group `index`: the same after a resume, so that groups in the store are
    recognised."""
    return f"{environment}-{seed}-{index}"
