"""Asks a model at load how its rows can be decoded, instead of at the first request: some architectures read
`cache.offset` as a number, shape the mask for one row only, or keep what `BatchCache` does not know."""

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.engine.cache.batch import BatchCache, CannotBatchError, RowCaches, arrays_of
from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import make_prompt_cache
from mlx_parallm.system.log import get_logger

_ROWS = 5  # an odd number of rows: it fits no usual number of heads by accident
_TOLERANCE = {mx.float32: 0.01}  # of the largest logit: far above rounding, far below a wrong position …
_HALF_TOLERANCE = 0.1  # … and in half precision
_ERRORS = (ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError, CannotBatchError)

log = get_logger(__name__)


def choose_cache(model: nn.Module, architecture: str, max_rows: int, max_positions: int) -> BatchCache | RowCaches:
    """The cache that the engine is to use: all rows in one forward where that gives what the model's own forward gives,
    else row by row. Raises ModelError when not even that does."""
    reason = why_not_batched(model)
    if not reason:
        return BatchCache(model, max_rows, max_positions)
    slots = RowCaches(model, max_positions)
    if failure := _failure(model, slots):
        raise ModelError(f"the architecture {architecture!r} cannot be served: decoding: {failure}")
    log.warning("sequences are decoded one by one, which is slow", architecture=architecture, reason=reason)
    slots.clear()
    return slots


def why_not_batched(model: nn.Module) -> str:
    """Why one forward cannot decode rows of different lengths; "" when it can."""
    try:
        slots = BatchCache(model, _ROWS, 2 * _ROWS)
    except CannotBatchError as error:
        return str(error)
    return _failure(model, slots)


def _failure(model: nn.Module, slots: BatchCache | RowCaches) -> str:
    try:
        wrong = _rows_that_differ(model, slots)
    except _ERRORS as error:
        return str(error) or type(error).__name__
    # One row may differ by chance: near ties of a router of experts, in half precision.
    return "it does not give what its own forward gives" if wrong > _ROWS // 2 else ""


def _rows_that_differ(model: nn.Module, slots: BatchCache | RowCaches) -> int:
    """Decodes rows of 1, 2, … tokens one by one and compares the last logits with one plain forward over each row."""
    tokens = mx.arange(_ROWS * _ROWS, dtype=mx.int32).reshape(_ROWS, _ROWS)
    shapes = set()
    for step in range(_ROWS):
        # Row i starts at step i, so the rows are at different positions; until then it writes its first token again.
        positions = [max(0, step - row) for row in range(_ROWS)]
        slots.begin_step(positions)
        inputs = mx.take_along_axis(tokens, mx.array(positions)[:, None], axis=1)
        logits = [model(inputs[start:stop], cache=caches)[:, -1] for start, stop, caches in slots.batches()]
        batched = mx.concatenate(logits)
        mx.eval(batched, slots.unread)
        shapes.add(tuple(array.shape for array in slots.unread))
    if isinstance(slots, BatchCache) and len(shapes) > 1:
        raise CannotBatchError("a layer's state grows with the text")
    tolerance = _TOLERANCE.get(batched.dtype, _HALF_TOLERANCE)
    wrong = 0
    for row, position in enumerate(positions):
        prompt, caches = tokens[row : row + 1, : position + 1], make_prompt_cache(model)
        alone = model(prompt, cache=caches)[0, -1].astype(mx.float32)
        mx.eval(alone, arrays_of(caches))
        difference, largest = mx.abs(batched[row].astype(mx.float32) - alone).max(), mx.abs(alone).max()
        wrong += not bool((difference <= tolerance * largest).item())
    return wrong
