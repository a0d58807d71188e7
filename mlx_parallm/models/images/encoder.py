"""The face of what makes features of images, as engine and trainer know it."""

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.types import PromptImage


class ImageEncoder(Protocol):
    """A model's tower and projector, evaluated."""

    @property
    def token_id(self) -> int:
        """The token that stands in a prompt for each feature of an image."""

    @property
    def cache_bytes(self) -> int:
        """Memory of features that are kept for later prompts."""

    @property
    def rope_axes(self) -> np.ndarray | None:
        """Which of an image token's three positions turns each frequency of a rope
        (`positions.py`); None: its tokens have places like others."""

    @property
    def levels(self) -> int:
        """How many blocks add features of their own (`embedding.admit_images`)."""

    @property
    def bidirectional(self) -> bool:
        """Whether tokens of an image see each other in both directions (`spans.py`)."""

    def encode(self, image: PromptImage) -> mx.array:
        """Return an image's features [image.tokens, (1 + levels) · D], not evaluated; the first D
        stand for the embedding of its tokens. Raises ValueError: their number is another one."""


class ImageSupport(Protocol):
    """Whatever reads images for a model: its reader at once, its encoder when the model is
    loaded."""

    @property
    def reader(self) -> ImageReader: ...

    def tower_bytes(self, width: int) -> int:
        """Return what the tower takes in memory, where a number takes `width` bytes."""

    def encoder(self, loaded: Any) -> ImageEncoder:
        """Load the tower of a `LoadedModel`. Raises ModelError."""


@dataclass(frozen=True)
class ImageParts:
    """The parts of a model that sees: features for engine and trainer, and the reader of what
    clients send."""

    encoder: ImageEncoder
    reader: ImageReader
