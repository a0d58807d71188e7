"""The language part of LFM2-VL, which is mlx-lm's LFM2, from transformers' names of the arrays, and
with its defaults: mlx-lm's own module reads mlx-vlm's checkpoints alone.

`Model` and `ModelArgs` are what mlx-lm's loader expects of an architecture's module. The tower and
the projector are left out; the image reader loads them.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from transformers import AutoConfig

from mlx_parallm.models.images.language_part import LanguagePart
from mlx_parallm.models.mlx_lm_api import BaseModelArgs, lfm2

TOWER = ("vision_tower.", "multi_modal_projector.")


@dataclass
class Lfm2VlArgs(BaseModelArgs):
    """`text_config` may leave out what transformers' defaults are. Raises ValueError: its text part
    is not LFM2, or has its own head."""

    model_type: str
    text_config: dict[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        text = {"model_type": "lfm2", **self.text_config}
        if text["model_type"] != "lfm2":
            raise ValueError(f"text_config.model_type = {text['model_type']!r}: expected 'lfm2'")
        complete = AutoConfig.for_model(**text).to_dict()
        if not (self.tie_word_embeddings and complete.get("tie_word_embeddings", True)):
            raise ValueError("tie_word_embeddings = false: mlx-lm's LFM2 has no head of its own")
        block = {"block_dim": complete["hidden_size"]}
        self.text = lfm2.ModelArgs.from_dict(block | text | complete)


class Lfm2Vl(LanguagePart):
    """LFM2 under `language_model`."""

    def __init__(self, args: Lfm2VlArgs) -> None:
        super().__init__(args, lfm2.Model(args.text))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the language part's arrays under this module's names."""
        part = {}
        for name, array in weights.items():
            plain = name.removeprefix("model.").removeprefix("language_model.")
            if plain.startswith(TOWER) or plain.startswith(
                "lm_head."
            ):  # the embedding, saved twice
                continue
            part[plain if plain.startswith("model.") else f"model.{plain}"] = array
        cleaned = self.language_model.sanitize(part)
        return {f"language_model.{name}": array for name, array in cleaned.items()}


Model, ModelArgs = Lfm2Vl, Lfm2VlArgs
