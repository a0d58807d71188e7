"""Rows of a micro-batch as a forest of tokens: any common beginning of theirs
is computed, and differentiated, once.

    merge_rows   [B, T] rows → `TreeRows`, the distinct tokens in preorder
    TreeOfRows   `TreeRows` through the blocks as [W, 1, D]

The turns of an episode whose template rewrites its history, the rollouts of a group, and their
common instruction are one tree: "prefix tree" or "tree training" elsewhere (verl #4368, TRL #7328).
There is no padding either, so unrelated rows are a forest that costs their tokens.

Every token is its own row with a cache whose `offset` is the token's depth, so rotary
positions, projections and experts stay the architecture's own code. Attention is the one thing that
looks at other tokens: the cache returns a `RoutedKeys`, whose `attend` lets each token see its
ancestors. In preorder the ancestors of the tokens a … b are those of a, and some of a … b itself.
So blocks of BLOCK tokens attend to the path above their first token and to themselves, under a mask
made of two numbers a token: it and the end of its subtree. Blocks with paths of nearly one length
go together. Scores are BLOCK · (path + BLOCK) a block, whatever the size of the forest. A layer
with a window sees the ancestors whose depth is less than the window away; the rest of the path is
not looked at. Latent attention (MLA) compares its latents as keys, those of the rotated part beside
them (`RoutedLatent`).

A block with a recurrent state gets a cache without one. Its convolution and its recurrence look up
each token's parent (`recurrent/tree.py`); the rest of it looks at one token alone. A convolution
pads rows in front, so its block gets all tokens in one row, [1, W, D], if no rotary positions
forbid it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.attention import RoutedKeys, RoutedLatent, attend_with_mask
from mlx_parallm.models.layer_stack import BlockCall, LayerStack
from mlx_parallm.models.layouts.padding import padded_length
from mlx_parallm.models.mlx_lm_api import (
    ArraysCache,
    CacheList,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_parallm.models.recurrent.tree import TokenTree, over

BLOCK = 128
"""Queries of a block. More make fewer products, and more scores that the mask hides."""
PATH_STEP = 128
"""Paths are padded to multiples of it, so that few groups of blocks are left."""


@dataclass(frozen=True)
class TreeRows:
    """The distinct tokens of a micro-batch's rows, W in all, each behind its parent.

    Example: rows [7 8 1 2] and [7 8 3] are tokens [7 8 1 2 3] with depths [0 1 2 3 2] and ends [5 5
    4 4 5].
    """

    inputs: np.ndarray  # [W] int32
    depths: np.ndarray  # [W] int32: tokens above it
    ends: np.ndarray  # [W] int32: the first token behind its subtree
    positions: np.ndarray  # [N] int32: the scored positions, one index for each; some are equal
    places: np.ndarray  # [B, T] int32: if each token of the rows is; -1 = nowhere

    @property
    def tokens(self) -> int:
        """Return how many are computed, padding included."""
        return padded_length(len(self.inputs))


def merge_rows(inputs: np.ndarray, positions: np.ndarray) -> TreeRows:
    """Make one token of those that have the same tokens before them.

    Args:
        inputs: [B, T] int32, right-padded.
        positions: [N] int32, indices into the flattened [B · T], ascending; at least one in each
            row. Tokens behind a row's last one are left out.
    """
    rows, columns = np.divmod(positions, inputs.shape[1])
    lasts = np.append(np.searchsorted(rows, np.arange(1, len(inputs))), len(rows)) - 1
    lengths = columns[lasts] + 1
    used = [inputs[row, :length] for row, length in enumerate(lengths)]
    order = sorted(range(len(used)), key=lambda row: used[row].astype(">i4").tobytes())
    common = [0, *(shared_length(used[a], used[b]) for a, b in pairwise(order))]
    total = sum(len(used[row]) - depth for row, depth in zip(order, common, strict=True))
    tokens, depths = np.zeros(total, np.int32), np.zeros(total, np.int32)
    ends = np.full(total, total, np.int32)
    places = np.full(inputs.shape, -1, np.int32)
    path, count = np.zeros(0, np.int32), 0
    for row, depth in zip(order, common, strict=True):
        ends[path[depth:]] = count  # the branch that is left here
        new = len(used[row]) - depth
        tokens[count : count + new] = used[row][depth:]
        depths[count : count + new] = np.arange(depth, depth + new)
        path = np.append(path[:depth], np.arange(count, count + new, dtype=np.int32))
        places[row, : len(path)] = path
        count += new
    return TreeRows(tokens, depths, ends, places[rows, columns], places)


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many tokens two rows have in common from their beginning."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


class TreeOfRows:
    """See `layout.Layout`."""

    def __init__(self, tree: TreeRows) -> None:
        count, width = len(tree.inputs), tree.tokens
        missing = width - count
        self.positions = mx.array(tree.positions)
        self._inputs = mx.array(np.pad(tree.inputs, (0, missing)))[:, None]
        self._offsets = mx.array(np.pad(tree.depths, (0, missing)))
        self._forest = TokenTree(tree.depths, width)
        # the padding are trees of one token each
        alone = np.arange(count + 1, width + 1, dtype=np.int32)
        self._ends = np.append(tree.ends, alone)
        self._depths = np.pad(tree.depths, (0, missing))

    def embed(self, stack: LayerStack) -> tuple[mx.array, list[Any]]:
        attentions: dict[int | None, TreeAttention] = {}

        def of_tree(cache: Any) -> Any:
            if isinstance(cache, CacheList):
                return tuple(map(of_tree, cache.caches))
            if isinstance(cache, ArraysCache):
                return TreeStates(len(cache.cache))
            window = window_of(cache)
            if window not in attentions:
                attentions[window] = TreeAttention(self._ends, self._depths, window)
            return TreeCache(attentions[window], self._offsets)

        # some architectures have fewer caches than blocks
        caches = [of_tree(cache) for cache in make_prompt_cache(stack.model)]
        hidden, calls = stack.embed(self._inputs, caches)
        for block, call in zip(stack.blocks, calls, strict=True):
            for cache in _of_kind(TreeCache, call):
                cache.latent = any("embed_q" in module for module in block.modules())
        return hidden, calls

    def run(self, block: nn.Module, hidden: mx.array, call: BlockCall) -> mx.array:
        states = _of_kind(TreeStates, call)
        # rotary positions, of keys and values or of lightning attention, are those of rows
        in_one_row = not _of_kind(TreeCache, call) and any(
            isinstance(module, nn.Conv1d) for module in block.modules()
        )
        lookups, writes = self._forest.lookups, sum(each.writes for each in states)
        with over(self._forest):
            if in_one_row:
                hidden = hidden.swapaxes(0, 1)
            out: mx.array = block(hidden, *call.args, **call.kwargs)
        if self._forest.lookups - lookups < sum(each.writes for each in states) - writes:
            raise ValueError("it has a recurrence that does not go over trees")
        return out.swapaxes(0, 1) if in_one_row else out


def _of_kind(kind: type, call: BlockCall) -> list[Any]:
    """Return the caches of that kind among a block's arguments."""
    arguments = [*call.args, *call.kwargs.values()]
    flat = [one for each in arguments for one in (each if isinstance(each, tuple) else [each])]
    return [cache for cache in flat if isinstance(cache, kind)]


