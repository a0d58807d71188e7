"""A head that computes in float32 in a model of bfloat16 or float16 (`model.fp32_lm_head`):
MiniMax-M1 (arXiv:2506.13585, section 3.2), ScaleRL (arXiv:2510.13786).

The head reads its input in float32, so MLX multiplies in float32 and the logits are float32. The
weights keep their type: they are widened for each product, exactly, and nothing else of the model,
of its optimizer or of its files changes. Quantised weights are unpacked to float32.
"""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.errors import ModelError

_LAYERS = nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding


@functools.cache
def float32_head(kind: Any) -> type[Any]:
    """Return the class of a head, of a linear layer's or an embedding's, that computes in
    float32. Its `plain` is `kind`."""
    if hasattr(kind, "as_linear"):

        class Float32Table(kind):
            plain = kind

            def as_linear(self, x: mx.array) -> mx.array:
                logits: mx.array = super().as_linear(x.astype(mx.float32))
                return logits

        return Float32Table

    class Float32Head(kind):
        plain = kind

        def __call__(self, x: mx.array) -> mx.array:
            logits: mx.array = super().__call__(x.astype(mx.float32))
            return logits

    return Float32Head


def plain_class(layer: nn.Module) -> type[nn.Module]:
    """Return a layer's class, without `float32_head`."""
    return getattr(type(layer), "plain", type(layer))


def widen_head(model: nn.Module) -> None:
    """Let the head of a model compute in float32, in place. Nothing is evaluated. Raises
    ModelError: the model's logits do not come from a layer of `_LAYERS`, or are narrowed behind
    it."""
    head = _last_layer(model)
    kind: Any = type(head)
    if head is not None and not hasattr(kind, "plain"):
        head.__class__ = float32_head(kind)
    if head is None or _logits(model).dtype != mx.float32:
        raise ModelError(
            "model.fp32_lm_head: the logits of this architecture are not what a linear layer or"
            ' an embedding returns: leave it out, or set model.dtype = "float32"'
        )


def widened_numbers(model: nn.Module) -> int:
    """Numbers of the head's weights that each product widens to float32; 0: they are float32, or
    unpacked a slice at a time, or the head is as the model has it."""
    heads = [layer for layer in model.modules() if hasattr(type(layer), "plain")]
    return sum(
        layer.weight.size
        for layer in heads
        if "scales" not in layer and layer.weight.dtype != mx.float32
    )


def _logits(model: nn.Module) -> mx.array:
    """The logits of one token, lazy."""
    logits: mx.array = model(mx.zeros((1, 1), mx.int32))
    return logits


def _last_layer(model: nn.Module) -> nn.Module | None:
    """The layer that a forward calls last, if it makes the logits."""
    calls: list[tuple[nn.Module, tuple[int, ...]]] = []

    def noted(layer: nn.Module, y: mx.array) -> mx.array:
        calls.append((layer, y.shape))
        return y

    def spying(kind: Any) -> type[Any]:
        if hasattr(kind, "as_linear"):
            method = {"as_linear": lambda layer, x: noted(layer, kind.as_linear(layer, x))}
        else:
            method = {"__call__": lambda layer, x: noted(layer, kind.__call__(layer, x))}
        return type(kind.__name__, (kind,), method)

    layers = [(m, type(m)) for m in model.modules() if isinstance(m, _LAYERS)]
    spies = {kind: spying(kind) for _, kind in layers}
    try:
        for layer, kind in layers:
            layer.__class__ = spies[kind]
        shape = _logits(model).shape
    finally:
        for layer, kind in layers:
            layer.__class__ = kind
    return calls[-1][0] if calls and calls[-1][1] == shape else None
