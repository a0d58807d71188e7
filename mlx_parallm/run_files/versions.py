"""Policy versions: which training step the weights of each come from, and which number the next one
gets.

A run has one timeline until it resumes an older checkpoint or is rolled back: then it leaves what
came after that point, and continues beside it. Steps may come again under the same number, versions
never do.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

# versions remembered; anything older is as stale as what belongs to a timeline that was left
KEPT = 4096
LEFT = -(1 << 40)  # its steps


class VersionSteps:
    """version → training steps that its weights had behind them when they were published; of this
    timeline only.

    `staleness` of what step s trains on is s - 1 - steps(version): 0 when it was sampled by the
    weights that the step starts from. A version that is not in the table was sampled by weights
    that a kill -9 lost or a rollback left: it is as stale as can be. A negative one is unknown to
    its sender and counts as the newest.
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
        """A step ended without changing the weights: the newest version is what `steps` steps
        have made, too."""
        self._entries = [*self._entries[:-1], (self._entries[-1][0], steps)]

    def go_back(self, table: Iterable[Sequence[int]], at: int, *, version: int, steps: int) -> None:
        """Record a rollback after `steps` steps: `version` serves the weights of step `at`, whose
        `state()` was `table`.

        Versions before that step keep their distance to it, so rollouts of the restored weights are
        fresh again.
        """
        shift = steps - at
        kept = [(int(entry[0]), int(entry[1]) + shift) for entry in table if entry[1] <= at]
        self._entries = [*kept, (version, steps)][-KEPT:]

    def steps(self, version: int) -> int:
        if version < 0:
            return self._entries[-1][1]
        position = bisect.bisect_left(self._entries, (version, -(1 << 62)))
        listed = position < len(self._entries) and self._entries[position][0] == version
        return self._entries[position][1] if listed else LEFT

    def staleness(self, versions: tuple[int, ...], step: int) -> int:
        """Return the staleness of a group with tokens of these versions in `step`; 0: no tokens."""
        return max((step - 1 - self.steps(version) for version in set(versions)), default=0)

    def state(self) -> list[list[int]]:
        return [list(entry) for entry in self._entries]

    @classmethod
    def restored(cls, state: list[list[Any]]) -> "VersionSteps":
        restored = cls()
        restored._entries = [(int(version), int(steps)) for version, steps in state]
        return restored


class Notes(Protocol):
    """Small values that outlive the process: `rollout_store.store.RolloutStore`."""

    def remember(self, key: str, value: Any) -> None: ...

    def recall(self, key: str) -> Any: ...


class VersionNumbers:
    """Numbers of a run's policy versions: each stands for one set of weights, whatever was resumed
    or rolled back.

    A number is on the disk before anything is served under it. A resume in deterministic mode makes
    the same weights again, bit for bit: there they come with a `digest`, and equal ones get their
    old number back.

    Args:
        notes: None = numbers that no other process has given out.
    """

    HIGHEST = "policy_version"

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = notes
        self._highest: int = (notes.recall(self.HIGHEST) if notes else None) or 0
        self._unused: int | None = None  # given out, but the publish had no lock

    def reserve(self, served: int, digest: str | None = None) -> int:
        """The number of the next version, which is above `served`, the present one."""
        number = served + 1
        if number <= self._highest and number != self._unused and not self._is(number, digest):
            number = max(self._highest, served) + 1
        if self._notes is not None:
            if digest is not None:
                self._notes.remember(f"{self.HIGHEST}/{number}", digest)
            if number > self._highest:
                self._notes.remember(self.HIGHEST, number)
        self._highest = max(self._highest, number)
        self._unused = number
        return number

    def used(self) -> None:
        """Note that the number that was reserved last is served now."""
        self._unused = None

    def _is(self, number: int, digest: str | None) -> bool:
        return (
            digest is not None
            and self._notes is not None
            and digest == self._notes.recall(f"{self.HIGHEST}/{number}")
        )
