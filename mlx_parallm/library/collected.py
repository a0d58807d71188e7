"""CollectedGroups: the rollout buffer's store where nothing runs beside the trainer. Groups are collected, by the
trainer's own thread, when the buffer waits for those that it has asked for; they live in memory. No MLX."""

from collections.abc import Callable, Sequence

from mlx_parallm.types import RolloutGroup

Collect = Callable[[int], list[RolloutGroup]]


class CollectedGroups:
    """A `rollout_buffer.GroupStore`, and what it asks for groups (`request`).

    Args:
        collect: plays and scores so many groups, blocks while it does, and may return fewer (some failed) or more; at
            least one, or it raises.
    """

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._owed = 0
        self._waiting: dict[str, RolloutGroup] = {}

    def request(self, n: int, environment: str | None = None, /) -> None:
        """`RequestGroups`: there is one environment."""
        self._owed += n

    def wait_for_groups(self, timeout_s: float, *, at_least: int = 1) -> bool:
        """Collects what is owed, however long that takes; True when there are `at_least` groups."""
        if self._owed > 0:
            groups = self._collect(self._owed)
            self._owed = max(0, self._owed - len(groups))
            self._waiting |= {group.group_id: group for group in groups}
        return len(self._waiting) >= at_least

    def waiting(self, limit: int | None = None, *, exclude: set[str]) -> list[RolloutGroup]:
        return [group for group_id, group in self._waiting.items() if group_id not in exclude][:limit]

    def waiting_ids(self) -> set[str]:
        return set(self._waiting)

    def known_ids(self) -> set[str]:
        return set(self._waiting)

    def groups(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        raise AssertionError("only a step that a shutdown interrupted asks for groups again")

    def take(self, group_ids: Sequence[str], step: int) -> None:
        for group_id in group_ids:
            del self._waiting[group_id]

    def drop(self, group_ids: Sequence[str], step: int, reason: str) -> None:
        self.take(group_ids, step)

    def restore(self, consumed_up_to_step: int, *, keep_drops_of: int | None = None) -> int:
        """`checkpoint.ConsumedGroups`: nothing of an earlier process is here."""
        return 0
