"""The cache of any mlx-lm architecture, behind one face: `ModelRunner` and `Engine` know
`RunningCache` only.

    TokenCache   one forward decodes all rows, over the keys and values that they hold
                 (token_cache.py). Plain attention only, with or without recurrent states beside it
                 (states.py); not with server.kv_layout = "rectangle".
    BatchCache   one forward decodes all rows. Each layer keeps keys and values of all positions
                 (`rectangle.SlotCache`; a sliding window is a mask over them, so prefixes can be
                 shared), a recurrent state of fixed size a row (mlx-lm's ArraysCache, dense rows as
                 in SlotCache), or several of these (CacheList).
    RowCaches    one forward a row, over mlx-lm's own caches of that row alone: for architectures
                 that read `cache.offset` as a number, shape a mask for one row, or bring a cache of
                 their own. Prefixes are kept if a row holds keys and values only, and the model
                 continues from a part of them.

`choose_cache` asks the model at load, instead of at the first request, and takes the first that
gives what the model's own forward gives. mlx-lm's batch caches (left padding) are not used: they
copy all keys and values whenever a row comes or goes, and most architectures that need RowCaches
fail with them too. `tests/engine/test_architectures.py` holds both to mlx-lm's own answers.
"""

import copy
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.engine.cache.kv_format import AS_COMPUTED, GROUP_SIZES, KVFormat
from mlx_parallm.engine.cache.prefill import (
    CannotBatchError,
    arrays_of,
    keys_and_values,
    leaves,
    new_caches,
    present,
    states_of,
    token_bytes,
)
from mlx_parallm.engine.cache.prefix import PrefixChunk, Segment
from mlx_parallm.engine.cache.rectangle import LayerCache, SlotCache
from mlx_parallm.engine.cache.sharing import PromptRows, rows_of
from mlx_parallm.engine.cache.states import with_rows
from mlx_parallm.engine.cache.token_cache import TokenCache
from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_parallm.system.log import get_logger

# dimensions of the mask: 5 if attention's scores are [rows, key heads, repeats, 1, T] (Gemma 2)
MASK_AXES = (4, 5)
PROBE_ROWS = 5  # an odd number of rows: it fits no usual number of heads by accident
# relative to the largest logit: far above rounding, far below a wrong position …
_TOLERANCE = {mx.float32: 0.01}
_HALF_TOLERANCE = 0.1  # … and in half precision
_PROBE_ERRORS = (ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError)

log = get_logger(__name__)


