"""The language part of Qwen3-VL-MoE, whatever layout a checkpoint's experts have."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import check_model, load_model
from tests.tiny_models import TINY_ASSETS

TOKENS = mx.array([[40, 7, 300, 1, 2]])
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,  # so that only one of two matrices says which side is which
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "norm_topk_prob": True,
    "rope_theta": 5000.0,
}


def reference() -> Any:
    """mlx-lm's model of the same text, random."""
    model = qwen3_moe.Model(
        qwen3_moe.ModelArgs.from_dict(
            {**TEXT, "model_type": "qwen3_moe", "tie_word_embeddings": False}
        )
    )
    mx.random.seed(1)
    model.apply(lambda array: 0.3 * mx.random.normal(array.shape))
    return model


def save(path: Path, arrays: dict[str, mx.array], **text: Any) -> Path:
    shutil.copytree(TINY_ASSETS, path)
    settings = TEXT | text
    config = {
        "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "text_config": {key: value for key, value in settings.items() if value is not None},
        "vision_config": {},
    }
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return path


def transformers_arrays(layout: str) -> dict[str, mx.array]:
    arrays = {"model.visual.patch_embed.proj.bias": mx.zeros(4)}
    for name, array in tree_flatten(reference().parameters()):
        if ".switch_mlp." in name:
            continue
        name = name if name.startswith("lm_head") else f"model.language_{name}"
        arrays[name] = array
    for index, layer in enumerate(reference().layers):
        experts = layer.mlp.switch_mlp
        prefix = f"model.language_model.layers.{index}.mlp.experts"
        gate, up, down = (experts[f"{kind}_proj"].weight for kind in ("gate", "up", "down"))
        if layout == "one by one":
            for expert in range(4):
                arrays |= {
                    f"{prefix}.{expert}.gate_proj.weight": gate[expert],
                    f"{prefix}.{expert}.up_proj.weight": up[expert],
                    f"{prefix}.{expert}.down_proj.weight": down[expert],
                }
            continue
        both = mx.concatenate([gate, up], axis=1)
        if layout == "the hub's":
            both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
        arrays[f"{prefix}.gate_up_proj"] = mx.contiguous(both)
        arrays[f"{prefix}.down_proj"] = mx.contiguous(down)
    return arrays


@pytest.mark.parametrize("layout", ["the hub's", "transformers 5", "one by one", "mlx-lm's"])
def test_a_checkpoints_experts_are_found_in_every_layout(tmp_path: Path, layout: str) -> None:
    if layout == "mlx-lm's":
        arrays = {
            f"language_model.{name}": array
            for name, array in tree_flatten(reference().parameters())
        } | {"vision_tower.patch_embed.proj.bias": mx.zeros(4)}
    else:
        arrays = transformers_arrays(layout)
    newer = {"num_experts": None, "num_local_experts": 4} if layout == "transformers 5" else {}
    path = save(tmp_path / "model", arrays, **newer)
    loaded = load_model(ModelConfig(base_path=str(path)))
    assert mx.abs(loaded.model(TOKENS) - reference()(TOKENS)).max().item() < 1e-5
    check_model(ModelConfig(base_path=str(path)), train=True)


def test_other_shapes_are_named(tmp_path: Path) -> None:
    arrays = transformers_arrays("the hub's")
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    arrays[name] = arrays[name][:, :-1]
    path = save(tmp_path / "model", arrays)
    with pytest.raises(ModelError, match=r"\(32, 32\) and \(15, 32\)"):
        load_model(ModelConfig(base_path=str(path)))
