"""How the tokens of a micro-batch go through the blocks: with little padding, and what rows share
computed once.

    PlainRows         [B, T], as they are
    SharedPrompts     each distinct prompt once, [U, P]; then what follows it in each row, [B, C],
                      whose attention sees the prompt's keys and values before its own: the prompt
                      of a group of G completions is computed, and differentiated, once instead of G
                      times
    PackedSequences   unrelated sequences end to end in few rows, [R, W], under a block-diagonal
                      causal mask
    TreeOfRows        (tree_rows.py) whatever rows have in common from their beginning once

A block sees the prompts as a forward into an empty cache and the rest as one into a cache that
holds the prompt, so its positions, masks and projections stay the architecture's own code.
Gradients flow through that cache. The mask of packed sequences reaches the blocks in the same way.
W is the length of the longest sequence and not of the whole micro-batch: attention scores grow with
its square.

A recurrent block keeps a state (and the last inputs of a convolution) instead of keys and values.
It takes prompts of one length at a time, without their padding, and the state at their end is
where each row continues; the gradient flows back through it. Such blocks are not packed, because a
state knows no mask. Windows, and blocks that keep both a state and keys and values, become trees
only: `shareable`, `packable` and `mergeable` say which. Sequences are not packed, nor made a tree,
if positions are learned, so that a token's place counts, not only its distance from others.
`BlockwiseModel` also compares the layouts once, at start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.attention import route_attention
from mlx_parallm.models.layer_stack import (
    EXACT,
    ROUNDED,
    ROUNDED_ON_GPU,
    BlockCall,
    LayerStack,
    distance,
)
from mlx_parallm.models.layouts.padding import padded_length
from mlx_parallm.models.layouts.tree_rows import TreeOfRows, TreeRows, merge_rows
from mlx_parallm.models.mlx_lm_api import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_parallm.models.recurrent.layers import use_trees
from mlx_parallm.models.seen_tokens import seeing
from mlx_parallm.system.device.traits import may_lose_results, rounds_every_layout_alike


@dataclass(frozen=True)
class SharedRows:
    """A micro-batch's tokens with each prompt once. `tokens`: how many are computed."""

    prompts: np.ndarray  # [U, P] int32, right-padded
    lengths: np.ndarray  # [U] int32, of the prompts
    # [B, C] int32, right-padded: what follows the prompt, up to the last scored position
    rests: np.ndarray
    owner: np.ndarray  # [B] int32: the prompt of each row
    # [N] int32: the scored positions, in prompts and rests, flattened and end to end
    positions: np.ndarray
    places: np.ndarray  # [B, T] int32: the place of each token of the rows in it; -1: no place

    @property
    def tokens(self) -> int:
        return int(self.prompts.size + self.rests.size)


@dataclass(frozen=True)
class PackedRows:
    """A micro-batch's tokens with several sequences in a row, each up to its last scored
    position."""

    inputs: np.ndarray  # [R, W] int32, right-padded
    owner: np.ndarray  # [R, W] int32: the sequence that a token is of; -1 in padding
    positions: np.ndarray  # [N] int32: the scored positions in the flattened inputs
    places: np.ndarray  # [B, T] int32, as in `SharedRows`

    @property
    def tokens(self) -> int:
        return int(self.inputs.size)


