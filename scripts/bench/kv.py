"""Measure what long and shared texts cost beside short ones: the tables of docs/benchmarks/serving.md#long-and-shared-texts.

    .venv/bin/python -m scripts.bench.kv engine      # step times and bytes of the engine alone, about 3 minutes
    .venv/bin/python -m scripts.bench.kv layouts     # short prompts by tokens and in the rectangle, in turns
    .venv/bin/python -m scripts.bench.kv mixed       # the same as engine with 32 rows of 50 to 8,000 tokens
    .venv/bin/python -m scripts.bench.kv servers     # against mlx_lm.server (setup_peers), about 10 minutes
    .venv/bin/python -m scripts.bench.kv bits        # server.kv_bits: step times and bytes, about 3 minutes
    .venv/bin/python -m scripts.bench.kv distance --model DIRECTORY    # server.kv_bits: KL, any model, 1 to 3 minutes

The 29 M parameter benchmark model with a context of 16,384. `engine`: the median time of a
decode step of one process, all rows running, each case and its base in turns; and the part of it
that Python takes to build the step. `servers`: tokens a second over HTTP, each server in turns,
the same requests and the same BLAS. `distance`: an engine continues a text with quantised keys
and values, at temperature 1; mlx-lm's own forward in full precision scores what it has sampled.
"""

import argparse
import copy
import math
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.models import bench_prompts, save_bench_model  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.config.load import parse_config
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.daemon import Serving
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.live_requests import Finished
from mlx_parallm.engine.starting import engine_options
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.models.ops import use_fast_rope, use_fast_swiglu
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import Request, RequestOutput, SamplingParams
from mlx_parallm.weights import SharedWeights
from scripts.bench import peers
from scripts.bench.load import send

CONTEXT, SHORT, LONG, ROWS = 16384, 51, 3700, 16
STEPS = 24
MIXED = (50, 8000)
BITS = (None, 8, 4)
TEXT = Path("docs/serving.md")
CONTEXTS, ANSWERS, ANSWER = (200, LONG), 16, 64  # tokens; of `distance`


def make_engine(
    directory: str | Path,
    layout: str,
    kv_bits: int | None = None,
    dtype: str = "auto",
    **changes: Any,
) -> Engine:
    config = parse_config({"model": {"base_path": str(directory), "dtype": dtype}}).model
    loaded = load_model(config)
    weights = SharedWeights(loaded.model, keep_versions=1)
    options = replace(
        engine_options(ServerConfig(), loaded, deterministic=False),
        max_rows=64,
        prefix_cache_bytes=0,
        by_tokens=layout == "auto",
    )
    options = replace(options, kv_bits=kv_bits, **changes)
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
    return [
        round(math.exp(generator.uniform(math.log(shortest), math.log(longest))))
        for _ in range(count)
    ]


def time_builds(engine: Engine) -> list[float]:
    """Return the seconds that building each further step takes, a list that grows."""
    building: list[float] = []
    runner: Any = engine._runner
    launch = runner.launch

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return launch(*arguments)
        finally:
            building.append(time.perf_counter() - started)

    runner.launch = timed
    return building


