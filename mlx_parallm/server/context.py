"""The parts that routes share. The daemon makes a `ServerState`, puts it into `ServerDeps` and
hands these to `create_app`, which builds the one `ServerContext`; once the model is loaded the
daemon calls `state.ready(…)`.

    daemon ── ServerState ──► ServerDeps ──► create_app ──► ServerContext ──► every route
"""

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import structlog
from fastapi import Depends
from fastapi import Request as HTTPRequest

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.client import CLIENTS, MEMORY
from mlx_parallm.engine.validation import MOST_ALTERNATIVES, check_alternatives
from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.execution.parts.kinds import Shown
from mlx_parallm.execution.prompt_images import ImageReader, kinds_read
from mlx_parallm.server.errors import ServerBusyError
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.protocol.fields import MAX_BODY_BYTES
from mlx_parallm.server.stored_responses import ResponseStore
from mlx_parallm.types import Request

MOST_ALTERNATIVES_AT_ONCE = 2 * MOST_ALTERNATIVES  # over all answers in progress

if TYPE_CHECKING:
    from mlx_parallm.engine.adapter_loader import AdapterLoader
    from mlx_parallm.engine.client import EngineClient
    from mlx_parallm.models.tokenizer import Tokenizer
    from mlx_parallm.rollout_store.completions import KeptCompletions


@dataclass(frozen=True, slots=True)
class LoadedParts:
    """The parts that exist once the model is loaded. The tokenizer belongs to the server's
    thread alone."""

    engine: "EngineClient"
    tokenizer: "Tokenizer"
    adapters: "AdapterLoader | None"
    image_reader: ImageReader | None = None  # None: the model reads text alone
    # fields of a request → the model's default (generation_config.json)
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)


class ServerState:
    """Loading, ready, draining; a server without a model is never loading.

    All but `answering` may be called from any thread (one reference is swapped).
    """

    def __init__(self, *, needs_model: bool = True) -> None:
        self.metrics = ServerMetrics()
        self._needs_model = needs_model
        self.failure: str | None = None
        self.draining = False
        self._parts: LoadedParts | None = None
        self._answering = 0
        self._quiet = threading.Event()
        self._quiet.set()

    def ready(
        self,
        engine: "EngineClient",
        tokenizer: "Tokenizer",
        adapters: "AdapterLoader | None" = None,
        image_reader: ImageReader | None = None,
        sampling_defaults: Mapping[str, float | int] | None = None,
    ) -> None:
        """Let every route answer from now on; call it once."""
        self.metrics.watch_engine(engine.stats, engine.rank_stats)
        self._parts = LoadedParts(
            engine, tokenizer, adapters, image_reader, sampling_defaults or {}
        )

    def failed(self, reason: str) -> None:
        """The model could not be loaded: /health says why."""
        self.failure = reason

    def drain(self, timeout_s: float) -> None:
        """Answer new requests with 503; return once the running ones have ended, or after
        `timeout_s`."""
        self.draining = True
        self._quiet.wait(timeout_s)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request that was let in; in the server's thread."""
        self._answering += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._quiet.set()

    @property
    def parts(self) -> LoadedParts:
        """Raises EngineUnavailableError while loading."""
        if self._parts is None:
            raise EngineUnavailableError("the model is still loading")
        return self._parts

    @property
    def unavailable(self) -> tuple[str, str] | None:
        """The reason why no request is let in: ("loading" | "failed" | "draining", a sentence);
        None when requests are."""
        if self.draining:
            return "draining", "the server is shutting down"
        if self._parts is not None or not self._needs_model:
            return None
        if self.failure:
            return "failed", f"the model could not be loaded: {self.failure}"
        return "loading", "the model is still loading"


class RollbackRequest(Protocol):
    """A requested rollback. `result`: its numbers, once it is done; the error, when it was
    refused."""

    @property
    def target(self) -> object: ...
    @property
    def result(self) -> Future[dict[str, Any]]: ...


class RollbackAPI(Protocol):
    """Takes requests to roll the trained weights back. The trainer's side implements it, the
    daemon connects it."""

    def request(self, *, version: int | None, checkpoint: str | None) -> RollbackRequest:
        """Requests one target. Raises RefusedError: another request waits, or the training has
        ended."""

    def last(self) -> RollbackRequest | None:
        """The last request; None = there was none."""


