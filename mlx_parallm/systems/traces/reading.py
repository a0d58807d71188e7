"""Read traces from whatever holds them, and write them: one JSON object a line.

mlx_parallm traces import FILE --to traces.jsonl      read_traces → redact_trace → write_traces
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.systems.traces.importers.chats import (
    art,
    atif,
    is_conversation,
    openai_chat,
    verifiers,
)
from mlx_parallm.systems.traces.importers.claude_code import claude_code
from mlx_parallm.systems.traces.importers.codex import codex
from mlx_parallm.systems.traces.importers.otel import holds_spans, otlp
from mlx_parallm.systems.traces.importers.report import Importer, ImportReport, whole_json
from mlx_parallm.systems.traces.importers.responses import is_response_call, responses
from mlx_parallm.systems.traces.importers.runs import (
    collected,
    is_collection,
    is_recording,
    recorded,
    rollouts,
)
from mlx_parallm.systems.traces.privacy import RedactionHit, redact_trace, review_lines
from mlx_parallm.systems.traces.schema import dump_line, mapping, read_jsonl
from mlx_parallm.systems.traces.trace import Trace

IMPORTERS: dict[str, Importer] = {
    "atif": atif,
    "openai": openai_chat,
    "responses": responses,
    "recorded": recorded,
    "collected": collected,
    "rollouts": rollouts,
    "claude-code": claude_code,
    "codex": codex,
    "otlp": otlp,
    "verifiers": verifiers,
    "art": art,
}
"""Format → importer; to add one is a line here, and what tells its files from others in
`detect`."""
STORE = "rollouts.sqlite"
LOOKED_AT = 50  # lines of a file


def detect(path: Path) -> str:
    """Return the format of a file or directory. Raises TraceError: it is none of those that are
    known."""
    if not path.exists():
        raise TraceError(f"{path} does not exist")
    if is_recording(path):
        return "recorded"
    if path.name == STORE or (path / STORE).is_file():
        return "rollouts"
    if is_collection(path):
        return "collected"
    if path.is_dir():
        raise TraceError(
            f"{path} is neither a recorder's directory nor a run's: name the files in it"
        )
    return _format_of_file(path)


def _format_of_file(path: Path) -> str:
    if holds_spans(path):
        return "otlp"
    for number, value in read_jsonl(path):
        if number > LOOKED_AT:
            break
        if not isinstance(value, dict):
            whole = whole_json(path) if number == 1 else None
            value = whole[0] if isinstance(whole, list) and whole else whole
        if isinstance(value, dict) and (name := _format_of(value)) is not None:
            return name
    raise TraceError(
        f"{path}: none of its first lines is of a known format; name it with --from:"
        f" {', '.join(IMPORTERS)}"
    )


_FORMATS = (
    ("atif", {"schema_version", "steps"}),
    ("art", {"messages_and_choices"}),
    ("art", {"trajectories"}),
    ("verifiers", {"nodes"}),
    ("verifiers", {"prompt", "completion", "reward"}),
    ("codex", {"timestamp", "type", "payload"}),
    ("claude-code", {"sessionId"}),
    ("claude-code", {"parentUuid", "uuid"}),
)
"""Formats by the keys of a line; the first counts."""


def _format_of(line: dict[str, object]) -> str | None:
    if isinstance(line.get("traces"), list):
        return "verifiers"
    if (name := next((name for name, keys in _FORMATS if keys <= line.keys()), None)) is not None:
        return name
    if is_conversation(line):
        return "openai"
    return "responses" if is_response_call(line) else None


def read_traces(
    path: Path, report: ImportReport | None = None, *, source: str = "auto"
) -> Iterator[Trace]:
    """Yield the traces of a file or directory. `source`: a key of `IMPORTERS`, or "auto". Raises
    TraceError."""
    name = detect(path) if source == "auto" else source
    if name not in IMPORTERS:
        raise TraceError(f"there is no format {name!r}: {', '.join(IMPORTERS)}")
    return _settled(IMPORTERS[name], path, report if report is not None else ImportReport())


def _settled(importer: Importer, path: Path, report: ImportReport) -> Iterator[Trace]:
    for trace in importer(path, report):
        if not trace.get("sidechain") and says_subagent(trace.extra or {}):
            trace.note(sidechain=True)
        yield trace
    report.settle()


_SIDE_FLAGS = ("isSidechain", "is_sidechain", "sidechain", "isSubagent", "is_subagent", "subagent")
_HOLDERS = ("columns", "metadata", "info", "source")


def says_subagent(about: Mapping[str, Any]) -> bool:
    """Whether columns or metadata of a log say that a session is a sub-agent's: a flag, or a
    `source` or `thread_source` that is one."""
    return (
        any(about.get(name) is True for name in _SIDE_FLAGS)
        or about.get("thread_source") == "subagent"
        or "subagent" in mapping(about.get("source"))
        or any(says_subagent(mapping(about.get(name))) for name in _HOLDERS if name in about)
    )


def redacted(
    traces: Iterable[Trace], finder: Redactor | None, hits: list[RedactionHit]
) -> Iterator[Trace]:
    """Yield the traces redacted; `hits` grows by what was hidden."""
    for trace in traces:
        cleaned, trace_hits = redact_trace(trace, finder)
        hits += trace_hits
        yield cleaned


def write_lines(traces: Iterable[Trace], path: Path) -> None:
    """Write the traces, complete or not at all. Raises CheckpointError."""
    write_atomically(path, b"".join(dump_line(trace.to_json()) for trace in traces))


def write_traces(
    traces: Iterable[Trace], path: Path, hits: Iterable[RedactionHit] = ()
) -> Path | None:
    """Write the traces, and the review of hits beside them; return the review's path. Raises
    CheckpointError."""
    write_lines(traces, path)
    review = path.with_suffix(".review.jsonl")
    lines = b"".join(map(dump_line, review_lines(hits)))
    if lines:
        write_atomically(review, lines)
        return review
    review.unlink(missing_ok=True)
    return None
