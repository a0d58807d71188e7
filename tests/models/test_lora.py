"""LoRA: what is trained, what is saved, and what is served are the same update."""

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear as Theirs
from mlx_lm.tuner.utils import load_adapters

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import AdapterError
from mlx_parallm.models import lora
from mlx_parallm.models.adapters import peft
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.linear import AdapterDropout, DoRALinear, LoRALinear
from mlx_parallm.models.lora import (
    adapter_layers,
    find_adapter_file,
    fit_adapter,
    inject_lora,
    linear_layers,
    linear_shapes,
    load_adapter,
    load_into_trainer,
    prepare_for_serving,
    save_adapter,
    trainer_lora_layers,
)
from mlx_parallm.models.support import blueprint
from tests.active_memory import active_memory
from tests.tiny_models import lora_config, make_model

TOKENS = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])


def trained_tree(
    model: nn.Module, config: LoraConfig, seed: int = 1, spread: float = 0.1
) -> nn.Module:
    """A trainer's tree whose B and magnitudes have moved."""
    tree = copy.deepcopy(model)
    mx.random.seed(seed)
    inject_lora(tree, config)
    for layer in trainer_lora_layers(tree).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape) * spread
        if isinstance(layer, DoRALinear):
            layer.m = layer.m * (1.0 + 0.3 * mx.random.normal(layer.m.shape))
    mx.eval(tree.parameters())
    return tree


@pytest.mark.parametrize("dora", [False, True])
def test_a_new_adapter_changes_nothing_and_only_it_is_trainable(dora: bool) -> None:
    model = make_model()
    tree = copy.deepcopy(model)
    paths = inject_lora(tree, lora_config(4, 8, ("q_proj", "down_proj"), dora=dora))
    assert len(paths) == 4
    assert (
        mx.allclose(tree(TOKENS), model(TOKENS), atol=1e-4)
        if dora
        else mx.array_equal(tree(TOKENS), model(TOKENS))
    )
    names = {name for name, _ in tree_flatten(tree.trainable_parameters())}
    leaves = ("lora_a", "lora_b", "m") if dora else ("lora_a", "lora_b")
    assert names == {f"{path}.{leaf}" for path in paths for leaf in leaves}
    assert all(array.dtype == mx.float32 for _, array in tree_flatten(tree.trainable_parameters()))


def test_the_layer_is_mlx_lms_with_the_same_seed() -> None:
    linear, x = nn.Linear(24, 10), mx.random.normal((3, 24))
    layers = []
    for make in (
        lambda: LoRALinear(linear, (24, 10), 4, 2.5),
        lambda: Theirs.from_base(linear, r=4, scale=2.5),
    ):
        mx.random.seed(3)
        layers.append(make())
    assert mx.array_equal(layers[0].lora_a, layers[1].lora_a)
    assert layers[0].lora_b.shape == layers[1].lora_b.shape and not layers[0].lora_b.any()
    for layer in layers:
        layer.lora_b = mx.arange(40.0).reshape(4, 10) / 40
    np.testing.assert_allclose(layers[0](x), layers[1](x), atol=1e-6)


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scale"), [(4, 12, False, 3.0), (9, 6, True, 2.0)]
)
def test_the_update_is_the_scale_times_b_a(
    rank: int, alpha: int, rslora: bool, scale: float
) -> None:
    model = make_model()
    tree = trained_tree(
        model, lora_config(rank, alpha, ("model.layers.0.self_attn.q_proj",), rslora=rslora)
    )
    (pair,) = adapter_layers(tree).values()
    assert pair.scale == scale
    x = np.random.default_rng(0).normal(size=(3, 64))
    weight = np.array(model.model.layers[0].self_attn.q_proj.weight)
    expected = x @ weight.T + scale * (x @ np.array(pair.a)) @ np.array(pair.b)
    got = tree.model.layers[0].self_attn.q_proj(mx.array(x, dtype=mx.float32))
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-4, atol=1e-4)


def test_serving_shares_the_base_with_the_trainer() -> None:
    model = make_model()
    mx.eval(model.parameters())
    before = active_memory()
    tree = copy.deepcopy(model)
    prepare_for_serving(model)
    assert active_memory() <= before
    assert len(linear_layers(tree)) == len(linear_layers(model))


