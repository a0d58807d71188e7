"""A SQLite file that loses nothing: schema, pragmas, transactions, and errors in words.
`store.RolloutStore` has one with the schema GROUPS; a part may have one with its own `Schema`.

One connection, one lock: SQLite has a single writer anyway. A commit is on the disk when it returns
(WAL, synchronous=FULL; on macOS F_FULLFSYNC, because a drive there may keep writes in its cache).
Payloads are in their own table: marking a group does not write its tokens again, and pruning
deletes the tokens and leaves the row.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.errors import StoreError

# bytes that the write-ahead log shrinks to once it has been folded into the file
LOG_LIMIT = 16 << 20
SPARE_PAGES = 1024  # free pages that stay in the file: the next groups need them
VACUUM_PAGES = 512

_GROUPS = """
CREATE TABLE groups (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL,
    environment TEXT NOT NULL,
    rollouts INTEGER NOT NULL,
    received REAL NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'taken', 'dropped')),
    step INTEGER,
    reason TEXT,
    first_version INTEGER,
    last_version INTEGER,
    bytes INTEGER
);
CREATE INDEX groups_by_state ON groups (state, sequence);
CREATE INDEX consumed_payloads ON groups (step, sequence, bytes)
    WHERE bytes IS NOT NULL AND state != 'waiting';
CREATE TABLE payloads (sequence INTEGER PRIMARY KEY, payload BLOB NOT NULL);
"""
_NEW = f"""
{_GROUPS}
CREATE TABLE rejects (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    source TEXT NOT NULL,
    reason TEXT NOT NULL,
    received REAL NOT NULL,
    payload BLOB
);
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Schema:
    """The tables of a database file. `name`: for messages; `erases`: whether deleted data is
    overwritten in the file."""

    name: str
    version: int
    create: str
    erases: bool = False


GROUPS = Schema("rollout", 2, _NEW)


