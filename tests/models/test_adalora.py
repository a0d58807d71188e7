"""AdaLoRA's layer, its files, PEFT's formulas in float64."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.deploy.convert_adapter import convert
from mlx_parallm.errors import AdapterError
from mlx_parallm.models.adapters.adalora import save_adalora
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.linear import SVDLinear
from mlx_parallm.models.lora import (
    adapter_layers,
    inject_lora,
    load_adapter,
    load_into_trainer,
    save_adapter,
    trainer_lora_layers,
)
from mlx_parallm.runs.show_checkpoint import describe
from tests.rl_training.tiny_models import make_model

CONFIG = LoraConfig.model_validate(
    {"init_r": 6, "alpha": 9.0, "use_adalora": True, "adalora": {"target_r": 4}}
    | {"target_modules": ("q_proj", "down_proj")}
)


def model_with_adapter(**changes: Any) -> Any:
    """Two of six triplets of each layer are pruned, all of one layer."""
    model = make_model()
    mx.random.seed(3)
    inject_lora(model, CONFIG.model_copy(update=changes))
    for number, layer in enumerate(trainer_lora_layers(model).values()):
        e = np.random.default_rng(number).normal(size=CONFIG.rank)
        e[[1, 4] if number else slice(None)] = 0.0
        layer.lora_e = mx.array(e.astype(np.float32))
    mx.eval(model.parameters())
    return model


def delta(pair: LoraPair) -> np.ndarray:
    """[out, in] as it is served."""
    a, b = np.array(pair.a, np.float64), np.array(pair.b, np.float64)
    return pair.scale * (a @ b).T


def pefts_delta(directory: Path) -> dict[str, np.ndarray]:
    """`SVDLinear.get_delta_weight` of PEFT 0.21, float64; a layer of rank 0 adds 0."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = mx.load(str(directory / "adapter_model.safetensors"))
    assert isinstance(tensors, dict) and config["peft_type"] == "ADALORA"
    result = {}
    for key in tensors:
        if key.endswith(".lora_E"):
            a, e, b = (
                np.array(tensors[key.removesuffix("lora_E") + part], np.float64)
                for part in ("lora_A", "lora_E", "lora_B")
            )
            path = key.removeprefix("base_model.model.").removesuffix(".lora_E")
            result[path] = b @ (a * e) * config["lora_alpha"] / (config["init_r"] + 1e-5)
    return result


def test_a_new_layer_changes_nothing_and_its_update_is_pefts() -> None:
    model = make_model()
    mx.random.seed(0)
    inject_lora(model, CONFIG)
    layer = next(iter(trainer_lora_layers(model).values()))
    assert isinstance(layer, SVDLinear) and float(layer.scale) == 9.0 / (6 + 1e-5)
    assert np.std(np.array(layer.lora_a)) == pytest.approx(0.02, rel=0.2)
    x = mx.random.normal((5, layer.lora_a.shape[0]))
    assert mx.array_equal(layer(x), layer.linear(x)).item()
    layer.lora_e = mx.random.normal(layer.lora_e.shape)
    a, b, e, x64, w = (
        np.array(array, np.float64)
        for array in (layer.lora_a, layer.lora_b, layer.lora_e, x, layer.linear.weight)
    )
    expected = x64 @ w.T + x64 @ (a.T * e[:, None]).T @ b * 9.0 / (6 + 1e-5)
    np.testing.assert_allclose(np.array(layer(x)), expected, rtol=1e-5, atol=1e-5)


def test_the_served_pair_and_the_saved_one_are_the_same_update(tmp_path: Path) -> None:
    """A directory in mlx-lm's format is a LoRA adapter to who knows no singular values; a training
    gets them back to the bit."""
    model = model_with_adapter()
    served = adapter_layers(model)
    assert all(pair.svd is None for pair in served.values())
    save_adapter(tmp_path, adapter_layers(model, factors=True), num_layers=3, adalora={"tinit": 3})
    loaded = load_adapter(tmp_path)
    assert loaded.config["adalora_parameters"] == {"tinit": 3}
    assert loaded.config["fine_tune_type"] == "lora"
    for path, pair in served.items():
        np.testing.assert_array_equal(delta(pair), delta(loaded.layers[path]))
    again = make_model()
    inject_lora(again, CONFIG)
    load_into_trainer(again, loaded.layers)
    for old, new in zip(
        trainer_lora_layers(model).values(), trainer_lora_layers(again).values(), strict=True
    ):
        for name in ("lora_a", "lora_b", "lora_e"):
            assert mx.array_equal(old[name], new[name]).item()


