"""SessionRecorder writes the calls of agents into session files, each on the disk before its answer
ends.

    route → RecordedCall (request, answer) → SessionRecorder.commit → sessions/NAME.jsonl
                                                                    └ review.jsonl: redactions

A call's lines are appended with one write, which a kill -9 of this process cannot undo; a power cut
may take the last seconds.
"""

import asyncio
import json
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from mlx_parallm.errors import RequestError, StoreError
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.systems.traces.privacy import PLACEHOLDER, TraceRedactor, review_lines
from mlx_parallm.systems.traces.schema import Json, Label, dump_line, present, text_of
from mlx_parallm.systems.traces.session import (
    COMPLETE,
    SESSION_NAME,
    SESSIONS,
    Session,
    SessionTurn,
    TurnStatus,
    TurnTokens,
    chained_key,
    compared_text,
    continued,
    prompt_hash,
    text_digest,
)

REVIEW = "review.jsonl"
SESSIONS_IN_MEMORY = 512
LARGE_CHARACTERS = 1 << 17
T = TypeVar("T")


@dataclass
class RecordedChoice:
    """One choice of an answer, as the client sees it."""

    message: Json
    finish_reason: str | None = None
    tokens: TurnTokens | None = None  # `shared` is 0: the whole prompt


@dataclass
class RecordedCall:
    """One call of a session. `status`: `COMPLETE`, or why there is no whole answer. `wanted`: the
    number of choices; `temperature`: of an upstream's sampling."""

    session: str
    messages: Sequence[Json]
    tools: Sequence[Json]
    model: str | None = None
    response_id: str | None = None
    status: TurnStatus = COMPLETE
    wanted: int = 1
    temperature: float = 1.0
    usage: Json | None = None
    choices: dict[int, RecordedChoice] = field(default_factory=dict)


@dataclass
class _LiveSession:
    session: Session
    redactor: TraceRedactor
    ends: dict[str, str]  # key of a conversation that ends with an answer → its turn
    # digest of a message as sent → of it as it is compared
    keys: dict[bytes, bytes] = field(default_factory=dict)


def session_name(name: str) -> str:
    """Raises RequestError: it cannot name a file."""
    if not SESSION_NAME.fullmatch(name):
        raise RequestError(
            f"{name[:80]!r} cannot name a session: 1 to 128 letters, digits and _ . : -,"
            " not a dot first",
            param="name",
        )
    return name


