"""Idefics3 and SmolVLM: a picture is cut into square tiles, each is read by SigLIP and becomes a
few tokens, and the whole picture is one more tile.

The pixels are transformers' own (its processor for Pillow), up to the division by 255 and the
normalisation, which the encoder does: a quarter of the memory.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.systems.vision.tower import TowerEncoder, check_activation, load_tower
from mlx_parallm.types import PromptImage

IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
ACTIVATION = "gelu_pytorch_tanh"


class TileProcessor:
    """
    Args:
        path: the checkpoint's directory.
        patch, scale: pixels of a patch's side, and how many patches' sides one token has.
        token_id: of IMAGE.
    """

    placeholder = IMAGE

    def __init__(self, path: Path, patch: int, scale: int, token_id: int) -> None:
        self.token_id = token_id
        self._tiles: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
        self._patch, self._side = patch, patch * scale

    @property
    def pixels(self) -> tuple[float, list[float], list[float]]:
        """Pixel scale, and mean and deviation per channel."""
        tiles = self._tiles
        factor = tiles.rescale_factor if tiles.do_rescale else 1.0
        mean, deviation = [*tiles.image_mean], [*tiles.image_std]
        return (factor, mean, deviation) if tiles.do_normalize else (factor, [0.0] * 3, [1.0] * 3)

    def patches(self) -> tuple[int, int, int, int]:
        tile, whole = self._tiles.max_image_size["longest_edge"], self._tiles.size["longest_edge"]
        span = (tile // self._patch) ** 2
        tiles = math.ceil(whole / tile) ** 2 + 1 if self._tiles.do_image_splitting else 1
        return (self._side // self._patch) ** 2, tiles * span, tiles * span, span

    def process(self, picture: Image.Image, *, low: bool) -> PromptImage:
        cut = self._tiles(
            [[picture]],
            do_rescale=False,
            do_normalize=False,
            do_pad=False,
            return_row_col_info=True,
            do_image_splitting=self._tiles.do_image_splitting and not low,
        )
        tiles = np.stack(cut["pixel_values"][0])  # [N, 3, side, side] uint8
        rows, columns = cut["rows"][0][0], cut["cols"][0][0]
        tokens = (tiles.shape[2] // self._side) * (tiles.shape[3] // self._side)
        digest = hashlib.sha256(f"{tiles.shape} {rows} {columns} ".encode() + tiles.tobytes())
        return PromptImage(
            digest.hexdigest(),
            prompt_text(rows, columns, tokens),
            len(tiles) * tokens,
            arrays={"tiles": tiles},
        )


def prompt_text(rows: int, columns: int, tokens: int) -> str:
    """Return what is in a prompt for a picture of so many tiles, `tokens` each, and the
    whole."""
    one = IMAGE * tokens
    lines = [
        "".join(f"{AROUND}<row_{row}_col_{column}>{one}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    return "".join(lines) + ("\n" if rows else "") + f"{AROUND}{WHOLE}{one}{AROUND}"


class TileEncoder(TowerEncoder):
    """SigLIP over tiles, and the connector."""

    rope_axes = None
    levels = 0
    bidirectional = False

    def __init__(
        self, model: Any, processor: TileProcessor, dtype: mx.Dtype, cache_bytes: int
    ) -> None:
        self.token_id = processor.token_id
        self.cache_bytes = cache_bytes
        self._model, self._dtype = model, dtype
        factor, mean, deviation = processor.pixels
        self._scale = np.array(factor / np.array(deviation), np.float32)
        self._shift = np.array(np.array(mean) / np.array(deviation), np.float32)

    def tower_output(self, image: PromptImage) -> mx.array:
        """[tiles, patches, D of the tower]."""
        tiles = mx.array(image.arrays["tiles"].transpose(0, 2, 3, 1))
        pixels = tiles.astype(mx.float32) * mx.array(self._scale) - mx.array(self._shift)
        tower = self._model.vision_model
        hidden = tower.embeddings.patch_embedding(pixels.astype(self._dtype))
        rows, columns = hidden.shape[1:3]
        places = self._places(rows)[:, None] * tower.embeddings.num_patches_per_side
        places = (places + self._places(columns)[None]).flatten()
        hidden = mx.flatten(hidden, 1, 2) + tower.embeddings.position_embedding(mx.array(places))
        output: mx.array = tower.post_layernorm(tower.encoder(hidden)[0])
        return output

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        output = self.tower_output(image) if output is None else output
        features: mx.array = self._model.connector(output).flatten(0, 1)
        if len(features) != image.tokens:
            raise ValueError(f"{len(features)} features for {image.tokens} tokens of an image")
        return features

    def _places(self, count: int) -> np.ndarray:
        """Return the learned position, of those in a full tile's row, of each of `count` patches:
        by its part of the row, in float32 as transformers computes it."""
        side = self._model.vision_model.embeddings.num_patches_per_side
        bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
        parts = np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))
        return np.searchsorted(bounds, np.minimum(parts, np.float32(1 - 1e-6)), side="right")


def processor(path: Path) -> TileProcessor:
    """Return the checkpoint's processor. Raises ModelError: it has none, or another tower."""
    try:
        config = AutoConfig.from_pretrained(path)
        vision = config.vision_config
        scale, token_id = config.scale_factor, config.image_token_id
        tiles = TileProcessor(path, vision.patch_size, scale, token_id)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise ModelError(f"{path}: cannot load the image processor: {error}") from error
    check_activation(path, "vision_config.hidden_act", vision.hidden_act, ACTIVATION)
    return tiles


def encoder(loaded: LoadedModel, tiles: TileProcessor, cache_bytes: int) -> TileEncoder:
    """Load the tower and the connector. Raises ModelError."""
    model, config, dtype = load_tower(loaded)
    # mlx-vlm leaves MLX's default
    model.vision_model.post_layernorm.eps = config.vision_config.layer_norm_eps
    return TileEncoder(model, tiles, dtype, cache_bytes)
