"""Gemma 3 with pictures: features that are computed again in float64, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlx_parallm.config.load import Config
from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import load_model, read_config
from mlx_parallm.systems.vision.config import VisionConfig
from mlx_parallm.systems.vision.leaf import image_support
from tests.images.gemma3 import PATCH, SIDE, TOKENS, WIDTH, save_gemma3
from tests.vision.drawn import noise
from tests.vision.siglip import encoded, float64_arrays

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")


def support(path: Path) -> tuple[Config, Any]:
    config = Config.model_validate({"model": {"base_path": str(path)}, "vision": {"enabled": True}})
    return config, image_support(config.section(VisionConfig), path, read_config(path))


def own_features(path: Path, picture: Image.Image) -> np.ndarray:
    """SigLIP, pooling and projector over a picture of SIDE × SIDE pixels."""
    arrays, tower = float64_arrays(path), "vision_tower.vision_model"
    pixels = (np.asarray(picture).astype(np.float64) / 255 - 0.5) / 0.5
    across = SIDE // PATCH
    patches = pixels.reshape(across, PATCH, across, PATCH, 3).transpose(0, 2, 4, 1, 3)
    weight = arrays[f"{tower}.embeddings.patch_embedding.weight"].reshape(-1, 3 * PATCH * PATCH)
    x = patches.reshape(across * across, -1) @ weight.T
    x = x + arrays[f"{tower}.embeddings.patch_embedding.bias"]
    x = encoded(arrays, tower, x + arrays[f"{tower}.embeddings.position_embedding.weight"])
    each = across // int(TOKENS**0.5)
    x = x.reshape(across // each, each, across // each, each, -1).mean((1, 3)).reshape(TOKENS, -1)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    x = x * (1 + arrays["multi_modal_projector.mm_soft_emb_norm.weight"])
    projected: np.ndarray = x @ arrays["multi_modal_projector.mm_input_projection_weight"]
    return projected


def test_a_pictures_tokens_and_features(tmp_path: Path) -> None:
    path = save_gemma3(tmp_path / "model")
    config, images = support(path)
    picture = noise(SIDE, SIDE, 1)
    image = images.reader.image_of(picture)
    assert image.tokens == TOKENS and image.grid is None
    assert image.text == (
        "\n\n<start_of_image>" + "<image_soft_token>" * TOKENS + "<end_of_image>\n\n"
    )
    encoder = images.encoder(load_model(config.model))
    # the language part multiplies what its embedding returns by √WIDTH
    features = np.array(encoder.encode(image)) * WIDTH**0.5
    expected = own_features(path, picture)
    assert np.abs(features - expected).max() <= 1e-5 * np.abs(expected).max()
    other = images.reader.image_of(noise(90, 30, 2))
    assert other.tokens == TOKENS and other.digest != image.digest


def test_what_is_computed_otherwise_is_refused(tmp_path: Path) -> None:
    path = save_gemma3(tmp_path / "crops", do_pan_and_scan=True)
    with pytest.raises(ModelError, match="do_pan_and_scan"):
        support(path)
    path = save_gemma3(tmp_path / "model")
    settings = json.loads((path / "config.json").read_text())
    settings["vision_config"]["hidden_act"] = "gelu"
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"hidden_act.*'gelu'"):
        support(path)
