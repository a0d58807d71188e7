"""Mutated logs of agents through every importer: each import ends, and nothing of a log vanishes.

    .venv/bin/python -m tests.soak.fuzz_logs --logs 10000 [--formats claude-code codex] [--seed 0]

Each log is a good one with one to four mutations: lines and keys that go, come twice, change places
or names, values of other types, links in a circle, roles and parts of unknown types, lines that
break off, deep nesting, numbers that are none. For each must hold

    it ends within `SECONDS` of processor time, and raises at most a TraceError of the file
    lines    = used    + skipped with a reason
    messages = carried + left out with a reason
    every text of the log (each has its own mark) is in a trace, or in what the report left out
    traces   = in rows + left out with a reason, and no row learns an empty answer or a program's
             error message
"""

import argparse
import copy
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.builders import DatasetOptions, build_dataset
from mlx_parallm.systems.traces.importers.report import UNACCOUNTED, ImportReport, entries
from mlx_parallm.systems.traces.privacy import redact_trace, secret_finder
from mlx_parallm.systems.traces.reading import read_traces
from mlx_parallm.systems.traces.schema import dump_line
from mlx_parallm.systems.traces.trace import Trace, parse_trace
from tests.soak.good_logs import FAILED, GOOD, Mark

SECONDS = 5.0  # of processor time, for one log
MOST_GROWTH_MB = 400
MARK = re.compile(r"‹\d+›")


@dataclass
class LeftOut(ImportReport):
    """A report that keeps what was left out."""

    values: list[Any] = field(default_factory=list)

    def _noted(self, place: str, reason: str, value: Any) -> None:
        super()._noted(place, reason, value)
        self.values.append(value)


