"""FeedbackStore: answers that may be learned, users' signals about them, and the fate of both.
One SQLite file in the run directory. No MLX.

    open ── first signal, settle_s later ──► (review ── approved ──►) ready ── a batch ──► released
      └─ no signal in time, refused, rejected ──► unused, with the reason

Everything is on the disk when a method returns, so a `kill -9` loses nothing that was acknowledged.
An answer's tokens and words are removed as soon as they are in the run's rollout store, or it is
known that nothing will be learned from it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Literal

from mlx_parallm.rollout_store.database import Database, Schema
from mlx_parallm.systems.feedback.signals import Baseline, ReplySignal, strongest

FEEDBACK_FILE = "feedback.sqlite"
LOCK_TIMEOUT_S = 5.0
LISTED = 100
HOUR_S = 3600.0
MOST_BASELINES = 1000
AFTER_KEY = chr(ord("/") + 1)
# reasons why an answer or a signal is not used, beside those of checks
NO_SIGNAL = "no signal within keep_s"
REJECTED = "rejected in the review"
REFUSED = "a check refused it"
NO_LABEL = "its reward is 0: neither good nor bad"
NOTHING_NEW = "its reward is what its task gets on average"
AMBIGUOUS = "ambiguous"
WEAKER = "a stronger signal decided"
NOBODY_JUDGES = "nobody judges it"
REPLACED = "replaced by a later one"
LATE = "the answer was decided on already"
ENOUGH = "more answers of one key in an hour than max_answers_per_hour"
NO_ROOM = "more answers than max_answers wait"
FORGOTTEN = "forgotten", "", "decided on, beyond max_answers"

AnswerState = Literal["open", "review", "ready", "released", "unused"]

FEEDBACK = Schema(
    "feedback",
    1,
    """
CREATE TABLE answers (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    user TEXT NOT NULL,
    task TEXT NOT NULL,
    at REAL NOT NULL,
    before TEXT NOT NULL,
    after TEXT NOT NULL,
    question TEXT NOT NULL,
    answer TEXT NOT NULL,
    payload BLOB,
    state TEXT NOT NULL CHECK (state IN ('open', 'review', 'ready', 'released', 'unused')),
    reason TEXT,
    settles REAL,
    kind TEXT,
    reward REAL,
    advantage REAL
);
CREATE INDEX answers_by_state ON answers (state, sequence);
CREATE INDEX answers_before ON answers (user, before);
CREATE INDEX answers_after ON answers (user, after);
CREATE TABLE signals (
    answer TEXT NOT NULL,
    kind TEXT NOT NULL,
    value REAL,
    detail TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (answer, kind)
);
CREATE TABLE baselines (task TEXT PRIMARY KEY, weight REAL NOT NULL, total REAL NOT NULL);
CREATE TABLE releases (sequence INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL);
CREATE TABLE counts (
    what TEXT NOT NULL, kind TEXT NOT NULL, outcome TEXT NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (what, kind, outcome)
);
""",
    erases=True,
)


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """An answer that may be learned. `before`: the key of the conversation that it answers;
    `after`: the same with the answer. `payload`: a packed `RolloutGroup` without scores; None
    if nothing can be learned, because of `reason`."""

    id: str
    user: str
    task: str
    before: str
    after: str
    question: str
    answer: str
    payload: bytes | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A row of an answer; `reply`: the user's words that were judged."""

    id: str
    user: str
    task: str
    at: float
    question: str
    answer: str
    state: AnswerState
    reason: str | None
    kind: str | None
    reward: float | None
    advantage: float | None
    reply: str = ""


@dataclass(frozen=True, slots=True)
class ReadyAnswer:
    id: str
    reward: float
    advantage: float
    payload: bytes


_ALL_JUDGED = "NOT EXISTS (SELECT 1 FROM signals WHERE answer = answers.id AND value IS NULL)"
_KEPT = "id, user, task, at, question, answer, state, reason, kind, reward, advantage"


