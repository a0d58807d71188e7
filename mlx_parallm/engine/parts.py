"""Parts of which an engine is made: its options, the room of its cache, and the weights as it last
saw them.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mlx_parallm.engine.cache.batch import RunningCache
from mlx_parallm.engine.scheduling.room import CacheRoom, cache_room
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.weights import SharedWeights, WeightsView


@dataclass(frozen=True)
class EngineOptions:
    """Made from the configuration by `starting.engine_options`."""

    max_model_len: int
    vocab_size: int
    max_rows: int  # sequences decoded together
    prefill_chunk: int  # prompt tokens between two decode steps
    max_prefill_ms: int | None  # time for them; see PrefillPace
    kv_cache_bytes: int | None  # keys and values of running sequences; None = unbounded
    # keys and values lie by tokens if the architecture allows it, see cache/batch.py
    by_tokens: bool
    prefix_cache_bytes: int  # keys and values kept for later requests; 0 = none
    default_max_tokens: int | None  # for requests without a limit; None = all the room there is
    seed: int  # for requests without one
    architecture: str  # for error texts
    processed_alternatives: bool  # see SamplingBatch
    close_objects: bool  # see Grammars
    prompt_lookup: int  # tokens of a draft (decoding/prompt_lookup.py); 0 = none
    async_scheduling: bool = False  # see ModelRunner.launch_after
    # 8 or 4: keys and values are quantised, by tokens; see cache/kv_format.py
    kv_bits: int | None = None


class PresentWeights:
    """The weights as the engine last saw them under their read lock.

    Args:
        forget_others: called after a change of weights with those whose prefixes may be kept:
            (adapter's serial, whether a request names its version) each, and the base's serial.
    """

    def __init__(
        self,
        weights: SharedWeights,
        forget_others: Callable[[set[tuple[int, bool]], int], None],
    ) -> None:
        self._weights, self._forget_others = weights, forget_others
        self.version = self._revision = self.base_serial = -1

    def note(self, view: WeightsView) -> None:
        """Note the served adapters, under the read lock."""
        if view.revision == self._revision:
            return
        self.version, self._revision = view.policy_version, view.revision
        self.base_serial = view.base_serial
        newest = {(adapter.serial, False) for adapter in view.adapters.values()} | {(0, False)}
        pinned = {(serial, True) for serial in self._weights.history.serials}
        self._forget_others(newest | pinned, view.base_serial)

    def of(self, sequence: Sequence) -> Hashable:
        """Identify the weights that compute the sequence now: its adapter's arrays and the base's.

        A pinned version shares no prefix with requests that had it as the newest: a publish may
        have come while their prompts were computed.
        """
        adapter = sequence.adapter
        arrays = (0, False) if adapter is None else (adapter.weights.serial, adapter.pinned)
        return (*arrays, self.base_serial)


def room_of(cache: RunningCache, options: EngineOptions) -> CacheRoom:
    """Return the room of a cache, in positions."""
    token_bytes, snapshot = cache.token_bytes(), cache.snapshot_bytes()
    bound = None
    if options.kv_cache_bytes is not None and token_bytes:
        bound = options.kv_cache_bytes // token_bytes
    return cache_room(
        bound,
        options.prefix_cache_bytes // max(token_bytes, 1),
        rewindable=cache.rewindable,
        snapshot_tokens=None if snapshot is None else math.ceil(snapshot / max(token_bytes, 1)),
        by_tokens=cache.shares,
        prompt_cost=cache.prefill_token_bytes() / token_bytes if token_bytes else 1.0,
    )
