"""`mlx_parallm convert MODEL.gguf OUT`: every architecture that is exported comes back; damage
is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlx_parallm.cli.table import main
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.deploy.export.texts import texts
from mlx_parallm.errors import ModelError
from mlx_parallm.models.gguf.from_gguf import convert_gguf, llama3_scaling
from mlx_parallm.models.loading import load_tokenizer
from tests.export.llama import LLAMA, MODELS, checkpoint, logprobs, write

CONFIG_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
FURTHER_KEYS = (
    "intermediate_size",
    "rope_theta",
    "rms_norm_eps",
    "vocab_size",
    "tie_word_embeddings",
    "rope_scaling",
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back(tmp_path: Path, name: str, tied: bool) -> None:
    """Tensors, configuration, log-probabilities and ids; "mistral" comes back as the llama that
    it computes."""
    model = checkpoint(tmp_path / "model", MODELS[name], tied=tied)
    write(model, tmp_path / "model.gguf")
    report = convert_gguf(tmp_path / "model.gguf", tmp_path / "back", dtype="float32")
    before, after = load_model(model)[0].args, load_model(tmp_path / "back")[0].args
    for key in (*CONFIG_KEYS, *FURTHER_KEYS):
        if hasattr(before, key) and key != "head_dim":
            assert getattr(after, key) == getattr(before, key), key
    assert report.model_type == ("llama" if name == "mistral" else MODELS[name]["model_type"])
    assert np.abs(logprobs(tmp_path / "back") - logprobs(model)).max() < 1e-4
    if name == "llama":
        old, new = (
            load_tokenizer(path, ModelConfig(base_path=str(path)))
            for path in (model, tmp_path / "back")
        )
        assert [new.encode(text) for text in texts()] == [old.encode(text) for text in texts()]
        assert new.chat_template == old.chat_template
        assert new.eos_token_ids == old.eos_token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_the_weights(tmp_path: Path, dtype: str) -> None:
    write(checkpoint(tmp_path / "model", LLAMA), tmp_path / "model.gguf", "q8_0")
    report = convert_gguf(tmp_path / "model.gguf", tmp_path / "back", dtype=dtype)
    weights = mx.load(str(tmp_path / "back" / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {getattr(mx, dtype)}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == dtype
    assert "Q8_0" in report.types


def test_llama_3s_scaling_follows_from_its_divisors() -> None:
    """Llama 3.1's own numbers: factor 8, low 1, high 4, 8192; divisors by the formula of
    transformers, by hand."""
    frequencies = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    divisors = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    found = llama3_scaling(np.array(divisors, np.float32), {"rope_theta": 500000.0})
    assert found == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ModelError, match="Llama 3"):
        llama3_scaling(np.linspace(1, 8, 64).astype(np.float32), {"rope_theta": 500000.0})


def cut(path: Path, target: Path) -> None:
    target.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def big_endian(path: Path, target: Path) -> None:
    data = path.read_bytes()
    target.write_bytes(data[:4] + (3).to_bytes(4, "big") + data[8:])


def other(path: Path, target: Path) -> None:
    target.write_bytes(b"PK\3\4" + path.read_bytes()[4:])


def rewritten(**changes: Any) -> Callable[[Path, Path], None]:
    """Return what copies a file with other keys: a value, or None to leave the key out; `drop`
    names a tensor."""
    dropped = changes.pop("drop", None)

    def rewrite(path: Path, target: Path) -> None:
        reader = gguf.GGUFReader(path)
        architecture = changes.get("general_architecture", "llama")
        writer = gguf.GGUFWriter(target, architecture)
        done = {"general.architecture", *(key.replace("__", ".") for key in changes)}
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key not in done:
                kind = field.types[0]
                writer.add_key_value(
                    key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None
                )
        for key, value in changes.items():
            if value is not None and key != "general_architecture":
                kind = (
                    gguf.GGUFValueType.STRING
                    if isinstance(value, str)
                    else gguf.GGUFValueType.UINT32
                )
                writer.add_key_value(key.replace("__", "."), value, kind)
        for tensor in reader.tensors:
            if tensor.name != dropped:
                writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return rewrite


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "damaged or cut short"),
        (big_endian, "big-endian"),
        (other, "does not begin with GGUF"),
        (rewritten(general_architecture="rwkv7"), "architecture 'rwkv7' is not read: only gemma3"),
        (rewritten(split__count=3), "one of 3 parts"),
        (rewritten(general__type="adapter"), "no model but a adapter"),
        (rewritten(general__type="mmproj"), "no model but a mmproj"),
        (
            rewritten(llama__attention__temperature_length=4),
            "llama.attention.temperature_length is not understood",
        ),
        (rewritten(llama__rope__scaling__type="yarn"), "'yarn' is not read"),
        (rewritten(llama__rope__dimension_count=8), "rope.dimension_count"),
        (rewritten(llama__block_count=None), "has no llama.block_count"),
        (rewritten(tokenizer__ggml__pre="hunyuan"), "'hunyuan' splits a text is not known"),
        (rewritten(tokenizer__ggml__model="bert"), "'bert' is not read"),
        (
            rewritten(tokenizer__ggml__eos_token_id=None, tokenizer__ggml__eot_token_id=None),
            "has no tokenizer.ggml.eos_token_id",
        ),
        (rewritten(tokenizer__ggml__precompiled=1), "tokenizer.ggml.precompiled is not understood"),
        (rewritten(tokenizer__ggml__eos_token_id=99999), "a special token is 99999"),
        (rewritten(llama__attention__head_count=0), "make no model"),
        (rewritten(llama__embedding_length=48), "has shape"),
        (
            rewritten(drop="blk.1.ffn_up.weight"),
            "1 tensors of llama are missing, blk.1.ffn_up.weight",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path, Path], None],
    message: str,
) -> None:
    """One line, exit code 2, nothing left behind."""
    write(checkpoint(tmp_path / "model", LLAMA), tmp_path / "model.gguf")
    bad = tmp_path / "bad.gguf"
    change(tmp_path / "model.gguf", bad)
    before = sorted(tmp_path.iterdir())
    assert main(["convert", str(bad), str(tmp_path / "back")]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (float("nan"), "output_norm.weight has numbers that are not finite"),
        (1e6, "in mlx.core.float16: choose --dtype"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    tmp_path: Path, number: float, message: str
) -> None:
    """In the file, or only in the dtype that was chosen: 1e6 is infinite in float16, and fits
    bfloat16."""
    write(checkpoint(tmp_path / "model", LLAMA), tmp_path / "model.gguf")
    norm = next(
        t
        for t in gguf.GGUFReader(tmp_path / "model.gguf", "r+").tensors
        if t.name == "output_norm.weight"
    )
    norm.data[3] = number
    norm.data.base.flush()
    with pytest.raises(ModelError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "back", dtype="float16")
    assert not (tmp_path / "back").exists()
    if np.isfinite(number):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "back", dtype="bfloat16")


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "back").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "back")
