"""The table of differences between mlx-lm's classes and transformers, by key of config.json.

A key that a class's arguments have is passed on, in the class's own spelling. Ropes, windows and
activations are put in from outside (`rope.py`, `windows.py`, `activations.py`). Here stands what is
left: keys that a class lacks or does not heed, and so has one value of, and keys that it spells in
another way. docs/models.md shows what came of it, by comparing with transformers.
"""

import tomllib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_parallm.errors import ModelError
from mlx_parallm.models.published.classes import (
    biased_experts,
    dense_names,
    each,
    folded_multipliers,
    grouped_norms,
    nanochat_names,
    norm_names,
    plain_names,
    stacked_experts,
    unnormalised_shares,
    unpacked_experts,
    wide_norms,
    wide_scans,
)
from mlx_parallm.models.published.forwards import (
    head_names,
    index_ropes,
    latent_norms,
    ling_names,
    no_zero_experts,
    norms_of_queries,
    rounded_scale,
    scaled_as_minicpm3,
    shared_keys,
    split_kernels,
    text_alone,
)
from mlx_parallm.models.published.gemma import (
    norms_in_float32,
    scale_of_its_type,
    soft_caps,
)
from mlx_parallm.models.published.layer_kinds import (
    both_kinds,
    global_types,
    layers_by_types,
    letters_of_exaone4,
    mixed_types,
    one_global,
    one_linear,
    one_of_each,
    one_of_each_in_mimo,
    ropes_of_exaone,
    ropes_where_sliding,
    short_pattern,
    some_experts,
)
from mlx_parallm.models.published.reader import GLOBAL, Published, equal
from mlx_parallm.models.published.windows import SLIDING

_KEYS = tomllib.loads((Path(__file__).parent / "keys.toml").read_text(encoding="utf-8"))
INERT, PLACED, ONE_EXPERT_AS_IT_IS = (
    frozenset(_KEYS[name]) for name in ("inert", "placed", "one_expert_as_it_is")
)

Spelling = Callable[[Published, dict[str, Any]], None]


@dataclass(frozen=True)
class Architecture:
    """How one class of mlx-lm differs from transformers' class of the same `model_type`."""

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the class does not heed, with the one value that it computes, or a function of
    `Published` that gives it."""
    activation: str = "silu"
    """Its feed-forward's activation; "": it reads the key by itself."""
    activated: bool = True
    """Whether another activation can be put in."""
    own_head: bool = False
    """The class has a head whatever `tie_word_embeddings` says: the embeddings take its place."""
    layers: Callable[[nn.Module, Published], None] | None = None
    """Puts layers of other kinds into the built model, before anything is mended in them."""
    heeds: frozenset[str] = frozenset()
    """Keys that `spell` or `mend` read."""
    spell: Spelling | None = None
    """Writes the class's own keys into its arguments."""
    differs: str = ""
    """Why mlx-lm's class of that name computes another model altogether."""
    mend: Callable[[nn.Module, Published], None] | None = None
    """Mends the built model, in place."""
    rounding: Callable[[nn.Module, Published], None] | None = None
    """Mend, in place, values that the class rounds to a half type and transformers does not."""
    own_ropes: frozenset[str] | None = None
    """The kinds of rope that the class computes by its own code, which stays; None: its ropes are
    replaced."""


def _lfm2(published: Published, arguments: dict[str, Any]) -> None:
    both_kinds(published, arguments)
    config = published.config
    arguments["block_dim"] = config.hidden_size
    arguments["block_ff_dim"] = config.intermediate_size
    types = published.config.layer_types or ()
    arguments["full_attn_idxs"] = [i for i, kind in enumerate(types) if kind == GLOBAL]


def _granitemoehybrid(published: Published, arguments: dict[str, Any]) -> None:
    config = published.config
    names = {GLOBAL: "attention"}
    arguments["layer_types"] = [names.get(kind, "mamba") for kind in config.layer_types]
    if config.position_embedding_type != "rope":
        arguments["position_embedding_type"] = "nope"
    if not config.num_local_experts:  # the class's dense part takes the other width
        arguments["intermediate_size"] = config.shared_intermediate_size


def _phimoe(published: Published, arguments: dict[str, Any]) -> None:
    arguments["num_experts_per_tok"] = 2  # sparsemixer's, whatever the key says


