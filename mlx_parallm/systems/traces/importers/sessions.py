"""Traces of a session's turns, with the report's account of the lines that the turns came from."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mlx_parallm.systems.traces.importers.report import ImportReport, made
from mlx_parallm.systems.traces.schema import mapping
from mlx_parallm.systems.traces.session import Session
from mlx_parallm.systems.traces.trace import Trace


def session_traces(
    session: Session, places: Mapping[str, str], report: ImportReport
) -> Iterator[Trace]:
    """Yield a trace for each leaf; carry the lines of its turns, or skip them where it cannot be
    one.

    Args:
        places: each turn's id → the line that it came from.
    """
    claimed: set[str] = set()
    for number, leaf in enumerate(session.ordered_leaves(), 1):
        path = session.path(leaf.id)
        new_places = dict.fromkeys(places[turn.id] for turn in path if turn.id not in claimed)
        for trace in made(report, new_places, partial(_traces, session, path, claimed, number)):
            claimed |= {turn.id for turn in path}
            yield trace


def _traces(session: Session, *about: Any) -> list[Trace]:
    return [session.trace(*about)]


def owned_answers(trace: Trace, sampled: set[str]) -> set[str]:
    """Return the answers that other traces only repeat; none of a sub-agent's: what it repeats is
    its parent's, whichever file is read first."""
    return set() if trace.get("sidechain") or trace.get("untrainable") else sampled


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
