"""The value head: V(s) from the hidden state that leaves the last block. PPO has one, and the score
of a reward model (scoring/) is its value at the last token. It hangs in the trainer's tree
as `value_head`: the served policy has none, and neither adapter files nor saved weights have it.

V = mean(weight · h / rms(h)) + bias in float32. The norm takes the place of the model's own final
norm, so that it is the same for every architecture; `weight` can scale what that norm scales.
The mean, where others have a sum, makes an update of AdamW move V by about its learning rate at
most, however wide the model is (arXiv:2203.03466, output layers). Both start at 0, so V = 0 at
first.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.errors import ConfigError
from mlx_parallm.models.layer_stack import LayerStack

VALUE_HEAD = "value_head"
VALUE_HEAD_FILE = "value_head.safetensors"
NORM_EPSILON = 1e-6


class ValueHead(nn.Module):
    """Hidden states [..., D] of any dtype → values [...] float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = mx.zeros((1, hidden_size))
        self.bias = mx.zeros((1,))

    def __call__(self, hidden: mx.array) -> mx.array:
        wide = hidden.astype(mx.float32)
        normed = wide * mx.rsqrt(mx.square(wide).mean(axis=-1, keepdims=True) + NORM_EPSILON)
        return (normed * self.weight[0]).mean(axis=-1) + self.bias[0]


def attach_value_head(model: nn.Module) -> None:
    """Gives the tree a new value head, trainable. Raises ConfigError: the architecture shows no
    hidden state."""
    try:
        # only its shape is asked for
        hidden = LayerStack(model).forward(mx.zeros((1, 2), mx.int32))[1]
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"a value head needs the hidden state of the last block: {error}"
        ) from error
    if not isinstance(hidden, mx.array) or hidden.ndim != 3 or hidden.shape[:2] != (1, 2):
        raise ConfigError(
            "a value head: what leaves the last block of this model is not one vector a token"
        )
    head = ValueHead(hidden.shape[-1])
    mx.eval(head.parameters())
    model[VALUE_HEAD] = head


def value_head_of(model: nn.Module) -> ValueHead | None:
    return model.get(VALUE_HEAD)


def is_value_head(name: str) -> bool:
    """True for the dotted name of one of its parameters in the trainer's tree."""
    return name.startswith(f"{VALUE_HEAD}.")


@contextmanager
def without_value_head(model: nn.Module) -> Iterator[None]:
    """Detach the value head inside the `with` block."""
    head = model.pop(VALUE_HEAD, None)
    try:
        yield
    finally:
        if head is not None:
            model[VALUE_HEAD] = head