class RunningCache(Protocol):
    """Keys, values and states of the running sequences: row i of the cache belongs to the
    scheduler's rows[i].

    This is all that engine and runner use of a cache, so its memory may be laid out in any way.
    A subclass may leave these out, and then has:

        shares, order, saved_positions   rows share nothing, and are numbered as in the batch
        place, truncate                  nothing: rows that come are written, those that end stay
        reserve                          nothing: each row grows by itself
        scrub_row                        nothing: no row reads another's positions
        snapshot_bytes                   None: no recurrent states, or none that can be read; then
                                         read_states is never called
        read_prefill                     is called with recurrent states only
    """

    @property
    def layout(self) -> str:
        """Its name in the log and in /metrics."""

    @property
    def rewindable(self) -> bool:
        """True when a row holds every prefix of itself, so that others can use its beginning."""

    @property
    def unread(self) -> list[mx.array]:
        """Arrays that a step computes and its logits do not need: to be evaluated with them,
        else its graph stays."""

    @property
    def nbytes(self) -> int:
        """Memory held now."""

    @property
    def saved_positions(self) -> int:
        """Positions saved by sharing: those that copies would add."""
        return 0

    def token_bytes(self) -> int:
        """Memory of one position of one row, all layers; 0 when it does not grow with the text."""

    def prefill_token_bytes(self) -> int:
        """Memory of one position of a prompt that is computed: more than `token_bytes` where
        rows are quantised."""

    def new_prefill(
        self, length: int, prefixes: SequenceOf[tuple[PrefixChunk, ...]] = ()
    ) -> list[Any]:
        """Caches of the model's layers for a prefill of `length` positions, which begin with the
        rows' `prefixes`."""

    @property
    def shares(self) -> bool:
        """True when rows can read segments that others read too (`PromptRows.chunks`)."""
        return False

    @property
    def order(self) -> list[int] | None:
        """The rows' numbers in the order of the step's batch; None: as they are numbered."""
        return None

    @property
    def one_by_one(self) -> bool:
        """Whether each row decodes in a forward of its own."""
        return False

    def place(self, prompts: SequenceOf[PromptRows], first_row: int) -> None:
        """Announces rows first_row, first_row + 1, …: `reserve` follows, and `write_prefixes`."""
        return

    def write_prefixes(
        self, prefill: SequenceOf[Any], prompts: SequenceOf[PromptRows], first_row: int
    ) -> None:
        """Gives rows first_row, first_row + 1, … their prompts from the rows of a prefill."""

    def read(self, row: int, start: int, stop: int) -> list[mx.array]:
        """Positions [start, stop) of a row for the prefix cache, not evaluated."""

    def read_prefill(self, prefill: SequenceOf[Any], start: int, stop: int) -> list[mx.array]:
        """Positions [start, stop) of a prefill of one row for the prefix cache, not evaluated."""
        raise RuntimeError("a cache without states that can be read has no snapshots")

    def snapshot_bytes(self) -> int | None:
        """Memory of a row's recurrent states; None: it has none, or they cannot be read."""
        return None

    def read_states(self, row: int) -> list[mx.array | None]:
        """The row's recurrent states for the prefix cache, [1, …] each, not evaluated."""
        raise RuntimeError("a cache without states that can be read has no snapshots")

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies rows of at most `length` positions onto other rows. No row may be source and
        target at once."""

    def truncate(self, rows: int) -> None:
        """The rows from number `rows` on have ended."""
        return

    def reserve(self, cached: SequenceOf[int], max_tokens: int | None = None) -> None:
        """Makes room for cached[i] + 1 tokens in row i, within `max_tokens` positions in all
        where possible."""
        return

    def begin_step(self, positions: list[int]) -> None:
        """Prepares a decode step: row i writes at positions[i]."""

    def batches(self) -> list[tuple[int, int, list[Any]]]:
        """(start, stop, caches) of each forward of the step: rows [start, stop) decode in it."""

    def scrub_row(self, row: int) -> None:
        """Removes a failed row's NaN."""
        return

    def shrink_to(self, cached: list[int]) -> None:
        """Gives memory back that rows of these token counts do not need."""

    def clear(self) -> None:
        """Gives all memory back."""

    def check_integrity(self, cached: list[int]) -> None:
        """Raises AssertionError when the arrays do not fit the rows' token counts. Cheap; for
        idle times."""


