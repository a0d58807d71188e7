"""Trace: one run of an agent, one JSON object a line. ATIF 1.8 (schema.py), and what RL needs in
`extra`, which may hold

    source, source_id     where it came from: "recorder", "claude-code", …, and its id there
    task, group_id        the task; traces of one group answer the same task
    rewards               name → {"score": float, "weight": float}
    labels                a list of Label as JSON, oldest first; a later one never replaces an
                          earlier one
    policy_version        the newest version that sampled a token
    aborted               true: the last call did not end
    sidechain             true: the run of a sub-agent
    untrainable           why no row is made of it: its history is not whole, or the call failed
    redacted              kind → number of placeholders
    execution             totals and tasks of a run that a `TraceCollector` followed
    license

A recorded session, an imported log and a followed run have the same attributes: the question, the
calls with their results, the thoughts, the answer, totals, the newest label.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from mlx_parallm.errors import TraceError
from mlx_parallm.system.pydantic_faults import faults
from mlx_parallm.systems.traces.schema import (
    SCHEMA_VERSION,
    Json,
    Label,
    ObservationResult,
    TraceAgent,
    TraceRecord,
    TraceStep,
    chat_call,
    messages_of,
    present,
    steps_of,
    text_of,
    unix_time,
    without,
)

TASKS = ("created", "completed", "failed")
MANUAL = "manual"  # the label of a person who looked at the trace


@dataclass
class ToolCallTrace:
    """One call of a tool. `duration_ms`: milliseconds."""

    tool_name: str
    arguments: Json = field(default_factory=dict)
    result: str = ""
    success: bool = True
    duration_ms: float = 0.0
    error: str | None = None
    timestamp: str = ""


@dataclass
class ReasoningStep:
    """One thought. `confidence`: 0 to 1."""

    step_type: str
    content: str = ""
    confidence: float = 0.0
    insights: list[str] = field(default_factory=list)
    issues: list[str] = field(default_factory=list)


Event = ToolCallTrace | ReasoningStep


def _tasks_property(kind: str) -> Any:
    return property(lambda trace: list(trace._total(f"tasks_{kind}", [])))


class Trace(TraceRecord):
    schema_version: str = Field(pattern=r"^ATIF-v\d+\.\d+$")
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: TraceAgent
    steps: list[TraceStep]
    notes: str | None = None
    final_metrics: Json | None = None
    continued_trajectory_ref: str | None = None
    subagent_trajectories: list["Trace"] | None = None
    extra: Json | None = None

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        for number, step in enumerate(self.steps, 1):
            if step.step_id != number:
                raise ValueError(f"step {number} has step_id {step.step_id}: ids count from 1")
        extra = self.extra or {}
        for name in ("columns", "execution", "redacted", "rewards"):
            if not isinstance(extra.get(name, {}), dict):
                raise ValueError(f"extra.{name} is not an object")
        for name, reward in extra.get("rewards", {}).items():
            if not (isinstance(reward, dict) and isinstance(reward.get("score"), int | float)):
                raise ValueError(f"extra.rewards.{name} has no number 'score'")
            if not isinstance(reward.get("weight", 1.0), int | float):
                raise ValueError(f"extra.rewards.{name}: 'weight' is not a number")
        labels = extra.get("labels", [])
        if not isinstance(labels, list):
            raise ValueError("extra.labels is not a list")
        for label in labels:
            Label.model_validate(label)
        return self

    def note(self, **values: Any) -> None:
        """Set keys of `extra`; None removes one."""
        self.extra = present({**(self.extra or {}), **values})

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key of `extra`."""
        return (self.extra or {}).get(key, default)

    @property
    def id(self) -> str:
        return self.trajectory_id or self.session_id or ""

    @property
    def labels(self) -> list[Label]:
        return [Label.model_validate(entry) for entry in self.get("labels", [])]

    def add_label(self, label: Label) -> None:
        self.note(labels=[*self.get("labels", []), label.to_json()])

    @property
    def tools(self) -> list[Json]:
        return self.agent.tool_definitions or []

    @property
    def messages(self) -> list[Json]:
        return messages_of(self.steps)

    # ------------------------------------------------------------------ the run

    @property
    def trace_id(self) -> str:
        return self.id

    @property
    def timestamp(self) -> str:
        return next((step.timestamp for step in self.steps if step.timestamp), "")

    @property
    def user_query(self) -> str:
        return next((step.text for step in self.steps if step.source == "user"), "")

    @property
    def final_response(self) -> str:
        answers = (step for step in reversed(self.steps) if step.source == "agent")
        return next((step.text for step in answers if not step.tool_calls), "")

    @property
    def tool_calls(self) -> list[ToolCallTrace]:
        """Every call with its result. Without a note of the collector, a result that begins with
        "error" has failed."""
        calls = []
        for step in self.steps:
            results = {result.source_call_id: result for result in step.results}
            for call in step.tool_calls or ():
                result = results.get(call.tool_call_id, ObservationResult())
                text = text_of(result.content)
                openai = (result.extra or {}).get("openai") or {}
                failed = bool(openai.get("is_error")) or text.lstrip().lower().startswith("error")
                values: Json = {"success": not failed, "timestamp": step.timestamp or ""}
                values |= {"error": text} if failed else {}
                values |= (call.extra or {}).get("execution", {})
                arguments = dict(call.arguments)
                calls.append(ToolCallTrace(call.function_name, arguments, text, **values))
        return calls

    @property
    def reasoning_steps(self) -> list[ReasoningStep]:
        return [
            ReasoningStep(
                **{"step_type": "reasoning", **(step.extra or {}).get("reasoning", {})},
                content=thought,
            )
            for step in self.steps
            if step.source == "agent" and (thought := step.reasoning_content)
        ]

    def _total(self, name: str, default: Any) -> Any:
        return self.get("execution", {}).get(name, default)

    tasks_created, tasks_completed, tasks_failed = map(_tasks_property, TASKS)

    @property
    def total_tokens_in(self) -> int:
        return int(self._total("total_tokens_in", self._metric("prompt_tokens")))

    @property
    def total_tokens_out(self) -> int:
        return int(self._total("total_tokens_out", self._metric("completion_tokens")))

    def _metric(self, name: str) -> int:
        metrics = (step.metrics for step in self.steps if step.metrics is not None)
        return sum(int(metric.to_json().get(name) or 0) for metric in metrics)

    @property
    def total_cost(self) -> float:
        return float(self._total("total_cost", 0.0))

    @property
    def execution_duration_ms(self) -> float:
        """The time that the collector measured; without it, from the first to the last time of a
        step."""
        times = [time for step in self.steps if (time := unix_time(step.timestamp)) is not None]
        return float(
            self._total("execution_duration_ms", (max(times) - min(times)) * 1e3 if times else 0.0)
        )

    @property
    def llm_calls_count(self) -> int:
        return int(self._total("llm_calls_count", sum(step.sampled for step in self.steps)))

    @property
    def label(self) -> bool | None:
        """The newest label by a person, or None."""
        values = (label.value for label in self._by_person)
        newest = next((value for value in values if value is not None), None)
        return None if newest is None else newest > 0.5

    @property
    def _by_person(self) -> list[Label]:
        """The newest first."""
        return [label for label in reversed(self.labels) if label.name == MANUAL]

    @property
    def manual_review(self) -> bool:
        return self.label is not None

    @property
    def review_notes(self) -> str:
        return next((each.explanation for each in self._by_person if each.explanation), "")

    @property
    def reward_score(self) -> float | None:
        reward = self.get("rewards", {}).get("reward")
        return None if reward is None else float(reward["score"])

    def to_dict(self) -> Json:
        """Return the flat form, as JSON: what a person's notebook reads."""
        flat = {name: getattr(self, name) for name in _FLAT} | {"session_id": self.session_id or ""}
        return flat | {name: list(map(asdict, flat[name])) for name in _EVENTS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Trace":
        """Read what `to_dict` wrote. Thoughts come before calls: the flat form does not know their
        order.

        Raises TraceError: a key is missing or wrong.
        """
        try:
            thoughts, calls = (
                [_record(_EVENTS[name], entry) for entry in data.get(name, ())]
                for name in ("reasoning_steps", "tool_calls")
            )
            trace = trace_of_events(
                str(data["session_id"]),
                str(data["user_query"]),
                [*thoughts, *calls],
                str(data.get("final_response", "")),
                timestamp=str(data.get("timestamp", "")),
                source="execution",
                **{name: data[name] for name in [*_TASKS, *_NUMBERS] if data.get(name)},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"not an execution trace: {type(error).__name__}: {error}") from error
        trace.trajectory_id = str(data.get("trace_id") or trace.id)
        if data.get("reward_score") is not None:
            trace.note(rewards=one_reward(data["reward_score"]))
        if data.get("label") is not None:
            notes = str(data.get("review_notes") or "")
            trace.add_label(manual_label(bool(data["label"]), notes, at=0.0))
        return trace


class ExecutionTrace(Trace):
    """A copy of a trace, under the name that the plan of a pipeline has for it."""

    def __init__(self, trace: Trace, /) -> None:
        super().__init__(**trace.to_json())


_TASKS = [f"tasks_{kind}" for kind in TASKS]
_NUMBERS = ["total_tokens_in", "total_tokens_out", "total_cost", "execution_duration_ms"]
_NUMBERS.append("llm_calls_count")
_JUDGED = ["label", "manual_review", "review_notes", "reward_score"]
_EVENTS = {"tool_calls": ToolCallTrace, "reasoning_steps": ReasoningStep}
_FLAT = ["trace_id", "session_id", "timestamp", "user_query", *_EVENTS, *_TASKS]
_FLAT += ["final_response", *_NUMBERS, *_JUDGED]


def parse_trace(data: Any) -> Trace:
    """Raises TraceError: which field is wrong."""
    try:
        return Trace.model_validate(data)
    except ValidationError as error:
        raise TraceError(f"not an ATIF trajectory: {faults(error, 1)}") from error


def new_trace(
    messages: Iterable[Mapping[str, Any]],
    *,
    session_id: str,
    source: str,
    name: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    model: str | None = None,
    agent: str = "agent",
    version: str = "unknown",
    **extra: Any,
) -> Trace:
    """Make a trace of chat messages. `name`: its id, by default the session's; `extra`: further
    keys of the trace's `extra`. Raises TraceError."""
    about: Json = {"name": agent, "version": version, "model_name": model or None}
    about["tool_definitions"] = list(map(dict, tools or ())) or None
    return parse_trace(
        {
            "schema_version": SCHEMA_VERSION,
            "session_id": session_id,
            "trajectory_id": name or session_id,
            "agent": present(about),
            "steps": steps_of(messages),
            "extra": {"source": source, **present(extra)},
        }
    )


def numbered(name: str, number: int) -> str:
    """Return the id of a session's trace: the first one has the session's name."""
    return name if number == 1 else f"{name}#{number}"


def one_reward(score: Any) -> Json | None:
    """Return the `rewards` of a trace that has one score; None: it has none."""
    return None if score is None else {"reward": {"score": float(score), "weight": 1.0}}


def trace_of_events(
    session_id: str,
    user_query: str,
    events: Iterable[Event],
    final_response: str,
    *,
    timestamp: str,
    source: str,
    **execution: Any,
) -> Trace:
    """Make the trace of a run from what happened in it, in order. `execution`: totals and
    tasks."""
    messages: list[Json] = [
        {"role": "user", "content": user_query, "step": {"timestamp": timestamp}}
    ]
    events = list(events)
    for number, event in enumerate(events):
        messages += _messages_of(event, number)
    messages.append({"role": "assistant", "content": final_response})
    name = trace_id(session_id, user_query, timestamp)
    kept = {key: value for key, value in execution.items() if value}
    trace = new_trace(
        messages, session_id=session_id, source=source, name=name, execution=kept or None
    )
    calls = [call for step in trace.steps for call in step.tool_calls or ()]
    followed = (asdict(event) for event in events if isinstance(event, ToolCallTrace))
    for call, event_fields in zip(calls, followed, strict=True):
        call.extra = {"execution": {key: event_fields[key] for key in _NOTED}}
    return trace


_NOTED = ("success", "duration_ms", "error", "timestamp")


def trace_id(session_id: str, query: str, timestamp: str) -> str:
    """12 hexadecimal digits, the same for the same run."""
    return hashlib.md5(
        f"{session_id}:{query}:{timestamp}".encode(errors="surrogatepass"), usedforsecurity=False
    ).hexdigest()[:12]


def manual_label(good: bool, notes: str, *, at: float, by: str = "user") -> Label:
    values: Json = {"name": MANUAL, "value": float(good), "label": "good" if good else "bad"}
    values |= {"explanation": notes or None, "by": by, "at": at}
    return Label.model_validate(present(values))


def _record(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    names = {each.name for each in fields(kind)}
    return kind(**{key: value for key, value in entry.items() if key in names})


def _messages_of(event: Event, number: int) -> Sequence[Json]:
    answer: Json = {"role": "assistant", "content": ""}
    if isinstance(event, ReasoningStep):
        thought = {"reasoning_content": event.content or event.step_type}
        noted = {"reasoning": without(asdict(event), "content")}
        return [answer | thought | {"step": {"extra": noted}}]
    name = f"call_{number}"
    call = chat_call(name, event.tool_name, event.arguments)
    step = {"timestamp": event.timestamp} if unix_time(event.timestamp) is not None else {}
    return [
        answer | {"tool_calls": [call], "step": step},
        {"role": "tool", "tool_call_id": name, "content": event.result},
    ]
