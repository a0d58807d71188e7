"""Conversations, one a line: chats of OpenAI's, Anthropic's, Gemini's and ShareGPT's form, ATIF,
ART's trajectories, verifiers' traces."""

from collections.abc import Iterator, Mapping, Sequence
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
from mlx_parallm.systems.traces.importers.endings import NEVER, ending_of, marked, not_sampled
from mlx_parallm.systems.traces.importers.links import Forest
from mlx_parallm.systems.traces.importers.report import ImportReport, by_line, whole_json
from mlx_parallm.systems.traces.schema import (
    Json,
    add_step,
    as_context,
    mapping,
    present,
    text_or_none,
    which,
    without,
)
from mlx_parallm.systems.traces.trace import Trace, new_trace, numbered, one_reward, parse_trace

LISTS = ("messages", "contents", "conversations", "conversation")
SYSTEM = ("system", "systemInstruction", "system_instruction", "system_prompt")
PROMPT = str | list | dict
REQUESTS = ("request", "body", "params")
LOST_PARENT = "its history is not whole: a parent is missing, or in a circle"
SEARCHED = ("search_results", "citations")  # what an API says that it found


# ---------------------------------------------------------------------- chats


def is_conversation(row: Mapping[str, Any]) -> bool:
    return which(row, LISTS, list) is not None or _request_of(row) is not None


def _request_of(row: Mapping[str, Any]) -> str | None:
    """The key of what an API was asked, in a log line that has it beside the answer."""
    requests = (key for key in REQUESTS if which(mapping(row.get(key)), LISTS, list) is not None)
    return next(requests, None)


def openai_conversations(row: Json, place: str, report: ImportReport) -> list[Trace]:
    """Conversations: `messages` and `tools` as OpenAI's or Anthropic's API takes them, Gemini's
    `contents`, ShareGPT's `conversations`; or a log line that has such a `request` and its
    `response`: a trace for each answer that it holds beside its messages.

    An assistant message of weight 0 is not trained on. Other columns are kept in `extra.columns`.
    """
    columns = dict(row)
    body = columns
    if which(row, LISTS, list) is None and (request := _request_of(row)) is not None:
        body = columns[request] = dict(row[request])
    name = which(body, LISTS, list)
    if name is None:
        raise TraceError("no list 'messages'")
    listed = [*_system(body), *body.pop(name)]
    answers = _answers(columns, listed)
    report.expect(place, [*listed, *(answer for answer, _ in answers)])
    tools = tool_definitions(body.pop("tools", None), body.pop("functions", None))
    chat = chat_messages(listed)
    ends = [] if answers else [ending_of(row)]  # of the last answer
    prompt = [_weighed(message, report, place) for message in chat[:-1]]
    prompt += [_weighed(message, report, place, *ends) for message in chat[-1:]]
    if answers:
        prompt = list(map(as_context, prompt))
    session = str(row.get("id") or place)
    searched = present({name: mapping(_holder(columns)).get(name) for name in SEARCHED})
    answer_messages = [
        [_weighed(m, report, place, about, searched) for m in converted(answer)]
        for answer, about in answers
    ]
    return [
        new_trace(
            linked([*prompt, *answered]),
            session_id=session,
            name=numbered(session, number),
            source="openai-chat",
            tools=tools,
            columns={key: value for key, value in columns.items() if value != {}} or None,
            license=row.get("license"),
            untrainable="the call failed" if row.get("error") else None,
        )
        for number, answered in enumerate(answer_messages or [[]], 1)
    ]


openai_chat = by_line(openai_conversations)


def _system(body: Json) -> list[Json]:
    """Take the system prompt that is beside the messages: text, blocks, or Gemini's object
    of parts."""
    key = next((each for each in SYSTEM if body.get(each) and which(body, [each], PROMPT)), None)
    if key is None:
        return []
    value = body.pop(key)
    fields = value if isinstance(value, dict) else {"content": value}
    return [{**fields, "role": "system"}]