# ---------------------------------------------------------------------- mutations


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of nested JSON."""
    pairs, open_ = list[tuple[Any, Any]](), [value]
    while open_:
        at = open_.pop()
        items = (
            at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        )
        for key, inner in items:
            pairs.append((at, key))
            open_.append(inner)
    return pairs


LINKS = (
    "parentUuid",
    "parent",
    "uuid",
    "id",
    "logicalParentUuid",
    "spanId",
    "call_id",
    "tool_use_id",
    "tool_call_id",
)
KINDS = (
    "role",
    "type",
    "from",
    "source",
    "name",
    "subtype",
    "finish_reason",
    "stop_reason",
    "status",
)
WORDS = ("alien", "assistant", "user", "system", "tool", "tool_result", "error", "")
NAMES = ("foreign", "text", "content", "step", "id", "extra")


@dataclass
class Mutation:
    """One change of a log, in place."""

    lines: list[Any]
    generator: random.Random
    mark: Mark

    def make(self) -> None:
        of_lines = (self.delete_line, self.repeat_line, self.swap_lines, self.insert_line)
        of_values = (
            self.delete,
            self.rename,
            self.replace,
            self.wrap,
            self.repeat,
            self.link,
            self.kind,
            self.grow,
        )
        if not self.lines:
            self.lines.append(self.other_value())
            return
        self.at = self.generator.randrange(len(self.lines))
        self.generator.choice(of_lines * 2 + of_values * 2)()

    def delete_line(self) -> None:
        del self.lines[self.at]

    def repeat_line(self) -> None:
        self.lines.insert(
            self.generator.randrange(len(self.lines) + 1), copy.deepcopy(self.lines[self.at])
        )

    def swap_lines(self) -> None:
        to = self.generator.randrange(len(self.lines))
        self.lines[self.at], self.lines[to] = self.lines[to], self.lines[self.at]

    def insert_line(self) -> None:
        self.lines.insert(self.at, self.other_value())

    def place(self, names: tuple[str, ...] | None = None) -> tuple[Any, Any]:
        """A container of the line and a key of it. An empty one where there is none."""
        candidates = [
            (holder, key)
            for holder, key in places(self.lines[self.at])
            if names is None or key in names
        ]
        return self.generator.choice(candidates) if candidates else ({"": None}, "")

    def delete(self) -> None:
        holder, key = self.place()
        del holder[key]

    def rename(self) -> None:
        holder, key = self.place()
        if isinstance(holder, dict):
            holder[self.generator.choice(NAMES)] = holder.pop(key)

    def replace(self) -> None:
        holder, key = self.place()
        holder[key] = self.other_value()

    def wrap(self) -> None:
        holder, key = self.place()
        holder[key] = [holder[key]]

    def repeat(self) -> None:
        holder, key = self.place()
        if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))

    def link(self) -> None:
        """Give an id or a link the value of another one."""
        holder, key = self.place(LINKS)
        others = [
            other[name] for line in self.lines for other, name in places(line) if name in LINKS
        ]
        holder[key] = self.generator.choice(others or [None])

    def kind(self) -> None:
        holder, key = self.place(KINDS)
        holder[key] = self.generator.choice(WORDS)

    def grow(self) -> None:
        """Add a field that nobody knows, or that says that a call failed."""
        holder, key = self.place()
        more = {self.generator.choice(("foreign", "error", "text", "audio")): self.mark("new")}
        holder[key] = {**holder[key], **more} if isinstance(holder[key], dict) else more

    def other_value(self) -> Any:
        choose = self.generator.choice
        kind = choose(("plain", "deep", "half", "long", "list"))
        if kind == "plain":
            return choose((None, 5, -1.5, True, "", 10**40, float("nan"), 1e999, [], {}))
        if kind == "deep":
            value: Any = self.mark("deep")
            for _ in range(choose((3, 60, 300))):
                value = choose(([value], {"k": value}))
            return value
        texts = {"half": "\ud800", "long": "x" * 20_000}
        if kind in texts:
            return self.mark(texts[kind])
        return [self.mark("one"), {"type": "alien", "body": self.mark("b")}]


def texts_of(lines: list[Any], generator: random.Random) -> str:
    """The lines as a file; now and then one breaks off, or has more than one."""
    texts = [json.dumps(line) for line in lines]
    if texts and generator.random() < 0.15:
        at = generator.randrange(len(texts))
        cut = generator.randrange(len(texts[at]) + 1)
        texts[at] = generator.choice(
            (texts[at][:cut], texts[at] + texts[at], "\ufeff" + texts[at], "null", texts[at] + "}")
        )
    return "\n".join(texts) + "\n"


# ---------------------------------------------------------------------- the check


@dataclass
class Counts:
    logs: int = 0
    refused: int = 0
    lines: int = 0
    used: int = 0
    skipped: int = 0
    messages: int = 0
    carried: int = 0
    left_out: int = 0
    details: int = 0
    traces: int = 0
    rows: int = 0
    marks: int = 0
    slowest: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check(path: Path, source: str, counts: Counts, *, redact: bool) -> list[str]:
    """Import one log; return what does not hold."""
    report, faults = LeftOut(), list[str]()
    try:
        traces = list(read_traces(path, report, source=source))
    except TraceError:
        counts.refused += 1
        return []
    skipped, left = report.lines.left_out.total(), report.messages.left_out.total()
    if (
        report.lines.seen != report.lines.carried + skipped
        or report.messages.seen != report.messages.carried + left
    ):
        faults.append("the account of lines or messages does not add up")
    if UNACCOUNTED in report.lines.left_out or UNACCOUNTED in report.messages.left_out:
        faults.append("a line or message that no reason accounts for")
    if report.traces != len(traces):
        faults.append("the number of traces is wrong")
    held = "".join(json.dumps(trace.to_json(), ensure_ascii=False) for trace in traces)
    seen = set(MARK.findall(held + str([value for value in report.values if value is not None])))
    wanted = {mark for _, value in entries(path) for mark in marks_of(value, source)}
    if vanished := wanted - seen:
        faults.append(f"{len(vanished)} texts vanished: {sorted(vanished)[:3]}")
    for trace in traces:
        if parse_trace(json.loads(dump_line(trace.to_json()))).to_json() != trace.to_json():
            faults.append("a trace does not come back from the disk as it went")
    if redact:
        traces = [redact_trace(trace, secret_finder())[0] for trace in traces]
    counts.rows += _check_rows(traces, faults)
    counts.lines, counts.used, counts.skipped = (
        counts.lines + report.lines.seen,
        counts.used + report.lines.carried,
        counts.skipped + skipped,
    )
    counts.messages, counts.carried = (
        counts.messages + report.messages.seen,
        counts.carried + report.messages.carried,
    )
    counts.left_out, counts.details = (
        counts.left_out + left,
        counts.details + report.details.total(),
    )
    counts.traces, counts.marks = counts.traces + len(traces), counts.marks + len(wanted)
    return faults


def marks_of(value: Any, source: str) -> set[str]:
    """The marks of a line. Ids of recorded turns are this package's own, and are in no trace."""
    if isinstance(value, ValueError):
        return set()
    if source == "recorded" and isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in ("id", "parent", "key")}
    return set(MARK.findall(json.dumps(value, ensure_ascii=False)))


