"""The checks at a trainer's start: whether a model's blocks can be taken apart, and its rows laid out otherwise.

check_stack        one hidden state goes from block to block; what else a block returns, later ones get as it is
compare_layouts    shared prompts and packed sequences give the scores of plain rows
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.layer_stack import BlockCall, LayerStack, BlockOutput, arrays_in, hidden_of, resolved
from mlx_parallm.models.layout import CompactRows, TokenBatch, pack_rows, packable, share_prompts, shareable
from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.sums import total

Scores = tuple[mx.array, ...]
EXACT, ROUNDED = 1e-3, 0.02
"""Bounds on relative differences that are only rounding, in float32 and below it (see `distance`)."""

_ARGUMENTS = (
    mx.array,
    str,
    int,
    float,
    list,
    tuple,
    dict,
    type(None),
    BlockOutput,
)  # of a block; not what it writes into


def check_stack(stack: LayerStack, tokens: mx.array) -> int:
    """The vocabulary. Raises ValueError: there is other glue between the blocks than one hidden state, or the head does
    not look at each row alone, so that it cannot go in pieces."""
    entered: list[mx.array] = []
    passed: list[Any] = []

    def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
        if passed and hidden is not hidden_of(passed[-1]):
            raise ValueError(f"the model does more before block {index} than passing the hidden state on")
        entered.append(hidden)
        others = [type(a).__name__ for a in [*call.args, *call.kwargs.values()] if not isinstance(a, _ARGUMENTS)]
        if others:
            raise ValueError(f"the model's blocks write into one {others[0]}, which later ones and the head read")
        passed.append(stack.blocks[index](hidden, *call.args, **call.kwargs))
        return passed[-1]

    stack.walk(tokens, visit)  # nothing of it is evaluated
    if len(passed) != len(stack.blocks) or not all(isinstance(hidden_of(output), mx.array) for output in passed):
        raise ValueError("the model's blocks are not called once each with one hidden state")
    stack.note(passed)
    _check_arguments(stack, tokens)
    rows = stack.flat(entered[0])
    logits, piece = stack.head(rows), slice(1, 3)
    if distance(stack.head(rows[piece]), logits[piece]) > ROUNDED:
        raise ValueError("the model's head does not look at each position alone")
    return int(logits.shape[-1])


def _check_arguments(stack: LayerStack, tokens: mx.array) -> None:
    """Raises ValueError: what a block gets beside the hidden state, or the head, depends on what earlier blocks gave.

    In the blocks' places are sums that depend on all arguments and cost nothing: in the model's own forward, and one
    after another with the arguments that the model makes where no block changes anything.
    """

    def fingerprint(array: mx.array) -> mx.array:
        """From 0 to 1, another one for other numbers."""
        values = mx.clip(mx.nan_to_num(array.astype(mx.float32)).reshape(-1), -1, 1)
        part = (values * mx.cos(mx.arange(values.size))).sum() / mx.sqrt(mx.square(values).sum() + 1e-6)
        return mx.square(mx.sin(10 * part))

    def stand(index: int, hidden: mx.array, call: BlockCall) -> mx.array:
        change = sum(map(fingerprint, arrays_in(call)), mx.array(0.5))
        # In another direction at each block: a norm would take a mere factor back.
        direction = mx.cos((index + 1.0) * mx.arange(hidden.shape[-1])) * 2 * mx.abs(hidden).astype(mx.float32).mean()
        return ((hidden + change * direction) / (1 + change)).astype(hidden.dtype)

    passed: list[mx.array] = []

    carried: dict[BlockOutput, Any] = {}

    def returned(index: int, hidden: mx.array) -> Any:
        def other(output: BlockOutput) -> mx.array:
            carried[output] = fingerprint(hidden * output.place)
            return carried[output]

        return stack.returned(index, hidden, other)

    def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
        passed.append(stand(index, hidden, call))
        return returned(index, passed[-1])

    logits = stack.walk(tokens, visit)
    hidden, calls = stack.embed(tokens)
    carried.clear()
    for index, call in enumerate(calls):
        hidden = stand(index, hidden, resolved(call, carried))
        returned(index, hidden)
    one_by_one = stack.head(stack.flat(hidden))
    if distance(hidden, passed[-1]) > EXACT or distance(one_by_one, logits.reshape(one_by_one.shape)) > ROUNDED:
        raise ValueError("the model does more beside its blocks than passing the hidden state on")


def compare_layouts(
    model: nn.Module, stack: LayerStack, score: Callable[[TokenBatch], tuple[mx.array, ...]]
) -> tuple[str, str]:
    """Return why prompts are not shared, and why sequences are not packed ("": they are). Compares three rows, two of
    them with one prompt, in each layout. Gradients follow from the same operations."""
    if reason := shareable(model):
        return reason, packable(model)
    tokens = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 5, 4, 0], [2, 4, 6, 1, 3, 5]], np.int32)
    positions = np.array([2, 4, 5, 8, 9, 13, 15, 17], np.int32)
    batch = TokenBatch(mx.array(tokens), mx.array(positions), mx.arange(8, dtype=mx.int32) % 7)
    rows = score(batch)
    hidden, _ = stack.embed(mx.zeros((1, 4), mx.int32))
    bound = EXACT if hidden.dtype == mx.float32 else ROUNDED

    def why_not(compact: CompactRows) -> str:
        try:
            scores = score(replace(batch, compact=compact))
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            return f"its blocks do not take such keys, values and masks: {error}"
        off = max(distance(a, b) for a, b in zip(scores, rows, strict=True))
        return f"scores are off by {off:.2g} (relative)" if off > bound else ""

    unshared = why_not(share_prompts(tokens, positions))
    if reason := packable(model):
        return unshared, reason
    if not mx.array_equal(hidden[:, 1:], hidden[:, :-1]).item():
        return unshared, "what enters its blocks depends on the position"
    return unshared, why_not(pack_rows(tokens, positions, [1, 2]))


def distance(a: mx.array, b: mx.array | None) -> float:
    """‖a - b‖ / ‖b‖; infinite without a number. float32 models reach 1e-6 here, bfloat16 1e-3, wrong graphs 0.1."""
    assert b is not None
    size = scalar(mx.sqrt(total(mx.square(b))))
    off = scalar(mx.sqrt(total(mx.square(a - b))))
    return off / size if size > 0 else (0.0 if off == 0 else float("inf"))
