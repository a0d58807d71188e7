"""Runs of an agent in this process, and of its checkpoints, as ExecutionTrace: each once,
unmixed, restored."""

import asyncio
import inspect
import json
import os
import pickle
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import atif
import pytest

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces import (
    CheckpointLoader,
    ExecutionTrace,
    ReasoningStep,
    ToolCallTrace,
    TraceCollector,
    hook_into_agent,
    read_traces,
)
from tests.traces.messages import assistant, user


class Agent:
    """Answers with the sum of its tools' answers; knows nothing of traces."""

    def __init__(self) -> None:
        self.collector: TraceCollector | None = None

    async def a_run(self, query: str, session_id: str = "default") -> str:
        first = await self.arun_function("double", x=int(query))
        await asyncio.sleep(0)
        second = self.run_function("add", {"a": first, "b": 1})
        if self.collector is not None:
            self.collector.record_reasoning_step(
                "plan", f"think of {query}", confidence=0.5, insights=["even"]
            )
        return f"answer {second}"

    async def arun_function(self, function_name: str, **arguments: Any) -> int:
        await asyncio.sleep(0)
        return arguments["x"] * 2

    def run_function(self, name: str, arguments: dict[str, int]) -> int:
        if arguments["a"] > 100:
            raise ValueError("too large")
        return arguments["a"] + arguments["b"]


async def test_a_hooked_agent_is_followed_and_restored(tmp_path: Path) -> None:
    agent, collector = Agent(), TraceCollector(tmp_path)
    agent.collector = collector
    with hook_into_agent(agent, collector):
        answers = await asyncio.gather(
            *(agent.a_run(str(n), session_id=f"s{n}") for n in range(20))
        )
        with pytest.raises(ValueError, match="too large"):
            await agent.a_run("99", session_id="failed")
    assert answers == [f"answer {2 * n + 1}" for n in range(20)]
    await agent.a_run("5")  # not followed any more
    assert not {"a_run", "arun_function", "run_function"} & set(vars(agent))
    views = {view.session_id: view for view in collector.load_traces()}
    assert len(views) == 21
    for n in range(20):  # at the same time, and not mixed
        view = views[f"s{n}"]
        assert (view.user_query, view.final_response) == (str(n), f"answer {2 * n + 1}")
        calls = [
            (call.tool_name, call.arguments, call.result, call.success) for call in view.tool_calls
        ]
        assert calls == [
            ("double", {"x": n}, str(2 * n), True),
            ("add", {"a": 2 * n, "b": 1}, str(2 * n + 1), True),
        ]
        assert view.reasoning_steps == [ReasoningStep("plan", f"think of {n}", 0.5, ["even"], [])]
    failed = views["failed"]
    assert [call.success for call in failed.tool_calls] == [True, False]
    assert failed.tool_calls[1].error == "ValueError: too large" and failed.tasks_failed == [
        "ValueError: too large"
    ]
    with pytest.raises(TraceError, match="none of the methods"):
        hook_into_agent(object(), collector)