class BatchCache(SlotCache, RunningCache):
    """A rectangle for each layer of keys and values, and the recurrent states.

    Args:
        model: asked for its caches.
        max_rows: most sequences that decode together.
        max_positions: longest sequence.
        mask_axes: how many axes a mask has (MASK_AXES).

    Raises:
        CannotBatchError: a layer needs a cache of another kind.
    """

    layout = "rectangle"

    def __init__(
        self, model: nn.Module, max_rows: int, max_positions: int, *, mask_axes: int = MASK_AXES[0]
    ) -> None:
        super().__init__(0, max_rows, max_positions, mask_axes=mask_axes)
        self._model = model
        self._states: list[ArraysCache] = []
        self._model_caches = [self._served(cache) for cache in make_prompt_cache(model)]

    @property
    def rewindable(self) -> bool:
        return not self._states

    @property
    def unread(self) -> list[mx.array]:
        return [array for state in self._states for array in state.cache if array is not None]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(array.nbytes for array in self.unread)

    def new_prefill(
        self, length: int, prefixes: SequenceOf[tuple[PrefixChunk, ...]] = ()
    ) -> list[Any]:
        return new_caches(self._model, length, prefixes)

    def token_bytes(self) -> int:
        return token_bytes(self._model, self.new_prefill(1))

    prefill_token_bytes = token_bytes

    def read_prefill(self, prefill: SequenceOf[Any], start: int, stop: int) -> list[mx.array]:
        return keys_and_values(prefill, start, stop)

    def snapshot_bytes(self) -> int | None:
        if not self._states:
            return None
        caches = self.new_prefill(1)
        self._model(mx.zeros((1, 1), mx.int32), cache=caches)
        return sum(array.nbytes for array in present(states_of(caches)))

    def read_states(self, row: int) -> list[mx.array | None]:
        return [
            None if array is None else array[mx.array([row])]
            for state in self._states
            for array in state.cache
        ]

    def batches(self) -> list[tuple[int, int, list[Any]]]:
        return [(0, self.rows, self._model_caches)]

    def begin_step(self, positions: list[int]) -> None:
        """Prepares the rows as SlotCache does, and zeroes the state of a row at position 0: it
        has a new owner."""
        super().begin_step(positions)
        first = [position == 0 for position in positions]
        fresh = mx.array(first) if any(first) else None
        for state in self._states:
            for index, array in enumerate(state.cache):
                if array is not None:
                    array = with_rows(array, self.rows)
                    if fresh is not None:
                        empty = fresh.reshape(-1, *[1] * (array.ndim - 1))
                        array = mx.where(empty, mx.zeros_like(array), array)
                    state.cache[index] = array

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        super().move_rows(sources, targets, length)
        for state in self._states:
            for index, array in enumerate(state.cache):
                if array is not None:
                    array = with_rows(array, max(*sources, *targets) + 1)
                    array[mx.array(targets)] = array[mx.array(sources)]
                    state.cache[index] = array

    def write_prefixes(
        self, prefill: SequenceOf[Any], prompts: SequenceOf[PromptRows], first_row: int
    ) -> None:
        computed = list(leaves(prefill))
        kept = [cache for cache in computed if isinstance(cache, KVCache)]
        if kept:
            super().write_prefixes(kept, prompts, first_row)
        states = [cache for cache in computed if isinstance(cache, ArraysCache)]
        sources = rows_of(prompts)
        stop = first_row + len(sources)
        self.make_room(stop, max(prompt.length for prompt in prompts) + 1)
        for state, of_prefill in zip(self._states, states, strict=True):
            for index, array in enumerate(of_prefill.cache):
                if array is not None:
                    rows = array[mx.array(sources)]
                    present = state.cache[index]
                    present = (
                        mx.zeros((stop, *rows.shape[1:]), rows.dtype)
                        if present is None
                        else present
                    )
                    present = with_rows(present, max(stop, present.shape[0]))
                    present[first_row:stop] = rows
                    state.cache[index] = present

    def clear(self) -> None:
        super().clear()
        for state in self._states:
            state.cache = [None] * len(state.cache)

    def check_integrity(self, cached: list[int]) -> None:
        super().check_integrity(cached)
        rows = {array.shape[0] for array in self.unread}
        assert len(rows) <= 1, f"states differ: {rows} rows"

    def _served(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(self._served(inner) for inner in cache.caches))
        if type(cache) is ArraysCache:
            self._states.append(cache)
            return cache
        if type(cache) is KVCache or (type(cache) is RotatingKVCache and not cache.keep):
            self.layers.append(LayerCache(self, window=getattr(cache, "max_size", None)))
            return self.layers[-1]
        raise CannotBatchError(f"a layer needs {type(cache).__name__}")


