"""Conversations, one a line: OpenAI chat JSONL, ATIF, ART's trajectories, verifiers' traces."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.traces.importers.report import ImportReport, made, objects
from mlx_parallm.traces.schema import Json, Trace, new_trace, parse_trace

COPIED = {"is_copied_context": True}


def openai_chat(path: Path, report: ImportReport) -> Iterator[Trace]:
    """Rows with `messages` and `tools` (a list, or JSON text). An assistant message of weight 0 is not trained on.
    Other columns are kept in `extra.columns`."""
    for place, row in objects(path, report):

        def make(place: str = place, row: Json = row) -> Trace:
            messages = row.get("messages")
            if not isinstance(messages, list):
                raise TraceError("no list 'messages'")
            marked = [message | ({"step": COPIED} if message.get("weight") == 0 else {}) for message in messages]
            columns = {key: value for key, value in row.items() if key not in ("messages", "tools")}
            return new_trace(
                marked,
                session_id=str(row.get("id") or place),
                source="openai-chat",
                tools=tool_list(row.get("tools")),
                columns=columns or None,
                license=row.get("license"),
            )

        if (trace := made(report, place, make)) is not None:
            yield trace


def tool_list(tools: Any) -> list[Json] | None:
    """Tool definitions of a row: a list, JSON text of one, or none. Raises TraceError."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise TraceError("'tools' is text, but not JSON") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TraceError("'tools' is not a list of objects")
    return tools or None


def atif(path: Path, report: ImportReport) -> Iterator[Trace]:
    """One trajectory a line, or a file that is one (`trajectory.json`); Harbor's `result.json` beside it has the
    rewards. Traces come out as they are."""
    whole = _whole_json(path)
    entries = [(path.name, whole)] if whole is not None else objects(path, report)
    rewards = _harbor_rewards(path.with_name("result.json")) if path.name == "trajectory.json" else {}
    for place, data in entries:
        trace = made(report, place, partial(parse_trace, data))
        if trace is not None:
            if rewards:
                trace.note(rewards=rewards)
            yield trace


def _whole_json(path: Path) -> Json | None:
    """The object of a file that is one over several lines; None where the file is JSONL. Raises TraceError."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    return value if isinstance(value, dict) else None


def _harbor_rewards(path: Path) -> Json:
    result = _whole_json(path) if path.is_file() else None
    rewards = ((result or {}).get("verifier_result") or {}).get("rewards") or {}
    return {name: {"score": float(v), "weight": 1.0} for name, v in rewards.items() if isinstance(v, int | float)}


def art(path: Path, report: ImportReport) -> Iterator[Trace]:
    """ART's trajectories, or groups of them, one a line. A Choice was sampled; other assistant messages were not."""
    for place, row in objects(path, report):
        listed = row.get("trajectories")
        found: list[Trace] = []

        def make(place: str = place, row: Json = row, listed: Any = listed, found: list[Trace] = found) -> Trace:
            if not isinstance(listed, list):
                found.append(_art_trace(row, place, None))
            else:
                found += [_art_trace(entry, f"{place}#{number}", place) for number, entry in enumerate(listed)]
            if not found:
                raise TraceError("a group without trajectories")
            return found[0]

        if made(report, place, make) is not None:
            report.traces += len(found) - 1
            yield from found


def _art_trace(entry: Mapping[str, Any], name: str, group: str | None) -> Trace:
    listed = entry.get("messages_and_choices", entry.get("messages"))
    if not isinstance(listed, list):
        raise TraceError("no list 'messages_and_choices'")
    messages = []
    for item in listed:
        if isinstance(item.get("message"), dict):  # a Choice
            messages.append({key: value for key, value in item["message"].items() if value is not None})
            messages[-1].setdefault("content", None)
        else:
            trainable = item.get("trainable")
            message = {key: value for key, value in item.items() if key != "trainable"}
            copied = message.get("role") == "assistant" and not trainable
            messages.append(message | ({"step": COPIED} if copied else {}))
    reward = entry.get("reward")
    return new_trace(
        messages,
        session_id=name,
        source="art",
        tools=tool_list(entry.get("tools")),
        group_id=group,
        rewards={"reward": {"score": float(reward), "weight": 1.0}} if reward is not None else None,
        policy_version=entry.get("final_policy_version"),
        metrics=entry.get("metrics") or None,
        metadata=entry.get("metadata") or None,
    )


