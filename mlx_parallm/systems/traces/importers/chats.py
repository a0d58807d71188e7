"""Conversations, one a line: chats of OpenAI's, Anthropic's, Gemini's and ShareGPT's form, ATIF,
ART's trajectories, verifiers' traces."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.errors import RequestError, TraceError
from mlx_parallm.execution.chat_messages import weight_of
from mlx_parallm.systems.traces.importers.dialects import (
    answers_of,
    chat_messages,
    converted,
    linked,
    tool_definitions,
)
from mlx_parallm.systems.traces.importers.endings import marked, not_sampled
from mlx_parallm.systems.traces.importers.links import Forest
from mlx_parallm.systems.traces.importers.report import ImportReport, made, objects, whole_json
from mlx_parallm.systems.traces.schema import Json, add_step, as_context, present, without
from mlx_parallm.systems.traces.trace import Trace, new_trace, parse_trace

LISTS = ("messages", "contents", "conversations", "conversation")
SYSTEM = ("system", "systemInstruction", "system_instruction", "system_prompt")
REQUESTS = ("request", "body", "params")
NO_MODEL = "{}: never trained on"


# ---------------------------------------------------------------------- chats


def openai_chat(path: Path, report: ImportReport) -> Iterator[Trace]:
    """Conversations: `messages` and `tools` as OpenAI's or Anthropic's API takes them, Gemini's
    `contents`, ShareGPT's `conversations`; or a log line that has such a `request` and its
    `response`.

    An assistant message of weight 0 is not trained on. Other columns are kept in `extra.columns`.
    """
    for place, row in objects(path, report):
        yield from made(report, place, partial(openai_conversations, row, place, report))


def is_conversation(row: Mapping[str, Any]) -> bool:
    return _list_of(row) is not None or _request_of(row) is not None


def _list_of(row: Mapping[str, Any]) -> str | None:
    return next((key for key in LISTS if isinstance(row.get(key), list)), None)


def _request_of(row: Mapping[str, Any]) -> str | None:
    """The key of what an API was asked, in a log line that has it beside the answer."""
    return next(
        (
            key
            for key in REQUESTS
            if isinstance(row.get(key), dict) and _list_of(row[key]) is not None
        ),
        None,
    )


def openai_conversations(row: Json, place: str, report: ImportReport) -> list[Trace]:
    """A trace for each answer that the line holds beside its messages; one trace where it holds
    none."""
    columns = dict(row)
    body = columns
    if _list_of(row) is None and (request := _request_of(row)) is not None:
        body = columns[request] = dict(row[request])
    name = _list_of(body)
    if name is None:
        raise TraceError("no list 'messages'")
    listed = [*_system(body), *body.pop(name)]
    answers = _answers(columns, listed)
    report.expect(place, [*listed, *(answer for answer, _ in answers)])
    tools = tool_definitions(body.pop("tools", None), body.pop("functions", None))
    prompt = [_weighed(message, report, place) for message in chat_messages(listed)]
    if answers:
        prompt = [as_context(each) for each in prompt]
    session = str(row.get("id") or place)
    traces = []
    searched = {"search_results": (_holder(columns) or {}).get("search_results")}
    given_answers = [
        [_weighed(m, report, place, about, searched) for m in converted(answer)]
        for answer, about in answers
    ]
    for number, answer_messages in enumerate(given_answers or [list[Json]()], 1):
        trace = new_trace(
            linked([*prompt, *answer_messages]),
            session_id=session,
            source="openai-chat",
            tools=tools,
            columns={key: value for key, value in columns.items() if value != {}} or None,
            license=row.get("license"),
            untrainable="the call failed" if row.get("error") else None,
        )
        trace.trajectory_id = session if number == 1 else f"{session}#{number}"
        traces.append(trace)
    return traces


def _system(body: Json) -> list[Json]:
    """Take the system prompt that is beside the messages: text, blocks, or Gemini's object
    of parts."""
    key = next(
        (key for key in SYSTEM if isinstance(body.get(key), str | list | dict) and body[key]), None
    )
    if key is None:
        return []
    value = body.pop(key)
    if isinstance(value, dict):
        return [{**value, "role": "system"}]
    return [{"role": "system", "content": value}]


def _answers(
    columns: Mapping[str, Any], listed: Sequence[Any]
) -> list[tuple[Json, Mapping[str, Any]]]:
    """The answers beside the messages, each with what says how its call ended. They stay among
    the columns too."""
    if (
        listed
        and isinstance(listed[-1], Mapping)
        and listed[-1].get("role") in ("assistant", "model")
    ):
        return []
    return list(answers_of(_holder(columns)))


def _holder(columns: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what holds an API's answer: the log line, its `response`, or that one's `body`."""
    response = columns.get("response")
    inner = response.get("body") if isinstance(response, Mapping) else None
    held = (columns, response, inner)
    return next((each for each in held if next(answers_of(each), None) is not None), None)