CompactRows = SharedRows | PackedRows | TreeRows
"""The tokens of [B, T] rows, fewer of them computed."""


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded tokens, and which of them are scored."""

    inputs: mx.array  # [B, T] int32
    # [N] int32, indices into the flattened [B · T]: the position that predicts each scored token
    positions: mx.array
    targets: mx.array  # [N] int32, the scored tokens
    temperature: float | mx.array = 1.0  # or [N] float32
    compact: CompactRows | None = None  # the same tokens with less padding, or each prompt once
    entropy_slope: bool = True  # False: the loss does not depend on the entropy
    # [N, layers, k] int16 or int32: the experts that predicted each token when it was sampled,
    # repeated in this forward; -1: the router's own choice
    experts: mx.array | None = None
    # the same of prompts' tokens: their indices into the flattened [B · T], int32, and [M, layers,
    # k]
    prompt_experts: tuple[np.ndarray, mx.array] | None = None
    # further scores [n, …] of the scored tokens, made of their logits [n, V] and differentiated:
    # (logits, this batch, which of the scored tokens they are for)
    measure: "Callable[[mx.array, TokenBatch, slice], tuple[mx.array, ...]] | None" = None


def scaled(
    logits: mx.array, batch: TokenBatch, chunk: slice, temperature: float | None = None
) -> mx.array:
    """Logits [n, V] over a temperature, float32; None: over the batch's. `chunk`: which of the
    scored tokens."""
    wide = logits.astype(mx.float32)
    divisor = batch.temperature if temperature is None else temperature
    if isinstance(divisor, mx.array):
        return wide / divisor[chunk][:, None]
    return wide if divisor == 1.0 else wide / divisor


def share_prompts(inputs: np.ndarray, positions: np.ndarray) -> SharedRows:
    """Split rows at the first scored token: up to there they are compared, and equal
    ones computed once.

    Args:
        inputs: [B, T] int32, right-padded.
        positions: [N] int32, indices into the flattened [B · T], ascending; at least one in each
            row.

    Example: rows [7 8 1 2] and [7 8 3 4], scored from column 1 on, are the prompt [7 8] and the
    rests [1 2] and [3 4].
    """
    rows, columns = np.divmod(positions, inputs.shape[1])
    starts = np.searchsorted(rows, np.arange(len(inputs)))
    prompt_lengths = columns[starts] + 1
    ends = columns[np.append(starts[1:], len(rows)) - 1] + 1
    numbers: dict[bytes, int] = {}
    first_rows: list[int] = []
    owner = np.zeros(len(inputs), np.int32)
    for row, length in enumerate(prompt_lengths):
        key = inputs[row, :length].tobytes()
        if key not in numbers:
            numbers[key] = len(numbers)
            first_rows.append(row)
        owner[row] = numbers[key]
    lengths = prompt_lengths[first_rows].astype(np.int32)
    prompts = np.zeros((len(first_rows), padded_length(int(lengths.max()))), np.int32)
    for number, row in enumerate(first_rows):
        prompts[number, : lengths[number]] = inputs[row, : lengths[number]]
    rests = np.zeros(
        (len(inputs), padded_length(max(1, int((ends - prompt_lengths).max())))), np.int32
    )
    for row, (start, end) in enumerate(zip(prompt_lengths, ends, strict=True)):
        rests[row, : end - start] = inputs[row, start:end]
    column, each = np.arange(inputs.shape[1]), np.arange(len(inputs))[:, None]
    of_prompt = owner[:, None] * prompts.shape[1] + column
    of_rest = prompts.size + each * rests.shape[1] + column - prompt_lengths[:, None]
    places = np.where(column < prompt_lengths[:, None], of_prompt, of_rest)
    places = np.where(column < ends[:, None], places, -1).astype(np.int32)
    return SharedRows(prompts, lengths, rests, owner, places[rows, columns], places)


def pack_rows(inputs: np.ndarray, positions: np.ndarray, counts: Sequence[int]) -> PackedRows:
    """Lays sequences end to end.

    Args:
        inputs: [B, T] int32, right-padded.
        positions: [N] int32, indices into the flattened [B · T], ascending; at least one in each
            row.
        counts: [R] how many of the B sequences, in their order, go into each row.

    Example: [1 2 3 0] and [4 5 0 0], scored in columns 1, 2 and 1, in one row are [1 2 3 4 5],
    scored in 1, 2 and 4.
    """
    rows, columns = np.divmod(positions, inputs.shape[1])
    lengths = (
        columns[np.append(np.searchsorted(rows, np.arange(1, len(inputs))), len(rows)) - 1] + 1
    )
    place = np.repeat(np.arange(len(counts)), counts)  # [B] the row of each sequence
    ends = np.cumsum(lengths)
    before = np.append(0, ends)[np.cumsum(counts) - counts]  # [R] tokens in all earlier rows
    starts = ends - lengths - before[place]
    width = padded_length(int((starts + lengths).max()))
    packed, owner = (
        np.zeros((len(counts), width), np.int32),
        np.full((len(counts), width), -1, np.int32),
    )
    places = np.full(inputs.shape, -1, np.int32)
    for sequence, (row, start, length) in enumerate(zip(place, starts, lengths, strict=True)):
        packed[row, start : start + length] = inputs[sequence, :length]
        owner[row, start : start + length] = sequence
        places[sequence, :length] = np.arange(length) + row * width + start
    return PackedRows(packed, owner, places[rows, columns], places)


class Layout(Protocol):
    """`embed`: the first block's input, and each block's further arguments; `run` puts it through
    one block.

    `positions` [N]: the scored tokens in the flattened input.
    """

    positions: mx.array

    def embed(self, stack: LayerStack) -> tuple[mx.array, list[Any]]: ...

    def run(self, block: nn.Module, hidden: mx.array, call: Any) -> mx.array: ...


class PlainRows:
    """[B, T] tokens through the blocks as [B, T, D]."""

    def __init__(self, inputs: mx.array, positions: mx.array) -> None:
        self._inputs, self.positions = inputs, positions

    def embed(self, stack: LayerStack) -> tuple[mx.array, list[Any]]:
        return stack.embed(self._inputs)

    def run(self, block: nn.Module, hidden: mx.array, call: BlockCall) -> mx.array:
        return _through(block, hidden, call)


class SharedPrompts:
    """`SharedRows` through the blocks as one [U · P + B · C, D]."""

    def __init__(self, shared: SharedRows) -> None:
        self.positions = mx.array(shared.positions)
        self._prompts, self._rests = mx.array(shared.prompts), mx.array(shared.rests)
        self._runs = [
            (length, len(list(same))) for length, same in groupby(shared.lengths.tolist())
        ]
        self._mask = mx.array(_rest_mask(shared))
        self._owners = mx.array(np.eye(len(shared.lengths), dtype=np.float32)[shared.owner])
        equal = len(set(shared.lengths.tolist())) == 1
        self._offset = int(shared.lengths[0]) if equal else mx.array(shared.lengths[shared.owner])

    def embed(self, stack: LayerStack) -> tuple[mx.array, list[Any]]:
        caches = make_prompt_cache(stack.model)  # some architectures have fewer caches than blocks
        before = [
            _Recurrent(len(cache.cache)) if isinstance(cache, ArraysCache) else _PromptCache()
            for cache in caches
        ]
        after = [
            _Recurrent(len(cache.cache))
            if isinstance(cache, _Recurrent)
            else _RestCache(cache, self._owners, self._mask, self._offset)
            for cache in before
        ]
        prompts, prompt_calls = stack.embed(self._prompts, before)
        rests, rest_calls = stack.embed(self._rests, after)
        return _end_to_end(prompts, rests), list(zip(prompt_calls, rest_calls, strict=True))

    def run(
        self, block: nn.Module, hidden: mx.array, call: tuple[BlockCall, BlockCall]
    ) -> mx.array:
        prompt_call, rest_call = call
        size, width = self._prompts.size, hidden.shape[-1]
        prompts = hidden[:size].reshape(*self._prompts.shape, width)
        state = _recurrent(prompt_call)
        if state is None:
            prompts = _through(block, prompts, prompt_call, slice(size))
        else:
            prompts, ends = self._by_length(block, prompts, prompt_call, state)
            _recurrent(rest_call).cache = [
                None if end is None else _spread(self._owners, end) for end in ends
            ]
        rests = _through(
            block, hidden[size:].reshape(*self._rests.shape, width), rest_call, slice(size, None)
        )
        for cache in [*_caches(prompt_call), *_caches(rest_call)]:
            cache.forget()
        return _end_to_end(prompts, rests)

    def _by_length(
        self, block: nn.Module, prompts: mx.array, call: BlockCall, state: "_Recurrent"
    ) -> tuple[mx.array, list[mx.array | None]]:
        """Prompts [U, P, D] through a recurrent block, those of one length together, and the state
        that it keeps at their ends: padding would go into its state. None: the block passes its
        input on (`LayerStack.only`)."""
        outputs, ends, start = [], [], 0
        numbers = np.arange(self._prompts.size).reshape(self._prompts.shape)
        for length, count in self._runs:
            state.forget()
            rows = slice(start, start + count)
            out = _through(block, prompts[rows, :length], call, numbers[rows, :length].ravel())
            outputs.append(mx.pad(out, [(0, 0), (0, prompts.shape[1] - length), (0, 0)]))
            ends.append(state.cache)
            start += count
        return mx.concatenate(outputs), [
            None if of_all[0] is None else mx.concatenate(list(of_all))
            for of_all in zip(*ends, strict=True)
        ]


class PackedSequences:
    """`PackedRows` through the blocks as [R, W, D]."""

    def __init__(self, packed: PackedRows) -> None:
        self.positions, self._inputs = mx.array(packed.positions), mx.array(packed.inputs)
        owner = mx.array(packed.owner)
        self._mask = (owner[:, None, :, None] == owner[:, None, None, :]) & mx.tri(
            owner.shape[1], dtype=mx.bool_
        )

    def embed(self, stack: LayerStack) -> tuple[mx.array, list[Any]]:
        return stack.embed(self._inputs, [_MaskedCache(self._mask) for _ in stack.blocks])

    def run(self, block: nn.Module, hidden: mx.array, call: BlockCall) -> mx.array:
        return _through(block, hidden, call)


def layout_of(compact: CompactRows) -> Layout:
    if isinstance(compact, TreeRows):
        return TreeOfRows(compact)
    return SharedPrompts(compact) if isinstance(compact, SharedRows) else PackedSequences(compact)


class _PromptCache:
    """A block's empty cache, which keeps its inputs."""

    offset = 0

    def __init__(self) -> None:
        self.kept: tuple[mx.array, mx.array] | None = None

    def forget(self) -> None:
        """Drop the kept arrays, which may be tracers."""
        self.kept = None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        _refuse_window(window_size)
        return mx.tri(N, dtype=mx.bool_) if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.kept = keys, values
        return keys, values


