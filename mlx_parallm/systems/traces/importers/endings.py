"""How an answer ended, by what its log says: only what a model said itself, to its own end, is
learned.

Asked by every importer (`not_sampled`, of the lines around an answer) and by the rows of `build`
(`cut_by_what_follows`, `answered_without`, of the conversation), so it holds for every format.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from mlx_parallm.systems.traces.schema import WORDS, Json, add_step, mapping, text_of, which

PROGRAM_TEXT = re.compile(
    r"\s*(\[Request interrupted by user|API Error(:| \(|$)|Claude AI usage limit reached"
    r"|No response requested\.\s*$"
    r"|Prompt is too long\s*$|Credit balance is too low|Invalid API key ·|\(no content\)\s*$)"
)
"""Text that agents write in the model's place."""
INTERRUPTION = re.compile(
    r"\s*(\[(Request|Response) (interrupted|cancell?ed|aborted)|<turn_aborted>)", re.IGNORECASE
)
"""Text that agents write in the user's place when they stop an answer."""
BROKEN_OFF = re.compile(
    r"\[(Request|Response) (interrupted|cancell?ed|aborted)[^\]]*\]\s*$", re.IGNORECASE
)
"""Text that agents put behind the beginning of an answer."""
REASONS, CUT_FLAGS = tuple(WORDS["reasons"]), tuple(WORDS["cut_flags"])
ABOUT = tuple(WORDS["about_answers"])
PROGRAM = "an answer that a program wrote in the model's place"
HIDDEN_SEARCH = "an answer that rests on a search of the API, which the log does not hold"
OWN_CALL = "a call that the API makes itself"
INTERRUPTED = "an answer that was interrupted"
BROKEN = "an answer that broke off in an error"
NEVER = "{}: never trained on"
_ORDINARY = (None, "function", "custom", "tool_use", "tool_call", "function_call")


def not_sampled(message: Mapping[str, Any], *about: Mapping[str, Any]) -> str | None:
    """Return why an answer is not a model's own whole one: a program wrote it in the model's
    place, the call failed, it was cut, or it rests on what the log does not hold. None: it is.

    Args:
        about: further objects that say how the call went: a line, a choice, an API's message.
    """
    for record in (message, *about):
        if record.get("model") == "<synthetic>" or record.get("isApiErrorMessage"):
            return PROGRAM
        if record.get("error") or record.get("type") == "error":
            return "an answer of a call that failed"
        if (reason := _cut(record)) is not None:
            return reason
        if _searched(record):
            return HIDDEN_SEARCH
    if _is_program(message):
        return PROGRAM
    return INTERRUPTED if BROKEN_OFF.search(text_of(message.get("content"))) else None


def ends_by_itself(*about: Mapping[str, Any]) -> bool:
    """Whether a record says that the model ended the answer."""
    return any(_reason(record) in WORDS["own_ends"] for record in about)


def _reason(record: Mapping[str, Any]) -> str:
    """The first reason that a record names; "": none. vLLM's `stop_reason` beside
    `finish_reason` is a stop string."""
    words = (_word(record.get(name)) for name in REASONS)
    return next((word for word in words if word not in WORDS["says_nothing"]), "")


def _word(value: Any) -> str:
    """A reason as programs spell it: "MAX_TOKENS", "max-tokens", "FinishReason.MAX_TOKENS"."""
    if not isinstance(value, str):
        return ""
    return re.sub(r"[\s-]+", "_", value.strip().rpartition(".")[2].lower()).removeprefix(
        "finish_reason_"
    )


def _cut(record: Mapping[str, Any]) -> str | None:
    if (word := _reason(record)) and word not in WORDS["own_ends"]:
        return f"an answer that ended with {word!r}"[:100]
    if reason := mapping(record.get("incomplete_details")).get("reason"):
        return f"an answer that ended with {_word(reason)!r}"[:100]
    if _word(record.get("status")) in WORDS["unfinished"]:
        return f"an answer whose status is {_word(record['status'])!r}"
    if flag := next((name for name in CUT_FLAGS if record.get(name) is True), None):
        return f"an answer that is marked as {flag!r}"
    inner = (mapping(record.get(name)) for name in ABOUT)
    return next(filter(None, map(_cut, filter(None, inner))), None)


def ending_of(row: Mapping[str, Any]) -> Json:
    """Return what a row says of how its last answer ended; its other fields are about all of it."""
    names = (*REASONS, *CUT_FLAGS, "incomplete_details")
    kept = [mapping(each) for each in (row, *map(row.get, ABOUT))]
    return {name: record[name] for record in reversed(kept) for name in names if name in record}


def _searched(record: Mapping[str, Any]) -> bool:
    """Whether an API has searched for an answer without saying what it found."""
    content = record.get("content")
    held = [record, *map(mapping, content)] if isinstance(content, list) else [record]
    notes = (each["annotations"] for each in held if which(each, ["annotations"], list))
    if any(str(mapping(note).get("type")).endswith("_citation") for note in chain(*notes)):
        return True
    grounding = record.get("groundingMetadata", record.get("grounding_metadata"))
    cited = record.get("citations")  # of documents in the prompt, or addresses of what was found
    is_found = isinstance(cited, list) and any(str(each).startswith("http") for each in cited)
    return bool(grounding) or bool(record.get("search_results")) or is_found


def marked(message: Json, reason: str) -> Json:
    """Mark an answer that no model gave, or not to its end: nothing is trained on it."""
    return add_step(message, llm_call_count=0, extra={"not_sampled": reason})


# ---------------------------------------------------------------------- calls that the API makes


def is_own_call(call: Any) -> bool:
    """Whether a call is one that the API makes itself (a search, code, MCP): the model's client
    has no such tool."""
    kinds = mapping(mapping(call).get("rest")).get("kind"), mapping(call).get("type")
    return any(kind not in _ORDINARY for kind in kinds)


# ---------------------------------------------------------------------- a conversation


def cut_by_what_follows(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the place of each answer that the next message says was cut, and why: the user's
    interruption, or an error in the model's place. An answer whose calls have results was whole."""
    for at, (message, after) in enumerate(pairwise(messages)):
        if message.get("role") != "assistant":
            continue
        text = text_of(after.get("content"))
        if after.get("role") == "user" and INTERRUPTION.match(text):
            yield at, INTERRUPTED
        elif after.get("role") == "assistant" and _is_program(after):
            yield at, BROKEN


def _is_program(message: Mapping[str, Any]) -> bool:
    return not message.get("tool_calls") and bool(
        PROGRAM_TEXT.match(text_of(message.get("content")))
    )


def answered_without(messages: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """Return the place of the first answer that continues after a call whose result the log does
    not hold, and why it and those behind it are not learned. None: missing."""
    results = [message for message in messages if message.get("role") == "tool"]
    answered = {str(message["tool_call_id"]) for message in results if message.get("tool_call_id")}
    without_id = sum(not message.get("tool_call_id") for message in results)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    lacking_ids = without_id < sum(not call.get("id") for call in calls)
    for at, message in enumerate(messages):
        lost = [
            call
            for call in message.get("tool_calls") or ()
            if (str(call["id"]) not in answered if call.get("id") else lacking_ids)
        ]
        if not lost:
            continue
        others = (n for n in range(at + 1, len(messages)) if messages[n].get("role") != "tool")
        after = next(others, None)
        if after is not None and messages[after].get("role") == "assistant":
            name = lost[0]["function"]["name"]
            return after, f"it follows a call of {name!r} whose result the log does not hold"[:100]
    return None
