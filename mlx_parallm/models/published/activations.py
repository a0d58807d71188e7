"""Activations that config.json names (`hidden_act`), in classes of mlx-lm that know one alone."""

import functools
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import SwitchGLU, SwitchMLP
from mlx_parallm.models.published.classes import named_as, once

KEYS = ("hidden_act", "hidden_activation", "activation_function")
Activation = Callable[[mx.array], mx.array]


def _quick_gelu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(1.702 * x)


def _gelu_tanh(x: mx.array) -> mx.array:
    """The approximation by tanh, as torch has it (MLX's own is the same up to rounding)."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu2(x: mx.array) -> mx.array:
    return mx.square(mx.maximum(x, 0))


ACTIVATIONS: dict[str, Activation] = {
    "silu": nn.silu,
    "swish": nn.silu,
    "gelu": nn.gelu,
    "gelu_python": nn.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": nn.relu,
    "relu2": _relu2,
    "relu6": nn.relu6,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "mish": nn.mish,
    "linear": lambda x: x,
    "leaky_relu": nn.leaky_relu,
}
"""transformers' names (`ACT2FN`) → functions."""


def same(a: str, b: str) -> bool:
    """Whether two names are one activation."""
    return a == b or (a in ACTIVATIONS and b in ACTIVATIONS and ACTIVATIONS[a] is ACTIVATIONS[b])


def _gated(mlp: Any, x: mx.array) -> mx.array:
    return mlp.down_proj(mlp.act(mlp.gate_proj(x)) * mlp.up_proj(x))


def _fused(mlp: Any, x: mx.array) -> mx.array:
    gate, up = mx.split(mlp.gate_up_proj(x), 2, axis=-1)
    return mlp.down_proj(mlp.act(gate) * up)


def _plain(first: str, second: str) -> Callable[[Any, mx.array], mx.array]:
    def forward(mlp: Any, x: mx.array) -> mx.array:
        return mlp[second](mlp.act(mlp[first](x)))

    return forward


_FORMS: dict[frozenset[str], Callable[[Any, mx.array], mx.array]] = {
    frozenset({"gate_proj", "up_proj", "down_proj"}): _gated,
    frozenset({"gate_up_proj", "down_proj"}): _fused,
    frozenset({"up_proj", "down_proj"}): _plain("up_proj", "down_proj"),
    frozenset({"c_fc", "c_proj"}): _plain("c_fc", "c_proj"),
    frozenset({"fc1", "fc2"}): _plain("fc1", "fc2"),
    frozenset({"fc_in", "fc_out"}): _plain("fc_in", "fc_out"),
    frozenset({"dense_h_to_4h", "dense_4h_to_h"}): _plain("dense_h_to_4h", "dense_4h_to_h"),
}
"""The linear layers of a feed-forward part → its forward."""


class _Gate:
    """Takes SwitchGLU's activation: `activation(up, gate)`."""

    def __init__(self, act: Activation) -> None:
        self.act = act

    def __call__(self, up: mx.array, gate: mx.array) -> mx.array:
        return self.act(gate) * up


def use_activation(text: nn.Module, name: str) -> None:
    """Let the feed-forward parts of a model use an activation, in place.

    Raises ModelError: it is not known, or the model's parts are of another form.
    """
    act = ACTIVATIONS.get(name)
    if act is None:
        raise ModelError(
            f"hidden_act = {name!r} is not supported; known are {', '.join(sorted(ACTIVATIONS))}"
        )
    count = 0
    for module in text.modules():
        if isinstance(module, SwitchGLU):
            module.activation = _Gate(act)
        elif isinstance(module, SwitchMLP):
            module.activation = act
        elif forward := _FORMS.get(_linears(module)):
            module.__class__ = _with_activation(type(module), forward)
            module.act = act
        else:
            continue
        count += 1
    if not count:
        raise ModelError(f"hidden_act = {name!r} is not supported by this architecture's class")


def _linears(module: nn.Module) -> frozenset[str]:
    if type(module).__name__.startswith("Switch"):
        return frozenset()
    return frozenset(
        name for name, child in module.children().items() if isinstance(child, nn.Linear)
    )


@once
def _with_activation(kind: Any, forward: Callable[[Any, mx.array], mx.array]) -> type[Any]:
    class Activated(kind):
        @functools.wraps(kind.__call__)
        def __call__(self, x: mx.array) -> mx.array:
            return forward(self, x)

    return named_as(Activated, kind)
