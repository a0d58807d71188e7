"""CheckpointLoader: the runs in the checkpoints of an agent framework (`session_data`,
`task_state`), each once.

A checkpoint is JSON, or a pickle that is read by an unpickler which builds plain values only: it
imports nothing and calls nothing, and an object of any class becomes its attributes. Checkpoints of
one agent overlap; a run's id is made of its session, its question and its time, or its place in the
session where it has no time.
"""

import io
import json
import pickle
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.system.files import read_bounded, regular_files
from mlx_parallm.systems.traces.importers.dialects import chat_messages
from mlx_parallm.systems.traces.schema import (
    SHAPES,
    Json,
    add_step,
    chat_call,
    iso_time,
    mapping,
    parse_json,
    unix_time,
    without,
)
from mlx_parallm.systems.traces.trace import Trace, new_trace, trace_id

CHECKPOINTS = Path("Agents") / "checkpoint"
WITHIN_A_RUN = ("assistant", "tool", "system", "developer")
_KINDS: list[Any] = [set, frozenset, bytearray, complex, datetime, date, timedelta, timezone]
_KINDS += [OrderedDict, defaultdict, deque, Counter]
_PLAIN = {(kind.__module__, kind.__name__): kind for kind in _KINDS}
"""What a pickle may build. None of them runs code of the file's choice."""


class _Inert:
    """Stands for an object of a class that is not loaded: keeps its attributes and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["args"] = args

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update({str(key): value for key, value in part.items()})

    def append(self, item: Any) -> None:
        self.__dict__.setdefault("items", []).append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.__dict__.setdefault("items", []).extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__[str(key)] = value


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _PLAIN.get((module, name), _Inert)

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_checkpoint(path: Path) -> Any:
    """Return a checkpoint's plain values. Raises TraceError: it cannot be read."""
    try:
        data = read_bounded(path, LARGEST)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        if path.suffix == ".json":
            return parse_json(data)
        return _Plain().of(_PlainUnpickler(io.BytesIO(data)).load())
    except (pickle.UnpicklingError, EOFError, RecursionError, MemoryError, *SHAPES) as error:
        raise TraceError(f"{path} is not a checkpoint: {type(error).__name__}: {error}") from error


LARGEST = 1 << 30  # bytes of a checkpoint
MOST_VALUES = 5_000_000
"""Values of one checkpoint: a small pickle may name the same list so often that it would fill
the memory."""


