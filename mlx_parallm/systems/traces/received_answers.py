"""Put together the answer that a client got, from a whole body or from the chunks of a stream
(OpenAI's chat).

An answer of another form raises ValueError or TypeError, since a recorded answer must be readable
later.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mlx_parallm.systems.traces.recorder import RecordedCall, RecordedChoice
from mlx_parallm.systems.traces.schema import Json
from mlx_parallm.systems.traces.session import TurnTokens

MOST_CHOICES = 1024
_NOT_KEPT = {"index"}  # of a streamed tool call


def take_answer(call: RecordedCall, answer: Mapping[str, Any], *, temperature: float = 1.0) -> None:
    """Fill a call from an answer that was not streamed; with its tokens, where the server sent
    them."""
    _take_head(call, answer)
    for choice in _list(answer.get("choices")):
        message = choice.get("message")
        if isinstance(message, dict):
            kept = call.choices.setdefault(_index(choice), RecordedChoice({}))
            kept.message = {k: v for k, v in message.items() if v is not None or k == "content"}
            kept.finish_reason = optional_text(choice, "finish_reason")
            kept.tokens = _tokens_of(answer.get("prompt_token_ids"), choice, temperature)


class ChunkReader:
    """Fills a call from a stream's chunks. `choices`: how many the client wants."""

    def __init__(self, call: RecordedCall, choices: int, temperature: float = 1.0) -> None:
        self._call = call
        self._choices = choices
        self._temperature = temperature
        self._prompt_ids: Any = None
        self._sent: dict[int, Json] = {}  # token ids and log-probabilities so far, by choice

    @property
    def ended(self) -> bool:
        """Whether every choice has its finish reason."""
        choices = self._call.choices.values()
        return len(choices) >= self._choices and all(
            choice.finish_reason is not None for choice in choices
        )

    def take(self, chunk: Mapping[str, Any]) -> None:
        _take_head(self._call, chunk)
        self._prompt_ids = chunk.get("prompt_token_ids") or self._prompt_ids
        for part in _list(chunk.get("choices")):
            index = _index(part)
            choice = self._call.choices.setdefault(
                index, RecordedChoice({"role": "assistant", "content": ""})
            )
            _add(choice.message, _object(part, "delta"))
            sent = self._sent.setdefault(index, {"token_ids": [], "logprobs": {"content": []}})
            sent["token_ids"] += part.get("token_ids") or ()
            sent["logprobs"]["content"] += _object(part, "logprobs").get("content") or ()
            if part.get("finish_reason") is not None:
                choice.finish_reason = optional_text(part, "finish_reason")
                sent["weight_versions"] = part.get("weight_versions")
                choice.tokens = _tokens_of(self._prompt_ids, sent, self._temperature)
                if choice.message.get("tool_calls") and not choice.message["content"]:
                    choice.message["content"] = None  # as an answer that is not streamed


def _take_head(call: RecordedCall, answer: Mapping[str, Any]) -> None:
    call.response_id = optional_text(answer, "id") or call.response_id
    call.model = optional_text(answer, "model") or call.model
    call.usage = _object(answer, "usage") or call.usage


def optional_text(value: Mapping[str, Any], name: str) -> str | None:
    """Raises ValueError: it is something else."""
    text = value.get(name)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name!r} is not text")
    return text


def _object(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object of that name; {} if there is none. Raises ValueError: it is something else."""
    entry = value.get(name)
    if entry is not None and not isinstance(entry, dict):
        raise ValueError(f"{name!r} is not an object")
    return entry or {}


def _index(choice: Mapping[str, Any]) -> int:
    """Raises ValueError: no number of a choice."""
    index = choice.get("index") or 0
    if not isinstance(index, int) or not 0 <= index < MOST_CHOICES:
        raise ValueError(f"choice {str(index)[:40]!r} has no number")
    return index


def _list(value: Any) -> Iterable[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else ()


def _add(message: Json, delta: Mapping[str, Any]) -> None:
    """Texts grow; the parts of a tool call are joined by the call's index."""
    for key, value in delta.items():
        if key == "tool_calls":
            for part in _list(value):
                _add_call(message.setdefault("tool_calls", []), part)
        elif key != "role" and isinstance(value, str):
            message[key] = (message.get(key) or "") + value
        elif key != "role" and value is not None:
            message[key] = value


def _add_call(calls: list[Json], part: Mapping[str, Any]) -> None:
    index = part.get("index")
    position = index if isinstance(index, int) and 0 <= index <= len(calls) else len(calls)
    if position == len(calls):
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[position]
    for key, value in part.items():
        if key == "function" and isinstance(value, Mapping):
            for name, text in value.items():
                if isinstance(text, str):
                    call["function"][name] = call["function"].get(name, "") + text
        elif key not in _NOT_KEPT and value is not None:
            call[key] = value


def _tokens_of(prompt_ids: Any, choice: Mapping[str, Any], temperature: float) -> TurnTokens | None:
    """Return the tokens, from a server that sends them (`return_token_ids` and `logprobs`); None
    where a part is missing."""
    ids, content = choice.get("token_ids"), _object(choice, "logprobs").get("content")
    if not prompt_ids or not ids or not content or len(ids) != len(content):
        return None
    numbers = [entry["logprob"] for entry in content]
    are_numbers = all(isinstance(number, int | float) for number in numbers)
    if not are_numbers or not all(isinstance(token, int) for token in [*prompt_ids, *ids]):
        raise ValueError("token ids and log-probabilities are not numbers")
    spans = [(s["version"], s["start"], s["end"]) for s in _list(choice.get("weight_versions"))]
    return TurnTokens(
        shared=0,
        prompt=prompt_ids,
        completion=ids,
        logprobs=numbers,
        versions=spans or [(-1, 0, len(ids))],
        temperature=temperature or 1.0,
        policy=False,
        prompt_version=-1,
    )
