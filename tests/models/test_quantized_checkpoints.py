"""Quantised checkpoints: read to the number that their layout means, worked out in numpy, or
refused by the name of their format."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.models.checkpoint_files import check_quantization
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.logprobs import token_logprobs
from scripts.parity.fp8 import stored_tensors
from scripts.parity.weights import write_safetensors
from tests.tiny_models import QWEN3, save_checkpoint

Stored = dict[str, tuple[str, np.ndarray]]
BESIDE = json.loads((Path(__file__).parents[1] / "data" / "fp8.json").read_text())
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LATENT = QWEN3 | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "tie_word_embeddings": False,
}


def fp8(codes: np.ndarray) -> np.ndarray:
    """E4M3: sign, four bits of exponent with bias 7, three of fraction."""
    sign, power, part = np.where(codes & 128, -1.0, 1.0), (codes >> 3) & 15, codes & 7
    return sign * np.where(power, (1 + part / 8) * 2.0 ** (power - 7.0), part / 8 * 2.0**-6)


def packed(levels: np.ndarray, bits: int) -> np.ndarray:
    """Rows of levels as MLX packs them: little-endian bits in words of 32."""
    digits = (levels[..., None] >> np.arange(bits)) & 1
    rows = np.packbits(digits.reshape(len(levels), -1).astype(np.uint8), axis=1, bitorder="little")
    return rows.view("<u4")


def of_layer(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int, mode: str
) -> tuple[dict[str, tuple[str, np.ndarray]], np.ndarray]:
    """The arrays of a layer in one of MLX's modes, and the weights that they mean."""
    out, width = shape
    groups = (out, width // group)
    levels = rng.integers(0, 1 << bits, shape)
    if mode == "mxfp8":
        levels = rng.integers(0, 120, shape)  # no NaN
    if mode == "affine":
        scales, biases = (rng.uniform(-0.05, 0.05, groups).astype("f4") for _ in range(2))
        wide = [np.repeat(each, group, axis=1) for each in (scales, biases)]
        arrays = {"scales": ("F32", scales), "biases": ("F32", biases)}
        meant = levels * wide[0] + wide[1]
    elif mode == "nvfp4":
        scales = rng.integers(30, 60, groups).astype("u1")
        arrays, meant = {"scales": ("U8", scales)}, FP4[levels]
        meant = meant * np.repeat(fp8(scales), group, axis=1)
    else:
        scales = rng.integers(118, 126, groups).astype("u1")
        values = FP4[levels] if mode == "mxfp4" else fp8(levels)
        arrays = {"scales": ("U8", scales)}
        meant = values * np.repeat(2.0 ** (scales.astype(float) - 127), group, axis=1)
    return {"weight": ("U32", packed(levels, bits)), **arrays}, meant


def rewritten(
    path: Path,
    change: Callable[[str, np.ndarray], Stored],
    config: Mapping[str, Any],
    base: Mapping[str, Any] = QWEN3,
) -> Path:
    """A tiny checkpoint whose projections have been changed, with more keys in config.json."""
    save_checkpoint(path, dict(base))
    stored: Stored = {}
    for name, array in dict(mx.load(str(path / "model.safetensors"))).items():
        numbers = np.array(array)
        projection = name.endswith("proj.weight")
        stored |= change(name, numbers) if projection else {name: ("F32", numbers)}
    write_safetensors(path / "model.safetensors", stored)
    (path / "config.json").write_text(json.dumps({**base, **config}))
    return path


@pytest.mark.usefixtures("informative_logs")
def test_each_layer_has_its_own_bits_and_mode(tmp_path: Path) -> None:
    """An MLX checkpoint of mixed bits, modes and skipped layers; one layer is in no list, and its
    shapes tell how it is packed. A name that is not a layer's is told."""
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.self_attn."
    kinds: dict[str, tuple[int, int, str] | None] = {
        prefix + "q_proj": (8, 32, "affine"),
        prefix + "k_proj": (4, 32, "mxfp4"),
        prefix + "v_proj": (4, 16, "nvfp4"),
        prefix + "o_proj": (8, 32, "mxfp8"),
        "model.layers.0.mlp.gate_proj": (2, 64, "affine"),
        "model.layers.0.mlp.up_proj": (3, 32, "affine"),
        "model.layers.0.mlp.down_proj": (6, 128, "affine"),
        "model.layers.1.mlp.down_proj": (5, 64, "affine"),
        "model.layers.1.mlp.up_proj": None,
    }
    unlisted = "model.layers.1.mlp.gate_proj"
    meant: dict[str, np.ndarray] = {}

    def change(name: str, numbers: np.ndarray) -> Stored:
        path = name.removesuffix(".weight")
        kind = (8, 64, "affine") if path == unlisted else kinds.get(path, (4, 64, "affine"))
        if kind is None:
            meant[path] = numbers
            return {name: ("F32", numbers)}
        arrays, meant[path] = of_layer(rng, numbers.shape, *kind)
        return {f"{path}.{part}": array for part, array in arrays.items()}

    entry: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    entry |= {
        path: False
        if kind is None
        else dict(zip(("bits", "group_size", "mode"), kind, strict=True))
        for path, kind in kinds.items()
    }
    entry["model.layers.0.self_attn.qkv_proj"] = {"bits": 8, "group_size": 32}
    path = rewritten(tmp_path / "m", change, {"quantization": entry, "quantization_config": entry})
    with capture_logs() as logs:
        loaded = load_model(ModelConfig(base_path=str(path)))
    modules = dict(loaded.model.named_modules())
    [told] = [entry for entry in logs if "layers" in entry]
    assert told["log_level"] == "warning"
    assert told["layers"] == "model.layers.0.self_attn.qkv_proj"
    assert len(meant) == 14
    for name, weights in meant.items():
        layer = modules[name]
        x = rng.normal(size=(3, weights.shape[1])).astype("f4")
        expected = x @ weights.T
        assert np.allclose(np.array(layer(mx.array(x))), expected, rtol=1e-4, atol=1e-4), name
        if name != "model.layers.1.mlp.up_proj":
            kind = kinds.get(name) or ((8, 64, "affine") if name == unlisted else (4, 64, "affine"))
            assert (layer.bits, layer.group_size, layer.mode) == kind, name


MINISTRAL = QWEN3 | {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16384,
    },
}


