"""ImportReport: which lines of a file became traces, and which were left out and why."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.traces.schema import Trace, read_jsonl

SHOWN_PLACES = 3


@dataclass
class ImportReport:
    """Counts of one import. Every line is used or skipped; `traces` counts what came out."""

    lines: int = 0
    used: int = 0
    traces: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)  # reason → the first places

    def use(self) -> None:
        self.lines += 1
        self.used += 1

    def skip(self, place: str, reason: str) -> None:
        """Count a line that is left out. `place`: "file:line"."""
        self.lines += 1
        self.skipped[reason] += 1
        shown = self.places.setdefault(reason, [])
        if len(shown) < SHOWN_PLACES:
            shown.append(place)

    def draw(self) -> Iterator[str]:
        yield f"{self.traces} traces from {self.used} of {self.lines} lines"
        for reason, count in self.skipped.most_common():
            yield f"skipped {count}: {reason} ({', '.join(self.places[reason])}{', …' if count > SHOWN_PLACES else ''})"


Importer = Callable[[Path, ImportReport], Iterator[Trace]]
"""Yields the traces of a file. What is wrong with a line goes into the report. Raises TraceError: the file."""


def objects(path: Path, report: ImportReport) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and value of each line that is a JSON object; others are skipped. The caller counts what it uses."""
    for number, value in read_jsonl(path):
        place = f"{path.name}:{number}"
        if isinstance(value, ValueError):
            report.skip(place, "not JSON")
        elif not isinstance(value, dict):
            report.skip(place, "not a JSON object")
        else:
            yield place, value


def made(report: ImportReport, place: str, make: Callable[[], Trace]) -> Trace | None:
    """Call `make`; None where the line cannot be a trace, which the report says."""
    try:
        trace = make()
    except (TraceError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = str(error) if isinstance(error, TraceError) else f"unexpected shape: {type(error).__name__}: {error}"
        report.skip(place, reason[:200])
        return None
    report.use()
    report.traces += 1
    return trace
