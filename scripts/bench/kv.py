"""What long and shared texts cost beside short ones: the tables of docs/benchmarks/kv.md.

    .venv/bin/python -m scripts.bench.kv engine      # step times and bytes of the engine alone, about 3 minutes
    .venv/bin/python -m scripts.bench.kv mixed       # the same with 32 rows of 50 to 8,000 tokens
    .venv/bin/python -m scripts.bench.kv servers     # against mlx_lm.server (setup_peers), about 10 minutes

The 29 M parameter benchmark model with a context of 16,384. `engine`: the median time of a decode step of one process,
all rows running, each case and its base in turns; and what of it Python takes to build the step. `servers`: tokens a
second over HTTP, each server in turns, the same requests and the same BLAS.
"""

import argparse
import math
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.models import bench_prompts, save_bench_model  # the fast BLAS comes before MLX

# isort: split
from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.daemon import Serving
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.starting import engine_options
from mlx_parallm.models.cpu_kernels import use_fast_rope, use_fast_swiglu
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import Request, SamplingParams
from mlx_parallm.weights import SharedWeights
from scripts.bench import peers
from scripts.bench.load import send

CONTEXT, SHORT, LONG, ROWS = 16384, 51, 3700, 16
STEPS = 24
MIXED = (50, 8000)


def make_engine(directory: Path, layout: str) -> Engine:
    config = parse_config({"model": {"base_path": str(directory)}}).model
    loaded = load_model(config)
    weights = SharedWeights(loaded.model, keep_versions=1)
    options = replace(engine_options(Config(), loaded), max_rows=64, prefix_cache_bytes=0, by_tokens=layout == "auto")
    use_fast_swiglu(loaded.model)
    use_fast_rope(loaded.model)
    lora = prepare_for_serving(loaded.model)
    return Engine(loaded.model, load_tokenizer(loaded.path, config), weights, lora, options)


def requests(case: str, turn: int) -> list[Request]:
    params = SamplingParams(max_tokens=STEPS + 200, temperature=1.0, ignore_eos=True, seed=turn)
    prompts = bench_prompts(ROWS, SHORT, turn)
    [long] = bench_prompts(1, LONG, turn)
    if case.startswith("group"):
        prompt = long if case == "group, long" else prompts[0]
        return [Request("group", tuple(prompt), replace(params, n=ROWS))]
    if case == "one, long":
        return [Request("one", tuple(long), params)]
    if case == "mixed":
        lengths = mixed_lengths(2 * ROWS, turn)
        texts = bench_prompts(2 * ROWS, max(lengths), turn)
        prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    elif case == "short beside long":
        prompts = [*prompts, long]
    return [Request(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)]


def mixed_lengths(count: int, turn: int) -> list[int]:
    generator, (shortest, longest) = random.Random(turn), MIXED
    return [round(math.exp(generator.uniform(math.log(shortest), math.log(longest)))) for _ in range(count)]


def measure(engine: Engine, case: str, turn: int) -> dict[str, float]:
    """Milliseconds of a step and of building it, and megabytes held while all rows run."""
    building: list[float] = []
    launch = engine._runner.launch

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return launch(*arguments)
        finally:
            building.append(time.perf_counter() - started)

    items = requests(case, turn)
    for item in items:
        engine.add(item)
    rows = sum(item.params.n for item in items)
    while len(engine.scheduler.rows) < rows:
        engine.step()
    for _ in range(3):
        engine.step()
    engine._runner.launch = timed  # type: ignore[method-assign]  # a stopwatch around it
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    held = sum(s.cached for s in engine.scheduler.rows)
    found = {
        "step": 1000 * statistics.median(times),
        "python": 1000 * statistics.median(building),
        "MB": engine.cache.nbytes / 1e6,
        "MB of tokens": held * engine.cache.token_bytes() / 1e6,
    }
    del engine._runner.launch
    for item in items:
        engine.abort(item.request_id)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    engine.release_memory()
    return found


def mixed_table(directory: Path, rounds: int, console: Console, layout: str) -> None:
    engine = make_engine(directory, layout)
    for turn in range(rounds):
        result = measure(engine, "mixed", turn)
        console.print(f"32 rows of 50 to 8,000 tokens: { ({key: round(value, 2) for key, value in result.items()}) }")