class _Plain:
    """Turns what a pickle built into JSON's values. Objects that hold themselves raise
    RecursionError."""

    def __init__(self) -> None:
        self._values = 0

    def of(self, value: Any) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES} values")
        if isinstance(value, _Inert):
            return {k: self.of(item) for k, item in vars(value).items() if k != "args" or item}
        if isinstance(value, Mapping):
            return {str(key): self.of(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset | deque):
            return [self.of(item) for item in value]
        return value.isoformat() if isinstance(value, date) else value


class CheckpointLoader:
    """Reads the checkpoints of agents: `directory/AGENT/*.pkl` or `*.json`.

    Args:
        directory: of all agents.
        max_age_hours: older checkpoints are left out; None = all.
    """

    def __init__(
        self, directory: Path | str = CHECKPOINTS, *, max_age_hours: float | None = None
    ) -> None:
        self.directory = Path(directory)
        self.max_age_hours = max_age_hours
        self.skipped: dict[str, str] = {}  # checkpoint → why it was left out
        self.left_out: Counter[str] = Counter()  # messages and tasks that no run holds, by reason

    def _files(self, agent: str) -> Iterator[Path]:
        """The newest first: it knows the most of a run."""
        folder = self.directory / agent
        files = regular_files(folder, "*.pkl", "*.json")
        oldest = 0.0 if self.max_age_hours is None else time.time() - 3600 * self.max_age_hours
        newest_first = sorted(
            files, key=lambda path: (path.stat().st_mtime, path.name), reverse=True
        )
        return (path for path in newest_first if path.stat().st_mtime >= oldest)

    def load_traces(self, agent: str) -> list[Trace]:
        """Each run of an agent once, the oldest first.

        A checkpoint that cannot be read is in `skipped`. What the others hold beside their runs is
        counted in `left_out`, once for each checkpoint that holds it.
        """
        self.skipped.clear()
        self.left_out.clear()
        runs: dict[str, Trace] = {}
        for path in self._files(agent):
            try:
                checkpoint = read_checkpoint(path)
                if not isinstance(checkpoint, dict):
                    raise TraceError(f"{path} is not a checkpoint: it holds no attributes")
                left_out = Counter[str]()
                traces = list(_runs(checkpoint, left_out))
                self.left_out += left_out
            except SHAPES as error:
                self.skipped[str(path)] = str(error)
                continue
            for trace in traces:
                runs.setdefault(trace.trace_id, trace)
        return sorted(runs.values(), key=lambda trace: trace.timestamp)


def _runs(checkpoint: Mapping[str, Any], left_out: Counter[str]) -> Iterator[Trace]:
    """A run is a question of the user and what followed up to the next one. `left_out`: counts
    what is in none."""
    sessions = checkpoint.get("session_data") or {}
    scopes = checkpoint.get("variable_scopes") or {}
    turns: dict[str, list[list[Json]]] = {}
    for session_id, session in sessions.items():
        history = session
        if isinstance(session, dict):
            history = session.get("history") or session.get("messages") or []
        if not isinstance(history, list):
            left_out["a history that is not a list"] += 1
            history = []
        turns[str(session_id)] = _turns(history, left_out)
    places = {(name, at): turn for name, listed in turns.items() for at, turn in enumerate(listed)}
    thoughts, last = _thoughts(scopes), list(places)[-1:]
    if scopes and len(turns) != 1:
        left_out["thoughts of a checkpoint that has several sessions, or none"] += len(thoughts)
        thoughts = []
    times = [(_seconds(turn[0].get("timestamp")), place) for place, turn in places.items()]
    tasks = _tasks_by_run(checkpoint.get("task_state") or {}, times, left_out)
    for place, turn in places.items():
        of_run = thoughts if place in last else []
        yield _run(place[0], turn, f"turn-{place[1]}", of_run, tasks.get(place, {}))


def _turns(history: Iterable[Any], left_out: Counter[str]) -> list[list[Json]]:
    turns: list[list[Json]] = []
    for message in history:
        if not isinstance(message, dict):
            left_out["a message that is not an object"] += 1
        elif message.get("role") == "user":
            turns.append([message])
        elif not turns:
            left_out[f"a message of role {message.get('role')!r} before the first question"] += 1
        elif message.get("role") not in WITHIN_A_RUN:
            left_out[f"a message of role {message.get('role')!r} within a run"] += 1
        else:
            turns[-1].append(message)
    return turns


def _run(
    session_id: str,
    turn: Sequence[Json],
    place: str,
    thoughts: Sequence[Json],
    tasks: Mapping[str, list[Any]],
) -> Trace:
    question, *rest = map(_with_time, turn)
    messages = chat_messages([question, *thoughts, *_with_calls(rest)])
    trace = new_trace(
        messages, session_id=session_id, source="checkpoint", execution=dict(tasks) or None
    )
    timestamp = _time(turn[0].get("timestamp")) or place
    trace.trajectory_id = trace_id(session_id, trace.user_query, timestamp)
    return trace


def _with_time(message: Json) -> Json:
    time_text = _time(message.get("timestamp"))
    if time_text is None or message.get("role") == "tool":  # a result is part of its call's step
        return message
    return add_step(without(message, "timestamp"), timestamp=time_text)


def _with_calls(messages: Iterable[Json]) -> Iterator[Json]:
    """Yield the messages; before a result that names no call, the call of its tool."""
    called = set[str]()
    for number, message in enumerate(messages):
        called |= {str(call.get("id")) for call in message.get("tool_calls") or ()}
        if message.get("role") == "tool" and str(message.get("tool_call_id")) not in called:
            name = str(message.get("tool_call_id") or f"call_{number}")
            call = chat_call(name, str(message.get("name") or "tool"), {})
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
            message = {**message, "tool_call_id": name}
        yield message


def _time(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return iso_time(float(value))
    return str(value) if value is not None and unix_time(value) is not None else None


def _seconds(value: Any) -> float | None:
    return unix_time(_time(value))


Run = tuple[str, int]
TIMELESS = "a task without a time, in a checkpoint of several runs"


def _tasks_by_run(
    tasks: Mapping[str, Any],
    times: Sequence[tuple[float | None, Run]],
    left_out: Counter[str],
) -> dict[Run, dict[str, list[Any]]]:
    """Give each task to the run with the newest question before it; to the only run, where there
    is one. A task that belongs to none is counted."""
    dated = sorted((at, run) for at, run in times if at is not None)
    fields_by_run: dict[Run, dict[str, list[Any]]] = defaultdict(dict)
    for name, task in tasks.items():
        if not isinstance(task, dict):
            continue
        created = _seconds(task.get("created_at"))
        before = [run for at, run in dated if created is not None and at <= created]
        if not before and len(times) == 1 and (created is None or not dated):
            before = [times[0][1]]
        if not before:
            left_out[TIMELESS if created is None else "a task before the first question"] += 1
            continue
        status, text = str(task.get("status")), str(task.get("description") or name)
        for kind in ("created", *{status} & {"completed", "failed"}):
            fields_by_run[before[-1]].setdefault(f"tasks_{kind}", []).append(text)
    return fields_by_run


def _thoughts(scopes: Mapping[str, Any]) -> list[Json]:
    """Return the values of the agent's scopes as answers that hold a thought each."""
    thoughts = []
    for kind in ("reasoning", "delegation"):
        scope = scopes.get(kind)
        for name, text in mapping(scope).items():
            if not isinstance(text, str):
                text = json.dumps(text, ensure_ascii=False, default=str)
            thought = {"role": "assistant", "content": "", "reasoning_content": f"{name}: {text}"}
            thoughts.append(add_step(thought, extra={"reasoning": {"step_type": kind}}))
    return thoughts
