"""The head in pieces against the naive one, and shared prompts against plain rows: memory, time,
gradient.

    python scripts/bench/head.py             1,024 tokens × 32,768 vocabulary; a group of 8 with a prompt of 200 tokens
    python scripts/bench/head.py --small     the same, quickly

Memory is `mx.get_peak_memory` above what was active before; the whole gradient is compared,
relative in its norm. The naive head is MLX's own value_and_grad of log-softmax over all logits.
Times are the median of five, alternating.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3
from rich.console import Console
from rich.table import Table

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
from mlx_parallm.models.layouts.layout import share_prompts
from mlx_parallm.models.lora import inject_lora
from mlx_parallm.models.ops import use_unpacking

assert mlx_parallm.__version__
ROUNDS = 5
console = Console(width=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    heads(*((128, 8192) if small else (1024, 32768)))
    prompts(*((50, 4, 16) if small else (200, 8, 64)))
    products(*((256, 512) if small else (1024, 3072)))


def heads(tokens: int, vocabulary: int) -> None:
    """One thin block, so that what is measured is the head."""
    model = make_model(hidden=256, layers=1, vocabulary=vocabulary)
    parts = BlockwiseModel(model, blocks_per_eval=1)
    rng = np.random.default_rng(0)
    inputs = mx.array(rng.integers(0, vocabulary, (8, tokens // 8)), mx.int32)
    targets = mx.array(rng.integers(0, vocabulary, tokens), mx.int32)
    batch = TokenBatch(inputs, mx.arange(tokens, dtype=mx.int32), targets)
    weights = mx.random.normal((tokens,))
    mx.eval(inputs, targets, batch.positions, weights)

    def objective(logprobs: mx.array, entropy: mx.array) -> Any:
        return (weights * logprobs + 0.01 * entropy).mean(), ()

    def naive() -> list[mx.array]:
        def loss(model: nn.Module) -> mx.array:
            logits = model(inputs).reshape(tokens, vocabulary)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            chosen = mx.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
            return objective(chosen, -(mx.exp(logprobs) * logprobs).sum(axis=-1))[0]

        gradients = dict(nn.utils.tree_flatten(nn.value_and_grad(model, loss)(model)[1]))
        arrays = [gradients[name] for name in parts.slots.names]
        mx.eval(arrays)
        return arrays

    def pieces() -> list[mx.array]:
        return parts.loss_and_gradients(batch, objective)[2]

    compare(
        f"head: {tokens:,} tokens × {vocabulary:,} vocabulary",
        {"naive": naive, "in pieces": pieces},
    )


def prompts(prompt: int, group: int, completion: int) -> None:
    parts = BlockwiseModel(make_model(hidden=512, layers=8, vocabulary=8192), blocks_per_eval=1)
    rng = np.random.default_rng(0)
    width = prompt + completion - 1
    inputs = np.tile(rng.integers(0, 8192, width).astype(np.int32), (group, 1))
    inputs[:, prompt:] = rng.integers(0, 8192, (group, completion - 1))
    scored = np.zeros(inputs.shape, bool)
    scored[:, prompt - 1 :] = True
    positions = np.flatnonzero(scored).astype(np.int32)
    targets = mx.array(rng.integers(0, 8192, len(positions)), mx.int32)
    shared = share_prompts(inputs, positions)
    batch = TokenBatch(mx.array(inputs), mx.array(positions), targets, compact=shared)
    weights = mx.random.normal((len(positions),))

    def step(tokens: TokenBatch) -> Callable[[], list[mx.array]]:
        return lambda: parts.loss_and_gradients(
            tokens, lambda lp, entropy: ((weights * lp).mean(), ())
        )[2]

    title = (
        f"prompt {prompt}, group {group}, completion {completion}: {inputs.size:,} tokens or"
        f" {shared.tokens:,}"
    )
    compare(title, {"rows": step(replace(batch, compact=None)), "prompt once": step(batch)})


def products(width: int, outputs: int) -> None:
    """4-bit weights: MLX's product against unpacking, by rows."""
    theirs = nn.QuantizedLinear(width, outputs, bias=False)
    ours = nn.QuantizedLinear(width, outputs, bias=False)
    ours.update(theirs.parameters())
    use_unpacking(nn.Sequential(ours))
    table = Table(title=f"4-bit product, {width} → {outputs}: forward and gradient, ms")
    for column in ("rows", "MLX's", "unpacked", "times as fast"):
        table.add_column(column, justify="right")
    for rows in (1, 2, 4, 8, 16, 32, 128, 512):
        x = mx.random.normal((rows, width))
        mx.eval(x)

        def run(layer: Callable[[mx.array], mx.array], x: mx.array = x) -> None:
            mx.eval(mx.grad(lambda v: layer(v).sum())(x))

        a, b = timed({"theirs": lambda: run(theirs), "ours": lambda: run(ours)}).values()
        table.add_row(str(rows), f"{1000 * a:.2f}", f"{1000 * b:.2f}", f"{a / b:.2f}")
    console.print(table)


def make_model(hidden: int, layers: int, vocabulary: int) -> nn.Module:
    mx.random.seed(0)
    config = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        rms_norm_eps=1e-6,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    model = qwen3.Model(config)
    inject_lora(model, LoraConfig(rank=16, alpha=32.0))
    for name, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = 0.02 * mx.random.normal(
                module.lora_b.shape, key=mx.random.key(len(name))
            )
    model.train()
    mx.eval(model.parameters())
    return model


def compare(title: str, ways: dict[str, Callable[[], list[mx.array]]]) -> None:
    gradients, peaks = {}, {}
    for name, way in ways.items():
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradients[name] = way()
        peaks[name] = mx.get_peak_memory() - before
    seconds = timed(ways)
    (first, expected), *_ = gradients.items()
    table = Table(title=title)
    for column in (
        "",
        "peak extra MB",
        "of the first",
        "gradient's distance",
        "seconds",
        "times as fast",
    ):
        table.add_column(column, justify="right")
    for name, arrays in gradients.items():
        off = sum(mx.square(a - b).sum().item() for a, b in zip(arrays, expected, strict=True))
        size = sum(mx.square(b).sum().item() for b in expected)
        table.add_row(
            name,
            f"{peaks[name] / 1e6:.1f}",
            f"1/{peaks[first] / peaks[name]:.1f}",
            f"{(off / size) ** 0.5:.1e}",
            f"{seconds[name]:.3f}",
            f"{seconds[first] / seconds[name]:.2f}",
        )
    console.print(table)


def timed(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median seconds of each way. The ways take turns, and the first round is not
    counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


if __name__ == "__main__":
    main()
