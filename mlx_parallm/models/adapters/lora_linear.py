"""LoRA around one linear layer, in the trainer's tree (Hu et al. 2021, arXiv:2106.09685).

Not mlx-lm's class: importing that imports its trainer and every tracker that is installed: half a second of a start.
"""

import math

import mlx.core as mx
import mlx.nn as nn


class LoRALinear(nn.Module):
    """y = Wx + bias + (s · xA) B. A [in, r] ~ U(±1/√in) and B [r, out] = 0 are float32."""

    def __init__(self, linear: nn.Module, shape: tuple[int, int], rank: int, scale: float) -> None:
        """`shape` (in, out) of `linear`. Uses this thread's MLX random state."""
        super().__init__()
        self.linear = linear
        self.scale = scale
        mx.random.uniform()  # mlx-lm's draws a layer first that it throws away: a seed gives the adapter it gave there
        bound = 1 / math.sqrt(shape[0])
        self.lora_a = mx.random.uniform(-bound, bound, (shape[0], rank))
        self.lora_b = mx.zeros((rank, shape[1]))

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + ((self.scale * (x @ self.lora_a)) @ self.lora_b).astype(x.dtype)
