"""The language part of Idefics3 and SmolVLM, which mlx-lm lacks: its own Llama, and the names of
the checkpoints' arrays.

`Model` and `ModelArgs` are what mlx-lm's loader expects of an architecture's module. The tower and
the connector are left out; the image reader loads them.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from transformers import AutoConfig

from mlx_parallm.models.images.language_part import LanguagePart
from mlx_parallm.models.mlx_lm_api import BaseModelArgs, llama

TOWER = ("vision_model.", "connector.")
# mlx-vlm's checkpoints, this program's own, and transformers' name the language part differently
_PREFIXES = ("model.text_model.", "text_model.", "language_model.model.", "language_model.")
_HEADS = ("lm_head.", "language_model.lm_head.", "model.lm_head.")


@dataclass
class ModelArgs(BaseModelArgs):
    """`text_config` may leave out what transformers' defaults are, as its checkpoints do."""

    model_type: str
    text_config: dict[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        text = {"model_type": "llama", **self.text_config}
        complete = AutoConfig.for_model(**text).to_dict()
        rope = complete.get("rope_parameters") or {}
        self.text = llama.ModelArgs.from_dict(
            complete
            | {
                "rope_theta": text.get("rope_theta", rope.get("rope_theta", 10000.0)),
                "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
                # for the whole model's embedding: transformers reads it at the top
                "tie_word_embeddings": self.tie_word_embeddings,
            }
        )


class Model(LanguagePart):
    """Llama under `language_model`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args, llama.Model(args.text))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the language part's arrays under this module's names."""
        kept = {}
        for name, array in weights.items():
            if name.removeprefix("model.").startswith(TOWER):
                continue
            kept[_own_name(name)] = array
        head = "language_model.lm_head.weight"
        if not self.args.tie_word_embeddings and head not in kept:  # saved once, as it is shared
            kept[head] = kept["language_model.model.embed_tokens.weight"]
        part = {name.removeprefix("language_model."): array for name, array in kept.items()}
        cleaned = self.language_model.sanitize(part)
        return {f"language_model.{name}": array for name, array in cleaned.items()}


def _own_name(name: str) -> str:
    for prefix in _HEADS:
        if name.startswith(prefix):
            return f"language_model.lm_head.{name.removeprefix(prefix)}"
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return f"language_model.model.{name.removeprefix(prefix)}"
    return name