def verifiers(path: Path, report: ImportReport) -> Iterator[Trace]:
    """verifiers' `traces.jsonl` (version 1: graphs of messages, one trace for each leaf), and rows of its evaluations
    with `prompt` and `completion`."""
    for place, row in objects(path, report):
        listed = row.get("traces")
        entries = listed if isinstance(listed, list) else [row]
        found: list[Trace] = []

        def make(entries: Sequence[Json] = entries, place: str = place, found: list[Trace] = found) -> Trace:
            for entry in entries:
                found += _graph(entry, place) if "nodes" in entry else [_evaluated(entry, place)]
            if not found:
                raise TraceError("no messages")
            return found[0]

        if made(report, place, make) is not None:
            report.traces += len(found) - 1
            yield from found


def _evaluated(entry: Mapping[str, Any], place: str) -> Trace:
    prompt, completion = entry.get("prompt"), entry.get("completion")
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise TraceError("neither 'nodes' nor lists 'prompt' and 'completion'")
    before = [message | ({"step": COPIED} if message.get("role") == "assistant" else {}) for message in prompt]
    reward = entry.get("reward")
    return new_trace(
        [*before, *completion],
        session_id=f"{place}",
        source="verifiers",
        tools=tool_list((entry.get("info") or {}).get("oai_tools") if isinstance(entry.get("info"), dict) else None),
        task=entry.get("task"),
        group_id=None if entry.get("example_id") is None else str(entry["example_id"]),
        rewards={"reward": {"score": float(reward), "weight": 1.0}} if reward is not None else None,
    )


def _graph(entry: Mapping[str, Any], place: str) -> list[Trace]:
    nodes = entry["nodes"]
    parents = {node.get("parent") for node in nodes}
    leaves = [index for index in range(len(nodes)) if index not in parents]
    rewards = {
        name: {"score": float(value["score"]), "weight": float(value.get("weight", 1.0))}
        for name, value in (entry.get("rewards") or {}).items()
        if isinstance(value, Mapping) and value.get("score") is not None
    }
    name = str(entry.get("id") or place)
    task = entry.get("task") if isinstance(entry.get("task"), Mapping) else {}
    claimed: set[int] = set()
    traces = []
    for number, leaf in enumerate(leaves, 1):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = nodes[at].get("parent")
        path.reverse()
        messages = _graph_messages(nodes, path, claimed)
        claimed |= set(path)
        tools = nodes[path[0]].get("tools") or entry.get("tools") or []
        trace = new_trace(
            messages,
            session_id=name if number == 1 else f"{name}#{number}",
            source="verifiers",
            source_id=name,
            tools=[_function(tool) for tool in tools] or None,
            task=(task or {}).get("key"),
            group_id=(task or {}).get("hash"),
            rewards=rewards or None,
        )
        trace.session_id = name
        traces.append(trace)
    return traces


def _graph_messages(nodes: Sequence[Json], path: Sequence[int], claimed: set[int]) -> list[Json]:
    """Each node's tokens are what it adds; an answer's sampled part is where its mask is true."""
    messages: list[Json] = []
    before: list[int] = []
    for index in path:
        node = nodes[index]
        ids, mask = node.get("token_ids") or [], node.get("mask") or []
        message = {key: value for key, value in node["message"].items() if value is not None}
        if message.get("role") == "assistant":
            message.setdefault("content", None)
            message.pop("provider_state", None)
            if message.get("tool_calls"):
                message["tool_calls"] = [_function_call(call) for call in message["tool_calls"]]
            if not node.get("sampled") or index in claimed:
                message["step"] = COPIED
            elif True in mask and len(mask) == len(ids):
                first, sampled = mask.index(True), sum(mask)
                metrics = {
                    "prompt_token_ids": before + ids[:first],
                    "completion_token_ids": ids[first : first + sampled],
                    "logprobs": node.get("logprobs") or [],
                }
                message["step"] = {"metrics": metrics, "llm_call_count": 1}
        before = before + ids
        messages.append(message)
    return messages


def _function_call(call: Mapping[str, Any]) -> Json:
    if "function" in call:
        return dict(call)
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}


def _function(tool: Mapping[str, Any]) -> Json:
    if "function" in tool:
        return dict(tool)
    kept = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": kept}
