"""Directories that are not complete checkpoint in safetensors: each said in one line, with what
helps."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.models.checkpoint_files import INDEX_FILE, check_quantization
from mlx_parallm.models.loading import check_model, load_model
from tests.tiny_models import QWEN3, make_model, save_checkpoint


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of four files and an index."""
    path = save_checkpoint(tmp_path / "m")
    weights = list(dict(mx.load(str(path / "model.safetensors"))).items())
    (path / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    for i, name in enumerate(names):
        mx.save_safetensors(str(path / name), dict(weights[i::4]))
    index = {key: names[i % 4] for i, (key, _) in enumerate(weights)}
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(ModelConfig(base_path=str(path)))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_sharded_checkpoint_loads(sharded: Path) -> None:
    loaded = load_model(ModelConfig(base_path=str(sharded)))
    expected = dict(tree_flatten(make_model().parameters()))
    assert all(
        mx.array_equal(a, expected[name]) for name, a in tree_flatten(loaded.model.parameters())
    )


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_that_are_missing(sharded: Path, indexed: bool) -> None:
    for number in (2, 3):
        (sharded / f"model-0000{number}-of-00004.safetensors").unlink()
    if not indexed:
        (sharded / INDEX_FILE).unlink()
    text = refusal(sharded)
    assert (
        "lacks 2 of its 4 weight files (model-00002-of-00004.safetensors,"
        " model-00003-of-00004.safetensors)"
    ) in text
    assert f"`hf download OWNER/NAME --local-dir {sharded}`" in text


def test_an_index_that_cannot_be_read(sharded: Path) -> None:
    (sharded / INDEX_FILE).write_text('{"weight_map": 1}')
    assert f"{sharded / INDEX_FILE} cannot be read" in refusal(sharded)


def test_a_link_to_a_file_that_is_gone(sharded: Path) -> None:
    file = sharded / "model-00002-of-00004.safetensors"
    file.unlink()
    file.symlink_to(sharded / "no such blob")
    assert f"{file} cannot be read: No such file or directory; fetch it completely" in refusal(
        sharded
    )


def test_a_file_that_was_cut_short(sharded: Path) -> None:
    file = sharded / "model-00004-of-00004.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 7)
    text = refusal(sharded)
    assert (
        f"{file} is damaged or its download is incomplete: {size - 7:,} of {size:,} bytes are there"
        in text
    )
    file.write_bytes(b"<html>not found</html>")
    assert "it has no safetensors header" in refusal(sharded)


def only(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).write_text("{}")

    return make


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            only("adapter_config.json", "adapters.safetensors"),
            "is an adapter, not a model: set model.lora_path = '{}'",
        ),
        (
            only("adapter_config.json", "adapter_model.safetensors", "config.json"),
            "is an adapter, not a model",
        ),
        (only("model.Q4_K_M.gguf"), "{} holds GGUF, llama.cpp's format: name the file itself"),
        (only("config.json", "pytorch_model-00001-of-00002.bin"), "PyTorch weights only (.bin)"),
        (only(), "{} has no config.json"),
        (only("config.json", "tokenizer.json"), "`hf download OWNER/NAME --local-dir {}`"),
        (only("config.json", "consolidated.safetensors"), "found consolidated.safetensors"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, make: Callable[[Path], None], text: str) -> None:
    path = tmp_path / "m"
    make(path)
    assert text.format(path) in refusal(path)
    with pytest.raises(ModelError):
        check_model(ModelConfig(base_path=str(path)), train=True)


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    assert f"{file} is damaged or cut short" in refusal(file)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ to 4 bits"),
        ({"quant_method": "awq", "bits": 8}, "AWQ to 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ to 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "BITSANDBYTES, which"),
    ],
)
def test_quantisations_that_mlx_lm_does_not_read(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        check_quantization({"quantization_config": settings}, "acme/model", quantize=False)
    assert "`mlx_lm.convert --hf-path OWNER/NAME -q" in str(caught.value)
    with pytest.raises(ModelError, match=text):
        check_quantization(
            {"text_config": {"quantization_config": settings}}, "acme/model", quantize=False
        )


def test_an_awq_checkpoint_in_four_bits_is_what_its_layout_says(tmp_path: Path) -> None:
    """AutoAWQ's "gemm" layout, written here by its definition: columns 0,2,4,6,1,3,5,7 of each
    eight in one word."""
    path = save_checkpoint(tmp_path / "m", dtype=mx.float16)
    stored, expected = {}, {}
    for name, weight in dict(mx.load(str(path / "model.safetensors"))).items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        prefix, (out, width) = name.removesuffix(".weight"), weight.shape
        levels = mx.random.randint(0, 16, (width, out), key=mx.random.key(len(stored)))
        zeros = mx.random.randint(0, 16, (width // 64, out), key=mx.random.key(len(stored) + 1))
        scales = mx.random.uniform(0.01, 0.02, (width // 64, out), key=mx.random.key(2)).astype(
            mx.float16
        )
        stored |= {
            f"{prefix}.qweight": pack(levels),
            f"{prefix}.qzeros": pack(zeros),
            f"{prefix}.scales": scales,
        }
        wide = [mx.repeat(array.astype(mx.float32), 64, axis=0) for array in (zeros, scales)]
        expected[prefix] = ((levels.astype(mx.float32) - wide[0]) * wide[1]).T
    mx.save_safetensors(str(path / "model.safetensors"), stored)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    (path / "config.json").write_text(json.dumps(QWEN3 | {"quantization_config": settings}))
    modules = dict(load_model(ModelConfig(base_path=str(path))).model.named_modules())
    for prefix, weight in expected.items():
        layer = modules[prefix]
        got = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=64, bits=4)
        assert mx.allclose(got, weight, atol=2e-3), prefix


def pack(levels: mx.array) -> mx.array:
    columns = levels.reshape(levels.shape[0], -1, 8)[
        ..., mx.array([0, 2, 4, 6, 1, 3, 5, 7])
    ].astype(mx.uint32)
    return (
        (columns << (4 * mx.arange(8, dtype=mx.uint32)))
        .sum(axis=-1)
        .astype(mx.uint32)
        .view(mx.int32)
    )
