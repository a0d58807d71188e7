"""Every architecture of the table computes in a real llama.cpp what it computes here, on random
weights."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.deploy.export import gguf_file
from mlx_parallm.deploy.export.model import ModelSource, SourceTensor, open_model
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.errors import AdapterError, ModelError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.gguf import architectures
from mlx_parallm.models.gguf.architectures import ARCHITECTURES
from mlx_parallm.models.lora import adapter_layers, inject_lora, save_adapter
from tests.export.llama import (
    GEMMA3,
    LLAMA,
    MODELS,
    checkpoint,
    difference,
    logprobs,
    needs_llama,
    write,
)
from tests.tiny_models import EXPERTS, QWEN3, lora_config

EXACT = 1e-4
FAST = {("llama", False), ("qwen3_moe", True), ("gemma3_text", True)}


def test_every_architecture_has_a_model_here() -> None:
    assert {config["model_type"] for config in MODELS.values()} == set(ARCHITECTURES)


@needs_llama
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, marks=[] if (name, tied) in FAST else pytest.mark.slow)
        for name in MODELS
        for tied in ((True, False) if name in ARCHITECTURES and name != "mistral" else (True,))
    ],
)
def test_llama_cpp_computes_the_same(tmp_path: Path, name: str, tied: bool) -> None:
    model = checkpoint(tmp_path / "model", MODELS[name], tied=tied)
    write(model, tmp_path / "model.gguf")
    assert difference(tmp_path / "model.gguf", logprobs(model)) <= EXACT


def without_order(*_: Any) -> None:
    return None


def without_offset(*_: Any) -> float:
    return 0.0


def other_base(writer: Any, arguments: Any) -> None:
    arguments.rope_theta = 2 * arguments.rope_theta
    write_metadata(writer, arguments)


def other_experts(tensor: Any, *changes: Any) -> Any:
    pieces = list(tensor_rows(tensor, *changes))
    return [pieces[0][::-1]] if "switch_mlp.up_proj" in tensor.name else pieces


write_metadata, tensor_rows = architectures.write_metadata, SourceTensor.rows


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "place", "fault"),
    [
        (LLAMA, "models.gguf.architectures.row_order", without_order),
        (LLAMA, "models.gguf.architectures.write_metadata", other_base),
        (GEMMA3, "models.gguf.architectures.offset_of", without_offset),
        (MODELS["qwen3_moe"], "deploy.export.model.SourceTensor.rows", other_experts),
    ],
    ids=["permutation", "rope base", "norms", "experts"],
)
def test_a_fault_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], place: str, fault: Any
) -> None:
    model = checkpoint(tmp_path / "model", config)
    monkeypatch.setattr(f"mlx_parallm.{place}", fault)
    write(model, tmp_path / "model.gguf")
    assert difference(tmp_path / "model.gguf", logprobs(model)) > 1.0


def adapter(path: Path, model: Path, config: LoraConfig) -> Path:
    """All linear layers, B not zero."""
    path.mkdir()
    tree, _ = load_model(model)
    mx.random.seed(1)
    inject_lora(tree, config)
    layers = {
        name: LoraPair(pair.a, mx.random.normal(pair.b.shape) * 0.1, pair.scale, pair.magnitude)
        for name, pair in adapter_layers(tree).items()
    }
    save_adapter(path, layers, num_layers=2)
    return path


@needs_llama
@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (LLAMA, False),
        pytest.param(MODELS["qwen3_moe"], False, marks=pytest.mark.slow),
        pytest.param(MODELS["qwen3_moe"], True, marks=pytest.mark.slow),
    ],
    ids=["llama", "qwen3_moe", "experts"],
)
def test_an_adapter_alone_is_the_merged_model(
    tmp_path: Path, config: dict[str, Any], experts: bool
) -> None:
    base = checkpoint(tmp_path / "base", config)
    lora = adapter(tmp_path / "lora", base, lora_config(rank=4, alpha=10, experts=experts))
    merge(str(base), lora, tmp_path / "merged", layout="mlx" if experts else "safetensors")
    expected = logprobs(tmp_path / "merged")
    assert np.abs(expected - logprobs(base)).max() > 1.0
    write(base, tmp_path / "base.gguf")
    layers = gguf_file.write_adapter(
        tmp_path / "lora.gguf", open_model(ModelSource(str(base), lora))
    )
    assert layers == len(open_model(ModelSource(str(base), lora)).layers)
    assert difference(tmp_path / "base.gguf", expected, tmp_path / "lora.gguf") <= EXACT


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "quantised base"])
def test_an_adapter_is_merged(tmp_path: Path, kind: str) -> None:
    """As the merge command does, which rounds to the base's float32."""
    base = checkpoint(tmp_path / "base", MODELS["qwen2"] if kind == "quantised base" else LLAMA)
    if kind == "quantised base":
        model, config = load_model(base)
        model, config = quantize_model(model, dict(MODELS["qwen2"]), 32, 4)
        save_model(base, model)
        save_config(config, base / "config.json")
    lora = adapter(tmp_path / "lora", base, lora_config(rank=4, alpha=8, dora=kind == "dora"))
    merge(str(base), lora, tmp_path / "merged")
    expected = logprobs(tmp_path / "merged")
    assert np.abs(expected - logprobs(base)).max() > 1.0
    write(base, tmp_path / "model.gguf", adapter=lora)
    assert difference(tmp_path / "model.gguf", expected) <= EXACT


