"""An adapter for each of stacked experts: by hand, its gradient, mlx-lm's and PEFT's files, rows of
several adapters, and merges."""

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.errors import AdapterError
from mlx_parallm.models.adapters.adapter import AdapterSlot, AdapterWeights
from mlx_parallm.models.adapters.linear import LoRASwitchLinear, merged_rows
from mlx_parallm.models.adapters.peft import save_peft
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.experts.routing import prepare_routing, why_not_routed
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.lora import (
    adapter_layers,
    fit_adapter,
    inject_lora,
    linear_shapes,
    load_adapter,
    load_into_trainer,
    prepare_for_serving,
    save_adapter,
    trainer_lora_layers,
)
from tests.engine.test_architectures import model_of
from tests.tiny_models import EXPERTS, QWEN3, lora_config, make_model, save_checkpoint

MIXTURE = QWEN3 | EXPERTS | {"model_type": "qwen3_moe"}
TOKENS = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
LONG = mx.array(np.random.default_rng(0).integers(0, 300, (2, 40)))  # 160 pairs: sorted by experts


def switch(count: int = 3, inputs: int = 6, outputs: int = 5, *, bias: bool = False) -> Any:
    """A layer of experts with an adapter that does something, and its arrays in float64."""
    mx.random.seed(4)
    linear = SwitchLinear(inputs, outputs, count, bias=bias)
    if bias:
        linear.bias = mx.random.normal((count, outputs))
    layer = LoRASwitchLinear(linear, (count, inputs, outputs), 2, 1.5)
    layer.lora_b = mx.random.normal(layer.lora_b.shape)
    return layer, *(np.array(v, np.float64) for v in (linear.weight, layer.lora_a, layer.lora_b))


