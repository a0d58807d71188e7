"""DoRA and rsLoRA against plain float64 twins; ranges of blocks; QLoRA; what is published is
what was trained."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import AdapterError
from mlx_parallm.models.adapters.adapter import AdapterSlot, LoraPair
from mlx_parallm.models.adapters.linear import DoRALinear, gain
from mlx_parallm.models.lora import (
    adapter_layers,
    fit_adapter,
    inject_lora,
    linear_layers,
    linear_shapes,
    load_adapter,
    load_into_trainer,
    prepare_for_serving,
    save_adapter,
)
from mlx_parallm.weights import SharedWeights
from tests.models.test_lora import trained_tree
from tests.tiny_models import QWEN3, lora_config, make_model

TOKENS = mx.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]])
trained = partial(trained_tree, spread=0.2)
BIASED = QWEN3 | {"model_type": "qwen2"}  # biases in q, k and v


def numpy_dora(x, weight, bias, a, b, scale, magnitude):
    """The paper's equation 5, in float64: m ⊙ (W + sBA) / ‖W + sBA‖ with rows as outputs."""
    adapted = weight + scale * (a @ b).T
    adapted = magnitude[:, None] * adapted / np.linalg.norm(adapted, axis=1, keepdims=True)
    return x @ adapted.T + bias


def dense(layer: nn.Module) -> np.ndarray:
    if isinstance(layer, nn.QuantizedLinear):
        weight = mx.dequantize(
            layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits
        )
        return np.array(weight, np.float64)
    return np.array(layer.weight, np.float64)


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward_equals_the_papers_formula(bits: int, with_bias: bool) -> None:
    mx.random.seed(0)
    linear = nn.Linear(64, 48, bias=with_bias)
    linear = linear.to_quantized(64, bits) if bits else linear
    layer = DoRALinear(linear, (64, 48), 4, 1.5)
    layer.lora_b = mx.random.normal((4, 48)) * 0.3
    layer.m = layer.m * (1 + 0.5 * mx.random.normal((48,)))
    x = mx.random.normal((2, 5, 64))
    bias = np.array(linear.bias, np.float64) if with_bias else np.zeros(48)
    a, b, m = (np.array(array, np.float64) for array in (layer.lora_a, layer.lora_b, layer.m))
    expected = numpy_dora(np.array(x, np.float64), dense(linear), bias, a, b, 1.5, m)
    np.testing.assert_allclose(np.array(layer(x)), expected, rtol=1e-4, atol=1e-4)
    norms = np.linalg.norm(dense(linear) + 1.5 * (a @ b).T, axis=1)
    served = gain(linear, layer.lora_a, layer.lora_b, 1.5, layer.m)
    np.testing.assert_allclose(np.array(served), m / norms, rtol=1e-5)
    np.testing.assert_allclose(np.array(layer.gain()), np.array(served), rtol=1e-6)


def test_gradients_hold_the_norm_constant() -> None:
    mx.random.seed(0)
    layer = DoRALinear(nn.Linear(6, 5, bias=True), (6, 5), 2, 0.7)
    layer.lora_b = mx.random.normal((2, 5))
    layer.m = layer.m * 1.3
    x, cotangent = mx.random.normal((3, 6)), mx.random.normal((3, 5))

    def loss(a: mx.array, b: mx.array, m: mx.array) -> mx.array:
        layer.lora_a, layer.lora_b, layer.m = a, b, m
        return (layer(x) * cotangent).sum()

    arrays = (layer.lora_a, layer.lora_b, layer.m)
    a, b, m = (np.array(array, np.float64) for array in arrays)
    got = mx.grad(loss, argnums=(0, 1, 2))(*arrays)
    weight = np.array(layer.linear.weight, np.float64)
    adapted = weight + 0.7 * (a @ b).T
    norm = np.linalg.norm(adapted, axis=1)
    inputs, slopes = np.array(x, np.float64), np.array(cotangent, np.float64)
    of_update = 0.7 * inputs.T @ (slopes * m / norm)  # of AB, [in, out]
    expected = of_update @ b.T, a.T @ of_update, (slopes * (inputs @ adapted.T)).sum(axis=0) / norm
    for array, value in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(array), value, rtol=1e-4, atol=1e-5)