class ConversationScorer(Protocol):
    """The reward model: `models.scoring.reward_model.RewardScorer`."""

    @property
    def name(self) -> str: ...
    @property
    def prompt_format(self) -> str:
        """ "chat" or "text": whether it reads messages or texts."""
        ...

    def score(
        self,
        conversations: Sequence[str | Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Future[tuple[list[float], int]]:
        """Return a future of the scores, and of the number of tokens that were read."""
        ...


@dataclass(frozen=True)
class ServerDeps:
    """Everything an app is made of."""

    state: ServerState
    config: ServerConfig
    api_key: str | None = None  # resolved from the configuration, its file or the environment
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    # for /v1/rewards; None = this server trains nothing
    completions: "KeptCompletions | None" = None
    rollbacks: RollbackAPI | None = None  # for /v1/training/rollback; None = the same
    scorer: ConversationScorer | None = None  # for /v1/score; None = there is no reward model


class RunningRequests:
    """The names by which clients know running generations: the id in the answer, X-Request-ID,
    their own `request_id`.

    For /abort_requests. The server's thread only.
    """

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}  # engine request id → names

    @contextmanager
    def holding(self, requests: Iterable[Request], client_id: str | None = None) -> Iterator[None]:
        """Note the engine requests of one HTTP request while they run. `client_id`: a name that
        its body has."""
        # X-Request-ID, see RequestContextMiddleware
        header = structlog.contextvars.get_contextvars().get("request_id")
        shared = {name for name in (client_id, header) if name is not None}
        names = {
            r.request_id: frozenset({*shared, r.request_id, r.request_id.rpartition("-")[0]})
            for r in requests
        }
        self._names |= names
        try:
            yield
        finally:
            for request_id in names:
                self._names.pop(request_id, None)

    def find(self, names: Collection[str] | None) -> list[str]:
        """Engine request ids of all running requests, or of those named in `names`."""
        return [
            key
            for key, aliases in self._names.items()
            if names is None or not aliases.isdisjoint(names)
        ]


class AlternativesHeld:
    """The log-probabilities of other tokens in answers that are being made. The server's thread
    only."""

    def __init__(self) -> None:
        self._numbers = 0

    @contextmanager
    def holding(self, numbers: int) -> Iterator[None]:
        """Raises ServerBusyError: with these there would be MOST_ALTERNATIVES_AT_ONCE. One
        answer alone may be made."""
        if numbers and self._numbers and self._numbers + numbers > MOST_ALTERNATIVES_AT_ONCE:
            raise ServerBusyError(
                f"answers with {self._numbers} log-probabilities of other tokens run; try again"
            )
        self._numbers += numbers
        try:
            yield
        finally:
            self._numbers -= numbers


class ServerContext:
    """The app's shared parts, reached by routes through the `Context` annotation."""

    def __init__(self, deps: ServerDeps) -> None:
        self.deps = deps
        self.metrics = deps.state.metrics
        self.created = int(time.time())
        self.running = RunningRequests()
        self.responses = ResponseStore(deps.config.stored_responses_bytes)
        self.alternatives = AlternativesHeld()
        self._admitted = self._choices = 0

    @property
    def engine(self) -> "EngineClient":
        return self.deps.state.parts.engine

    @property
    def tokenizer(self) -> "Tokenizer":
        return self.deps.state.parts.tokenizer

    @property
    def image_reader(self) -> ImageReader | None:
        return self.deps.state.parts.image_reader

    @property
    def shown(self) -> Shown:
        """Return the kinds of parts beside text that the model reads."""
        return kinds_read(self.image_reader)

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]:
        return self.deps.state.parts.sampling_defaults

    @property
    def clients_paused(self) -> bool:
        """True between a client's /pause and /resume; the trainer's own drain does not count."""
        return CLIENTS in self.engine.stats().holders

    @property
    def admission_paused(self) -> bool:
        """True while new requests wait: a client has paused, or memory is short."""
        return not {CLIENTS, MEMORY}.isdisjoint(self.engine.stats().holders)

    @property
    def _waiting(self) -> int:
        """Choices of HTTP requests that have no row: those that the engine says, as far as they
        may be ours and not those of in-process rollouts, or those that it has not seen yet."""
        return max(self._choices - self._places, min(self.engine.stats().waiting, self._choices))

    @property
    def _places(self) -> int:
        """Choices that may run at once, on the engines of all ranks."""
        return self.deps.config.batch_size * self.engine.engines

    @contextmanager
    def admitted(self, requests: Sequence[Request]) -> Iterator[None]:
        """Hold one of `max_concurrent_requests` places for an HTTP request of these engine
        requests. Raises ServerBusyError when all are taken, or as many choices wait as may, or
        answers are large enough already;
        RequestError: this answer would be too large."""
        config = self.deps.config
        numbers = check_alternatives(requests, self.engine.max_model_len)
        if self._admitted >= config.max_concurrent_requests:
            limit = config.max_concurrent_requests
            raise ServerBusyError(
                f"the server is busy: {limit} requests are running or waiting; try again"
            )
        most, waiting = config.max_waiting_requests, self._waiting
        would_wait = waiting > 0 or self._choices >= self._places
        if most is not None and would_wait and waiting >= most:
            reason = f"{waiting} choices wait for a place (server.max_waiting_requests = {most})"
            raise ServerBusyError(f"the server is busy: {reason}; try again")
        choices = sum(request.params.n for request in requests)
        with self.alternatives.holding(numbers):
            self._choices += choices
            self._admitted += 1
            self.metrics.http_in_flight.set(self._admitted)
            try:
                yield
            finally:
                self._admitted -= 1
                self._choices -= choices
                self.metrics.http_in_flight.set(self._admitted)


async def _context_of(request: HTTPRequest) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(_context_of)]