def _answers(
    columns: Mapping[str, Any], listed: Sequence[Any]
) -> list[tuple[Json, Mapping[str, Any]]]:
    """The answers beside the messages, each with what says how its call ended. They stay among
    the columns too."""
    is_answered = listed and mapping(listed[-1]).get("role") in ("assistant", "model")
    return [] if is_answered else list(answers_of(_holder(columns)))


def _holder(columns: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what holds an API's answer: the log line, its `response`, or that one's `body`."""
    response = columns.get("response")
    held = (columns, response, mapping(response).get("body"))
    return next((each for each in held if next(answers_of(each), None) is not None), None)


def _weighed(message: Json, report: ImportReport, place: str, *about: Mapping[str, Any]) -> Json:
    """Mark an answer that is not to be trained on."""
    if message.get("role") != "assistant":
        return message
    if (reason := not_sampled(message, *about)) is not None:
        report.remark(place, NEVER.format(reason))
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
    rewards = _harbor_rewards(path) if path.name == "trajectory.json" else {}

    def trajectory(data: Json, place: str, report: ImportReport) -> list[Trace]:
        if isinstance(data.get("steps"), list):
            report.expect(place, data["steps"])
        trace = parse_trace(data)
        if rewards:
            trace.note(rewards=rewards)
        return [trace]

    return by_line(trajectory)(path, report)


def _harbor_rewards(path: Path) -> Json:
    path = path.with_name("result.json")
    result = whole_json(path) if path.is_file() else None
    return _rewards(mapping(mapping(mapping(result).get("verifier_result")).get("rewards")))


def _rewards(values: Mapping[str, Any]) -> Json:
    """Rewards of numbers, or of objects with `score` and `weight`. Others are not rewards."""
    made: Json = {}
    for name, value in values.items():
        score = mapping(value).get("score", value)
        weight = mapping(value).get("weight", 1.0)
        if isinstance(score, int | float) and isinstance(weight, int | float):
            made[name] = {"score": float(score), "weight": float(weight)}
    return made


# ---------------------------------------------------------------------- ART


def art_trajectories(row: Json, place: str, report: ImportReport) -> list[Trace]:
    """ART's trajectories, or groups of them. A Choice was sampled; other assistant messages were
    not."""
    listed = row.get("trajectories")
    if not isinstance(listed, list):
        return list(_art_traces(row, place, place, report))
    if not listed:
        raise TraceError("a group without trajectories")
    about = {"group_id": place, "group": without(row, "trajectories") or None}
    named = ((f"{place}#{number}", entry) for number, entry in enumerate(listed))
    return [
        trace for name, entry in named for trace in _art_traces(entry, name, place, report, **about)
    ]


art = by_line(art_trajectories)
_ART_LISTS = ("messages_and_choices", "messages")
_ART = ("messages_and_choices", "tools", "reward", "final_policy_version", "metrics", "metadata")


def _art_traces(
    entry: Any, name: str, place: str, report: ImportReport, **about: Any
) -> Iterator[Trace]:
    """A trajectory, and each of its `additional_histories`, which have its reward."""
    histories = mapping(entry).get("additional_histories")
    if not isinstance(histories, list) or not histories:
        yield _art_trace(entry, name, name, place, report, **about)
        return
    main = without(entry, "additional_histories")
    shared = without(main, *_ART_LISTS, "tools")
    yield _art_trace(main, name, name, place, report, **about)
    for number, history in enumerate(histories, 1):
        if not isinstance(history, Mapping):
            raise TraceError("an additional history that is not an object")
        yield _art_trace({**shared, **history}, f"{name}+{number}", name, place, report, **about)


def _art_trace(
    entry: Any, name: str, session: str, place: str, report: ImportReport, **about: Any
) -> Trace:
    listed = mapping(entry).get("messages_and_choices", mapping(entry).get("messages"))
    if not isinstance(listed, list):
        raise TraceError("no list 'messages_and_choices'")
    report.expect(place, listed)
    messages: list[Json] = []
    for item in listed:
        if isinstance(item.get("message"), dict):  # a Choice
            rest = present(item, "message")
            more = {"choice": rest} if rest else {}
            message = {"content": None, **present(item["message"])}
            answers = [add_step(each, extra=more) for each in converted(message)]
            messages += [_weighed(each, report, session, item) for each in answers]
            continue
        made = converted(without(item, "trainable"))
        if item.get("trainable"):
            messages += [_weighed(message, report, session) for message in made]
        else:
            messages += map(as_context, made)
    return new_trace(
        linked(messages),
        session_id=session,
        name=name,
        source="art",
        tools=tool_definitions(entry.get("tools")),
        rewards=one_reward(entry.get("reward")),
        policy_version=entry.get("final_policy_version"),
        metrics=entry.get("metrics") or None,
        metadata=entry.get("metadata") or None,
        columns=present(entry, *_ART, which(entry, _ART_LISTS) or "") or None,
        **about,
    )


# ---------------------------------------------------------------------- verifiers


def verifiers_traces(row: Json, place: str, report: ImportReport) -> list[Trace]:
    """verifiers' `traces.jsonl` (version 1: graphs of messages, one trace for each leaf), and
    rows of its evaluations with `prompt` and `completion`."""
    entries, rest = [row], dict[str, Any]()
    if isinstance(row.get("traces"), list):
        entries, rest = row["traces"], without(row, "traces")
    traces: list[Trace] = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise TraceError("a trace that is not an object")
        traces += (_graph if "nodes" in entry else _evaluated)(entry, place, report)
    if not traces:
        raise TraceError("no messages")
    for trace in traces:
        trace.note(episode=rest or None)
    return traces


verifiers = by_line(verifiers_traces)


def _ended(entry: Mapping[str, Any]) -> Json:
    """How a rollout of verifiers ended, as a record of its last answer."""
    condition = str(entry.get("stop_condition") or "").lower()
    is_cut = bool(entry.get("is_truncated")) or any(word in condition for word in _CUT_WORDS)
    return {"is_truncated": is_cut, "error": entry.get("error") or entry.get("errors")}


_CUT_WORDS = ("trunc", "too_long", "timeout", "timed_out", "abort", "cancel", "error")


def _evaluated(entry: Mapping[str, Any], place: str, report: ImportReport) -> list[Trace]:
    prompt, completion = entry.get("prompt"), entry.get("completion")
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise TraceError("neither 'nodes' nor lists 'prompt' and 'completion'")
    report.expect(place, [*prompt, *completion])
    messages = list(map(as_context, chat_messages(prompt)))
    answered = [_weighed(message, report, place) for message in chat_messages(completion)]
    if answered and answered[-1].get("role") == "assistant":
        answered[-1] = _weighed(answered[-1], report, place, _ended(entry))
    info = entry.get("info")
    trace = new_trace(
        linked([*messages, *answered]),
        session_id=place,
        source="verifiers",
        tools=tool_definitions(info.get("oai_tools") if isinstance(info, dict) else None),
        task=entry.get("task"),
        group_id=text_or_none(entry.get("example_id")),
        rewards=one_reward(entry.get("reward")),
        columns=without(entry, "prompt", "completion", "reward") or None,
    )
    return [trace]


def _graph(entry: Mapping[str, Any], place: str, report: ImportReport) -> list[Trace]:
    nodes = entry["nodes"]
    if not isinstance(nodes, list) or not all(isinstance(node, Mapping) for node in nodes):
        raise TraceError("'nodes' is not a list of objects")
    seen = report.expect(place, nodes)
    parents = {number: node.get("parent") for number, node in enumerate(nodes)}
    whole = {number: _node_number(parent, nodes) for number, parent in parents.items()}
    forest, name = Forest(whole), str(entry.get("id") or place)
    task, scores = mapping(entry.get("task")), _rewards(mapping(entry.get("rewards")))
    ended, listed = _ended(entry), entry.get("tools") or []
    rest = present(entry, "nodes", "rewards", "tools")
    rest |= _unread_rewards(entry.get("rewards"), scores)
    claimed: set[int] = set()
    traces: list[Trace] = []
    for path in forest.branches():
        is_lost = path[0] in forest.circles or any(
            parents[at] is not None and whole[at] is None for at in path
        )
        messages = _graph_messages(nodes, path, claimed)
        claimed |= set(path)
        if messages[-1].get("role") == "assistant" and any(ended.values()):
            messages[-1] = add_step(messages[-1], extra={"ended": ended})
        tools = nodes[path[0]].get("tools") or listed
        columns = rest | ({"tools": listed} if listed and tools != listed else {})
        trace = new_trace(
            linked(messages),
            session_id=name,
            name=numbered(name, len(traces) + 1),
            source="verifiers",
            source_id=name,
            tools=tool_definitions(tools or None),
            task=task.get("key"),
            group_id=task.get("hash"),
            rewards=scores or None,
            columns=columns or None,
            untrainable=LOST_PARENT if is_lost else None,
        )
        traces.append(trace)
        if is_lost:
            report.remark(place, f"{LOST_PARENT}; nothing of its trace is trained on")
    for at in range(len(nodes)) if forest.beyond else ():
        if at not in claimed:
            report.leave(place, seen + at, "a branch of a graph with too many branches")
    return traces


def _unread_rewards(rewards: Any, scores: Json) -> Json:
    """Rewards that hold more than scores and weights, as a column."""
    is_plain = isinstance(rewards, Mapping) and all(
        not value or (name in scores and not set(mapping(value)) - {"score", "weight"})
        for name, value in rewards.items()
    )
    return {"rewards": rewards} if rewards and not is_plain else {}


def _node_number(parent: Any, nodes: Sequence[Any]) -> int | None:
    is_one = isinstance(parent, int) and not isinstance(parent, bool) and 0 <= parent < len(nodes)
    return parent if is_one else None


def _graph_messages(
    nodes: Sequence[Mapping[str, Any]], path: Sequence[int], claimed: set[int]
) -> list[Json]:
    """Each node's tokens are what it adds; an answer's sampled part is where its mask is true."""
    messages: list[Json] = []
    before: list[int] = []
    for index in path:
        node = nodes[index]
        message, kept = present(node["message"]), present(node, "message")
        if _node_number(kept.get("parent"), nodes) is not None:
            del kept["parent"]
        if index == path[0]:
            kept.pop("tools", None)
        if isinstance(kept.get("sampled"), bool):
            del kept["sampled"]
        step: Json = {}
        if message.get("role") == "assistant":
            step = _take_answer(
                message, kept, before, is_new=index not in claimed and node.get("sampled")
            )
        before = before + (node.get("token_ids") or [])
        parts = converted(message)
        roles = [each.get("role") for each in parts]
        at = roles.index(message.get("role")) if message.get("role") in roles else 0
        parts[at] = add_step(parts[at], extra={"node": kept} if kept else {}, **step)
        is_answer = roles[at] == "assistant" and "metrics" not in step
        if is_answer and (reason := not_sampled(message, node)):
            parts[at] = marked(parts[at], reason)
        messages += parts
    return messages


def _take_answer(message: Json, node: Json, before: list[int], *, is_new: Any) -> Json:
    """Return the fields of an answer's step. What they hold, `node` loses."""
    message.setdefault("content", None)
    if (state := message.pop("provider_state", None)) is not None:
        node["provider_state"] = state
    if not is_new:
        return {"is_copied_context": True}
    ids, mask = node.get("token_ids") or [], node.get("mask") or []
    if True not in mask or len(mask) != len(ids):
        return {}
    first, sampled = mask.index(True), sum(mask)
    metrics = {
        "prompt_token_ids": before + ids[:first],
        "completion_token_ids": ids[first : first + sampled],
        "logprobs": node.get("logprobs") or [],
    }
    for name in ("token_ids", "mask", "logprobs"):
        node.pop(name, None)
    return {"metrics": metrics, "llm_call_count": 1}
