"""Files as the programs write them → traces; every line is used or skipped with a reason."""

import json
from pathlib import Path
from typing import Any

import atif
import pytest

from mlx_parallm.errors import TraceError
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.systems.traces.importers.codex import RESULT_TWICE
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.reading import IMPORTERS, detect, read_traces
from mlx_parallm.systems.traces.trace import Trace
from tests.rollout_store.groups import make_group
from tests.traces.messages import assistant, text, user

CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}


def lines(path: Path, *values: Any) -> Path:
    path.write_text(
        "".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values)
    )
    return path


def imported(path: Path, source: str) -> tuple[list[Trace], ImportReport]:
    """By detection; every trace is ATIF, by the independent package too."""
    assert detect(path) == source
    report = ImportReport()
    traces = list(read_traces(path, report))
    for trace in traces:
        atif.Trajectory.model_validate(trace.to_json())
    assert report.lines.seen == report.lines.carried + sum(report.lines.left_out.values())
    assert report.traces == len(traces)
    return traces, report


def roles(trace: Trace) -> list[str]:
    return [message["role"] for message in trace.messages]


def sampled(trace: Trace) -> list[str]:
    return [step.text for step in trace.steps if step.sampled]


def test_openai_chat(tmp_path: Path) -> None:
    messages = [
        user("q"),
        assistant("shown", weight=0),
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    ]
    tools = [{"type": "function", "function": {"name": "run"}}]
    file = lines(
        tmp_path / "rows.jsonl",
        {"messages": messages, "tools": tools, "license": "mit", "topic": "files"},
        {"messages": messages, "tools": json.dumps(tools), "id": "own"},
        "not JSON",
        {"prompt": "no messages"},
        {"messages": [{"role": "robot", "content": ""}]},
        [1],
    )
    (first, second), report = imported(file, "openai")
    assert first.messages == second.messages == messages
    assert first.tools == second.tools == tools
    assert sampled(first) == [""]  # the shown answer has weight 0
    assert (first.get("license"), first.get("columns")["topic"], second.id) == (
        "mit",
        "files",
        "own",
    )
    assert report.lines.carried == 2 and sum(report.lines.left_out.values()) == 4
    assert report.places["not JSON"] == ["rows.jsonl:3"]
    assert (
        "message 0 has the role 'robot': expected system, user, assistant or tool"
        in report.lines.left_out
    )


def test_atif_comes_out_as_it_went_in(tmp_path: Path) -> None:
    trajectory = {
        "schema_version": "ATIF-v1.5",
        "session_id": "s",
        "agent": {"name": "a", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "q"},
            {"step_id": 2, "source": "agent", "message": "a"},
        ],
        "final_metrics": {"total_steps": 2},
    }
    traces, report = imported(
        lines(tmp_path / "t.jsonl", trajectory, trajectory, {"schema_version": "x"}), "atif"
    )
    assert [trace.to_json() for trace in traces] == [trajectory, trajectory]
    assert report.lines.carried == 2
    whole = tmp_path / "trajectory.json"
    whole.write_text(json.dumps(trajectory, indent=2))
    (tmp_path / "result.json").write_text(
        json.dumps({"verifier_result": {"rewards": {"reward": 1.0}}})
    )
    [trace], _ = imported(whole, "atif")
    assert trace.get("rewards") == {"reward": {"score": 1.0, "weight": 1.0}}