class _MaskedCache:
    """A block's empty cache, with its own mask [R, 1, W, W] bool."""

    offset: int | mx.array = 0

    def __init__(self, mask: mx.array) -> None:
        self._mask = mask

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        _refuse_window(window_size)
        return self._mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class _RestCache(_MaskedCache):
    """A block's cache that holds each row's prompt. `offset`: the prompts' length, [B] where
    they differ."""

    def __init__(
        self, prompts: _PromptCache, owners: mx.array, mask: mx.array, offset: int | mx.array
    ) -> None:
        super().__init__(mask)
        self._prompts, self._owners, self.offset = prompts, owners, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._prompts.kept is None:
            raise ValueError("the blocks keep no keys and values of a prompt")
        before = [_spread(self._owners, array) for array in self._prompts.kept]
        return mx.concatenate([before[0], keys], axis=2), mx.concatenate(
            [before[1], values], axis=2
        )

    def forget(self) -> None:
        self._prompts.forget()


class _Recurrent(ArraysCache):
    """A recurrent block's cache of `size` arrays. Rows have no padding in front, and what comes
    behind is not read."""

    cache: list[Any]

    def forget(self) -> None:
        """Drop the kept arrays, which may be tracers."""
        self.cache = [None] * len(self.cache)


def _caches(call: BlockCall) -> list[Any]:
    return [
        a
        for a in [*call.args, *call.kwargs.values()]
        if isinstance(a, _PromptCache | _RestCache | _Recurrent)
    ]


