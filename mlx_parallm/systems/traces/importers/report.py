"""ImportReport: what became of every line and of every message of the logs.

One rule for all importers, kept in two ledgers. `objects` counts each line as it is read, `expect`
each message that a line holds. Both stay open until they are carried (a trace holds them) or left
out with a reason; `settle` closes an import, and what is still open then is counted as a fault of
the importer. So, at the end, of lines and of messages,

    seen = carried + sum(left_out.values())

Unknown fields and content parts of a message travel in its trace. One that does not is a detail:
counted by `drop`.
"""

import errno
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.system.files import read_bounded
from mlx_parallm.systems.traces.schema import LONGEST_LINE, SHAPES, parse_json, read_jsonl, without
from mlx_parallm.systems.traces.session import Session
from mlx_parallm.systems.traces.trace import Trace

SHOWN_PLACES = 3
UNACCOUNTED = "no trace holds it, and the importer gave no reason: please report this log"


@dataclass
class Ledger:
    """Things of one kind: each that was seen is carried, or left out with a reason."""

    seen: int = 0
    carried: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    open: dict[Hashable, Any] = field(default_factory=dict)

    def see(self, key: Hashable, value: Any) -> None:
        self.seen += 1
        self.open[key] = value

    def carry(self, key: Hashable) -> None:
        """Close it; one that is closed stays as it is."""
        if key in self.open:
            del self.open[key]
            self.carried += 1

    def leave(self, key: Hashable, reason: str) -> bool:
        """Close it as left out; return whether it was open."""
        if key not in self.open:
            return False
        del self.open[key]
        self.left_out[reason] += 1
        return True


@dataclass
class ImportReport:
    """Counts of one import, of several files too. `traces` counts what came out.

    Attributes:
        places: reason → the first places, "file:line".
        details: reason → parts and fields of carried messages that no trace holds.
        remarks: what a reader should know, and how often it happened.
        sampled: ids of answers that a trace of this import has already sampled: in later files they
            are copied context.
    """

    traces: int = 0
    places: dict[str, list[str]] = field(default_factory=dict)
    details: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    sampled: set[str] = field(default_factory=set)
    lines: Ledger = field(default_factory=Ledger)
    messages: Ledger = field(default_factory=Ledger)
    _counts: Counter[str] = field(default_factory=Counter)  # place → its messages

    def read(self, place: str, value: Any = None) -> None:
        """Count a line (or what the format has in its place: a span, a group). `place`:
        "file:line"."""
        self.lines.see(place, value)

    def expect(self, place: str, messages: Sequence[Any]) -> int:
        """Count the messages that a line holds, after those that were counted already; return
        the first one's index."""
        first = self._counts[place]
        for number, message in enumerate(messages, first):
            self.messages.see((place, number), message)
        self._counts[place] += len(messages)
        return first

    def carry(self, place: str, index: int | None = None) -> None:
        """A trace holds the line, and its message `index` (None: each that is still open)."""
        self.lines.carry(place)
        for number in range(self._counts[place]) if index is None else (index,):
            self.messages.carry((place, number))

    @contextmanager
    def carrying(self, places: Iterable[str]) -> Iterator[list[Trace]]:
        """Carry the lines of the traces that the block puts into the list; skip them where they
        cannot be traces."""
        traces: list[Trace] = []
        try:
            yield traces
        except SHAPES as error:
            traces.clear()
            for place in places:
                self.skip(place, shape_of(error))
            return
        for place in places:
            self.carry(place)
        self.traces += len(traces)

    def leave(self, place: str, index: int, reason: str) -> None:
        """Leave out one message of a line."""
        value = self.messages.open.get((place, index))
        if self.messages.leave((place, index), reason):
            self._noted(place, reason, value)

    def skip(self, place: str, reason: str) -> None:
        """Leave out a line with every message of it that is still open."""
        value = self.lines.open.get(place)
        for number in range(self._counts[place]):
            self.messages.leave((place, number), reason)
        if self.lines.leave(place, reason):
            self._noted(place, reason, value)

    def leave_out(self, place: str, value: Any, reason: str) -> None:
        """Count a line, and leave it out."""
        self.read(place, value)
        self.skip(place, reason)

    def drop(self, place: str, reason: str, value: Any) -> None:
        """Leave out a part or a field of a message that is carried."""
        self.details[reason] += 1
        self._noted(place, reason, value)

    def remark(self, place: str, text: str) -> None:
        self.remarks[text] += 1
        self._noted(place, text, None)

    def _noted(self, place: str, reason: str, value: Any) -> None:
        """Keep the place. `value`: what was left out."""
        shown = self.places.setdefault(reason, [])
        if len(shown) < SHOWN_PLACES:
            shown.append(place)

    def samples(self, trace: Trace, answers: set[str]) -> None:
        """Note answers that other traces only repeat; none of a sub-agent's: what it repeats is
        its parent's, whichever file is read first."""
        if not (trace.get("sidechain") or trace.get("untrainable")):
            self.sampled |= answers

    def settle(self) -> None:
        """End the import of a file: nothing stays open."""
        for place in list(self.lines.open):
            self.skip(str(place), UNACCOUNTED)
        for key in list(self.messages.open):
            self.messages.leave(key, UNACCOUNTED)
        self._counts.clear()

    @property
    def is_lossy(self) -> bool:
        """Whether anything was left out, or should be known."""
        return any((self.lines.left_out, self.messages.left_out, self.details, self.remarks))

    def draw(self) -> Iterator[str]:
        lines, messages = self.lines, self.messages
        yield f"{self.traces} traces from {lines.carried} of {lines.seen} lines"
        if messages.seen:
            left = messages.seen - messages.carried
            yield f"{messages.seen} messages: {messages.carried} carried, {left} left out"
        yield from self._draw("skipped {}: {}", lines.left_out)
        others = Counter(without(messages.left_out, *lines.left_out))
        yield from self._draw("left out {} messages: {}", others)
        yield from self._draw("left out {} parts or fields: {}", self.details)
        yield from self._draw("{} times: {}", self.remarks)

    def _draw(self, form: str, counts: Counter[str]) -> Iterator[str]:
        for reason, count in counts.most_common():
            places = [*self.places.get(reason, ()), *["…"] * (count > SHOWN_PLACES)]
            yield form.format(count, reason) + f" ({', '.join(places)})"


