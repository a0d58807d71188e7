"""Logs of agents as their programs write them, one of each format; the fuzz changes them.

Every text goes through `mark`, which gives it its own mark.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

FAILED = "API Error: Request was aborted."
Json = dict[str, Any]
Mark = Callable[[str], str]


def claude_code(mark: Mark) -> list[Json]:
    def line(
        uuid: str,
        parent: str | None,
        kind: str,
        content: Any,
        answer: str | None = None,
        **more: Any,
    ) -> Json:
        about: Json = (
            {"id": answer, "model": "claude-x", "stop_reason": "end_turn"} if answer else {}
        )
        base: Json = {
            "type": kind,
            "uuid": uuid,
            "parentUuid": parent,
            "sessionId": "S",
            "version": "2.0.1",
        }
        message = {"role": kind, "content": content} | about
        return (
            base
            | {"timestamp": "2026-11-22T10:00:00Z", "cwd": mark("/tmp"), "message": message}
            | more
        )

    use = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": mark("ls")}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": mark("a.py")}],
    }
    image = {"type": "image", "source": {"type": "base64", "data": mark("AAAA")}}
    return [
        {"type": "summary", "summary": mark("files"), "leafUuid": "a4"},
        line("u1", None, "user", mark("list files")),
        line(
            "a1",
            "u1",
            "assistant",
            [{"type": "thinking", "thinking": mark("hm"), "signature": mark("s")}],
            "m1",
        ),
        line("a2", "a1", "assistant", [use], "m1"),
        {"type": "system", "uuid": "h1", "parentUuid": "a2", "content": mark("hook")},
        line(
            "u2",
            "h1",
            "user",
            [result, {"type": "text", "text": mark("continue")}],
            toolUseResult={"out": mark("a.py")},
        ),
        {"type": "progress", "uuid": "p1", "parentUuid": "u2", "data": mark("…")},
        line("a3", "p1", "assistant", [{"type": "text", "text": mark("One file.")}], "m2"),
        line("e1", "a3", "assistant", [{"type": "text", "text": FAILED}], isApiErrorMessage=True),
        line("u3", "e1", "user", [{"type": "text", "text": mark("and this?")}, image]),
        line("a4", "u3", "assistant", [{"type": "text", "text": mark("A cat.")}], "m3"),
        line("u4", "a3", "user", mark("thanks")),
        line("a5", "u4", "assistant", mark("Welcome."), "m4"),
        line("s1", None, "user", mark("sub task"), isSidechain=True),
        line(
            "s2",
            "s1",
            "assistant",
            [{"type": "text", "text": mark("Sub.")}],
            "m5",
            isSidechain=True,
        ),
    ]


def codex(mark: Mark) -> list[Json]:
    def line(kind: str, **payload: Any) -> Json:
        return {"timestamp": "2026-11-22T10:00:00Z", "type": kind, "payload": payload}

    def item(kind: str, **fields: Any) -> Json:
        return line("response_item", **{"type": kind, **fields})

    def say(role: str, text: str) -> Json:
        part = {"type": "output_text" if role == "assistant" else "input_text", "text": mark(text)}
        return {"role": role, "content": [part]}

    history = [
        {"type": "message", **say("user", "list")},
        {"type": "message", **say("assistant", "One.")},
    ]
    return [
        line(
            "session_meta",
            id="X",
            cli_version="0.65.0",
            instructions=mark("Be brief."),
            cwd=mark("/tmp"),
        ),
        line("turn_context", model="gpt-x", summary=mark("auto")),
        item("message", **say("user", "list")),
        line("event_msg", type="user_message", message=mark("list")),
        item(
            "reasoning",
            summary=[{"type": "summary_text", "text": mark("look")}],
            encrypted_content=mark("…"),
        ),
        item(
            "function_call", name="shell", arguments=json.dumps({"cmd": mark("ls")}), call_id="c1"
        ),
        item(
            "function_call_output", call_id="c1", output={"content": mark("a.py"), "success": True}
        ),
        item("custom_tool_call", name="apply_patch", input=mark("***"), call_id="c2"),
        item(
            "custom_tool_call_output",
            call_id="c2",
            output=[{"type": "input_text", "text": mark("done")}],
        ),
        item(
            "web_search_call",
            action={"type": "search", "query": mark("cats")},
            status="completed",
        ),
        item("message", **say("assistant", "One file.")),
        line("compacted", message="", replacement_history=history),
        item("message", **say("user", "continue")),
        item("message", **say("assistant", "Going on.")),
    ]


def openai(mark: Mark) -> list[Json]:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "run", "arguments": json.dumps({"q": mark("ls")})},
    }
    tools = [{"type": "function", "function": {"name": "run", "description": mark("runs")}}]
    chat = [
        {"role": "system", "content": mark("Be brief.")},
        {"role": "user", "content": [{"type": "text", "text": mark("q")}], "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": mark("a.py")},
        {"role": "assistant", "content": mark("One.")},
    ]
    older = [
        {"role": "user", "content": mark("q")},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": mark("{}")},
        },
        {"role": "function", "name": "f", "content": mark("3")},
        {"role": "assistant", "content": mark("Three.")},
    ]
    blocks = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": mark("weather?"), "cache_control": {"type": mark("e")}}
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t", "name": "w", "input": {"at": mark("Köln")}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": mark("Sunny.")}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": mark("x")},
                {"type": "text", "text": "y"},
            ],
        },
    ]
    gemini = [
        {"role": "user", "parts": [{"text": mark("q")}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": mark("1")}}}]},
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "f", "response": {"b": mark("2")}}}],
        },
        {"role": "model", "parts": [{"text": mark("Two."), "thoughtSignature": mark("s")}]},
    ]
    spoken = [
        {"from": "system", "value": mark("Be brief.")},
        {"from": "human", "value": mark("q")},
        {
            "from": "function_call",
            "value": json.dumps({"name": "f", "arguments": {"a": mark("1")}}),
        },
        {"from": "observation", "value": mark("2")},
        {"from": "gpt", "value": mark("Two.")},
    ]
    answer = {
        "choices": [
            {"message": {"role": "assistant", "content": mark("hi")}, "finish_reason": "stop"}
        ]
    }
    return [
        {"messages": chat, "tools": tools, "topic": mark("files")},
        {"messages": older, "functions": [{"name": "f", "description": mark("d")}]},
        {
            "system": mark("Be kind."),
            "messages": blocks,
            "tools": [{"name": "w", "input_schema": {"title": mark("t")}}],
        },
        {"contents": gemini, "systemInstruction": {"parts": [{"text": mark("Be brief.")}]}},
        {"conversations": spoken, "tools": json.dumps([{"name": "f", "description": mark("d")}])},
        {
            "request": {"messages": [{"role": "user", "content": mark("q")}], "model": mark("m")},
            "response": answer,
        },
        {
            "messages": [
                {"role": "user", "content": mark("q")},
                {"role": "assistant", "content": FAILED},
            ],
            "id": "e",
        },
    ]


def atif(mark: Mark) -> list[Json]:
    call = {"tool_call_id": "c", "function_name": "f", "arguments": {"a": mark("1")}}
    steps = [
        {"step_id": 1, "source": "user", "message": mark("q")},
        {
            "step_id": 2,
            "source": "agent",
            "message": mark("a"),
            "reasoning_content": mark("hm"),
            "tool_calls": [call],
        },
        {"step_id": 3, "source": "agent", "message": mark("end"), "extra": {"note": mark("n")}},
    ]
    steps[1]["observation"] = {"results": [{"source_call_id": "c", "content": mark("2")}]}
    about = {
        "name": "a",
        "version": "1",
        "tool_definitions": [{"type": "function", "function": {"name": "f"}}],
    }
    extra = {
        "rewards": {"reward": {"score": 1.0, "weight": 1.0}},
        "labels": [{"name": "x", "value": 1, "by": "u", "at": 1}],
    }
    whole = {
        "schema_version": "ATIF-v1.8",
        "session_id": "s",
        "agent": about,
        "steps": steps,
        "notes": mark("note"),
    }
    inner = {**copy.deepcopy(whole), "session_id": "inner", "notes": mark("inner")}
    return [whole | {"extra": extra}, {**copy.deepcopy(whole), "subagent_trajectories": [inner]}]


def otlp(mark: Mark) -> list[Json]:
    def span(number: int, values: Json, *events: Json) -> Json:
        listed = [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]
        about = {
            "traceId": "T",
            "spanId": f"s{number}",
            "startTimeUnixNano": str(number * 10**9),
            "name": mark("chat"),
        }
        return about | {"attributes": listed, "events": list(events)}

    ask = {"role": "user", "parts": [{"type": "text", "content": mark("ls?")}]}
    call = {"type": "tool_call", "id": "c1", "name": "run", "arguments": {"cmd": mark("ls")}}
    calls = {"role": "assistant", "parts": [{"type": "reasoning", "content": mark("hm")}, call]}
    response = {"type": "tool_call_response", "id": "c1", "response": mark("a.py")}
    result = {"role": "tool", "parts": [response, {"type": "text", "content": mark("and?")}]}
    last = {
        "role": "assistant",
        "parts": [{"type": "text", "content": mark("One.")}],
        "finish_reason": "stop",
    }
    blob = {
        "role": "user",
        "parts": [{"type": "blob", "mime_type": "image/png", "data": mark("AA")}],
    }
    common = {
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": "C",
        "gen_ai.request.model": "m",
    }

    def messages(prompt: list[Json], *answered: Json) -> Json:
        both = {
            "gen_ai.input.messages": json.dumps(prompt),
            "gen_ai.output.messages": json.dumps(answered),
        }
        return common | both | {"server.address": mark("host")}

    event = {"key": "content", "value": {"stringValue": mark("old q")}}
    choice = {"key": "message", "value": {"stringValue": json.dumps({"content": mark("old a")})}}
    flat = {
        "openinference.span.kind": "LLM",
        "session.id": "P",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.text": mark("flat?"),
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": mark("Flat."),
    }
    older = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": mark("q"),
        "gen_ai.completion.0.content": mark("a"),
    }
    spans = [
        span(1, messages([ask], calls)),
        span(2, {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": mark("run")}),
        span(
            3,
            messages(
                [ask, calls, result],
                last,
                {**last, "parts": [{"type": "text", "content": mark("Other.")}]},
            ),
        ),
        span(4, messages([blob], last) | {"gen_ai.conversation.id": "D"}),
        span(5, flat),
        span(6, older | {"session.id": "Q"}),
        span(
            7,
            common | {"gen_ai.conversation.id": "E"},
            {"name": "gen_ai.user.message", "attributes": [event]},
            {"name": "gen_ai.choice", "attributes": [choice]},
            {
                "name": "exception",
                "attributes": [{"key": "exception.message", "value": {"stringValue": mark("e")}}],
            },
        ),
    ]
    resource_of = {"attributes": [{"key": "service.name", "value": {"stringValue": mark("agent")}}]}
    return [
        {"resourceSpans": [{"resource": resource_of, "scopeSpans": [{"spans": part}]}]}
        for part in (spans[:4], spans[4:])
    ]


def verifiers(mark: Mark) -> list[Json]:
    nodes = [
        {
            "parent": None,
            "message": {"role": "user", "content": mark("q")},
            "token_ids": [1, 2],
            "mask": [False, False],
        },
        {
            "parent": 0,
            "message": {
                "role": "assistant",
                "content": mark("a"),
                "provider_state": {"x": mark("s")},
            },
            "sampled": True,
            "token_ids": [3, 4],
            "mask": [False, True],
            "logprobs": [-0.5],
        },
        {"parent": 1, "message": {"role": "user", "content": mark("r")}},
        {
            "parent": 2,
            "message": {"role": "assistant", "content": mark("b")},
            "sampled": True,
            "note": mark("n"),
        },
        {"parent": 1, "message": {"role": "user", "content": mark("s")}},
        {"parent": 4, "message": {"role": "assistant", "content": mark("c")}, "sampled": True},
    ]
    record = {
        "id": "E",
        "nodes": nodes,
        "rewards": {"right": {"score": 1.0}},
        "task": {"key": "k", "text": mark("t")},
    }
    row = {
        "prompt": [{"role": "user", "content": mark("q")}],
        "completion": [{"role": "assistant", "content": mark("a")}],
        "reward": 0.5,
        "answer": mark("a"),
    }
    return [{"id": "e", "traces": [record], "env": mark("env")}, row]


def art(mark: Mark) -> list[Json]:
    choice = {
        "finish_reason": "stop",
        "index": 0,
        "message": {"role": "assistant", "content": mark("a")},
    }
    question = {"role": "user", "content": mark("q")}
    one: Json = {
        "messages_and_choices": [question, choice],
        "reward": 1.0,
        "metadata": {"m": mark("m")},
    }
    other = {
        **one,
        "messages_and_choices": [
            question,
            {**choice, "message": {"role": "assistant", "content": mark("b")}},
        ],
    }
    return [
        {"trajectories": [one, other], "note": mark("n")},
        {**one, "additional_histories": [{"x": mark("h")}]},
    ]


def recorded(mark: Mark) -> list[Json]:
    def turn(name: str, parent: str | None, question: str, answer: str, **more: Any) -> Json:
        both = {
            "messages": [{"role": "user", "content": question}],
            "response": {"role": "assistant", "content": answer},
        }
        return (
            {
                "type": "turn",
                "id": name,
                "parent": parent,
                "at": 1.0,
                "status": "complete",
                "model": "m",
            }
            | both
            | more
        )

    tokens = {
        "shared": 0,
        "prompt": [1, 2],
        "completion": [3],
        "logprobs": [-0.5],
        "versions": [[0, 0, 1]],
    }
    tokens |= {"temperature": 1.0, "policy": True}
    return [
        turn("t1", None, mark("q"), mark("a"), response_id="r1", tokens=tokens),
        turn("t2", "t1", mark("r"), mark("b")),
        turn("t3", "t1", mark("s"), mark("c")),
        {
            "type": "label",
            "name": "feedback",
            "value": 1,
            "by": "u",
            "at": 2.0,
            "explanation": mark("good"),
        },
    ]


GOOD: dict[str, Callable[[Mark], list[Json]]] = {
    "claude-code": claude_code,
    "codex": codex,
    "openai": openai,
    "atif": atif,
    "otlp": otlp,
    "verifiers": verifiers,
    "art": art,
    "recorded": recorded,
}