def test_so_are_those_of_models_that_call_their_blocks_otherwise(tmp_path: Path) -> None:
    sizes = {"n_ctx": 64, "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 64}
    model = blueprint(
        {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "vocab_size": 128, **sizes}
    )
    mx.eval(model.parameters())
    tree = trained_tree(model, lora_config(4, 8))
    save_adapter(tmp_path, adapter_layers(tree), num_layers=2)
    theirs = load_adapters(copy.deepcopy(model), str(tmp_path))
    assert mx.allclose(theirs(TOKENS), tree(TOKENS), atol=1e-5)
    assert not mx.allclose(model(TOKENS), tree(TOKENS), atol=1e-3)


def test_peft_adapters_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 64)).astype(np.float32), rng.normal(size=(64, 2)).astype(np.float32)
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = {f"{prefix}.lora_A.weight": mx.array(a), f"{prefix}.lora_B.weight": mx.array(b)}
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    layers = load_adapter(tmp_path).layers
    pair = layers["model.layers.1.self_attn.q_proj"]
    assert pair.scale == 3.0
    np.testing.assert_array_equal(np.array(pair.a), a.T)
    np.testing.assert_array_equal(np.array(pair.b), b.T)
    fit_adapter(linear_shapes(make_model()), layers, "peft")


def test_tensors_that_would_be_left_out_are_an_error(tmp_path: Path) -> None:
    saved = "base_model.model.lm_head.modules_to_save.weight"
    tensors = {"base_model.model.x.lora_A.weight": mx.zeros((2, 4)), saved: mx.zeros((2, 2))}
    tensors["base_model.model.x.lora_B.weight"] = mx.zeros((4, 2))
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}')
    with pytest.raises(AdapterError, match="modules_to_save"):
        load_adapter(tmp_path)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((), "{}"),
        ((0, 4), "{}"),
        ((2, 4), '{"lora_alpha": "much"}'),
        ((2, 4), '{"alpha_pattern": [1]}'),
    ],
)
def test_damaged_peft_adapters_are_refused(
    tmp_path: Path, shape: tuple[int, ...], config: str
) -> None:
    tensors = {f"base_model.model.x.lora_{name}.weight": mx.zeros(shape) for name in "AB"}
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        load_adapter(tmp_path)


SLOW = r"(\w|\.|[a-z])*[A-Z]"  # tries each letter in two ways: 2²⁰ of them


def peft_adapter(directory: Path, *, rank: int = 2, fill: float = 0.0, **config: object) -> Path:
    shapes = {"A": (rank, 4), "B": (4, rank)}
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{path}.lora_{name}.weight": mx.full(shape, fill) for name, shape in shapes.items()}
    mx.save_safetensors(str(directory / "adapter_model.safetensors"), tensors)
    (directory / "adapter_config.json").write_text(
        json.dumps({"r": rank, "lora_alpha": 2, **config})
    )
    return directory


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"alpha_pattern": {SLOW: 4}}, "regular expressions take more than"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern: .*missing"),
        ({"fill": float("nan")}, "q_proj holds a number that is not finite"),
        ({"fill": float("inf")}, "q_proj holds a number that is not finite"),
        ({"lora_alpha": float("nan")}, "q_proj holds a number that is not finite"),
        ({"rank": 5000}, "has rank 5000: the highest is 4096"),
    ],
    ids=str,
)
def test_an_adapter_from_anybody_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, Any], words: str
) -> None:
    """It hung the process, was a 500, or was loaded and made each request a 500."""
    monkeypatch.setattr(peft, "PATTERN_SECONDS", 0.05)
    with pytest.raises(AdapterError, match=words):
        load_adapter(peft_adapter(tmp_path, **made))


def test_a_pattern_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="alpha_pattern"):
        load_adapter(peft_adapter(tmp_path, alpha_pattern={"(" * 1500 + "a" + ")" * 1500: 4}))


