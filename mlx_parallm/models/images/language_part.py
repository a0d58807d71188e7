"""The language part of a model that sees, under the name `language_model`, as mlx-lm's loader takes
a model."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class LanguagePart(nn.Module):
    """
    Args:
        args: the whole model's.
        language_model: mlx-lm's model of the text.
    """

    def __init__(self, args: Any, language_model: nn.Module) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.language_model = language_model

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        logits: mx.array = self.language_model(
            inputs, cache=cache, input_embeddings=input_embeddings
        )
        return logits

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.language_model.layers
        return layers

    def make_cache(self) -> list[Any]:
        caches: list[Any] = self.language_model.make_cache()
        return caches
