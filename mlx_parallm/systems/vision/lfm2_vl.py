"""LFM2-VL: a picture in its own proportions, or, if it is large, tiles of it and the whole;
SigLIP 2 reads the patches of each, of which a square becomes one token.

transformers has this processor of pictures for torch alone (`Lfm2VlImageProcessor`), so it is
written here, with Pillow: the same sizes, the same order, and pixels that differ by one level of
256 in a few places, where torch rounds the weights of its resizing. `scripts/bench/
vision_pixels.py` compares them.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from transformers import AutoConfig

from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.systems.vision.tower import TowerEncoder, check_activation, load_tower
from mlx_parallm.types import PromptImage

IMAGE, BEGIN, END = "<image>", "<|image_start|>", "<|image_end|>"
WHOLE = "<|img_thumbnail|>"


@dataclass(frozen=True, slots=True)
class ViewSettings:
    """The settings of preprocessor_config.json, with transformers' defaults."""

    downsample_factor: int = 2
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    resample: int = Image.Resampling.BILINEAR
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    use_image_special_tokens: bool = True

    @classmethod
    def read(cls, path: Path) -> "ViewSettings":
        """Read a checkpoint's files. Raises OSError, ValueError: there is none, or it is not
        JSON."""
        written: dict[str, Any] = {}
        whole = path / "processor_config.json"
        if whole.exists():
            processor = json.loads(whole.read_text())
            written |= processor.get("image_processor") or {}
            written["use_image_special_tokens"] = processor.get("use_image_special_tokens")
        alone = path / "preprocessor_config.json"
        if alone.exists() or not whole.exists():
            written |= json.loads(alone.read_text())
        return cls.of(written)

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> "ViewSettings":
        chosen = {each.name: written.get(each.name) for each in fields(cls)}
        return cls(**{name: value for name, value in chosen.items() if value is not None})

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.encoder_patch_size * self.downsample_factor

    def whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the whole picture as it is read: sides of whole tokens, of which there
        are `min_image_tokens` to `max_image_tokens`."""
        side, area = self.side, self.side**2
        across, down = (max(side, _rounded(length, side)) for length in (width, height))
        most, least = self.max_image_tokens * area, self.min_image_tokens * area
        if across * down > most:
            times = math.sqrt((height * width) / most)
            across, down = (
                max(side, math.floor(length / times / side) * side) for length in (width, height)
            )
        elif across * down < least:
            times = math.sqrt(least / (height * width))
            across, down = (math.ceil(length * times / side) * side for length in (width, height))
        return across, down

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return how many tiles a picture has in a row and in a column; (1, 1): it is read as a
        whole."""
        if not self.do_image_splitting or self.min_tiles == self.max_tiles == 1:
            return 1, 1
        sides = (
            max(self.encoder_patch_size, _rounded(length, self.side)) for length in (height, width)
        )
        if math.prod(sides) <= self.max_image_tokens * self.side**2 * self.max_pixels_tolerance:
            return 1, 1
        return self._closest(width, height)

    def _closest(self, width: int, height: int) -> tuple[int, int]:
        """Return the grid with the nearest proportions; of equal ones the last with fewer than
        twice the picture's pixels."""
        grids = {  # made as transformers makes it: its order, among equals, is that of this set
            (w, h)
            for count in range(self.min_tiles, self.max_tiles + 1)
            for w in range(1, count + 1)
            for h in range(1, count + 1)
            if self.min_tiles <= w * h <= self.max_tiles
        }
        best, least = (1, 1), math.inf
        for grid in sorted(grids, key=math.prod):
            off = abs(width / height - grid[0] / grid[1])
            roomy = width * height > 0.5 * self.tile_size**2 * grid[0] * grid[1]
            if off < least or (off == least and roomy):
                best, least = grid, off
        return best


def _rounded(length: int, side: int) -> int:
    return round(length / side) * side