Importer = Callable[[Path, ImportReport], Iterator[Trace]]
"""Yields the traces of a file. What is wrong with a line goes into the report. Raises
TraceError: the file."""


def by_line(traces_of: Callable[[dict[str, Any], str, ImportReport], list[Trace]]) -> Importer:
    """Return the importer of a format whose lines are traces of their own. `traces_of`: makes them
    of a line and its place."""

    def importer(path: Path, report: ImportReport) -> Iterator[Trace]:
        for place, line in objects(path, report):
            with report.carrying([place]) as traces:
                traces += traces_of(line, place, report)
            yield from traces

    importer.__doc__ = traces_of.__doc__
    return importer


def objects(path: Path, report: ImportReport) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and value of each object of a file: one a line, or the file is one object or a
    list of them.

    Each entry is counted; what is not an object is skipped. The caller carries or skips the others.
    """
    for place, value in entries(path):
        report.read(place, value)
        if isinstance(value, dict):
            yield place, value
            continue
        reason = "not a JSON object"
        if isinstance(value, ValueError):
            reason = str(value) if "nested" in str(value) else "not JSON"
        report.skip(place, reason)


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each entry; a ValueError if a line is not JSON. They are not
    counted here."""
    lines = read_jsonl(path)
    first = next(lines, None)
    if first is None:
        return
    if not isinstance(first[1], dict):
        whole = whole_json(path)
        if isinstance(whole, dict):
            yield path.name, whole
            return
        if isinstance(whole, list):
            yield from ((f"{path.name}#{number}", value) for number, value in enumerate(whole, 1))
            return
    yield f"{path.name}:{first[0]}", first[1]
    yield from ((f"{path.name}:{number}", value) for number, value in lines)


def whole_json(path: Path) -> Any:
    """The value of a file that is one JSON text, over several lines too; None where it is none,
    or longer than a line may be. Raises TraceError."""
    try:
        return parse_json(read_bounded(path, LONGEST_LINE))
    except ValueError:
        return None
    except OSError as error:
        if error.errno == errno.EFBIG:
            return None
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def shape_of(error: Exception) -> str:
    """A reason of at most 200 characters."""
    kind = "" if isinstance(error, TraceError) else f"unexpected shape: {type(error).__name__}: "
    return f"{kind}{error}"[:200]


def session_traces(
    session: Session, places: Mapping[str, str], report: ImportReport
) -> Iterator[Trace]:
    """Yield a trace for each leaf; carry the lines of its turns, or skip them where it cannot be
    one. Turns that an earlier trace holds are copied context.

    Args:
        places: each turn's id → the line that it came from.
    """
    claimed: set[str] = set()
    for number, leaf in enumerate(session.ordered_leaves(), 1):
        path = session.path(leaf.id)
        new_places = dict.fromkeys(places[turn.id] for turn in path if turn.id not in claimed)
        with report.carrying(new_places) as traces:
            traces.append(session.trace(path, claimed, number))
            claimed |= {turn.id for turn in path}
        yield from traces
