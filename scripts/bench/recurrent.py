"""Recurrent layers in chunks (models/recurrent/chunks.py) against mlx-lm's loops over tokens, in
turns in one process.

    .venv/bin/python -m scripts.bench.recurrent layers   # forward and gradient of one layer: time and memory
    .venv/bin/python -m scripts.bench.recurrent steps    # a training step of tiny models against a qwen3 of their size
    .venv/bin/python -m scripts.bench.recurrent group    # 16 answers on one prompt: computed once, and in each row
    .venv/bin/python -m scripts.bench.recurrent prefilled    # tokens computed by turns, a group, 64 requests
    .venv/bin/python -m scripts.bench.recurrent mixed    # 16 short rows beside one of 3,700 tokens, and without it

Prints the tables of docs/benchmarks/training.md#recurrent-layers. An idle machine, please: times are the least of
several.
"""

# isort: off
import mlx_parallm  # noqa: F401  before MLX: it puts the fast BLAS under it
# isort: on

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_ops
from rich.console import Console

from mlx_parallm.engine.engine import Engine
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts.layout import TokenBatch, share_prompts
from mlx_parallm.models.loading import evaluate_module
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.models.ops import fused
from mlx_parallm.models.recurrent.chunks import gated_delta, selective_scan
from mlx_parallm.models.recurrent.layers import use_chunks
from mlx_parallm.types import Request, SamplingParams
from mlx_parallm.weights import SharedWeights
from scripts.generate_model_table import parameter_count, small_config

RECURRENT = (
    *(
        "qwen3_5",
        "qwen3_next",
        "kimi_linear",
        "jamba",
        "lfm2",
        "nemotron_h",
        "granitemoehybrid",
        "falcon_h1",
    ),
    *("mamba", "mamba2"),
)
ANSWER = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
ROWS, HEADS, WIDTH, CHANNELS, STATES = 4, 8, 64, 256, 16
TOKENS = 1024
LONG = 3700  # tokens of the long row beside short ones
LARGER: dict[str, dict[str, Any]] = {  # of the small sizes of scripts/model_table_sizes.json
    "qwen3": {},
    "qwen3_5": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "num_experts": 0,
    }
    | {"linear_value_head_dim": 64, "full_attention_interval": 4},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 0,
    },
    "jamba": {
        "layers_block_type": ["mamba", "mamba", "mamba", "attention"] * 2,
        "num_experts": 1,
        "mamba_d_state": 16,
    },
    "mamba": {"state_size": 16, "intermediate_size": 512, "time_step_rank": 16},
}
SMALL = {"vocab_size": 1024, "max_position_embeddings": 4096}
SHARED = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 768,
    "head_dim": 64,
    "vocab_size": 1024,
}


