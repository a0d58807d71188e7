"""The one door to operations whose fastest way depends on the device.

Who calls them need not know the device. On a CPU they go to `models/cpu/`, if a trial or the
sizes show that its way is the faster one; everywhere else they are MLX's own. Attention has its
door in `attention.py`, sums over many numbers in `sums.py`.

    exp_minus, exp2_minus, row_maxima   over logits and attention's scores
    fused, as_data                      many operations in one loop, for one call
    fused_on_gpu                        a few operations on numbers, one for a GPU to start
    constant                            a number that such operations take, made once
    use_fast_swiglu, use_fast_rope      layers of a model, changed in place
    use_few_rows, few_rows_here         float32 products of few rows, for the whole process
    use_unpacking, unpacks              quantised layers, changed in place
    product_of_unpacked                 a product with quantised keys or values
    UNPACKED, UNPACKED_EXPERTS          how many weights are unpacked at a time, for a memory plan
"""

from collections.abc import Callable
from functools import lru_cache
from typing import cast

import mlx.core as mx

from mlx_parallm.models.cpu.few_rows import few_rows_here as few_rows_here
from mlx_parallm.models.cpu.few_rows import use_few_rows as use_few_rows
from mlx_parallm.models.cpu.kernels import as_data as as_data
from mlx_parallm.models.cpu.kernels import exp2_minus as exp2_minus
from mlx_parallm.models.cpu.kernels import exp_minus as exp_minus
from mlx_parallm.models.cpu.kernels import fused as fused
from mlx_parallm.models.cpu.kernels import row_maxima as row_maxima
from mlx_parallm.models.cpu.layers import plain_rope as plain_rope
from mlx_parallm.models.cpu.layers import use_fast_rope as use_fast_rope
from mlx_parallm.models.cpu.layers import use_fast_swiglu as use_fast_swiglu
from mlx_parallm.models.cpu.unpacking import UNPACKED as UNPACKED
from mlx_parallm.models.cpu.unpacking import UNPACKED_EXPERTS as UNPACKED_EXPERTS
from mlx_parallm.models.cpu.unpacking import product_of_unpacked as product_of_unpacked
from mlx_parallm.models.cpu.unpacking import unpacks as unpacks
from mlx_parallm.models.cpu.unpacking import use_unpacking as use_unpacking
from mlx_parallm.system.device.traits import on_cpu


def fused_on_gpu(
    function: Callable[..., mx.array], *, any_shape: bool = True
) -> Callable[..., mx.array]:
    """Make what a function of arrays does number by number one operation on a GPU, where a small
    one costs what its start costs. For a CPU it stays as it is: there a compiler would be asked.

    The function lives as long as the process, since MLX keeps what it has compiled. `any_shape`:
    compiled once; otherwise once for each shape, of which there may be some hundred.
    """
    compiled = mx.compile(function, shapeless=any_shape)

    def called(*arrays: mx.array) -> mx.array:
        return cast("mx.array", (function if on_cpu() else compiled)(*arrays))

    return called


@lru_cache(maxsize=64)
def constant(value: float, dtype: mx.Dtype) -> mx.array:
    """Return the number as an evaluated array [] that is made once."""
    number = mx.array(value, dtype)
    mx.eval(number)
    return number
