"""A checkpoint of SmolVLM or Idefics3, used for its text: mlx-lm has no such architecture. The
arrays have the names of three programs."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import check_model, load_model, load_tokenizer
from tests.images.checkpoints import save_smolvlm

TOKENS = mx.array([[40, 7, 300, 1, 2]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")


def logits_of(path: Path) -> mx.array:
    loaded = load_model(ModelConfig(base_path=str(path)))
    assert loaded.max_model_len == 2048 and loaded.vocab_size == 332
    logits: mx.array = loaded.model(TOKENS)
    return logits


def test_its_text_is_that_of_mlx_lms_llama(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    model = llama.Model(
        llama.ModelArgs.from_dict({**config["text_config"], "tie_word_embeddings": False})
    )
    arrays = mx.load(str(checkpoint / "model.safetensors"))
    text = {
        name.replace("model.text_model.", "model."): array
        for name, array in arrays.items()
        if "vision_model" not in name and "connector" not in name
    }
    model.load_weights([*text.items()])
    assert mx.array_equal(model(TOKENS), logits_of(checkpoint)).item()
    check_model(ModelConfig(base_path=str(checkpoint)), train=True)


@pytest.mark.parametrize("layout", ["mlx-vlm", "ours", "tied, saved once", "transformers 5"])
def test_other_programs_names_of_the_arrays(checkpoint: Path, tmp_path: Path, layout: str) -> None:
    expected = logits_of(checkpoint)
    arrays = dict(mx.load(str(checkpoint / "model.safetensors")))
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    name_of = {
        "mlx-vlm": ("language_model.", "vision_model.", "connector.", "language_model.lm_head."),
        "ours": ("language_model.model.", "vision_model.", "connector.", "language_model.lm_head."),
    }.get(layout, ("model.text_model.", "model.vision_model.", "model.connector.", "lm_head."))
    renamed = {}
    for name, array in arrays.items():
        for old, new in zip(
            ("model.text_model.", "model.vision_model.", "model.connector.", "lm_head."),
            name_of,
            strict=True,
        ):
            if name.startswith(old):
                renamed[name.replace(old, new, 1)] = array
    if layout == "transformers 5":  # its rope has its own place
        theta = config["text_config"].pop("rope_theta")
        rope = {"rope_type": "default", "rope_theta": theta}
        config["text_config"]["rope_parameters"] = rope
    if layout == "tied, saved once":
        del renamed["lm_head.weight"]
        config["tie_word_embeddings"] = True
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    (tmp_path / "config.json").write_text(json.dumps(config))
    logits = logits_of(tmp_path)
    if layout != "tied, saved once":
        assert mx.array_equal(logits, expected).item()
        return
    config["tie_word_embeddings"] = False  # some say so, and have no head of their own
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mx.abs(logits_of(tmp_path) - logits).max().item() < 1e-4


def test_its_template_shows_texts(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint, ModelConfig(base_path=str(checkpoint)))
    text = tokenizer.render_chat_text([{"role": "user", "content": "hi there"}])
    assert text == "<|im_start|>User: hi there<|im_end|>\nAssistant:"