class FeedbackStore:
    """Any thread. Raises StoreError: the disk, another process.

    Args:
        settle_s: between the first signal of an answer and its decision.
        weights: the weight of each kind of signal; a kind of 0 is not a signal.
        most_per_hour: answers of one key that are learned in an hour; None: no bound.
    """

    def __init__(
        self,
        path: Path,
        *,
        settle_s: float,
        weights: Mapping[str, float],
        most_per_hour: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = Database(
            path, lock_timeout_s=LOCK_TIMEOUT_S, read_only=False, schema=FEEDBACK
        )
        self._settle_s, self._weights, self._clock = settle_s, weights, clock
        self._most_per_hour = most_per_hour

    # ------------------------------------------------------------------ what comes

    def record(self, answers: Sequence[NewAnswer], signals: Sequence[ReplySignal]) -> None:
        """Take the answers of a request, and what it says about earlier ones, in one commit."""
        now = self._clock()
        with self._database.transaction() as connection:
            for signal in signals:
                self._signal(connection, signal, now)
            for new in answers:
                state = "unused" if new.payload is None else "open"
                row = asdict(new) | {"at": now, "state": state}
                if new.payload is None:  # nothing is learned: no words are kept
                    row |= {"question": "", "answer": ""}
                connection.execute(
                    "INSERT OR IGNORE INTO answers (id, user, task, at, before, after, question,"
                    " answer, payload, state, reason) VALUES (:id, :user, :task, :at, :before,"
                    " :after, :question, :answer, :payload, :state, :reason)",
                    row,
                )
                if new.payload is None:
                    _count(connection, "answer", "", str(new.reason))

    def signal(self, signal: ReplySignal) -> KeptAnswer | None:
        """Take a signal for an answer by its id; return the answer. None: unknown id."""
        with self._database.transaction() as connection:
            self._signal(connection, signal, self._clock())
            return _kept(connection, signal.answer)

    def judged(self, answer: str, reply: str, value: float | None, outcome: str) -> None:
        """Give the pending message about an answer its value. None: it is not a signal, because of
        `outcome`. A later message may have taken its place meanwhile, and waits for its own."""
        with self._database.transaction() as connection:
            of_it = "answer = ? AND kind = 'message' AND value IS NULL AND detail = ?"
            if value is None:
                done = connection.execute(f"DELETE FROM signals WHERE {of_it}", (answer, reply))
            else:
                done = connection.execute(
                    f"UPDATE signals SET value = ? WHERE {of_it}", (value, answer, reply)
                )
            if not done.rowcount:
                return
            _count(connection, "signal", "message", outcome)
            if value is not None:
                self._settle(connection, answer, self._clock())
                return
            # it was in the place of one that had a value: nothing is left to decide on
            connection.execute(
                "UPDATE answers SET settles = NULL WHERE id = ? AND state = 'open' AND NOT EXISTS"
                " (SELECT 1 FROM signals WHERE answer = answers.id)",
                (answer,),
            )

    def _signal(self, connection: Connection, signal: ReplySignal, now: float) -> None:
        if not self._weights[signal.kind]:
            _count(connection, "signal", signal.kind, "its weight is 0")
            return
        row = connection.execute(
            "SELECT state FROM answers WHERE id = ?", (signal.answer,)
        ).fetchone()
        if row is None:
            return
        if row[0] not in ("open", "review"):
            _count(connection, "signal", signal.kind, LATE)
            return
        earlier = connection.execute(
            "SELECT value FROM signals WHERE answer = ? AND kind = ?", (signal.answer, signal.kind)
        ).fetchone()
        connection.execute(
            "INSERT OR REPLACE INTO signals VALUES (?, ?, ?, ?, ?)",
            (signal.answer, signal.kind, signal.value, signal.detail, now),
        )
        if signal.value is not None:
            outcome = "taken" if earlier is None else REPLACED
            _count(connection, "signal", signal.kind, outcome)
            self._settle(connection, signal.answer, now)
        elif earlier == (None,):
            _count(connection, "signal", signal.kind, REPLACED)

    def _settle(self, connection: Connection, answer: str, now: float) -> None:
        """An answer under review that gets another signal is decided on anew."""
        connection.execute(
            "UPDATE answers SET state = 'open', settles = COALESCE(settles, ?) WHERE id = ?"
            " AND state IN ('open', 'review')",
            (now + self._settle_s, answer),
        )

    # ------------------------------------------------------------------ what is looked up

    def at(self, user: str, *, before: str = "", after: str = "") -> list[KeptAnswer]:
        """Return a user's answers to a conversation (`before`), or that end one (`after`), the
        newest first."""
        column, key = ("before", before) if before else ("after", after)
        with self._database.reading() as connection:
            rows = connection.execute(
                f"SELECT {_KEPT} FROM answers WHERE user = ? AND {column} = ?"
                " ORDER BY sequence DESC LIMIT 20",
                (user, key),
            ).fetchall()
        return [KeptAnswer(*row) for row in rows]

    def find(self, answer: str) -> KeptAnswer | None:
        with self._database.reading() as connection:
            return _kept(connection, answer)

    def pending(self) -> list[KeptAnswer]:
        """Return the answers about which a message waits for its judge, the oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                f"SELECT {_qualified(_KEPT)}, signals.detail FROM answers JOIN signals ON"
                " signals.answer = answers.id WHERE signals.value IS NULL ORDER BY signals.at"
            ).fetchall()
        return [KeptAnswer(*row) for row in rows]

    def under_review(self, limit: int = LISTED) -> list[KeptAnswer]:
        """Return what waits for a person, the oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                f"SELECT {_qualified(_KEPT)}, COALESCE((SELECT GROUP_CONCAT(detail, ' / ') FROM"
                " signals WHERE answer = answers.id AND detail != ''), '') FROM answers WHERE"
                " state = 'review' ORDER BY sequence LIMIT ?",
                (limit,),
            ).fetchall()
        return [KeptAnswer(*row) for row in rows]

    # ------------------------------------------------------------------ what becomes of it

    def decide(
        self, *, review: bool, decay: float | None, keep_s: float, max_answers: int = 1 << 30
    ) -> None:
        """Decide on the answers whose signals have settled, give up those without one, and forget
        the oldest beyond `max_answers`. `decay`: of the mean that rewards are compared with; None:
        the sign of a reward is what is learned."""
        now = self._clock()
        with self._database.transaction() as connection:
            old = connection.execute(
                "SELECT id FROM answers WHERE state = 'open' AND settles IS NULL AND at < ?",
                (now - keep_s,),
            ).fetchall()
            for (answer,) in old:
                _give_up(connection, answer, NO_SIGNAL)
            settled = connection.execute(
                "SELECT id, task FROM answers WHERE state = 'open' AND settles <= ? AND"
                f" {_ALL_JUDGED} ORDER BY sequence",
                (now,),
            ).fetchall()
            for answer, task in settled:
                kind, reward = self._reward(connection, answer)
                connection.execute(
                    "UPDATE answers SET kind = ?, reward = ? WHERE id = ?", (kind, reward, answer)
                )
                if review:
                    connection.execute(
                        "UPDATE answers SET state = 'review' WHERE id = ?", (answer,)
                    )
                else:
                    self._accept(connection, answer, task, reward, decay)
            self._make_room(connection, max_answers)

    def _make_room(self, connection: Connection, most: int) -> None:
        """Remove rows beyond `most`: those that were decided on first; of the others, those that
        are ready to be learned last."""
        (rows,) = connection.execute("SELECT COUNT(*) FROM answers").fetchone()
        if rows <= most:
            return
        undecided = "FROM answers WHERE state NOT IN ('released', 'unused')"
        (wait,) = connection.execute(f"SELECT COUNT(*) {undecided}").fetchone()
        oldest = connection.execute(
            f"SELECT id {undecided} ORDER BY state = 'ready', sequence LIMIT ?",
            (max(0, wait - most),),
        ).fetchall()
        for (answer,) in oldest:
            _give_up(connection, answer, NO_ROOM)
        gone = connection.execute(
            "DELETE FROM answers WHERE sequence IN (SELECT sequence FROM answers WHERE state IN"
            " ('released', 'unused') ORDER BY sequence LIMIT ?)",
            (rows - most,),
        ).rowcount
        _count(connection, *FORGOTTEN, number=gone)

    def review(self, answers: Iterable[str], *, approve: bool, decay: float | None) -> list[str]:
        """Approve or reject answers that wait for it; return the ids of those that did."""
        done = []
        with self._database.transaction() as connection:
            for answer in answers:
                row: tuple[str, float] | None = connection.execute(
                    "SELECT task, reward FROM answers WHERE id = ? AND state = 'review'", (answer,)
                ).fetchone()
                if row is None:
                    continue
                done.append(answer)
                if approve:
                    self._accept(connection, answer, row[0], row[1], decay)
                else:
                    _give_up(connection, answer, REJECTED)
        return done

    def _reward(self, connection: Connection, answer: str) -> tuple[str, float]:
        rows = connection.execute(
            "SELECT kind, value FROM signals WHERE answer = ? AND value IS NOT NULL", (answer,)
        ).fetchall()
        decided = strongest(dict(rows))
        assert decided is not None, "an answer settles when it has a signal"
        kind, value = decided
        for other, _ in rows:
            if other != kind:
                _count(connection, "signal", other, WEAKER)
        return kind, value * self._weights[kind]

    def _accept(
        self, connection: Connection, answer: str, task: str, reward: float, decay: float | None
    ) -> None:
        if decay is None:
            if reward:
                self._make_ready(connection, answer, reward)
            else:
                _give_up(connection, answer, NO_LABEL)
            return
        advantage = reward - self._compare(
            connection, _key_of(connection, answer), task, reward, decay
        )
        if not advantage:
            _give_up(connection, answer, NOTHING_NEW)
            return
        self._make_ready(connection, answer, advantage)

    def _compare(
        self, connection: Connection, key: str, task: str, reward: float, decay: float
    ) -> float:
        """Return the mean that a reward of a task is compared with, and add the reward to it.

        A task that is new begins with the mean of its key: a client that names a new task for each
        chat is compared with its own earlier rewards.
        """
        key_mean = _baseline(connection, key) or Baseline()
        baseline = _baseline(connection, task) or key_mean
        for name, before in ((key, key_mean), (task, baseline)):
            later = before.after(reward, decay)
            connection.execute(
                "INSERT OR REPLACE INTO baselines VALUES (?, ?, ?)", (name, later.mass, later.total)
            )
        # a replaced row is the newest: what goes was not used for the longest time
        connection.execute(
            "DELETE FROM baselines WHERE rowid IN (SELECT rowid FROM baselines ORDER BY rowid DESC"
            " LIMIT -1 OFFSET ?)",
            (MOST_BASELINES,),
        )
        return baseline.mean

    def _make_ready(self, connection: Connection, answer: str, advantage: float) -> None:
        if self._most_per_hour is not None:
            key = _key_of(connection, answer)
            (number,) = connection.execute(
                "SELECT COUNT(*) FROM answers WHERE user >= ? AND user < ? AND at > ? AND state IN"
                " ('ready', 'released')",
                (key, key[:-1] + AFTER_KEY, self._clock() - HOUR_S),
            ).fetchone()
            if number >= self._most_per_hour:
                _give_up(connection, answer, ENOUGH)
                return
        connection.execute(
            "UPDATE answers SET state = 'ready', advantage = ? WHERE id = ?", (advantage, answer)
        )

    # ------------------------------------------------------------------ what is learned

    def ready(self, limit: int) -> list[ReadyAnswer]:
        """Return answers that may be learned, the oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT id, reward, advantage, payload FROM answers WHERE state = 'ready'"
                " ORDER BY sequence LIMIT ?",
                (limit,),
            ).fetchall()
        return [ReadyAnswer(*row) for row in rows]

    def released(self, answers: Iterable[str], *, since: float = 0.0) -> None:
        """Note that a batch of answers is in the run's rollout store, durably; forget batches that
        were released before the Unix time `since`."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM releases WHERE at <= ?", (since,))
            connection.execute("INSERT INTO releases (at) VALUES (?)", (self._clock(),))
            for answer in answers:
                connection.execute("UPDATE answers SET state = 'released' WHERE id = ?", (answer,))
                _count(connection, "answer", "", "released")
                _forget(connection, answer)

    def refused(self, answer: str, reason: str) -> None:
        """Note why an answer can be learned after all not. A check's sentence has numbers in it,
        and each would be its own label in /metrics."""
        with self._database.transaction() as connection:
            _give_up(connection, answer, reason, outcome=REFUSED)

    def releases(self, since: float) -> list[float]:
        """Return the Unix times of the batches that were released later than `since`."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT at FROM releases WHERE at > ?", (since,)).fetchall()
        return [at for (at,) in rows]

    # ------------------------------------------------------------------ what people see

    def next_due(self) -> float | None:
        """Return the Unix time at which the next answer can be decided on; None: none can, or a
        judge is waited for."""
        with self._database.reading() as connection:
            (due,) = connection.execute(
                f"SELECT MIN(settles) FROM answers WHERE state = 'open' AND {_ALL_JUDGED}"
            ).fetchone()
        return None if due is None else float(due)

    def counts(self) -> dict[tuple[str, str, str], int]:
        """Return ("answer", "signal" or "forgotten", kind, what became of it) → how many so
        far."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT what, kind, outcome, number FROM counts").fetchall()
        return {(what, kind, outcome): number for what, kind, outcome, number in rows}

    def states(self) -> dict[str, int]:
        """Return how many answers are in each state now."""
        with self._database.reading() as connection:
            return dict(
                connection.execute("SELECT state, COUNT(*) FROM answers GROUP BY state").fetchall()
            )

    def baselines(self) -> dict[str, float]:
        """Return the mean that a task's next reward is compared with."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT task, weight, total FROM baselines WHERE task NOT LIKE '%/'"
            ).fetchall()
        return {task: Baseline(weight, total).mean for task, weight, total in rows}

    def count(self, what: str, kind: str, outcome: str) -> None:
        with self._database.transaction() as connection:
            _count(connection, what, kind, outcome)

    def close(self) -> None:
        self._database.close()


def _qualified(columns: str) -> str:
    return ", ".join(f"answers.{column}" for column in columns.split(", "))


def _kept(connection: Connection, answer: str) -> KeptAnswer | None:
    row: Any = connection.execute(f"SELECT {_KEPT} FROM answers WHERE id = ?", (answer,)).fetchone()
    return None if row is None else KeptAnswer(*row)


def _key_of(connection: Connection, answer: str) -> str:
    """Return the key of an answer's user, with the slash that no task's name has. What comes after
    it the client has chosen."""
    (user,) = connection.execute("SELECT user FROM answers WHERE id = ?", (answer,)).fetchone()
    return f"{user.partition('/')[0]}/"


def _baseline(connection: Connection, name: str) -> Baseline | None:
    """Return the mean of a task, or of a key."""
    row = connection.execute(
        "SELECT weight, total FROM baselines WHERE task = ?", (name,)
    ).fetchone()
    return Baseline(*row) if row else None


def _count(connection: Connection, what: str, kind: str, outcome: str, *, number: int = 1) -> None:
    connection.execute(
        "INSERT INTO counts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
        " number = number + excluded.number",
        (what, kind, outcome, number),
    )


def _give_up(
    connection: Connection, answer: str, reason: str, *, outcome: str | None = None
) -> None:
    """`outcome`: the name under which it is counted; None: its reason."""
    connection.execute(
        "UPDATE answers SET state = 'unused', reason = ? WHERE id = ?", (reason, answer)
    )
    _count(connection, "answer", "", outcome or reason)
    _forget(connection, answer)


def _forget(connection: Connection, answer: str) -> None:
    """Remove the tokens and the words."""
    connection.execute(
        "UPDATE answers SET payload = NULL, question = '', answer = '' WHERE id = ?", (answer,)
    )
    connection.execute("DELETE FROM signals WHERE answer = ?", (answer,))
