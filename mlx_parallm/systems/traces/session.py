"""A recorded session: the calls of one agent's run, one JSON object a line, in the order in which
they ended.

    {"type": "turn", "id", "parent", "at", "status", "model", "messages", "tools", "response",
    "key", "tokens", …} {"type": "label", "name", "value", "label", "explanation", "by", "at",
    "response_id", "prompt_hash"}

A turn holds what its call adds to its parent, the turn whose messages and answer it begins with; a
turn without a parent is a root. So a session is a forest, and each way from a root to a leaf is a
trace. A turn that several leaves share is sampled in the first of their traces and copied context
in the others: nothing is trained on twice.

`tokens`, from our own engine: the prompt's ids after the first `shared` ones, which are the
parent's prompt and answer; the answer's ids, log-probabilities and policy versions.
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt

from mlx_parallm.errors import TraceError
from mlx_parallm.system.files import regular_files
from mlx_parallm.system.pydantic_faults import faults
from mlx_parallm.systems.traces.schema import (
    SHAPES,
    Json,
    Label,
    TraceRecord,
    add_step,
    dump_line,
    foreign_message,
    iso_time,
    mapping,
    parsed_arguments,
    present,
    read_jsonl,
    text_of,
    without,
)
from mlx_parallm.systems.traces.trace import Trace, new_trace, numbered
from mlx_parallm.types import Rollout

SESSION_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
SESSIONS = "sessions"  # the folder of a recorder's directory
TurnStatus = Literal["complete", "aborted"]
COMPLETE: TurnStatus = "complete"
ABORTED: TurnStatus = "aborted"


def _null_is(default: Any) -> BeforeValidator:
    """Let null in a file of another writer stand for the default."""
    return BeforeValidator(lambda value: default if value is None else value)


class TurnTokens(TraceRecord):
    """Tokens of one turn. `shared`: how many of the parent's tokens (prompt and answer) the
    prompt begins with."""

    shared: int = 0
    prompt: list[int]  # after the shared ones
    completion: list[int]  # [T], EOS included
    logprobs: list[float]  # [T], before filters and penalties
    # version, start, end: of the completion's tokens
    versions: list[tuple[StrictInt, StrictInt, StrictInt]]
    temperature: float
    # sampled from the policy that is trained
    policy: Annotated[StrictBool, _null_is(False)] = False
    prompt_version: int = -1
    # [T], where sampling reshaped the distribution
    processed_logprobs: list[float] | None = None
    # [T], where a grammar was on: 1 where it left no choice
    forced: list[int] | None = None


class SessionTurn(TraceRecord):
    """One call. `messages`: those after the parent's answer; `key`: of the conversation up to
    its answer."""

    type: Literal["turn"]
    id: str
    parent: str | None
    at: StrictFloat  # Unix time
    status: TurnStatus
    model: str | None = None
    messages: list[Json]
    response: Json | None
    finish_reason: str | None = None
    response_id: str | None = None
    key: Annotated[str, _null_is("")] = ""
    tools: list[Json] | None = None  # None: the parent's
    usage: Json | None = None
    redacted: Annotated[dict[str, int], _null_is({})] = Field(default_factory=dict)
    tokens: TurnTokens | None = None

    @property
    def spoken(self) -> list[Json]:
        """The messages and the answer."""
        return [each for each in (*self.messages, self.response) if each is not None]


@dataclass(frozen=True, slots=True)
class SessionFault:
    """A line that could not be read. `place`: "file:line"."""

    place: str
    reason: str
    value: Any


class Session:
    """The turns and labels of one session, in memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turns: dict[str, SessionTurn] = {}
        self.labels: list[Label] = []
        self.faults: list[SessionFault] = []  # lines that could not be read
        # place and name → value, of fields that turns do not have
        self.unknown: dict[tuple[str, str], Any] = {}

    @classmethod
    def read(cls, path: Path) -> "Session":
        """Read a session file; a line that is damaged is in `faults`. Raises TraceError: the
        file cannot be read."""
        session = cls(path.stem)
        for number, value in read_jsonl(path):
            try:
                if isinstance(value, ValueError):
                    raise value
                if value["type"] == "turn":
                    turn = SessionTurn.model_validate(value)
                    session.add(turn)
                    for record in (turn, turn.tokens or turn):
                        others = sorted((record.model_extra or {}).items())
                        session.unknown |= {
                            (f"{path.name}:{number}", name): each for name, each in others
                        }
                elif value["type"] == "label":
                    session.labels.append(Label.model_validate(without(value, "type")))
                else:
                    raise ValueError(f"type {value['type']!r} is neither a turn nor a label")
            except SHAPES as error:
                reason = f"{type(error).__name__}: {faults(error, 3)}"
                session.faults.append(SessionFault(f"{path.name}:{number}", reason, value))
        return session

    def add(self, turn: SessionTurn) -> None:
        # it would also close a circle: an earlier turn would follow a later one
        if turn.id in self.turns:
            raise ValueError(f"turn {turn.id} appears twice in this session")
        if turn.parent is not None and turn.parent not in self.turns:
            raise ValueError(f"turn {turn.id} follows {turn.parent}, which is not in this session")
        self.turns[turn.id] = turn

    def path(self, turn_id: str) -> list[SessionTurn]:
        """The turns from the root to this one."""
        turns: list[SessionTurn] = []
        at: str | None = turn_id
        while at is not None:
            turns.append(self.turns[at])
            at = turns[-1].parent
        return turns[::-1]

    def sequence(self, turn_id: str | None) -> list[int]:
        """All tokens of a turn: prompt and answer. Empty where they are not known."""
        tokens: list[int] = []
        for turn in self.path(turn_id) if turn_id is not None else ():
            if turn.tokens is None:
                return []
            tokens = tokens[: turn.tokens.shared] + turn.tokens.prompt + turn.tokens.completion
        return tokens

    def tools(self, turn_id: str) -> list[Json]:
        turns = reversed(self.path(turn_id))
        return next((turn.tools for turn in turns if turn.tools is not None), [])

    def leaves(self) -> list[SessionTurn]:
        """Turns that no complete turn follows, in order. An aborted turn is always a leaf."""
        parents = {turn.parent for turn in self.turns.values() if turn.status == COMPLETE}
        return [turn for turn in self.turns.values() if turn.id not in parents]

    def by_response(self, response_id: str) -> SessionTurn | None:
        turns = self.turns.values()
        return next((turn for turn in turns if response_id in (turn.response_id, turn.id)), None)

    def follow(
        self, messages: Sequence[Json], response: Json, ends: dict[str, str], **turn: Any
    ) -> SessionTurn:
        """Add a call after the turn whose conversation `messages` begins with. `ends`: key →
        turn, of earlier calls."""
        chain, parent, answered = continued(messages, ends, next_key)
        key = next_key(chain, response)
        added = SessionTurn(
            type="turn",
            id=f"t{len(self.turns) + 1}",
            parent=parent,
            status=COMPLETE,
            messages=list(messages[answered:]),
            response=response,
            key=key,
            **turn,
        )
        self.add(added)
        ends[key] = added.id
        return added

    # ------------------------------------------------------------------ traces

    def ordered_leaves(self) -> list[SessionTurn]:
        """Return the leaves, those of aborted calls last."""
        leaves = self.leaves()
        return sorted(leaves, key=lambda turn: turn.status != COMPLETE)

    def trace(self, path: Sequence[SessionTurn], claimed: set[str], number: int) -> Trace:
        """Return the trace of a path, the session's `number`th. `claimed`: turns that an earlier
        one samples. Raises TraceError."""
        messages: list[Json] = []
        for turn in path:
            for message in turn.messages:
                copied = {"is_copied_context": True} if message.get("role") == "assistant" else {}
                messages.append(
                    add_step(foreign_message(message), timestamp=iso_time(turn.at), **copied)
                )
            if turn.response is not None:
                response = foreign_message(turn.response)
                step = _step_fields(turn, self, copied=turn.id in claimed)
                if response.get("step", {}).get("llm_call_count") == 0:  # no model gave it
                    step = {key: step[key] for key in ("timestamp", "model_name") if key in step}
                messages.append(add_step(response, **step))
        return new_trace(
            messages,
            session_id=self.name,
            name=numbered(self.name, number),
            source="recorder",
            source_id=self.name,
            tools=next((turn.tools for turn in reversed(path) if turn.tools), None),
            model=path[-1].model,
            agent="recorded",
            **self._about(path, {turn.id for turn in path} - claimed),
        )

    def _about(self, path: Sequence[SessionTurn], trained: set[str]) -> Json:
        """A trace's `extra`. `trained`: the turns that only this trace trains on."""
        names = {turn.response_id for turn in path if turn.id in trained}
        labels = [
            label.to_json()
            for label in self.labels
            if label.response_id is None or label.response_id in names
        ]
        redacted = sum((Counter(turn.redacted) for turn in path), Counter[str]())
        tokens = (turn.tokens for turn in path if turn.tokens is not None)
        versions = (version for each in tokens for version, *_ in each.versions)
        return {
            "labels": labels or None,
            "policy_version": max(versions, default=None),
            "redacted": dict(redacted) or None,
            "aborted": path[-1].status != COMPLETE or None,
        }

    # ------------------------------------------------------------------ rollouts

    def rollout(self, last: SessionTurn | None = None) -> Rollout:
        """The session's sampled tokens as one unscored rollout; with `last` only the way to that
        turn.

        Each stretch that was sampled as one sequence is a segment. Raises TraceError: why it cannot
        be trained on.
        """
        leaves = [leaf for leaf in self.leaves() if leaf.status == COMPLETE]
        if last is not None:
            leaves = [last]
        if not leaves:
            raise TraceError("no call of the session has ended")
        claimed: set[str] = set()
        segments: list[Rollout] = []
        for leaf in leaves:
            path = self.path(leaf.id)
            for part in self._unbroken(path):
                segment = _segment(part, self, claimed)
                if 1 in segment.mask:
                    segments.append(segment)
            claimed |= {turn.id for turn in path}
        temperatures = {segment.temperature for segment in segments}
        if len(temperatures) > 1:
            raise TraceError(
                f"its calls were sampled at several temperatures: {sorted(temperatures)}"
            )
        *earlier, main = segments
        return replace(main, earlier=tuple(earlier))

    def _unbroken(self, path: Sequence[SessionTurn]) -> list[list[SessionTurn]]:
        """Split a path before each prompt that does not begin with all earlier tokens."""
        parts: list[list[SessionTurn]] = []
        for turn in path:
            name = turn.response_id or turn.id
            if turn.tokens is None:
                reason = (
                    "holds redacted secrets"
                    if turn.redacted
                    else "has no tokens, or parts beside text"
                )
                raise TraceError(f"the call {name} {reason}: nothing to train on")
            if not turn.tokens.policy:
                raise TraceError(f"the call {name} was not answered by the policy")
            if parts and turn.tokens.shared == len(self.sequence(turn.parent)):
                parts[-1].append(turn)
            else:
                parts.append([turn])
        return parts

    @property
    def opening(self) -> list[int]:
        """The first call's prompt ids."""
        first = next(iter(self.turns.values()), None)
        return first.tokens.prompt if first is not None and first.tokens is not None else []