def _weighed(message: Json, report: ImportReport, place: str, *about: Mapping[str, Any]) -> Json:
    """Mark an answer that is not to be trained on."""
    if message.get("role") != "assistant":
        return message
    if (reason := not_sampled(message, *about)) is not None:
        report.remark(place, NO_MODEL.format(reason))
        return marked(message, reason)
    try:
        is_context = weight_of(message, "a message") == 0
    except RequestError as error:
        raise TraceError(str(error)) from error
    return as_context(message) if is_context else message


# ---------------------------------------------------------------------- ATIF


def atif(path: Path, report: ImportReport) -> Iterator[Trace]:
    """One trajectory a line, or a file that is one (`trajectory.json`); Harbor's `result.json`
    beside it has the rewards. Traces are imported unchanged."""
    rewards = (
        _harbor_rewards(path.with_name("result.json")) if path.name == "trajectory.json" else {}
    )
    for place, data in objects(path, report):

        def make(place: str = place, data: Json = data) -> list[Trace]:
            if isinstance(data.get("steps"), list):
                report.expect(place, data["steps"])
            trace = parse_trace(data)
            if rewards:
                trace.note(rewards=rewards)
            return [trace]

        yield from made(report, place, make)


def _harbor_rewards(path: Path) -> Json:
    result = whole_json(path) if path.is_file() else None
    verified = result.get("verifier_result") if isinstance(result, dict) else None
    rewards = verified.get("rewards") if isinstance(verified, dict) else None
    return _rewards(rewards if isinstance(rewards, dict) else {})


def _rewards(values: Mapping[str, Any]) -> Json:
    """Rewards of numbers, or of objects with `score` and `weight`. Others are not rewards."""
    made: Json = {}
    for name, value in values.items():
        score, weight = (
            (value.get("score"), value.get("weight", 1.0))
            if isinstance(value, Mapping)
            else (value, 1.0)
        )
        if isinstance(score, int | float) and isinstance(weight, int | float):
            made[name] = {"score": float(score), "weight": float(weight)}
    return made


# ---------------------------------------------------------------------- ART


def art(path: Path, report: ImportReport) -> Iterator[Trace]:
    """ART's trajectories, or groups of them, one a line. A Choice was sampled; other assistant
    messages were not."""
    for place, row in objects(path, report):

        def make(place: str = place, row: Json = row) -> list[Trace]:
            listed = row.get("trajectories")
            if not isinstance(listed, list):
                return _art_traces(row, place, None, report, place)
            if not listed:
                raise TraceError("a group without trajectories")
            rest = without(row, "trajectories")
            return [
                trace
                for number, entry in enumerate(listed)
                for trace in _art_traces(
                    entry, f"{place}#{number}", place, report, place, group=rest or None
                )
            ]

        yield from made(report, place, make)


_ART_LISTS = ("messages_and_choices", "messages")
_ART = ("messages_and_choices", "tools", "reward", "final_policy_version", "metrics", "metadata")


def _art_list(entry: Any) -> list[Any]:
    listed = (
        entry.get("messages_and_choices", entry.get("messages"))
        if isinstance(entry, Mapping)
        else None
    )
    if not isinstance(listed, list):
        raise TraceError("no list 'messages_and_choices'")
    return listed


def _art_traces(
    entry: Any, name: str, group_id: str | None, report: ImportReport, expect: str, **extra: Any
) -> list[Trace]:
    """A trajectory, and each of its `additional_histories`, which have its reward."""
    histories = entry.get("additional_histories") if isinstance(entry, Mapping) else None
    if not isinstance(histories, list) or not histories:
        return [_art_trace(entry, name, group_id, report, expect, **extra)]
    main = without(entry, "additional_histories")
    shared = without(main, *_ART_LISTS, "tools")
    traces = [_art_trace(main, name, group_id, report, expect, **extra)]
    for number, history in enumerate(histories, 1):
        if not isinstance(history, Mapping):
            raise TraceError("an additional history that is not an object")
        trace = _art_trace({**shared, **history}, name, group_id, report, expect, **extra)
        trace.trajectory_id = f"{name}+{number}"
        traces.append(trace)
    return traces