@dataclass(frozen=True)
class _Group:
    """G blocks whose paths have nearly one length."""

    blocks: mx.array  # [G] int32: their numbers
    keys: mx.array  # [G, K] int32: the tokens that they look at; their own are the last BLOCK
    seen: mx.array  # [G, 1, BLOCK, K] bool


def window_of(cache: Any) -> int | None:
    """Return how many tokens a layer with this cache sees, its own among them; None: all."""
    return cache.max_size if isinstance(cache, RotatingKVCache) else None


class TreeAttention:
    """Which tokens of a forest see which, and attention over them.

    Args:
        ends, depths: [W], see `TreeRows`.
        window: a token sees itself and the window - 1 tokens above it; None: all of them.
    """

    def __init__(self, ends: np.ndarray, depths: np.ndarray, window: int | None = None) -> None:
        self.window, self._size = window, len(ends)
        self._blocks = -(-self._size // BLOCK)
        starts = np.arange(self._blocks) * BLOCK
        above = [np.flatnonzero(ends[:start] > start) for start in starts]
        if window is not None:
            for block, start in enumerate(starts):
                nearest = depths[start : start + BLOCK].min() - window
                above[block] = above[block][depths[above[block]] > nearest]
        widths = [-(-len(path) // PATH_STEP) * PATH_STEP for path in above]
        order = sorted(range(self._blocks), key=lambda block: (widths[block], block))
        self._groups = []
        for width in sorted(set(widths)):
            chosen = [block for block in order if widths[block] == width]
            keys = np.zeros((len(chosen), width + BLOCK), np.int32)
            real = np.zeros(keys.shape, bool)
            for row, block in enumerate(chosen):
                inside = np.arange(starts[block], min(starts[block] + BLOCK, self._size))
                both = np.append(above[block], inside)
                # the path directly in front of the block's own tokens
                first = width - len(above[block])
                keys[row, first : first + len(both)] = both
                real[row, first : first + len(both)] = True
            queries = starts[chosen][:, None] + np.arange(BLOCK)
            ancestor = (keys[:, None] <= queries[..., None]) & (
                queries[..., None] < np.where(real, ends[keys], 0)[:, None]
            )
            if window is not None:
                depth = depths[np.minimum(queries, self._size - 1)]
                ancestor &= depth[..., None] - depths[keys][:, None] < window
            self._groups.append(
                _Group(*map(mx.array, (np.array(chosen, np.int32), keys, ancestor[:, None])))
            )
        self._back = mx.array(np.argsort(order).astype(np.int32))

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of each token over its ancestors and itself.

        Args:
            queries: [W, heads, 1, D].
            keys, values: [W, H, 1, D] and [W, H, 1, Dv].
            sinks: see `RoutedKeys.attend`.

        Returns: [W, heads, 1, Dv].
        """
        missing = self._blocks * BLOCK - self._size
        by_head = mx.pad(queries[:, :, 0].swapaxes(0, 1), [(0, 0), (0, missing), (0, 0)])
        blocks = by_head.reshape(len(by_head), self._blocks, BLOCK, -1).swapaxes(0, 1)
        parts = []
        for group in self._groups:
            near_keys, near_values = (
                array[:, :, 0][group.keys].swapaxes(1, 2) for array in (keys, values)
            )
            parts.append(
                attend_with_mask(
                    blocks[group.blocks], near_keys, near_values, scale, group.seen, sinks=sinks
                )
            )
        out = mx.concatenate(parts)[self._back]  # [blocks, heads, BLOCK, Dv]
        out = out.swapaxes(1, 2).reshape(-1, *out.shape[1::2])
        return out[: self._size, :, None]


class _TreeKeys(RoutedKeys):
    def __init__(self, attention: TreeAttention, keys: mx.array, values: mx.array) -> None:
        self._attention, self._keys, self._values = attention, keys, values

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        return self._attention.attend(queries, self._keys, self._values, scale, sinks)


class _TreeLatents(RoutedLatent):
    def __init__(self, attention: TreeAttention, latents: mx.array, rotated: mx.array) -> None:
        self._attention, self._latents = attention, latents
        self._keys = mx.concatenate([latents, rotated], axis=-1)

    def attend_latent(self, queries: mx.array, rotated: mx.array, scale: float) -> mx.array:
        queries = mx.concatenate([queries, rotated / scale], axis=-1)
        return self._attention.attend(queries, self._keys, self._latents, scale, None)


class TreeCache:
    """A block's cache in the forward of a forest. `offset` [W] int32: the tokens' depths. `latent`:
    its attention keeps latents, and the rotated part of the keys (MLA)."""

    latent = False

    def __init__(self, attention: TreeAttention, offset: mx.array) -> None:
        self._attention, self.offset = attention, offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        if window_size not in (None, self._attention.window):
            raise ValueError(
                f"its attention sees a window of {window_size}, and its cache"
                f" {self._attention.window or 'all'}"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self.latent:
            identity = mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
            return _TreeLatents(self._attention, keys, values), identity
        routed = _TreeKeys(self._attention, keys, values)
        return routed, routed


class TreeStates(ArraysCache):
    """A recurrent block's cache of `size` arrays in the forward of a forest: there is nothing
    before its tokens, and nothing is kept of them. `writes`: how many arrays should have been."""

    writes = 0

    def __setitem__(self, index: int, value: Any) -> None:
        self.writes += 1
