"""Judgements: what a judge of groups said of each request, so that an equal one is not sent again.
In memory, or in a SQLite file of the run, where a resumed run and the run's other judges find it.

The newest MOST_BYTES are kept. A judgement is in the file whole or not at all, also after a
`kill -9`. The file is its owner's alone: it holds what the judge says of the answers.
"""

import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.errors import CheckpointError
from mlx_parallm.rewards.judge_replies import AnswerVerdict
from mlx_parallm.system.log import get_logger

log = get_logger("rewards")

JUDGEMENTS_FILE = "judgements.sqlite"
MOST_BYTES = 32 << 20
"""Of the table: about 20,000 judgements of eight answers with their reasons."""
LOCK_TIMEOUT_S = 5.0
_OPEN = """
PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA journal_size_limit = 1048576;
CREATE TABLE IF NOT EXISTS judgements (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, verdicts TEXT NOT NULL
);
"""
_FORGET = """
DELETE FROM judgements WHERE number IN (SELECT number FROM judgements ORDER BY number LIMIT 64)
"""


class Judgements:
    """Any thread. What cannot be written or read costs a warning, and another request."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._lock, self._most_bytes, self._told = threading.Lock(), most_bytes, False
        self._path = Path(":memory:")
        self._connection = _opened(self._path)
        self._close = weakref.finalize(self, self._connection.close)

    def keep(self, run: Path) -> None:
        """Continue with those of the run in a directory, and keep them there. Raises
        CheckpointError: the file cannot be opened, or is another one."""
        path = run / JUDGEMENTS_FILE
        with self._lock:
            if path == self._path:
                return
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                path.chmod(0o600)
                connection = _opened(path)
            except (OSError, sqlite3.Error) as error:
                raise CheckpointError(
                    f"{path} cannot be opened ({error}): put it back from a copy, or remove it to"
                    " ask the judge anew"
                ) from error
            self._close()
            self._path, self._connection = path, connection
            self._close = weakref.finalize(self, connection.close)

    def get(self, key: str) -> tuple[AnswerVerdict, ...] | None:
        """Return the verdicts of a request; None: it is not known."""
        query = "SELECT verdicts FROM judgements WHERE key = ?"
        try:
            with self._lock:
                row = self._connection.execute(query, (key,)).fetchone()
            return None if row is None else _verdicts(row[0])
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._tell("read", error)
        return None

    def put(self, key: str, verdicts: Sequence[AnswerVerdict]) -> tuple[AnswerVerdict, ...]:
        """Keep the verdicts of a request, and return those that count: of an equal request that was
        answered meanwhile, the first ones, which are those that a resumed run will find."""
        text = json.dumps([(verdict.score, verdict.reason) for verdict in verdicts])
        if (others := self.get(key)) is not None:
            return others
        insert = "INSERT OR REPLACE INTO judgements (key, verdicts) VALUES (?, ?)"
        try:
            with self._lock:
                self._connection.execute(insert, (key, text))
                while self._used_bytes() > self._most_bytes:
                    if not self._connection.execute(_FORGET).rowcount:
                        break
        except sqlite3.Error as error:
            self._tell("kept", error)
        return tuple(verdicts)

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _tell(self, what: str, error: Exception) -> None:
        if not self._told:
            self._told = True
            log.warning(f"judgements cannot be {what}", file=str(self._path), problem=str(error))


def _verdicts(text: str) -> tuple[AnswerVerdict, ...]:
    """Raises ValueError, TypeError: it is no list of scores and reasons."""
    return tuple(AnswerVerdict(score, reason) for score, reason in json.loads(text))


def _opened(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.Error: it is no file of judgements."""
    connection = sqlite3.connect(
        path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.executescript(_OPEN)
        connection.execute("SELECT number, key, verdicts FROM judgements LIMIT 1").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
