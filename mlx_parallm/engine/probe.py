"""Asks a model at load whether it decodes rows of different lengths rightly with our cache, instead of at the first
request: some architectures read `cache.offset` as a number or shape the mask for one row only."""

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.engine.kv_cache import SlotCache, new_prefill_cache
from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import KVCache, make_prompt_cache

_ROWS = 5  # an odd number of rows: it fits no usual number of heads by accident
_TOLERANCE = 0.1  # of the largest logit: far above rounding in half precision, far below a wrong position


def check_architecture(model: nn.Module, architecture: str) -> int:
    """The number of caches that the model wants. Raises ModelError when the engine cannot batch the architecture."""
    refusal = f"the architecture {architecture!r} cannot be served yet:"
    caches = make_prompt_cache(model)
    other = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if other:
        raise ModelError(f"{refusal} it needs {', '.join(other)}, and the engine batches full-attention caches only")
    try:
        wrong = _rows_that_differ(model, len(caches))
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{refusal} batched decoding: {error}") from error
    if wrong > _ROWS // 2:  # one row may differ by chance: near ties of a router of experts, in half precision
        raise ModelError(f"{refusal} batched decoding does not give what its own forward gives")
    return len(caches)


def _rows_that_differ(model: nn.Module, num_layers: int) -> int:
    """Decodes rows of 1, 2, … tokens one by one and compares the last logits with one plain forward over each row."""
    slots = SlotCache(num_layers, _ROWS, 2 * _ROWS)
    tokens = mx.arange(_ROWS * _ROWS, dtype=mx.int32).reshape(_ROWS, _ROWS)
    for step in range(_ROWS):
        # Row i starts at step i, so the rows are at different positions; until then it writes its first token again.
        positions = [max(0, step - row) for row in range(_ROWS)]
        slots.begin_step(positions)
        inputs = mx.take_along_axis(tokens, mx.array(positions)[:, None], axis=1)
        batched = model(inputs, cache=slots.layers)[:, -1].astype(mx.float32)
        mx.eval(batched, slots.state)
    wrong = 0
    for row, position in enumerate(positions):
        prompt = tokens[row : row + 1, : position + 1]
        alone = model(prompt, cache=new_prefill_cache(model, position + 1))[0, -1].astype(mx.float32)
        difference, largest = mx.abs(batched[row] - alone).max(), mx.abs(alone).max()
        wrong += bool((difference > _TOLERANCE * largest).item())
    return wrong