def test_pefts_files_both_ways(tmp_path: Path) -> None:
    """mlx-lm → PEFT's AdaLoRA → PEFT's LoRA and a training: the same update each time, to 1e-6,
    without the pruned triplets."""
    model = model_with_adapter()
    ours = tmp_path / "ours"
    ours.mkdir()
    save_adapter(
        ours,
        adapter_layers(model, factors=True),
        num_layers=3,
        adalora={"target_r": 4, "tinit": 2, "total_step": 50},
    )
    convert(ours, tmp_path / "peft", "peft-adalora")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["init_r"], config["lora_alpha"], config["target_r"]) == (6, 9, 4)
    assert (config["tinit"], config["total_step"]) == (2, 50)
    pattern = config["rank_pattern"]
    first = "model.layers.0.mlp.down_proj.lora_E"
    assert pattern["model.layers.1.self_attn.q_proj.lora_E"] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    facts = describe(tmp_path / "peft")
    assert (facts["kind"], facts["complete"]) == ("AdaLoRA in PEFT's format", True)
    left = sum(sum(kept) for kept in pattern.values())
    assert facts["adapter"]["left"] == f"{left} of {6 * len(pattern)} triplets"
    assert facts["adapter"]["layers"] == len(pattern)
    expected = {path: delta(pair) for path, pair in adapter_layers(model).items()}
    made = pefts_delta(tmp_path / "peft")
    assert made.keys() == expected.keys() and first in pattern
    for path, matrix in expected.items():
        np.testing.assert_allclose(made[path], matrix, atol=1e-6)
    read = load_adapter(tmp_path / "peft").layers
    assert {pair.a.shape[1] for path, pair in read.items() if pair.b.any().item()} == {4}
    for path, pair in read.items():
        np.testing.assert_allclose(delta(pair), expected[path], atol=1e-6)
    convert(tmp_path / "peft", tmp_path / "again", "peft-adalora")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        same = (tmp_path / "again" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes()
        assert same, name
    convert(tmp_path / "peft", tmp_path / "lora", "peft")
    for path, pair in load_adapter(tmp_path / "lora").layers.items():
        np.testing.assert_allclose(delta(pair), expected[path], atol=1e-6)
    training = make_model()
    inject_lora(training, CONFIG.model_copy(update={"alpha": 18.0}))
    load_into_trainer(training, read)
    for path, pair in adapter_layers(training).items():
        assert pair.a.shape[1] == 6, "what was pruned begins anew"
        np.testing.assert_allclose(delta(pair), expected[path], atol=1e-6)


def test_a_layer_of_rank_0_adds_nothing(tmp_path: Path) -> None:
    """PEFT writes arrays without a row for it, and may write `ranknum`."""
    key, arrays = "base_model.model.model.layers.0.self_attn.{}.{}", {}
    for name, rank in (("q_proj", 2), ("k_proj", 0)):
        arrays[key.format(name, "lora_A")] = mx.ones((rank, 32))
        arrays[key.format(name, "lora_E")] = mx.full((rank, 1), 0.5)
        arrays[key.format(name, "lora_B")] = mx.ones((16, rank))
        arrays[key.format(name, "ranknum")] = mx.array([3.0])
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), arrays)
    pattern = {"q_proj": [True, False, True], "k_proj": [False] * 3}
    config = {
        "peft_type": "ADALORA",
        "init_r": 3,
        "r": 8,
        "lora_alpha": 6,
        "rank_pattern": {
            f"model.layers.0.self_attn.{name}.lora_E": kept for name, kept in pattern.items()
        },
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    layers = load_adapter(tmp_path).layers
    empty, pair = (layers[f"model.layers.0.self_attn.{name}"] for name in ("k_proj", "q_proj"))
    assert empty.a.shape == (32, 1) and not delta(empty).any()
    np.testing.assert_allclose(delta(pair), np.ones((16, 32)) * 6 / (3 + 1e-5), rtol=1e-6)
    convert(tmp_path, tmp_path / "lora", "peft")
    assert load_adapter(tmp_path / "lora").layers.keys() == {"model.layers.0.self_attn.q_proj"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_r": 0}, "init_r = 0"),
        ({"lora_alpha": -1}, "lora_alpha = -1"),
        ({"rank_pattern": {"a.lora_E": [True]}}, "a list of 6"),
        ({"init_r": 5, "rank_pattern": None}, "with r = 5"),
        ({"peft_type": "LOHA"}, "only 'LORA' and 'ADALORA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_what_would_be_another_adapter_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = model_with_adapter()
    for layer in trainer_lora_layers(model).values():
        layer.lora_e = mx.ones(layer.lora_e.shape)
    save_adapter(tmp_path, adapter_layers(model, factors=True), num_layers=3)
    convert(tmp_path, tmp_path / "peft", "peft-adalora")
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(AdapterError, match=words):
        load_adapter(tmp_path / "peft")


def test_layers_have_transformers_names_in_pefts_files(tmp_path: Path) -> None:
    """GPT-2's; PEFT found none of mlx-lm's."""
    pair = next(iter(adapter_layers(model_with_adapter(), factors=True).values()))
    folder = tmp_path / "peft"
    folder.mkdir()
    save_adalora(folder, {"model.h.0.attn.c_attn": pair}, dropout=0.0, schedule={})
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["transformer.h.0.attn.c_attn"]
    assert [*load_adapter(folder).layers] == ["transformer.h.0.attn.c_attn"]


def test_kinds_are_not_mixed_up(tmp_path: Path) -> None:
    plain = make_model()
    inject_lora(plain, CONFIG.model_copy(update={"use_adalora": False}))
    with pytest.raises(AdapterError, match="no singular values"):
        load_into_trainer(make_adaptive(), adapter_layers(plain))
    save_adapter(tmp_path, adapter_layers(plain), num_layers=3)
    with pytest.raises(AdapterError, match="take --format peft"):
        convert(tmp_path, tmp_path / "peft", "peft-adalora")
    other = model_with_adapter(target_modules=("q_proj",))
    save_adapter(tmp_path, adapter_layers(other, factors=True), num_layers=3)
    (tmp_path / "adapters.safetensors").unlink()
    mx.save_safetensors(
        str(tmp_path / "adapters.safetensors"),
        {"model.layers.0.mlp.up_proj.lora_a": mx.ones((32, 6))}
        | {"model.layers.0.mlp.up_proj.lora_b": mx.ones((6, 64))},
    )
    with pytest.raises(AdapterError, match="of another adapter"):
        load_adapter(tmp_path)


def test_factors_beside_other_numbers_are_refused(tmp_path: Path) -> None:
    model = model_with_adapter()
    save_adapter(tmp_path, adapter_layers(model, factors=True), num_layers=3)
    file = tmp_path / "adapters.safetensors"
    tensors = mx.load(str(file))
    mx.eval(tensors)
    file.unlink()  # a reader may have it mapped
    moved = {name: a + 1 if name.endswith("lora_b") else a for name, a in tensors.items()}
    mx.save_safetensors(str(file), moved)
    with pytest.raises(AdapterError, match="do not give its lora_b"):
        load_adapter(tmp_path)


def make_adaptive() -> Any:
    model = make_model()
    inject_lora(model, CONFIG)
    return model


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_adalora": True, "use_dora": True}, "use_dora and use_adalora are not combined"),
        ({"use_adalora": True, "rank": 4}, r"target_r \(8\) is above rank \(4\)"),
        ({"adalora": {"tinit": 3}}, "adalora.tinit is read with use_adalora only"),
        ({"enabled": False, "use_adalora": True}, "use_adalora is set"),
        ({"r": 4, "init_r": 4}, "AdaLoRA reads init_r"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoraConfig.model_validate(values)
