"""What Python takes to build a decode step, beside mlx-lm's own forward of as many rows.

    .venv/bin/python -m scripts.bench.step_build [--model DIRECTORY] [--rows 1 8 32]

Both build the graph of one step and evaluate it outside of the stopwatch: ours with sampling and
log-probabilities, mlx-lm's the forward alone, over its BatchKVCache. In a round each is built once,
in turns; the least of all rounds is what Python itself takes, since nothing makes it faster.
"""

import argparse
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from scripts.bench.kv import make_engine, time_builds  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache

from mlx_parallm.config.load import parse_config
from mlx_parallm.engine.engine import Engine
from mlx_parallm.models.loading import load_model
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import Request, SamplingParams

STEPS, FIRST, LONGER = 100, 12, 5  # steps; tokens of the first prompt, and more of each further one


def running(model: str, rows: int) -> tuple[Engine, list[float]]:
    """Return an engine whose rows decode, and what building each of its steps takes."""
    engine = make_engine(model, "auto", async_scheduling=False)
    building = time_builds(engine)
    params = SamplingParams(max_tokens=STEPS + 40, ignore_eos=True, temperature=1.0)
    for row in range(rows):
        prompt = tuple(3 + (7 * row + place) % 50 for place in range(FIRST + LONGER * row))
        engine.add(Request(f"r{row}", prompt, params))
    while len(engine.scheduler.rows) < rows:
        engine.step()
    return engine, building


def own_forward(model: str, rows: int) -> Callable[[], float]:
    """Return a function that builds mlx-lm's forward once: seconds."""
    config = parse_config({"model": {"base_path": model}}).model
    tree = load_model(config).model
    cache = [BatchKVCache([(LONGER * i) % 16 for i in range(rows)]) for _ in tree.layers]
    mx.eval(tree(mx.ones((rows, 16), mx.int32), cache=cache))
    token = mx.ones((rows, 1), mx.int32)

    def built() -> float:
        started = time.perf_counter()
        logits = tree(token, cache=cache)
        spent = time.perf_counter() - started
        mx.eval(logits, [each.state for each in cache])
        return spent

    return built


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:tiny", help="what model.base_path takes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    configure_logging(level="error")
    table = Table("rows", "ours, least ms", "mlx-lm's forward, least ms", "ratio")
    for rows in arguments.rows:
        engine, ours = running(arguments.model, rows)
        built = own_forward(arguments.model, rows)
        theirs = []
        del ours[:]
        for _ in range(STEPS):
            engine.step()
            theirs.append(built())
        least, beside = 1000 * min(ours), 1000 * min(theirs)
        table.add_row(str(rows), f"{least:.2f}", f"{beside:.2f}", f"{least / beside:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
