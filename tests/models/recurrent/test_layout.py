"""A group's prompt, computed once by recurrent blocks: what they keep at its end is where each
answer continues, and the gradient flows back through it. Same losses and gradients as with the
prompt in each row."""

import importlib
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map_with_path

from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts.layout import TokenBatch, share_prompts, shareable
from mlx_parallm.models.loading import evaluate_module
from mlx_parallm.models.recurrent.layers import use_chunks
from scripts.generate_model_table import small_config

SHARING = [
    *("qwen3_5", "qwen3_next", "kimi_linear", "jamba", "mamba", "mamba2"),
    *("nemotron_h", "bailing_moe_linear", "lfm2"),
]
OTHERS = {"recurrent_gemma": "RotatingKVCache", "falcon_h1": "CacheList"}


def model_of(name: str, layers: int | None = None) -> nn.Module:
    """`layers`: how many, for an architecture whose sizes lie in `text_config`."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    config = small_config(module, name)
    if layers is not None:
        config["text_config"] = config["text_config"] | {"num_hidden_layers": layers}
    model = module.Model(module.ModelArgs.from_dict(config))
    use_chunks(model)
    # 2-dimensional weights of a usual size, so that no part of the model is next to nothing
    model.update(tree_map_with_path(lambda _, p: 2 * p if p.ndim == 2 else p, model.parameters()))
    evaluate_module(model)
    model.train()
    return model


def batch(prompts: tuple[int, ...], answers: int = 2) -> TokenBatch:
    """Groups of `answers` ragged rows; some tokens behind a first answer are not scored, as
    between two turns."""
    rng = np.random.default_rng(0)
    rows, scored = (
        np.zeros((len(prompts) * answers, 64), np.int32),
        np.zeros((len(prompts) * answers, 64), bool),
    )
    for group, length in enumerate(prompts):
        prompt = rng.integers(0, 40, length)
        for row in range(group * answers, (group + 1) * answers):
            count = int(rng.integers(2, 24))
            rows[row, : length + count] = [*prompt, *rng.integers(0, 40, count)]
            scored[row, length - 1 : length + count - 1] = rng.random(count) < 0.6
            scored[row, [length - 1, length + count - 2]] = True
    positions = np.flatnonzero(scored).astype(np.int32)
    targets = np.roll(rows, -1, axis=1).reshape(-1)[positions]
    compact = share_prompts(rows, positions)
    return TokenBatch(mx.array(rows), mx.array(positions), mx.array(targets), 0.8, compact)


def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
    weights = mx.cos(mx.arange(logprobs.size))
    return (weights * mx.exp(logprobs) + 0.1 * entropy).sum(), ()


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize(
    ("architecture", "layers"), [*((name, None) for name in SHARING), ("qwen3_5", 8)]
)
def test_losses_and_gradients_are_those_of_the_repeated_prompt(
    architecture: str, layers: int | None, blocks: int
) -> None:
    """Eight layers: more of a kind than the comparison at start goes through; the others pass
    their input on. Float32's rounding grows with the depth: 1.3e-6 of the gradient with two
    layers, 8e-6 with four, 1.2e-5 with eight."""
    model = model_of(architecture, layers)
    assert layers is None or len(model.layers) == layers
    parts = BlockwiseModel(model, blocks_per_eval=blocks)
    assert not parts.fallback and not parts.unshared, (parts.fallback, parts.unshared)
    assert "ArraysCache" in parts.unpacked
    tokens = batch((21, 2, 21, 37))
    value, _, gradients = parts.loss_and_gradients(tokens, objective)
    expected, _, repeated = parts.loss_and_gradients(replace(tokens, compact=None), objective)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    whole = sum(mx.square(g).sum().item() for g in repeated) ** 0.5
    off = (
        sum(mx.square(a - b).sum().item() for a, b in zip(gradients, repeated, strict=True)) ** 0.5
    )
    assert whole > 0 and off <= (1e-5 if layers is None else 5e-5) * whole


@pytest.mark.parametrize(("architecture", "kept"), OTHERS.items())
def test_blocks_that_keep_more_are_named(architecture: str, kept: str) -> None:
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(small_config(module, architecture)))
    assert kept in shareable(model)
