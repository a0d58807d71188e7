"""`mlx_parallm_convert_adapter`: every format into every other, bit for bit."""

import itertools
import json
from pathlib import Path
from subprocess import CompletedProcess

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters

from mlx_parallm import cli
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.deploy.convert_adapter import convert
from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.peft import peft_config, peft_tensors
from mlx_parallm.models.lora import adapter_layers, load_adapter, save_adapter
from tests.models.test_dora import TOKENS, trained
from tests.runs.commands import call
from tests.tiny_models import lora_config, make_model, save_checkpoint

FORMATS = ("npz", "mlx-lm", "peft")
FILES = {
    "npz": "adapters.npz",
    "mlx-lm": "adapters.safetensors",
    "peft": "adapter_model.safetensors",
}


def adapter(directory: Path, spec: LoraConfig) -> Path:
    directory.mkdir(parents=True)
    save_adapter(
        directory,
        adapter_layers(trained(make_model(), spec)),
        num_layers=2,
        dropout=0.05,
        base="some/base",
    )
    return directory


def assert_same(one: Path, two: Path) -> None:
    a, b = load_adapter(one, as_stored=True).layers, load_adapter(two, as_stored=True).layers
    assert a.keys() == b.keys()
    for path, pair in a.items():
        assert pair.scale == b[path].scale and len(pair.arrays) == len(b[path].arrays)
        for x, y in zip(pair.arrays, b[path].arrays, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape and mx.array_equal(x, y).item()


@pytest.mark.parametrize(
    "spec",
    [lora_config(4, 8), lora_config(3, 8, dora=True), lora_config(6, 7.5, rslora=True)],
    ids=["lora", "dora", "rslora"],
)
def test_every_way_there_and_back_is_exact(spec: LoraConfig, tmp_path: Path) -> None:
    source = adapter(tmp_path / "source", spec)
    for first, second in itertools.product(FORMATS, FORMATS):
        there, back = tmp_path / f"{first}", tmp_path / f"{first}-{second}"
        if not there.exists():
            assert convert(source, there, first).layers == 14
            assert sorted(file.name for file in there.iterdir()) == sorted(
                [FILES[first], "adapter_config.json"]
            )
            assert_same(source, there)
        convert(there, back, second)
        assert_same(source, back)
        config = json.loads((back / "adapter_config.json").read_text())
        assert config.get("lora_dropout", config.get("lora_parameters", {}).get("dropout")) == 0.05
        assert config.get("base_model_name_or_path", config.get("model")) == "some/base", (
            "it was null in PEFT's"
        )
    model = load_adapters(make_model(), str(tmp_path / "peft-mlx-lm"))
    model.eval()  # its dropout
    assert mx.allclose(model(TOKENS), trained(make_model(), spec)(TOKENS), rtol=1e-4, atol=1e-3)


def test_pefts_own_fields(tmp_path: Path) -> None:
    """As PEFT 0.19 would write them: shapes, names, alpha; numpy reads npz."""
    source = adapter(tmp_path / "source", lora_config(8, 32, ("q_proj",), rslora=True, dora=True))
    convert(source, tmp_path / "peft", "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 8 and config["bias"] == "none"
    assert (config["use_rslora"], config["lora_alpha"], config["use_dora"]) == (True, 32.0, True)
    assert config["target_modules"] == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    tensors = mx.load(str(tmp_path / "peft" / "adapter_model.safetensors"))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A.weight": (8, 64), "lora_B.weight": (64, 8), "lora_magnitude_vector": (64,)}
    assert {key: tensors[f"{name}.{key}"].shape for key in shapes} == shapes and len(tensors) == 6
    pair = load_adapter(source).layers["model.layers.0.self_attn.q_proj"]
    np.testing.assert_array_equal(np.array(tensors[f"{name}.lora_A.weight"]), np.array(pair.a).T)
    convert(source, tmp_path / "npz", "npz")
    with np.load(tmp_path / "npz" / "adapters.npz") as arrays:
        np.testing.assert_array_equal(
            arrays["model.layers.0.self_attn.q_proj.lora_a"], np.array(pair.a)
        )


UNREACHABLE = 1.9999999999999991  # no float divided by 7, or by √7, gives it


def near(number: float) -> list[float]:
    return [number * (1 + i * 2.0**-53) for i in range(-16, 17)]


def pairs(*ranks_and_scales: tuple[int, float]) -> dict[str, LoraPair]:
    return {
        f"model.layers.{i}.mlp.up_proj": LoraPair(mx.ones((4, rank)), mx.ones((rank, 5)), scale)
        for i, (rank, scale) in enumerate(ranks_and_scales)
    }


def write_peft(directory: Path, layers: dict[str, LoraPair], dtype: mx.Dtype = mx.float32) -> Path:
    directory.mkdir()
    tensors = {name: array.astype(dtype) for name, array in peft_tensors(layers).items()}
    mx.save_safetensors(str(directory / "adapter_model.safetensors"), tensors)
    (directory / "adapter_config.json").write_text(json.dumps(peft_config(layers, dropout=0.0)))
    return directory


def test_layers_of_several_ranks_are_pefts_only(tmp_path: Path) -> None:
    source = write_peft(tmp_path / "source", pairs((2, 1.5), (4, 0.5), (2, 2.0)))
    convert(source, tmp_path / "again", "peft")
    assert_same(source, tmp_path / "again")
    for layout in ("mlx-lm", "npz"):
        with pytest.raises(AdapterError, match="rank and scale"):
            convert(source, tmp_path / layout, layout)
        assert not (tmp_path / layout).exists()


def test_gpt2s_layers_have_mlx_lms_names_in_its_format(tmp_path: Path) -> None:
    """PEFT's have transformers' names, under which mlx-lm's loader finds no layer."""
    shape = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 32}
    shape |= {"n_ctx": 32, "vocab_size": 64, "layer_norm_epsilon": 1e-5}
    base = save_checkpoint(tmp_path / "base", shape)
    layers = {"transformer.h.0.attn.c_attn": LoraPair(mx.ones((32, 4)), mx.ones((4, 96)), 2.0)}
    source = write_peft(tmp_path / "source", layers)
    settings = json.loads((source / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": str(base)}
    (source / "adapter_config.json").write_text(json.dumps(settings))
    for layout in ("mlx-lm", "npz"):
        convert(source, tmp_path / layout, layout)
        assert [*load_adapter(tmp_path / layout, as_stored=True).layers] == [
            "model.h.0.attn.c_attn"
        ]
    model = load_adapters(make_model(shape), str(tmp_path / "mlx-lm"))
    assert mx.array_equal(model.model.h[0].attn.c_attn.lora_b, mx.ones((4, 96))).item()


def test_a_factor_that_no_alpha_gives_is_refused() -> None:
    assert not any(alpha / 7 == UNREACHABLE for alpha in near(14.0)), (
        "14 and its neighbours, as floats divide"
    )
    config = peft_config(pairs((3, 1.0)), dropout=0.0)
    assert (config["lora_alpha"], config["use_rslora"]) == (3.0, False)
    with pytest.raises(AdapterError, match="lora_alpha"):
        peft_config(pairs((7, UNREACHABLE)), dropout=0.0)
    mixed = pairs((2, 1.0)) | {"x": LoraPair(mx.ones((4, 2)), mx.ones((2, 5)), 1.0, mx.ones((5,)))}
    with pytest.raises(AdapterError, match="use_dora"):
        peft_config(mixed, dropout=0.0)


def test_half_precision_stays_where_the_format_has_it(tmp_path: Path) -> None:
    source = write_peft(tmp_path / "source", pairs((2, 1.0)), mx.bfloat16)
    convert(source, tmp_path / "mlx", "mlx-lm")
    assert_same(source, tmp_path / "mlx")
    convert(source, tmp_path / "npz", "npz")
    assert {array.dtype for array in mx.load(str(tmp_path / "npz" / "adapters.npz")).values()} == {
        mx.float32
    }
    assert all(
        pair.a.dtype == mx.float32 for pair in load_adapter(tmp_path / "mlx").layers.values()
    )


def run(*arguments: object) -> CompletedProcess[str]:
    return call(cli.convert_adapter, *arguments)


def test_as_a_command_it_never_writes_over_anything(tmp_path: Path) -> None:
    source = adapter(tmp_path / "source", lora_config(2, 4, ("q_proj",)))
    target = tmp_path / "new" / "peft"
    done = run(source, target, "--format", "peft")
    assert (done.returncode, done.stdout) == (0, f"{target}: 2 LoRA layers in peft's format\n"), (
        done.stderr
    )
    assert_same(source, target)
    again = run(source, target, "--format", "npz")
    assert again.returncode == 2
    assert (
        again.stderr
        == f"error: {target} exists already: choose another name, or pass --overwrite\n"
    )
    assert run(source, target, "--format", "npz", "--overwrite").returncode == 0
    assert sorted(file.name for file in target.iterdir()) == ["adapter_config.json", "adapters.npz"]
    assert sorted(file.name for file in target.parent.iterdir()) == ["peft"], (
        "nothing temporary is left"
    )


def test_what_is_no_adapter_is_never_replaced(tmp_path: Path) -> None:
    source = adapter(tmp_path / "source", lora_config(2, 4, ("q_proj",)))
    (mine := tmp_path / "mine").mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(AdapterError, match="directory"):
        convert(source, mine, "npz", overwrite=True)
    (source / "optimizer.safetensors").write_text(
        "of a checkpoint, which is an adapter's directory too"
    )
    with pytest.raises(AdapterError, match=r"optimizer\.safetensors"):
        convert(source, source, "peft", overwrite=True)
    assert len(list(source.iterdir())) == 3


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    source = adapter(tmp_path / "source", lora_config(2, 4, ("q_proj",)))
    with pytest.raises(AdapterError, match="no adapter at "):
        convert(tmp_path / "nothing", tmp_path / "x", "npz")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/x"):
        convert(source, tmp_path / "file" / "x", "npz")
    config = json.loads((source / "adapter_config.json").read_text()) | {
        "num_layers": None,
        "lora_dropout": None,
    }
    (source / "adapter_config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "x", "mlx-lm")
    assert json.loads((tmp_path / "x" / "adapter_config.json").read_text())["num_layers"] == -1
