"""The engines of one thread: one, or one more for chats that do not wait for rollouts
(`rl_training.serve_priority = "chat"`).

Requests with a negative `priority` go to the second engine, over the same weights, whose rows and
prefixes are its own. While it has work, the rows of all others rest, and so does the trainer
(system/serve_priority.py). A step of a few rows takes less than one of a full batch, so a chat
continues as if it were alone. The others rest at most `REST` times as long as their last step took:
chats without a pause leave them a thirtieth of the time.
"""

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.live_requests import Event, id_in_use
from mlx_parallm.engine.parts import EngineOptions
from mlx_parallm.engine.validation import check_request
from mlx_parallm.errors import RequestError
from mlx_parallm.system.serve_priority import REST
from mlx_parallm.types import Request

LANE_ROWS = 8  # sequences that the lane decodes together
LANE_LENGTH = 4096  # tokens that a chat without `max_tokens` needs room for
LANE_SHARE = 8  # it has this part of the memory for keys and values, and of that for prefixes


class Lanes:
    """
    Args:
        others: the engine of all requests that are not chats.
        chats: the chats' own; None: `others` takes them too.

    Attributes:
        last: the engine that took the last step, or failed in it.
    """

    def __init__(self, others: Engine, chats: Engine | None = None) -> None:
        self.others, self.chats = others, chats
        self.last = others
        self._step_s = self._rested_since = 0.0

    def __iter__(self) -> Iterator[Engine]:
        yield self.others
        if self.chats is not None:
            yield self.chats

    @property
    def has_work(self) -> bool:
        """True when there is something to compute or an event to deliver."""
        return any(engine.has_work for engine in self)

    @property
    def idle(self) -> bool:
        """True when nothing runs; requests may wait while admission is paused."""
        return all(engine.idle for engine in self)

    @property
    def serves_chats(self) -> bool:
        """True while rollouts and training rest for requests with a negative priority."""
        return self.chats is not None and self.chats.has_work

    def step(self, *, ahead: bool = True) -> list[Event]:
        """Give every running chat a token; if there is none, or the others have rested long
        enough, every other sequence."""
        if self.chats is None:
            return self.others.step(ahead=ahead)
        now = perf_counter()
        rested = now - self._rested_since >= REST * self._step_s
        if self.chats.has_work and not (self.others.has_work and rested):
            self.last = self.chats
            return self.chats.step(ahead=ahead)
        self.last = self.others
        # one that is started ahead would run beside the chat's
        events = self.others.step(ahead=ahead and not self.chats.has_work)
        self._rested_since = perf_counter()
        self._step_s = self._rested_since - now
        return events

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError (or a subclass): nothing is queued then."""
        if self.chats is None:
            self.others.add(request)
            return
        takes, rests = self.others, self.chats
        if self._is_chat(request, self.chats):
            takes, rests = self.chats, self.others
        if rests.holds(request.request_id):
            raise id_in_use(request.request_id)
        takes.add(request)

    def take_events(self) -> list[Event]:
        """Return the events that came up outside of `step` (aborts, empty requests)."""
        return [event for engine in self for event in engine.take_events()]

    def _is_chat(self, request: Request, chats: Engine) -> bool:
        """Whether the request goes to the chats' lane. A text that is scored, or one that its
        memory does not hold with its answer, waits with the others."""
        params = request.params
        if (
            request.priority >= 0
            or params.prompt_logprobs is not None
            or params.pooling is not None
        ):
            return False
        try:
            check_request(request, chats.limits)
        except RequestError:
            return False
        if params.max_tokens is not None:
            return True
        prompt = len(request.prompt_token_ids)
        longest = min(self.others.limits.default_length(prompt), LANE_LENGTH)
        return chats.limits.default_length(prompt) >= longest


def divided(options: EngineOptions) -> tuple[EngineOptions, EngineOptions]:
    """Return the options of the other requests, and of the chats: the memory is divided."""
    kv, prefixes = options.kv_cache_bytes, options.prefix_cache_bytes
    lane_kv = None if kv is None else kv // LANE_SHARE
    lane = replace(
        options,
        max_rows=min(LANE_ROWS, options.max_rows),
        kv_cache_bytes=lane_kv,
        prefix_cache_bytes=prefixes // LANE_SHARE,
        seed=options.seed + 1,
    )
    main = replace(
        options,
        kv_cache_bytes=None if kv is None or lane_kv is None else kv - lane_kv,
        prefix_cache_bytes=prefixes - lane.prefix_cache_bytes,
    )
    return main, lane
