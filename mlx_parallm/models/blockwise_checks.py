"""What `BlockwiseModel` finds out about an architecture at start: whether its blocks can be taken apart, and in which
layouts its rows may be computed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.head import Scores, TokenBatch
from mlx_parallm.models.layer_stack import BlockCall, LayerStack
from mlx_parallm.models.packing import Compact, pack_rows, share_prompts, shareable
from mlx_parallm.models.parameters import scalar

EXACT, ROUNDED = 1e-3, 0.02
"""Bounds on relative differences that are only rounding, in float32 and below it (see `distance`)."""


def check_stack(stack: LayerStack, tokens: mx.array) -> int:
    """The vocabulary. Raises ValueError: there is other glue between the blocks than one hidden state, or the head does
    not look at each row alone, so that it cannot go in pieces."""
    passed: list[Any] = []

    def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
        if passed and hidden is not passed[-1]:
            raise ValueError(f"the model does more before block {index} than passing the hidden state on")
        passed.append(stack.blocks[index](hidden, *call.args, **call.kwargs))
        return passed[-1]

    stack.walk(tokens, visit)
    if len(passed) != len(stack.blocks) or not all(isinstance(hidden, mx.array) for hidden in passed):
        raise ValueError("the model's blocks are not called once each with one hidden state")
    rows = passed[-1].reshape(-1, passed[-1].shape[-1])
    logits, piece = stack.head(rows), slice(1, 3)
    if distance(stack.head(rows[piece]), logits[piece]) > ROUNDED:
        raise ValueError("the model's head does not look at each position alone")
    return int(logits.shape[-1])


def compare_layouts(model: nn.Module, stack: LayerStack, score: Callable[[TokenBatch], Scores]) -> tuple[str, str]:
    """Why prompts are not shared, and why sequences are not packed ("": they are): the scores of three rows, two of
    them with one prompt, in each layout. Gradients follow from the same operations."""
    if reason := shareable(model):
        return reason, reason
    tokens = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 5, 4, 0], [2, 4, 6, 1, 3, 5]], np.int32)
    positions = np.array([2, 4, 5, 8, 9, 13, 15, 17], np.int32)
    batch = TokenBatch(mx.array(tokens), mx.array(positions), mx.arange(8, dtype=mx.int32) % 7)
    rows = score(batch)
    hidden, _ = stack.embed(mx.zeros((1, 4), mx.int32))
    bound = EXACT if hidden.dtype == mx.float32 else ROUNDED

    def why_not(compact: Compact) -> str:
        try:
            found = score(replace(batch, compact=compact))
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            return f"its blocks do not take such keys, values and masks: {error}"
        off = max(distance(a, b) for a, b in zip(found, rows, strict=True))
        return f"scores are off by {off:.2g} (relative)" if off > bound else ""

    unshared = why_not(share_prompts(tokens, positions))
    if not mx.array_equal(hidden[:, 1:], hidden[:, :-1]).item():
        return unshared, "what enters its blocks depends on the position"
    return unshared, why_not(pack_rows(tokens, positions, [1, 2]))


def distance(a: mx.array, b: mx.array | None) -> float:
    """‖a - b‖ / ‖b‖; infinite without a number. float32 models reach 1e-6 here, bfloat16 1e-3, wrong graphs 0.1."""
    assert b is not None
    size = scalar(mx.sqrt(mx.square(b).sum()))
    off = scalar(mx.sqrt(mx.square(a - b).sum()))
    return off / size if size > 0 else (0.0 if off == 0 else float("inf"))
