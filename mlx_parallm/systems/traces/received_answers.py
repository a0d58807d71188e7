"""Put together the answer that a client got, from a whole body or from the chunks of a stream
(OpenAI's chat).

An answer of another form raises ValueError or TypeError, since a recorded answer must be readable
later.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from mlx_parallm.server.protocol.openai import ChatBody
from mlx_parallm.systems.traces.recorder import RecordedCall, RecordedChoice
from mlx_parallm.systems.traces.schema import Json
from mlx_parallm.systems.traces.session import ABORTED, COMPLETE, TurnStatus, TurnTokens

MOST_CHOICES = 1024
_NOT_KEPT = {"index"}  # keys of a streamed tool call that are dropped
_HEAD = ("id", "model", "usage", "prompt_token_ids")


def take_answer(call: RecordedCall, answer: Mapping[str, Any]) -> None:
    """Fill a call from a whole answer; with its tokens, where the server sent them."""
    call.response_id = _optional_text(answer, "id") or call.response_id
    call.model = _optional_text(answer, "model") or call.model
    call.usage = _object(answer, "usage") or call.usage
    for choice in _list(answer.get("choices")):
        message = choice.get("message")
        if isinstance(message, dict):
            kept = call.choices.setdefault(_index(choice), RecordedChoice({}))
            kept.message = {k: v for k, v in message.items() if v is not None or k == "content"}
            kept.finish_reason = _optional_text(choice, "finish_reason")
            kept.tokens = _tokens_of(answer.get("prompt_token_ids"), choice, call.temperature)


class CallReader(Protocol):
    """Reads one call of an API. Each method raises ValueError or TypeError: it is of another
    form."""

    def chat(self, body: Mapping[str, Any]) -> Json:
        """Return the request of a chat: `messages`, `tools`, `model`, `temperature`, `n`."""
        ...

    def answer(self, body: Mapping[str, Any]) -> Json:
        """Return the answer of a chat: `choices`, `id`, `model`, `usage`."""
        ...

    def take(self, event: Mapping[str, Any]) -> Json | None:
        """Take an event of a stream; return the chat's answer once it has ended."""
        ...

    def so_far(self) -> Json:
        """Return the answer of a stream that has not ended, as far as it can be read."""
        ...


class ChatReader:
    """A call of the chat. `wanted`: the number of choices."""

    def __init__(self, wanted: int = 1) -> None:
        self._wanted = wanted
        self._head: Json = {}
        self._choices: dict[int, Json] = {}

    def chat(self, body: Mapping[str, Any]) -> Json:
        self._wanted = body.get("n") or 1
        return dict(body)

    def answer(self, body: Mapping[str, Any]) -> Json:
        return dict(body)

    def take(self, event: Mapping[str, Any]) -> Json | None:
        self._head |= {name: event[name] for name in _HEAD if event.get(name)}
        for part in _list(event.get("choices")):
            message = {"role": "assistant", "content": ""}
            empty = {"message": message, "token_ids": [], "logprobs": {"content": []}}
            choice = self._choices.setdefault(_index(part), empty)
            _add(choice["message"], _object(part, "delta"))
            choice["token_ids"] += part.get("token_ids") or ()
            choice["logprobs"]["content"] += _object(part, "logprobs").get("content") or ()
            if part.get("finish_reason") is not None:
                choice |= {name: part.get(name) for name in ("finish_reason", "weight_versions")}
                if choice["message"].get("tool_calls") and not choice["message"]["content"]:
                    choice["message"]["content"] = None  # as an answer that is not streamed
        ended = sum("finish_reason" in choice for choice in self._choices.values())
        return self.so_far() if ended == len(self._choices) >= self._wanted else None

    def so_far(self) -> Json:
        choices = [{"index": index, **choice} for index, choice in self._choices.items()]
        return {**self._head, "choices": choices}


class ObservedCall(ABC):
    """Follows one call of this server's chat: an `AnswerObserver`. `call` holds the answer when
    it has ended, whole or not, before the client sees its end."""

    def __init__(self, session: str = "") -> None:
        self.call = RecordedCall(session, [], [])
        self._has_ended = False

    @abstractmethod
    async def ended(self) -> None:
        """Write the call; awaited once."""

    def begun(self, body: ChatBody) -> None:
        self.call.messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        self.call.tools = body.callable_tools
        self.call.model, self.call.wanted = body.model, body.n

    async def whole(self, answer: Mapping[str, Any]) -> None:
        take_answer(self.call, answer)
        await self._end(COMPLETE)

    async def events(
        self, events: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        chunks, unfinished = list[dict[str, Any]](), self.call.wanted
        try:
            async with aclosing(events):
                async for chunk in events:
                    if unfinished:
                        # read together at the end: that takes a third of the time
                        chunks.append(chunk)
                        reasons = [choice["finish_reason"] for choice in chunk["choices"]]
                        unfinished -= len(reasons) - reasons.count(None)
                        if not unfinished:
                            self._take(chunks)
                            await self._end(COMPLETE)
                    yield chunk
        finally:
            if unfinished:
                self._take(chunks)
            await self.aborted()

    def _take(self, chunks: Iterable[Mapping[str, Any]]) -> None:
        reader = ChatReader(self.call.wanted)
        for chunk in chunks:
            reader.take(chunk)
        take_answer(self.call, reader.so_far())

    async def aborted(self) -> None:
        """End a call that got no whole answer; does nothing where it did."""
        await self._end(ABORTED)

    async def _end(self, status: TurnStatus) -> None:
        if not self._has_ended:
            self._has_ended, self.call.status = True, status
            await self.ended()


def _optional_text(value: Mapping[str, Any], name: str) -> str | None:
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