class ViewProcessor:
    """
    Args:
        settings: of the checkpoint.
        token_id: of IMAGE.
    """

    placeholder = IMAGE

    def __init__(self, settings: ViewSettings, token_id: int) -> None:
        self.token_id = token_id
        self.settings = settings

    def patches(self) -> tuple[int, int, int, int]:
        settings = self.settings
        per_token = settings.downsample_factor**2
        whole = settings.max_image_tokens * per_token
        tile = (settings.tile_size // settings.encoder_patch_size) ** 2
        if not settings.do_image_splitting:
            return per_token, whole, whole, whole
        view = max(tile, whole)
        most = max(whole, settings.max_tiles * tile + whole * settings.use_thumbnail)
        return per_token, most, view, view

    def process(self, picture: Image.Image, *, low: bool) -> PromptImage:
        """`low`: the whole picture alone."""
        settings = self.settings
        across, down = (1, 1) if low else settings.grid(*picture.size)
        views: list[Image.Image] = []
        if across * down > 1:
            side = settings.tile_size
            large = picture.resize((across * side, down * side), settings.resample)
            views += [
                large.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
                for y in range(down)
                for x in range(across)
            ]
        if across * down == 1 or settings.use_thumbnail:
            whole = settings.whole_size(*picture.size)
            views.append(picture.resize(whole, settings.resample))
        patches = np.concatenate([_patches(view, settings.encoder_patch_size) for view in views])
        shapes = np.array([view.size[::-1] for view in views]) // settings.encoder_patch_size
        counts = [int(count) for count in np.prod(-(-shapes // settings.downsample_factor), axis=1)]
        digest = hashlib.sha256(f"{across} {down} {shapes.tolist()} ".encode() + patches.tobytes())
        text = self._text(across, down, counts)
        arrays = {"patches": patches, "shapes": shapes}
        return PromptImage(digest.hexdigest(), text, sum(counts), arrays=arrays)

    def _text(self, across: int, down: int, counts: list[int]) -> str:
        """Return what is in a prompt for views of so many tokens."""
        names = [
            f"<|img_row_{row}_col_{column}|>"
            for row in range(1, down + 1)
            for column in range(1, across + 1)
        ]
        names = [*names, WHOLE] if across * down > 1 else [""]
        special = self.settings.use_image_special_tokens
        inner = "".join(
            (name if special else "") + IMAGE * count
            for name, count in zip(names, counts, strict=False)
        )
        return f"{BEGIN}{inner}{END}" if special else inner


def _patches(view: Image.Image, side: int) -> np.ndarray:
    """[N, side · side · 3] uint8: row by row, the colours of a pixel together."""
    pixels = np.asarray(view)
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    blocks = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return np.ascontiguousarray(blocks).reshape(rows * columns, -1)


class ViewEncoder(TowerEncoder):
    """SigLIP 2 over the patches of each view, and the projector."""

    rope_axes = None
    levels = 0
    bidirectional = False

    def __init__(
        self, model: Any, processor: ViewProcessor, dtype: mx.Dtype, cache_bytes: int
    ) -> None:
        self.token_id = processor.token_id
        self.cache_bytes = cache_bytes
        self._model, self._dtype = model, dtype
        settings = processor.settings
        factor = settings.rescale_factor if settings.do_rescale else 1.0
        mean, deviation = np.array(settings.image_mean), np.array(settings.image_std)
        if not settings.do_normalize:
            mean, deviation = np.zeros(3), np.ones(3)
        self._scale = np.array(factor / deviation, np.float32)
        self._shift = np.array(mean / deviation, np.float32)

    def tower_output(self, image: PromptImage) -> mx.array:
        """[patches of all views, D of the tower]."""
        parts, start = [], 0
        for rows, columns in image.arrays["shapes"].tolist():
            stop = start + rows * columns
            patches = mx.array(image.arrays["patches"][start:stop])
            colours = patches.reshape(len(patches), -1, 3).astype(mx.float32)
            pixels = colours * mx.array(self._scale) - mx.array(self._shift)
            pixels = pixels.reshape(1, *patches.shape).astype(self._dtype)
            shape = mx.array([[rows, columns]])
            *_, hidden = self._model.vision_tower(pixels, spatial_shapes=shape)
            parts.append(hidden.reshape(rows * columns, -1))
            start = stop
        return mx.concatenate(parts)

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        output = self.tower_output(image) if output is None else output
        model, parts, start = self._model, [], 0
        for rows, columns in image.arrays["shapes"].tolist():
            stop = start + rows * columns
            square = model.pixel_unshuffle(output[start:stop].reshape(1, rows, columns, -1))
            projected = model.multi_modal_projector(square)
            parts.append(projected.reshape(-1, projected.shape[-1]))
            start = stop
        features = mx.concatenate(parts)
        if len(features) != image.tokens:
            raise ValueError(f"{len(features)} features for {image.tokens} tokens of an image")
        return features


def processor(path: Path) -> ViewProcessor:
    """Return the checkpoint's processor. Raises ModelError: it has none, or another tower."""
    try:
        config = AutoConfig.from_pretrained(path)
        settings = ViewSettings.read(path)
        activations = {
            "vision_config.hidden_act": (config.vision_config.hidden_act, "gelu_pytorch_tanh"),
            "projector_hidden_act": (config.projector_hidden_act, "gelu"),
        }
        tiles = ViewProcessor(settings, config.image_token_id)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise ModelError(f"{path}: cannot load the image processor: {error}") from error
    for name, (written, computed) in activations.items():
        check_activation(path, name, written, computed)
    return tiles


def encoder(loaded: LoadedModel, tiles: ViewProcessor, cache_bytes: int) -> ViewEncoder:
    """Load the tower and the projector. Raises ModelError."""
    model, _, dtype = load_tower(loaded)
    return ViewEncoder(model, tiles, dtype, cache_bytes)