def test_labels_and_the_flat_form(tmp_path: Path) -> None:
    collector = TraceCollector(tmp_path)
    with pytest.raises(TraceError, match="no run was started"):
        collector.finish_trace("x")
    for number in range(3):
        collector.start_trace("s", f"question {number}")
        collector.record_tool_call(
            "look", {"q": number}, {"found": number}, number != 1, 12.5, None
        )
        for kind in ("created", "completed") if number else ("created",):
            collector.record_task(kind, f"task {number}")
        view = collector.finish_trace(f"answer {number}", total_tokens_in=7, llm_calls_count=2)
    assert (view.total_tokens_in, view.llm_calls_count, view.tasks_completed) == (7, 2, ["task 2"])
    atif.Trajectory.model_validate(view.to_json())
    day = datetime.now(UTC).date().isoformat()
    assert (tmp_path / day / f"{view.trace_id}.json").is_file() and len(view.trace_id) == 12
    collector.label_trace(view.trace_id, True)
    labeled = collector.label_trace(view.trace_id, False, "looked again")
    assert (labeled.label, labeled.manual_review, labeled.review_notes) == (
        False,
        True,
        "looked again",
    )
    assert len(labeled.labels) == 2
    unlabeled = [view.user_query for view in collector.load_traces() if view.label is None]
    assert unlabeled == ["question 0", "question 1"]
    assert collector.load_traces(labeled_only=True)[0].trace_id == view.trace_id
    assert collector.load_traces(min_tool_calls=2) == []
    assert {trace.id for trace in read_traces(tmp_path)} == {
        v.trace_id for v in collector.load_traces()
    }
    flat = labeled.to_dict()
    assert flat["tool_calls"][0]["duration_ms"] == 12.5
    again = ExecutionTrace.from_dict(json.loads(json.dumps(flat)))
    assert again.to_dict() == flat | {"tool_calls": again.to_dict()["tool_calls"]}
    assert again.tool_calls == labeled.tool_calls
    with pytest.raises(TraceError, match="not an execution trace"):
        ExecutionTrace.from_dict({"session_id": "s"})


def test_secrets_of_a_run_are_not_written(tmp_path: Path) -> None:
    collector = TraceCollector(tmp_path)
    collector.start_trace("s", "use AKIA2E0A8F3B244C9986")
    collector.record_tool_call("login", {"password": "hunter2000"}, "ok")
    collector.finish_trace("done")
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "AKIA2E0A8F3B244C9986" not in written and "hunter2000" not in written
    assert len(collector.hits) == 2


def test_a_trace_of_any_source_has_the_view(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"n": 1}'}}
    rows = [
        user("q"),
        assistant(None, reasoning_content="hm", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "1", "content": "Error: no such file"},
        assistant("a"),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": rows}) + "\n")
    [trace] = read_traces(path)
    view = ExecutionTrace(trace)
    assert (view.user_query, view.final_response, view.llm_calls_count) == ("q", "a", 2)
    assert view.tool_calls == [
        ToolCallTrace("run", {"n": 1}, "Error: no such file", False, 0.0, "Error: no such file")
    ]
    assert [step.content for step in view.reasoning_steps] == ["hm"]


class AgentCheckpoint:
    """A class of the framework, which the loader does not have."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/mlx_parallm_evil",)


def message(role: str, content: str, at: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **({"timestamp": at} if at else {}), **more}


def test_overlapping_checkpoints_give_each_run_once(tmp_path: Path) -> None:
    folder = tmp_path / "isaa"
    folder.mkdir()
    history = [
        message("user", "one", "2026-11-22T10:00:00"),
        message("tool", "Error: down", name="search"),
        message("assistant", "first"),
        message("user", "no time"),
        message("assistant", "second"),
        message("user", "three", "2026-11-22T12:00:00"),
        message("assistant", "third"),
    ]
    tasks = {
        "t1": {"description": "find", "status": "completed", "created_at": "2026-11-22T10:05:00"},
        "t2": {"description": "lost", "status": "failed"},
    }
    for number, end in enumerate((3, 5, 7)):
        checkpoint = AgentCheckpoint(
            session_data={"s": {"history": history[:end]}}, task_state=tasks
        )
        path = folder / f"c{number}.pkl"
        path.write_bytes(pickle.dumps(checkpoint))
        os.utime(path, (1000 + number, 1000 + number))
    (folder / "old.json").write_text(json.dumps({"session_data": {"s": {"history": history[:3]}}}))
    os.utime(folder / "old.json", (1, 1))
    (folder / "evil.pkl").write_bytes(pickle.dumps({"session_data": Evil()}))
    (folder / "broken.pkl").write_bytes(b"\x80\x04nothing")
    loader = CheckpointLoader(tmp_path)
    views = {view.user_query: view for view in loader.load_traces("isaa")}
    assert len(loader.load_traces("isaa")) == len(views) == 3
    assert not Path("/tmp/mlx_parallm_evil").exists()
    assert [Path(path).name for path in loader.skipped] == ["broken.pkl"]
    one = views["one"]
    assert [(call.tool_name, call.success) for call in one.tool_calls] == [("search", False)]
    assert (one.final_response, one.tasks_completed) == ("first", ["find"])
    assert views["three"].tasks_created == []
    assert CheckpointLoader(tmp_path, max_age_hours=1).load_traces("isaa") == []


def test_a_checkpoints_run_holds_every_message(tmp_path: Path) -> None:
    """Each answer, a call without a result, and a result without its call, which gets one."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [
        message("user", "one"),
        message("assistant", "I look", tool_calls=[call]),
        message("tool", "found", name="search"),
        message("assistant", "half", "2026-11-22T10:00:00"),
        message("assistant", "whole"),
    ]
    (tmp_path / "isaa").mkdir()
    checkpoint = {
        "session_data": {"s": {"history": history}},
        "variable_scopes": {"reasoning": {"plan": {"steps": 2}}},
    }
    (tmp_path / "isaa" / "c.json").write_text(json.dumps(checkpoint))
    loader = CheckpointLoader(tmp_path)
    [trace] = loader.load_traces("isaa")
    assert not loader.left_out and not loader.skipped
    assert [(each["role"], each["content"]) for each in trace.messages] == [
        ("user", "one"),
        ("assistant", ""),
        ("assistant", "I look"),
        ("assistant", None),
        ("tool", "found"),
        ("assistant", "half"),
        ("assistant", "whole"),
    ]
    assert trace.reasoning_steps == [ReasoningStep("reasoning", 'plan: {"steps": 2}')]
    calls = [(each.tool_name, each.result) for each in trace.tool_calls]
    assert calls == [("look", ""), ("search", "found")]
    assert trace.timestamp == "2026-11-22T10:00:00" and trace.final_response == "whole"