@pytest.mark.parametrize("sorts", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_each_expert(sorts: bool, bias: bool) -> None:
    """y = Wx + s (xA) B of a token's expert; the slopes of A, B and x by hand in float64."""
    layer, w, a, b = switch(bias=bias)
    rng = np.random.default_rng(1)
    experts = rng.integers(0, 3, 40)
    experts = np.sort(experts) if sorts else experts
    x, slope = rng.normal(size=(40, 6)), rng.normal(size=(40, 5))

    def loss(x: mx.array, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        layer.lora_a, layer.lora_b = a, b
        y = layer(x[:, None], mx.array(experts, dtype=mx.uint32), sorted_indices=sorts)[:, 0]
        return (y * mx.array(slope, dtype=mx.float32)).sum(), y

    arguments = (mx.array(x, dtype=mx.float32), layer.lora_a, layer.lora_b)
    (_, y), slopes = mx.value_and_grad(loss, argnums=(0, 1, 2))(*arguments)
    of_x, of_a, of_b = np.zeros_like(x), np.zeros_like(a), np.zeros_like(b)
    for token, e in enumerate(experts):
        row, back = x[token], slope[token]
        wanted = w[e] @ row + 1.5 * (row @ a[e]) @ b[e]
        wanted = wanted + np.array(layer.linear.bias[e]) if bias else wanted
        np.testing.assert_allclose(np.array(y[token]), wanted, atol=1e-5)
        of_x[token] = back @ w[e] + 1.5 * a[e] @ (b[e] @ back)
        of_a[e] += 1.5 * np.outer(row, b[e] @ back)
        of_b[e] += 1.5 * np.outer(row @ a[e], back)
    for ours, by_hand in zip(slopes, (of_x, of_a, of_b), strict=True):
        np.testing.assert_allclose(np.array(ours), by_hand, atol=3e-5)


def adapted(model: nn.Module, *, seed: int = 1, **settings: Any) -> nn.Module:
    """A trainer's tree whose B have moved."""
    tree = copy.deepcopy(model)
    mx.random.seed(seed)
    inject_lora(tree, lora_config(2, 4, **({"experts": True} | settings)))
    for layer in trainer_lora_layers(tree).values():
        layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
    mx.eval(tree.parameters())
    return tree


def test_routed_experts_are_adapted_when_they_are_asked_for() -> None:
    model = make_model(MIXTURE)
    usual, whole = copy.deepcopy(model), copy.deepcopy(model)
    paths, every = (
        inject_lora(tree, lora_config(2, 4, experts=experts))
        for tree, experts in ((usual, False), (whole, True))
    )
    assert not any("switch_mlp" in path for path in paths)
    extra = {path.rpartition("layers.")[2] for path in set(every) - set(paths)}
    names = ("gate_proj", "up_proj", "down_proj")
    assert extra == {f"{block}.mlp.switch_mlp.{name}" for block in (0, 1) for name in names}
    assert mx.array_equal(whole(LONG), model(LONG)), "a new adapter changes nothing"
    trained = {name.rpartition(".")[2] for name, _ in tree_flatten(whole.trainable_parameters())}
    assert trained == {"lora_a", "lora_b"}
    some = inject_lora(copy.deepcopy(model), lora_config(2, 4, ("up_proj",), experts=True))
    assert some == [f"model.layers.{block}.mlp.switch_mlp.up_proj" for block in (0, 1)]


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (MIXTURE, {"target_modules": ("up_proj",)}, "set lora.routed_experts = true"),
        (QWEN3, {"experts": True}, "the target modules are not stacked experts"),
        (MIXTURE, {"target_modules": ("q_proj",), "experts": True}, "not stacked experts"),
    ],
)
def test_targets_that_do_not_fit_the_setting(
    model: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        inject_lora(make_model(model), lora_config(2, 4, **settings))


@pytest.mark.parametrize("key", ["use_dora", "use_adalora"])
def test_kinds_that_experts_do_not_have(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} and routed_experts are not combined"):
        LoraConfig.model_validate({key: True, "routed_experts": True})
    with pytest.raises(ValueError, match="routed_experts"):
        LoraConfig.model_validate({"enabled": False, "routed_experts": True})


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_the_files_are_mlx_lms(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    tree = adapted(model)
    save_adapter(tmp_path, adapter_layers(tree), num_layers=2)
    theirs = load_adapters(copy.deepcopy(model), str(tmp_path))
    for tokens in (TOKENS, LONG):
        np.testing.assert_allclose(theirs(tokens), tree(tokens), atol=1e-4)
        assert mx.abs(model(tokens) - tree(tokens)).max().item() > 1e-2
    again = copy.deepcopy(model)
    inject_lora(again, lora_config(2, 4, experts=True))
    layers = load_adapter(tmp_path).layers
    fit_adapter(linear_shapes(model), layers, "file")
    load_into_trainer(again, layers)
    assert mx.array_equal(again(LONG), tree(LONG))


def test_a_wrong_number_of_experts_is_named(tmp_path: Path) -> None:
    tree = adapted(make_model(MIXTURE))
    other = linear_shapes(make_model(MIXTURE | {"num_experts": 6}))
    with pytest.raises(AdapterError, match=r"6 experts of \[64 → 64\]"):
        fit_adapter(other, adapter_layers(tree), "file")


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("bits", [None, 4])
def test_blocks_have_the_whole_graphs_gradients(blocks: int, bits: int | None) -> None:
    model = make_model(MIXTURE)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    tree = adapted(model)
    slots = dict(tree_flatten(tree.trainable_parameters()))

    def loss(parameters: Any) -> mx.array:
        tree.update(parameters)
        logits = tree(LONG[:, :-1])
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.take_along_axis(logits, LONG[:, 1:, None], axis=-1).sum()

    start = tree.trainable_parameters()
    wanted = dict(tree_flatten(mx.grad(loss)(start)))
    tree.update(start)
    parts = BlockwiseModel(tree, blocks_per_eval=blocks)
    batch = TokenBatch(
        LONG[:, :-1], mx.arange(78), LONG[:, 1:].flatten(), mx.ones((78,)), entropy_slope=False
    )
    _, _, gradients = parts.loss_and_gradients(batch, lambda logprobs, *_: (logprobs.sum(), ()))
    for name, gradient in zip(parts.slots.names, gradients, strict=True):
        top = max(1.0, mx.abs(wanted[name]).max().item())
        np.testing.assert_allclose(gradient, wanted[name], atol=2e-4 * top)
        assert slots[name].shape == gradient.shape and mx.abs(gradient).max().item() > 1e-3


def slot(name: str, tree: nn.Module) -> AdapterSlot:
    return AdapterSlot(name, AdapterWeights(name, 1, adapter_layers(tree)))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("length", [1, 40])
def test_rows_have_their_own_adapter_or_none(name: str, length: int) -> None:
    """Short and long forwards: experts are taken one by one, and sorted."""
    model = (
        make_model(QWEN3 | EXPERTS | {"model_type": name, "shared_expert_intermediate_size": 32})
        if name == "qwen2_moe"
        else model_of(name)
    )
    one, two = adapted(model), adapted(model, seed=2)
    tokens = mx.array(np.random.default_rng(2).integers(0, 200, (3, length)))
    alone = [tree(tokens) for tree in (one, model, two)]
    served = copy.deepcopy(model)
    prepare_routing(served)
    assert why_not_routed(served) == ""
    context = prepare_for_serving(served)
    first, second = slot("one", one), slot("two", two)
    cases: list[tuple[list[AdapterSlot | None], list[int]]] = [
        ([None, None, None], [1, 1, 1]),
        ([first, first, first], [0, 0, 0]),
        ([first, None, first], [0, 1, 0]),
        ([first, None, second], [0, 1, 2]),
    ]
    for rows, of in cases:
        context.activate(rows)
        answer = served(tokens)
        for row, which in enumerate(of):
            np.testing.assert_allclose(answer[row], alone[which][row], atol=2e-4)
    assert mx.abs(alone[0] - alone[1]).max().item() > 1e-2
    assert mx.abs(alone[0] - alone[2]).max().item() > 1e-2


def test_rows_of_a_merge_are_those_of_the_whole_stack() -> None:
    layer, w, a, b = switch()
    whole = merged_rows(layer.linear.weight, layer.pair())
    np.testing.assert_allclose(whole, w + 1.5 * np.swapaxes(a @ b, 1, 2), atol=1e-5)
    rows = mx.array([14, 0, 7])
    flat = layer.linear.weight.reshape(-1, 6)
    part = merged_rows(flat[rows], layer.pair(), rows)
    np.testing.assert_allclose(part, np.array(whole).reshape(-1, 6)[[14, 0, 7]], atol=1e-6)


def by_expert(path: Path) -> Path:
    """The checkpoint as Hugging Face has it: a tensor for each expert."""
    apart = {}
    for name, array in mx.load(str(path / "model.safetensors")).items():
        if ".switch_mlp." not in name:
            apart[name] = array
            continue
        for e in range(array.shape[0]):
            apart[name.replace("switch_mlp.", f"experts.{e}.")] = array[e]
    mx.save_safetensors(str(path / "model.safetensors"), apart, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("layout", ["safetensors", "mlx"])
def test_a_merge_of_experts_is_base_plus_adapter(layout: Any, tmp_path: Path) -> None:
    base = by_expert(save_checkpoint(tmp_path / "base", MIXTURE))
    model, _ = load_model(base)
    tree = adapted(model)
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", adapter_layers(tree), num_layers=2)
    merge(str(base), tmp_path / "adapter", tmp_path / "merged", layout=layout)
    merged, _ = load_model(tmp_path / "merged")
    np.testing.assert_allclose(merged(LONG), tree(LONG), atol=1e-4)
    names = {n for f in (tmp_path / "merged").glob("*.safetensors") for n in mx.load(str(f))}
    assert ("model.layers.0.mlp.experts.3.up_proj.weight" in names) is (layout == "safetensors")


def test_peft_has_a_layer_for_each_expert(tmp_path: Path) -> None:
    """The arrays of expert 2, by name and by hand, and all of them back again."""
    layers = adapter_layers(adapted(make_model(MIXTURE)))
    save_peft(tmp_path, layers, dropout=0.0)
    stored = mx.load(str(tmp_path / "adapter_model.safetensors"))
    pair = layers["model.layers.1.mlp.switch_mlp.up_proj"]
    prefix = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
    np.testing.assert_array_equal(stored[f"{prefix}.lora_A.weight"], pair.a[2].T)
    np.testing.assert_array_equal(stored[f"{prefix}.lora_B.weight"], pair.b[2].T)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "model.layers.0.mlp.experts.0.gate_proj" in config["target_modules"]
    again = load_adapter(tmp_path).layers
    assert again.keys() == layers.keys()
    for path, one in layers.items():
        assert mx.array_equal(one.a, again[path].a) and mx.array_equal(one.b, again[path].b)
        assert one.scale == again[path].scale
    del stored[f"{prefix}.lora_A.weight"], stored[f"{prefix}.lora_B.weight"]
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), stored)
    with pytest.raises(AdapterError, match="up_proj"):
        load_adapter(tmp_path)


def test_mixtrals_experts_have_its_own_names_in_peft(tmp_path: Path) -> None:
    layers = adapter_layers(adapted(model_of("mixtral")))
    save_peft(tmp_path, layers, dropout=0.0)
    stored = mx.load(str(tmp_path / "adapter_model.safetensors"))
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w2.lora_A.weight"
    pair = layers["model.layers.0.block_sparse_moe.switch_mlp.down_proj"]
    np.testing.assert_array_equal(stored[name], pair.a[1].T)
    assert load_adapter(tmp_path).layers.keys() == layers.keys()
    with pytest.raises(AdapterError, match="no layer for each expert"):
        save_peft(tmp_path, adapter_layers(adapted(model_of("gpt_oss"))), dropout=0.0)


def test_a_block_of_experts_may_be_a_lone_pair() -> None:
    """An adapter on one projection of the three."""
    glu = SwitchGLU(6, 5, 3)
    layer = LoRASwitchLinear(glu.down_proj, (3, 5, 6), 2, 1.0)
    layer.lora_b = mx.ones(layer.lora_b.shape)
    x, ids = mx.random.normal((2, 6)), mx.array([[0, 1], [2, 1]], dtype=mx.uint32)
    plain = glu(x, ids)
    inner = glu.activation(glu.up_proj(x[:, None, None], ids), glu.gate_proj(x[:, None, None], ids))
    glu.down_proj = layer
    a, expected = np.array(layer.lora_a), np.array(plain)
    for token in range(2):
        for place in range(2):
            e = int(ids[token, place].item())
            expected[token, place] += (np.array(inner[token, place, 0]) @ a[e]).sum()
    np.testing.assert_allclose(glu(x, ids), expected, atol=1e-5)
