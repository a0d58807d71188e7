"""TraceCollector follows the runs of an agent in this process; `hook_into_agent` makes it do so for
any agent.

    collector = TraceCollector()
    with hook_into_agent(agent, collector):
        await agent.a_run("…")

Each run is one file, `rl_traces/YYYY-MM-DD/ID.json`, redacted, complete or absent. Runs at the same
time, in tasks or threads, do not mix: the current run is a context variable.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

from mlx_parallm.errors import TraceError
from mlx_parallm.system.files import regular_files, write_atomically
from mlx_parallm.systems.traces.following import Following, Streamed, ThreadContexts
from mlx_parallm.systems.traces.privacy import RedactionHit, redact_trace, secret_finder
from mlx_parallm.systems.traces.reading import read_traces
from mlx_parallm.systems.traces.schema import Json, dump_line, iso_time, without
from mlx_parallm.systems.traces.trace import (
    TASKS,
    Event,
    ReasoningStep,
    ToolCallTrace,
    Trace,
    manual_label,
    trace_of_events,
)

DIRECTORY = Path("rl_traces")
RUN_METHODS = ("a_run", "arun", "run")
TOOL_METHODS = ("arun_function", "run_function", "call_tool")
OUTSIDE = "an event outside of a run"
AFTER_ITS_END = "an event after the end of its run"
T = TypeVar("T")


@dataclass
class _Running:
    session_id: str
    user_query: str
    began: float
    events: list[Event] = field(default_factory=list)
    tasks: dict[str, list[Any]] = field(default_factory=lambda: {kind: [] for kind in TASKS})
    token: "Token[_Running | None] | None" = None
    is_side: bool = False  # it was begun inside another run
    has_ended: bool = False
    method: tuple[int, str] | None = None  # the agent, by `id`, and its method that it is


class TraceCollector:
    """Writes one trace for each run, without its secrets: `directory` gets `YYYY-MM-DD/ID.json`.

    A run inside another one is a sub-agent's (`extra.sidechain`). `left_out` counts events that are
    in no trace, by reason.
    """

    def __init__(self, directory: Path | str = DIRECTORY) -> None:
        self.directory = Path(directory)
        self.hits: list[RedactionHit] = []
        self.left_out: Counter[str] = Counter()
        self._finder = secret_finder()
        self._current: ContextVar[_Running | None] = ContextVar("run of an agent", default=None)

    @property
    def running(self) -> bool:
        """Whether this task or thread is in a run."""
        return self._current.get() is not None

    def start_trace(self, session_id: str, user_query: str) -> None:
        """Begin a run in this task or thread; one inside another is the inner one until it ends."""
        running = self._begin(session_id, user_query)
        running.token = self._current.set(running)

    def _begin(self, session_id: str, user_query: str) -> _Running:
        outer = self._current.get()
        is_side = outer is not None and not outer.has_ended
        return _Running(session_id, user_query, time.time(), is_side=is_side)

    def record_tool_call(
        self,
        tool_name: str,
        arguments: Json,
        result: Any = "",
        success: bool = True,
        duration_ms: float = 0.0,
        error: str | None = None,
    ) -> None:
        """Add a call to the current run; outside of a run it is not recorded."""
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        about, now = (success, duration_ms, error), iso_time(time.time())
        self._add(ToolCallTrace(tool_name, _as_json(arguments), result, *about, now))

    def record_reasoning_step(
        self,
        step_type: str,
        content: str,
        confidence: float = 0.0,
        insights: Sequence[str] = (),
        issues: Sequence[str] = (),
    ) -> None:
        self._add(ReasoningStep(step_type, content, confidence, list(insights), list(issues)))

    def record_task(self, kind: str, task: Any) -> None:
        """Note a task: `kind` is "created", "completed" or "failed". Raises TraceError: another
        kind."""
        if kind not in TASKS:
            raise TraceError(f"record_task({kind!r}): expected one of {', '.join(TASKS)}")
        if (running := self._open_run()) is not None:
            running.tasks[kind].append(_as_json(task))

    def _add(self, event: Event) -> None:
        if (running := self._open_run()) is not None:
            running.events.append(event)

    def _open_run(self) -> _Running | None:
        """The run that an event belongs to; None, which is counted, if there is none."""
        running = self._current.get()
        if running is None or running.has_ended:
            self.left_out[OUTSIDE if running is None else AFTER_ITS_END] += 1
            return None
        return running

    def finish_trace(self, final_response: str = "", **totals: Any) -> Trace:
        """End the current run and write its trace.

        Args:
            totals: `total_tokens_in`, `total_tokens_out`, `total_cost`, `llm_calls_count`.

        Raises TraceError: there is no run; CheckpointError: it cannot be written.
        """
        running = self._current.get()
        if running is None or running.token is None:
            raise TraceError("finish_trace: no run was started in this task or thread")
        self._current.reset(running.token)
        return self._finish(running, final_response, **totals)

    def _finish(
        self, running: _Running, final_response: str, *, aborted: bool = False, **totals: Any
    ) -> Trace:
        running.has_ended = True
        now = time.time()
        trace = trace_of_events(
            running.session_id,
            running.user_query,
            running.events,
            final_response,
            timestamp=iso_time(running.began),
            source="collector",
            execution_duration_ms=(now - running.began) * 1e3,
            **{f"tasks_{kind}": tasks for kind, tasks in running.tasks.items()},
            **totals,
        )
        trace.note(sidechain=running.is_side or None, aborted=aborted or None)
        trace, hits = redact_trace(trace, self._finder)
        self.hits += hits
        self._write(trace)
        return trace

    def _write(self, trace: Trace) -> None:
        folder = self.directory / trace.timestamp[:10]
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{trace.trace_id}.json", dump_line(trace.to_json()))

    # ------------------------------------------------------------------ reading

    def load_traces(
        self,
        start_date: date | None = None,
        end_date: date | None = None,
        labeled_only: bool = False,
        min_tool_calls: int = 0,
    ) -> list[Trace]:
        """The traces of these days, the oldest first. Raises TraceError: a file cannot be read."""
        traces = list[Trace]()
        for folder in sorted(self.directory.glob("????-??-??")):
            day = datetime.strptime(folder.name, "%Y-%m-%d").replace(tzinfo=UTC).date()
            if not (start_date or day) <= day <= (end_date or day):
                continue
            for path in regular_files(folder, "*.json"):
                traces += read_traces(path, source="atif")
        traces.sort(key=lambda trace: trace.timestamp)
        if labeled_only:
            traces = [trace for trace in traces if trace.label is not None]
        return [trace for trace in traces if len(trace.tool_calls) >= min_tool_calls]

    def get_unlabeled_traces(self, limit: int = 100) -> list[Trace]:
        """The traces that no person has judged, the oldest first, at most `limit`. Raises
        TraceError: a file cannot be read."""
        return [trace for trace in self.load_traces() if trace.label is None][:limit]

    def get_statistics(self) -> dict[str, Any]:
        """Count the traces and their labels by a person: `total`, `labeled`, `unlabeled`,
        `positive_labels`, `negative_labels`; and the means `avg_tool_calls`,
        `avg_reasoning_steps`, `avg_cost`, 0 without traces. Raises TraceError: a file cannot be
        read."""
        traces = self.load_traces()
        labels = [trace.label for trace in traces if trace.label is not None]

        def mean(of: Callable[[Trace], float]) -> float:
            return statistics.fmean(map(of, traces)) if traces else 0.0

        return {
            "total": len(traces),
            "labeled": len(labels),
            "unlabeled": len(traces) - len(labels),
            "positive_labels": sum(labels),
            "negative_labels": len(labels) - sum(labels),
            "avg_tool_calls": mean(lambda trace: len(trace.tool_calls)),
            "avg_reasoning_steps": mean(lambda trace: len(trace.reasoning_steps)),
            "avg_cost": mean(lambda trace: trace.total_cost),
        }

    def label_trace(self, trace_id: str, good: bool, notes: str = "", *, by: str = "user") -> Trace:
        """Add a person's label; earlier ones stay. Raises TraceError: no such trace."""
        for trace in self.load_traces():
            if trace.trace_id == trace_id:
                trace.add_label(manual_label(good, notes, at=time.time(), by=by))
                self._write(trace)
                return trace
        raise TraceError(f"{self.directory} holds no trace {trace_id!r}")


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