def claude(uuid: str, parent: str | None, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": kind, "content": content}
    if "message_id" in more:
        message |= {"id": more.pop("message_id"), "model": "claude-x"}
    base = {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "S",
        "version": "2.0.1",
        "isSidechain": False,
    }
    return base | {"timestamp": "2026-11-22T10:00:00.000Z", "message": message} | more


def test_claude_code(tmp_path: Path) -> None:
    """Blocks of one answer are one message, results of parallel calls are not branches,
    `parentUuid` branches are."""

    def use(number: int) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"u{number}", "name": "Bash", "input": {"n": number}}

    def result(number: int) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": f"u{number}", "content": text(f"r{number}")}

    file = lines(
        tmp_path / "S.jsonl",
        {"type": "summary", "summary": "x", "leafUuid": "z"},
        {"type": "file-history-snapshot", "messageId": "m"},
        claude("1", None, "user", "list files"),
        claude("2", "1", "assistant", [{"type": "thinking", "thinking": "hm"}], message_id="m1"),
        claude("3", "2", "assistant", text("Looking."), message_id="m1"),
        claude("4", "3", "assistant", [use(1)], message_id="m1"),
        claude("5", "4", "assistant", [use(2)], message_id="m1"),
        claude("6", "4", "user", [result(1)]),
        claude("7", "5", "user", [result(2) | {"is_error": True}]),
        claude("8", "7", "assistant", text("Two files."), message_id="m2"),
        claude("9", "8", "user", "no: again"),
        claude("10", "9", "assistant", text("Three."), message_id="m3"),
        claude("11", "8", "user", "thanks"),
        claude("12", "11", "assistant", text("Welcome."), message_id="m4"),
        claude("20", None, "user", "sub task", isSidechain=True),
        claude("21", "20", "assistant", text("Sub."), message_id="m5", isSidechain=True),
    )
    traces, report = imported(file, "claude-code")
    assert (
        report.lines.carried == 14
        and report.lines.left_out["lines of type 'summary' are not messages"] == 1
    )
    first, second, side = traces
    assert roles(first) == ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    answer = first.messages[1]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "Looking.")
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [
        '{"n": 1}',
        '{"n": 2}',
    ]
    assert [m["content"] for m in first.messages if m["role"] == "tool"] == ["r1", "r2"]
    assert sampled(first) == ["Looking.", "Two files.", "Three."]
    assert sampled(second) == ["Welcome."]  # what both branches share is trained on once
    assert sampled(side) == ["Sub."] and side.get("sidechain") and not first.get("sidechain")
    assert (first.agent.version, first.agent.model_name, second.id) == ("2.0.1", "claude-x", "S#2")


def codex(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"timestamp": "2026-11-22T10:00:00.000Z", "type": kind, "payload": payload}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return codex("response_item", {"type": kind, **fields})


def said(role: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text" if role == "assistant" else "input_text", "text": text}
    return codex("response_item", {"type": "message", "role": role, "content": [part]})


def test_codex(tmp_path: Path) -> None:
    """A result that is twice in the log gives one observation; a compaction begins a new
    trace."""
    output = item("function_call_output", call_id="c1", output="a.py")
    file = lines(
        tmp_path / "rollout-1.jsonl",
        codex("session_meta", {"id": "X", "cli_version": "0.65.0", "instructions": "Be brief."}),
        codex("turn_context", {"model": "gpt-x"}),
        said("user", "list"),
        codex("event_msg", {"type": "user_message", "message": "list"}),
        item("reasoning", summary=[], encrypted_content="…"),
        item("reasoning", summary=[{"type": "summary_text", "text": "look"}]),
        item("function_call", name="shell", arguments='{"command":["ls"]}', call_id="c1"),
        output,
        output,
        item("custom_tool_call", name="apply_patch", input="***", call_id="c2"),
        item("custom_tool_call_output", call_id="c2", output="done"),
        said("assistant", "One file."),
        codex("compacted", {"message": "Summary so far."}),
        said("assistant", "Going on."),
        item("ghost_snapshot"),
    )
    (first, second), report = imported(file, "codex")
    assert roles(first) == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert first.messages[2]["reasoning_content"] == "look"
    assert first.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"command":["ls"]}'
    assert first.messages[4]["tool_calls"][0]["function"] == {
        "name": "apply_patch",
        "arguments": '{"input": "***"}',
    }
    assert [m["content"] for m in second.messages] == ["Be brief.", "Summary so far.", "Going on."]
    assert (first.id, second.id, first.agent.model_name) == ("X", "X#2", "gpt-x")
    assert report.lines.left_out[RESULT_TWICE] == 1
    assert report.lines.left_out["reasoning that is encrypted"] == 1
    assert report.lines.left_out["response items of type 'ghost_snapshot' are not known"] == 1


def attribute(key: str, value: Any) -> dict[str, Any]:
    kind = {int: "intValue", float: "doubleValue"}.get(type(value), "stringValue")
    return {"key": key, "value": {kind: str(value) if kind == "intValue" else value}}


