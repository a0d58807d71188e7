"""What the routes share. The daemon makes a `ServerState`, puts it into `ServerDeps` and hands these to `create_app`,
which builds the one `ServerContext`; once the model is loaded the daemon calls `state.ready(engine, tokenizer)`.

    daemon ── ServerState ──► ServerDeps ──► create_app ──► ServerContext ──► every route (`Context` parameter)
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request

from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.token_texts import TokenTexts

if TYPE_CHECKING:
    from mlx_parallm.engine.client import EngineClient
    from mlx_parallm.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedParts:
    """What exists only once the model is loaded. The tokenizer belongs to the server's thread alone."""

    engine: "EngineClient"
    tokenizer: "Tokenizer"
    texts: TokenTexts


class ServerState:
    """Loading, then ready. `ready` and `failed` may be called from any thread (one reference is swapped)."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics()
        self.failure: str | None = None
        self._parts: LoadedParts | None = None

    def ready(self, engine: "EngineClient", tokenizer: "Tokenizer") -> None:
        """From now on every route answers; call it once."""
        self.metrics.watch_engine(engine.stats)
        self._parts = LoadedParts(engine, tokenizer, TokenTexts(tokenizer))

    def failed(self, reason: str) -> None:
        """The model could not be loaded: /health says why."""
        self.failure = reason

    @property
    def is_ready(self) -> bool:
        return self._parts is not None

    @property
    def parts(self) -> LoadedParts:
        """Raises EngineUnavailableError while loading."""
        if self._parts is None:
            raise EngineUnavailableError(self.unavailable_reason)
        return self._parts

    @property
    def unavailable_reason(self) -> str:
        return f"the model could not be loaded: {self.failure}" if self.failure else "the model is still loading"


@dataclass(frozen=True)
class ServerDeps:
    """Everything an app is made of."""

    state: ServerState
    api_key: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_concurrent_requests: int = 256  # HTTP generation requests at once; more are answered 503
    max_body_bytes: int = 32 * 1024 * 1024
    stall_seconds: float = 60.0  # /health is 503 when there is work and no engine step for so long
    extra_routers: Sequence[APIRouter] = ()  # e.g. /atropos; behind the same key and loading gate


class ServerContext:
    """The app's shared parts, reached by routes through the `Context` annotation."""

    def __init__(self, deps: ServerDeps) -> None:
        self.deps = deps
        self.created = int(time.time())
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
    def metrics(self) -> ServerMetrics:
        return self.deps.state.metrics

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Holds one of `max_concurrent_requests` places. Raises EngineUnavailableError when all are taken."""
        limit = self.deps.max_concurrent_requests
        if self._admitted >= limit:
            raise EngineUnavailableError(f"the server is busy: {limit} requests are being answered; try again")
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
