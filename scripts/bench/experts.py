"""Measure what 4-bit experts cost on this CPU, and what unpacking their weights brings
(docs/models.md).

    .venv/bin/python -m scripts.bench.experts [--tokens 512] [--experts 32] [--chosen 4] [--hidden 512] [--inner 256]

One mixture of mlx-lm's (`SwitchGLU`), a forward and a backward pass by its input, milliseconds, the
best of three:

    4 bits         MLX's `gather_qmm`
    float32        the same weights in float32: `gather_mm`
    unpacked       4 bits as they are trained: all experts' weights unpacked for each product, then
                   `gather_mm`
    grouped        float32 weights, tokens of one expert in one product: what a loop over experts
                   could reach; it has to know how many tokens each expert has before it can build
                   the graph
    dense          a dense layer of the same products, 4 bits unpacked (`models/cpu_kernels.py`)
"""

import argparse
import copy
import time
from collections.abc import Callable

from scripts.bench.models import VOCAB  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU
from rich.console import Console
from rich.table import Table

from mlx_parallm.models.cpu_kernels import use_unpacking

assert VOCAB
REPEATS = 3


class Grouped(nn.Module):
    """`SwitchGLU` as one dense product for each expert; `indices` are known numbers."""

    def __init__(self, switch: SwitchGLU, indices: mx.array) -> None:
        super().__init__()
        self.switch = switch
        flat = np.array(indices).reshape(-1)
        self._rows = [
            np.flatnonzero(flat == expert) for expert in range(switch.up_proj.num_experts)
        ]
        self._back = mx.array(np.argsort(np.concatenate(self._rows)))

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        switch, parts = self.switch, []
        for expert, rows in enumerate(self._rows):
            if len(rows):
                expert_rows = x[mx.array(rows // indices.shape[-1])]
                up, gate = (
                    expert_rows @ switch.up_proj.weight[expert].T,
                    expert_rows @ switch.gate_proj.weight[expert].T,
                )
                parts.append(switch.activation(up, gate) @ switch.down_proj.weight[expert].T)
        return mx.concatenate(parts)[self._back].reshape(*indices.shape, -1)


class Dense(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate = (
            nn.Linear(hidden, inner, bias=False),
            nn.Linear(hidden, inner, bias=False),
        )
        self.down = nn.Linear(inner, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(nn.silu(self.gate(x)) * self.up(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    for name, value in (
        ("tokens", 512),
        ("experts", 32),
        ("chosen", 4),
        ("hidden", 512),
        ("inner", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    mx.random.seed(0)
    whole = SwitchGLU(args.hidden, args.inner, args.experts)
    indices = mx.argsort(mx.random.uniform(shape=(args.tokens, args.experts)), axis=-1)[
        :, : args.chosen
    ]
    packed = copy.deepcopy(whole)
    nn.quantize(packed, group_size=64, bits=4)
    unpacked = copy.deepcopy(packed)
    use_unpacking(unpacked)
    dense = Dense(args.hidden, args.inner * args.chosen)
    nn.quantize(dense, group_size=64, bits=4)
    use_unpacking(dense)
    x = mx.random.normal((args.tokens, args.hidden))
    mx.eval(x, indices, whole.parameters(), packed.parameters(), dense.parameters())
    grouped = Grouped(whole, indices)
    ways: dict[str, Callable[[mx.array], mx.array]] = {
        "4 bits": lambda x: packed(x, indices),
        "float32": lambda x: whole(x, indices),
        "unpacked": lambda x: unpacked(x, indices),
        "grouped": lambda x: grouped(x, indices),
        "dense": dense,
    }
    np.testing.assert_allclose(ways["grouped"](x), ways["float32"](x), atol=1e-4)
    np.testing.assert_allclose(ways["unpacked"](x), ways["4 bits"](x), atol=1e-4)
    shape = (
        f"{args.tokens} tokens, {args.chosen} of {args.experts} experts, {args.hidden} ×"
        f" {args.inner}"
    )
    table = Table("", "forward", "backward", "4 bits / this", title=shape)
    first = 0.0
    for name, way in ways.items():
        forward = best(lambda way=way: way(x))
        both = best(lambda way=way: mx.vjp(way, [x], [mx.ones_like(way(x))])[1])
        first = first or both
        table.add_row(name, f"{forward:.1f} ms", f"{both:.1f} ms", f"{first / both:.2f}")
    Console().print(table)


def best(work: Callable[[], object]) -> float:
    """Milliseconds."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        mx.eval(work())
        seconds.append(time.perf_counter() - started)
    return 1e3 * min(seconds)


if __name__ == "__main__":
    main()
