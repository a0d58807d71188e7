"""Attention on the CPU, up to three times as fast as MLX's there: of many queries in blocks, with
its gradient, and of a decode step's rows.

MLX writes the scores of all heads, [heads, L, T], to memory, reads them in every operation, and
computes exp one at a time. Here a block of scores stays in the core's cache (of texts beyond 8,000
tokens it is larger: texts are not cut), exp is `exp2_minus`, and under a causal mask what a block
does not see is not computed. The gradient computes a block's weights again from its log-sum-exp:
FlashAttention's (Dao et al. 2022, arXiv 2205.14135, algorithm 4), in blocks of queries and heads.
Figures: docs/benchmarks/serving.md#long-and-shared-texts.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_parallm.models.attention_parts import (
    LN_2,
    LOG2_E,
    Factor,
    Partial,
    attend_partly,
    finish,
    join,
    merge,
)
from mlx_parallm.models.cpu.kernels import available, exp2_minus, row_maxima
from mlx_parallm.system.blas import blas_status
from mlx_parallm.system.device.traits import on_cpu

Mask = mx.array | str | None  # a string: "causal"
Triple = tuple[mx.array, mx.array, mx.array]

BLOCK = 1 << 18  # scores of a block: 1 MiB, half of a core's own cache
LEAST_QUERIES, MOST_QUERIES = 16, 64  # bounds of a block
# positions that all queries of a block see: from so many on they are a separate part
ALONE_FROM = 256
# scores of a head (64 queries over 64 positions); with fewer a gradient is slower than MLX's
FEWEST_SCORES = 4096
# positions of all rows of a decode step; with fewer MLX's attention is faster
FEWEST_POSITIONS = 512


class _SeenPositions(NamedTuple):
    """Positions that a block reads, and who sees them: [·, 1, repeats · queries, T] bool; None:
    all."""

    at: slice
    seen: mx.array | None


def has_fast_products() -> bool:
    """Whether MLX computes on a CPU with a fast BLAS and a C++ compiler."""
    return available() and blas_status().name not in ("reference", "late")


def takes_rows(rows: int, positions: int) -> bool:
    """Whether `attention_of_rows` is faster than MLX's for so many rows that read so many
    positions each."""
    return rows * positions >= FEWEST_POSITIONS and has_fast_products()


def takes(queries: mx.array, keys: mx.array, values: mx.array, mask: object) -> bool:
    """Whether `attention` computes this faster than MLX: on a CPU with a fast BLAS, float32, not
    few scores, no mask or a causal one or one of booleans that is the same for all heads."""
    if not has_fast_products():
        return False
    if any(x.dtype != mx.float32 for x in (queries, keys, values)):
        return False
    if queries.shape[2] == 1 or queries.shape[2] * keys.shape[2] < FEWEST_SCORES:
        return False
    if isinstance(mask, mx.array):
        return mask.dtype == mx.bool_ and (mask.ndim < 3 or mask.shape[-3] == 1)
    return mask is None or (mask == "causal" and keys.shape[2] >= queries.shape[2])


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
) -> mx.array:
    """softmax(scale · queries · keysᵀ) · values → [B, heads, L, Dv] float32:
    `mx.fast.scaled_dot_product_attention`.

    Args:
        queries: [B, heads, L, D] float32.
        keys, values: [B, H, T, D] and [B, H, T, Dv] float32; heads is a multiple of H.
        mask: "causal": the last query sees all T positions; or True at visible positions, to be
            broadcast to [B, 1, L, T]; or None. A query that sees nothing gets zeros.

    There is no second derivative, and no `mx.vmap` of it.
    """

    @mx.custom_function
    def function(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return _forward(queries, keys, values, scale, mask)

    @function.vjp
    def gradient(
        primals: Triple, slopes: tuple[mx.array, mx.array], outputs: tuple[mx.array, mx.array]
    ) -> Triple:
        return _backward(primals, slopes[0], outputs, scale, mask)

    return cast("tuple[mx.array, mx.array]", function(queries, keys, values))[0]


def attention_of_rows(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, bias: mx.array | None
) -> mx.array:
    """`attention` of one query a row, [n, heads, 1, D] float32, for a decode step: it has no
    gradient.

    Args:
        keys, values: [n, H, T, D] and [n, H, T, Dv] float32.
        bias: added to the scores, [n or 1, 1, 1, T] float32: 0, and `NOTHING` where a
            position is not seen.
    """
    rows, heads, _, width = queries.shape
    # One product a head: products of two rows, which read a group's keys once, leave MKL's faster
    # path for vectors.
    grouped = (queries * (scale * LOG2_E)).reshape(rows, keys.shape[1], -1, 1, width)
    scores = (grouped @ keys[:, :, None].swapaxes(-1, -2)).reshape(rows, heads, 1, -1)
    if bias is not None:
        scores = scores + bias
    weights = exp2_minus(scores, row_maxima(scores))
    weighted = weights.reshape(rows, keys.shape[1], -1, 1, weights.shape[-1]) @ values[:, :, None]
    return weighted.reshape(rows, heads, 1, -1) / weights.sum(axis=-1, keepdims=True)


def attend_by_heads(
    queries: mx.array, keys_t: Factor, values: Factor, mask: mx.array | None, factor: float
) -> Partial:
    """`attend_partly` of queries [H, rows, D] over keys [H, D, T] and values [H, T, Dv]; on a
    CPU of as many heads at a time as stay in the core's cache."""
    if not (isinstance(keys_t, mx.array) and isinstance(values, mx.array) and on_cpu()):
        return attend_partly(queries, keys_t, values, mask, factor)
    partials: list[Partial] = []
    for heads in _slices(len(queries), max(1, BLOCK // (queries.shape[1] * keys_t.shape[-1]))):
        (x,) = _after(list(partials[-1]) if partials else [], queries[heads])
        partials.append(attend_partly(x, keys_t[heads], values[heads], mask, factor))
    return join(partials)


def _forward(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
) -> tuple[mx.array, mx.array]:
    """The attention, and log₂ of the sum of 2^score of each query, [B, heads, L, 1]."""
    pieces = _Pieces(queries, keys, mask)
    grouped, keys_t = pieces.grouped(queries), keys.swapaxes(-1, -2)
    outs, sums = pieces.collector(), pieces.collector()
    last: list[mx.array] = []
    for rows, heads in pieces.tiles():
        for block in pieces.queries:
            (x,) = _after(last, pieces.cut(grouped, rows, heads, block))
            parts = [
                attend_partly(
                    x, keys_t[rows, heads, :, at], values[rows, heads, at], seen, scale * LOG2_E
                )
                for at, seen in pieces.parts(rows, block)
            ]
            state = parts[0] if len(parts) == 1 else merge(*parts)
            last = [finish(state)]
            outs.add(last[0])
            sums.add(state.top + mx.log2(state.total))
    return outs.whole(), sums.whole()


def _backward(
    primals: Triple, slope: mx.array, outputs: tuple[mx.array, mx.array], scale: float, mask: Mask
) -> Triple:
    """Return dQ, dK and dV. With weights P, the slope dO of the output O and δ = Σ dO · O of each
    query: dV = Pᵀ · dO, dS = P · (dO · Vᵀ - δ), dQ = scale · dS · K, dK = scale · dSᵀ · Q."""
    queries, keys, values = primals
    pieces = _Pieces(queries, keys, mask)
    grouped = [pieces.grouped(x) for x in (queries * (scale * LOG2_E), slope, outputs[1])]
    deltas = pieces.grouped((slope * outputs[0]).sum(axis=-1, keepdims=True))
    dqueries = pieces.collector()
    dkeys, dvalues = [], []
    last: list[mx.array] = []
    for rows, heads in pieces.tiles():
        k, v = keys[rows, heads], values[rows, heads]
        sums = _KeySlopes()
        of_queries: list[mx.array] = []  # the last block's first
        for block in reversed(pieces.queries):
            x, dout, lse, delta = (
                pieces.cut(array, rows, heads, block) for array in (*grouped, deltas)
            )
            (x,) = _after(last, x)
            slopes = []
            parts = pieces.parts(rows, block)
            sums.begin(parts[-1].at.stop)
            for at, seen in parts:
                scores, products = (
                    x @ k[:, :, at].swapaxes(-1, -2),
                    dout @ v[:, :, at].swapaxes(-1, -2),
                )
                weights, dscores = _weights_and_slopes(scores, lse, products, delta, seen)
                slopes.append(dscores @ k[:, :, at])
                sums.add(at, dscores.swapaxes(-1, -2), x, weights.swapaxes(-1, -2), dout)
            sums.end()
            of_queries.append(slopes[0] if len(slopes) == 1 else slopes[0] + slopes[1])
            last = [of_queries[-1], *sums.first]
        for slopes_of_block in reversed(of_queries):
            dqueries.add(slopes_of_block)
        dkeys.append(sums.whole(0))
        dvalues.append(sums.whole(1))
    return (
        dqueries.whole() * scale,
        pieces.tiled(dkeys) * LN_2,  # gradient of queries · scale · log₂ e
        pieces.tiled(dvalues),
    )


def _after(last: list[mx.array], x: mx.array) -> list[mx.array]:
    """x, computed after `last`: blocks one after the other share the cache, in whatever order
    MLX would take them."""
    return cast("list[mx.array]", mx.depends([x], last)) if last else [x]


class _Pieces:
    """How queries [B, heads, L, D] over keys [B, H, T, D] are cut: rows and heads into tiles,
    queries into blocks."""

    def __init__(self, queries: mx.array, keys: mx.array, mask: Mask) -> None:
        self._batch, self._heads, self._count, _ = queries.shape
        self._kv_heads, self._positions = keys.shape[1], keys.shape[2]
        self._repeats = self._heads // self._kv_heads
        a_query = self._repeats * self._positions  # scores
        most = max(
            LEAST_QUERIES, min(MOST_QUERIES, BLOCK // a_query // LEAST_QUERIES * LEAST_QUERIES)
        )
        self.queries = _slices(self._count, most)
        scores = a_query * min(most, self._count)
        self._tile_heads = max(1, min(self._kv_heads, BLOCK // scores))
        whole = self._tile_heads == self._kv_heads
        self._tile_rows = (
            max(1, min(self._batch, BLOCK // (scores * self._kv_heads))) if whole else 1
        )
        self._causal = isinstance(mask, str)
        self._mask: mx.array | None = None
        if isinstance(mask, mx.array):
            mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
            self._mask = mx.broadcast_to(mask, (mask.shape[0], 1, self._count, self._positions))

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Rows, and heads of the keys."""
        for rows in _slices(self._batch, self._tile_rows):
            for heads in _slices(self._kv_heads, self._tile_heads):
                yield rows, heads

    def parts(self, rows: slice, block: slice) -> list[_SeenPositions]:
        """Return the parts from position 0 on, end to end. With a causal mask the last part ends
        if the block sees no more."""
        if self._causal:
            before, stop = (
                self._positions - self._count + block.start,
                self._positions - self._count + block.stop,
            )
            start = before if before >= ALONE_FROM else 0
            seen = mx.tri(block.stop - block.start, stop - start, before - start, dtype=mx.bool_)[
                None, None
            ]
            parts = [_SeenPositions(slice(start, stop), self._repeated(seen))]
            return [_SeenPositions(slice(0, start), None), *parts] if start else parts
        if self._mask is None:
            return [_SeenPositions(slice(0, self._positions), None)]
        mask = self._mask if self._mask.shape[0] == 1 else self._mask[rows]
        return [_SeenPositions(slice(0, self._positions), self._repeated(mask[:, :, block]))]

    def _repeated(self, seen: mx.array) -> mx.array:
        return seen if self._repeats == 1 else mx.concatenate([seen] * self._repeats, axis=2)

    def grouped(self, x: mx.array) -> mx.array:
        """[B, heads, L, ·] → [B, H, repeats, L, ·]."""
        return x.reshape(self._batch, self._kv_heads, self._repeats, self._count, -1)

    def cut(self, grouped: mx.array, rows: slice, heads: slice, block: slice) -> mx.array:
        """A block of [B, H, repeats, L, ·] → [b, h, repeats · queries, ·]."""
        part = grouped[rows, heads, :, block]
        return part.reshape(*part.shape[:2], -1, part.shape[-1])

    def collector(self) -> "_Collector":
        return _Collector(self, self._repeats)

    def tiled(self, tiles: list[mx.array]) -> mx.array:
        """The tiles' arrays [b, h, …] side by side."""
        a_row = len(_slices(self._kv_heads, self._tile_heads))
        return _joined([_joined(tiles[i : i + a_row], 1) for i in range(0, len(tiles), a_row)], 0)


class _Collector:
    """Put the blocks' results together, [b, h, repeats · queries, ·] each, to [B,
    heads, L, ·]."""

    def __init__(self, pieces: _Pieces, repeats: int) -> None:
        self._pieces, self._repeats = pieces, repeats
        self._slopes: list[mx.array] = []

    def add(self, slopes: mx.array) -> None:
        b, h, rows, width = slopes.shape
        self._slopes.append(slopes.reshape(b, h, self._repeats, rows // self._repeats, width))

    def whole(self) -> mx.array:
        blocks = len(self._pieces.queries)
        tiles = [
            _joined(self._slopes[i : i + blocks], 3) for i in range(0, len(self._slopes), blocks)
        ]
        whole = self._pieces.tiled(tiles)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])


class _KeySlopes:
    """Sums of dSᵀ · Q and Pᵀ · dO by position, over blocks from the last to the first: `first`
    are those of positions that earlier blocks may see too."""

    def __init__(self) -> None:
        self.first: list[mx.array] = []
        self._parts: list[list[mx.array]] = []
        self._ready: list[list[mx.array]] = []  # gradients of later positions, the last ones first

    def begin(self, stop: int) -> None:
        """A block that sees the positions before `stop`."""
        if self.first and self.first[0].shape[2] > stop:
            self._ready.append([array[:, :, stop:] for array in self.first])
            self.first = [array[:, :, :stop] for array in self.first]
        self._parts = []

    def add(
        self, at: slice, dscores_t: mx.array, x: mx.array, weights_t: mx.array, dout: mx.array
    ) -> None:
        pairs = ((dscores_t, x), (weights_t, dout))
        if self.first:
            sums = zip(self.first, pairs, strict=True)
            self._parts.append(
                [mx.addmm(array[:, :, at], left, right) for array, (left, right) in sums]
            )
        else:
            self._parts.append([left @ right for left, right in pairs])

    def end(self) -> None:
        self.first, *later = self._parts
        self._ready += later

    def whole(self, which: int) -> mx.array:
        return _joined([arrays[which] for arrays in [self.first, *reversed(self._ready)]], 2)


def _weights_and_slopes(
    scores: mx.array, lse: mx.array, products: mx.array, delta: mx.array, seen: mx.array | None
) -> tuple[mx.array, mx.array]:
    """P = 2^(scores - lse), 0 at invisible positions, and P · (products - δ)."""
    weights = exp2_minus(scores, lse)
    if seen is not None:
        weights = mx.where(seen, weights, 0.0)
    return weights, weights * (products - delta)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _joined(arrays: list[mx.array], axis: int) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=axis)
