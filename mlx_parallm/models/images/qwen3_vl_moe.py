"""The language part of Qwen3-VL-MoE, which is mlx-lm's Qwen3-MoE, from every layout of a layer's
experts that checkpoints have:

    gate_up_proj [E, D, 2 · I], down_proj [E, I, D]   the hub's files
    gate_up_proj [E, 2 · I, D], down_proj [E, D, I]   what transformers 5 computes with, and saves
    experts.N.gate_proj.weight [I, D], …              one array an expert
    switch_mlp.gate_proj.weight [E, I, D], …          mlx-lm's own, quantised too

mlx-lm takes the second for the first. Its loader expects `Model` and `ModelArgs` of an
architecture's module. The tower is left out; the image reader loads it.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from transformers import AutoConfig

from mlx_parallm.models.mlx_lm_api import BaseModelArgs, qwen3_moe, qwen3_vl_moe

TOWER = ("visual.", "vision_tower.")


@dataclass
class Qwen3VlMoeArgs(BaseModelArgs):
    """`text_config` may have transformers 5's names, and leave out its defaults."""

    model_type: str
    text_config: dict[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        text = {**self.text_config, "model_type": "qwen3_vl_moe_text"}
        complete = AutoConfig.for_model(**text).to_dict()
        rope = complete.get("rope_parameters") or {}
        complete |= {
            "model_type": "qwen3_moe",
            "num_experts": text.get("num_experts", complete.get("num_local_experts")),
            "rope_theta": text.get("rope_theta", rope.get("rope_theta", 10000.0)),
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            # for the whole model's embedding: transformers reads it at the top
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        self.text_config = {**text, **complete}


class Qwen3VlMoe(qwen3_vl_moe.Model):
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the language part's arrays under this module's names. Raises ValueError: experts
        of no shape that is known."""
        part = {}
        for name, array in weights.items():
            if name.removeprefix("model.").startswith(TOWER):
                continue
            name = name.removeprefix("model.language_model.")
            plain = name.removeprefix("language_model.")
            part[plain if plain.startswith(("model.", "lm_head.")) else f"model.{plain}"] = array
        args: qwen3_moe.ModelArgs = self.language_model.args
        for name in [name for name in part if name.endswith(".experts.gate_up_proj")]:
            prefix = name.removesuffix(".experts.gate_up_proj")
            gate_up, down = part.pop(name), part.pop(f"{prefix}.experts.down_proj")
            if not _output_first(gate_up, down, args.hidden_size, args.moe_intermediate_size):
                gate_up, down = gate_up.swapaxes(-2, -1), down.swapaxes(-2, -1)
            gate, up = mx.split(gate_up, 2, axis=1)
            for kind, array in {"gate": gate, "up": up, "down": down}.items():
                part[f"{prefix}.switch_mlp.{kind}_proj.weight"] = array
        cleaned = self.language_model.sanitize(part)
        return {f"language_model.{name}": array for name, array in cleaned.items()}


def _output_first(gate_up: mx.array, down: mx.array, width: int, inner: int) -> bool:
    """Whether experts' matrices have their outputs before their inputs. The shape of one of the two
    says so, whatever the sizes. Raises ValueError: they have neither."""
    shapes = gate_up.shape[1:], down.shape[1:]
    for first, answer in (
        (((2 * inner, width), (width, inner)), True),
        (
            ((width, 2 * inner), (inner, width)),
            False,
        ),
    ):
        if shapes == first:
            return answer
    raise ValueError(
        f"experts of {shapes[0]} and {shapes[1]}: expected {(2 * inner, width)} and"
        f" {(width, inner)}, or both the other way"
    )


Model, ModelArgs = Qwen3VlMoe, Qwen3VlMoeArgs