class SessionRecorder:
    """Thread-safe. `commit` and `feedback` return when their lines are written.

    Args:
        directory: gets `sessions/NAME.jsonl` and `review.jsonl`.
        finder: finds secrets (`privacy.secret_finder`); None = nothing is redacted.

    Raises StoreError: the directory cannot be made.
    """

    def __init__(self, directory: Path, finder: Redactor | None) -> None:
        self.directory = directory
        self._folder = directory / SESSIONS
        self._finder = finder
        self._live: OrderedDict[str, _LiveSession] = OrderedDict()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be made: {error.strerror or error}") from error
        self._lock = threading.Lock()

    async def commit(self, call: RecordedCall) -> list[str]:
        """Write the turns of a call, one for each choice; return their ids. Raises StoreError:
        nothing was written."""
        # Handing a third of a millisecond of work to another thread would take longer; a large one
        # blocks nobody else.
        answered = [choice.message for choice in call.choices.values()]
        texts = (text_of(message.get("content")) for message in [*call.messages, *answered])
        if sum(map(len, texts)) > LARGE_CHARACTERS:
            return await asyncio.to_thread(self._commit, call)
        return self._commit(call)

    def feedback(self, name: str, label: Label) -> Label:
        """Append a label; it gets its prompt's hash. Raises RequestError: no such session or
        answer; StoreError."""
        with self._lock:
            if name not in self._live and not (self._folder / f"{name}.jsonl").exists():
                reason = f"there is no session {name!r}: nothing was recorded under this name"
                raise RequestError(reason, param="name")
            live = self._of(name)
            live.redactor.hits.clear()
            label = self._about(live, name, label)
            self._append(name, [{"type": "label", **label.to_json()}])
            self._review(live)
            live.session.labels.append(label)
            return label

    def read(self, name: str, use: Callable[[Session], T]) -> T:
        """Call `use` with a session while nothing changes it."""
        with self._lock:
            return use(self._of(name).session)

    # ------------------------------------------------------------------ with the lock

    def _of(self, name: str) -> _LiveSession:
        live = self._live.get(name)
        if live is None:
            path = self._folder / f"{name}.jsonl"
            session = Session(name)
            if path.exists():
                _cut_unfinished(path)
                session = Session.read(path)
            ends = {turn.key: turn.id for turn in session.turns.values() if turn.status == COMPLETE}
            live = _LiveSession(session, TraceRedactor(name, self._finder, _numbers(session)), ends)
            self._live[name] = live
            if len(self._live) > SESSIONS_IN_MEMORY:
                self._live.popitem(last=False)
        self._live.move_to_end(name)
        return live

    def _commit(self, call: RecordedCall) -> list[str]:
        with self._lock:
            live = self._of(call.session)
            live.redactor.hits.clear()
            turns = self._turns(live, call)
            self._append(call.session, [turn.to_json() for turn in turns])
            self._review(live)
            for turn in turns:
                live.session.add(turn)
                if turn.status == COMPLETE:
                    live.ends[turn.key] = turn.id
            return [turn.id for turn in turns]

    def _turns(self, live: _LiveSession, call: RecordedCall) -> list[SessionTurn]:
        """Return a turn for each choice; one without an answer where there is none."""
        session, key_of = live.session, partial(self._next_key, live)
        chain, parent, answered = continued(call.messages, live.ends, key_of)
        same: Json = {
            "parent": parent,
            "at": time.time(),
            "status": call.status,
            "model": call.model,
            "messages": live.redactor.value(list(call.messages[answered:])),
        }
        tools = live.redactor.value(list(call.tools))
        if parent is None or session.tools(parent) != tools:
            same["tools"] = tools
        prompt_hits = list(live.redactor.hits)
        turns: list[SessionTurn] = []
        choices: dict[int, RecordedChoice | None] = dict(call.choices) or {0: None}
        for number, (index, choice) in enumerate(sorted(choices.items()), len(session.turns) + 1):
            before = len(live.redactor.hits)
            name = call.response_id if index == 0 else f"{call.response_id}#{index}"
            fields: Json = {"response": None, "finish_reason": None, "key": "", "response_id": name}
            if choice is not None:
                fields["response"] = live.redactor.value(choice.message)
                fields["finish_reason"] = choice.finish_reason
                fields["key"] = key_of(chain, choice.message)
            if index == 0 and call.usage is not None:
                fields["usage"] = call.usage
            if counts := Counter(h.kind for h in prompt_hits + live.redactor.hits[before:]):
                fields["redacted"] = dict(counts)
            elif call.status == COMPLETE and choice is not None and choice.tokens is not None:
                fields |= self._tokens(session, parent, choice.tokens)
            turns.append(SessionTurn(type="turn", id=f"t{number}", **same, **fields))
        return turns

    def _tokens(self, session: Session, parent: str | None, sampled: TurnTokens) -> Json:
        """Return the field `tokens` of a turn. Tokens would show what was redacted: a turn after
        one with placeholders has none, as that one."""
        if parent is not None and any(turn.redacted for turn in session.path(parent)):
            return {}
        pairs = zip(session.sequence(parent), sampled.prompt, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        update = {"shared": shared, "prompt": sampled.prompt[shared:]}
        return {"tokens": sampled.model_copy(update=update)}

    def _next_key(self, live: _LiveSession, chain: str, message: Mapping[str, Any]) -> str:
        """The key of a conversation and one message more. It is made of redacted text: it is
        written to the disk."""
        text = compared_text(message)
        digest = text_digest(text)
        redacted_digest = live.keys.get(digest)
        if redacted_digest is None:
            if self._finder is not None:
                for secret in reversed(self._finder.find(text)):
                    text = f"{text[: secret.start]}<{secret.kind}>{text[secret.end :]}"
            redacted_digest = text_digest(text)
            live.keys[digest] = redacted_digest
        return chained_key(chain, redacted_digest)

    def _about(self, live: _LiveSession, name: str, label: Label) -> Label:
        """Return a label as it is written: redacted, with its prompt's hash."""
        session = live.session
        turn = next(iter(session.turns.values()), None)
        fields = label.model_dump(exclude_none=True)
        if label.response_id is not None:
            turn = session.by_response(label.response_id)
            if turn is None:
                reason = f"session {name!r} has no answer {label.response_id!r}"
                raise RequestError(reason, param="response_id")
            fields["response_id"] = turn.response_id
        if turn is not None:
            fields["prompt_hash"] = prompt_hash(session.path(turn.id)[0].messages)
        texts = [key for key in ("label", "explanation") if key in fields]
        fields |= {key: live.redactor.text(fields[key]) for key in texts}
        return Label.model_validate(present(fields))

    def _append(self, name: str, values: Sequence[Json]) -> None:
        _append_lines(self._folder / f"{name}.jsonl", b"".join(map(dump_line, values)))

    def _review(self, live: _LiveSession) -> None:
        if hits := live.redactor.hits:
            _append_lines(self.directory / REVIEW, b"".join(map(dump_line, review_lines(hits))))


def _append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines or nothing. Raises StoreError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                written = os.write(descriptor, lines)
                while written < len(lines):
                    written += os.write(descriptor, lines[written:])
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _cut_unfinished(path: Path) -> None:
    """Remove a last line that a killed process has left unfinished: its answer never ended.
    Raises StoreError."""
    try:
        with path.open("rb+") as file:
            data = file.read()
            if data and not data.endswith(b"\n"):
                file.truncate(data.rfind(b"\n") + 1)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _numbers(session: Session) -> dict[str, int]:
    """Kind → the highest number among the placeholders of a session that was read."""
    numbers: dict[str, int] = {}
    for turn in session.turns.values():
        if turn.redacted:
            text = json.dumps([turn.messages, turn.response, turn.tools])
            for placeholder in PLACEHOLDER.findall(text):
                kind, _, number = placeholder[1:-1].rpartition("_")
                numbers[kind.lower()] = max(numbers.get(kind.lower(), 0), int(number))
    return numbers
