"""What became of every group: read-only questions to a run's `rollouts.sqlite`, also while a daemon writes it.

`tools/rollouts.py` shows the answers. Rows stay when payloads are pruned, so the counts are of the whole run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mlx_parallm.errors import StoreError
from mlx_parallm.rollout_store.checks import OTHER_MODEL
from mlx_parallm.rollout_store.store import Reject, RolloutStore
from mlx_parallm.types import RolloutGroup

SHOWN_CANDIDATES = 5
_STATE = "CASE WHEN state = 'dropped' AND reason = '{}' THEN 'quarantined' ELSE state END".format(
    OTHER_MODEL.replace("'", "''")
)


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Groups of one environment, source and state that were sampled from one policy version on (None: not known)."""

    environment: str
    source: str
    state: str  # waiting, taken, dropped or quarantined
    version: int | None
    groups: int
    sequences: int
    pruned: int  # groups without tokens any more
    received_first: float  # Unix time
    received_last: float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One row, and the group itself; None when its tokens are pruned. Versions are None in runs of older formats."""

    group_id: str
    environment: str
    source: str
    state: str
    step: int | None  # that took or dropped it
    reason: str | None
    received: float  # Unix time
    first_version: int | None
    last_version: int | None
    group: RolloutGroup | None


class Ledger:
    """Raises StoreError, at the start too: no database, a newer or damaged one."""

    def __init__(self, path: Path) -> None:
        self._store = RolloutStore(path, read_only=True)

    def lines(self) -> list[LedgerLine]:
        """Ordered by environment, source, state and version."""
        with self._store.database.reading() as connection:
            rows = connection.execute(
                f"SELECT environment, source, {_STATE}, first_version, COUNT(*), SUM(rollouts), SUM(bytes IS NULL),"
                " MIN(received), MAX(received) FROM groups GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"
            ).fetchall()
        return [LedgerLine(*row) for row in rows]

    def drop_reasons(self) -> dict[str, int]:
        return self._store.drop_reasons()

    def reject_reasons(self) -> dict[tuple[str, str], int]:
        """(source, reason) → how many, the most frequent first."""
        with self._store.database.reading() as connection:
            rows = connection.execute(
                "SELECT source, reason, COUNT(*) FROM rejects GROUP BY 1, 2 ORDER BY 3 DESC, MAX(id) DESC"
            ).fetchall()
        return {(source, reason): count for source, reason, count in rows}

    def taken_by(self, step: int) -> list[str]:
        """Ids of the groups that a step was trained on, in the order in which they came."""
        with self._store.database.reading() as connection:
            rows = connection.execute(
                "SELECT group_id FROM groups WHERE state = 'taken' AND step = ? ORDER BY sequence", (step,)
            ).fetchall()
        return [group_id for (group_id,) in rows]

    def groups(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        """In the order asked for. Raises StoreError: one is unknown or pruned."""
        return self._store.groups(group_ids)

    def rejects(self, limit: int) -> list[Reject]:
        return self._store.rejects(limit)

    def size_bytes(self) -> int:
        return self._store.size_bytes()

    def find(self, group_id: str) -> GroupRecord:
        """The group of that id, or the only one whose id begins so. Raises StoreError: none, or several."""
        columns = [field.name for field in fields(GroupRecord) if field.name != "group"]
        selected = ", ".join(_STATE if name == "state" else name for name in columns)
        with self._store.database.reading() as connection:
            rows = connection.execute(
                f"SELECT {selected}, bytes IS NULL FROM groups WHERE substr(group_id, 1, ?) = ?"
                " ORDER BY group_id != ?, sequence LIMIT ?",
                (len(group_id), group_id, group_id, SHOWN_CANDIDATES + 1),
            ).fetchall()
        if not rows:
            raise StoreError(f"no group {group_id!r} in {self._store.path}")
        if rows[0][0] != group_id and len(rows) > 1:
            some = ", ".join(row[0] for row in rows[:SHOWN_CANDIDATES])
            raise StoreError(f"several groups begin with {group_id!r}: {some}" + ", …" * (len(rows) > SHOWN_CANDIDATES))
        *values, pruned = rows[0]
        return GroupRecord(
            **dict(zip(columns, values, strict=True)), group=None if pruned else self._store.groups([values[0]])[0]
        )

    def close(self) -> None:
        self._store.close()
