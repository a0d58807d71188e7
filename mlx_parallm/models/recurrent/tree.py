"""Recurrent layers over a forest of tokens: each token continues from its parent, wherever that is.

    TokenTree       which tokens a convolution sees, and the chunks of a recurrence
    over            a thread's recurrent layers go over a TokenTree
    convolve        a depthwise convolution over each token's ancestors
    tree_gated_delta, tree_ssd, tree_selective_scan
                    the recurrences of `chunks.py`, and Mamba 2's (SSD, arXiv:2405.21060)

The tokens between two branching points are a segment, cut into chunks. A chunk begins with the
state at the end of its parent. Chunks of one level (so many chunks above them) are computed
together, so there are as many steps as the longest path has chunks, and only the last chunk of a
segment is padded. Whatever does not need a state is computed for all chunks at once. Gradients are
autodiff's: they flow back through the states, and add up where a path branches.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlx_parallm.models.mlx_lm_api import segment_sums
from mlx_parallm.models.recurrent.chunks import delta_terms, selective_scan

CHUNKS, OVERHEAD = (16, 32, 64), 64
"""Lengths of chunks to choose from, and what a chunk costs beside its tokens, in tokens: its
state, which the gradient needs. The time depends little on the length
(docs/benchmarks/training.md#memory), and with 64 in place of 32 a step of episodes takes 0.77 of
the memory."""
SCAN_CHUNKS, SCAN_OVERHEAD = (32, 64, 128, 256), 25
"""The same of a selective scan, whose levels are many operations each."""

_thread = threading.local()


@dataclass(frozen=True)
class TreeLevel:
    """Chunks with the same number of chunks above them. `parents`: their places among the chunks of
    the level above that have children; None: they are those, in this order, or there is no level
    above."""

    count: int
    with_children: int  # they are the first ones
    parents: mx.array | None  # [count] int32


@dataclass(frozen=True)
class TreeChunks:
    """N chunks of at most C tokens, level after level."""

    tokens: mx.array  # [N, C] int32: the row's tokens; its length in padding
    places: mx.array  # [W] int32: if each token is in the flattened [N · C]
    levels: tuple[TreeLevel, ...]


class TokenTree:
    """A forest of tokens in preorder.

    Args:
        depths: [count] int32, the tokens above each.
        width: of the row; positions behind the forest are padding.

    `lookups`: how often a layer asked for ancestors or chunks.
    """

    def __init__(self, depths: np.ndarray, width: int) -> None:
        self.width, self.lookups = width, 0
        self._parents = parents_of(depths)
        self._windows: dict[int, list[mx.array]] = {}
        self._chunks: dict[tuple[int, ...], TreeChunks] = {}

    def ancestors(self, count: int) -> list[mx.array]:
        """Return [W] int32 for the parents, their parents and so on, `count` times; W: there is
        none."""
        self.lookups += 1
        if count not in self._windows:
            none = self.width
            parents = np.full(none + 1, none, np.int32)
            parents[: len(self._parents)] = np.where(self._parents < 0, none, self._parents)
            lists, above = [], np.arange(none, dtype=np.int32)
            for _ in range(count):
                above = parents[above]
                lists.append(mx.array(above))
            self._windows[count] = lists
        return self._windows[count]

    def chunks(self, lengths: tuple[int, ...] = CHUNKS, overhead: int = OVERHEAD) -> TreeChunks:
        """Return the chunks, of the length that costs least."""
        self.lookups += 1
        if lengths not in self._chunks:
            segments = segments_of(self._parents)
            sizes = np.diff(np.append(segments, len(self._parents)))

            def cost(length: int) -> int:
                return int((-(-sizes // length)).sum()) * (length + overhead)

            length = min(lengths, key=cost)
            self._chunks[lengths] = self._cut(segments, sizes, length)
        return self._chunks[lengths]

    def _cut(self, segments: np.ndarray, sizes: np.ndarray, length: int) -> TreeChunks:
        starts = np.concatenate(
            [
                np.arange(start, start + size, length)
                for start, size in zip(segments, sizes, strict=True)
            ]
        )
        owner = np.searchsorted(starts, np.arange(len(self._parents)), side="right") - 1
        last = self._parents[starts]
        parents = np.where(last < 0, -1, owner[last])
        levels = np.zeros(len(starts), int)
        for chunk, parent in enumerate(parents):
            levels[chunk] = levels[parent] + 1 if parent >= 0 else 0
        childless = np.bincount(parents[parents >= 0], minlength=len(starts)) == 0
        order = np.lexsort((np.arange(len(starts)), childless, levels))
        place = np.argsort(order)  # each chunk's place
        tokens = np.full((len(starts), length), self.width, np.int32)
        column = np.arange(len(self._parents)) - starts[owner]
        tokens[place[owner], column] = np.arange(len(self._parents))
        places = np.zeros(self.width, np.int32)
        places[: len(self._parents)] = place[owner] * length + column
        counts = np.bincount(levels)
        firsts = np.cumsum(counts) - counts
        kept = np.bincount(levels[~childless], minlength=len(counts))
        made = []
        for level, (first, count) in enumerate(zip(firsts, counts.tolist(), strict=True)):
            between = None
            if level:
                above = place[parents[order[first : first + count]]] - firsts[level - 1]
                if not np.array_equal(above, np.arange(kept[level - 1])):
                    between = mx.array(above.astype(np.int32))
            made.append(TreeLevel(count, int(kept[level]), between))
        return TreeChunks(mx.array(tokens), mx.array(places), tuple(made))


def parents_of(depths: np.ndarray) -> np.ndarray:
    """Return [W] int32: each token's parent in preorder; -1: it has none.

    Example: depths [0 1 2 2 1 0] have the parents [-1 0 1 1 0 -1].
    """
    path = np.full(int(depths.max(initial=0)) + 2, -1, np.int32)
    parents = np.zeros(len(depths), np.int32)
    for token, depth in enumerate(depths.tolist()):
        parents[token] = path[depth]
        path[depth + 1] = token
    return parents


def segments_of(parents: np.ndarray) -> np.ndarray:
    """Return where segments begin: at a root, behind another token than the one in front, and
    behind one with several children."""
    numbers = np.arange(len(parents))
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    alone = (parents == numbers - 1) & (parents >= 0) & (children[parents] == 1)
    return np.flatnonzero(~alone)


def current_tree() -> TokenTree | None:
    """Return the forest that this thread's recurrent layers go over."""
    return getattr(_thread, "tree", None)


@contextmanager
def over(tree: TokenTree) -> Iterator[None]:
    """Let this thread's recurrent layers go over a forest. Their inputs are its W tokens in one
    row, [1, W, …], or in W rows, [W, 1, …], with no state before them."""
    before = current_tree()
    _thread.tree = tree
    try:
        yield
    finally:
        _thread.tree = before


def convolve(tree: TokenTree, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """A depthwise convolution over each token and the K - 1 ones above it: [W, D].

    Args:
        x: [W, D].
        weight: [D, K, 1], the token's own weight last.
        bias: [D].
    """
    last, *others = [weight[:, place, 0] for place in range(weight.shape[1])][::-1]
    out = x * last if bias is None else x * last + bias
    with_none = mx.concatenate([x, mx.zeros((1, x.shape[1]), x.dtype)])
    for above, tap in zip(tree.ancestors(len(others)), others, strict=True):
        out = out + with_none[above] * tap
    return out


Step = Callable[[Sequence[mx.array], mx.array | None, int], tuple[mx.array, mx.array | None]]
"""(the parts of n chunks, the states before them, how many have children) → their outputs, and the
states behind those with children. Before: None = 0; behind: None = none has."""


def _walk(chunks: TreeChunks, parts: Sequence[mx.array], step: Step) -> mx.array:
    """Level after level; returns the outputs [W, …] of the tokens.

    `parts`: [N, …] each.
    """
    bounds = list(accumulate(level.count for level in chunks.levels))[:-1]
    by_level = zip(*(mx.split(part, bounds) for part in parts), strict=True)
    outputs, state = list[mx.array](), None
    for level, inputs in zip(chunks.levels, by_level, strict=True):
        if state is not None and level.parents is not None:
            state = state[level.parents]
        out, state = step(inputs, state, level.with_children)
        outputs.append(out)
    whole = mx.concatenate(outputs)  # [N, C, …]
    return whole.flatten(0, 1)[chunks.places]


def _gathered(chunks: TreeChunks, x: mx.array, filling: float = 0.0) -> mx.array:
    """[W, …] as [N, C, …] float32."""
    x = x.astype(mx.float32)
    return mx.concatenate([x, mx.full((1, *x.shape[1:]), filling)])[chunks.tokens]


def tree_gated_delta(
    tree: TokenTree, q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array
) -> mx.array:
    """The gated delta rule, as `chunks.gated_delta`, with [1, W] or [W, 1] in front of shapes."""
    front, dtype = v.shape[:2], q.dtype
    q, k, v, decay, beta = (x.flatten(0, 1) for x in (q, k, v, decay, beta))
    if q.shape[1] != v.shape[1]:
        q, k = (mx.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    if decay.ndim == 2:
        decay = decay[..., None]
    chunks = tree.chunks()
    q, k, v, beta = (_gathered(chunks, x).swapaxes(1, 2) for x in (q, k, v, beta[..., None]))
    terms = delta_terms(q, k, v, _gathered(chunks, decay, 1.0).swapaxes(1, 2), beta)

    def step(
        parts: Sequence[mx.array], state: mx.array | None, kept: int
    ) -> tuple[mx.array, mx.array | None]:
        queries, keys, within, u, w, faded = parts
        fresh = u if state is None else u - w @ state
        out = within @ fresh if state is None else within @ fresh + queries @ state
        after = None
        if kept:
            after = keys[:kept] @ fresh[:kept]
            after = after if state is None else after + faded[:kept] * state[:kept]
        return out.swapaxes(1, 2), after

    return _walk(chunks, terms, step).reshape(*front, *v.shape[1::2]).astype(dtype)


def tree_ssd(
    tree: TokenTree, x: mx.array, log_decay: mx.array, b: mx.array, c: mx.array
) -> mx.array:
    """Mamba 2's h_t = e^{g_t} h_{t-1} + x_t ⊗ B_t, y_t = h_t C_t, float32 [W, H, Dh].

    Args:
        x: [W, H, Dh], the inputs times their δ.
        log_decay: [W, H], g = δ A.
        b, c: [W, G, S], of H / G heads each.
    """
    chunks, heads, groups = tree.chunks(), x.shape[1], b.shape[1]
    # [N, G, R, …]: R heads of a group
    x, log_decay = (
        mx.unflatten(_gathered(chunks, array).swapaxes(1, 2), 1, (groups, heads // groups))
        for array in (x, log_decay[..., None])
    )
    b, c = (_gathered(chunks, array).swapaxes(1, 2)[:, :, None] for array in (b, c))
    log_decay = log_decay[..., 0]
    decays = mx.tril(mx.exp(segment_sums(log_decay)))
    within = (c @ b.swapaxes(-1, -2)) * decays
    from_start = mx.exp(mx.cumsum(log_decay, axis=-1))[..., None]
    to_end = decays[..., -1, :, None]

    def step(
        parts: Sequence[mx.array], state: mx.array | None, kept: int
    ) -> tuple[mx.array, mx.array | None]:
        x, within, b, c, from_start, to_end = parts
        out, after = within @ x, None
        if state is not None:
            out = out + from_start * (c @ state.swapaxes(-1, -2))
        if kept:
            after = (x[:kept] * to_end[:kept]).swapaxes(-1, -2) @ b[:kept]
            if state is not None:
                after = after + from_start[:kept, ..., -1:, :] * state[:kept]
        return out.flatten(1, 2).swapaxes(1, 2), after

    return _walk(chunks, (x, within, b, c, from_start, to_end), step)


def tree_selective_scan(
    tree: TokenTree, x: mx.array, delta: mx.array, a: mx.array, b: mx.array, c: mx.array
) -> mx.array:
    """Mamba's recurrence, as `chunks.selective_scan`, with [1, W] or [W, 1] in front of shapes.

    With δ = 0 padding leaves the state as it is.
    """
    chunks = tree.chunks(SCAN_CHUNKS, SCAN_OVERHEAD)
    parts = [_gathered(chunks, array.flatten(0, 1)) for array in (x, delta, b, c)]

    def step(
        parts: Sequence[mx.array], state: mx.array | None, kept: int
    ) -> tuple[mx.array, mx.array | None]:
        x, delta, b, c = parts
        out, after = selective_scan(x, delta, a, b, c, state)
        return out, after[:kept] if kept else None

    return _walk(chunks, parts, step).reshape(x.shape).astype(x.dtype)
