"""One conversation, written as each program writes its logs: the columns of the table of
`test_log_table.py`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.config.load import Config
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.systems.traces.collector import TraceCollector
from mlx_parallm.systems.traces.importers.report import ImportReport, session_traces
from mlx_parallm.systems.traces.schema import dump_line
from mlx_parallm.systems.traces.session import Session
from mlx_parallm.systems.traces.trace import Trace
from mlx_parallm.types import Rollout, RolloutGroup
from tests.traces.messages import text
from tests.traces.test_importers import attributed, claude, codex, event, said, sides, spans

Json = dict[str, Any]


class NotInFormatError(Exception):
    """A format that has no such thing."""


@dataclass
class Turn:
    """`role`: "system", "user", "answer", or "own": a call that the API makes itself, with its
    result, None where the log leaves it out. `end`: why an answer ended, as the program says it;
    `cut`: the user stopped it. `name`: of the answer, the same wherever it is repeated."""

    role: str
    text: str | None
    end: str | None = None
    cut: bool = False
    name: str = ""


@dataclass
class Talk:
    name: str
    turns: list[Turn]
    parent: str | None = None  # the session whose turns it begins with, or that it helps
    shared: int = 0  # turns of the parent that it begins with
    is_side: bool = False
    mark: str = field(default="")  # of ids that are new in a copy


Write = Callable[[Path, Sequence[Talk]], list[Path]]
STOPPED = "[Request interrupted by user]"


def traces_of(session: Session) -> list[Trace]:
    return list(session_traces(session, {name: name for name in session.turns}, ImportReport()))


def plain(turn: Turn) -> Json:
    """OpenAI's message; content is text."""
    role = "assistant" if turn.role in ("answer", "own") else turn.role
    message: Json = {"role": role, "content": turn.text}
    if turn.end is not None:
        message["finish_reason"] = turn.end
    return message


