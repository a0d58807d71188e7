"""LFM2-VL with pictures: sizes and tiles worked by hand, features computed again in float64, and
what is refused. docs/vision.md has a comparison with transformers' own processor."""

import json
from math import erf
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import lfm2
from PIL import Image

from mlx_parallm.config.load import Config
from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import check_model, load_model, read_config
from mlx_parallm.systems.vision.config import VisionConfig
from mlx_parallm.systems.vision.leaf import image_support
from mlx_parallm.systems.vision.lfm2_vl import ViewProcessor, ViewSettings
from tests.images.lfm2_vl import PATCH, SETTINGS, VISION_WIDTH, save_lfm2_vl
from tests.vision.drawn import noise
from tests.vision.siglip import encoded, float64_arrays, layer_norm, linear

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

HUB, TINY = ViewSettings(), ViewSettings.of(SETTINGS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lfm2_vl(tmp_path_factory.mktemp("models") / "lfm2_vl")


def support(path: Path) -> tuple[Config, Any]:
    config = Config.model_validate({"model": {"base_path": str(path)}, "vision": {"enabled": True}})
    return config, image_support(config.section(VisionConfig), path, read_config(path))


def test_how_large_a_picture_is_read() -> None:
    # 32 pixels a token, 64 to 256 tokens: 65,536 to 262,144 pixels
    assert HUB.whole_size(320, 320) == (320, 320)
    assert HUB.whole_size(330, 300) == (320, 288)  # 10.3 and 9.4 tokens: rounded, 90 tokens
    assert HUB.whole_size(100, 100) == (256, 256)  # too few: 100 · 2.56, rounded up
    assert HUB.whole_size(1000, 1000) == (512, 512)  # too many: 1000 / 1.95, rounded down
    assert HUB.whole_size(2000, 500) == (1024, 256)
    assert HUB.whole_size(48, 48 * 100) == (32, 5120), "round() takes 1.5 to 2, and 2.5 to 2"


def test_which_pictures_become_tiles() -> None:
    assert HUB.grid(512, 1000) == (1, 1)  # 507,904 pixels of at most 2 · 262,144
    # 2 × 2 and 3 × 3 are as square; half of 9 tiles have 1,179,648 pixels
    assert HUB.grid(1080, 1080) == (2, 2)
    assert HUB.grid(1090, 1090) == (3, 3)
    assert HUB.grid(2000, 500) == (4, 1)
    assert HUB.grid(500, 1600) == (1, 3)  # 1 : 3.2
    assert ViewSettings(do_image_splitting=False).grid(4000, 4000) == (1, 1)
    assert ViewSettings(min_tiles=1, max_tiles=1).grid(4000, 4000) == (1, 1)


def test_a_pictures_views_patches_and_text() -> None:
    tiles = ViewProcessor(TINY, 7)
    picture = noise(24, 24, 1)  # 3 × 3 tokens of 8 pixels: read as it is
    image = tiles.process(picture, low=False)
    pixels, patches = np.asarray(picture), image.arrays["patches"]
    assert image.arrays["shapes"].tolist() == [[6, 6]] and patches.shape == (36, 48)
    assert patches[0].tolist() == pixels[:4, :4].ravel().tolist()
    assert patches[7].tolist() == pixels[4:8, 4:8].ravel().tolist()
    assert image.tokens == 9 and image.text == f"<|image_start|>{'<image>' * 9}<|image_end|>"
    wide = tiles.process(noise(64, 32, 2), low=False)  # 32 tokens of at most 24: tiles, and whole
    assert wide.arrays["shapes"].tolist() == [[4, 4]] * 2 + [[4, 8]]
    one = "<image>" * 4
    assert wide.text == (
        f"<|image_start|><|img_row_1_col_1|>{one}<|img_row_1_col_2|>{one}<|img_thumbnail|>"
        f"{one * 2}<|image_end|>"
    )
    assert wide.tokens == 16
    halves = Image.new("RGB", (64, 32))
    halves.paste((255, 255, 255), (32, 0, 64, 32))
    cut = tiles.process(halves, low=False).arrays["patches"]
    assert not cut[0].any() and (cut[16 + 3] == 255).all(), "the left tile comes first"
    low = tiles.process(noise(64, 32, 2), low=True)
    assert low.arrays["shapes"].tolist() == [[4, 8]] and low.digest != wide.digest
    bare = ViewProcessor(ViewSettings.of(SETTINGS | {"use_image_special_tokens": False}), 7)
    assert bare.process(picture, low=False).text == "<image>" * 9


def resized(grid: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Bilinear, between the centres of squares, for grids that grow."""

    def along(count: int, size: int) -> np.ndarray:
        weights = np.zeros((count, size))
        for place in range(count):
            centre = (place + 0.5) * size / count - 0.5
            for source in range(size):
                weights[place, source] = max(0.0, 1 - abs(source - centre))
        return weights / weights.sum(1, keepdims=True)

    return np.einsum("rh,cw,hwd->rcd", along(rows, len(grid)), along(columns, len(grid)), grid)


def test_features_are_those_of_siglip_2_in_float64(checkpoint: Path) -> None:
    config, images = support(checkpoint)
    image = images.reader.image_of(noise(24, 32, 1))
    assert image.arrays["shapes"].tolist() == [[8, 6]]
    features = np.array(images.encoder(load_model(config.model)).encode(image))
    arrays, tower = float64_arrays(checkpoint), "model.vision_tower.vision_model"
    pixels = (image.arrays["patches"] / 255 - 0.5) / 0.5
    x = linear(arrays, f"{tower}.embeddings.patch_embedding", pixels)
    grid = arrays[f"{tower}.embeddings.position_embedding.weight"].reshape(4, 4, -1)
    x = encoded(arrays, tower, x + resized(grid, 8, 6).reshape(48, -1))
    squares = x.reshape(4, 2, 3, 2, VISION_WIDTH).transpose(0, 2, 1, 3, 4).reshape(12, -1)
    projector = "model.multi_modal_projector"
    normed = layer_norm(arrays, f"{projector}.layer_norm", squares, eps=1e-5)
    inner = linear(arrays, f"{projector}.linear_1", normed)
    inner = inner * 0.5 * (1 + np.vectorize(erf)(inner / np.sqrt(2)))
    expected = linear(arrays, f"{projector}.linear_2", inner)
    assert np.abs(features - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("layout", ["transformers", "mlx-vlm"])
def test_its_text_is_that_of_mlx_lms_lfm2(checkpoint: Path, tmp_path: Path, layout: str) -> None:
    arrays = dict(mx.load(str(checkpoint / "model.safetensors")))
    path = checkpoint
    if layout == "mlx-vlm":
        path = save_lfm2_vl(tmp_path / "model")
        renamed = {
            name.replace("model.language_model.", "language_model.model.")
            .removeprefix("model.")
            .replace("vision_model.", ""): array
            for name, array in arrays.items()
        }
        for name in [name for name in renamed if name.endswith("conv.conv.weight")]:
            renamed[name] = renamed[name].swapaxes(1, 2)
        mx.save_safetensors(str(path / "model.safetensors"), renamed)
    defaults = {"conv_bias": False, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    model = lfm2.Model(lfm2.ModelArgs.from_dict(defaults | read_config(checkpoint)["text_config"]))
    text = {
        name.replace("model.language_model.", "model."): array
        for name, array in arrays.items()
        if "language_model" in name
    }
    model.load_weights([*model.sanitize(text).items()])
    tokens = mx.array([[40, 7, 300, 1, 2]])
    loaded = load_model(support(path)[0].model)
    assert mx.abs(loaded.model(tokens) - model(tokens)).max().item() < 1e-5
    check_model(support(path)[0].model, train=True)
    support(path)[1].encoder(loaded)


def test_what_is_computed_otherwise_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = save_lfm2_vl(tmp_path / "act", projector_hidden_act="relu")
    with pytest.raises(ModelError, match=r"projector_hidden_act.*'relu'"):
        support(path)
    path = save_lfm2_vl(tmp_path / "head", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"LFM2 .*head"):
        load_model(support(path)[0].model)
    text = {"model_type": "lfm2_moe"}
    path = save_lfm2_vl(tmp_path / "moe", text_config=text)
    with pytest.raises(ModelError, match=r"text_config.model_type.*'lfm2_moe'"):
        load_model(support(path)[0].model)
    # transformers 5 writes one file for both processors
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": settings, "use_image_special_tokens": False})
    )
    read = ViewSettings.read(tmp_path)
    assert read.encoder_patch_size == PATCH and not read.use_image_special_tokens
