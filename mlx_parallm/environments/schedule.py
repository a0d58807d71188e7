"""Which environment and which of its tasks group k gets, and its seed: pure functions of (run seed, weights, k).

Environments are chosen by a low-discrepancy sequence (Weyl's, with the golden ratio), so that every stretch of groups
holds them nearly in proportion to their weights. Each environment counts its own tasks, so a finite data set is gone
through once before it repeats, whatever it is mixed with.
"""

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

GOLDEN = 0.6180339887498949
SEED_BITS = 31


@dataclass(frozen=True, slots=True)
class Placement:
    environment: int  # position among the sources
    task: int  # index of the task in that source


class Schedule:
    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        if not weights:
            raise ValueError("no environments")
        total = sum(weights)
        self._bounds = [bound / total for bound in itertools.accumulate(weights)][:-1]
        self._phase = derive_seed("schedule", seed) / 2**SEED_BITS
        self._size = len(weights)
        self._rewind()

    def environment_of(self, index: int) -> int:
        """The environment of group `index`."""
        return bisect.bisect_right(self._bounds, (self._phase + index * GOLDEN) % 1.0)

    def place(self, index: int) -> Placement:
        """Environment and task of group `index`. Walking upwards is O(1) a group, a jump is O(distance)."""
        if index < self._position:
            self._rewind()
        while self._position < index:
            self._counts[self.environment_of(self._position)] += 1
            self._position += 1
        environment = self.environment_of(index)
        return Placement(environment, self._counts[environment])

    def _rewind(self) -> None:
        self._position = 0
        self._counts = [0] * self._size


def derive_seed(purpose: str, *parts: int) -> int:
    """A seed of 31 bits, the same on every machine."""
    text = "/".join([purpose, *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> (32 - SEED_BITS)


def group_id(environment: str, seed: int, index: int) -> str:
    """The stable name of group `index`: the same after a resume, so that what lies in the store is recognised."""
    return f"{environment}-{seed}-{index}"
