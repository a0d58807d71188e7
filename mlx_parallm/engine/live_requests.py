"""The requests that have not ended, and the events that their clients receive. No MLX.

`Engine` reports what happened to a sequence; `LiveRequests` turns that into events (deltas, the end
of a request).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.errors import ParallmError, RequestError
from mlx_parallm.types import CompletionDelta, FinishReason, PromptLogprobs, Request, RequestOutput


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """The new tokens and text of one choice of a streamed request."""

    request_id: str
    delta: CompletionDelta


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation request, streamed or not."""

    request_id: str
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be run at all."""

    request_id: str
    error: ParallmError


Event = StreamDelta | Finished | Failed
_T = TypeVar("_T")

STEP_PARTS = {
    "schedule": "choosing its rows and prompts, making room for them, moving rows",
    "build": "waiting for the weight lock, and building the graph in Python",
    "compute": "waiting for the device",
    "read": "texts, stop strings and events of the new tokens",
    "score": "a prompt that is scored or embedded beside it",
}


@dataclass
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0  # guessed by prompt lookup …
    accepted_draft_tokens: int = 0  # … and how many of them were sampled
    requests_finished: int = 0
    requests_failed: int = 0
    requests_aborted: int = 0
    running: int = 0  # sequences that hold a row or were promised one
    kv_tokens: int = 0  # positions of all rows, shared ones counted in each
    kv_bytes: int = 0  # memory of keys and values, room for more included
    kv_bytes_shared: int = 0  # saved by sharing: what copies would add
    step_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))


def summed(counters: Iterable[Counters]) -> dict[str, Any]:
    """Return the sum of each counter, by name."""
    total: dict[str, Any] = vars(Counters())
    for some in counters:
        parts = {part: total["step_seconds"][part] + some.step_seconds[part] for part in STEP_PARTS}
        total = {
            name: parts if name == "step_seconds" else total[name] + value
            for name, value in vars(some).items()
        }
    return total


@dataclass
class LiveRequest:
    """A request and its unfinished sequences."""

    request: Request
    sequences: list[Sequence]
    unfinished: int
    prompt_logprobs: PromptLogprobs | None = None
    embedding: tuple[float, ...] | None = None
    scoring: bool = False


class LiveRequests:
    """Unfinished requests by id, with the events that are not delivered yet. Owned by the engine
    thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._live: dict[str, LiveRequest] = {}
        self._events: list[Event] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._live.values()))

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def start(self, request: Request, sequences: list[Sequence], *, scoring: bool) -> None:
        live = LiveRequest(request, sequences, unfinished=len(sequences), scoring=scoring)
        self._live[request.request_id] = live
        self._counters.prompt_tokens += len(request.prompt_token_ids)

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def sampled(self, sequence: Sequence) -> None:
        """The sequence has a new token, which may have ended it."""
        if sequence.finished:
            return self.retire(sequence)
        live = self._live[sequence.request_id]
        if live.request.stream:
            self._emit_delta(live, sequence)

    def retire(self, sequence: Sequence) -> None:
        """The sequence has finished: its last delta, and the request's end when it was the last."""
        with own_failure(sequence):
            sequence.text.finish()
        live = self._live[sequence.request_id]
        live.unfinished -= 1
        if live.request.stream:
            self._emit_delta(live, sequence)
        self._finish_if_done(live)

    def end_unfinished(
        self, live: LiveRequest, reason: FinishReason, error: str | None = None
    ) -> None:
        """End a request's remaining sequences, waiting or running; the scheduler frees rows
        and queue later. Choices that have ended and wait for the prompt's scores get this reason
        too: the answer is incomplete without them."""
        for sequence in live.sequences if live.scoring else ():
            if sequence.finished:
                sequence.finish(reason, error=error)
        live.scoring = False
        for sequence in live.sequences:
            if not sequence.finished:
                sequence.finish(reason, error=error)
                self.retire(sequence)
        self._finish_if_done(live)

    def scored(self, request_id: str, result: PromptLogprobs | tuple[float, ...]) -> None:
        """The prompt's log-probabilities are there, or its embedding."""
        live = self._live[request_id]
        live.scoring = False
        if isinstance(result, PromptLogprobs):
            live.prompt_logprobs = result
        else:
            live.embedding = result
        self._finish_if_done(live)

    def score_failed(self, request_id: str, error: str) -> None:
        self.end_unfinished(self._live[request_id], "error", error)

    def _finish_if_done(self, live: LiveRequest) -> None:
        request = live.request
        if live.unfinished or live.scoring or request.request_id not in self._live:
            return
        del self._live[request.request_id]
        completions = tuple(sequence.completion() for sequence in live.sequences)
        reasons = {completion.finish_reason for completion in completions}
        if "error" in reasons:
            self._counters.requests_failed += 1
        elif "abort" not in reasons:
            self._counters.requests_finished += 1
        scores = (live.prompt_logprobs, live.embedding)
        output = RequestOutput(request.request_id, request.prompt_token_ids, completions, *scores)
        self._events.append(Finished(request.request_id, output))

    def _emit_delta(self, live: LiveRequest, sequence: Sequence) -> None:
        since = sequence.emitted
        sequence.emitted = len(sequence.tokens)
        delta = CompletionDelta(
            index=sequence.index,
            text=sequence.text.take(),
            token_ids=tuple(sequence.tokens[since:]),
            logprobs=tuple(sequence.logprobs[since:]),
            top_logprobs=_behind(sequence.top_logprobs, since),
            policy_versions=tuple(sequence.versions[since:]),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            error_code=sequence.error_code,
            processed_logprobs=_behind(sequence.processed_logprobs, since),
            forced=_behind(sequence.forced, since),
            cached_tokens=0 if since or sequence.index else sequence.cached_prompt_tokens,
        )
        if sequence.records:
            delta = replace(delta, **sequence.recorded_since(since))
        self._events.append(StreamDelta(live.request.request_id, delta))


def _behind(column: list[_T] | None, since: int) -> tuple[_T, ...] | None:
    return None if column is None else tuple(column[since:])


def id_in_use(request_id: str) -> RequestError:
    """Return the error for a request id that is in use."""
    return RequestError(f"request_id {request_id!r} is in use", param="request_id")


@contextmanager
def own_failure(sequence: Sequence) -> Iterator[None]:
    """Make an exception of a sequence's text (a tokenizer may raise anything) end that sequence
    and no other."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - boundary: one request's text must not end the engine
        sequence.text.abandon()
        sequence.finish("error", error=f"the text cannot be decoded: {error!r}")
