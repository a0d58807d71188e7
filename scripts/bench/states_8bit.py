"""Optimizer states in 8 bits against float32: 2,000 steps of a small problem, bytes, time and
memory of an update.

    .venv/bin/python -m scripts.bench.states_8bit steps    # some seconds
    .venv/bin/python -m scripts.bench.states_8bit updates  # some seconds

Whole runs are the studies `states_8bit` and `states_8bit_rows`. Tables: docs/benchmarks/learning.md#optimizer-states.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.rl_training.step.optimizer import PolicyOptimizer

assert mlx_parallm.__version__

KINDS = ("adamw", "adamw_8bit", "lion", "lion_8bit")


class Slots:
    """`ParameterSlots` without a model."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.names = tuple(f"model.layers.{i}.weight" for i in range(len(shapes)))
        self.arrays = [0.02 * mx.random.normal(shape) for shape in shapes]
        mx.eval(self.arrays)

    def read(self, indices: Sequence[int] | None = None) -> list[mx.array]:
        return list(self.arrays)

    def write(self, arrays: Sequence[mx.array]) -> None:
        self.arrays = list(arrays)


def optimizer(slots: Slots, kind: str, **values: Any) -> PolicyOptimizer:
    keys = {"optimizer": kind, **values}
    options = RLTrainingConfig.model_validate(keys)
    return PolicyOptimizer(slots, options)  # type: ignore[arg-type]


def steps(seeds: int) -> None:
    """Classification by a network of two layers, 64 → 256 → 16, noisy labels, batches of 64."""
    print("| seed | " + " | ".join(KINDS) + " |\n|---|" + "---|" * len(KINDS))
    for seed in range(seeds):
        losses = {kind: network_loss(kind, seed) for kind in KINDS}
        print(f"| {seed} | " + " | ".join(f"{losses[kind]:.4f}" for kind in KINDS) + " |")


def network_loss(kind: str, seed: int) -> float:
    """Of 4,096 other examples, after 2,000 steps."""
    mx.random.seed(seed)
    teacher = mx.random.normal((64, 16))
    scales = 10.0 ** mx.random.uniform(-1, 0, (64,))

    def batch(count: int) -> tuple[mx.array, mx.array]:
        x = mx.random.normal((count, 64)) * scales
        return x, mx.random.categorical(2.0 * mx.tanh(x @ teacher))

    def loss(first: mx.array, second: mx.array, x: mx.array, y: mx.array) -> mx.array:
        logits = mx.tanh(x @ first) @ second
        chosen = mx.take_along_axis(logits, y[:, None], axis=1)[:, 0]
        return (mx.logsumexp(logits, axis=1) - chosen).mean()

    slots = Slots([(64, 256), (256, 16)])
    slots.arrays = [a * 5 for a in slots.arrays]
    made = optimizer(slots, kind)
    slope = mx.grad(loss, argnums=(0, 1))
    peak = 3e-4 if kind.startswith("lion") else 3e-3
    for step in range(2000):
        made.update(list(slope(*slots.arrays, *batch(64))), peak * (1 - step / 2000))
    mx.random.seed(seed + 1000)
    return float(loss(*slots.arrays, *batch(4096)).item())  # type: ignore[arg-type]


def updates() -> None:
    shapes = {
        "67 M numbers, matrices": [(4096, 2048)] * 4 + [(32768, 1024)],
        "8 M numbers, 500 arrays of an adapter": [(1024, 16)] * 500,
    }
    print("| arrays | optimizer | state, bytes a number | peak of an update | ns a number |")
    print("|---|---|---|---|---|")
    for name, each in shapes.items():
        for kind in KINDS:
            slots = Slots(each)
            count = sum(array.size for array in slots.arrays)
            gradients = [mx.random.normal(shape) for shape in each]
            made = optimizer(slots, kind)
            mx.eval(gradients)
            made.update(gradients, 1e-4)  # compiles
            mx.reset_peak_memory()
            held, seconds = mx.get_active_memory(), []
            for _ in range(3):
                started = time.perf_counter()
                made.update(gradients, 1e-4)
                seconds.append(time.perf_counter() - started)
            state = sum(a.nbytes for n, a in made.state().items() if n != "step") / count
            above = (mx.get_peak_memory() - held) / count
            nanoseconds = 1e9 * min(seconds) / count
            print(f"| {name} | `{kind}` | {state:.2f} | {above:.1f} | {nanoseconds:.0f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("part", choices=("steps", "updates"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.part == "steps":
        steps(options.seeds)
    else:
        updates()
