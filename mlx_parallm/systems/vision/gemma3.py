"""Gemma 3: a picture becomes a square of fixed size, is read by SigLIP and pooled to 256 tokens,
which see each other in both directions (models/images/spans.py).

The pixels are transformers' own (its processor for Pillow), up to the division by 255 and the
normalisation, which the encoder does. Crops of long pictures ("pan and scan") are refused.
"""

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.published.gemma import embedding_scale
from mlx_parallm.systems.vision.tower import TowerEncoder, check_activation, load_tower
from mlx_parallm.types import PromptImage

BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
ACTIVATION = "gelu_pytorch_tanh"


class SquareProcessor:
    """
    Args:
        path: the checkpoint's directory.
        config: its configuration, by transformers.
    """

    placeholder = BEGIN

    def __init__(self, path: Path, config: Any) -> None:
        self.token_id: int = config.image_token_index
        self.tokens: int = config.mm_tokens_per_image
        vision = config.vision_config
        self._patches: int = (vision.image_size // vision.patch_size) ** 2
        self._square: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
        if self._square.do_pan_and_scan:
            raise ModelError(
                f"{path}: preprocessor_config.json has do_pan_and_scan = true, and pictures are"
                " not cropped here: take it out"
            )

    @property
    def pixels(self) -> tuple[float, list[float], list[float]]:
        """Return the normalisation of pixels: the factor of 0 … 255, and mean and deviation of each
        channel."""
        square = self._square
        return square.rescale_factor, [*square.image_mean], [*square.image_std]

    def patches(self) -> tuple[int, int, int, int]:
        return self._patches // self.tokens, self._patches, self._patches, self._patches

    def process(self, picture: Image.Image, *, low: bool) -> PromptImage:
        """`low` changes nothing: all pictures take as many tokens."""
        read = self._square([picture], do_rescale=False, do_normalize=False)
        [pixels] = np.asarray(read["pixel_values"]).astype(np.uint8)  # [3, side, side]
        digest = hashlib.sha256(f"{pixels.shape} ".encode() + pixels.tobytes())
        text = f"\n\n{BEGIN}{IMAGE * self.tokens}{END}\n\n"
        return PromptImage(digest.hexdigest(), text, self.tokens, arrays={"pixels": pixels})


class MeanPool(nn.Module):
    """The means of squares of `side` x `side` patches: x [B, H, W, D] → [B, H/side, W/side, D].
    MLX's own holds a function that cannot be copied with the model."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self._side = side

    def __call__(self, x: mx.array) -> mx.array:
        count, rows, columns, width = x.shape
        shape = count, rows // self._side, self._side, columns // self._side, self._side, width
        return x.reshape(shape).mean(axis=(2, 4))


class SquareEncoder(TowerEncoder):
    """SigLIP, the pooling and the projector.

    Args:
        scale: by which the language part multiplies what its embedding returns.
    """

    rope_axes = None
    levels = 0
    bidirectional = True

    def __init__(
        self, model: Any, square: SquareProcessor, dtype: mx.Dtype, scale: float, cache_bytes: int
    ) -> None:
        self.token_id = square.token_id
        self.cache_bytes = cache_bytes
        self._model, self._dtype, self._factor = model, dtype, scale
        factor, mean, deviation = square.pixels
        self._scale = np.array(factor / np.array(deviation), np.float32)
        self._shift = np.array(np.array(mean) / np.array(deviation), np.float32)

    def tower_output(self, image: PromptImage) -> mx.array:
        """[1, patches, D of the tower], before the pooling."""
        square = mx.array(image.arrays["pixels"].transpose(1, 2, 0)[None])
        pixels = square.astype(mx.float32) * mx.array(self._scale) - mx.array(self._shift)
        output: mx.array = self._model.vision_tower(pixels.astype(self._dtype))[0]
        return output

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        output = self.tower_output(image) if output is None else output
        projected = self._model.multi_modal_projector(output)[0]
        features = projected.astype(mx.float32) / self._factor
        if len(features) != image.tokens:
            raise ValueError(f"{len(features)} features for {image.tokens} tokens of an image")
        return features.astype(self._dtype)


def processor(path: Path) -> SquareProcessor:
    """Return the checkpoint's processor. Raises ModelError: it has none, or one that crops, or
    another tower."""
    try:
        config = AutoConfig.from_pretrained(path)
        square = SquareProcessor(path, config)
        vision = config.vision_config
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise ModelError(f"{path}: cannot load the image processor: {error}") from error
    check_activation(path, "vision_config.hidden_act", vision.hidden_act, ACTIVATION)
    return square


def encoder(loaded: LoadedModel, square: SquareProcessor, cache_bytes: int) -> SquareEncoder:
    """Load the tower and the projector. Raises ModelError."""
    model, config, dtype = load_tower(loaded)
    # mlx-vlm leaves MLX's default
    post_layernorm = model.vision_tower.vision_model.post_layernorm
    post_layernorm.eps = config.vision_config.layer_norm_eps
    projector = model.multi_modal_projector
    projector.avg_pool = MeanPool(projector.kernel_size)
    scale = embedding_scale(config.text_config.hidden_size, dtype)
    return SquareEncoder(model, square, dtype, scale, cache_bytes)