def _recurrent(call: BlockCall) -> Any:
    return next((cache for cache in _caches(call) if isinstance(cache, _Recurrent)), None)


def _spread(owners: mx.array, array: mx.array) -> mx.array:
    """[U, …] → [B, …]: a product with ones and zeros, whose gradient is a product too (a
    gather's would be added up element by element)."""
    flat = owners.astype(array.dtype) @ array.reshape(array.shape[0], -1)
    return flat.reshape(-1, *array.shape[1:])


def shareable(model: nn.Module) -> str:
    """ "" where each block keeps keys and values or a recurrent state; else the obstacle in the
    way of `SharedRows`."""
    return _keeps_others(model, {KVCache, ArraysCache})


def packable(model: nn.Module) -> str:
    """ "" where blocks keep keys and values only; else the obstacle for `PackedRows`."""
    return _keeps_others(model, {KVCache})


def mergeable(model: nn.Module) -> str:
    """ "" where blocks keep keys and values of all tokens, or of the last ones, or a recurrent
    state; else the obstacle for `TreeRows`."""
    return _keeps_others(model, {KVCache, RotatingKVCache, ArraysCache}, several=True)


def _keeps_others(model: nn.Module, kinds: set[type], *, several: bool = False) -> str:
    """Name the caches that are of other kinds, or keep their first tokens beside a window.
    `several`: a block may have several caches."""
    caches = make_prompt_cache(model)
    if several:
        lists = [c.caches if isinstance(c, CacheList) else [c] for c in caches]
        caches = [cache for one in lists for cache in one]
    others = sorted(
        {
            type(cache).__name__
            for cache in caches
            if type(cache) not in kinds or getattr(cache, "keep", False)
        }
    )
    return f"its blocks keep {', '.join(others)}" if others else ""


