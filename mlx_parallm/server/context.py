"""What the routes share. The daemon makes a `ServerState`, puts it into `ServerDeps` and hands these to `create_app`,
which builds the one `ServerContext`; once the model is loaded the daemon calls `state.ready(engine, tokenizer)`.

    daemon ── ServerState ──► ServerDeps ──► create_app ──► ServerContext ──► every route (`Context` parameter)
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request

from mlx_parallm.engine.client import CLIENTS
from mlx_parallm.errors import AdapterRefusedError, EngineUnavailableError
from mlx_parallm.server.errors import ServerBusyError
from mlx_parallm.server.in_flight import InFlight
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.protocol.fields import MAX_BODY_BYTES
from mlx_parallm.server.protocol.token_texts import TokenTexts

if TYPE_CHECKING:
    from mlx_parallm.engine.adapter_loader import AdapterLoader
    from mlx_parallm.engine.client import EngineClient
    from mlx_parallm.models.tokenizer import Tokenizer
    from mlx_parallm.rollout_store.completions import KeptCompletions
    from mlx_parallm.server.api.training import RollbackDesk


@dataclass(frozen=True, slots=True)
class LoadedParts:
    """What exists only once the model is loaded. The tokenizer belongs to the server's thread alone."""

    engine: "EngineClient"
    tokenizer: "Tokenizer"
    texts: TokenTexts
    adapters: "AdapterLoader | None"


class ServerState:
    """Loading, ready, draining. All but `answering` may be called from any thread (one reference is swapped)."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics()
        self.failure: str | None = None
        self.draining = False
        self._parts: LoadedParts | None = None
        self._answering = 0
        self._quiet = threading.Event()
        self._quiet.set()

    def ready(self, engine: "EngineClient", tokenizer: "Tokenizer", adapters: "AdapterLoader | None" = None) -> None:
        """From now on every route answers; call it once."""
        self.metrics.watch_engine(engine.stats)
        self._parts = LoadedParts(engine, tokenizer, TokenTexts(tokenizer), adapters)

    def failed(self, reason: str) -> None:
        """The model could not be loaded: /health says why."""
        self.failure = reason

    def drain(self, timeout_s: float) -> None:
        """From now on new requests are answered 503; returns once the running ones have ended, or the time is over."""
        self.draining = True
        self._quiet.wait(timeout_s)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around each request that is let in; in the server's thread."""
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
        """Why no request is let in: ("loading" | "failed" | "draining", a sentence); None when they are."""
        if self.draining:
            return "draining", "the server is shutting down"
        if self._parts is not None:
            return None
        if self.failure:
            return "failed", f"the model could not be loaded: {self.failure}"
        return "loading", "the model is still loading"


@dataclass(frozen=True)
class ServerDeps:
    """Everything an app is made of."""

    state: ServerState
    api_key: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent_requests: int = 256  # HTTP generation requests that run or wait; more are answered 429
    max_body_bytes: int = MAX_BODY_BYTES
    request_timeout_s: float = 0.0  # no answer takes longer (504); 0 = no limit
    stall_seconds: float = 60.0  # /health is 503 when there is work and no engine step for so long
    cors_origins: Sequence[str] = ()  # web pages of these origins may read answers; ("*",) = any
    logprobs_mode: str = "raw"  # or "processed": what `logprobs` in answers are, see ServerConfig
    extra_routers: Sequence[APIRouter] = ()  # e.g. /atropos; behind the same key and loading gate
    completions: "KeptCompletions | None" = None  # for /v1/rewards; None = this server trains nothing
    rollbacks: "RollbackDesk | None" = None  # for /v1/training/rollback; None = the same


class ServerContext:
    """The app's shared parts, reached by routes through the `Context` annotation."""

    def __init__(self, deps: ServerDeps) -> None:
        self.deps = deps
        self.created = int(time.time())
        self.in_flight = InFlight()
        self._admitted = 0

    @property
    def engine(self) -> "EngineClient":
        return self.deps.state.parts.engine

    @property
    def tokenizer(self) -> "Tokenizer":
        return self.deps.state.parts.tokenizer

    @property
    def texts(self) -> TokenTexts:
        return self.deps.state.parts.texts

    @property
    def adapters(self) -> "AdapterLoader":
        """Raises AdapterRefusedError: this server's adapters are fixed."""
        adapters = self.deps.state.parts.adapters
        if adapters is None:
            raise AdapterRefusedError("this server loads no adapters while it runs", 403)
        return adapters

    @property
    def metrics(self) -> ServerMetrics:
        return self.deps.state.metrics

    @property
    def clients_paused(self) -> bool:
        """True between a client's /pause and /resume; the trainer's own drain does not count."""
        return CLIENTS in self.engine.stats().holders

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Holds one of `max_concurrent_requests` places. Raises ServerBusyError when all are taken."""
        limit = self.deps.max_concurrent_requests
        if self._admitted >= limit:
            raise ServerBusyError(f"the server is busy: {limit} requests are running or waiting; try again")
        self._admitted += 1
        self.metrics.http_in_flight.set(self._admitted)
        try:
            yield
        finally:
            self._admitted -= 1
            self.metrics.http_in_flight.set(self._admitted)


async def _context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


Context = Annotated[ServerContext, Depends(_context_of)]