def _scaled_by_position(published: Published, arguments: dict[str, Any]) -> None:
    """Queries grow with their position: by keys without which transformers computes nothing."""
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if published.rope.get(key) is None:
            raise ModelError(f"config.json has rope_parameters without {key}: not supported")


def _ministral3(published: Published, arguments: dict[str, Any]) -> None:
    _scaled_by_position(published, arguments)
    global_types(published, arguments)


def _gpt2(published: Published, arguments: dict[str, Any]) -> None:
    arguments["n_ctx"] = published.config.n_positions


def _softcaps(published: Published, arguments: dict[str, Any]) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if published.get(key) is None:
            arguments.pop(key, None)  # the class's arguments have numbers alone


def _gpt_neox(published: Published, arguments: dict[str, Any]) -> None:
    arguments["rotary_emb_base"] = published.rope["rope_theta"]
    arguments["rotary_pct"] = published.rope.get("partial_rotary_factor", 1.0)


def _exaone_moe(published: Published, arguments: dict[str, Any]) -> None:
    config = published.config
    arguments["is_moe_layer"] = [kind == "sparse" for kind in config.mlp_layer_types]


def _apertus(published: Published, arguments: dict[str, Any]) -> None:
    arguments |= {"mlp_bias": False, "post_norm": False, "qk_norm": True}


def _ernie4_5_moe(published: Published, arguments: dict[str, Any]) -> None:
    arguments.setdefault("moe_capacity", [])


def _first_dense(published: Published, arguments: dict[str, Any]) -> None:
    """The class has the number of layers without experts, which come first."""
    dense = published.config.mlp_layer_types.count("dense")
    arguments["first_k_dense_replace"] = dense


def _deepseek_v32(published: Published, arguments: dict[str, Any]) -> None:
    _first_dense(published, arguments)
    _scaled(published, arguments)


def _glm_moe_dsa(published: Published, arguments: dict[str, Any]) -> None:
    _deepseek_v32(published, arguments)
    # the class takes the scaling from here
    arguments["rope_parameters"] = arguments["rope_scaling"] | {
        "rope_theta": arguments["rope_theta"]
    }
    arguments |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def _dense_first(published: Published) -> list[str]:
    types = list(published.config.mlp_layer_types)
    dense = types.count("dense")
    return ["dense"] * dense + ["sparse"] * (len(types) - dense)


def _bailing_hybrid(published: Published, arguments: dict[str, Any]) -> None:
    _first_dense(published, arguments)
    arguments["tie_word_embeddings"] = False  # transformers keeps its own head
    arguments["head_dim"] = published.config.linear_head_dim
    arguments["moe_shared_expert_intermediate_size"] = published.config.moe_intermediate_size
    _scaled(published, arguments)


def _last_of_each_group(published: Published) -> list[str]:
    """Return the layer types that mlx-lm's class of Ling has."""
    size, layers = published.config.layer_group_size, published.layers
    whole = layers // size * size
    return [
        GLOBAL if (i + 1) % size == 0 or i >= whole else "linear_attention" for i in range(layers)
    ]


def _solar_open(published: Published, arguments: dict[str, Any]) -> None:
    """The class is GLM 4 MoE's; no layer is without experts."""
    arguments |= {"intermediate_size": 0, "first_k_dense_replace": 0, "use_qk_norm": False}


def _minicpm3(published: Published, arguments: dict[str, Any]) -> None:
    config = published.config
    # the class wants a scaling of this form; the ropes are put in afterwards
    arguments["rope_scaling"] = {"short_factor": 1.0, "long_factor": 1.0}
    arguments["dim_model_base"] = config.dim_model_base