def _segment(part: Sequence[SessionTurn], session: Session, claimed: set[str]) -> Rollout:
    tokens, mask, versions, forced = list[int](), list[int](), list[int](), list[int]()
    logprobs, processed = list[float](), list[float]()
    for turn in part:
        sampled = turn.tokens
        assert sampled is not None
        learn, count = turn.id not in claimed, len(sampled.completion)
        prompt = [] if tokens else session.sequence(turn.parent)[: sampled.shared]
        prompt += sampled.prompt
        unread, nothing = [0.0] * len(prompt), [0.0] * count
        tokens += prompt + sampled.completion
        mask += [0] * len(prompt) + [int(learn)] * count
        logprobs += unread + (sampled.logprobs if learn else nothing)
        processed += unread + (
            (sampled.processed_logprobs or sampled.logprobs) if learn else nothing
        )
        forced += [0] * len(prompt) + ((learn and sampled.forced) or [0] * count)
        versions += [sampled.prompt_version] * len(prompt)
        versions += [version for version, start, end in sampled.versions for _ in range(start, end)]
    reshaped = any(turn.tokens and turn.tokens.processed_logprobs is not None for turn in part)
    constrained = any(turn.tokens and turn.tokens.forced is not None for turn in part)
    last = part[-1]
    return Rollout(
        tokens=tuple(tokens),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        policy_versions=tuple(versions),
        temperature=last.tokens.temperature if last.tokens is not None else 1.0,
        scores={},
        stop_reason="length" if last.finish_reason == "length" else "stop",
        processed_logprobs=tuple(processed) if reshaped else None,
        forced=tuple(forced) if constrained else None,
    )


