"""`model.fp32_lm_head`: logits in float32 of a model in half precision, in engine and trainer."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.models.adapters.linear import DoRALinear, LoRALinear
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.heads import language_head
from mlx_parallm.models.heads.float32_head import float32_head, widen_head
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.loading import adopt_model, load_model
from mlx_parallm.models.lora import inject_lora, trainer_lora_layers
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.system.device import traits
from tests.engine.helpers import qwen3_model, ragged_prompts, random_adapter, request, run, serve
from tests.rl_training.tiny_models import make_model
from tests.tiny_models import QWEN3, VOCAB_SIZE, lora_config, save_checkpoint

IDS = mx.array([[1, 5, 9, 20, 3, 7]])


def high_logits(*, tied: bool) -> nn.Module:
    """A model of bfloat16 whose head sees large numbers, as MiniMax-M1's does: logits are around
    250 and differ by a few, and a unit in bfloat16's last place is 1 there."""
    model = qwen3_model(tie_word_embeddings=tied)
    model.model.embed_tokens.weight = model.model.embed_tokens.weight + 4.0
    table = model.model.embed_tokens if tied else model.lm_head
    table.weight = 0.3 * (table.weight - table.weight.mean()) / mx.std(table.weight) + 4.0
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def apart(model: nn.Module) -> np.ndarray:
    """log p of the trainer minus that of the engine, of tokens that the engine sampled under a
    random adapter, whose products the two add up in different ways."""
    trained = copy.deepcopy(model)
    served = serve(model)
    adapter = random_adapter(served, 1)
    adapter.pop("lm_head", None)
    served.weights.add_adapter("a", adapter)
    inject_lora(trained, lora_config(rank=4, alpha=4.0))
    for path, layer in trainer_lora_layers(trained).items():
        if path in adapter:
            layer.lora_a, layer.lora_b = adapter[path].a, adapter[path].b
    trainer = BlockwiseModel(trained, blocks_per_eval=1)
    prompts = ragged_prompts(8, shortest=4, longest=30)
    requests = [
        request(f"r{i}", prompt, adapter="a", seed=i, max_tokens=16, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    outputs = run(served.engine, requests)
    differences: list[float] = []
    for i, prompt in enumerate(prompts):
        [completion] = outputs[f"r{i}"].completions
        tokens, count = [*prompt, *completion.token_ids], len(completion.token_ids)
        batch = TokenBatch(
            inputs=mx.array([tokens[:-1]], mx.int32),
            positions=mx.arange(len(prompt) - 1, len(tokens) - 1),
            targets=mx.array(tokens[-count:], mx.int32),
        )
        logprobs = trainer.score(batch)[0]
        differences += list(np.array(logprobs) - np.array(completion.logprobs))
    return np.array(differences)


@pytest.mark.parametrize("tied", [True, False])
def test_engine_and_trainer_are_nearer(tied: bool) -> None:
    model = high_logits(tied=tied)
    wide = copy.deepcopy(model)
    widen_head(wide)
    before, after = apart(model), apart(wide)
    assert before.size == after.size == 128
    assert np.abs(after).mean() < np.abs(before).mean() / 3
    # the first update's ratios, without a correction
    off = [np.abs(np.exp(each) - 1).max() for each in (before, after)]
    assert off[1] < off[0] / 3


LAYERS: list[Callable[[], Any]] = [
    lambda: nn.Linear(64, 70, bias=True),
    lambda: nn.Embedding(70, 64),
    lambda: nn.Linear(64, 70, bias=False).to_quantized(64, 4),
    lambda: nn.Embedding(70, 64).to_quantized(64, 8),
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("make", LAYERS)
def test_values_and_gradients_are_those_by_hand(
    make: Callable[[], Any], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the head is cut for Metal."""
    mx.random.seed(0)
    layer = make()
    layer.set_dtype(mx.bfloat16)
    layer.__class__ = float32_head(type(layer))
    if wide:
        monkeypatch.setattr(traits, "on_cpu", lambda: False)
        monkeypatch.setattr(language_head, "WIDE", 40)
        monkeypatch.setattr(language_head, "VOCABULARY_PIECE", 32)
        assert language_head.cut_wide_heads(layer) == 1
        assert language_head.cut_wide_heads(layer) == 0
    x = mx.random.normal((2, 5, 64)).astype(mx.bfloat16)
    slope = mx.random.normal((2, 5, 70))
    quantised, kept = "scales" in layer, layer.weight

    def logits(x: mx.array, *weight: mx.array) -> list[mx.array]:
        layer.weight = weight[0] if weight else kept
        return [layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)]

    def widened(array: mx.array) -> np.ndarray:
        return np.array(array.astype(mx.float32), np.float64)

    primals = [x] if quantised else [x, kept]
    [y], gradients = mx.vjp(logits, primals, [slope])
    layer.weight = kept
    matrix = widened(kept)
    if quantised:
        parts = [layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)]
        matrix = widened(mx.dequantize(kept, *parts, layer.group_size, layer.bits))
    bias = widened(layer.bias) if "bias" in layer else 0.0
    assert y.dtype == mx.float32
    np.testing.assert_allclose(y, widened(x) @ matrix.T + bias, atol=2e-5)
    rows = np.array(slope, np.float64).reshape(-1, 70)
    by_hand = [(rows @ matrix).reshape(x.shape), rows.T @ widened(x).reshape(-1, 64)]
    for found, wanted, primal in zip(gradients, by_hand, primals, strict=False):
        assert found.dtype == primal.dtype
        np.testing.assert_allclose(widened(found), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("quantize", [False, True])
def test_a_model_of_float32_is_as_it_was(quantize: bool, tmp_path: Path) -> None:
    cache = {"quantized_cache": str(tmp_path)}
    plain, wide = (
        load_model(ModelConfig(dtype="float32", fp32_lm_head=on, **cache), quantize=quantize)
        for on in (False, True)
    )
    assert mx.array_equal(plain.model(IDS), wide.model(IDS)).item()


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "gptj", "gemma3_text"])
def test_no_architecture_is_named(architecture: str) -> None:
    """The head is the layer that makes the logits; the rest of the model stays narrow."""
    model = make_model(architecture)
    model.set_dtype(mx.bfloat16)
    narrow = model(IDS)
    widen_head(model)
    widen_head(model)  # a second time changes nothing
    changed = [type(m).__name__ for m in model.modules() if hasattr(type(m), "plain")]
    assert len(changed) == 1
    wide = model(IDS)
    assert (narrow.dtype, wide.dtype) == (mx.bfloat16, mx.float32)
    np.testing.assert_allclose(wide, narrow.astype(mx.float32), atol=2**-6 * mx.abs(wide).max())


def test_a_head_that_is_no_layer_is_refused() -> None:
    model = make_model("talkie")  # multiplies by an array of its own
    model.set_dtype(mx.bfloat16)
    with pytest.raises(ModelError, match=re.escape("model.fp32_lm_head: the logits")):
        widen_head(model)
    assert not any(hasattr(type(module), "plain") for module in model.modules())


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
def test_an_adapter_of_the_head_is_not_rounded(kind: Any) -> None:
    head = nn.Linear(64, 70, bias=False)
    head.set_dtype(mx.bfloat16)
    head.__class__ = float32_head(nn.Linear)
    layer = kind(head, (64, 70), 4, 2.0)
    layer.lora_b = mx.random.normal((4, 70), key=mx.random.key(1))
    x = mx.random.normal((3, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    y = layer(x)
    wanted = head(x) + 2.0 * (x @ layer.lora_a) @ layer.lora_b
    if kind is DoRALinear:
        wanted = layer.gain() * wanted
    assert y.dtype == mx.float32
    np.testing.assert_allclose(y, wanted, atol=1e-5)


def test_both_ways_of_loading_read_the_setting(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "half", dtype=mx.bfloat16)
    config = ModelConfig(base_path=str(checkpoint), dtype="bfloat16", fp32_lm_head=True)
    loaded = load_model(config).model
    assert loaded(IDS).dtype == mx.float32
    assert (
        load_model(config.model_copy(update={"fp32_lm_head": False})).model(IDS).dtype
        == mx.bfloat16
    )
    adopted = adopt_model(make_model("llama"), fp32_lm_head=True).model
    assert hasattr(type(adopted.lm_head), "plain")


def test_a_plan_has_the_widened_weights() -> None:
    def part(*changes: str) -> int:
        config = load_config(None, ["model.dtype=bfloat16", *changes])
        return PlannedRun.of(config, QWEN3).memory.parts["head in float32"]

    assert part() == part("model.fp32_lm_head=true", "model.dtype=float32") == 0
    # the engine's and the trainer's
    assert part("model.fp32_lm_head=true") == 2 * 4 * VOCAB_SIZE * QWEN3["hidden_size"]


def test_a_rounded_head_is_refused() -> None:
    changes = ["rl_training.lora.qat_bits=4", 'rl_training.sampler_correction="tis"']
    load_config(None, changes)
    with pytest.raises(ConfigError, match=r"model\.fp32_lm_head.*qat_bits"):
        load_config(None, [*changes, "model.fp32_lm_head=true"])
