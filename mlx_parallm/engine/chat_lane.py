"""An engine in which chats do not wait for rollouts (`rl_training.serve_priority = "chat"`).

Requests with a negative `priority` go to a second engine over the same weights, whose rows and
prefixes are its own: the lane. While it has work, the rows of all others rest, and so does the
trainer (system/turns.py). A step of a few rows takes less than one of a full batch, so a chat goes
on as if it were alone. The others rest at most `REST` times as long as their last step took: chats
without a pause leave them a thirtieth of the time.
"""

from dataclasses import replace
from time import perf_counter

import mlx.nn as nn

from mlx_parallm.engine.engine import Engine, EngineOptions
from mlx_parallm.engine.images import ImageFeatures
from mlx_parallm.engine.live_requests import Event
from mlx_parallm.engine.validation import check_request
from mlx_parallm.errors import RequestError
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.turns import REST
from mlx_parallm.types import Request
from mlx_parallm.weights import SharedWeights

LANE_ROWS = 8  # sequences that the lane decodes together
LANE_LENGTH = 4096  # tokens that a chat without `max_tokens` needs room for
LANE_SHARE = 8  # it has this part of the memory for keys and values, and of that for prefixes


class ChatLaneEngine(Engine):
    """An `Engine` of the same arguments and errors. Counters, rows and caches are those of the
    other requests; `lanes` has the chats' too."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        weights: SharedWeights,
        lora: LoraContext,
        options: EngineOptions,
        images: ImageFeatures | None = None,
    ) -> None:
        main, lane = divided(options)
        super().__init__(model, tokenizer, weights, lora, main, images)
        self._lane = Engine(model, tokenizer, weights, lora, lane, images)
        self._lane.grammars = self.grammars  # those that clients prepare on other threads
        self._in_lane = False  # the last step was the lane's
        self._step_s = self._rested_since = 0.0

    @property
    def lanes(self) -> tuple[Engine, ...]:
        return self, self._lane

    @property
    def lane(self) -> int:
        return int(self._in_lane)

    @property
    def serves_chats(self) -> bool:
        return self._lane.has_work

    @property
    def has_work(self) -> bool:
        return super().has_work or self._lane.has_work

    @property
    def idle(self) -> bool:
        return super().idle and self._lane.idle

    def step(self, *, ahead: bool = True) -> list[Event]:
        """Give every running chat a token; where there is none, or the others have rested long
        enough, every other sequence."""
        now = perf_counter()
        rested = now - self._rested_since >= REST * self._step_s
        self._in_lane = self._lane.has_work and not (super().has_work and rested)
        if self._in_lane:
            return self._lane.step(ahead=ahead)
        # one that is started ahead would run beside the chat's
        events = super().step(ahead=ahead and not self._lane.has_work)
        self._rested_since = perf_counter()
        self._step_s = self._rested_since - now
        return events

    def add(self, request: Request) -> None:
        if self._is_chat(request) and not super().holds(request.request_id):
            self._lane.add(request)
        else:
            super().add(request)

    def holds(self, request_id: str) -> bool:
        return super().holds(request_id) or self._lane.holds(request_id)

    def _is_chat(self, request: Request) -> bool:
        """Whether the request goes to the lane. A text that is scored, or one that its memory
        does not hold with its answer, waits with the others."""
        params = request.params
        if (
            request.priority >= 0
            or params.prompt_logprobs is not None
            or params.pooling is not None
        ):
            return False
        try:
            check_request(request, self._lane.limits)
        except RequestError:
            return False
        if params.max_tokens is not None:
            return True
        prompt = len(request.prompt_token_ids)
        longest = min(self.limits.default_length(prompt), LANE_LENGTH)
        return self._lane.limits.default_length(prompt) >= longest

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._lane.abort(request_id)

    def pause(self, holder: str, *, freeze: bool) -> None:
        super().pause(holder, freeze=freeze)
        self._lane.pause(holder, freeze=freeze)

    def resume(self, holder: str) -> None:
        super().resume(holder)
        self._lane.resume(holder)

    def fail_active(self, error: str) -> list[Event]:
        return self._lane.fail_active(error) if self._in_lane else super().fail_active(error)

    def recover(self) -> bool:
        return self._lane.recover() if self._in_lane else super().recover()

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._lane.reset_prefix_cache()

    def take_events(self) -> list[Event]:
        return [*super().take_events(), *self._lane.take_events()]

    def release_memory(self) -> None:
        super().release_memory()
        self._lane.release_memory()

    def release_caches(self) -> None:
        super().release_caches()
        self._lane.release_caches()

    def check_integrity(self) -> None:
        super().check_integrity()
        self._lane.check_integrity()


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