_THREADS = ThreadContexts()


class AgentHook(AbstractContextManager["AgentHook"]):
    """The wrapped methods of one agent. `restore` puts the agent's own back; a `with` block does
    it at its end. Meanwhile threads that a run begins belong to it."""

    def __init__(self, agent: Any, collector: TraceCollector) -> None:
        self._agent, self._collector = agent, collector
        self._wrapped: dict[str, Any] = {}

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the agent back its methods. May be called again."""
        for name, method in self._wrapped.items():
            if method is None:
                delattr(self._agent, name)
            else:
                setattr(self._agent, name, method)
        if self._wrapped:
            _THREADS.leave()
        self._wrapped.clear()

    def wrap(self, name: str, following: Following) -> None:
        """Follow a method of the agent."""
        method = _method(self._agent, name)
        assert method is not None
        if not self._wrapped:
            _THREADS.use()
        # None: the class's, which setattr only hides
        self._wrapped[name] = vars(self._agent).get(name)
        setattr(self._agent, name, following.followed(method))


def hook_into_agent(
    agent: Any,
    collector: TraceCollector,
    *,
    run_methods: Sequence[str] = RUN_METHODS,
    tool_methods: Sequence[str] = TOOL_METHODS,
) -> AgentHook:
    """Follow every run of an agent: wrap its methods of these names, plain, async or generators, as
    far as it has them.

    The first argument of a run, or `query`, is the user's question, `session_id` its session; what
    it returns, or the text that it streams, is the answer, and an error ends it as a failed task.
    The first argument of a tool method, or `function_name`, is the tool. A method that calls
    another one of these to do its work is one run, or one call, with it.

    Raises TraceError: the agent has no run method.
    """
    hook = AgentHook(agent, collector)
    runs = [name for name in dict.fromkeys(run_methods) if _method(agent, name) is not None]
    if not runs:
        raise TraceError(
            f"{type(agent).__name__} has none of the methods {', '.join(run_methods)}: name its own"
        )
    for name in runs:
        hook.wrap(name, _of_run(agent, name, collector))
    in_call: ContextVar[tuple[str, Json] | None] = ContextVar("call of a tool", default=None)
    for name in dict.fromkeys(tool_methods):
        if _method(agent, name) is not None:
            hook.wrap(name, _of_call(collector, in_call))
    return hook


def _of_run(agent: Any, method: str, collector: TraceCollector) -> Following:
    def begin(*args: Any, **kwargs: Any) -> _Running | None:
        outer = collector._current.get()
        if outer is not None and not outer.has_ended and outer.method is not None:
            agent_id, outer_method = outer.method
            if agent_id == id(agent) and outer_method != method:
                return None  # `run` that calls `a_run` is one run
        query = kwargs.get("query", args[0] if args else "")
        running = collector._begin(str(kwargs.get("session_id") or "default"), str(query))
        running.method = id(agent), method
        return running

    def inside(running: _Running | None) -> AbstractContextManager[None]:
        return nullcontext() if running is None else _set(collector._current, running)

    def end(running: _Running | None, result: Any, error: BaseException | None) -> None:
        if running is None:
            return
        if isinstance(error, GeneratorExit):
            running.tasks["failed"].append("the answer was not read to its end")
        elif error is not None:
            running.tasks["failed"].append(f"{type(error).__name__}: {error}")
        is_cut = error is not None and isinstance(result, Streamed)
        collector._finish(running, "" if result is None else str(result), aborted=is_cut)

    return Following(begin, inside, end)


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a variable of the context a value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass
class _Call:
    name: str
    arguments: Json
    began: float
    is_inner: bool  # the agent's other method does its work


def _of_call(collector: TraceCollector, in_call: ContextVar[tuple[str, Json] | None]) -> Following:
    def begin(*args: Any, **kwargs: Any) -> _Call:
        name, arguments = _tool_and_arguments(args, kwargs)
        return _Call(name, arguments, time.perf_counter(), in_call.get() == (name, arguments))

    def inside(call: _Call) -> AbstractContextManager[None]:
        return _set(in_call, (call.name, call.arguments))

    def end(call: _Call, result: Any, error: BaseException | None) -> None:
        if call.is_inner:
            return
        problem = None if error is None else f"{type(error).__name__}: {error}"
        spent = (time.perf_counter() - call.began) * 1e3
        text = str(result) if isinstance(result, Streamed) else result
        collector.record_tool_call(
            call.name, call.arguments, problem or text, error is None, spent, problem
        )

    return Following(begin, inside, end)


def _tool_and_arguments(args: Sequence[Any], kwargs: Json) -> tuple[str, Json]:
    """Read a call of a tool method: (name, {…}), (name, **arguments), or positional arguments as
    arg0, arg1, …"""
    named = "function_name" in kwargs
    name = kwargs["function_name"] if named else (args[0] if args else "")
    rest = args if named else args[1:]
    arguments = without(kwargs, "function_name")
    if len(rest) == 1 and isinstance(rest[0], dict) and not arguments:
        return str(name), dict(rest[0])
    return str(name), arguments | {f"arg{number}": value for number, value in enumerate(rest)}


def _method(agent: Any, name: str) -> Callable[..., Any] | None:
    method = getattr(agent, name, None)
    return method if callable(method) else None
