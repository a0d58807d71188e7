"""Measure what structured output costs a decode step: 32 rows with a grammar against 32 without,
the same engine, in turns.

The bench model's vocabulary of 8,192; every row writes a JSON array that is longer than the run, so
both sides do the same number of steps. Three cases: one schema for all rows, a schema of its own
for each row, half of the rows with one. Wall time is what a client feels (masks are made while the
model computes); CPU time is all the work.

    .venv/bin/python -m scripts.bench.grammar
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from scripts.bench.models import bench_prompts, save_bench_model  # isort: skip  # the fast BLAS comes before MLX

import numpy as np

from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.grammar import Grammars, allowed_tokens
from mlx_parallm.engine.starting import engine_options
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.types import Request, SamplingParams, Structure
from mlx_parallm.weights import SharedWeights

ROWS = 32
PROMPT = 16


def schema(number: int = 0) -> Structure:
    item = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string"},
            "kind": {"enum": ["bolt", "nut", "gear"]},
            "count": {"type": "integer"},
            "parts": {"type": "array", "items": {"type": "number"}},
        },
        "required": [f"name{number}", "kind", "count", "parts"],
        "additionalProperties": False,
    }
    return Structure("json_schema", json.dumps({"type": "array", "items": item, "minItems": 200}))


CASES: dict[str, list[Structure | None]] = {
    "one schema, 32 rows": [schema()] * ROWS,
    "32 schemas": [schema(row) for row in range(ROWS)],
    "one schema, 16 of 32 rows": [schema() if row % 2 else None for row in range(ROWS)],
}
FREE: list[Structure | None] = [None] * ROWS


def make_engine(directory: Path) -> Engine:
    config = ModelConfig(base_path=str(save_bench_model(directory)))
    loaded = load_model(config)
    weights = SharedWeights(loaded.model, keep_versions=1)
    options = replace(
        engine_options(ServerConfig(), loaded, deterministic=False),
        max_model_len=1024,
        max_rows=ROWS,
    )
    lora = prepare_for_serving(loaded.model)
    return Engine(loaded.model, load_tokenizer(loaded.path, config), weights, lora, options)


def step_ms(
    engine: Engine, structures: list[Structure | None], steps: int, prompts: list[list[int]]
) -> np.ndarray:
    """Milliseconds a decode step of wall and of CPU time, without the prefill: [2]."""
    for row, (structure, prompt) in enumerate(zip(structures, prompts, strict=True)):
        params = SamplingParams(max_tokens=steps, min_tokens=steps, seed=row, structure=structure)
        engine.add(Request(f"r{row}", tuple(prompt), params))
    engine.step()
    started, before = np.array([time.perf_counter(), time.process_time()]), engine.counters.steps
    while engine.has_work:
        engine.step()
    spent = np.array([time.perf_counter(), time.process_time()]) - started
    return spent * 1000 / (engine.counters.steps - before)


def compile_ms(engine: Engine) -> tuple[float, float]:
    """Milliseconds for the table of the vocabulary, and for a schema after it."""
    grammars = Grammars(engine._tokenizer, engine.options.vocab_size)
    times = []
    for number in (100, 101):
        started = time.perf_counter()
        grammars.matcher(schema(number), 0, ())
        times.append((time.perf_counter() - started) * 1000)
    return times[0] - times[1], times[1]


def masks_ms(engine: Engine) -> float:
    """Milliseconds for the 32 masks of a step, each row with a schema of its own, and for taking
    the drawn tokens."""
    matchers = [engine.grammars.matcher(schema(row), 0, ()) for row in range(ROWS)]
    draw, times = np.random.default_rng(0), []
    for _ in range(200):
        started = time.perf_counter()
        allowed = allowed_tokens(matchers, engine.options.vocab_size)
        spent = time.perf_counter() - started
        drawn = [int(draw.choice(np.flatnonzero(row))) for row in allowed]
        started = time.perf_counter()
        for matcher, token in zip(matchers, drawn, strict=True):
            matcher.advance(token)
        times.append(spent + time.perf_counter() - started)
    return float(np.median(times)) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    prompts = bench_prompts(ROWS, PROMPT)
    with tempfile.TemporaryDirectory() as directory:
        engine = make_engine(Path(directory))
    table, one = compile_ms(engine)
    print(
        f"table of 8,192 tokens {table:.0f} ms, once; a schema {one:.2f} ms; masks of a step"
        f" {masks_ms(engine):.2f} ms"
    )
    # [free or bound, wall or CPU] each
    rounds: dict[str, list[np.ndarray]] = {name: [] for name in CASES}
    for structures in (FREE, *CASES.values()):
        step_ms(engine, structures, 4, prompts)
    for _ in range(arguments.rounds):
        for name, structures in CASES.items():
            free = step_ms(engine, FREE, arguments.steps, prompts)
            rounds[name].append(
                np.stack([free, step_ms(engine, structures, arguments.steps, prompts)])
            )
    for name, pairs in rounds.items():
        ratios = np.array([bound / free for free, bound in pairs])
        (free, _), (bound, _) = np.median(pairs, axis=0)
        wall, cpu = np.median(ratios, axis=0)
        listed = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios[:, 0]))
        print(
            f"{name}: {free:.1f} ms a step without, {bound:.1f} with; ratio"
            f" {wall:.3f} ({listed}), of CPU {cpu:.3f}"
        )


if __name__ == "__main__":
    main()
