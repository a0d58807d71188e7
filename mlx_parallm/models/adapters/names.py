"""The names of a model's layers: PEFT's adapters have those of transformers, and some classes of
mlx-lm call their layers otherwise."""

import re
from collections.abc import Collection

_SAME_WEIGHTS = (
    [(re.compile(r"^transformer\.h\."), "model.h.")],  # GPT-2, GPT-J
    [(re.compile(r"^gpt_neox\.layers\."), "model.h.")],
    [(re.compile(r"^(embed_out|lm_head)$"), "model.embed_out")],  # GPT-NeoX
    [(re.compile(r"^model\.layers\."), "backbone.layers.")],  # Nemotron-H
    [(re.compile(r"^model\.language_model\."), "language_model.model.")],  # Qwen3.5, Gemma 4, …
    [(re.compile(r"^"), "language_model.")],  # the same, loaded as models of text
    [(re.compile(r"^model\.language_model\."), "model.")],  # Step 3.5, Muse
    [(re.compile(r"^lm_head$"), "output")],  # Llama 4's text
    [(re.compile(r"\.shared_experts\."), ".shared_expert.")],  # Laguna
    [
        (re.compile(r"\.feed_forward\.w1$"), ".feed_forward.gate_proj"),  # LFM2-MoE
        (re.compile(r"\.feed_forward\.w2$"), ".feed_forward.down_proj"),
        (re.compile(r"\.feed_forward\.w3$"), ".feed_forward.up_proj"),
    ],
    [
        (re.compile(r"^model\.layers\."), "transformer.h."),  # nanochat
        (re.compile(r"\.self_attn\.([qkv])_proj$"), r".attn.c_\1"),
        (re.compile(r"\.self_attn\.o_proj$"), ".attn.c_proj"),
        (re.compile(r"\.mlp\.fc1$"), ".mlp.c_fc"),
        (re.compile(r"\.mlp\.fc2$"), ".mlp.c_proj"),
    ],
)
"""Rules, transformers' name → here. A layer of both names has the same weight."""
_WRITTEN = (
    (re.compile(r"^model\.h\.(?=\d+\.(?:attention|mlp\.dense_))"), "gpt_neox.layers."),
    (re.compile(r"^model\.h\."), "transformer.h."),
    (re.compile(r"^model\.embed_out$"), "lm_head"),
)
"""Rules, here → transformers' name: of names that no class of transformers has."""


def name_here(path: str, layers: Collection[str]) -> str:
    """Return the name of a layer among those of a model; `path` itself: there is none."""
    if path in layers:
        return path
    for rule in _SAME_WEIGHTS:
        name = path
        for pattern, replacement in rule:
            name = pattern.sub(replacement, name)
        if name in layers:
            return name
    return path


def name_of_transformers(path: str) -> str:
    """Return what transformers calls a layer, as far as its name alone tells."""
    for pattern, replacement in _WRITTEN:
        path = pattern.sub(replacement, path)
    return path