def test_a_row_of_zeros_stays_zero() -> None:
    linear = nn.Linear(8, 3, bias=False)
    linear.weight = linear.weight * mx.array([[1.0], [0.0], [1.0]])
    layer = DoRALinear(linear, (8, 3), 2, 1.0)
    y, slope = mx.value_and_grad(
        lambda m: (setattr(layer, "m", m), layer(mx.ones((1, 8))).sum())[1]
    )(layer.m)
    assert np.isfinite(y.item()) and np.isfinite(np.array(slope)).all()
    assert layer(mx.ones((1, 8)))[0, 1].item() == 0.0


@pytest.mark.parametrize("config", [QWEN3, BIASED])
@pytest.mark.parametrize("bits", [0, 4])
def test_served_adapters_answer_as_the_trainers(config: dict, bits: int) -> None:
    model = make_model(config)
    if bits:
        nn.quantize(model, 64, bits)
    tree = trained(model, lora_config(4, 8, dora=True))
    lora_tree = trained(model, lora_config(2, 2), seed=5)
    expected, base = tree(TOKENS), model(TOKENS)
    weights = SharedWeights(model, policy="policy", keep_versions=1)
    lora, dora = adapter_layers(lora_tree), adapter_layers(tree)
    from_disk = {
        path: LoraPair(pair.a, pair.b, pair.scale, pair.magnitude) for path, pair in dora.items()
    }
    weights.add_adapter("lora", lora)
    weights.add_adapter("dora", from_disk)  # gains computed from the served base
    weights.publish_adapter(dora)  # gains that the trainer gave
    context = prepare_for_serving(model)
    alone: dict[str | None, mx.array] = {None: base}
    for name in ("lora", "dora", "policy"):
        context.activate([weights.find(name)] * 3)
        alone[name] = model(TOKENS)
    for name in ("dora", "policy"):
        assert mx.allclose(
            alone[name], expected, rtol=1e-4, atol=1e-4 * mx.abs(expected).max().item()
        )
    assert mx.allclose(alone["lora"], lora_tree(TOKENS), rtol=1e-5, atol=1e-4)
    assert min(mx.abs(alone[name] - base).max().item() for name in ("lora", "dora")) > 0.5
    for rows in (
        [None, "dora", "lora"],
        ["policy", None, "dora"],
        ["lora", "policy", None],
        ["dora", None, None],
    ):
        context.activate([weights.find(name) if name else None for name in rows])
        mixed = model(TOKENS)
        for row, name in enumerate(rows):
            if name is None:
                assert mx.array_equal(mixed[row], base[row]), (
                    "rows without an adapter are bit-equal"
                )
            else:
                assert mx.allclose(mixed[row], alone[name][row], rtol=1e-4, atol=1e-3)


def test_a_dora_beside_a_lora_changes_no_bit_of_its_rows() -> None:
    model = make_model(BIASED)
    slots = {}
    weights = SharedWeights(model, keep_versions=1)
    for seed, name in enumerate(("one", "two", "dora")):
        layers = adapter_layers(trained(model, lora_config(4, 8, dora=name == "dora"), seed=seed))
        weights.add_adapter(name, layers)
        slots[name] = weights.find(name)
    plain = AdapterSlot(
        "plain",
        weights.add_adapter("x", {p: LoraPair(q.a, q.b, q.scale) for p, q in layers.items()}),
    )
    context = prepare_for_serving(model)
    context.activate([slots["one"], slots["two"], plain])  # the same arrays, without the magnitudes
    without = model(TOKENS)
    context.activate([slots["one"], slots["two"], slots["dora"]])
    beside = model(TOKENS)
    assert mx.array_equal(beside[:2], without[:2])
    assert not mx.allclose(beside[2], without[2], atol=1e-2)
    broken = {path: LoraPair(q.a, q.b, q.scale, q.magnitude * mx.nan) for path, q in layers.items()}
    weights.add_adapter("dora", broken)  # replaced in place: the stack overwrites its slot
    context.activate([slots["one"], slots["two"], slots["dora"]])
    assert mx.array_equal(model(TOKENS)[:2], without[:2]) and mx.isnan(model(TOKENS)[2]).all()