class RowCaches(RunningCache):
    """mlx-lm's own caches, one set a row. `rows` of the step being built decode one after the
    other.

    `why_no_prefixes`: "" if a row's beginning can be used by others; `choose_cache` tries it.
    """

    layout = "rows"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._rows: list[list[Any]] = []
        self.rows = 0
        others = sorted(
            {type(c).__name__ for c in leaves(make_prompt_cache(model)) if type(c) is not KVCache}
        )
        self.why_no_prefixes = f"a layer keeps {', '.join(others)}" if others else ""
        if any(type(module).__name__ == "DynamicNTKScalingRoPE" for module in model.modules()):
            self.why_no_prefixes = "the angles of its keys depend on the length of the whole text"

    @property
    def rewindable(self) -> bool:
        return not self.why_no_prefixes

    @property
    def one_by_one(self) -> bool:
        return True

    @property
    def unread(self) -> list[mx.array]:
        return [array for row in self._rows[: self.rows] for array in arrays_of(row)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for row in self._rows for array in arrays_of(row))

    def new_prefill(
        self, length: int, prefixes: SequenceOf[tuple[PrefixChunk, ...]] = ()
    ) -> list[Any]:
        return (
            new_caches(self._model, length, prefixes)
            if self.rewindable and length
            else self._empty()
        )

    def _empty(self) -> list[Any]:
        return list(make_prompt_cache(self._model))

    def token_bytes(self) -> int:
        return token_bytes(self._model, self._empty())

    prefill_token_bytes = token_bytes

    def batches(self) -> list[tuple[int, int, list[Any]]]:
        return [(row, row + 1, caches) for row, caches in enumerate(self._rows[: self.rows])]

    def begin_step(self, positions: list[int]) -> None:
        self.rows = len(positions)
        self._reach(self.rows)
        for row, position in enumerate(positions):
            if position == 0:
                self._rows[row] = self._empty()

    def move_rows(self, sources: list[int], targets: list[int], length: int) -> None:
        self._reach(max(*sources, *targets) + 1)
        for target, caches in zip(targets, [self._rows[source] for source in sources], strict=True):
            self._rows[target] = caches

    def write_prefixes(
        self, prefill: SequenceOf[Any], prompts: SequenceOf[PromptRows], first_row: int
    ) -> None:
        count = len(rows_of(prompts))
        self._reach(first_row + count)
        row = first_row
        for prompt in prompts:
            computed = list(prefill)
            if self.rewindable:
                arrays = iter(keys_and_values(prefill, 0, prompt.length, row=prompt.source))
                computed = self._empty()
                for cache in leaves(computed):
                    cache.update_and_fetch(next(arrays), next(arrays))
            else:
                assert prompt.source == 0, "prompts are computed one at a time"
            for _ in range(prompt.count):
                # the arrays are shared until one row writes
                self._rows[row] = copy.deepcopy(computed)
                row += 1

    def read(self, row: int, start: int, stop: int) -> list[mx.array]:
        return keys_and_values(self._rows[row], start, stop)

    def shrink_to(self, cached: list[int]) -> None:
        del self._rows[len(cached) :]

    def clear(self) -> None:
        self._rows, self.rows = [], 0

    def check_integrity(self, cached: list[int]) -> None:
        assert len(cached) <= len(self._rows), f"{len(cached)} rows, caches of {len(self._rows)}"

    def _reach(self, rows: int) -> None:
        while len(self._rows) < rows:
            self._rows.append(self._empty())


def choose_cache(
    model: nn.Module,
    architecture: str,
    max_rows: int,
    max_positions: int,
    *,
    by_tokens: bool = True,
    kv_bits: int | None = None,
) -> RunningCache:
    """Choose all rows in one forward if that equals the model's own forward, else row
    by row.

    Without `by_tokens` it is not TokenCache; with `kv_bits` it is that or nothing.

    Raises ModelError when the architecture has none of these.
    """
    if kv_bits is not None:
        try:
            return TokenCache(model, max_rows, max_positions, _quantised(model, kv_bits))
        except CannotBatchError as error:
            raise ModelError(
                f"server.kv_bits = {kv_bits} does not work for the architecture"
                f" {architecture!r}: {error}; leave it out"
            ) from None
    if by_tokens and not why_not_by_tokens(model):
        return TokenCache(model, max_rows, max_positions)
    axes, reason = _mask_axes(model)
    if not reason:
        return BatchCache(model, max_rows, max_positions, mask_axes=axes)
    cache = RowCaches(model)
    if failure := _failure(model, cache):
        raise ModelError(f"the architecture {architecture!r} cannot be served: decoding: {failure}")
    log.warning(
        "sequences are decoded one by one, which is slow", architecture=architecture, reason=reason
    )
    cache.clear()
    cache.why_no_prefixes = cache.why_no_prefixes or _prefixes_fail(model, cache)
    cache.clear()
    return cache