def _art_trace(
    entry: Mapping[str, Any],
    name: str,
    group_id: str | None,
    report: ImportReport,
    expect: str,
    **extra: Any,
) -> Trace:
    listed = _art_list(entry)
    report.expect(expect, listed)
    messages: list[Json] = []
    for item in listed:
        if isinstance(item.get("message"), dict):  # a Choice
            rest = present(item, "message")
            message = present(item["message"])
            message.setdefault("content", None)
            answers = [
                add_step(each, extra={"choice": rest} if rest else {})
                for each in converted(message)
            ]
            messages += [_weighed(each, report, name, item) for each in answers]
        else:
            trainable = item.get("trainable")
            for message in converted(without(item, "trainable")):
                messages.append(
                    _weighed(message, report, name) if trainable else as_context(message)
                )
    reward = entry.get("reward")
    used = (*_ART, "messages") if "messages_and_choices" not in entry else _ART
    return new_trace(
        linked(messages),
        session_id=name,
        source="art",
        tools=tool_definitions(entry.get("tools")),
        group_id=group_id,
        rewards={"reward": {"score": float(reward), "weight": 1.0}} if reward is not None else None,
        policy_version=entry.get("final_policy_version"),
        metrics=entry.get("metrics") or None,
        metadata=entry.get("metadata") or None,
        columns=present(entry, *used) or None,
        **extra,
    )


# ---------------------------------------------------------------------- verifiers


def verifiers(path: Path, report: ImportReport) -> Iterator[Trace]:
    """verifiers' `traces.jsonl` (version 1: graphs of messages, one trace for each leaf), and
    rows of its evaluations with `prompt` and `completion`."""
    for place, row in objects(path, report):

        def make(place: str = place, row: Json = row) -> list[Trace]:
            listed = row.get("traces")
            entries = listed if isinstance(listed, list) else [row]
            rest = without(row, "traces") if isinstance(listed, list) else {}
            traces: list[Trace] = []
            for entry in entries:
                if not isinstance(entry, Mapping):
                    raise TraceError("a trace that is not an object")
                traces += (
                    _graph(entry, place, report)
                    if "nodes" in entry
                    else [_evaluated(entry, place, report)]
                )
            if not traces:
                raise TraceError("no messages")
            for trace in traces:
                trace.note(episode=rest or None)
            return traces

        yield from made(report, place, make)


def _ended(entry: Mapping[str, Any]) -> Json:
    """How a rollout of verifiers ended, as a record of its last answer."""
    condition = str(entry.get("stop_condition") or "").lower()
    is_cut = bool(entry.get("is_truncated")) or any(word in condition for word in _CUT_WORDS)
    return {"is_truncated": is_cut, "error": entry.get("error") or entry.get("errors")}


_CUT_WORDS = ("trunc", "too_long", "timeout", "timed_out", "abort", "cancel", "error")


def _evaluated(entry: Mapping[str, Any], place: str, report: ImportReport) -> Trace:
    prompt, completion = entry.get("prompt"), entry.get("completion")
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise TraceError("neither 'nodes' nor lists 'prompt' and 'completion'")
    report.expect(place, [*prompt, *completion])
    messages = list(map(as_context, chat_messages(prompt)))
    answered = [_weighed(message, report, place) for message in chat_messages(completion)]
    if answered and answered[-1].get("role") == "assistant":
        answered[-1] = _weighed(answered[-1], report, place, _ended(entry))
    reward, info = entry.get("reward"), entry.get("info")
    rest = without(entry, "prompt", "completion", "reward")
    return new_trace(
        linked([*messages, *answered]),
        session_id=f"{place}",
        source="verifiers",
        tools=tool_definitions(info.get("oai_tools") if isinstance(info, dict) else None),
        task=entry.get("task"),
        group_id=None if entry.get("example_id") is None else str(entry["example_id"]),
        rewards={"reward": {"score": float(reward), "weight": 1.0}} if reward is not None else None,
        columns=rest or None,
    )


