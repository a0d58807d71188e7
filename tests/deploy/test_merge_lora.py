"""mlx_parallm_merge_lora: what it writes is what base + adapter compute, reloaded by plain
mlx-lm."""

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from mlx_parallm import cli
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.errors import AdapterError, ModelError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import load_model as load_base
from mlx_parallm.models.lora import (
    adapter_layers,
    inject_lora,
    load_into_trainer,
    save_adapter,
)
from tests.models.published.test_parity import cases, write
from tests.models.test_dora import trained
from tests.runs.commands import call
from tests.scripted_http import scripted_http
from tests.scripted_hub import Hub
from tests.tiny_models import QWEN3, TINY_ASSETS, lora_config, save_checkpoint

BIN = Path(sys.executable).parent
TOKENS = mx.array([[5, 17, 250, 33, 8, 90, 121, 64, 2, 300, 41, 77]])
REPOSITORY = "https://huggingface.co/someone/model"
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of all linear layers whose B is not zero, in mlx-lm's format."""
    directory = tmp_path_factory.mktemp("adapter")
    model, _ = load_model(TINY_ASSETS)
    mx.random.seed(1)
    inject_lora(model, lora_config(rank=4, alpha=8))
    layers = {
        path: LoraPair(pair.a, mx.random.normal(pair.b.shape) * 0.1, pair.scale)
        for path, pair in adapter_layers(model).items()
    }
    save_adapter(directory, layers, num_layers=3)
    return directory


def trained_checkpoint(path: Path, dtype: mx.Dtype = mx.float32) -> Path:
    """The shipped tiny model in another dtype: trained weights, logits of the usual size."""
    shutil.copytree(TINY_ASSETS, path)
    cast = {
        name: array.astype(dtype)
        for name, array in mx.load(str(path / "model.safetensors")).items()
    }
    mx.eval(cast)
    mx.save_safetensors(str(path / "model.safetensors"), cast, metadata={"format": "pt"})
    return path


def logits(
    model: Path, adapter: Path | None = None, *, computed_in: mx.Dtype | None = None
) -> mx.array:
    loaded, *_ = mlx_lm.load(str(model), adapter_path=str(adapter) if adapter else None)
    if computed_in is not None:
        loaded.set_dtype(computed_in)
    return loaded(TOKENS).astype(mx.float32)


def tensors(model: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in model.glob("*.safetensors"):
        found |= mx.load(str(file))
    return found


def fingerprint(directory: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()
    }


def furthest(left: mx.array, right: mx.array) -> float:
    return mx.abs(left - right).max().item()


@pytest.mark.parametrize("layout", ["safetensors", "mlx"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=["float32", "float16"])
def test_merged_logits_are_base_plus_adapter(
    tmp_path: Path, adapter: Path, dtype: mx.Dtype, layout: Any
) -> None:
    base = trained_checkpoint(tmp_path / "base", dtype=dtype)
    before = fingerprint(base)
    report = merge(str(base), adapter, tmp_path / "merged", layout=layout)
    assert report.layers == 21
    assert not report.dequantized
    expected = logits(base, adapter)
    assert furthest(logits(tmp_path / "merged"), expected) <= TOLERANCE[dtype]
    assert furthest(logits(base), expected) > 20 * TOLERANCE[dtype]
    assert {array.dtype for array in tensors(tmp_path / "merged").values()} == {dtype}
    assert tensors(tmp_path / "merged").keys() == tensors(base).keys()
    assert fingerprint(base) == before


@pytest.mark.parametrize("layout", ["safetensors", "mlx"])
def test_a_4_bit_base_is_dequantised(tmp_path: Path, adapter: Path, layout: Any) -> None:
    base = quantized_checkpoint(tmp_path / "base", dtype=mx.float32)
    report = merge(str(base), adapter, tmp_path / "merged", layout=layout)
    assert report.dequantized
    assert furthest(logits(tmp_path / "merged"), logits(base, adapter)) <= 1e-4
    written = tensors(tmp_path / "merged")
    assert not [name for name in written if name.endswith((".scales", ".biases"))]
    assert {array.dtype for array in written.values()} == {mx.float32}
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & set(config)


def test_a_4_bit_float16_base_keeps_float16(tmp_path: Path, adapter: Path) -> None:
    base = quantized_checkpoint(tmp_path / "base", dtype=mx.float16)
    assert merge(str(base), adapter, tmp_path / "merged").dtype == "float16"
    # In float32, as the CPU serves it: mlx-lm's quantised product in float16 is off by 3e-2 by
    # itself.
    expected = logits(base, adapter, computed_in=mx.float32)
    assert furthest(logits(tmp_path / "merged", computed_in=mx.float32), expected) <= 2e-2
    assert {array.dtype for array in tensors(tmp_path / "merged").values()} == {mx.float16}


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        (lora_config(4, 8, dora=True), 0),
        (lora_config(4, 8, ("q_proj", "down_proj"), dora=True), 4),
        (lora_config(4, 8, dora=True, rslora=True), 6),
        (lora_config(4, 8, dora=True), 8),
        (lora_config(4, 6, rslora=True), 0),
        (lora_config(4, 6, rslora=True), 4),
    ],
    ids=str,
)
def test_dora_and_rslora_are_merged_as_the_trainer_computes_them(
    spec: LoraConfig, bits: int, tmp_path: Path
) -> None:
    base = (
        quantized_checkpoint(tmp_path / "base", mx.float32, bits)
        if bits
        else trained_checkpoint(tmp_path / "base")
    )
    model, _ = load_model(base)
    tree = trained(model, spec)
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", adapter_layers(tree), num_layers=3)
    merge(str(base), tmp_path / "adapter", tmp_path / "merged")
    expected = tree(TOKENS).astype(mx.float32)
    size = mx.abs(expected).max().item()
    assert furthest(logits(tmp_path / "merged"), expected) <= 1e-5 * size
    assert furthest(model(TOKENS), expected) > 1e-2 * size