def engine_table(directory: Path, rounds: int, console: Console, layout: str) -> None:
    engine = make_engine(directory, layout)
    cases = ("short", "short beside long", "group, short", "group, long", "one, long")
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case in cases:
            result = measure(engine, case, turn)
            if turn:
                found[case].append(result)
                console.print(f"{turn} {case}: { ({key: round(value, 2) for key, value in result.items()}) }")
    table = Table("case", "step, ms", "of it Python", "MB held", "MB of the tokens as if alone", title="medians")
    for case in cases:
        row = [statistics.median(r[key] for r in found[case]) for key in ("step", "python", "MB", "MB of tokens")]
        table.add_row(case, *(f"{value:.2f}" for value in row))
    console.print(table)

    def ratio(a: str, b: str, key: str) -> str:
        return f"{statistics.median(x[key] / y[key] for x, y in zip(found[a], found[b], strict=True)):.2f}"

    if engine.cache.nbytes:
        raise SystemExit("the cache was not given back")
    console.print("16 short streams, without ÷ beside one of 3,700:", ratio("short", "short beside long", "step"))
    console.print("group of 16, step of a long prompt ÷ of a short one:", ratio("group, long", "group, short", "step"))
    console.print("bytes of that group ÷ of one answer:", ratio("group, long", "one, long", "MB"))


@contextmanager
def our_server(directory: Path, layout: str) -> Iterator[str]:
    tree = {
        "server": {"port": 0, "batch_size": 64, "kv_layout": layout},
        "model": {"base_path": str(directory)},
    }
    serving = Serving(parse_config(tree))
    try:
        serving.listen()
        loaded = serving.load()
        serving.open(loaded, SharedWeights(loaded.model, keep_versions=1), adapters={}, main_adapter=None)
        yield serving.url
    finally:
        serving.close()


def text_of(length: int, seed: str) -> str:
    """One letter is one token."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=length))


def group_bodies(turn: int) -> list[list[dict[str, Any]]]:
    body = {"prompt": text_of(LONG, f"group {turn}"), "max_tokens": 64, "temperature": 1.0}
    return [[body] for _ in range(ROWS)]


def mixed_bodies(turn: int) -> list[list[dict[str, Any]]]:
    lengths = mixed_lengths(2 * ROWS, turn)
    return [
        [{"prompt": text_of(n, f"{turn} {i}"), "max_tokens": 64, "temperature": 1.0}] for i, n in enumerate(lengths)
    ]


def server_table(directory: Path, rounds: int, console: Console, layout: str) -> None:
    cases: dict[str, Callable[[int], list[list[dict[str, Any]]]]] = {
        "group of 16, 3,700-token prompt": group_bodies,
        "32 clients, 50 to 8,000 tokens": mixed_bodies,
    }
    with our_server(directory, layout) as ours, peers.mlx_lm_server(directory, "mkl") as theirs:
        for name, bodies in cases.items():
            ratios = []
            for turn in range(rounds + 1):
                rates = []
                for url, model in ((ours, "default"), (theirs, str(directory))):
                    report = send(url, [[body | {"model": model} for body in client] for client in bodies(turn)])
                    rates.append(report.rate)
                    console.print(f"{turn} {name}: {report.rate:.1f} tok/s, {len(report.failures)} failed")
                if turn:
                    ratios.append(rates[0] / rates[1])
            console.print(f"{name}: ours ÷ mlx_lm.server, median {statistics.median(ratios):.2f} of {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("engine", "mixed", "servers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", choices=("auto", "rectangle"), default="auto", help="server.kv_layout")
    arguments = parser.parse_args()
    configure_logging(level="error")
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as directory:
        path = save_bench_model(Path(directory) / "model", endless=True, max_position_embeddings=CONTEXT)
        tables = {"engine": engine_table, "mixed": mixed_table, "servers": server_table}
        tables[arguments.table](path, arguments.rounds, console, arguments.layout)


if __name__ == "__main__":
    main()