def _check_rows(traces: list[Trace], faults: list[str]) -> int:
    """Build rows; each trace is in one or counted, which `build_dataset` asserts."""
    try:
        rows = build_dataset(
            traces, DatasetOptions("sft", test_fraction=0.0, near_duplicates=1.0)
        ).train
    except TraceError:
        return 0
    for row in rows:
        learned = [m for m in row["messages"] if m["role"] == "assistant" and "weight" not in m]
        if any(not m["content"].strip() and not m.get("tool_calls") for m in learned):
            faults.append("an empty answer is learned")
        if any(m["content"].startswith(FAILED) for m in learned):
            faults.append("a program's error message is learned")
    return len(rows)


def fuzz(source: str, logs: int, seed: int, directory: Path) -> Counts:
    """Check that many mutated logs of a format; faults are counted, the first of each kind keeps
    its log in `directory`."""
    counts, number = Counts(), [0]

    def mark(text: str) -> str:
        number[0] += 1
        return (
            f"{text} ‹{number[0]}›"
            if text != "{}"
            else json.dumps({"m": f"‹{number[0]}›"}, ensure_ascii=False)
        )

    folder = directory / "sessions"
    folder.mkdir(exist_ok=True)
    path = folder / f"{source}.jsonl"
    for index in range(logs):
        generator = random.Random(f"{source} {seed} {index}")
        number[0] = 0
        lines: list[Any] = GOOD[source](mark)
        for _ in range(generator.randint(0 if index == 0 else 1, 4)):
            Mutation(lines, generator, mark).make()
        path.write_text(texts_of(lines, generator), encoding="utf-8")
        began = time.process_time()
        try:
            with bounded(SECONDS):
                faults = check(path, source, counts, redact=index % 50 == 0)
        except Exception as error:  # noqa: BLE001  whatever an importer raises is the finding
            faults = [f"{type(error).__name__}: {error}"[:200]]
        counts.slowest = max(counts.slowest, time.process_time() - began)
        counts.logs += 1
        for fault in faults:
            kind = re.sub(r"\d+ texts vanished.*", "texts vanished", fault)
            if kind not in counts.faults:
                (directory / f"{source}-{index}.jsonl").write_bytes(path.read_bytes())
            counts.faults[kind] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--logs", type=int, default=1000, help="mutated logs of each format (default 1000)"
    )
    parser.add_argument("--formats", nargs="+", choices=sorted(GOOD), default=list(GOOD))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory for logs that show a fault")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for source in args.formats:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            counts = fuzz(source, args.logs, args.seed, directory)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            if grown > MOST_GROWTH_MB:
                counts.faults[f"memory grew by {grown:.0f} MB"] += 1
            sys.stdout.write(
                f"{source}: {counts.logs} logs, {counts.refused} refused as files; lines"
                f" {counts.lines} = {counts.used} used + {counts.skipped} skipped; messages"
                f" {counts.messages} = {counts.carried} carried + {counts.left_out} left out;"
                f" {counts.details} parts or fields left out; {counts.marks} marked texts;"
                f" {counts.traces} traces, {counts.rows} rows; slowest {counts.slowest:.2f} s,"
                f" memory +{grown:.0f} MB; faults: {dict(counts.faults) or 'none'}\n"
            )
            sys.stdout.flush()
            bad += counts.faults.total()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
