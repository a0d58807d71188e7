"""How an answer ended, in the words of every API: only a model's own end is learned."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.systems.traces.importers.endings import REASONS, WORDS, not_sampled
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.reading import read_traces
from mlx_parallm.systems.traces.trace import new_trace
from tests.traces.messages import assistant, data_set

Json = dict[str, Any]
CUT = [
    "length",
    "max_tokens",
    "max_output_tokens",
    "model_length",
    "token_limit",
    "content_filter",
    "safety",
    "recitation",
    "refusal",
    "error",
    "error_toxic",
    "timeout",
    "timed_out",
    "abort",
    "aborted",
    "cancelled",
    "user_cancel",
    "pause_turn",
    "incomplete",
    "insufficient_system_resource",
    "load",
    "max_turns",
    "malformed_function_call",
    "other",
]
ANSWER: Json = assistant("the beg")


def spellings(word: str) -> list[str]:
    return [
        word,
        word.upper(),
        word.replace("_", "-"),
        f"FinishReason.{word.upper()}",
        f"FINISH_REASON_{word.upper()}",
    ]


def test_a_reason_is_the_models_own_or_cuts_the_answer_however_it_is_spelled() -> None:
    for name in REASONS:
        for word in WORDS["own_ends"]:
            assert [not_sampled(ANSWER, {name: s}) for s in spellings(word)] == [None] * 5, word
        for word in CUT:
            for spelled in spellings(word):
                assert not_sampled(ANSWER, {name: spelled}), spelled
                assert not_sampled({**ANSWER, name: spelled}), spelled
        for nothing in (None, "", "unknown", "null", "FINISH_REASON_UNSPECIFIED", 128009):
            assert not_sampled(ANSWER, {name: nothing}) is None
    # vLLM's stop string, or the token's id
    assert not_sampled(ANSWER, {"finish_reason": "stop", "stop_reason": "###"}) is None


@pytest.mark.parametrize(
    "about",
    [
        {"status": "incomplete"},
        {"status": "in_progress"},
        {"incomplete_details": {"reason": "max_output_tokens"}},
        {"is_truncated": True},
        {"error": {"type": "timeout"}},
        {
            "content": [
                {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation"}]}
            ]
        },
        {"annotations": [{"type": "url_citation", "url_citation": {"url": "x"}}]},
        {"annotations": [{"type": "file_citation"}]},
        {"groundingMetadata": {"webSearchQueries": ["q"]}},
        {"search_results": [{"url": "x"}]},
        {"citations": ["https://x.example"]},
        {"metadata": {"finish_reason": "length"}},
        {"response_metadata": {"finishReason": "MAX_TOKENS"}},
        {"generation_info": {"truncated": True}},
    ],
)
def test_other_signs_that_an_answer_is_not_whole(about: Json) -> None:
    assert not_sampled(ANSWER, about)
    assert not_sampled({**about, **ANSWER}) or "content" in about


@pytest.mark.parametrize(
    ("messages", "learned"),
    [
        (["u", "a:one", "u:[Request interrupted by user]", "u", "a:two"], ["two"]),
        (["u", "a:one", "u:<turn_aborted>\n…</turn_aborted>", "a:two"], ["two"]),
        (["u", "a:one\n\n[Response interrupted by user]", "u", "a:two"], ["two"]),
        (["u", "a:one", "a:API Error: Request timed out.", "u", "a:two"], ["two"]),
        (
            ["u", "c:1", "t:1", "u:[Request interrupted by user for tool use]", "a:two"],
            ["f", "two"],
        ),
        (["u", "c:1", "u:[Request interrupted by user for tool use]", "u", "a:two"], ["two"]),
        (["u", "a:zero", "u", "c:1", "a:two", "u", "a:three"], ["zero", "f"]),
        (["u", "c:1", "c:2", "t:2", "t:1", "a:two"], ["f", "f", "two"]),
        (
            ["u", "a:one", "u:What does [Request interrupted by user] mean?", "a:two"],
            ["one", "two"],
        ),
    ],
)
def test_what_follows_an_answer_says_whether_it_was_whole(
    messages: list[str], learned: list[str]
) -> None:
    """u: the user, a: an answer, c: a call, t: its result."""
    chat: list[Json] = []
    for each in messages:
        kind, _, text = each.partition(":")
        if kind == "c":
            function = {"name": "f", "arguments": "{}"}
            call = {"id": text, "type": "function", "function": function}
            chat.append(assistant(None, tool_calls=[call]))
        elif kind == "t":
            chat.append({"role": "tool", "tool_call_id": text, "content": "r"})
        else:
            chat.append({"role": {"u": "user", "a": "assistant"}[kind], "content": text or "q"})
    trace = new_trace(chat, session_id="s", source="test")
    made = data_set([trace])
    found = [
        message["content"] or message["tool_calls"][0]["function"]["name"]
        for message in made.train[0]["messages"]
        if message["role"] == "assistant" and message.get("weight") != 0
    ]
    assert found == learned
    sampled = sum(message["role"] == "assistant" for message in chat)
    assert made.answers.total() == sampled - len(found), json.dumps(dict(made.answers))


@pytest.mark.parametrize(
    ("about", "is_cut"),
    [
        ({"finish_reason": "length"}, True),
        ({"truncated": True}, True),
        ({"metadata": {"stop_reason": "max_tokens"}}, True),
        ({"finish_reason": "stop", "metadata": {"status": "failed"}}, False),
        ({"status": "failed", "metadata": {"judge": "error"}}, False),
    ],
)
def test_a_row_says_how_its_last_answer_ended(tmp_path: Path, about: Json, *, is_cut: bool) -> None:
    """What it says of its task is not about the answer."""
    path = tmp_path / "chats.jsonl"
    turns = [("user", "q"), ("assistant", "one"), ("user", "r"), ("assistant", "the beg")]
    messages = [{"role": role, "content": text} for role, text in turns]
    sayers = [{"from": role, "value": text} for role, text in turns]
    rows = ({"messages": messages, **about}, {"conversations": sayers, **about})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for trace in read_traces(path, ImportReport()):
        sampled = [step.sampled for step in trace.steps if step.source == "agent"]
        assert sampled == [True, not is_cut]


def test_a_weight_of_a_log_is_obeyed_or_refused(tmp_path: Path) -> None:
    """Under the names of many programs; a line with another weight is skipped with the reason."""
    report = ImportReport()
    fields: list[tuple[str, Any]] = [
        ("weight", 0),
        ("train", False),
        ("loss", False),
        ("trainable", 0),
        ("loss_weight", 0.0),
        ("weight", "0"),
        ("weight", 0.5),
    ]
    said = [
        [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"} | {k: v}] for k, v in fields
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in said))
    traces = list(read_traces(path, report))
    assert len(traces) == 5 and not any(step.sampled for t in traces for step in t.steps)
    assert len(report.lines.left_out) == 2
    assert all("a message.weight is" in reason for reason in report.lines.left_out)
