"""Every architecture beside transformers' own numbers: tests/data/parity has what transformers (in
float64) gives for checkpoints whose tensors anybody can make again. `scripts/parity/make.py` makes
those files, `scripts/parity/compare.py` tries many more options."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import check_model, load_model
from mlx_parallm.models.published.mend import model_classes
from scripts.parity.compare import EQUAL, FOLDED, GRADIENT, compare
from scripts.parity.weights import tensor

DATA = Path(__file__).parents[2] / "data" / "parity"
NEAR = {"gemma4_text": 5e-5}
"""Bounds of architectures whose shares of numbers are rounded more."""


@cache
def cases(name: str) -> list[dict[str, Any]]:
    found = json.loads((DATA / f"{name}.json").read_text())
    for case in found:
        case.setdefault("tensors", found[0]["tensors"])
    return found


def all_cases() -> Iterator[Any]:
    for file in sorted(DATA.glob("*.json")):
        for index, case in enumerate(cases(file.stem)):
            yield pytest.param(file.stem, index, id=f"{file.stem}-{case['option']}")


def write(path: Path, case: dict[str, Any], dtype: mx.Dtype = mx.float32) -> None:
    path.mkdir()
    arrays = {
        name: mx.array(tensor(name, shape)).astype(dtype) for name, shape in case["tensors"].items()
    }
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(case["config"]))


REFUSED = {
    ("minimax", "plain"): r"model_type = .*lightning attention",
    ("minimax", "window"): r"model_type = .*lightning attention",
    ("nanochat", "rope=yarn"): "rope_type 'yarn' is not supported",
    ("phimoe", "rope=yarn"): "rope_type 'yarn' turns texts of more than 16 tokens",
}


@pytest.mark.parametrize(("name", "index"), list(all_cases()))
def test_forward_caches_and_gradient_are_transformers(
    name: str, index: int, tmp_path: Path
) -> None:
    case = cases(name)[index]
    write(tmp_path / "model", case)
    if told := REFUSED.get((name, case["option"])):
        with pytest.raises(ModelError, match=told):
            compare(tmp_path / "model", case)
        return
    found = compare(tmp_path / "model", case)
    bound = NEAR.get(name, EQUAL)
    assert found["whole"] <= bound
    assert found["served"] <= bound
    assert found["gradient"] <= GRADIENT or name in FOLDED


def older(config: dict[str, Any]) -> dict[str, Any] | None:
    """The same model in the spelling of transformers 4; None: its ropes differ by layer."""
    rope = config.get("rope_parameters")
    if rope is None or not isinstance(rope.get("rope_theta"), float):
        return None
    rope = dict(rope)
    written = {key: value for key, value in config.items() if key != "rope_parameters"}
    written["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        written["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    written["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return written


SPELLED = ["llama", "qwen2", "mistral", "phi", "glm4", "deepseek_v3", "stablelm", "qwen3_moe"]


@pytest.mark.parametrize("name", SPELLED)
def test_every_spelling_of_a_rope_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    for index, case in enumerate(cases(name)):
        config = older(case["config"])
        assert config is not None
        spellings = {"new": case["config"], "old": config}
        if config["rope_scaling"]:
            scaling = dict(config["rope_scaling"])
            named = {"type": scaling.pop("rope_type"), **scaling}
            spellings["type"] = config | {"rope_scaling": named}
        logits = {}
        for spelling, written in spellings.items():
            path = tmp_path / f"{index}-{spelling}"
            write(path, case | {"config": written})
            settings = ModelConfig(base_path=str(path), rope_length=case.get("rope_length"))
            model = load_model(settings).model
            logits[spelling] = np.array(model(mx.array(case["ids"])[None]))
        assert all(np.array_equal(one, logits["new"]) for one in logits.values())


@pytest.mark.usefixtures("informative_logs")
def test_a_key_that_nothing_heeds_is_refused_for_training_and_named_in_serving(
    tmp_path: Path,
) -> None:
    case = cases("olmoe")[0]
    write(tmp_path / "model", case | {"config": case["config"] | {"clip_qkv": 0.5}})
    config = ModelConfig(base_path=str(tmp_path / "model"))
    with pytest.raises(ModelError, match=r"clip_qkv = 0\.5"):
        check_model(config, train=True)
    with capture_logs() as logs:
        check_model(config, train=False)
    [entry] = logs
    assert entry["log_level"] == "warning"
    assert entry["keys"] == "clip_qkv = 0.5"


NOT_COMPUTED = [
    ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}, "expert_weights = None"),
    ("dbrx", {"attn_config": {"clip_qkv": None}}, "clip_qkv = None"),
    ("gemma3n", {"text_config": {"layer_types": ["full_attention"] * 5}}, "layer_types"),
    ("llama4", {"text_config": {"layer_types": ["full_attention"] * 4}}, "layer_types = "),
    ("minicpm3", {"q_lora_rank": None}, "q_lora_rank = None"),
    ("mistral4", {"rope_parameters": {"llama_4_scaling_beta": None}}, "llama_4_scaling_beta"),
    ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers"),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}, "without linear_attention"),
    ("laguna", {"layer_types": ["sliding_attention"] * 4}, "layer_types without full_attention"),
    ("gemma4_text", {"hidden_activation": "relu"}, "^hidden_activation = 'relu'"),
    ("nemotron_h", {"layer_types": ["linear_attention"] * 4}, "layers_block_type of one kind"),
    ("nemotron_h", {"layer_types": ["mlp"] * 4}, "of one kind alone"),
    ("recurrent_gemma", {"num_hidden_layers": 1}, "of one kind alone"),
    ("step3p5", {"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
    ("gemma4_unified", {"text_config": {"per_layer_config": {"0": {"head_dim": 4}}}}, "per_layer"),
    ("recurrent_gemma", {"conv1d_width": 3}, "conv1d_width = 3"),
]


@pytest.mark.parametrize(("name", "changes", "told"), NOT_COMPUTED)
def test_a_value_that_a_class_does_not_compute_is_refused_by_name(
    name: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = dict(cases(name)[0]["config"])
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=told):
        check_model(ModelConfig(base_path=str(tmp_path)), train=True)


def test_a_text_config_without_model_type_has_that_of_transformers() -> None:
    config = {"model_type": "qwen3_vl", "text_config": {"hidden_size": 32}}
    _, arguments = model_classes(config | {"tie_word_embeddings": False})
    text = arguments.from_dict(config | {"tie_word_embeddings": False}).text_config
    assert text["model_type"] == "qwen3_vl_text"


def test_a_head_beside_a_tied_one_is_refused(tmp_path: Path) -> None:
    case = cases("llama")[0]
    write(tmp_path / "model", case | {"config": case["config"] | {"tie_word_embeddings": True}})
    with pytest.raises(ModelError, match=r"tie_word_embeddings = true, and lm_head\.weight is not"):
        load_model(ModelConfig(base_path=str(tmp_path / "model")))


def test_texts_that_a_scaling_turns_otherwise_are_refused(tmp_path: Path) -> None:
    case = cases("llama")[0]
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    changed = case["config"] | {"rope_parameters": dynamic, "max_position_embeddings": 16}
    write(tmp_path / "model", case | {"config": changed})
    loaded = load_model(ModelConfig(base_path=str(tmp_path / "model")))
    assert loaded.max_model_len == 16
    loaded.model(mx.array(case["ids"][:16])[None])
    with pytest.raises(ModelError, match="'dynamic'"):
        loaded.model(mx.array(case["ids"])[None])
