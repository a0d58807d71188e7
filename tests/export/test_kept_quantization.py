"""`mlx_parallm convert --keep-quantization`: a GGUF file's own integers and scales, and nothing
rounded."""

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from mlx.utils import tree_flatten

from mlx_parallm.cli.table import main
from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.gguf.from_gguf import convert_gguf
from mlx_parallm.models.gguf.packed import bits_of, pack
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.lora import inject_lora
from tests.export.llama import IDS, MODELS, checkpoint, logprobs, write
from tests.tiny_models import lora_config

KEPT = (Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q4_K)


def quantised(path: Path, target: Path, kinds: dict[str, Type]) -> Path:
    """Copy a file with the matrices whose names contain a key in that type."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(
                key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        wanted = next(
            (kind for part, kind in kinds.items() if part in tensor.name and tensor.data.ndim > 1),
            None,
        )
        data = np.array(tensor.data)
        writer.add_tensor(
            tensor.name, data if wanted is None else gguf.quantize(data, wanted), raw_dtype=wanted
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def mixed(tmp_path: Path, name: str = "llama", *, tied: bool = True) -> Path:
    """Embedding in Q8_0, queries and keys in Q4_0, the way down in Q5_0, the other matrices in
    Q4_1."""
    write(checkpoint(tmp_path / "model", MODELS[name], tied=tied), tmp_path / "model.gguf")
    kinds = {
        "token_embd": Type.Q8_0,
        "attn_q": Type.Q4_0,
        "attn_k": Type.Q4_0,
        "ffn_down": Type.Q5_0,
    }
    router = {"ffn_gate_inp": Type.F32}
    return quantised(
        tmp_path / "model.gguf", tmp_path / "mixed.gguf", router | kinds | {"": Type.Q4_1}
    )


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_every_block_is_the_same_number(kind: Type) -> None:
    """Random bytes in every block, random scales; compared with the reader of the `gguf`
    package."""
    draw = np.random.default_rng(0)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (6 * 512 // numbers, size), dtype=np.uint8)
    for start in (0, 2) if kind in (Type.Q4_1, Type.Q4_K) else (0,):
        scales = draw.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    rows = blocks.reshape(6, -1)
    exact = pack(rows, kind, mx.float32)
    assert exact is not None and exact.bits == bits_of(kind)
    dequantised = mx.dequantize(exact.weight, exact.scales, exact.biases, 32, exact.bits)
    assert np.array_equal(np.array(dequantised), gguf.dequantize(rows, kind))
    assert (pack(rows, kind, mx.float16) is None) == (kind == Type.Q4_K)
    assert pack(rows, kind, mx.bfloat16) is None
    blocks[3, :2] = np.array([np.inf], np.float16).view(np.uint8)
    assert pack(blocks.reshape(6, -1), kind, mx.float32) is None


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("llama", False), ("qwen3_moe", True)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_kept_model_is_the_unpacked_one(
    tmp_path: Path, name: str, tied: bool, dtype: str
) -> None:
    """Bit for bit after dequantising, rows of q and k and experts included; the report counts
    what is unpacked."""
    file = mixed(tmp_path, name, tied=tied)
    report = convert_gguf(file, tmp_path / "kept", dtype=dtype, keep=True)
    convert_gguf(file, tmp_path / "plain", dtype="float32")
    down = "ffn_down_exps" if name == "qwen3_moe" else "ffn_down"
    assert (
        f"unpacked to {dtype}: 2 Q5_0 tensors, blk.0.{down}.weight the first" in report.lines()[-1]
    )
    quantization = json.loads((tmp_path / "kept/config.json").read_text())["quantization"]
    assert (quantization["bits"], quantization["model.embed_tokens"]["bits"]) == (4, 8)
    kept, plain = (
        dict(mx.load(str(tmp_path / part / "model.safetensors"))) for part in ("kept", "plain")
    )
    packed = [tensor for tensor in kept if tensor.endswith(".scales")]
    assert len(packed) == (13 if tied else 14)
    for scales in packed:
        path = scales.removesuffix(".scales")
        parts = [kept[scales].astype(mx.float32), kept[f"{path}.biases"].astype(mx.float32)]
        bits = quantization.get(path, quantization)["bits"]
        assert mx.array_equal(
            mx.dequantize(kept[f"{path}.weight"], *parts, 32, bits), plain[f"{path}.weight"]
        )
    rounding = 1e-4 if dtype == "float32" else 0.1  # of the norms and of what is unpacked
    assert np.abs(logprobs(tmp_path / "kept") - logprobs(tmp_path / "plain")).max() < rounding


def test_a_kept_model_answers_as_the_unpacked_one(tmp_path: Path) -> None:
    file = mixed(tmp_path)
    convert_gguf(file, tmp_path / "kept", dtype="float32", keep=True)
    convert_gguf(file, tmp_path / "plain", dtype="float32")

    def answers(path: Path) -> Any:
        with InferenceModule(
            str(path), config=Config(model=ModelConfig(dtype="float32"))
        ) as module:
            return module.generate([IDS, IDS[:5]], 12, temperature=0.0, return_logits=True)

    kept, plain = answers(tmp_path / "kept"), answers(tmp_path / "plain")
    assert kept.token_ids == plain.token_ids
    for ours, theirs in zip(kept.logits, plain.logits, strict=True):
        assert np.abs(ours - theirs).max() < 1e-4


def test_lora_trains_over_kept_weights(tmp_path: Path) -> None:
    """Steps lower the loss, and the packed base is as it was."""
    convert_gguf(mixed(tmp_path), tmp_path / "kept", dtype="float16", keep=True)
    model = load_model(ModelConfig(base_path=str(tmp_path / "kept"))).model
    before = {name: np.array(array) for name, array in tree_flatten(model.parameters())}
    inject_lora(model, lora_config(4, 8.0))
    ids = mx.array([IDS])

    def loss(model: nn.Module) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")

    optimizer, step = optimizers.Adam(1e-2), nn.value_and_grad(model, loss)
    values = []
    for _ in range(3):
        value, gradients = step(model)
        optimizer.update(model, gradients)
        values.append(value.item())
    assert values[-1] < values[0]
    after = {
        name.replace(".linear.", "."): np.array(array)
        for name, array in tree_flatten(model.parameters())
    }
    assert [name for name, array in before.items() if not np.array_equal(array, after[name])] == []


def test_each_refusal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = mixed(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert (
        main(
            [
                "convert",
                str(file),
                str(tmp_path / "out"),
                "--keep-quantization",
                "--dtype",
                "bfloat16",
            ]
        )
        == 2
    )
    assert "keep them in float16 or float32" in capsys.readouterr().err
    with pytest.raises(ModelError, match="packed"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out", dtype="float16", keep=True)
    assert sorted(tmp_path.iterdir()) == before
    assert main(["convert", str(file), str(tmp_path / "out"), "--keep-quantization"]) == 0
    assert "kept exactly: 12 tensors in 4 bits, 1 tensors in 8 bits" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float16"