def _step_fields(turn: SessionTurn, session: Session, *, copied: bool) -> Json:
    step: Json = {"timestamp": iso_time(turn.at)}
    if turn.model:
        step["model_name"] = turn.model
    if copied:
        return step | {"is_copied_context": True}
    usage = turn.usage or {}
    counted = ("prompt_tokens", "completion_tokens")
    metrics: Json = {key: usage[key] for key in counted if key in usage}
    extra: Json = {"finish_reason": turn.finish_reason, "response_id": turn.response_id}
    if (tokens := turn.tokens) is not None:
        everything = session.sequence(turn.id)
        metrics |= {
            "prompt_token_ids": everything[: len(everything) - len(tokens.completion)],
            "completion_token_ids": tokens.completion,
            "logprobs": tokens.logprobs,
        }
        versions = [list(span) for span in tokens.versions]
        extra |= {"policy_versions": versions, "temperature": tokens.temperature}
        optional = {"processed_logprobs": tokens.processed_logprobs, "forced": tokens.forced}
        extra |= present(optional)
    return step | {"metrics": metrics | {"extra": extra}, "llm_call_count": 1}


def read_sessions(directory: Path) -> Iterable[Session]:
    """Every session of a recorder's directory, by name. Raises TraceError: not found, or one
    cannot be read."""
    folder = directory / SESSIONS
    if not folder.is_dir():
        raise TraceError(f"{directory} holds no recorded sessions: it has no folder {SESSIONS!r}")
    return (Session.read(path) for path in regular_files(folder, "*.jsonl"))