def chat(talk: Talk) -> list[Json]:
    messages: list[Json] = []
    for number, turn in enumerate(talk.turns):
        if turn.role == "own":
            call = {"id": f"w{number}", "type": "web_search"}
            call |= {"function": {"name": "web_search", "arguments": '{"query": "q"}'}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            if turn.text is not None:
                messages.append(
                    {"role": "tool", "tool_call_id": f"w{number}", "content": turn.text}
                )
            continue
        messages.append(plain(turn))
        if turn.cut:
            messages.append({"role": "user", "content": STOPPED})
    return messages


def lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_bytes(b"".join(map(dump_line, rows)))
    return path


def openai(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = [
        {"messages": chat(talk), **({"is_subagent": True} if talk.is_side else {})}
        for talk in talks
    ]
    return [lines(folder / "chats.jsonl", rows)]


def openai_calls(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A line for each call, which repeats the messages before it."""
    rows = []
    for talk in talks:
        messages = chat(talk)
        answers = [at for at, m in enumerate(messages) if m["role"] == "assistant"]
        for at in answers:
            answer = dict(messages[at])
            reason = answer.pop("finish_reason", "stop")
            before = [{k: v for k, v in m.items() if k != "finish_reason"} for m in messages[:at]]
            choice = {"index": 0, "message": answer, "finish_reason": reason}
            row: Json = {"request": {"messages": before}, "response": {"choices": [choice]}}
            rows.append(row | ({"metadata": {"subagent": True}} if talk.is_side else {}))
        if any(turn.cut for turn in talk.turns):
            raise NotInFormatError("a call's answer is whole, or has its reason")
    return [lines(folder / "calls.jsonl", rows)]


def response_calls(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A line for each call of the Responses API, which repeats the items before it."""
    rows = []
    for talk in talks:
        items: list[Json] = []
        asked: Json = {"model": "m"}
        for number, turn in enumerate(talk.turns):
            if turn.cut:
                raise NotInFormatError("a call's answer is whole, or has its reason")
            if turn.role == "system":
                asked["instructions"] = turn.text
                continue
            if turn.role == "own":
                item: Json = {"type": "code_interpreter_call", "id": f"ci{number}", "code": "1"}
                outputs = [{"type": "logs", "logs": turn.text}] if turn.text is not None else None
                output: list[Json] = [item | {"status": "completed", "outputs": outputs}]
            elif turn.role == "user":
                items.append({"role": "user", "content": turn.text})
                continue
            else:
                text = {"type": "output_text", "text": turn.text, "annotations": []}
                output = [{"type": "message", "role": "assistant", "content": [text]}]
                output[0] |= {"id": turn.name or f"{talk.name}{talk.mark}{number}"}
            response: Json = {"id": f"r-{talk.name}{talk.mark}{number}", "object": "response"}
            response |= {"status": "completed", "output": output, "model": "m"}
            if turn.end is not None:
                response |= {"status": "incomplete", "incomplete_details": {"reason": turn.end}}
            row: Json = {"request": asked | {"input": list(items)}, "response": response}
            rows.append(row | ({"metadata": {"subagent": True}} if talk.is_side else {}))
            items += output
    return [lines(folder / "responses.jsonl", rows)]


def anthropic(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = []
    for talk in talks:
        row: Json = {"messages": [], **({"is_sidechain": True} if talk.is_side else {})}
        for turn in talk.turns:
            if turn.role == "system":
                row["system"] = text(turn.text)
                continue
            blocks: list[Json] = text(turn.text)
            if turn.role == "own":
                blocks = own_blocks(turn)
            message: Json = {"role": plain(turn)["role"], "content": blocks}
            if turn.role == "answer":
                message |= {"stop_reason": None if turn.cut else turn.end or "end_turn"}
            before = row["messages"][-1:]
            if before and before[0]["role"] == message["role"] == "assistant":
                before[0]["content"] += blocks  # the answer continues
            else:
                row["messages"].append(message)
            if turn.cut:
                row["messages"].append({"role": "user", "content": STOPPED})
        rows.append(row)
    return [lines(folder / "messages.jsonl", rows)]


def own_blocks(turn: Turn) -> list[Json]:
    use = {"type": "server_tool_use", "id": "st1", "name": "code", "input": {"query": "q"}}
    result = {"type": "code_execution_tool_result", "tool_use_id": "st1", "content": turn.text}
    return [use] if turn.text is None else [use, result]


def gemini(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = []
    for talk in talks:
        row: Json = {"contents": [], **({"sidechain": True} if talk.is_side else {})}
        for turn in talk.turns:
            if turn.role == "system":
                row["systemInstruction"] = {"parts": [{"text": turn.text}]}
                continue
            parts: list[Json] = [{"text": turn.text}]
            if turn.role == "own":
                parts = [{"executableCode": {"language": "PYTHON", "code": "1"}}]
                if turn.text is not None:
                    parts.append({"codeExecutionResult": {"output": turn.text}})
            entry: Json = {"role": "user" if turn.role == "user" else "model", "parts": parts}
            if turn.end is not None:
                entry["finishReason"] = turn.end.upper()
            row["contents"].append(entry)
            if turn.cut:
                row["contents"].append({"role": "user", "parts": [{"text": STOPPED}]})
        rows.append(row)
    return [lines(folder / "contents.jsonl", rows)]


def sharegpt(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = []
    for talk in talks:
        said_turns = []
        for turn in talk.turns:
            sayer = {"system": "system", "user": "human"}.get(turn.role, "gpt")
            entry: Json = {"from": sayer, "value": turn.text}
            if turn.role == "own":
                entry = {"from": "function_call", "value": '{"name": "search", "arguments": {}}'}
            if turn.end is not None:
                entry["finish_reason"] = turn.end
            said_turns.append(entry)
            if turn.role == "own" and turn.text is not None:
                said_turns.append({"from": "observation", "value": turn.text})
            if turn.cut:
                said_turns.append({"from": "human", "value": STOPPED})
        rows.append(
            {"conversations": said_turns, **({"is_subagent": True} if talk.is_side else {})}
        )
    return [lines(folder / "conversations.jsonl", rows)]


def trajectory(talk: Talk) -> Json:
    steps: list[Json] = []
    for turn in talk.turns:
        source = "agent" if turn.role in ("answer", "own") else turn.role
        step: Json = {"step_id": len(steps) + 1, "source": source, "message": turn.text or ""}
        if turn.role == "own":
            step["message"] = ""
            step["tool_calls"] = [
                {"tool_call_id": "w", "function_name": "search", "arguments": {"q": "q"}}
            ]
            if turn.text is not None:
                step["observation"] = {"results": [{"source_call_id": "w", "content": turn.text}]}
        if turn.end is not None:
            step["extra"] = {"finish_reason": turn.end}
        steps.append(step)
        if turn.cut:
            steps.append({"step_id": len(steps) + 1, "source": "user", "message": STOPPED})
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": talk.parent or talk.name,
        "trajectory_id": talk.name + talk.mark,
        "agent": {"name": "a", "version": "1"},
        "steps": steps,
    }


def atif(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A sub-agent's trajectory is named by a result of its parent."""
    made = [trajectory(talk) for talk in talks]
    for talk in talks:
        if talk.is_side:
            main = next(each for each in made if each["trajectory_id"] == talk.parent)
            last = main["steps"][-1]
            last["tool_calls"] = [{"tool_call_id": "t", "function_name": "task", "arguments": {}}]
            named = {"trajectory_id": talk.name}
            last["observation"] = {
                "results": [{"source_call_id": "t", "subagent_trajectory_ref": [named]}]
            }
    return [lines(folder / "trajectories.jsonl", made)]


def claude_code(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A file for each session; a fork copies its parent's lines, with new uuids."""
    files = []
    for talk in talks:
        rows: list[Json] = []
        before: str | None = None
        for number, turn in enumerate(talk.turns):
            if turn.role == "system":
                raise NotInFormatError("the log has no system prompt")
            uuid = f"{talk.name}{talk.mark}-{number}"
            kind = "user" if turn.role == "user" else "assistant"
            blocks: Any = text(turn.text)
            if turn.role == "own":
                blocks = own_blocks(turn)
            about: Json = {"sessionId": talk.name}
            if talk.is_side:
                named = "parent_tool_use_id" if number % 2 else "agentId"  # the SDK's streams
                about |= {named: talk.name, "isSidechain": None}
            if kind == "assistant":
                about["message_id"] = f"m{turn.name or uuid}"
            line = claude(uuid, before, kind, blocks, **about)
            if turn.role == "answer" and not turn.cut:
                line["message"]["stop_reason"] = turn.end or "end_turn"
            rows.append(line)
            before = uuid
            if turn.cut:
                rows.append(claude(f"{uuid}x", before, "user", text(STOPPED)))
                before = f"{uuid}x"
        files.append(lines(folder / f"{talk.name}.jsonl", rows))
    return files


def codex_cli(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A rollout for each session; a fork's begins with its own line and its parent's."""
    files = []
    for talk in talks:
        about: Json = {"id": talk.name, "cli_version": "0.140.0"}
        if talk.is_side:
            spawned = {"parent_thread_id": talk.parent, "depth": 1}
            about["source"] = {"subagent": {"thread_spawn": spawned}}
        rows = []
        for turn in talk.turns:
            if turn.role == "system":
                about["base_instructions"] = {"text": turn.text}
            elif turn.role == "own":
                item: Json = {"type": "code_interpreter_call", "id": "ci1", "code": "1"}
                if turn.text is not None:
                    item["outputs"] = [{"type": "logs", "logs": turn.text}]
                rows.append(codex("response_item", item))
            else:
                line = said("user" if turn.role == "user" else "assistant", str(turn.text))
                if turn.end is not None:
                    line["payload"] |= {"status": "incomplete", "id": f"msg{len(rows)}"}
                rows.append(line)
            if turn.cut:
                rows.append(codex("event_msg", {"type": "turn_aborted", "reason": "interrupted"}))
        first = [codex("session_meta", about)]
        if talk.parent is not None and talk.shared:
            first.append(codex("session_meta", {"id": talk.parent}))
        files.append(lines(folder / f"rollout-{talk.name}{talk.mark}.jsonl", [*first, *rows]))
    return files


def _span(number: int, values: Json, talk: Talk, **more: Any) -> Json:
    about = {"gen_ai.conversation.id": talk.name, **values}
    ids = {"traceId": talk.parent or talk.name, "spanId": f"{talk.name}-{number}"}
    ids |= {"parentSpanId": f"{talk.name}-agent"} if talk.is_side else {}
    return attributed(about, startTimeUnixNano=str(number * 10**9), **ids, **more)


def agent_spans(talk: Talk) -> list[Json]:
    """The span of a sub-agent, in the span of a tool, in the span of its parent."""
    invoke = {"gen_ai.operation.name": "invoke_agent"}
    trace = {"traceId": talk.parent, "startTimeUnixNano": "1"}
    rows: list[tuple[str, Json, Json]] = [
        ("agent", invoke | {"gen_ai.agent.name": "helper"}, {"parentSpanId": f"{talk.name}-tool"}),
        ("tool", {"gen_ai.operation.name": "execute_tool"}, {"parentSpanId": f"{talk.name}-main"}),
        ("main", invoke | {"gen_ai.agent.name": "main"}, {}),
    ]
    return [
        attributed(values, spanId=f"{talk.name}-{name}", **trace, **more)
        for name, values, more in rows
    ]


def _calls(talk: Talk, form: Callable[[Turn], Any]) -> list[tuple[list[Any], Any, Turn]]:
    """The messages before each answer, the answer, and its turn."""
    made = []
    before: list[Any] = []
    for turn in talk.turns:
        written = form(turn)
        if turn.role in ("answer", "own"):
            made.append((list(before), written, turn))
        before.append(written)
        if turn.cut:
            before.append(form(Turn("user", STOPPED)))
    return made


def otlp(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """Each answer is a span; one that continues behind an own call is a message of several parts."""

    def form(turn: Turn) -> Json:
        parts: list[Json] = [{"type": "text", "content": turn.text}]
        if turn.role == "own":
            code = {"type": "code_interpreter", "code": "1"}
            parts = [
                {"type": "server_tool_call", "id": "c", "name": "code", "server_tool_call": code}
            ]
            if turn.text is not None:
                answer = {"output": turn.text}
                parts.append(
                    {
                        "type": "server_tool_call_response",
                        "id": "c",
                        "server_tool_call_response": answer,
                    }
                )
        message = {"role": plain(turn)["role"], "parts": parts}
        return message | ({"finish_reason": turn.end} if turn.end else {})

    rows = []
    for talk in talks:
        rows += agent_spans(talk) if talk.is_side else []
        held: list[Json] = []
        for number, (before, answer, turn) in enumerate(_calls(talk, form)):
            if turn.role == "own":
                held = answer["parts"]
                continue
            answer = {**answer, "parts": [*held, *answer["parts"]]}
            before = [m for m in before if "server_tool_call" not in json.dumps(m)]
            values = sides(before, [answer])
            if turn.name:
                values["gen_ai.response.id"] = turn.name
            rows.append(_span(number + 10 * bool(talk.mark), values, talk))
    return [lines(folder / "spans.jsonl", [spans(*rows)])]


def _no_own(talk: Talk) -> None:
    if any(turn.role == "own" for turn in talk.turns):
        raise NotInFormatError("it has no calls that the API makes")


def openinference(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = []
    for talk in talks:
        _no_own(talk)
        if any(turn.end for turn in talk.turns):
            raise NotInFormatError("the keys have no reason for an answer's end")
        if talk.is_side:
            rows += [
                attributed(
                    {"openinference.span.kind": "AGENT", "agent.name": name},
                    traceId=talk.parent,
                    spanId=f"{talk.name}-{name}",
                    parentSpanId=f"{talk.name}-{parent}",
                )
                for name, parent in (("agent", "main"), ("main", ""))
            ]
        for number, (before, answer, _) in enumerate(_calls(talk, plain)):
            values = {"openinference.span.kind": "LLM"}
            for side, messages in (("input", before), ("output", [answer])):
                for at, message in enumerate(messages):
                    for key in ("role", "content"):
                        values[f"llm.{side}_messages.{at}.message.{key}"] = message[key]
            rows.append(_span(number + 10 * bool(talk.mark), values, talk))
    return [lines(folder / "phoenix.jsonl", [spans(*rows)])]


def otlp_events(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = []
    for talk in talks:
        _no_own(talk)
        rows += agent_spans(talk) if talk.is_side else []
        for number, (before, answer, turn) in enumerate(_calls(talk, plain)):
            events = [
                event(f"gen_ai.{message['role']}.message", content=message["content"])
                for message in before
            ]
            chosen = {"message": json.dumps({"content": answer["content"]})}
            chosen |= {"finish_reason": turn.end} if turn.end is not None else {}
            events.append(event("gen_ai.choice", **chosen))
            rows.append(_span(number + 10 * bool(talk.mark), {}, talk, events=events))
    return [lines(folder / "events.jsonl", [spans(*rows)])]


def verifiers_rows(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = []
    for talk in talks:
        messages = chat(talk)
        first = next(at for at, m in enumerate(messages) if m["role"] == "assistant")
        row: Json = {"prompt": messages[:first], "completion": messages[first:], "reward": 1.0}
        rows.append(row | ({"info": {"is_subagent": True}} if talk.is_side else {}))
        if (last := talk.turns[-1]).end is not None:
            rows[-1]["completion"][-1].pop("finish_reason")
            rows[-1] |= {"is_truncated": True, "stop_condition": last.end}
    return [lines(folder / "results.jsonl", rows)]


def verifiers_graph(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A fork is a branch of its parent's graph."""
    entries: dict[str, Json] = {}
    places: dict[str, list[int]] = {}
    for talk in talks:
        name = talk.parent if talk.shared and talk.parent else talk.name
        entry = entries.setdefault(name, {"id": name, "nodes": [], "rewards": {"r": 1.0}})
        if talk.is_side:
            entry["info"] = {"is_subagent": True}
        way = places.get(name, [])[: talk.shared]
        for turn in talk.turns[talk.shared :]:
            for message in chat(Talk(talk.name, [turn])):
                sampled = message["role"] == "assistant"
                node = {"message": message, "parent": way[-1] if way else None, "sampled": sampled}
                entry["nodes"].append(node)
                way.append(len(entry["nodes"]) - 1)
        places.setdefault(name, way)
    return [lines(folder / "traces.jsonl", list(entries.values()))]


def art(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    rows = []
    for talk in talks:
        listed: list[Json] = []
        for message in chat(talk):
            if message["role"] == "assistant":
                message = {"message": message, "index": 0}
                if (reason := message["message"].pop("finish_reason", None)) is not None:
                    message["finish_reason"] = reason
            listed.append(message)
        row: Json = {"messages_and_choices": listed, "reward": 1.0}
        rows.append(row | ({"metadata": {"is_subagent": True}} if talk.is_side else {}))
    return [lines(folder / "art.jsonl", rows)]


def recorded(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A fork is a branch of its parent's session."""
    sessions: dict[str, tuple[Session, dict[str, str]]] = {}
    for talk in talks:
        if talk.is_side:
            raise NotInFormatError("a call does not say which agent made it")
        if any(turn.role == "own" for turn in talk.turns):
            raise NotInFormatError("chat completions make no calls themselves")
        name = talk.parent if talk.shared and talk.parent else talk.name
        session, ends = sessions.setdefault(name, (Session(name), {}))
        for before, answer, turn in _calls(talk, plain)[bool(talk.shared) * 1 :]:
            reason = answer.pop("finish_reason", None if turn.cut else "stop")
            bare = [{k: v for k, v in m.items() if k != "finish_reason"} for m in before]
            session.follow(bare, answer, ends, at=1.0, finish_reason=reason)
    (folder / "sessions").mkdir()
    for name, (session, _) in sessions.items():
        rows = [turn.to_json() for turn in session.turns.values()]
        lines(folder / "sessions" / f"{name}.jsonl", rows)
    return [folder]


def collected(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A sub-agent runs inside its parent's run."""
    collector = TraceCollector(folder)
    helpers = {talk.parent: talk for talk in talks if talk.is_side}
    for talk in talks:
        if talk.is_side:
            continue
        kinds = [turn.role for turn in talk.turns]
        if kinds[0] == "system":
            raise NotInFormatError("the agent keeps its system prompt to itself")
        if kinds != ["user", "answer"] or talk.turns[-1].end or talk.turns[-1].cut:
            raise NotInFormatError("a run is one question, its calls, and its answer")
        collector.start_trace(talk.name, str(talk.turns[0].text))
        if (helper := helpers.get(talk.name)) is not None:
            collector.start_trace(helper.name, str(helper.turns[0].text))
            collector.finish_trace(str(helper.turns[1].text))
        collector.finish_trace(str(talk.turns[1].text))
    return [folder]


def rollouts(folder: Path, talks: Sequence[Talk]) -> list[Path]:
    """A group for each session, in the run's store; texts by the tiny model's tokenizer."""
    from mlx_parallm.models.loading import load_tokenizer, resolve_model_path

    (folder / "config.toml").write_text('[model]\nbase_path = "builtin:tiny"\n')
    model = Config().model
    path = resolve_model_path(model.base_path, None, fetch=False, dtype=model.dtype)
    tokenizer = load_tokenizer(path, model)
    store = RolloutStore(folder / "rollouts.sqlite")
    for talk in talks:
        kinds = [turn.role for turn in talk.turns]
        if kinds != ["user", "answer"] or talk.is_side or talk.turns[-1].cut:
            raise NotInFormatError("a rollout is a prompt's text and what was sampled behind it")
        if not all(str(turn.text).isascii() for turn in talk.turns):
            raise NotInFormatError("no token is half a character")
        asked, answered = (tokenizer.encode(str(turn.text)) for turn in talk.turns)
        rollout = Rollout(
            tokens=(*asked, *answered),
            mask=(0,) * len(asked) + (1,) * len(answered),
            logprobs=(0.0,) * (len(asked) + len(answered)),
            policy_versions=(0,) * (len(asked) + len(answered)),
            temperature=1.0,
            scores={"reward": 1.0},
            stop_reason=talk.turns[-1].end or "stop",
        )
        store.add(RolloutGroup(talk.name + talk.mark, "e", (rollout, rollout)), source="test")
    store.close()
    return [folder]


FORMATS: dict[str, tuple[str, Write]] = {
    "openai": ("openai", openai),
    "openai calls": ("openai", openai_calls),
    "anthropic": ("openai", anthropic),
    "gemini": ("openai", gemini),
    "responses": ("responses", response_calls),
    "sharegpt": ("openai", sharegpt),
    "atif": ("atif", atif),
    "recorded": ("recorded", recorded),
    "collected": ("collected", collected),
    "rollouts": ("rollouts", rollouts),
    "claude-code": ("claude-code", claude_code),
    "codex": ("codex", codex_cli),
    "otlp": ("otlp", otlp),
    "otlp events": ("otlp", otlp_events),
    "openinference": ("otlp", openinference),
    "verifiers rows": ("verifiers", verifiers_rows),
    "verifiers graph": ("verifiers", verifiers_graph),
    "art": ("art", art),
}
