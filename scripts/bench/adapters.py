"""Measure what adapters cost a decode step: the step without any, divided by the step with them, in
alternating rounds.

The benchmarks' 29 M model, all linear layers adapted, mlx-lm's cache, 32 rows. "served" is what the
server does (models/adapters/served.py); beside it the ways that were not taken: a product of the
whole batch per adapter, and all adapters side by side with a mask.

    .venv/bin/python scripts/bench/adapters.py --rank 8 --rank 16
"""

import argparse
import statistics
import time
from collections.abc import Callable

from scripts.bench.models import bench_model, bench_prompts  # isort: skip  # the fast BLAS comes before MLX

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.models.adapters.adapter import AdapterSlot, AdapterWeights, LoraPair
from mlx_parallm.models.lora import linear_shapes, prepare_for_serving

ROWS = 32
STEPS = 10
ADAPTERS = 8


class Twin(nn.Module):
    """A layer that adds what `Twin.forward` makes of its adapters."""

    forward: Callable[["Twin", mx.array, mx.array], mx.array] | None = None
    masks: list[mx.array]
    columns: mx.array

    def __init__(self, linear: nn.Module, pairs: list[LoraPair]) -> None:
        super().__init__()
        self.linear = linear
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "a", mx.concatenate([pair.a for pair in pairs], axis=1))
        object.__setattr__(self, "b", mx.concatenate([pair.b * pair.scale for pair in pairs]))
        mx.eval(self.a, self.b)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        return y if Twin.forward is None else Twin.forward(self, x, y)


def loop(layer: Twin, x: mx.array, y: mx.array) -> mx.array:
    for pair, rows in zip(layer.pairs, Twin.masks, strict=True):
        y = mx.where(rows, mx.addmm(y, x @ pair.a, pair.b, alpha=pair.scale), y)
    return y


def side_by_side(layer: Twin, x: mx.array, y: mx.array) -> mx.array:
    return mx.addmm(y, mx.where(Twin.columns, x @ layer.a, 0.0), layer.b)


def made_adapters(shapes: dict[str, tuple[int, int]], rank: int) -> list[AdapterSlot]:
    slots = []
    for index in range(ADAPTERS):
        layers = {
            path: LoraPair(
                0.02 * mx.random.normal((inputs, rank)),
                0.02 * mx.random.normal((rank, outputs)),
                2.0,
            )
            for path, (inputs, outputs) in shapes.items()
        }
        weights = AdapterWeights(str(index), 0, layers)
        mx.eval(weights.arrays)
        slots.append(AdapterSlot(str(index), weights))
    return slots


def step_ms(model: nn.Module, prompts: mx.array, activate: Callable[[], None]) -> float:
    """One decode step's time; the prefill and the first step are not in it."""
    cache = make_prompt_cache(model)
    tokens = prompts[:, :1]
    activate()
    mx.eval(model(prompts, cache=cache)[:, -1])
    activate()
    mx.eval(model(tokens, cache=cache))
    started = time.perf_counter()
    for _ in range(STEPS):
        activate()
        mx.eval(model(tokens, cache=cache))
    return 1e3 * (time.perf_counter() - started) / STEPS


def measure(rank: int, rounds: int) -> None:
    served, twins = bench_model(), bench_model()
    shapes = linear_shapes(served)
    slots = made_adapters(shapes, rank)
    context = prepare_for_serving(served)
    layers = {path: [slot.weights.layers[path] for slot in slots] for path in shapes}
    modules = dict(twins.named_modules())
    twins.update_modules(
        tree_unflatten([(path, Twin(modules[path], pairs)) for path, pairs in layers.items()])
    )
    mixed = [slots[row % ADAPTERS] for row in range(ROWS)]
    owners = mx.array([row % ADAPTERS for row in range(ROWS)])
    Twin.masks = [(owners == index)[:, None, None] for index in range(ADAPTERS)]
    Twin.columns = (owners[:, None] == mx.repeat(mx.arange(ADAPTERS), rank)[None])[:, None]
    prompts = mx.array(bench_prompts(ROWS, 16))

    def serve(rows: list[AdapterSlot | None]) -> Callable[[], float]:
        return lambda: step_ms(served, prompts, lambda: context.activate(rows))

    def twin(forward: Callable[[Twin, mx.array, mx.array], mx.array]) -> Callable[[], float]:
        def run() -> float:
            Twin.forward = staticmethod(forward)
            return step_ms(twins, prompts, lambda: None)

        return run

    cases = {
        "no adapter": serve([None] * ROWS),
        "1 adapter, all rows": serve([slots[0]] * ROWS),
        "1 adapter, half of the rows": serve([slots[0], None] * (ROWS // 2)),
        f"{ADAPTERS} adapters mixed (served)": serve(list(mixed)),
        f"{ADAPTERS} adapters, a product each": twin(loop),
        f"{ADAPTERS} adapters, side by side": twin(side_by_side),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, run in cases.items():
            if turn:  # the first warms up
                times[name].append(run())
            else:
                run()
    print(f"rank {rank}, {ROWS} rows, {rounds} rounds")
    for name, milliseconds in times.items():
        ratio = statistics.median(
            base / each for base, each in zip(times["no adapter"], milliseconds, strict=True)
        )
        print(
            f"  {name:32} {statistics.median(milliseconds):7.1f} ms   ratio {ratio:.2f}   best"
            f" {min(milliseconds):.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rank", type=int, action="append", help="may be given several times (8, 16)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for rank in arguments.rank or [8, 16]:
        measure(rank, arguments.rounds)


if __name__ == "__main__":
    main()