def test_the_adapters_of_experts_are_in_the_files(tmp_path: Path) -> None:
    """Merged by rows, and apart as llama.cpp multiplies them: A [experts, rank, in], B [experts,
    out, rank]."""
    import gguf

    base = checkpoint(tmp_path / "base", MODELS["qwen3_moe"])
    lora = adapter(tmp_path / "lora", base, lora_config(rank=4, alpha=10, experts=True))
    source = ModelSource(str(base), lora)
    pairs = open_model(source).layers
    name = "model.layers.1.mlp.switch_mlp.down_proj"
    weights = {tensor.name: list(tensor.rows()) for tensor in open_model(source).tensors()}
    [plain] = [
        np.concatenate(list(tensor.rows()))
        for tensor in open_model(ModelSource(str(base))).tensors()
        if tensor.name == f"{name}.weight"
    ]
    update = 2.5 * np.swapaxes(np.array(pairs[name].a @ pairs[name].b), 1, 2)
    np.testing.assert_allclose(
        np.concatenate(weights[f"{name}.weight"]), plain + update.reshape(plain.shape), atol=1e-5
    )
    assert np.abs(update).max() > 0.1
    gguf_file.write_adapter(tmp_path / "lora.gguf", open_model(source))
    stored = {
        tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "lora.gguf").tensors
    }
    a, b = (stored[f"blk.1.ffn_down_exps.weight.lora_{part}"] for part in "ab")
    np.testing.assert_array_equal(a, np.swapaxes(np.array(pairs[name].a), 1, 2))
    np.testing.assert_allclose(b, np.swapaxes(np.array(pairs[name].b), 1, 2), rtol=1e-6)


def test_ranks_and_scales_that_differ_share_one_alpha(tmp_path: Path) -> None:
    """llama.cpp multiplies by alpha / rank of the tensor: A is [rank, in], B [out, rank]."""
    import gguf

    base = checkpoint(tmp_path / "base", QWEN3)
    opened = open_model(ModelSource(str(base)))
    pairs = {
        "model.layers.0.self_attn.v_proj": LoraPair(mx.ones((64, 2)), mx.ones((2, 32)), 3.0),
        "model.layers.1.self_attn.v_proj": LoraPair(mx.ones((64, 8)), mx.ones((8, 32)), 0.5),
    }
    object.__setattr__(opened, "adapter", type("Adapter", (), {"layers": pairs})())
    gguf_file.write_adapter(tmp_path / "lora.gguf", opened)
    reader = gguf.GGUFReader(tmp_path / "lora.gguf")
    alpha = float(reader.fields["adapter.lora.alpha"].contents())
    for tensor, pair in zip(reader.tensors[1::2], pairs.values(), strict=True):
        assert tensor.name.endswith("attn_v.weight.lora_b")
        assert alpha / tensor.data.shape[1] * tensor.data.max() == pytest.approx(pair.scale)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            QWEN3 | {"model_type": "phi3"},
            "model_type 'phi3' cannot be exported as GGUF: only llama",
        ),
        (
            QWEN3 | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": False},
            "no norm_topk_prob = false",
        ),
        (
            QWEN3 | EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            "no layers without experts",
        ),
        (GEMMA3 | {"query_pre_attn_scalar": 24}, "no query_pre_attn_scalar = 24, but 16"),
        (GEMMA3 | {"final_logit_softcapping": 2.0}, r"no final_logit_softcapping = 2\.0"),
        (GEMMA3 | {"layer_types": ["sliding_attention"] * 3}, "no layer_types of another"),
        (GEMMA3 | {"layer_types": ["full_attention"] * 3}, "no layer_types of another"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "no use_bidirectional_attention = True"),
        (MODELS["mistral"] | {"sliding_window": 16}, "no sliding_window = 16"),
        (
            QWEN3 | {"rope_scaling": MODELS["llama 3 rope"]["rope_scaling"]},
            "no rope_type = llama3",
        ),
        (LLAMA | {"hidden_act": "gelu"}, "no hidden_act = gelu"),
        (
            LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope scaling of type 'dynamic'",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    model = checkpoint(tmp_path / "model", config)
    with pytest.raises(ModelError, match=reason):
        write(model, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base, other = (
        checkpoint(tmp_path / "base", QWEN3),
        checkpoint(tmp_path / "other", QWEN3 | {"hidden_size": 32}),
    )
    lora = adapter(tmp_path / "lora", other, lora_config(rank=2, alpha=2))
    with pytest.raises(AdapterError, match=r"\[64 → "):
        open_model(ModelSource(str(base), lora))
    with pytest.raises(AdapterError, match="adapter"):
        gguf_file.write_adapter(tmp_path / "lora.gguf", open_model(ModelSource(str(base))))
    dora = adapter(tmp_path / "dora", base, lora_config(rank=2, alpha=2, dora=True))
    with pytest.raises(AdapterError, match="is DoRA"):
        gguf_file.write_adapter(tmp_path / "lora.gguf", open_model(ModelSource(str(base), dora)))


def test_an_adapter_of_the_part_that_sees_is_refused_with_the_way_out(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", QWEN3)
    lora = adapter(tmp_path / "lora", base, lora_config(rank=2, alpha=2))
    file = str(lora / "adapters.safetensors")
    arrays = dict(mx.load(file))
    arrays |= {"vision_tower.a.lora_a": mx.ones((4, 2)), "vision_tower.a.lora_b": mx.ones((2, 4))}
    mx.save_safetensors(file, arrays)
    with pytest.raises(AdapterError, match=r"vision_tower\.a"):
        open_model(ModelSource(str(base), lora))
