"""Signals in a request about earlier answers: it continues after one, asks the same again, or sends
an answer back changed. No MLX.

A conversation is known by a chain of digests of its messages, secrets taken out before, and by the
user whose it is: two people who ask the same are not one who asks again.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.system.redaction import Redactor
from mlx_parallm.systems.feedback.signals import ReplySignal, edit_value
from mlx_parallm.systems.feedback.store import FeedbackStore
from mlx_parallm.systems.traces.privacy import TraceRedactor
from mlx_parallm.systems.traces.schema import text_of
from mlx_parallm.systems.traces.session import chained_key, compared_text, text_digest

DIGESTS = 20_000  # message digests in memory: a chat sends its whole history each time
LONGEST_WORDS = 4_000
"""Characters of a question, an answer or a reply that are kept for the judge and the review."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FollowUpReading:
    """A request, read. `keys`: of the conversation after each message, one more than messages."""

    keys: tuple[str, ...]
    question: str
    redacted: bool
    signals: tuple[ReplySignal, ...]
    unjudged: int  # messages with a meaning, without a judge

    @property
    def key(self) -> str:
        return self.keys[-1]


class ConversationReader:
    """Thread-safe.

    Args:
        finder: finds secrets; None = nothing is redacted.
        judges: whether a judge reads the user's next message.
        regenerate_within_s: the same question later than this is a new one.
    """

    def __init__(
        self,
        store: FeedbackStore,
        finder: Redactor | None,
        *,
        judges: bool,
        regenerate_within_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._finder, self._judges = store, finder, judges
        self._regenerate_within_s, self._clock = regenerate_within_s, clock
        self._lock = threading.Lock()
        # message → (digest of its text without secrets, whether it had one)
        self._digests: OrderedDict[bytes, tuple[bytes, bool]] = OrderedDict()

    def read(self, user: str, messages: Sequence[Message], tools: Sequence[Any]) -> FollowUpReading:
        """Read a request of `user`. Raises StoreError."""
        keys, redacted = [user], False
        for message in messages:
            digest, had_secret = self._digest(message)
            keys.append(chained_key(keys[-1], digest))
            redacted = redacted or had_secret
        redacted = redacted or bool(tools and self._words(str(tools))[1])
        signals, unjudged = self._signals(user, messages, keys)
        question, _ = self._words(_last_text(messages))
        return FollowUpReading(tuple(keys), question, redacted, signals, unjudged)

    def after(self, reading: FollowUpReading, answer: Message) -> tuple[str, str, bool]:
        """Return the conversation's key with an answer, the answer's words, and whether there was
        a secret in it."""
        digest, had_secret = self._digest(answer)
        words, _ = self._words(_words_of(answer))
        return chained_key(reading.key, digest), words, had_secret

    def words(self, text: str) -> str:
        """Return a text as it may be kept: shortened, without secrets."""
        return self._words(text)[0]

    def _signals(
        self, user: str, messages: Sequence[Message], keys: Sequence[str]
    ) -> tuple[tuple[ReplySignal, ...], int]:
        # messages before the newest answer were read with the request that had it last
        last = next(
            (at for at in range(len(messages) - 1, -1, -1) if _role(messages[at]) == "assistant"),
            None,
        )
        signals = list(self._asked_again(user, keys[-1]))
        if last is None:
            return tuple(signals), 0
        answered = self._store.at(user, after=keys[last + 1])
        if not answered:
            return (*signals, *self._edited(user, keys[last], messages[last])), 0
        following = messages[last + 1 :]
        if any(_role(message) == "tool" for message in following):
            signals.append(ReplySignal(answered[0].id, "tool", 1.0))
        reply = next((text_of(m.get("content")) for m in following if _role(m) == "user"), "")
        if not reply.strip() or messages[last].get("tool_calls"):
            return tuple(signals), 0
        if not self._judges:
            return tuple(signals), 1
        signals.append(ReplySignal(answered[0].id, "message", None, self._words(reply)[0]))
        return tuple(signals), 0

    def _asked_again(self, user: str, key: str) -> Sequence[ReplySignal]:
        """The newest answer to the same question was not wanted."""
        earlier = self._store.at(user, before=key)
        if not earlier or self._clock() - earlier[0].at > self._regenerate_within_s:
            return ()
        return (ReplySignal(earlier[0].id, "regenerate", -1.0),)

    def _edited(self, user: str, before: str, message: Message) -> Sequence[ReplySignal]:
        """The user's version of an answer to this conversation, the one that is most like it."""
        text = self._words(_words_of(message))[0]
        values = [
            (value, kept)
            for kept in self._store.at(user, before=before)
            if kept.answer and (value := edit_value(kept.answer, text)) is not None
        ]
        if not values:
            return ()
        value, kept = max(values, key=lambda each: each[0])
        return (ReplySignal(kept.id, "edit", value, text),)

    def _digest(self, message: Message) -> tuple[bytes, bool]:
        whole = json.dumps(message, sort_keys=True, default=str)
        raw = text_digest(whole)
        with self._lock:
            kept = self._digests.get(raw)
        if kept is None:
            text = compared_text(message)
            secrets = self._finder.find(text) if self._finder is not None else []
            for secret in reversed(secrets):
                text = f"{text[: secret.start]}<{secret.kind}>{text[secret.end :]}"
            # the tokens also have the reasoning, and JSON without escapes: search the whole message
            redactor = TraceRedactor("feedback", self._finder)
            redactor.value(message)
            kept = text_digest(text), bool(secrets or redactor.hits)
        with self._lock:
            self._digests[raw] = kept
            self._digests.move_to_end(raw)
            if len(self._digests) > DIGESTS:
                self._digests.popitem(last=False)
        return kept

    def _words(self, text: str) -> tuple[str, bool]:
        redactor = TraceRedactor("feedback", self._finder)
        return redactor.text(text)[:LONGEST_WORDS], bool(redactor.hits)


def _role(message: Message) -> str:
    return str(message.get("role"))


def _last_text(messages: Sequence[Message]) -> str:
    questions = [message for message in messages if _role(message) in ("user", "tool")]
    return text_of(questions[-1].get("content")) if questions else ""


def _words_of(answer: Message) -> str:
    """The text of an answer, and its calls."""
    functions = [
        call.get("function") or {}
        for call in answer.get("tool_calls") or ()
        if isinstance(call, Mapping)
    ]
    calls = [f"{function.get('name')}({function.get('arguments')})" for function in functions]
    return "\n".join([text for text in [text_of(answer.get("content"))] if text] + calls)