def why_not_by_tokens(model: nn.Module) -> str:
    """Return why keys and values cannot lie by tokens; "" when they can."""
    return _why_not(TokenCache, model) or _segments_fail(model, AS_COMPUTED)


def can_lie_by_tokens(blueprint: nn.Module) -> bool:
    """Return whether keys and values can lie by tokens, judged by shapes before weights load."""
    try:
        _step_over_segments(blueprint, AS_COMPUTED)
    except (*_PROBE_ERRORS, CannotBatchError):
        return False
    return True


def why_not_batched(model: nn.Module) -> str:
    """Return why one forward cannot decode rows of different lengths; "" when it can."""
    return _mask_axes(model)[1]


def _mask_axes(model: nn.Module) -> tuple[int, str]:
    """Return the axes of a mask with which one forward decodes all rows, or why there is none."""
    reasons = []
    for axes in MASK_AXES:
        reasons.append(_why_not(partial(BatchCache, mask_axes=axes), model))
        if not reasons[-1]:
            return axes, ""
    return 0, reasons[0]


def _quantised(model: nn.Module, bits: int) -> KVFormat:
    """Raises CannotBatchError: the model has no attention over keys and values by tokens, or no
    group size fits."""
    if reason := why_not_by_tokens(model):
        raise CannotBatchError(reason)
    caches = new_caches(model, 1)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    kept = [cache for cache in leaves(caches) if isinstance(cache, KVCache)]
    widths = sorted({array.shape[-1] for array in arrays_of(kept)})
    kv_format = KVFormat.fitting(bits, widths)
    if kv_format is None:
        wrong = next(width for width in widths if width % GROUP_SIZES[-1])
        raise CannotBatchError(
            f"its head dimension, {wrong}, is not divisible by {GROUP_SIZES[-1]}"
        )
    if reason := _segments_fail(model, kv_format):
        raise CannotBatchError(reason)
    return kv_format


def _why_not(kind: Callable[[nn.Module, int, int], RunningCache], model: nn.Module) -> str:
    try:
        cache = kind(model, PROBE_ROWS, 2 * PROBE_ROWS)
    except CannotBatchError as error:
        return str(error)
    return _failure(model, cache)


def _failure(model: nn.Module, cache: RunningCache) -> str:
    try:
        wrong = _rows_that_differ(model, cache)
    except (*_PROBE_ERRORS, CannotBatchError) as error:
        return str(error) or type(error).__name__
    # One row may differ by chance: near ties of a router of experts, in half precision.
    return "it does not give what its own forward gives" if wrong > PROBE_ROWS // 2 else ""


def _rows_that_differ(model: nn.Module, cache: RunningCache) -> int:
    """Decodes rows of 1, 2, … tokens one by one and compares the last logits with one plain
    forward over each row."""
    tokens = mx.arange(PROBE_ROWS * PROBE_ROWS, dtype=mx.int32).reshape(PROBE_ROWS, PROBE_ROWS)
    shapes = set()
    for step in range(PROBE_ROWS):
        # Row i starts at step i, so the rows are at different positions; until then it writes its
        # first token again.
        positions = [max(0, step - row) for row in range(PROBE_ROWS)]
        cache.begin_step(positions)
        inputs = mx.take_along_axis(tokens, mx.array(positions)[:, None], axis=1)
        order = list(range(PROBE_ROWS)) if cache.order is None else cache.order
        inputs = inputs[mx.array(order)]
        logits = [
            model(inputs[start:stop], cache=caches)[:, -1]
            for start, stop, caches in cache.batches()
        ]
        batched = mx.concatenate(logits)[mx.array([order.index(row) for row in range(PROBE_ROWS)])]
        mx.eval(batched, cache.unread)
        shapes.add(tuple(array.shape for array in cache.unread))
    if not isinstance(cache, RowCaches) and len(shapes) > 1:
        raise CannotBatchError("a layer's state grows with the text")
    texts = [tokens[row : row + 1, : position + 1] for row, position in enumerate(positions)]
    return sum(
        not _ends_as(model, text, logits) for text, logits in zip(texts, batched, strict=True)
    )


