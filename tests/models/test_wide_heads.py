"""Heads over vocabularies as wide as Gemma's: gradients in pieces of the vocabulary."""

import re
from collections.abc import Callable
from io import StringIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.heads import language_head as head
from mlx_parallm.system.device import traits
from tests.rl_training.step.test_blockwise import batch, objective, with_full_weights, with_lora
from tests.rl_training.tiny_models import make_model

VOCABULARY = 70


@pytest.fixture(autouse=True)
def pieces_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "on_cpu", lambda: False)
    monkeypatch.setattr(head, "WIDE", 40)
    monkeypatch.setattr(head, "VOCABULARY_PIECE", 32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(64, VOCABULARY, bias=True),
        lambda: nn.Embedding(VOCABULARY, 64),
        lambda: nn.Linear(64, VOCABULARY, bias=False).to_quantized(64, 4),
        lambda: nn.Embedding(VOCABULARY, 64).to_quantized(64, 8),
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_values_and_gradients_are_the_same(make: Callable[[], nn.Module], dtype: mx.Dtype) -> None:
    mx.random.seed(0)
    layer = make()
    layer.set_dtype(dtype)
    quantised = "scales" in layer
    x = mx.random.normal((2, 5, 64)).astype(dtype)
    slope = mx.random.normal((2, 5, VOCABULARY)).astype(dtype)

    def gradients() -> list[mx.array]:
        def logits(x: mx.array, weight: mx.array) -> list[mx.array]:
            if not quantised:
                layer.weight = weight
            y = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
            return [y]

        weight = layer.weight
        if quantised:
            out, found = mx.vjp(lambda x: logits(x, weight), [x], [slope])
        else:
            out, found = mx.vjp(logits, [x, weight], [slope])
            layer.weight = weight
        return [*out, *found]

    wanted = gradients()
    assert head.cut_wide_heads(layer) == 1 and head.cut_wide_heads(layer) == 0
    for a, b in zip(gradients(), wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        near = 1e-6 if dtype == mx.float32 else 2e-2
        a, b = (np.array(each.astype(mx.float32)) for each in (a, b))
        np.testing.assert_allclose(a, b, atol=near * np.abs(b).max())


def test_no_product_adds_up_the_whole_vocabulary() -> None:
    layer = nn.Embedding(VOCABULARY, 64)
    head.cut_wide_heads(layer)
    slope = mx.ones((5, VOCABULARY))
    _, (by_input,) = mx.vjp(lambda x: [layer.as_linear(x)], [mx.ones((5, 64))], [slope])
    graph = StringIO()
    mx.export_to_dot(graph, by_input)
    products = len(re.findall(r'label ="(?:Matmul|AddMM)"', graph.getvalue()))
    assert products == 3, "pieces of 32, 32 and 6 tokens"


def test_narrow_heads_and_a_cpu_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert head.cut_wide_heads(nn.Embedding(39, 8)) == 0
    monkeypatch.setattr(traits, "on_cpu", lambda: True)
    assert head.cut_wide_heads(nn.Embedding(VOCABULARY, 8)) == 0


@pytest.mark.parametrize("prepare", [with_lora, with_full_weights])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_models_gradients_are_the_same(
    architecture: str, prepare: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tied weights, which have gradients from both ends, and with its own head."""
    monkeypatch.setattr(head, "WIDE", 41)
    model = prepare(make_model(architecture))
    _, _, wanted = BlockwiseModel(model, blocks_per_eval=1).loss_and_gradients(batch(), objective)
    monkeypatch.setattr(head, "WIDE", 40)
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert any(type(module).__name__.startswith("_Wide") for module in model.modules())
    _, _, found = parts.loss_and_gradients(batch(), objective)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