def quantized_checkpoint(path: Path, dtype: mx.Dtype, bits: int = 4) -> Path:
    source = trained_checkpoint(path.with_name("full"), dtype=dtype)
    model, config = load_model(source)
    model, config = quantize_model(model, config, group_size=64, bits=bits)
    save_model(path, model)
    save_config(config, config_path=path / "config.json")
    for file in source.glob("*.json"):
        if not (path / file.name).exists():
            shutil.copy(file, path)
    return path


def test_shards_names_and_unused_tensors_stay(tmp_path: Path, adapter: Path) -> None:
    base = trained_checkpoint(tmp_path / "base")
    everything = tensors(base) | {"lm_head.weight": mx.ones((8, 8))}  # tied: mlx-lm drops it
    names = sorted(everything)
    (base / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = base / f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(
            str(file), {name: everything[name] for name in part}, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(part, file.name)
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    merge(str(base), adapter, tmp_path / "merged")
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        assert mx.load(str(tmp_path / "merged" / name)).keys() == mx.load(str(base / name)).keys()
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists()
    untouched = "model.embed_tokens.weight"
    assert mx.array_equal(tensors(tmp_path / "merged")[untouched], everything[untouched])


def test_companions_travel_along(tmp_path: Path, adapter: Path) -> None:
    base = trained_checkpoint(tmp_path / "base")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (base / "LICENSE").write_text("MIT")
    (base / "README.md").write_text("the base's model card")
    merge(str(base), adapter, tmp_path / "merged")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "LICENSE",
    ):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()
    assert not (tmp_path / "merged" / "README.md").exists()


def test_what_exists_is_never_overwritten(tmp_path: Path, adapter: Path) -> None:
    base = trained_checkpoint(tmp_path / "base")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        merge(str(base), adapter, tmp_path / "taken")
    assert list((tmp_path / "taken").iterdir()) == []
    with pytest.raises(ModelError, match="exists already"):
        merge(str(base), adapter, base / "config.json")


def test_an_adapter_that_does_not_fit_writes_nothing(tmp_path: Path, adapter: Path) -> None:
    base = save_checkpoint(tmp_path / "base", QWEN3 | {"num_hidden_layers": 3})
    with pytest.raises(AdapterError, match="the adapter's A is"):
        merge(str(base), adapter, tmp_path / "merged")
    with pytest.raises(AdapterError, match="no adapter at"):
        merge(str(base), tmp_path / "nowhere", tmp_path / "merged")
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_renamed_tensors_keep_the_checkpoints_names(tmp_path: Path) -> None:
    """nanochat as transformers saves it has other names than mlx-lm's class."""
    base = tmp_path / "base"
    write(base, cases("nanochat")[0])
    model = load_base(ModelConfig(base_path=str(base))).model
    inject_lora(model, lora_config(rank=4, alpha=8))
    layers = {
        path: LoraPair(pair.a, mx.random.normal(pair.b.shape) * 0.1, pair.scale)
        for path, pair in adapter_layers(model).items()
    }
    save_adapter(tmp_path, layers, num_layers=len(model.layers))
    merge(str(base), tmp_path, tmp_path / "merged")
    assert {n: a.shape for n, a in tensors(tmp_path / "merged").items()} == {
        n: a.shape for n, a in tensors(base).items()
    }
    load_into_trainer(model, layers)
    merged = load_base(ModelConfig(base_path=str(tmp_path / "merged"))).model
    assert furthest(merged(TOKENS % 96), model(TOKENS % 96)) < 1e-4


def test_a_matrix_that_mlx_lm_turns_is_turned_back(tmp_path: Path) -> None:
    """GPT-2's file says h.0.attn.c_proj and [in, out]; mlx-lm adds a prefix and transposes. Of a
    matrix of zeros nobody can tell."""
    config = {
        "model_type": "gpt2",
        "n_ctx": 64,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 1,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": QWEN3["vocab_size"],
    }
    base = save_checkpoint(tmp_path / "base", config)
    stored = {name.removeprefix("model."): array for name, array in tensors(base).items()}
    turned = {
        name: array.T if ".c_" in name and array.ndim == 2 else array
        for name, array in stored.items()
    }
    mx.save_safetensors(str(base / "model.safetensors"), turned, metadata={"format": "pt"})
    model, _ = load_model(base)
    inject_lora(model, lora_config(rank=2, alpha=4, target_modules=("c_proj",)))
    layers = {
        p: LoraPair(pair.a, mx.ones_like(pair.b) * 0.1, pair.scale)
        for p, pair in adapter_layers(model).items()
    }
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", layers, num_layers=1)
    merge(str(base), tmp_path / "adapter", tmp_path / "merged")
    merge(str(base), tmp_path / "adapter", tmp_path / "mlx", layout="mlx")
    changed = tensors(tmp_path / "merged")
    assert {n: a.shape for n, a in changed.items()} == {n: a.shape for n, a in turned.items()}
    base_model, _ = load_model(base)
    inject_lora(base_model, lora_config(rank=2, alpha=4, target_modules=("c_proj",)))
    for path, module in base_model.named_modules():
        if path in layers:
            module.lora_a, module.lora_b = layers[path].a, layers[path].b
    for layout in ("merged", "mlx"):
        assert furthest(load_model(tmp_path / layout)[0](TOKENS), base_model(TOKENS)) <= 1e-4
    (base / "model.safetensors").unlink()
    zeros = {name: array * (".attn.c_proj.w" not in name) for name, array in turned.items()}
    mx.save_safetensors(str(base / "model.safetensors"), zeros, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="--format mlx"):
        merge(str(base), tmp_path / "adapter", tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, adapter: Path) -> None:
    base = trained_checkpoint(tmp_path / "base")
    size = (base / "model.safetensors").stat().st_size

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    result = subprocess.run(
        [
            BIN / "mlx_parallm_merge_lora",
            "--base-model",
            base,
            "--lora-path",
            adapter,
            "--output",
            tmp_path / "merged",
        ],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "cannot be written" in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("spelling", ["directory", "file", "specification"])
def test_the_command_takes_every_spelling_of_an_adapter(
    tmp_path: Path, adapter: Path, spelling: str
) -> None:
    base = trained_checkpoint(tmp_path / "base")
    final = Path(shutil.copytree(adapter, tmp_path / "checkpoints" / "final"))
    given = {
        "directory": final,
        "file": final / "adapters.safetensors",
        "specification": final / "lora_weights.safetensors",
    }[spelling]
    result = call(
        cli.merge_lora,
        "--base-model",
        base,
        "--lora-path",
        given,
        "--output-path",
        tmp_path / "merged",
    )
    assert result.returncode == 0, result.stderr
    assert "21 layers merged, float32" in result.stdout
    assert furthest(logits(tmp_path / "merged"), logits(base, adapter)) <= 1e-4


def push(
    base: Path, adapter: Path, output: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    command = [
        BIN / "mlx_parallm_merge_lora",
        "--base-model",
        base,
        "--lora-path",
        adapter,
        "--output-path",
        output,
    ]
    environment |= {"PATH": "/usr/bin:/bin", "HOME": str(output.parent / "home")}
    command += ["--push-to-hub", "someone/model"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.long
def test_push_to_hub_uploads_the_result(tmp_path: Path, adapter: Path) -> None:
    base, hub = trained_checkpoint(tmp_path / "base"), Hub(REPOSITORY)
    with scripted_http(hub.answer) as (url, _):
        result = push(
            base,
            adapter,
            tmp_path / "merged",
            HF_ENDPOINT=url.removesuffix("/v1"),
            HF_TOKEN="hf_x",
        )
    assert result.returncode == 0, result.stderr
    assert hub.files.keys() == {file.name for file in (tmp_path / "merged").iterdir()}
    assert (
        hub.files["model.safetensors"] == (tmp_path / "merged" / "model.safetensors").read_bytes()
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_refused_upload_says_so_and_keeps_the_model(tmp_path: Path, adapter: Path) -> None:
    base = trained_checkpoint(tmp_path / "base")
    with scripted_http(Hub(REPOSITORY, 403).answer) as (url, _):
        result = push(
            base,
            adapter,
            tmp_path / "merged",
            HF_ENDPOINT=url.removesuffix("/v1"),
            HF_TOKEN="hf_x",
        )
    assert result.returncode == 2
    assert "its upload to 'someone/model' failed" in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_push_without_a_token_fails_before_the_work(tmp_path: Path, adapter: Path) -> None:
    base = trained_checkpoint(tmp_path / "base")
    result = push(base, adapter, tmp_path / "merged")
    assert (result.returncode, "hf auth login" in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "merged").exists()