def _ends_as(model: nn.Module, text: mx.array, logits: mx.array) -> bool:
    """Whether one plain forward over the text [1, T] gives these logits [V] at its end."""
    caches = make_prompt_cache(model)
    alone = model(text, cache=caches)[0, -1].astype(mx.float32)
    mx.eval(alone, arrays_of(caches))
    difference, largest = mx.abs(logits.astype(mx.float32) - alone).max(), mx.abs(alone).max()
    return bool((difference <= _TOLERANCE.get(logits.dtype, _HALF_TOLERANCE) * largest).item())


def _prefixes_fail(model: nn.Module, cache: RowCaches) -> str:
    """Return why rows cannot use the beginning of another one, nor prompts be computed together;
    "" when they can."""
    tokens = mx.arange(18, dtype=mx.int32).reshape(2, 9)
    try:
        prefill = cache.new_prefill(6)
        # of the second row 3 tokens; what follows stands for padding
        model(tokens[:, :6], cache=prefill)
        cache.write_prefixes(prefill, [PromptRows(0, 1, 6), PromptRows(1, 1, 3)], 0)
        segment = Segment(None, 0, (0, 1, 2, 3), arrays=cache.read(0, 0, 4))
        after = model(tokens[:1, 6:], cache=cache.new_prefill(7, [(PrefixChunk(segment, 4),)]))[
            0, -1
        ]
        cache.begin_step([6, 3])
        second = model(tokens[1:, 3:4], cache=cache.batches()[1][2])[0, -1]
        ends = [
            (mx.concatenate([tokens[:1, :4], tokens[:1, 6:]], axis=1), after),
            (tokens[1:, :4], second),
        ]
        right = all(_ends_as(model, text, logits) for text, logits in ends)
    except _PROBE_ERRORS as error:
        return str(error) or type(error).__name__
    return (
        "" if right else "going on from a part of a text does not give what its own forward gives"
    )


def _segments_fail(model: nn.Module, kv_format: KVFormat) -> str:
    """Return why a step of rows that read segments does not run, or is not finite; "" when it
    does."""
    try:
        finite = mx.isfinite(_step_over_segments(model, kv_format)).all().item()
    except (*_PROBE_ERRORS, CannotBatchError) as error:
        return str(error) or type(error).__name__
    return "" if finite else "its logits over a shared prompt are not finite"


def _step_over_segments(model: nn.Module, kv_format: KVFormat) -> mx.array:
    """The logits of two rows that read a prompt where it lies, and of one that has a copy.
    Raises what the model raises, CannotBatchError."""
    tokens = mx.arange(4, dtype=mx.int32)[None]
    cache = TokenCache(model, 3, 2 * PROBE_ROWS, kv_format)
    prefill = cache.new_prefill(3)
    model(tokens[:, :3], cache=prefill)
    shared = PrefixChunk(Segment(None, 0, (0, 1, 2)), 3)
    cache.place([PromptRows(0, 2, 3, (shared,)), PromptRows(0, 1, 2)], 0)
    cache.write_prefixes(prefill, [PromptRows(0, 2, 3, (shared,)), PromptRows(0, 1, 2)], 0)
    cache.begin_step([3, 3, 2])
    inputs = tokens[0, cache.positions][:, None]
    [(_, _, caches)] = cache.batches()
    return model(inputs, cache=caches)[:, -1]