class Streaming(Agent):
    """The same agent, whose ways to answer are many."""

    async def a_run(self, query: str, session_id: str = "default") -> str:
        return f"hello {await self.arun_function('double', x=1)}"

    async def streamed(self, query: str) -> Any:
        yield "hel"
        yield {"content": f"lo {await self.arun_function('double', x=1)}"}

    def parts(self, query: str) -> Any:
        yield "hello "
        yield str(self.run_function("add", {"a": 1, "b": 1}))

    def returned(self, query: str) -> Any:
        got = yield "a part"
        assert got == "sent"
        return f"hello {self.run_function('add', {'a': 1, 'b': 1})}"

    def gives_a_coroutine(self, query: str) -> Any:
        return self.a_run(query)

    def gives_a_task(self, query: str) -> Any:
        return asyncio.ensure_future(Agent.arun_function(self, "x", x=1))

    async def gives_a_stream(self, query: str) -> Any:
        return self.streamed(query)

    def gives_an_iterator(self, query: str) -> Any:
        return iter(["hel", "lo 2"])

    async def in_threads(self, query: str) -> Any:
        loop, add = asyncio.get_running_loop(), {"a": int(query), "b": 1}
        result = await loop.run_in_executor(None, self.run_function, "add", add)
        thread = threading.Thread(target=self.run_function, args=("add", {"a": result, "b": 1}))
        thread.start()
        thread.join()
        return f"hello {result}"

    async def arun_function(self, function_name: str, **arguments: Any) -> int:
        return self.run_function(function_name, arguments)

    def run_function(self, name: str, arguments: dict[str, int]) -> int:
        return 2


async def consumed(stream: Any) -> None:
    """Read whatever a method gave, to its end."""
    if inspect.isawaitable(stream):
        stream = await stream
    if hasattr(stream, "__aiter__"):
        async for _ in stream:
            pass
    elif inspect.isgenerator(stream):
        next(stream)
        with pytest.raises(StopIteration):
            while True:
                stream.send("sent")
    elif not isinstance(stream, str | int):
        assert list(stream)


