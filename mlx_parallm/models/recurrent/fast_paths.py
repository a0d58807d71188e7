"""MLX's own fast operations in the place of ours, if a trial at load shows the same results.

    prove           try those that a model would call, on MLX's default device
    gated_delta     the gated delta rule: `mx.fast.gated_delta_update`, else chunks (`chunks.py`)
    cross_entropy   -log p of tokens: `mx.fast.cross_entropy`, else nothing

An operation is taken if it is one: its graph is a few operations, where MLX without a kernel for
this device or these sizes makes a loop over tokens, which takes six times the memory of our chunks
on a CPU (docs/benchmarks/training.md#recurrent-layers). And if its values and gradients are within
`NEAR` of ours. Platforms have no say. Wrong ones are named in the log, once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models import sums
from mlx_parallm.models.blocks_per_eval import graph_nodes
from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.recurrent import chunks
from mlx_parallm.system.log import get_logger

log = get_logger(__name__)
NEAR = 1e-5  # relative to the norm; for float32 that a device multiplies as TF32 …
NEAR_ON_TF32 = 5e-3  # … which shows in one product
MOST_NODES = 4
TRIED_TOKENS = 40  # more than one chunk, and no whole number of them
TRIED_VOCABULARY = 50_257

Heads = tuple[int, int, int, int]
"""Key heads, value heads, and the width of each: how a gated delta layer is cut."""
_proved: dict[str | Heads, bool] = {}
"""Results of this process's trials; a refusal is not tried again."""


def prove(model: nn.Module) -> None:
    """Try the functions that the model's layers would call. Evaluates a few small arrays, once for
    each kind."""
    for module in model.modules():
        if (heads := _heads_of(module)) is not None and heads not in _proved:
            _proved[heads] = _is_proved("gated_delta_update", *_gated_delta_trial(heads))
    if "cross_entropy" not in _proved:
        _proved["cross_entropy"] = _is_proved("cross_entropy", *_cross_entropy_trial())


def forget() -> None:
    """Try everything anew when it is next needed."""
    _proved.clear()


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute what `chunks.gated_delta` does. A gate a channel, and padding, are always ours."""
    heads = (q.shape[2], v.shape[2], q.shape[3], v.shape[3])
    if decay.ndim == 3 and mask is None and _proved.get(heads, False):
        y, after = mx.fast.gated_delta_update(q, k, v, decay, beta, state)
        return y.astype(q.dtype), after
    return chunks.gated_delta(q, k, v, decay, beta, state, mask)


def cross_entropy(logits: mx.array, tokens: mx.array) -> mx.array | None:
    """-log p of tokens [...] under logits [..., V] float32; None: MLX's own was not proved."""
    return mx.fast.cross_entropy(logits, tokens) if _proved.get("cross_entropy", False) else None


def _heads_of(module: nn.Module) -> Heads | None:
    layer: Any = module
    try:
        return layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    except AttributeError:
        return None


Function = Callable[..., Sequence[mx.array]]


def _is_proved(name: str, fast: Function, ours: Function, inputs: Sequence[mx.array]) -> bool:
    """Return whether `mx.fast`'s function may be used; a wrong one is named in the log."""
    mx.eval(inputs)
    if not hasattr(mx.fast, name) or graph_nodes(*fast(*inputs)) > MOST_NODES:
        return False
    try:
        far = max(
            _distance(a, b)
            for a, b in zip(_with_slopes(fast, inputs), _with_slopes(ours, inputs), strict=True)
        )
    except (RuntimeError, ValueError, TypeError) as error:
        log.warning("an operation of MLX is not used", name=f"mx.fast.{name}", reason=str(error))
        return False
    if not far <= _near():
        reason = f"its values or gradients are off by {far:.2g} of their norm"
        log.warning("an operation of MLX is not used", name=f"mx.fast.{name}", reason=reason)
        return False
    return True


def _with_slopes(function: Function, inputs: Sequence[mx.array]) -> list[mx.array]:
    """Return the outputs, and the gradients of a weighted sum of them by each floating input."""
    floating = [place for place, x in enumerate(inputs) if mx.issubdtype(x.dtype, mx.floating)]

    def of_floating(*arrays: mx.array) -> list[mx.array]:
        arguments = list(inputs)
        for place, array in zip(floating, arrays, strict=True):
            arguments[place] = array
        return list(function(*arguments))

    primals = [inputs[place] for place in floating]
    weights = [
        mx.random.normal(out.shape, key=mx.random.key(place))
        for place, out in enumerate(function(*inputs))
    ]
    outputs, slopes = mx.vjp(of_floating, primals, weights)
    mx.eval(outputs, slopes)
    return [*outputs, *slopes]


def _distance(a: mx.array, b: mx.array) -> float:
    if a.shape != b.shape:
        return float("inf")
    off = mx.linalg.norm((a - b).reshape(-1)) / mx.maximum(mx.linalg.norm(b.reshape(-1)), 1e-9)
    return scalar(off)


def _near() -> float:
    """Return the bound: the error of a float32 product shows whether it is TF32."""
    x = mx.random.normal((64, 64), key=mx.random.key(1))
    exact = (x[:, :, None] * x[None]).sum(axis=1)
    return NEAR if _distance(x @ x, exact) <= NEAR else NEAR_ON_TF32


def _gated_delta_trial(heads: Heads) -> tuple[Function, Function, list[mx.array]]:
    key_heads, value_heads, key_width, value_width = heads
    keys = iter(mx.random.split(mx.random.key(0), 6))
    rows = (2, TRIED_TOKENS)
    q, k = (mx.random.normal((*rows, key_heads, key_width), key=next(keys)) for _ in range(2))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    inputs = [
        q / key_width,
        k,
        mx.random.normal((*rows, value_heads, value_width), key=next(keys)),
        mx.random.uniform(0.8, 1.0, (*rows, value_heads), key=next(keys)),
        mx.random.uniform(0.0, 1.0, (*rows, value_heads), key=next(keys)),
        mx.random.normal((2, value_heads, value_width, key_width), key=next(keys)),
    ]
    return lambda *arrays: mx.fast.gated_delta_update(*arrays), chunks.gated_delta, inputs


def _cross_entropy_trial() -> tuple[Function, Function, list[mx.array]]:
    logits = 3 * mx.random.normal((4, TRIED_VOCABULARY), key=mx.random.key(0))
    tokens = mx.array([0, 7, 1024, TRIED_VOCABULARY - 1], mx.int32)

    def ours(logits: mx.array, tokens: mx.array) -> list[mx.array]:
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return [sums.logsumexp(logits) - chosen]

    def fast(*arrays: Any) -> list[mx.array]:
        return [mx.fast.cross_entropy(*arrays)]

    return fast, ours, [logits, tokens]