def _graph(entry: Mapping[str, Any], place: str, report: ImportReport) -> list[Trace]:
    nodes = entry["nodes"]
    if not isinstance(nodes, list) or not all(isinstance(node, Mapping) for node in nodes):
        raise TraceError("'nodes' is not a list of objects")
    seen = report.expect(place, nodes)
    parents = {number: node.get("parent") for number, node in enumerate(nodes)}
    whole = {
        number: parent if _is_number(parent, nodes) else None for number, parent in parents.items()
    }
    forest = Forest(whole)
    rewards = entry.get("rewards")
    name = str(entry.get("id") or place)
    task = entry["task"] if isinstance(entry.get("task"), Mapping) else {}
    used = ("nodes", "rewards", "tools")
    rest = present(entry, *used)
    scores = _rewards(rewards) if isinstance(rewards, Mapping) else {}
    is_plain = isinstance(rewards, Mapping) and all(
        not value
        or (
            name in scores
            and (not isinstance(value, Mapping) or not set(value) - {"score", "weight"})
        )
        for name, value in rewards.items()
    )
    if rewards and not is_plain:
        rest["rewards"] = rewards
    claimed: set[int] = set()
    traces: list[Trace] = []
    for path in forest.branches():
        lost = next(
            (parents[at] for at in path if parents[at] is not None and whole[at] is None), None
        )
        if path[0] in forest.circles:
            lost = parents[path[0]]
        messages = _graph_messages(nodes, path, claimed)
        claimed |= set(path)
        ended = _ended(entry)
        if messages[-1].get("role") == "assistant" and any(ended.values()):
            messages[-1] = add_step(messages[-1], extra={"ended": ended})
        listed = entry.get("tools") or []
        node_tools = nodes[path[0]].get("tools")
        trace = new_trace(
            linked(messages),
            session_id=name if not traces else f"{name}#{len(traces) + 1}",
            source="verifiers",
            source_id=name,
            tools=tool_definitions(node_tools or listed or None),
            task=task.get("key"),
            group_id=task.get("hash"),
            rewards=scores or None,
            columns={
                **rest,
                **({"tools": listed} if node_tools and listed and node_tools != listed else {}),
            }
            or None,
            untrainable=None
            if lost is None
            else "its history is not whole: a parent is missing, or in a circle",
        )
        trace.session_id = name
        traces.append(trace)
        if lost is not None:
            report.remark(place, f"{trace.get('untrainable')}; nothing of its trace is trained on")
    for at in range(len(nodes)) if forest.beyond else ():
        if at not in claimed:
            report.leave(place, seen + at, "a branch of a graph with too many branches")
    return traces


def _is_number(parent: Any, nodes: Sequence[Any]) -> bool:
    return isinstance(parent, int) and not isinstance(parent, bool) and 0 <= parent < len(nodes)


_TOKENS = ("token_ids", "mask", "logprobs")


def _graph_messages(
    nodes: Sequence[Mapping[str, Any]], path: Sequence[int], claimed: set[int]
) -> list[Json]:
    """Each node's tokens are what it adds; an answer's sampled part is where its mask is true."""
    messages: list[Json] = []
    before: list[int] = []
    for index in path:
        node = nodes[index]
        ids, mask = node.get("token_ids") or [], node.get("mask") or []
        message = present(node["message"])
        kept: Json = present(node, "message")
        if _is_number(kept.get("parent"), nodes):
            del kept["parent"]
        if index == path[0]:
            kept.pop("tools", None)
        if isinstance(kept.get("sampled"), bool):
            del kept["sampled"]
        step: Json = {}
        if message.get("role") == "assistant":
            message.setdefault("content", None)
            if (state := message.pop("provider_state", None)) is not None:
                kept["provider_state"] = state
            if message.get("tool_calls"):
                message["tool_calls"] = [_function_call(call) for call in message["tool_calls"]]
            if not node.get("sampled") or index in claimed:
                step["is_copied_context"] = True
            elif True in mask and len(mask) == len(ids):
                first, sampled = mask.index(True), sum(mask)
                metrics = {
                    "prompt_token_ids": before + ids[:first],
                    "completion_token_ids": ids[first : first + sampled],
                    "logprobs": node.get("logprobs") or [],
                }
                step |= {"metrics": metrics, "llm_call_count": 1}
                kept = without(kept, *_TOKENS)
        before = before + ids
        parts = converted(message)
        position = next(
            (n for n, each in enumerate(parts) if each.get("role") == message.get("role")), 0
        )
        parts[position] = add_step(parts[position], extra={"node": kept} if kept else {}, **step)
        is_answer = parts[position].get("role") == "assistant" and "metrics" not in step
        reason = not_sampled(message, node) if is_answer else None
        messages += [
            marked(each, reason) if reason and n == position else each
            for n, each in enumerate(parts)
        ]
    return messages


def _function_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or "function" in call or "name" not in call:
        return call
    rest = without(call, "id", "name", "arguments", "type")
    function = {"name": call["name"], "arguments": call.get("arguments", "{}")}
    return {"id": call.get("id"), "type": "function", "function": function, **rest}