def measure(engine: Engine, case: str, turn: int) -> dict[str, float]:
    """Milliseconds of a step and of building it, and megabytes held while all rows run."""
    items = requests(case, turn)
    for item in items:
        engine.add(item)
    rows = sum(item.params.n for item in items)
    while len(engine.scheduler.rows) < rows:
        engine.step()
    for _ in range(3):
        engine.step()
    building = time_builds(engine)
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    held = sum(s.cached for s in engine.scheduler.rows)
    numbers = {
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
    return numbers


def mixed_table(directory: Path, rounds: int, console: Console, layout: str) -> None:
    engine = make_engine(directory, layout)
    for turn in range(rounds):
        result = measure(engine, "mixed", turn)
        console.print(
            "32 rows of 50 to 8,000 tokens:"
            f" { ({key: round(value, 2) for key, value in result.items()}) }"
        )


def layout_table(directory: Path, rounds: int, console: Console, _: str) -> None:
    """Steps of 8 and of 32 short rows, rectangle ÷ by tokens: wall and processor time, the one
    first and the other."""
    engines = {layout: make_engine(directory, layout) for layout in ("rectangle", "auto")}
    for rows in (8, 32):
        for engine in engines.values():
            begin_short_rows(engine, rows, STEPS * 2 * (rounds + 1) + 20)
        for order in (list(engines), list(engines)[::-1]):
            spent = [
                {layout: step_times(engines[layout]) for layout in order} for _ in range(rounds + 1)
            ][1:]
            wall, processor = (
                statistics.median(times["rectangle"][kind] / times["auto"][kind] for times in spent)
                for kind in (0, 1)
            )
            console.print(
                f"{rows} rows, {order[0]} first: rectangle ÷ by tokens {wall:.3f}, processor"
                f" {processor:.3f}"
            )
        for engine in engines.values():
            for i in range(rows):
                engine.abort(f"r{i}")
            while engine.has_work:
                engine.step()
            engine.release_memory()


def begin_short_rows(engine: Engine, rows: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    for i, prompt in enumerate(bench_prompts(rows, SHORT, rows)):
        engine.add(Request(f"r{i}", tuple(prompt), params))
    while len(engine.scheduler.rows) < rows:
        engine.step()


def step_times(engine: Engine) -> tuple[float, float]:
    """Median wall and processor time of STEPS steps."""
    times = []
    for _ in range(STEPS):
        started, begun = time.perf_counter(), time.process_time()
        engine.step()
        times.append((time.perf_counter() - started, time.process_time() - begun))
    wall, processor = zip(*times, strict=True)
    return statistics.median(wall), statistics.median(processor)


def engine_table(directory: Path, rounds: int, console: Console, layout: str) -> None:
    engine = make_engine(directory, layout)
    cases = ("short", "short beside long", "group, short", "group, long", "one, long")
    results: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case in cases:
            result = measure(engine, case, turn)
            if turn:
                results[case].append(result)
                console.print(
                    f"{turn} {case}: { ({key: round(value, 2) for key, value in result.items()}) }"
                )
    table = Table(
        "case",
        "step, ms",
        "of it Python",
        "MB held",
        "MB of the tokens as if alone",
        title="medians",
    )
    for case in cases:
        row = [
            statistics.median(r[key] for r in results[case])
            for key in ("step", "python", "MB", "MB of tokens")
        ]
        table.add_row(case, *(f"{value:.2f}" for value in row))
    console.print(table)

    def ratio(a: str, b: str, key: str) -> str:
        return f"{statistics.median(x[key] / y[key] for x, y in zip(results[a], results[b], strict=True)):.2f}"

    if engine.cache.nbytes:
        raise SystemExit("the cache was not given back")
    console.print(
        "16 short streams, without ÷ beside one of 3,700:",
        ratio("short", "short beside long", "step"),
    )
    console.print(
        "group of 16, step of a long prompt ÷ of a short one:",
        ratio("group, long", "group, short", "step"),
    )
    console.print("bytes of that group ÷ of one answer:", ratio("group, long", "one, long", "MB"))


def bits_table(directory: Path, rounds: int, console: Console) -> None:
    """Each case with each number of bits in turns."""
    engines = {bits: make_engine(directory, "auto", bits) for bits in BITS}
    console.print("medians, float32: case | bits | a step ÷ full | bytes ÷ full | ms a step")
    for case in ("short", "one, long", "group, long"):
        results: dict[int | None, list[dict[str, float]]] = {bits: [] for bits in BITS}
        for turn in range(rounds + 1):
            for bits, engine in engines.items():
                result = measure(engine, case, turn)
                results[bits] += [result] if turn else []
        for bits in BITS:
            step, held = (
                statistics.median(
                    x[key] / full[key] for x, full in zip(results[bits], results[None], strict=True)
                )
                for key in ("step", "MB")
            )
            milliseconds = statistics.median(result["step"] for result in results[bits])
            console.print(
                f"{case} | {bits or 'full'} | {step:.2f} | {held:.2f} | {milliseconds:.1f}"
            )


def distance_table(model: str, dtype: str, console: Console) -> None:
    config = parse_config({"model": {"base_path": model}}).model
    loaded = load_model(config)
    text = load_tokenizer(loaded.path, config).encode(TEXT.read_text(), add_special_tokens=False)
    engines = {bits: make_engine(model, "auto", bits, dtype) for bits in BITS}
    console.print(
        "nats a token: context | bits | tokens | mean log p | KL(sampler ||"
        " full) | mean |Δ| | largest |Δ|"
    )
    for context in CONTEXTS:
        prompt = text[: min(context, loaded.max_model_len - ANSWER)]
        begun = make_prompt_cache(loaded.model)
        for start in range(0, len(prompt) - 1, 512):
            mx.eval(
                loaded.model(
                    mx.array([prompt[start : min(start + 512, len(prompt) - 1)]]), cache=begun
                )
            )
        for bits, engine in engines.items():
            params = SamplingParams(
                max_tokens=ANSWER, n=ANSWERS, temperature=1.0, ignore_eos=True, seed=0
            )
            engine.add(Request("text", tuple(prompt), params))
            answers = finished(engine).completions
            sampled = np.array([answer.logprobs for answer in answers])
            scored = np.stack(
                [
                    full_logprobs(loaded.model, begun, prompt[-1], answer.token_ids)
                    for answer in answers
                ]
            )
            difference, far = scored - sampled, np.abs(scored - sampled)
            kl = np.mean(np.expm1(difference) - difference)  # k3
            numbers = f"{sampled.mean():.2f} | {kl:.1e} | {far.mean():.1e} | {far.max():.1e}"
            console.print(f"{len(prompt)} | {bits or 'full'} | {sampled.size} | {numbers}")


def finished(engine: Engine) -> RequestOutput:
    """The output of its one request."""
    outputs = []
    while engine.has_work:
        outputs += [event.output for event in engine.step() if isinstance(event, Finished)]
    [output] = outputs
    return output


def full_logprobs(model: Any, begun: list[Any], last: int, answer: Sequence[int]) -> np.ndarray:
    """Log-probabilities [tokens] by mlx-lm's own forward after `begun`, the prompt without its
    last token."""
    logits = model(mx.array([[last, *answer[:-1]]]), cache=copy.deepcopy(begun))[0]
    return np.array(token_logprobs(logits, mx.array(answer, dtype=mx.int32)), np.float64)


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
        serving.open(
            loaded, SharedWeights(loaded.model, keep_versions=1), adapters={}, main_adapter=None
        )
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
        [{"prompt": text_of(n, f"{turn} {i}"), "max_tokens": 64, "temperature": 1.0}]
        for i, n in enumerate(lengths)
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
                    report = send(
                        url,
                        [[body | {"model": model} for body in client] for client in bodies(turn)],
                    )
                    rates.append(report.rate)
                    console.print(
                        f"{turn} {name}: {report.rate:.1f} tok/s, {len(report.failures)} failed"
                    )
                if turn:
                    ratios.append(rates[0] / rates[1])
            console.print(
                f"{name}: ours ÷ mlx_lm.server, median {statistics.median(ratios):.2f} of {ratios}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "table", choices=("engine", "layouts", "mixed", "servers", "bits", "distance")
    )
    parser.add_argument(
        "--model", default="builtin:tiny", help="of `distance`: what model.base_path takes"
    )
    parser.add_argument(
        "--dtype", default="auto", help="of `distance`: the sampler's; auto is float32 on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--layout", choices=("auto", "rectangle"), default="auto", help="server.kv_layout"
    )
    arguments = parser.parse_args()
    configure_logging(level="error")
    console = Console(width=120)
    if arguments.table == "distance":
        return distance_table(arguments.model, arguments.dtype, console)
    with tempfile.TemporaryDirectory() as directory:
        path = save_bench_model(
            Path(directory) / "model", endless=True, max_position_embeddings=CONTEXT
        )
        if arguments.table == "bits":
            return bits_table(path, arguments.rounds, console)
        tables = {
            "engine": engine_table,
            "layouts": layout_table,
            "mixed": mixed_table,
            "servers": server_table,
        }
        tables[arguments.table](path, arguments.rounds, console, arguments.layout)


if __name__ == "__main__":
    main()