def _through(
    block: nn.Module, hidden: mx.array, call: BlockCall, tokens: slice | np.ndarray | None = None
) -> mx.array:
    """`tokens`: which of the layout's flattened tokens these are; default: all, in their order."""
    with seeing(tokens):
        out: mx.array = block(hidden, *call.args, **call.kwargs)
    return out


def _end_to_end(prompts: mx.array, rests: mx.array) -> mx.array:
    width = prompts.shape[-1]
    return mx.concatenate([prompts.reshape(-1, width), rests.reshape(-1, width)])


def _rest_mask(shared: SharedRows) -> np.ndarray:
    """[B, 1, C, P + C] bool: the prompt without its padding, and the row's own tokens up to
    here."""
    (_, width), (rows, count) = shared.prompts.shape, shared.rests.shape
    prompt = np.arange(width) < shared.lengths[shared.owner][:, None]  # [B, P]
    prompt = np.broadcast_to(prompt[:, None], (rows, count, width))
    rest = np.broadcast_to(np.tri(count, dtype=bool), (rows, count, count))
    return np.concatenate([prompt, rest], axis=-1)[:, None]


def _refuse_window(size: int | None) -> None:
    if size is not None:
        raise ValueError("its attention sees a window")


def compare_layouts(
    model: nn.Module, stack: LayerStack, score: Callable[[TokenBatch], tuple[mx.array, ...]]
) -> tuple[str, str, str]:
    """Return why prompts are not shared, why sequences are not packed, and why rows do not become a
    tree ("": they do). Compares three rows, two of them with one prompt, in each layout. Gradients
    follow from the same operations."""
    reasons = shareable(model), packable(model), mergeable(model)
    if all(reasons):
        return reasons
    unshareable, unpackable, unmergeable = reasons
    tokens = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 5, 4, 0], [2, 4, 6, 1, 3, 5]], np.int32)
    positions = np.array([2, 4, 5, 8, 9, 13, 15, 17], np.int32)
    batch = TokenBatch(mx.array(tokens), mx.array(positions), mx.arange(8, dtype=mx.int32) % 7)
    rows = score(batch)
    hidden, _ = stack.embed(mx.zeros((1, 4), mx.int32))
    bound = ROUNDED_ON_GPU
    if rounds_every_layout_alike():
        bound = EXACT if hidden.dtype == mx.float32 else ROUNDED

    def differing(compact: CompactRows, expected: Sequence[mx.array]) -> float:
        scores = score(replace(batch, compact=compact))
        return max(distance(a, b) for a, b in zip(scores, expected, strict=True))

    def why_not(compact: CompactRows) -> str:
        try:
            off = differing(compact, rows)
            if off > bound and may_lose_results():  # one of them may be a lost result
                off = differing(compact, score(batch))
        except (ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            line = str(error).partition("\n")[0]
            return f"its blocks do not take such keys, values and masks: {line}"
        return f"scores are off by {off:.2g} (relative)" if off > bound else ""

    unshared = unshareable or why_not(share_prompts(tokens, positions))
    if unpackable and unmergeable:
        return unshared, unpackable, unmergeable
    if not mx.array_equal(hidden[:, 1:], hidden[:, :-1]).item():
        reason = "what enters its blocks depends on the position"
        return unshared, unpackable or reason, unmergeable or reason
    for part in [model, *stack.blocks]:  # which stand beside the model while it is tried
        route_attention(part)
        use_trees(part)
    return (
        unshared,
        unpackable or why_not(pack_rows(tokens, positions, [1, 2])),
        unmergeable or why_not(merge_rows(tokens, positions)),
    )
