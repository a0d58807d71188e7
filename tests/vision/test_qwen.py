"""Models whose images have positions of three axes, served: an answer is what mlx-vlm's own forward
gives, behind pictures of different sizes, alone and in a batch with texts."""

import json
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from openai import OpenAI
from transformers import AutoConfig, AutoImageProcessor

from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.errors import ModelError
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.systems.vision.qwen_vl import processor
from mlx_parallm.weights import SharedWeights
from tests.images.checkpoints import save_qwen_vl
from tests.vision.drawn import data_url, noise

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

PICTURES = [noise(40, 16, 1), noise(24, 24, 2)]


def own_logprobs(path: Path, prompt: list[int], answer: list[int]) -> mx.array:
    """The answer's log-probabilities by mlx-vlm's whole model and transformers' processor."""
    name = AutoConfig.from_pretrained(path).model_type
    settings = AutoConfig.from_pretrained(path).to_dict()
    module = import_module(f"mlx_vlm.models.{name}")
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text = settings["text_config"] | {"rope_theta": 10000.0, "rope_scaling": rope}
    text["tie_word_embeddings"] = False
    arguments = module.ModelConfig.from_dict(dict(settings))
    arguments.text_config = module.TextConfig.from_dict(text)
    vision = settings["vision_config"] | {"model_type": name}
    arguments.vision_config = module.VisionConfig.from_dict(vision)
    model = module.Model(arguments)
    weights = {
        key.replace("model.language_model.", "language_model.model.")
        .replace("model.visual.", "vision_tower.")
        .replace("lm_head.", "language_model.lm_head."): array
        for key, array in dict(mx.load(str(path / "model.safetensors"))).items()
    }
    weights = module.VisionModel(arguments.vision_config).sanitize(weights)
    model.load_weights([*weights.items()])
    read = AutoImageProcessor.from_pretrained(path, backend="pil")(PICTURES)
    grid = mx.array(np.array(read["image_grid_thw"]).astype(np.int32))
    pixels = mx.array(np.array(read["pixel_values"]))
    output = model(mx.array([[*prompt, *answer]]), pixels, image_grid_thw=grid)
    return token_logprobs(output.logits[0][len(prompt) - 1 : -1], mx.array(answer))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("hidden_act", "gelu", "hidden_act = 'gelu': mlx-vlm's tower computes"),
        ("rope_parameters", {"rope_theta": 500.0}, "rope_theta of 10000 alone"),
    ],
)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_tower_that_is_computed_otherwise_is_refused(
    name: str, key: str, value: Any, told: str, tmp_path: Path
) -> None:
    path = save_qwen_vl(tmp_path / "model", model_type=name)
    processor(path)
    settings = json.loads((path / "config.json").read_text())
    settings["vision_config"][key] = value
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=told):
        processor(path)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_an_answer_is_that_of_the_models_own_forward(name: str, tmp_path: Path) -> None:
    path = save_qwen_vl(tmp_path / "model", model_type=name)
    serving = Serving(
        Config.model_validate(
            {
                "model": {"base_path": str(path)},
                "server": {"port": 0, "prefill_chunk": 16},
                "vision": {"enabled": True},
            }
        )
    )
    images = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in PICTURES
    ]
    seen = [images[0], {"type": "text", "text": "before"}, images[1], {"type": "text", "text": "?"}]
    try:
        serving.listen()
        loaded = serving.load()
        weights = SharedWeights(loaded.model, keep_versions=1)
        serving.open(loaded, weights, adapters={}, main_adapter=None)
        with (
            OpenAI(base_url=f"{serving.url}/v1", api_key="x", max_retries=0) as client,
            ThreadPoolExecutor(4) as pool,
        ):

            def ask(content: Any) -> Any:
                return client.chat.completions.create(
                    model="default",
                    messages=[{"role": "user", "content": content}],
                    max_tokens=8,
                    temperature=0.0,
                    logprobs=True,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )

            alone = ask(seen)
            together = [*pool.map(ask, [seen, "a text", "another, longer text", seen])]
    finally:
        serving.close()
    body = alone.model_dump()
    prompt, answer = body["prompt_token_ids"], body["choices"][0]["token_ids"]
    assert prompt.count(322) == 10 + 9
    expected = own_logprobs(path, prompt, answer)
    for each in (alone, together[0], together[3]):
        logprobs = [entry.logprob for entry in each.choices[0].logprobs.content]
        assert mx.abs(expected - mx.array(logprobs)).max().item() <= 1e-4