@pytest.mark.parametrize("config", [QWEN3, BIASED])
def test_a_dora_beside_full_weight_training_follows_the_base(config: dict) -> None:
    """Its gains are of the base that it was loaded beside: a publish of other weights makes them
    anew."""
    model = make_model(config)
    dora = adapter_layers(trained(model, lora_config(4, 8, dora=True)))
    moved = {
        name: array * 1.5 if array.ndim == 2 and "proj" in name else array + 0.1
        for name, array in tree_flatten(model.parameters())
    }
    tree = make_model(config)
    tree.load_weights(list(moved.items()))
    inject_lora(tree, lora_config(4, 8, dora=True))
    load_into_trainer(tree, dora)
    weights = SharedWeights(model, keep_versions=1)
    weights.add_adapter("dora", {path: replace(pair, gain=None) for path, pair in dora.items()})
    context = prepare_for_serving(model)
    weights.publish_parameters(moved)
    context.activate([weights.find("dora")] * 3)
    expected = tree(TOKENS)
    assert mx.allclose(
        model(TOKENS), expected, rtol=1e-4, atol=1e-4 * mx.abs(expected).max().item()
    )


@pytest.mark.parametrize("dora", [False, True])
def test_files_are_mlx_lms_and_come_back(tmp_path: Path, dora: bool) -> None:
    model = make_model()
    spec = lora_config(4, 8, ("q_proj", "up_proj"), dora=dora)
    tree = trained(model, spec)
    save_adapter(tmp_path, adapter_layers(tree), num_layers=2)
    theirs = load_adapters(copy.deepcopy(model), str(tmp_path))
    assert mx.allclose(theirs(TOKENS), tree(TOKENS), rtol=1e-4, atol=1e-3)
    again = copy.deepcopy(model)
    inject_lora(again, spec)
    layers = load_adapter(tmp_path).layers
    fit_adapter(linear_shapes(model), layers, "x")
    load_into_trainer(again, layers)
    assert mx.array_equal(again(TOKENS), tree(TOKENS))
    other = copy.deepcopy(model)
    inject_lora(other, lora_config(4, 8, ("q_proj", "up_proj"), dora=not dora))
    with pytest.raises(AdapterError, match=r"lora\.use_dora"):
        load_into_trainer(other, layers)
    path = next(iter(layers))
    short = {path: LoraPair(layers[path].a, layers[path].b, 1.0, mx.ones((3,)))}
    with pytest.raises(AdapterError, match=r"magnitude is \(3,\)"):
        fit_adapter(linear_shapes(model), short, "x")