@pytest.mark.parametrize("base", [LATENT, QWEN3, MINISTRAL], ids=lambda base: base["model_type"])
@pytest.mark.parametrize(
    ("block", "form"),
    [((128, 128), "F32"), ((64, 32), "F32"), ((128, 128), "F8_E8M0"), (None, "F32")],
)
def test_fp8(
    block: tuple[int, int] | None, form: str, base: dict[str, Any], tmp_path: Path
) -> None:
    """E4M3 times one factor for each block, which may be a bare exponent; without blocks one of the
    whole, and Mistral's scale of activations beside it, which says nothing of the weights."""
    rng, meant = np.random.default_rng(1), {}

    def change(name: str, numbers: np.ndarray) -> Stored:
        codes = rng.integers(0, 100, numbers.shape).astype("u1")
        rows, columns = block or (numbers.shape[0], numbers.shape[1])
        blocks = (-(-numbers.shape[0] // rows), -(-numbers.shape[1] // columns))
        factors = rng.choice([0.25, 0.5, 2.0], blocks).astype("f4")
        wide = np.repeat(np.repeat(factors, rows, 0), columns, 1)[: len(codes), : codes.shape[1]]
        meant[name.removesuffix(".weight")] = fp8(codes) * wide
        one = (
            {}
            if block
            else {name.replace("weight", "activation_scale"): ("F32", np.ones((), "f4"))}
        )
        scale = factors if block else factors.reshape(())
        if form == "F8_E8M0":
            scale = (scale.view("u4") >> 23).astype("u1")
        return {name: ("F8_E4M3", codes), f"{name}_scale_inv": (form, scale), **one}

    settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": block}
    config = {"quantization_config": settings}
    base = base | {"intermediate_size": 192}
    path = rewritten(tmp_path / "m", change, config, base)
    modules = dict(load_model(ModelConfig(base_path=str(path))).model.named_modules())
    compared = 0
    for name, weights in meant.items():
        if name in modules:  # kv_b_proj becomes two
            assert np.array_equal(np.array(modules[name].weight.astype(mx.float32)), weights), name
            compared += 1
    assert compared > 6


@pytest.mark.parametrize("case", BESIDE, ids=lambda case: case["option"])
def test_fp8_computes_what_transformers_computes(case: dict[str, Any], tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", stored_tensors(case))
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    model = load_model(ModelConfig(base_path=str(tmp_path), dtype="float32")).model
    ids = mx.array(case["ids"])[None]
    found = np.array(token_logprobs(model(ids)[0, :-1], ids[0, 1:]))
    assert np.abs(found - case["logprobs"]).max() <= 2e-5


@pytest.mark.parametrize(("group", "version"), [(32, "gemm"), (64, "GEMM"), (-1, "gemm")])
def test_awq_is_read_exactly(
    group: int, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels minus their group's zero point, times its scale in float16; eight to a word, in AWQ's
    own order, [in, out]. Layers that were left out are as they are. -1: one group a row."""
    rng, meant = np.random.default_rng(3), {}

    def pack(levels: np.ndarray) -> np.ndarray:
        digits = levels.reshape(len(levels), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].astype("u4")
        return (digits << np.arange(0, 32, 4, dtype="u4")).sum(axis=-1, dtype="u4")

    def change(name: str, numbers: np.ndarray) -> Stored:
        path = name.removesuffix(".weight")
        if "gate_proj" in path:
            meant[path] = numbers
            return {name: ("F32", numbers)}
        out, width = numbers.shape
        size = width if group == -1 else group
        levels = rng.integers(0, 16, (width, out))
        zeros = rng.integers(0, 16, (width // size, out))
        scales = rng.uniform(0.001, 0.05, zeros.shape).astype("f2")
        wide = [np.repeat(each, size, axis=0) for each in (zeros, scales.astype("f8"))]
        meant[path] = ((levels - wide[0]) * wide[1]).T
        return {
            f"{path}.qweight": ("I32", pack(levels)),
            f"{path}.qzeros": ("I32", pack(zeros)),
            f"{path}.scales": ("F16", scales),
        }

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": version}
    settings["modules_to_not_convert"] = ["gate_proj"]
    config = {"quantization_config": settings}
    path = rewritten(tmp_path / "m", change, config, QWEN3 | {"intermediate_size": 64})
    model = load_model(ModelConfig(base_path=str(path), dtype="float32")).model
    modules = dict(model.named_modules())
    monkeypatch.setattr("mlx_parallm.system.device.traits.is_cpu", lambda: False)  # "auto" on a GPU
    as_it_is = load_model(ModelConfig(base_path=str(path))).model
    assert as_it_is.layers[0].self_attn.q_proj.scales.dtype == mx.float16
    assert len(meant) == 14
    for name, weights in meant.items():
        got = np.array(modules[name](mx.eye(weights.shape[1]))).T
        bound = 5e-4 if "gate_proj" in name else 2e-7  # the rest is float16 then
        assert np.abs(got - weights).max() <= bound * np.abs(weights).max(), name


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Blocks of 32 numbers, two to a byte, the lower half first; rows of gate and up in turns."""
    rng, meant = np.random.default_rng(2), {}
    base = QWEN3 | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    }
    path = save_checkpoint(tmp_path / "m", base)
    stored: Stored = {}
    for name, array in dict(mx.load(str(path / "model.safetensors"))).items():
        expert = name.rpartition(".experts.")[2]
        if expert in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
            prefix = name.removesuffix(".weight")
            count, out, width = array.shape
            levels = rng.integers(0, 16, (count, out, width // 32, 32))
            scales = rng.integers(118, 126, (count, out, width // 32)).astype("u1")
            values = FP4[levels] * 2.0 ** (scales[..., None].astype(float) - 127)
            meant[prefix] = values.reshape(count, out, width)
            halves = (levels[..., ::2] | levels[..., 1::2] << 4).astype("u1")
            stored |= {f"{prefix}_blocks": ("U8", halves), f"{prefix}_scales": ("U8", scales)}
        else:
            name = name.replace("gate_proj.bias", "gate_proj_bias")
            name = name.replace("up_proj.bias", "up_proj_bias")
            stored[name.replace("down_proj.bias", "down_proj_bias")] = ("F32", np.array(array))
    for name in [name for name in stored if "experts.gate_proj" in name]:
        gate, up = (stored.pop(each)[1] for each in (name, name.replace("gate_", "up_")))
        rows = np.stack([gate, up], 2).reshape(len(gate), -1, *gate.shape[2:])
        stored[name.replace("gate_proj", "gate_up_proj")] = (
            "U8" if gate.dtype == "u1" else "F32",
            rows,
        )
    write_safetensors(path / "model.safetensors", stored)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(base | {"quantization_config": settings}))
    modules = dict(load_model(ModelConfig(base_path=str(path))).model.named_modules())
    assert len(meant) == 6
    for name, weights in meant.items():
        layer = modules[name]
        got = mx.dequantize(layer.weight, layer.scales, None, group_size=32, bits=4, mode="mxfp4")
        assert np.array_equal(np.array(got.astype(mx.float32)), weights), name


def plain(name: str, numbers: np.ndarray) -> Stored:
    return {name: ("F32", numbers)}


def eight_bits(*scales: str) -> Callable[[str, np.ndarray], Stored]:
    def change(name: str, numbers: np.ndarray) -> Stored:
        codes = np.full(numbers.shape, 56, "u1")
        one = np.ones((1, 1), "f4")
        return {name: ("F8_E4M3", codes), **{f"{name}{scale}": ("F32", one) for scale in scales}}

    return change


def blocks(name: str, numbers: np.ndarray) -> Stored:
    out, width = numbers.shape
    path = name.removesuffix(".weight")
    return {
        f"{path}_blocks": ("U8", np.zeros((out, width // 32, 16), "u1")),
        f"{path}_scales": ("U8", np.zeros((out, width // 32), "u1")),
    }


INTEGERS = {"num_bits": 4, "symmetric": True, "group_size": 32}


@pytest.mark.parametrize(
    ("settings", "change", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, plain, "GPTQ to 4 bits"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, plain, "AWQ to 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, plain, "BITSANDBYTES"),
        ({"quant_method": "fbgemm_fp8"}, eight_bits("_scale"), "FBGEMM_FP8"),
        ({"quant_method": "quark"}, eight_bits(), "QUARK"),
        ({"quant_method": "auto-round", "bits": 4}, plain, "AUTO-ROUND to 4 bits"),
        ({"quant_method": "of tomorrow"}, plain, "OF TOMORROW"),
        ({"bits": 4, "group_size": 64}, plain, "quantization_config without quant_method"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            eight_bits("_scale"),
            "COMPRESSED-TENSORS as float-quantized",
        ),
        *(
            (
                {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                    "config_groups": {"group_0": {"weights": INTEGERS | changed}},
                },
                plain,
                "COMPRESSED-TENSORS as pack-quantized",
            )
            for changed in ({"num_bits": 8}, {"symmetric": False})
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            eight_bits("_scale"),
            "MODELOPT as FP8",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
            lambda name, numbers: {
                name: ("F8_E4M3", np.full(numbers.shape, 56, "u1")),
                f"{name}_scale_inv": ("F32", np.ones((2, 3), "f4")),
            },
            r"FP8, which .*_scale_inv is \[2, 3\]; blocks of \(16, 16\) need",
        ),
        ({"quant_method": "fp8"}, eight_bits(), "holds uint8 numbers without scales"),
        ({"quant_method": "mxfp4"}, blocks, "MXFP4, which mlx-lm does not read for qwen3"),
        (None, eight_bits(), "holds uint8 numbers without scales"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    settings: Any, change: Callable[[str, np.ndarray], Stored], text: str, tmp_path: Path
) -> None:
    config = {} if settings is None else {"quantization_config": settings}
    path = rewritten(tmp_path / "m", change, config)
    with pytest.raises(ModelError, match=text) as caught:
        load_model(ModelConfig(base_path=str(path)))
    assert "\n" not in str(caught.value) and "use the checkpoint that it was" in str(caught.value)


def test_modelopts_own_file(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "m", eight_bits("_scale"), {})
    file = path / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ModelError, match="MODELOPT as FP8"):
        load_model(ModelConfig(base_path=str(path)))
    file.write_text("{")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        load_model(ModelConfig(base_path=str(path)))


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    for settings in ({"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32, "mode": "mxfp8"}):
        with pytest.raises(ConfigError, match=f"already quantised \\({settings['bits']} bits"):
            check_quantization({"quantization": settings}, "acme/model", quantize=True)
