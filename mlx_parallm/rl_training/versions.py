"""Which training step the weights of a policy version come from."""

import bisect
from typing import Any

KEPT = 4096  # versions remembered; anything older is as stale as the oldest


class VersionSteps:
    """version → training steps that its weights had behind them when they were published.

    A version beyond the newest was sampled by weights that a kill -9 lost, or is unknown to its sender (negative):
    both count as the newest. `staleness` of what step s trains on is s - 1 - steps(version): 0 when it was sampled by
    the weights that the step starts from.
    """

    def __init__(self, version: int = 0, steps: int = 0) -> None:
        self._entries: list[tuple[int, int]] = [(version, steps)]

    @property
    def newest(self) -> tuple[int, int]:
        """(version, steps)."""
        return self._entries[-1]

    def record(self, version: int, steps: int) -> None:
        """Notes a publish. Versions only rise."""
        assert version > self._entries[-1][0], "policy versions count upwards"
        self._entries = [*self._entries, (version, steps)][-KEPT:]

    def still_newest(self, steps: int) -> None:
        """A step ended without changing the weights: the newest version is what `steps` steps have made, too."""
        self._entries = [*self._entries[:-1], (self._entries[-1][0], steps)]

    def steps(self, version: int) -> int:
        if version < 0 or version >= self._entries[-1][0]:
            return self._entries[-1][1]
        position = bisect.bisect_right(self._entries, (version, 1 << 62)) - 1
        return self._entries[max(position, 0)][1]

    def staleness(self, versions: tuple[int, ...], step: int) -> int:
        """Of a group with tokens of these versions, trained on in `step`; no tokens = 0."""
        return max((step - 1 - self.steps(version) for version in set(versions)), default=0)

    def state(self) -> list[list[int]]:
        return [list(entry) for entry in self._entries]

    @classmethod
    def restored(cls, state: list[list[Any]]) -> "VersionSteps":
        restored = cls()
        restored._entries = [(int(version), int(steps)) for version, steps in state]
        return restored