def test_all_patterns_share_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft, "PATTERN_SECONDS", 0.05)
    started = time.process_time()
    with pytest.raises(AdapterError, match=r"take more than 0\.05 s"):
        load_adapter(peft_adapter(tmp_path, alpha_pattern={f"{SLOW}{n}": n for n in range(1000)}))
    assert time.process_time() - started < 30, "a thousand times the limit would be 50 s"


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    """A thread that opens it waits for ever."""
    (peft_adapter(tmp_path) / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(AdapterError, match=r"needs adapter_config\.json"):
        load_adapter(tmp_path)


def test_a_file_that_is_cut_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(path: str) -> dict[str, mx.array]:
        tensors = loaded(path)
        os.truncate(path, 300)
        return tensors

    loaded = mx.load
    monkeypatch.setattr(lora.mx, "load", cut)
    with pytest.raises(AdapterError, match="cannot be read"):
        load_adapter(peft_adapter(tmp_path, rank=512))


def test_a_rescaled_adapter_keeps_its_effect_in_the_trainer(tmp_path: Path) -> None:
    model = make_model()
    tree = trained_tree(model, lora_config(4, 8, ("q_proj",)))
    save_adapter(tmp_path, adapter_layers(tree), num_layers=2)
    again = copy.deepcopy(model)
    inject_lora(again, lora_config(4, 16, ("q_proj",)))
    load_into_trainer(again, load_adapter(tmp_path).layers)
    assert mx.allclose(again(TOKENS), tree(TOKENS), atol=1e-5)


def test_the_names_that_the_specification_prints(tmp_path: Path) -> None:
    save_adapter(
        tmp_path,
        adapter_layers(trained_tree(make_model(), lora_config(2, 2, ("q_proj",)))),
        num_layers=2,
    )
    expected = tmp_path / "adapters.safetensors"
    assert find_adapter_file(tmp_path / "lora_weights.safetensors") == expected
    assert find_adapter_file(tmp_path) == find_adapter_file(expected) == expected


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(AdapterError, match=r"'qproj'.*q_proj"):
        inject_lora(copy.deepcopy(model), lora_config(2, 2, ("qproj",)))
    wrong = {"model.layers.0.self_attn.q_proj": LoraPair(mx.zeros((32, 2)), mx.zeros((2, 64)), 1.0)}
    with pytest.raises(AdapterError, match=r"q_proj is \[64 → 64\]"):
        fit_adapter(linear_shapes(model), wrong, "x")
    flat = {"model.layers.0.self_attn.q_proj": LoraPair(mx.zeros(()), mx.zeros(()), 1.0)}
    with pytest.raises(AdapterError, match=r"q_proj is \[64 → 64\]"):
        fit_adapter(linear_shapes(model), flat, "x")
    with pytest.raises(AdapterError, match=r"'model\.layers\.9\.q'"):
        fit_adapter(
            linear_shapes(model),
            {"model.layers.9.q": wrong["model.layers.0.self_attn.q_proj"]},
            "x",
        )
    (tmp_path / "run" / "final").mkdir(parents=True)
    with pytest.raises(AdapterError, match=r"run/final\?"):
        find_adapter_file(tmp_path / "run")
    with pytest.raises(AdapterError, match="no adapter at"):
        load_adapter(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(AdapterError, match=r"needs adapter_config.json"):
        load_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="cannot be read"):
        load_adapter(tmp_path)
    tree = copy.deepcopy(model)
    inject_lora(tree, lora_config(2, 2, ("q_proj",)))
    with pytest.raises(AdapterError, match="adapts other layers"):
        load_into_trainer(tree, {})


def test_dropout_leaves_the_mean_and_is_a_function_of_seed_and_layer() -> None:
    """rate 0.25: a number is 0 or 4/3 of itself, in both passes over a block."""
    dropout, x = AdapterDropout(0.25), mx.ones((200, 500))
    assert dropout(x, 0) is x
    with dropout.drawn_from([7, 1]):
        first, same, other = (np.array(dropout(x, layer)) for layer in (0, 0, 1))
        layer = LoRALinear(nn.Linear(4, 4), (4, 4), 2, 2.0, dropout)
        layer.lora_b = mx.ones((2, 4))
        row = mx.array([[1.0, 2.0, 3.0, 4.0]])
        update = np.array(dropout(row, 0)) @ np.array(layer.lora_a) @ np.ones((2, 4))
        expected = np.array(layer.linear(row)) + 2.0 * update
        assert np.array(layer(row)) == pytest.approx(expected, rel=1e-5)
    with dropout.drawn_from([7, 2]):
        later = np.array(dropout(x, 0))
    assert np.unique(first) == pytest.approx([0.0, 4 / 3])
    assert (first == 0).mean() == pytest.approx(0.25, abs=0.006)  # four standard deviations
    assert (first == same).all() and (first != other).any() and (first != later).any()
    assert dropout(x, 0) is x


def test_an_adapter_of_the_part_that_sees_is_refused_by_a_model_that_reads_no_images() -> None:
    pair = LoraPair(mx.zeros((4, 2)), mx.zeros((2, 4)), 1.0)
    with pytest.raises(AdapterError, match="part that sees"):
        fit_adapter({"model.layers.0.mlp": (4, 4)}, {"vision_tower.0.mlp": pair}, "a")
    with pytest.raises(AdapterError, match=r"'model\.x'"):
        fit_adapter({"model.layers.0.mlp": (4, 4)}, {"model.x": pair}, "a")