def prompt_hash(messages: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of the messages before the first answer, in hexadecimal: what a label was about."""
    digest = hashlib.sha256()
    for message in messages:
        if message.get("role") == "assistant":
            break
        digest.update(dump_line([message.get("role"), message.get("content")]))
    return digest.hexdigest()


def label_about(trace: Trace, name: str, value: float, by: str) -> Label:
    """Return a label of now, with the hash of the trace's prompt."""
    values: Json = {"name": name, "value": value, "by": by, "at": time.time()}
    return Label.model_validate(values | {"prompt_hash": prompt_hash(trace.messages)})


# ---------------------------------------------------------------------- which call continues with
# which


def text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def chained_key(chain: str, digest: bytes) -> str:
    """The key of a conversation whose key was `chain`, and of one message more."""
    return hashlib.blake2b(chain.encode() + digest, digest_size=16).hexdigest()


def next_key(chain: str, message: Mapping[str, Any]) -> str:
    """The key of a conversation and one message more."""
    return chained_key(chain, text_digest(compared_text(message)))


def continued(
    messages: Iterable[Json], ends: Mapping[str, str], next_key: Callable[[str, Json], str]
) -> tuple[str, str | None, int]:
    """Return the key of a conversation, the turn that it continues after, and how many of its
    messages come before that turn's end.

    Args:
        ends: key → turn, of earlier conversations.
        next_key: makes the key of a conversation and one message more.
    """
    chain, parent, answered = "", None, 0
    for number, message in enumerate(messages, 1):
        chain = next_key(chain, message)
        if chain in ends:
            parent, answered = ends[chain], number
    return chain, parent, answered


def compared_text(message: Mapping[str, Any]) -> str:
    """Return the text by which two messages are compared: role, text, calls. A client may leave out
    reasoning, nulls and annotations."""
    calls = [
        (call.get("id"), function.get("name"), _arguments(function))
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping)
        for function in [call.get("function") or {}]
    ]
    shown = message.get("content")
    if not isinstance(shown, list) or all(
        isinstance(part, str) or mapping(part).get("type") == "text" for part in shown
    ):
        shown = text_of(shown)
    compared = [message.get("role"), shown, calls, message.get("tool_call_id")]
    return json.dumps(compared, sort_keys=True)


def _arguments(function: Mapping[str, Any]) -> Any:
    parsed = parsed_arguments(function.get("arguments"))
    return function.get("arguments") if parsed is None else parsed