def _longcat_flash(published: Published, arguments: dict[str, Any]) -> None:
    arguments |= {"attention_method": "MLA", "zero_expert_type": "identity"}
    arguments |= {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
    _scaled(published, arguments)


def _mimo_v2_flash(published: Published, arguments: dict[str, Any]) -> None:
    config = published.config
    windows = [int(kind == SLIDING) for kind in config.layer_types]
    # it looks for one of each kind; one more is not a layer's
    arguments["hybrid_layer_pattern"] = [*windows, *({0, 1} - set(windows))]
    arguments["moe_layer_freq"] = [int(kind == "sparse") for kind in config.mlp_layer_types]
    arguments["sliding_window_size"] = config.sliding_window
    arguments["layernorm_epsilon"] = config.rms_norm_eps
    arguments["swa_rope_theta"] = arguments["rope_theta"]
    defaults = {
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.v_head_dim,
    }
    for key, value in defaults.items():
        arguments.setdefault(key, value)


def _gemma3n(published: Published, arguments: dict[str, Any]) -> None:
    arguments["rope_local_base_freq"] = arguments["rope_theta"]
    config = published.config
    kinds = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    if not {GLOBAL, SLIDING} <= set(kinds):
        raise ModelError("config.json has layer_types of one kind alone: not supported")
    arguments["altup_coef_clip"] = None  # transformers clips in training, never on saving


def _llama4(published: Published, arguments: dict[str, Any]) -> None:
    """Without chunks a layer sees the whole text: one chunk of the whole context."""
    if published.get("attention_chunk_size") is None:
        arguments["attention_chunk_size"] = published.config.max_position_embeddings


def _chunked_where_turned(published: Published) -> list[str]:
    chunked = published.get("attention_chunk_size") is not None
    turned = published.config.no_rope_layers
    return ["chunked_attention" if chunked and turns else GLOBAL for turns in turned]


def _dbrx(published: Published, arguments: dict[str, Any]) -> None:
    """Its keys are nested, and the class reads some of them alone."""
    experts, attention = published.get("ffn_config"), published.get("attn_config")
    for name, value, computed in (
        ("ffn_config.moe_normalize_expert_weights", experts["moe_normalize_expert_weights"], 1.0),
        ("ffn_config.ffn_act_fn", experts["ffn_act_fn"], {"name": "silu"}),
        ("attn_config.clip_qkv", attention["clip_qkv"], attention["clip_qkv"] or "a number"),
    ):
        if value != computed:
            raise ModelError(
                f"config.json has {name} = {value!r}: mlx-lm's class of"
                f" dbrx computes {computed!r} alone"
            )


def _every_nth_expert(published: Published) -> list[int]:
    step = published.config.interleave_moe_layer_step
    return list(range(step - 1, published.layers, step))


def _every_fourth_plain(published: Published) -> list[int]:
    return [int((i + 1) % 4 != 0) for i in range(published.layers)]


def _whole_chunks(published: Published) -> int | None:
    """Return the size of chunks if it has no effect."""
    size: int | None = published.get("attention_chunk_size")
    longest = int(published.config.max_position_embeddings)
    return size if size is not None and size >= longest else None


def _no_temperature(published: Published) -> bool:
    """Return whether layers without ropes are scaled by the position, if that changes
    nothing."""
    config = published.config
    if all(config.no_rope_layers) or config.floor_scale > config.max_position_embeddings:
        return bool(config.attn_temperature_tuning)
    return False


def _minimax_m3(published: Published, arguments: dict[str, Any]) -> None:
    part = published.rope.get("partial_rotary_factor", 1.0)
    arguments["rotary_dim"] = turned = int(published.head_dim * part)
    if turned > published.config.index_head_dim:
        raise ModelError(
            f"config.json has index_head_dim = {published.config.index_head_dim}, and turns"
            f" {turned} numbers of a head: not supported"
        )


def _muse_glimmer(published: Published, arguments: dict[str, Any]) -> None:
    arguments["layer_rope_theta"] = list(published.config.layer_rope_theta)


def _kimi_linear(published: Published, arguments: dict[str, Any]) -> None:
    both_kinds(published, arguments)
    config = published.config
    _first_dense(published, arguments)
    arguments["tie_word_embeddings"] = False  # transformers keeps its own head
    numbered = list(enumerate(config.layer_types, 1))
    arguments["linear_attn_config"] = {
        "full_attn_layers": [i for i, kind in numbered if kind == GLOBAL],
        "kda_layers": [i for i, kind in numbered if kind != GLOBAL],
        "num_heads": config.linear_num_heads,
        "head_dim": config.linear_head_dim,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
    }
    one_global(published, arguments)
    arguments.setdefault("rope_theta", 10000.0)
    arguments["mla_use_nope"] = True


def _gemma4(published: Published, arguments: dict[str, Any]) -> None:
    """The class has one size of heads, and one number of key heads, for each kind of layer."""
    config = published.config.to_dict()
    layers = {int(index): keys for index, keys in config["per_layer_config"].items()}
    kinds = list(enumerate(config["layer_types"]))
    of_global = [layers.get(i, {}) for i, kind in kinds if kind == GLOBAL] or [{}]
    others = any(layers.get(i) for i, kind in kinds if kind != GLOBAL)
    alike = of_global[0]
    if (
        others
        or any(keys != alike for keys in of_global)
        or set(alike) - {"head_dim", "num_key_value_heads"}
    ):
        raise ModelError(
            f"config.json has per_layer_config = {config['per_layer_config']}: mlx-lm's class"
            " computes one head_dim and one num_key_value_heads for all layers of full_attention"
        )
    arguments["global_head_dim"] = alike.get("head_dim", config["head_dim"])
    arguments["num_global_key_value_heads"] = alike.get("num_key_value_heads")
    arguments["final_logit_softcapping"] = config.get("final_logit_softcapping")  # none is none
    if "hidden_size_per_layer_input" not in config:  # Gemma 4 Unified has none
        arguments["hidden_size_per_layer_input"] = 0
    arguments.pop("rope_scaling", None)


def _step3p5(published: Published, arguments: dict[str, Any]) -> None:
    heads, types = published.get("num_sliding_attention_heads"), published.get("layer_types")
    by_layer = {str(i): keys for i, keys in (published.get("per_layer_config") or {}).items()}
    windowed = {"num_attention_heads": heads}
    if any(keys != windowed or types[int(i)] != SLIDING for i, keys in by_layer.items()):
        raise ModelError(f"config.json has per_layer_config = {by_layer}: not supported")
    sparse = [str(i) for i, kind in enumerate(published.config.mlp_layer_types) if kind == "sparse"]
    if not sparse:  # the class tells a published file from its own by its experts' names
        raise ModelError("config.json has mlp_layer_types without sparse: not supported")
    arguments["moe_layers_enum"] = ",".join(sparse)
    arguments["attention_other_setting"] = {
        "num_attention_heads": heads,
        "num_attention_groups": published.get("num_key_value_heads"),
    }
    arguments |= {"norm_expert_weight": True, "use_head_wise_attn_gate": True}
    arguments.setdefault("sliding_window", None)


def _rotary_dim(published: Published, arguments: dict[str, Any]) -> None:
    part = published.rope.get("partial_rotary_factor", 1.0)
    arguments["rotary_dim"] = int(published.head_dim * part)
    arguments.setdefault("shared_intermediate_size", 0)


def _mamba2(published: Published, arguments: dict[str, Any]) -> None:
    config = published.config
    arguments["intermediate_size"] = int(config.expand * config.hidden_size)
    arguments.setdefault("max_position_embeddings", 4096)


def _nemotron_h(published: Published, arguments: dict[str, Any]) -> None:
    both_kinds(published, arguments)
    letters = {"mamba": "M", "linear_attention": "M", "attention": "*", GLOBAL: "*"}
    letters |= {"mlp": "-", "moe": "E"}
    kinds = published.config.layers_block_type
    # the class's own key is [0, inf] in every file; transformers clips by this one
    arguments["time_step_limit"] = (published.config.time_step_min, float("inf"))
    arguments["hybrid_override_pattern"] = [letters.get(kind, kind) for kind in kinds]


def _scaled(published: Published, arguments: dict[str, Any]) -> None:
    """Undo the class's own factor on its attention's scale."""
    rope = published.rope
    scaled = rope.get("rope_type", "default") != "default"
    arguments["rope_scaling"] = {
        "type": "yarn",
        "factor": rope.get("factor", 1.0) if scaled else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim", 0) if scaled else 0,
        "mscale": 1,
    }


def _four_widths(published: Published) -> int:
    return 4 * int(published.config.hidden_size)


def _head_dim(published: Published) -> int | None:
    """Return the size of a head in a class that has no `head_dim`."""
    if not published.get("head_dim"):
        return None
    return int(published.config.hidden_size // published.config.num_attention_heads)


UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
NO_BIAS = {"attention_bias": False}
CAUSAL = {"use_bidirectional_attention": None}


def _causal_in_texts(published: Published) -> str | None:
    """Return how Gemma 4 sees a text: only among an image's tokens in both directions."""
    wanted = published.get("use_bidirectional_attention")
    return None if wanted == "all" else wanted


TANH = "gelu_pytorch_tanh"
PLAIN = Architecture()
SAME_CLASS = {
    "gemma4_unified_text": "gemma4_text",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""`model_type` of the text part of a model that sees → that of the class that computes it."""
ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture(
        NO_BIAS, heeds=frozenset({"global_attn_every_n_layers"}), spell=one_global
    ),
    "apertus": Architecture(NO_BIAS, "xielu", False, spell=_apertus),
    "bailing_hybrid": Architecture(
        NO_BIAS
        | {"kda_safe_gate": True, "moe_renormalize": True}
        | {"layer_types": _last_of_each_group, "mlp_layer_types": _dense_first},
        heeds=frozenset(
            {"linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "rope_theta"}
        ),
        spell=_bailing_hybrid,
        activated=False,
        mend=each(latent_norms, ling_names),
    ),
    "cohere": Architecture(TIED),
    "cohere2": Architecture(
        TIED | {"head_dim": _head_dim}, spell=short_pattern, mend=ropes_where_sliding
    ),
    "dbrx": Architecture(heeds=frozenset({"attn_config", "ffn_config"}), spell=_dbrx),
    "deepseek_v2": Architecture(
        {"mlp_bias": False, "norm_topk_prob": False}, spell=_scaled, own_head=True
    ),
    "deepseek_v3": Architecture(spell=_scaled, own_head=True),
    "deepseek_v32": Architecture(
        {"mlp_bias": False, "mlp_layer_types": _dense_first}, spell=_deepseek_v32, own_head=True
    ),
    "dots1": Architecture(NO_BIAS),
    "ernie4_5_moe": Architecture(
        {"use_bias": False, "moe_norm_min": 1e-12}, spell=_ernie4_5_moe, mend=biased_experts
    ),
    "exaone": Architecture({"head_dim": _head_dim}),
    "exaone4": Architecture(spell=letters_of_exaone4, mend=one_of_each),
    "exaone_moe": Architecture(
        heeds=frozenset({"mlp_layer_types", "first_k_dense_replace"}),
        spell=_exaone_moe,
        mend=ropes_of_exaone,
    ),
    "falcon_h1": Architecture(
        {"time_step_limit": (0.0, float("inf")), "mamba_rms_norm": False},
        activated=False,
        mend=folded_multipliers,
    ),
    "falcon_mamba": Architecture({"layer_norm_epsilon": 1e-5}, activated=False),
    "gemma": Architecture(TIED | NO_BIAS | CAUSAL, "gelu", rounding=norms_in_float32),
    "gemma2": Architecture(
        TIED | NO_BIAS | CAUSAL, TANH, spell=_softcaps, mend=soft_caps, rounding=norms_in_float32
    ),
    "gemma3_text": Architecture(
        NO_BIAS
        | {
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        TANH,
        heeds=frozenset({"tie_word_embeddings"}),
        spell=short_pattern,
        mend=scale_of_its_type,
        rounding=norms_in_float32,
    ),
    "gemma4_text": Architecture(
        NO_BIAS | {"use_bidirectional_attention": _causal_in_texts},
        TANH,
        False,
        heeds=frozenset({"per_layer_config"}),
        spell=_gemma4,
        own_ropes=frozenset({"default", "proportional"}),
    ),
    "gemma3n_text": Architecture(NO_BIAS | TIED, TANH, False, spell=_gemma3n, mend=shared_keys),
    "glm4": Architecture(own_head=True),
    "glm4_moe": Architecture(own_head=True),
    "glm4_moe_lite": Architecture(
        {"mlp_layer_types": _dense_first}, spell=_deepseek_v32, mend=latent_norms, own_head=True
    ),
    "glm_moe_dsa": Architecture(
        {"mlp_bias": False, "mlp_layer_types": _dense_first}
        | {"indexer_types": lambda published: ["full"] * published.layers},
        spell=_glm_moe_dsa,
        own_head=True,
    ),
    "gpt2": Architecture(
        TIED | {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        TANH,
        spell=_gpt2,
        mend=plain_names,
    ),
    "gpt_bigcode": Architecture({"scale_attn_weights": True, "multi_query": True}, "gelu"),
    "gpt_neox": Architecture(
        UNTIED | {"attention_bias": True, "intermediate_size": _four_widths}, TANH, spell=_gpt_neox
    ),
    "gpt_oss": Architecture(
        {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        activated=False,
        spell=mixed_types,
        mend=unpacked_experts,
        own_head=True,
    ),
    "gptj": Architecture(UNTIED | {"n_inner": None}, TANH),
    "granitemoehybrid": Architecture(
        spell=_granitemoehybrid, activated=False, mend=grouped_norms, rounding=wide_scans
    ),
    "helium": Architecture(own_head=True),
    "jamba": Architecture(activated=False, spell=both_kinds, mend=unnormalised_shares),
    "kimi_linear": Architecture(
        NO_BIAS | {"q_lora_rank": None, "mlp_layer_types": _dense_first},
        heeds=frozenset({"linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"}),
        spell=_kimi_linear,
        activated=False,
        mend=each(dense_names, latent_norms),
    ),
    "lfm2": Architecture(TIED, spell=_lfm2),
    "lfm2_moe": Architecture(TIED, spell=_lfm2),
    "llama4": Architecture(
        UNTIED
        | {"num_experts_per_tok": 1, "moe_layers": _every_nth_expert}
        | {"no_rope_layers": _every_fourth_plain, "layer_types": _chunked_where_turned},
        spell=_llama4,
        mend=norms_of_queries,
    ),
    "llama4_text": Architecture(
        NO_BIAS
        | {"moe_layers": [], "attention_chunk_size": _whole_chunks}
        | {"attn_temperature_tuning": _no_temperature},
        heeds=frozenset(
            {"num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step", "attn_scale"}
            | {"floor_scale", "router_jitter_noise"}
        ),
        mend=each(norms_of_queries, head_names),
    ),
    "laguna": Architecture(spell=one_global),
    "longcat_flash": Architecture(
        spell=_longcat_flash, mend=each(latent_norms, no_zero_experts), own_head=True
    ),
    "mamba": Architecture({"layer_norm_epsilon": 1e-5}, activated=False),
    "mamba2": Architecture(
        {"layer_norm_epsilon": 1e-5},
        activated=False,
        spell=_mamba2,
        mend=grouped_norms,
        rounding=wide_scans,
    ),
    "mellum": Architecture(NO_BIAS, spell=one_global),
    "muse_glimmer_text": Architecture(
        NO_BIAS, spell=_muse_glimmer, mend=text_alone, rounding=norms_in_float32
    ),
    "minimax_m3_vl_text": Architecture(
        heeds=frozenset({"rotary_dim"}),
        activation="",
        spell=_minimax_m3,
        mend=index_ropes,
        rounding=norms_in_float32,
    ),
    "mimo_v2_flash": Architecture(
        NO_BIAS,
        heeds=frozenset({"mlp_layer_types", "rms_norm_eps"}),
        spell=_mimo_v2_flash,
        mend=one_of_each_in_mimo,
        own_head=True,
    ),
    "minicpm3": Architecture(
        {
            "mlp_bias": False,
            "q_lora_rank": lambda published: published.get("q_lora_rank", "a rank"),
        },
        heeds=frozenset({"dim_model_base"}),
        spell=_minicpm3,
        mend=each(latent_norms, scaled_as_minicpm3),
    ),
    "minimax": Architecture(
        differs="MiniMax-Text-01 has lightning attention; mlx-lm's class computes MiniMax-M2"
    ),
    "minimax_m2": Architecture(spell=_rotary_dim),
    "ministral3": Architecture(spell=_ministral3),
    "mistral4": Architecture(spell=_scaled_by_position),
    "nanochat": Architecture(
        UNTIED | NO_BIAS | {"final_logit_softcapping": 15.0, "rms_norm_eps": 1e-5},
        "relu2",
        mend=nanochat_names,
        own_ropes=frozenset({"default"}),
    ),
    "nemotron": Architecture(activation="relu2"),
    "nemotron_h": Architecture(
        {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
        heeds=frozenset({"layers_block_type", "tie_word_embeddings"}),  # its head is its own
        activated=False,
        spell=_nemotron_h,
        rounding=wide_scans,
    ),
    "olmo3": Architecture(spell=mixed_types),
    "olmo_hybrid": Architecture(activated=False, mend=each(norm_names, split_kernels)),
    "olmoe": Architecture({"clip_qkv": None}),
    "phi": Architecture(UNTIED | {"qk_layernorm": False}, TANH),
    "phimoe": Architecture(UNTIED | {"attention_bias": True, "lm_head_bias": True}, spell=_phimoe),
    "qwen2_moe": Architecture(
        {"norm_topk_prob": False, "qkv_bias": True}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        own_head=True,
    ),
    "qwen3": Architecture(NO_BIAS),
    "qwen3_5_moe_text": Architecture(
        activated=False,
        layers=layers_by_types,
        spell=one_linear,
        mend=stacked_experts,
        rounding=wide_norms,
    ),
    "qwen3_5_text": Architecture(
        activated=False, layers=layers_by_types, spell=one_linear, rounding=wide_norms
    ),
    "qwen3_moe": Architecture(NO_BIAS),
    "qwen3_next": Architecture(
        activated=False, layers=layers_by_types, spell=some_experts, rounding=wide_norms
    ),
    "recurrent_gemma": Architecture(
        TIED | NO_BIAS | {"num_key_value_heads": 1, "conv1d_width": 4},
        TANH,
        activated=False,
        spell=both_kinds,
        mend=rounded_scale,
        rounding=norms_in_float32,
    ),
    "smollm3": Architecture(spell=global_types),
    "step3p5": Architecture(
        NO_BIAS
        | {"mlp_bias": False, "query_pre_attn_scalar": lambda published: published.head_dim},
        heeds=frozenset(
            {"mlp_layer_types", "num_sliding_attention_heads", "per_layer_config"}
            | {"mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers"}
        ),
        activated=False,
        spell=_step3p5,
        rounding=wide_norms,
        own_head=True,
    ),
    "solar_open": Architecture(spell=_solar_open, own_head=True),
    "stablelm": Architecture(own_head=True),
    "starcoder2": Architecture({"use_bias": True}, "gelu"),
}


def architecture_of(published: Published) -> Architecture:
    """Return a class's entry."""
    if (whole := ARCHITECTURES.get(published.within)) is not None:
        return whole
    return ARCHITECTURES.get(SAME_CLASS.get(published.model_type, published.model_type), PLAIN)


def class_arguments(
    published: Published, names: frozenset[str], written: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of mlx-lm's class, whose names are `names`: `given` (config.json, or a
    part of it) with every key that transformers knows in the class's spelling."""
    arguments = {key: value for key, value in written.items() if key != "rope_traditional"}
    for name in names - {"model_type"}:
        if name in published.keys or name in published.config.attribute_map:
            value = published.get(name)
            if value is not None or name in written:
                arguments[name] = deepcopy(value)  # classes change their arguments
    rope = published.rope
    if rope:
        arguments["rope_theta"] = rope.get("rope_theta")
        arguments["rope_scaling"] = None  # the ropes are put in from outside
        arguments["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    if (
        "head_dim" in names
        and arguments.get("head_dim") is None
        and "num_attention_heads" in published.keys
    ):
        arguments["head_dim"] = published.head_dim
    if spell := architecture_of(published).spell:
        spell(published, arguments)
    return arguments


def unheeded(published: Published, names: frozenset[str]) -> dict[str, Any]:
    """Return the keys of config.json that change the forward pass and that nothing heeds, with
    their values."""
    architecture = architecture_of(published)
    left_over: dict[str, Any] = {}
    fixed = dict(architecture.fixed)
    aliases = {alias: name for name, alias in published.config.attribute_map.items()}
    read = INERT | PLACED | names | architecture.heeds
    if architecture.own_head:
        read |= {"tie_word_embeddings"}
    read |= {alias for alias, name in aliases.items() if name in names}
    if "head_dim" not in names and "qk_rope_head_dim" not in names:
        fixed.setdefault("head_dim", _head_dim)
    for key in sorted(published.keys):
        value = published.get(key)
        if key in fixed:
            allowed = fixed[key](published) if callable(fixed[key]) else fixed[key]
            if not equal(value, allowed) and (value or allowed):
                left_over[key] = value
        elif key not in read and not published.is_usual(key):
            left_over[key] = value
    if (
        published.get("norm_topk_prob", True)
        and published.get("num_experts_per_tok") == 1
        and published.model_type in ONE_EXPERT_AS_IT_IS
    ):
        left_over["num_experts_per_tok"] = 1
    return left_over