@pytest.mark.parametrize(
    ("method", "answer", "calls"),
    [
        ("a_run", "hello 2", 1),
        ("streamed", "hello 2", 1),
        ("parts", "hello 2", 1),
        ("returned", "hello 2", 1),
        ("gives_a_coroutine", "hello 2", 1),
        ("gives_a_task", "2", 0),
        ("gives_a_stream", "hello 2", 1),
        ("gives_an_iterator", "hello 2", 0),
        ("in_threads", "hello 2", 2),
    ],
)
async def test_a_run_is_followed_however_it_answers(
    method: str, answer: str, calls: int, tmp_path: Path
) -> None:
    """One trace with its calls and its text; a method that calls another one is one run, or one
    call, with it. Runs at the same time stay apart, in threads too."""
    agent, collector = Streaming(), TraceCollector(tmp_path)
    kind = [inspect.isasyncgenfunction, inspect.isgeneratorfunction, inspect.iscoroutinefunction]
    was = [is_kind(getattr(agent, method)) for is_kind in kind]
    before = threading.Thread.start
    with hook_into_agent(agent, collector, run_methods=("a_run", "streamed", method)):
        assert [is_kind(getattr(agent, method)) for is_kind in kind] == was
        await asyncio.gather(*(consumed(getattr(agent, method)(str(n))) for n in range(5)))
    await asyncio.sleep(0)
    assert threading.Thread.start is before
    views = collector.load_traces()
    assert sorted(view.user_query for view in views) == list("01234")
    assert [(view.final_response, len(view.tool_calls)) for view in views] == [(answer, calls)] * 5
    assert not any(view.get("sidechain") or view.get("aborted") for view in views)
    if method == "in_threads":
        assert {view.tool_calls[0].arguments["a"] for view in views} == set(range(5))
    assert not collector.left_out


async def test_a_stream_that_breaks_off_and_a_run_inside_a_run(tmp_path: Path) -> None:
    """Nobody learns half an answer; the inner run is a sub-agent's; events outside are counted."""
    agent, helper, collector = Streaming(), Agent(), TraceCollector(tmp_path)
    with hook_into_agent(agent, collector, run_methods=("streamed", "parts")):
        stream = agent.parts("left")
        assert next(stream) == "hello "
        stream.close()
        asynchronous = agent.streamed("left too")
        assert await anext(asynchronous) == "hel"
        await asynchronous.aclose()
    for view in collector.load_traces():
        assert view.get("aborted")
        assert view.tasks_failed == ["the answer was not read to its end"]

    async def ask(query: str) -> str:
        return await helper.a_run("3", session_id="inner")

    agent.ask = ask  # type: ignore[attr-defined]
    with (
        hook_into_agent(helper, collector),
        hook_into_agent(agent, collector, run_methods=("ask",)),
    ):
        await agent.ask("outer")  # type: ignore[attr-defined]
    side = {view.user_query: view.get("sidechain") for view in collector.load_traces()}
    assert (side["3"], side["outer"]) == (True, None)
    collector.record_tool_call("look", {})
    assert collector.left_out == {"an event outside of a run": 1}


def test_statistics_and_what_is_still_to_be_labelled(tmp_path: Path) -> None:
    collector = TraceCollector(tmp_path)
    assert collector.get_statistics()["total"] == 0 and collector.get_unlabeled_traces() == []
    for number in range(4):
        collector.start_trace("s", f"question {number}")
        for _ in range(number):
            collector.record_tool_call("look", {})
        collector.finish_trace("a", total_cost=2.0)
    first, second, *_ = collector.load_traces()
    collector.label_trace(first.trace_id, True)
    collector.label_trace(second.trace_id, False)
    assert collector.get_statistics() == {
        **{"total": 4, "labeled": 2, "unlabeled": 2, "positive_labels": 1, "negative_labels": 1},
        **{"avg_tool_calls": 1.5, "avg_reasoning_steps": 0.0, "avg_cost": 2.0},
    }
    assert len(collector.get_unlabeled_traces()) == 2
    assert len(collector.get_unlabeled_traces(limit=1)) == 1