class Database:
    """Any thread. Raises StoreError and nothing of sqlite3's. `changed` is told after each
    commit, and at `close`."""

    def __init__(
        self, path: Path, *, lock_timeout_s: float, read_only: bool, schema: Schema = GROUPS
    ) -> None:
        """Opens the file; makes it unless `read_only`.

        Raises StoreError: not a database, another schema, locked, not writable (or not there,
        read-only).
        """
        self.path, self._schema, self._read_only, self._lock_timeout_s = (
            path,
            schema,
            read_only,
            lock_timeout_s,
        )
        self.changed = threading.Condition()
        self.connection: sqlite3.Connection | None = None
        try:
            if not read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except (sqlite3.Error, OSError) as error:
            self._discard()
            raise self._explained("opened", error) from error
        except StoreError:
            self._discard()
            raise

    @contextlib.contextmanager
    def transaction(self, doing: str = "written") -> Iterator[sqlite3.Connection]:
        """All or nothing; who waits is told after the commit."""
        with self.reading(doing) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            finally:
                # something failed; a full disk may have rolled back already
                if connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
            self.changed.notify_all()

    @contextlib.contextmanager
    def reading(self, doing: str = "read") -> Iterator[sqlite3.Connection]:
        with self.changed:
            if self.connection is None:
                raise StoreError(f"{self.path}: the {self._schema.name} database is closed")
            try:
                if self._unwritten is not None and self._unwritten != _unwritten_since(self.path):
                    self.connection.close()  # a run that was over continues, or has gone on
                    self._open()
                yield self.connection
            except sqlite3.Error as error:
                raise self._explained(doing, error) from error

    def forget(self, group_ids: Iterable[str]) -> None:
        """Removes groups and their rows, as if they had never come: a deterministic run makes
        them again."""
        ids = [(group_id,) for group_id in group_ids]
        sequence = "(SELECT sequence FROM groups WHERE group_id = ?)"
        with self.transaction() as connection:
            connection.executemany(f"DELETE FROM payloads WHERE sequence = {sequence}", ids)
            connection.executemany("DELETE FROM groups WHERE group_id = ?", ids)

    def size_bytes(self, *, used: bool = False) -> int:
        """Bytes of the file without its write-ahead log; `used`: without its free pages too."""
        with self.reading() as connection:
            pages, free, size = (
                pragma(connection, name) for name in ("page_count", "freelist_count", "page_size")
            )
        return (pages - free if used else pages) * size

    def give_back(self) -> bool:
        """Gives the file system some of the file's free pages, at its end. False: few are left."""
        with self.reading("shrunk") as connection:
            pages, free = pragma(connection, "page_count"), pragma(connection, "freelist_count")
            surplus = free - max(SPARE_PAGES, pages // 10)
            if surplus > 0:  # executescript: a plain execute stops after the first page
                connection.executescript(f"PRAGMA incremental_vacuum({min(surplus, VACUUM_PAGES)})")
        return surplus > VACUUM_PAGES

    def close(self) -> None:
        """Folds the log into the file and wakes who waits. Idempotent; later calls raise
        StoreError."""
        with self.changed:
            self._discard()
            self.changed.notify_all()

    def _open(self) -> None:
        self._unwritten = _unwritten_since(self.path) if self._read_only else None
        # autocommit: every transaction is explicit; the condition's lock serialises the threads
        self.connection = sqlite3.connect(
            reading_uri(self.path)
            if self._read_only
            else f"{self.path.resolve().as_uri()}?mode=rwc",
            uri=True,
            timeout=self._lock_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        self._prepare(self.connection, self._read_only)

    def _prepare(self, connection: sqlite3.Connection, read_only: bool) -> None:
        version, schema = pragma(connection, "user_version"), self._schema
        if version not in (0, schema.version):
            other = "a newer" if version > schema.version else "an older"
            raise StoreError(
                f"{self.path}: schema {version} is {other} mlx_parallm's; this one reads"
                f" {schema.version}"
            )
        if not version and not read_only and _has_tables(connection):
            raise StoreError(
                f"{self.path}: it holds other tables and no {schema.name} database: move the file"
                " away to start a new one"
            )
        if read_only:
            if not version:
                raise StoreError(f"{self.path}: there is no {schema.name} database in it")
            return
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts for a new file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = 1")
        connection.execute("PRAGMA checkpoint_fullfsync = 1")
        connection.execute(f"PRAGMA secure_delete = {int(schema.erases)}")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_LIMIT}")
        if not version:
            connection.executescript(
                f"BEGIN IMMEDIATE; {schema.create} PRAGMA user_version = {schema.version}; COMMIT;"
            )

    def _discard(self) -> None:
        if self.connection is not None:
            # a full disk: the log stays beside the file and loses nothing
            with contextlib.suppress(sqlite3.Error):
                self.connection.close()
        self.connection = None

    def _explained(self, doing: str, error: Exception) -> StoreError:
        text = str(error)
        advice = ""
        if "full" in text or "disk I/O" in text:
            advice = (
                " (is the disk full? free some space: it was not accepted and may be sent again)"
            )
        elif "locked" in text:
            advice = " (another process holds it: is a second daemon using this run directory?)"
        elif "not a database" in text:
            advice = " (move the file away to start a new one)"
        return StoreError(
            f"{self.path}: the {self._schema.name} database cannot be {doing}: {text}{advice}"
        )


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall())


def reading_uri(path: Path) -> str:
    """The address with which a reader opens a file. If no log lies beside it no process writes:
    the reader does without one, and leaves nothing behind. With a log it would make the log's
    files, and cannot remove them."""
    immutable = "" if _unwritten_since(path) is None else "&immutable=1"
    return f"{path.resolve().as_uri()}?mode=ro{immutable}"


def _unwritten_since(path: Path) -> int | None:
    """The time of the last change, of a file without a writer: no log lies beside it. None:
    there may be one."""
    return None if path.with_name(f"{path.name}-wal").exists() else path.stat().st_mtime_ns


def pragma(connection: sqlite3.Connection, name: str) -> int:
    """Return a setting of a database that is a number."""
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)