def measured(function: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The least seconds, and the peak of memory in MB beside what was there."""
    times, peak = [], 0.0
    for _ in range(rounds):
        mx.clear_cache()
        mx.reset_peak_memory()
        before, started = mx.get_active_memory(), time.perf_counter()
        mx.eval(function())
        times.append(time.perf_counter() - started)
        peak = (mx.get_peak_memory() - before) / 1e6
    return min(times), peak


def layers(console: Console, rounds: int) -> None:
    for name, tokens in [
        (n, t) for n in ("a gate a head", "a gate a channel", "Mamba 1") for t in (512, 2048)
    ]:
        chunked, loop, arrays = (
            selective(tokens) if name == "Mamba 1" else delta(tokens, channels="channel" in name)
        )
        ways = [
            mx.value_and_grad(
                lambda *a, f=function: f(*a)[0].square().sum(), argnums=tuple(range(len(arrays)))
            )
            for function in (loop, chunked)
        ]
        ways.append(fused(ways[1], arrays[0].size))  # as the trainer computes a block's gradient
        mx.eval(ways[2](*arrays))  # compiles
        slow, much = measured(partial(ways[0], *arrays), rounds)
        for how, way in (("chunks", ways[1]), ("chunks, compiled", ways[2])):
            fast, little = measured(partial(way, *arrays), rounds)
            console.print(
                f"{name}, {tokens} tokens: loop {slow:.3f} s, {much:.0f} MB; {how} {fast:.3f} s,"
                f" {little:.0f} MB;"
                f" {slow / fast:.1f} times as fast, {little / much:.2f} of the memory"
            )


def delta(
    tokens: int, *, channels: bool
) -> tuple[Callable[..., Any], Callable[..., Any], list[mx.array]]:
    shape = (ROWS, tokens, HEADS, WIDTH)
    q, k, v = (mx.random.normal(shape) for _ in range(3))
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = mx.exp(-mx.random.uniform(0, 0.5, shape if channels else shape[:3]))
    arrays = [q, k, v, decay, mx.sigmoid(mx.random.normal(shape[:3]))]
    mx.eval(arrays)
    by_token = getattr(gated_delta_ops, "by_token", gated_delta_ops)
    return gated_delta, by_token, arrays


def selective(tokens: int) -> tuple[Callable[..., Any], Callable[..., Any], list[mx.array]]:
    rows, states = (ROWS, tokens, CHANNELS), (ROWS, tokens, STATES)
    a = -mx.repeat(mx.arange(1.0, STATES + 1.0)[None], CHANNELS, axis=0)
    arrays = [mx.random.normal(rows), mx.random.uniform(0.001, 0.1, rows), a]
    arrays += [mx.random.normal(states), mx.random.normal(states)]
    mx.eval(arrays)

    def by_token(
        x: mx.array, delta: mx.array, a: mx.array, b: mx.array, c: mx.array
    ) -> tuple[mx.array, mx.array]:
        outputs, state = [], mx.zeros((ROWS, CHANNELS, STATES))
        for t in range(tokens):  # as mlx-lm's MambaBlock
            new = mx.expand_dims(delta[:, t] * x[:, t], -1) * mx.expand_dims(b[:, t], 1)
            state = new + state * mx.exp(mx.expand_dims(delta[:, t], -1) * a)
            outputs.append((state @ mx.expand_dims(c[:, t], -1)).squeeze(2))
        return mx.stack(outputs, axis=1), state

    return selective_scan, by_token, arrays


def model_of(name: str) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = small_config(module, name) | (SHARED | LARGER[name] if name in LARGER else SMALL)
    if "text_config" in config:
        config["text_config"] |= SHARED | LARGER[name]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    evaluate_module(model)
    use_chunks(model)
    return model.train()


def steps(console: Console, rounds: int) -> None:
    """Forward and gradient of all weights over 4 × 1,024 tokens; seconds a parameter, beside a
    qwen3's: eagerly at once, and as the trainer does it, block by block in compiled loops."""
    numbers = np.random.default_rng(0).integers(0, 1000, (ROWS, TOKENS)).astype(np.int32)
    tokens = mx.array(numbers)
    scored = np.zeros(numbers.shape, bool)
    scored[:, :-1] = True
    positions = np.flatnonzero(scored).astype(np.int32)
    targets = mx.array(np.roll(numbers, -1, axis=1).reshape(-1)[positions])
    batch = TokenBatch(tokens, mx.array(positions), targets, entropy_slope=False)

    def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
        return -logprobs.mean() + 0 * entropy.mean(), ()

    def loss(model: nn.Module) -> mx.array:
        logits = model(tokens[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens[:, 1:]).mean()

    base: dict[str, float] = {}
    for name in LARGER:
        model = model_of(name)
        function = nn.value_and_grad(model, loss)
        parts = BlockwiseModel(model_of(name), blocks_per_eval=1)
        million = parameter_count(model) / 1e6
        ways: dict[str, Callable[[], Any]] = {
            "eager": partial(function, model),
            "trainer": partial(parts.loss_and_gradients, batch, objective, fuse=True),
        }
        for way, work in ways.items():
            seconds, peak = measured(work, rounds)
            base.setdefault(way, seconds / million)
            console.print(
                f"{name}, {way}: {million:.1f} M parameters, {seconds:.2f} s, {peak:.0f} MB;"
                f" {seconds / million / base[way]:.2f} times a qwen3 of its size"
            )


def group(console: Console, rounds: int) -> None:
    """Forward and gradient of all weights, 16 answers of 64 tokens on a prompt of 512."""
    prompt, answer, answers = 512, 64, 16
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1000, (answers, prompt + answer)).astype(np.int32)
    rows[:, :prompt] = rows[0, :prompt]
    scored = np.zeros(rows.shape, bool)
    scored[:, prompt - 1 : -1] = True
    positions = np.flatnonzero(scored).astype(np.int32)
    targets = mx.array(np.roll(rows, -1, axis=1).reshape(-1)[positions])
    repeated = TokenBatch(mx.array(rows), mx.array(positions), targets)
    once = replace(repeated, compact=share_prompts(rows, positions))

    def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
        return -logprobs.mean() + 0 * entropy.mean(), ()

    for name in ("qwen3", "qwen3_5"):
        parts = BlockwiseModel(model_of(name), blocks_per_eval=1)
        if not parts.shares_prompts:
            raise SystemExit(f"{name}: {parts.unshared}")
        (slow, much), (fast, little) = (
            measured(lambda b=b, p=parts: p.loss_and_gradients(b, objective)[2], rounds)
            for b in (repeated, once)
        )
        console.print(
            f"{name}: the prompt in each row {slow:.2f} s, {much:.0f} MB; once {fast:.2f} s,"
            f" {little:.0f} MB;"
            f" {slow / fast:.1f} times as fast, {little / much:.2f} of the memory"
        )


def prefilled(console: Console, rounds: int) -> None:
    """Tokens that are computed of prompts: by each turn of an episode, by a group of 16, and by
    64 requests that begin with one instruction of 500 tokens. Beside it how many tokens are new,
    each once."""
    del rounds
    rng = np.random.default_rng(0)
    for name in ("qwen3", *RECURRENT):
        text, turns, new = rng.integers(0, 1000, 600).tolist(), [], []
        engine = make_engine(model_of(name).eval())
        for turn in range(8):
            count, [answer] = computed(engine, [Request(f"t{turn}", tuple(text), ANSWER)])
            turns.append(count)
            new.append(600 if turn == 0 else 4)  # the answer's last token and the three of the turn
            text = [*text, *answer, 1, 2, 3]
        prompt = tuple(rng.integers(0, 1000, 500).tolist())
        group, _ = computed(engine, [Request("group", prompt, replace(ANSWER, n=16))])
        instruction = rng.integers(0, 1000, 500).tolist()
        questions = [rng.integers(0, 1000, 8 + i % 5).tolist() for i in range(64)]
        requests = [
            Request(f"q{i}", (*instruction, *question), ANSWER)
            for i, question in enumerate(questions)
        ]
        many, _ = computed(make_engine(model_of(name).eval()), requests)
        once = 500 + sum(map(len, questions))
        console.print(
            f"{name}: turn 1 … 8 {turns}, new {new}; a group of 16 on 500 tokens {group};"
            f" 64 requests on one instruction of 500 {many:,}, each token once {once:,},"
            f" in each row {500 * 63 + once:,}"
        )


def computed(engine: Engine, requests: list[Request]) -> tuple[int, list[tuple[int, ...]]]:
    """Tokens of these prompts that were computed, and the first answer to each."""
    before, answers = engine.counters.prefill_tokens, {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            if (output := getattr(event, "output", None)) is not None:
                answers[event.request_id] = output.completions[0].token_ids
    return engine.counters.prefill_tokens - before, [
        answers[request.request_id] for request in requests
    ]


def mixed(console: Console, rounds: int) -> None:
    """Decode steps of 16 short rows, with one of 3,700 tokens beside them and without, in turns,
    by tokens and in the rectangle. Speed is tokens a second of the 16; the memory that the cache
    holds is the most of the steps."""
    for by_tokens in (True, False):
        engines = {
            beside: make_engine(model_of("qwen3_5").eval(), by_tokens=by_tokens, prefill_chunk=4096)
            for beside in (False, True)
        }
        speeds: dict[bool, list[float]] = {False: [], True: []}
        held = {False: 0, True: 0}
        for turn in range(max(rounds, 3)):
            for beside, engine in engines.items():
                speed, room = decode(engine, turn, beside=beside)
                speeds[beside].append(speed)
                held[beside] = max(held[beside], room)
        ratios = [
            with_it / alone for with_it, alone in zip(speeds[True], speeds[False], strict=True)
        ]
        console.print(
            f"{engines[True].cache.layout}: 16 short rows {statistics.median(speeds[False]):.0f}"
            f" tokens/s, {held[False] / 1e6:.1f} MB; beside one of {LONG:,}"
            f" {statistics.median(speeds[True]):.0f} tokens/s, {held[True] / 1e6:.1f} MB; with ÷"
            f" without {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def decode(engine: Engine, turn: int, *, beside: bool) -> tuple[float, int]:
    """Tokens a second of the short rows in 40 steps in which every row decodes, and the bytes
    that the cache holds."""
    greedy, steps = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True), 40
    lengths = [20 + i for i in range(16)] + [LONG] * beside
    for i, length in enumerate(lengths):
        engine.add(
            Request(
                f"m{turn}.{i}", tuple((7 * turn + 13 * i + j) % 1000 for j in range(length)), greedy
            )
        )
    while len(engine.scheduler.rows) < len(lengths):
        engine.step()
    for _ in range(3):
        engine.step()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds, room = time.perf_counter() - started, engine.cache.nbytes
    assert len(engine.scheduler.rows) == len(lengths), "a row ended while it was measured"
    while engine.has_work:
        engine.step()
    return steps * 16 / seconds, room


def make_engine(model: nn.Module, *, by_tokens: bool = True, prefill_chunk: int = 512) -> Engine:
    from tests.engine.helpers import ByteTokenizer, engine_options

    weights = SharedWeights(model, policy=None, keep_versions=1)
    options = engine_options(
        vocab_size=SHARED["vocab_size"],
        max_model_len=4096,
        prefill_chunk=prefill_chunk,
        by_tokens=by_tokens,
    )
    return Engine(model, ByteTokenizer(), weights, prepare_for_serving(model), options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Recurrent layers in chunks against loops over tokens."
    )
    sections = {
        "layers": layers,
        "steps": steps,
        "group": group,
        "prefilled": prefilled,
        "mixed": mixed,
    }
    parser.add_argument("what", choices=list(sections))
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    sections[arguments.what](Console(), arguments.rounds)


if __name__ == "__main__":
    main()
