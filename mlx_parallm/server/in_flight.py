"""Which running generations go by the ids that clients know: those in our answers, their X-Request-ID, their own
`request_id`. /abort_requests looks here. Used by the server's thread only."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import structlog

from mlx_parallm.types import Request


class InFlight:
    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}  # engine request id → what clients may call it

    @contextmanager
    def holding(self, requests: Iterable[Request], client_id: str | None = None) -> Iterator[None]:
        """Around the generation of one HTTP request's engine requests; `client_id`: a name that its body gave."""
        header = structlog.contextvars.get_contextvars().get("request_id")  # X-Request-ID, see RequestContextMiddleware
        shared = {name for name in (client_id, header) if name is not None}
        held = {r.request_id: frozenset({*shared, r.request_id, r.request_id.rpartition("-")[0]}) for r in requests}
        self._names |= held
        try:
            yield
        finally:
            for request_id in held:
                self._names.pop(request_id, None)

    def find(self, names: Collection[str] | None) -> list[str]:
        """Engine request ids of everything in flight, or of what goes by one of `names`."""
        if names is None:
            return list(self._names)
        wanted = set(names)
        return [request_id for request_id, known in self._names.items() if known & wanted]
