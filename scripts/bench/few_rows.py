"""Products of few rows by our kernel and by the BLAS, in turns: docs/benchmarks/serving.md#products-of-few-rows.

    .venv/bin/python -m scripts.bench.few_rows --model build/smollm2/float32    # about 2 minutes

`products`: all float32 matrices of the model, once through, for each number of rows. `steps`: decode
steps of the engine, every second one without the kernel. The least of each, which other programs
disturb least, and the medians. Both have the same threads.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table

from scripts.bench.kv import begin_short_rows, make_engine  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.models.cpu import few_rows

ROWS = (1, 2, 4, 8, 16, 32, 64)
STEP_ROWS = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=15, help="of each product (15)")
    parser.add_argument("--steps", type=int, default=60, help="of each kind, for each batch (60)")
    args = parser.parse_args()
    console = Console(width=110)
    engine = make_engine(args.model, "auto", dtype="float32")
    chosen = few_rows.use_few_rows(engine._runner.forward.model)
    console.print(f"products of few rows: {chosen.words()}")
    if not chosen.gains:
        raise SystemExit("nothing to compare")
    model, kernel = engine._runner.forward.model, few_rows.load()
    table = Table("", "BLAS, ms", "kernel, ms", "ratio", "medians, ms", "ratio", "processor's")
    for rows in ROWS:
        work = partial(multiply_all, model, rows)
        table.add_row(f"products, {rows} rows", *in_turns(kernel, work, args.rounds))
    for rows in STEP_ROWS:
        begin_short_rows(engine, rows, 3 * args.steps)
        table.add_row(f"a step, {rows} rows", *in_turns(kernel, engine.step, args.steps))
        for i in range(rows):
            engine.abort(f"r{i}")
        engine.release_memory()
    console.print(table)


def in_turns(kernel: few_rows.Kernel, work: Callable[[], object], rounds: int) -> list[str]:
    """Cells of a row; the first two rounds do not count."""
    walls: dict[int, list[float]] = {0: [], max(ROWS): []}
    processor: dict[int, list[float]] = {0: [], max(ROWS): []}
    for turn in range(rounds + 2):
        for rows in walls:
            kernel.replace_blas(rows)
            started, begun = time.perf_counter(), time.process_time()
            work()
            if turn >= 2:
                walls[rows].append(1e3 * (time.perf_counter() - started))
                processor[rows].append(1e3 * (time.process_time() - begun))
    (blas, ours), (middle, our_middle), (burnt, our_burnt) = (
        [statistic(times) for times in taken.values()]
        for statistic, taken in (
            (min, walls),
            (statistics.median, walls),
            (statistics.median, processor),
        )
    )
    return [
        f"{blas:.1f}",
        f"{ours:.1f}",
        f"{blas / ours:.2f}",
        f"{middle:.1f}, {our_middle:.1f}",
        f"{middle / our_middle:.2f}",
        f"{burnt:.1f}, {our_burnt:.1f}",
    ]


def multiply_all(model: nn.Module, rows: int) -> None:
    """Multiply random rows with each matrix of the model, as its layers do."""
    weights = [
        array
        for _, array in tree_flatten(model.parameters())
        if array.ndim == 2 and array.dtype == mx.float32
    ]
    x = {width: mx.random.normal((rows, width)) for width in {w.shape[1] for w in weights}}
    mx.eval(*x.values())
    mx.eval([x[weight.shape[1]] @ weight.T for weight in weights])


if __name__ == "__main__":
    main()
