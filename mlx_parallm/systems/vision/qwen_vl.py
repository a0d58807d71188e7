"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a picture in its own proportions, cut into patches of
which a square becomes one token; tokens have positions of three axes (models/images/positions.py).
Qwen3-VL's first blocks add their own features.

The pixels are transformers' own (its processor for Pillow), up to the division by 255 and the
normalisation, which the encoder does.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from mlx_parallm.errors import ModelError
from mlx_parallm.models.images.positions import chunked_axes, interleaved_axes
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.systems.vision.tower import TowerEncoder, check_activation, load_tower, shallow
from mlx_parallm.types import PromptImage

IMAGE = "<|image_pad|>"
ACTIVATION = "gelu_pytorch_tanh"
ACTIVATIONS = {"qwen2_vl": "quick_gelu", "qwen2_5_vl": "silu"}
ROPES = [(kind, 10000.0) for kind in ("axial", "default", None)]
LOW_PIXELS = 512 * 512  # most pixels with detail = "low", as OpenAI's


class PatchProcessor:
    """
    Args:
        path: the checkpoint's directory.
        config: its configuration, by transformers.
    """

    placeholder = IMAGE

    def __init__(self, path: Path, config: Any) -> None:
        self._patches: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
        self._side: int = config.vision_config.patch_size
        self._merge: int = config.vision_config.spatial_merge_size
        self.token_id: int = config.image_token_id

    @property
    def pixels(self) -> tuple[float, list[float], list[float]]:
        """Pixel scale, and mean and deviation per channel."""
        patches = self._patches
        return patches.rescale_factor, [*patches.image_mean], [*patches.image_std]

    def patches(self) -> tuple[int, int, int, int]:
        most = self._patches.size["longest_edge"] // self._side**2
        return self._merge**2, most, most, most

    def process(self, picture: Image.Image, *, low: bool) -> PromptImage:
        size = dict(self._patches.size)
        if low:
            size["longest_edge"] = max(min(size["longest_edge"], LOW_PIXELS), size["shortest_edge"])
        read = self._patches([picture], do_rescale=False, do_normalize=False, size=size)
        patches = np.asarray(read["pixel_values"]).astype(np.uint8)  # [N, 3 · frames · side²]
        frames, rows, columns = (int(side) for side in read["image_grid_thw"][0])
        grid = (frames, rows // self._merge, columns // self._merge)
        tokens = int(np.prod(grid))
        digest = hashlib.sha256(f"{frames} {rows} {columns} ".encode() + patches.tobytes())
        arrays = {"patches": patches, "grid": np.array([[frames, rows, columns]])}
        return PromptImage(digest.hexdigest(), IMAGE * tokens, tokens, grid, arrays)


class PatchEncoder(TowerEncoder):
    """The tower and its mergers: one at its end, and one behind each block whose hidden state
    becomes features of a level (DeepStack). mlx-vlm's tower calls them in its forward, and computes
    nothing more from what they return; so they wait (`_Gathered`) until it is done."""

    bidirectional = False

    def __init__(
        self, model: Any, config: Any, patches: PatchProcessor, dtype: mx.Dtype, cache_bytes: int
    ) -> None:
        self.token_id = patches.token_id
        self.cache_bytes = cache_bytes
        self.rope_axes: np.ndarray = rope_axes(config)
        self.levels = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        self._model, self._dtype = model, dtype
        self._patches = config.vision_config.spatial_merge_size**2  # patches a token
        factor, mean, deviation = patches.pixels
        self._scale = np.array(factor / np.array(deviation), np.float32)[:, None]
        self._shift = np.array(np.array(mean) / np.array(deviation), np.float32)[:, None]

    def tower_output(self, image: PromptImage) -> mx.array:
        """[tokens, (1 + levels) · patches of a token · D of the tower]."""
        patches = mx.array(image.arrays["patches"])
        colours = patches.reshape(len(patches), 3, -1).astype(mx.float32)
        pixels = (colours * mx.array(self._scale) - mx.array(self._shift)).reshape(patches.shape)
        grid = mx.array(image.arrays["grid"].astype(np.int32))
        tower, gathered = shallow(self._model.vision_tower), _Gathered(self._patches)
        tower["merger"] = gathered
        if self.levels:
            tower["deepstack_merger_list"] = [gathered] * self.levels
        output = tower(pixels.astype(self._dtype), grid)
        if isinstance(output, tuple):
            output = mx.concatenate([output[0], *output[1]], axis=-1)
        return cast("mx.array", output)

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        output = self.tower_output(image) if output is None else output
        tower = self._model.vision_tower
        mergers = [tower.merger, *(tower.deepstack_merger_list if self.levels else ())]
        rows = len(output) * self._patches
        parts = [
            merger(part.reshape(rows, -1))
            for merger, part in zip(mergers, mx.split(output, len(mergers), axis=-1), strict=True)
        ]
        features = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        if len(features) != image.tokens:
            raise ValueError(f"{len(features)} features for {image.tokens} tokens of an image")
        return features


@dataclass(frozen=True)
class _Gathered:
    """In a merger's place: the patches of each token side by side, [N, D] → [N / patches, …]."""

    patches: int

    def __call__(self, x: mx.array) -> mx.array:
        return x.reshape(len(x) // self.patches, -1)


def rope_axes(config: Any) -> np.ndarray:
    """Return which position turns each frequency, by the text part's configuration. Raises
    ModelError: it does not say."""
    text = config.text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    sections = rope.get("mrope_section")
    if not sections or len(sections) != 3:
        raise ModelError("config.json has no mrope_section of three numbers: cannot place images")
    interleaved = bool(rope.get("mrope_interleaved")) or config.model_type.startswith("qwen3")
    return interleaved_axes(sections) if interleaved else chunked_axes(sections)


def processor(path: Path) -> PatchProcessor:
    """Return the checkpoint's processor. Raises ModelError: it has none."""
    try:
        config = AutoConfig.from_pretrained(path)
        patches = PatchProcessor(path, config)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise ModelError(f"{path}: cannot load the image processor: {error}") from error
    rope_axes(config)
    vision, computed = config.vision_config, ACTIVATIONS.get(config.model_type, ACTIVATION)
    check_activation(path, "vision_config.hidden_act", vision.hidden_act, computed)
    turned = getattr(vision, "rope_parameters", None) or {}  # transformers 5.24's name
    if turned and (turned.get("rope_type"), turned.get("rope_theta")) not in ROPES:
        raise ModelError(
            f"{path}: vision_config.rope_parameters = {turned}: mlx-vlm's tower turns patches by"
            " a rope_theta of 10000 alone"
        )
    return patches


def encoder(loaded: LoadedModel, patches: PatchProcessor, cache_bytes: int) -> PatchEncoder:
    """Load the tower. Raises ModelError."""
    model, config, dtype = load_tower(loaded)
    return PatchEncoder(model, config, patches, dtype, cache_bytes)