def attributed(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A span or an event with these attributes."""
    return {"attributes": [attribute(key, value) for key, value in values.items()], **more}


def event(name: str, **values: Any) -> dict[str, Any]:
    return attributed(values, name=name)


def span(number: int, values: dict[str, Any], events: list[Any] | None = None) -> dict[str, Any]:
    ids = {"traceId": "T", "spanId": f"s{number}", "startTimeUnixNano": str(number * 10**9)}
    return attributed(values, events=events or [], **ids)


def sides(asked: list[Any], answers: list[Any]) -> dict[str, Any]:
    """The attributes of a span that hold its messages."""
    both = {"input": asked, "output": answers}
    return {f"gen_ai.{side}.messages": json.dumps(listed) for side, listed in both.items()}


def spans(*listed: Any) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(listed)}]}]}


def test_otlp_gen_ai(tmp_path: Path) -> None:
    """Each span repeats the conversation: one trace comes out, each answer sampled once; an
    evaluation is a label."""
    ask = {"role": "user", "parts": [{"type": "text", "content": "ls?"}]}
    call = {"type": "tool_call", "id": "c1", "name": "run", "arguments": {"cmd": "ls"}}
    calls = {
        "role": "assistant",
        "parts": [{"type": "reasoning", "content": "hm"}, call],
        "finish_reason": "tool_call",
    }
    result = {
        "role": "tool",
        "parts": [{"type": "tool_call_response", "id": "c1", "response": "a.py"}],
    }
    last = {
        "role": "assistant",
        "parts": [{"type": "text", "content": "One."}],
        "finish_reason": "stop",
    }
    tools = [{"type": "function", "name": "run", "parameters": {"type": "object"}}]
    common = {
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": "C",
        "gen_ai.request.model": "m",
        "gen_ai.tool.definitions": json.dumps(tools),
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    }

    named = {"gen_ai.evaluation.name": "helpful", "gen_ai.evaluation.score.value": 0.5}
    score = event("gen_ai.evaluation.result", **named)
    first = span(1, common | sides([ask], [calls]) | {"gen_ai.usage.input_tokens": 7})
    second = span(
        3,
        common | sides([ask, calls, result], [last]),
        [score],
    )
    tool = span(2, {"gen_ai.operation.name": "execute_tool"})
    [trace], report = imported(
        lines(tmp_path / "spans.jsonl", spans(second, tool), spans(first)), "otlp"
    )
    assert roles(trace) == ["system", "user", "assistant", "tool", "assistant"]
    assert trace.messages[2]["tool_calls"][0]["function"] == {
        "name": "run",
        "arguments": '{"cmd": "ls"}',
    }
    assert trace.messages[2]["reasoning_content"] == "hm"
    assert trace.tools == [
        {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
    ]
    assert len(sampled(trace)) == 2
    assert [(label.name, label.value) for label in trace.labels] == [("helpful", 0.5)]
    assert report.lines.left_out == {
        "spans of operation 'execute_tool' are not model calls with content": 1
    }


def test_otlp_openinference(tmp_path: Path) -> None:
    at = "llm.output_messages.0.message"
    values = {
        "openinference.span.kind": "LLM",
        "session.id": "P",
        "llm.model_name": "m",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.text": "ls?",
        f"{at}.role": "assistant",
        f"{at}.tool_calls.0.tool_call.id": "c1",
        f"{at}.tool_calls.0.tool_call.function.name": "run",
        f"{at}.tool_calls.0.tool_call.function.arguments": '{"cmd": "ls"}',
        "llm.tools.0.tool.json_schema": json.dumps(
            {"type": "function", "function": {"name": "run"}}
        ),
        "llm.token_count.prompt": 9,
    }
    path = tmp_path / "phoenix.json"
    path.write_text(json.dumps(spans(span(1, values)), indent=1))
    [trace], _ = imported(path, "otlp")
    assert trace.messages == [user("ls?"), assistant(None, tool_calls=[CALL])]
    assert (trace.id, trace.tools[0]["function"]["name"]) == ("P", "run")


def test_verifiers(tmp_path: Path) -> None:
    """A graph with two leaves is two traces; tokens of a node are what it adds, its sampled part
    is masked."""
    nodes = [
        {"parent": None, "message": user("q"), "token_ids": [1, 2], "mask": [False, False]},
        {
            "parent": 0,
            "message": assistant("a"),
            "sampled": True,
            "token_ids": [3, 4, 5],
            "mask": [False, True, True],
            "logprobs": [-0.5, -0.25],
        },
        {"parent": 1, "message": user("r"), "token_ids": [6], "mask": [False]},
        {
            "parent": 2,
            "message": assistant(None, tool_calls=[{"id": "x", "name": "f", "arguments": "{}"}]),
            "sampled": True,
        },
        {"parent": 1, "message": user("s")},
        {"parent": 4, "message": assistant("made up"), "sampled": False},
    ]
    record = {
        "id": "E",
        "nodes": nodes,
        "rewards": {"right": {"score": 1.0, "weight": 2.0}, "none": None},
        "task": {"key": "k", "hash": "h"},
        "tools": [{"name": "f", "parameters": {}}],
    }
    row = {"prompt": [user("q")], "completion": [assistant("a")], "reward": 0.5, "example_id": 3}
    (first, second, third), _ = imported(
        lines(tmp_path / "t.jsonl", {"id": "e", "traces": [record]}, row), "verifiers"
    )
    assert sampled(first) == ["a", ""] and sampled(second) == []
    metrics = first.steps[1].metrics
    assert metrics is not None
    assert (metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs) == (
        [1, 2, 3],
        [4, 5],
        [-0.5, -0.25],
    )
    assert first.get("rewards") == {"right": {"score": 1.0, "weight": 2.0}}
    assert (first.get("group_id"), third.get("group_id"), first.tools[0]["function"]["name"]) == (
        "h",
        "3",
        "f",
    )


def test_art(tmp_path: Path) -> None:
    """A Choice was sampled; an assistant message that is none was not."""
    choice = {"finish_reason": "stop", "index": 0, "logprobs": None, "message": assistant("a")}
    shown = assistant("shown")
    one = {"messages_and_choices": [user("q"), shown, choice], "reward": 1.0, "tools": None}
    file = lines(
        tmp_path / "art.jsonl",
        {"trajectories": [one, one | {"reward": 0.0}]},
        one,
        {"trajectories": []},
    )
    traces, report = imported(file, "art")
    assert [sampled(trace) for trace in traces] == [["a"]] * 3
    assert traces[0].get("group_id") == traces[1].get("group_id") != traces[2].get("group_id")
    assert [trace.get("rewards")["reward"]["score"] for trace in traces] == [1.0, 0.0, 1.0]
    assert report.lines.carried == 2 and sum(report.lines.left_out.values()) == 1


def test_own_rollouts(tmp_path: Path) -> None:
    """Tokens, log-probabilities and versions are those of the store; texts are without the
    template."""
    store = RolloutStore(tmp_path / "rollouts.sqlite")
    group = make_group("g")
    store.add(group, source="test")
    store.close()
    (tmp_path / "config.toml").write_text('[model]\nbase_path = "builtin:tiny"\n')
    traces, _ = imported(tmp_path, "rollouts")
    assert [trace.get("rewards")["reward"]["score"] for trace in traces] == [
        r.reward for r in group.rollouts
    ]
    for trace, rollout in zip(traces, group.rollouts, strict=True):
        metrics = next(step.metrics for step in trace.steps if step.sampled)
        assert (
            metrics is not None
            and metrics.prompt_token_ids is not None
            and rollout.logprobs is not None
        )
        assert [*metrics.prompt_token_ids, *(metrics.completion_token_ids or ())] == list(
            rollout.tokens
        )
        assert metrics.logprobs == list(rollout.logprobs[len(metrics.prompt_token_ids) :])


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        detect(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="directory"):
        detect(tmp_path)
    with pytest.raises(TraceError, match="name it with --from"):
        detect(lines(tmp_path / "x.jsonl", {"a": 1}, "?"))
    with pytest.raises(TraceError, match="there is no format 'xml'"):
        list(read_traces(tmp_path, source="xml"))
    assert set(IMPORTERS) == {
        *(
            "atif",
            "openai",
            "responses",
            "recorded",
            "collected",
            "rollouts",
            "claude-code",
            "codex",
            "otlp",
            "verifiers",
            "art",
        )
    }
