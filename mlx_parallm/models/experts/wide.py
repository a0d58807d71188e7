"""Stacked experts on a CPU, where MLX multiplies them in float32 only (`gather_mm`): in a model of
bfloat16 or float16 they are held in float32, and read and return the model's dtype."""

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.mlx_lm_api import SwitchLinear
from mlx_parallm.system.device.traits import widens_experts


class WideSwitchLinear(SwitchLinear):
    """Weights of float32; x [..., in] in any dtype → [..., out] in x's."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        product: mx.array = super().__call__(x.astype(mx.float32), indices, sorted_indices)
        return product.astype(x.dtype)


def widen_experts(model: nn.Module) -> None:
    """Put `WideSwitchLinear` in the place of narrower stacks, on a CPU. Lazy."""
    if not widens_experts():
        return
    for module in model.modules():
        if type(module) is SwitchLinear and module.weight.dtype != mx.float32:
            module.set_dtype(mx.float32)
            module.__class__ = WideSwitchLinear
