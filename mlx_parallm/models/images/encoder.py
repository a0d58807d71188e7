"""The face of what makes features of images, as engine and trainer know it.

Its modules lie in the model's tree beside the language part (`put_into_tree`), under the names that
they have there from then on. So whatever publishes, saves, adapts or restores weights knows them.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.errors import ModelError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.models.parameters import of_part
from mlx_parallm.types import PromptImage


class ImageEncoder(Protocol):
    """A model's tower and projector, evaluated."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Its modules, by their names in a model's tree; those of the tree that it is over."""

    def over(self, tree: nn.Module) -> Self:
        """Return the encoder that computes with the modules of a tree that has them, as they are
        at each call."""

    @property
    def trained(self) -> Sequence[str]:
        """Paths, in a model's tree, of the modules that a training trains; none: it trains the
        language part alone."""

    @property
    def token_id(self) -> int:
        """The token that is in a prompt for each feature of an image."""

    @property
    def cache_bytes(self) -> int:
        """Memory of features that are kept for later prompts."""

    @property
    def rope_axes(self) -> np.ndarray | None:
        """Which of an image token's three positions turns each frequency of a rope
        (`positions.py`); None: its tokens have places like others."""

    @property
    def levels(self) -> int:
        """How many blocks add their own features (`embedding.admit_images`)."""

    @property
    def bidirectional(self) -> bool:
        """Whether tokens of an image see each other in both directions (`spans.py`)."""

    @property
    def frozen_tower(self) -> bool:
        """Whether a training trains the connector, and not the tower."""

    def tower_output(self, image: PromptImage) -> mx.array:
        """Return an image's features before the connector, not evaluated."""

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        """Return an image's features [image.tokens, (1 + levels) · D], not evaluated; the first D
        stand for the embedding of its tokens. `output`: its `tower_output`, if there is one.
        Raises ValueError: their number is another one."""


def put_into_tree(model: nn.Module, encoder: ImageEncoder) -> ImageEncoder:
    """Put an encoder's modules into a model's tree, and return the encoder over it. Raises
    ModelError: something of that name is there."""
    for name, module in encoder.modules.items():
        if hasattr(model, name):
            raise ModelError(f"images cannot be read: the model has a part named {name} already")
        model[name] = module
    return encoder.over(model)


@contextmanager
def text_alone(model: nn.Module, encoder: ImageEncoder | None) -> Iterator[None]:
    """The tree has its language part alone, for the length of the block."""
    parts = {name: model.pop(name) for name in ([] if encoder is None else encoder.modules)}
    try:
        yield
    finally:
        for name, part in parts.items():
            model[name] = part


class TowerOutputs:
    """Outputs of a frozen tower by image, kept for later weights of the connector: least recently
    used first, at most `encoder.cache_bytes`. One for each encoder over a tree; one thread."""

    def __init__(self, encoder: ImageEncoder) -> None:
        self._encoder = encoder
        self._kept: OrderedDict[tuple[str, int], mx.array] = OrderedDict()
        self._weights: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self._kept.values())

    def of(self, image: PromptImage, adapter: int = 0) -> mx.array | None:
        """Return the tower's output for an image by the weights that are in the tree now; None:
        it has to be computed with the features. It may not be evaluated.

        Args:
            adapter: serial of the active adapter, if it changes the tower itself.
        """
        if not self._encoder.frozen_tower:
            return None
        self._forget_other_weights()
        key = (image.digest, adapter)
        if (output := self._kept.pop(key, None)) is None:
            output = self._encoder.tower_output(image)
        self._kept[key] = output
        while self.nbytes > self._encoder.cache_bytes:
            self._kept.popitem(last=False)
        return output

    def clear(self) -> None:
        self._kept.clear()

    def _forget_other_weights(self) -> None:
        weights = [
            array
            for name, module in self._encoder.modules.items()
            for path, array in tree_flatten(module.parameters())
            if not of_part(f"{name}.{path}", self._encoder.trained)
        ]
        if not same_arrays(weights, self._weights):
            self._kept.clear()
            self._weights = weights


def same_arrays(arrays: Sequence[mx.array], others: Sequence[mx.array]) -> bool:
    """Whether these are the same objects."""
    return len(arrays) == len(others) and all(map(operator.is_, arrays, others))


@dataclass(frozen=True)
class ImageParts:
    """The parts of a model that sees: features for engine and trainer, and the reader of what
    clients send."""

    encoder: ImageEncoder
    reader: ImageReader
    # another loaded model with its own parts, by the same configuration
    for_other: Callable[[Any], Any] = lambda loaded: loaded