def test_pefts_dora_and_patterns_are_read(tmp_path: Path) -> None:
    """Keys as PEFT 0.19 writes them; a pattern is a regular expression on the path's end."""
    prefix, rng = "base_model.model.model.layers.1.self_attn", np.random.default_rng(0)
    tensors = {}
    for name in ("q_proj", "o_proj"):
        tensors[f"{prefix}.{name}.lora_A.weight"] = mx.array(
            rng.normal(size=(4, 64)).astype(np.float32)
        )
        tensors[f"{prefix}.{name}.lora_B.weight"] = mx.array(
            rng.normal(size=(64, 4)).astype(np.float32)
        )
        tensors[f"{prefix}.{name}.lora_magnitude_vector"] = mx.array(
            rng.normal(size=(64,)).astype(np.float32)
        )
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    config = {
        "r": 4,
        "lora_alpha": 6,
        "use_dora": True,
        "use_rslora": True,
        "alpha_pattern": {"self_attn.o_.*": 10},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    layers = load_adapter(tmp_path).layers
    assert {path[-6:]: pair.scale for path, pair in layers.items()} == {
        "q_proj": 3.0,
        "o_proj": 5.0,
    }
    for path, pair in layers.items():
        expected = tensors[f"base_model.model.{path}.lora_magnitude_vector"]
        assert mx.array_equal(pair.magnitude, expected)
    del tensors[f"{prefix}.o_proj.lora_magnitude_vector"]
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    with pytest.raises(AdapterError, match="o_proj"):
        load_adapter(tmp_path)


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [("all", {0, 1, 2}), ("last 1", {2}), ("last 3", {0, 1, 2}), ((0, 1), {0}), ((1, 3), {1, 2})],
)
def test_a_range_of_blocks(layers: tuple[int, int] | str, blocks: set[int]) -> None:
    model = make_model(QWEN3 | {"num_hidden_layers": 3, "tie_word_embeddings": False})
    paths = inject_lora(copy.deepcopy(model), lora_config(2, 2, layers=layers))
    assert {int(path.split(".")[2]) for path in paths} == blocks and len(paths) == 7 * len(blocks)
    with_head = inject_lora(model, lora_config(2, 2, ("q_proj", "lm_head"), layers=layers))
    assert len(with_head) == len(blocks) + 1, "what is in no block stays"


@pytest.mark.parametrize("layers", ["last 3", (1, 3), (5, 9)])
def test_a_range_that_the_model_does_not_have(layers: tuple[int, int] | str) -> None:
    with pytest.raises(AdapterError, match=r"layers = .*2 blocks"):
        inject_lora(make_model(), lora_config(2, 2, layers=layers))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": "first 2"}, r"'first 2' is not \"all\", \"last 8\" or \[start, end\)"),
        ({"layers": [3, 3]}, r"\[3, 3\] contains no block"),
        ({"loraplus_ratio": 0.0}, "greater than 0"),
        ({"enabled": False, "use_dora": True}, "use_dora is set, but enabled = false"),
        ({"enabled": False, "layers": "last 2"}, "layers is set, but enabled = false"),
    ],
)
def test_settings_that_cannot_work(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig.model_validate(values)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("dora", [False, True])
def test_qlora_trains_on_every_width(bits: int, dora: bool) -> None:
    """Gradients over a quantised base are those over the weights that it stands for."""
    model = make_model()
    nn.quantize(model, 64, bits)
    unpacked = make_model()
    for path, layer in linear_layers(model).items():
        linear_layers(unpacked)[path].weight = mx.array(dense(layer).astype(np.float32))
    unpacked.model.embed_tokens.weight = mx.dequantize(
        model.model.embed_tokens.weight,
        model.model.embed_tokens.scales,
        model.model.embed_tokens.biases,
        64,
        bits,
    )
    gradients = []
    for base in (model, unpacked):
        tree = trained(base, lora_config(4, 8, dora=dora))
        assert linear_shapes(tree) == linear_shapes(make_model())

        def loss(tree: nn.Module = tree) -> mx.array:
            return mx.logsumexp(tree(TOKENS), axis=-1).mean()

        gradients.append(dict(tree_flatten(nn.value_and_grad(tree, loss)()[1])))
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 14 * (
        3 if dora else 2
    )
    for name, array in gradients[0].items():
        other = gradients[1][name]
        assert mx.linalg.norm(array - other).item() <= 2e-3 * mx.linalg.norm(other).item() + 1e-7, (
            name
        )
        assert mx.linalg.norm(other).item() > 0, name
