"""The architectures that can be written as GGUF, and how each one differs from what mlx-lm holds in
memory.

Tensor names come from the `gguf` package, which maps Hugging Face's names; mlx-lm's differ from
those in few places. An architecture is in `ARCHITECTURES` when a real llama.cpp computes the same
as mlx-lm on random weights (tests/export/test_architectures.py). Everything that llama.cpp would
compute otherwise is refused here, with its key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.published.activations import KEYS, same
from mlx_parallm.models.published.mend import unheeded_keys
from mlx_parallm.models.published.reader import read_published
from mlx_parallm.models.published.windows import SLIDING, windows_of, within

Config = Mapping[str, Any]
GEMMA3_27B_LAYERS = 62  # llama.cpp knows its scale of attention by this number


@dataclass(frozen=True)
class GGUFArchitecture:
    """
    Attributes:
        name: `general.architecture` of the file.
        hf_class: transformers' class, for `architectures` of config.json.
        permuted: llama.cpp rotates neighbours, mlx-lm a head's two halves: rows of q and k change
        places.
        norm_offset: added to the weights of all norms.
        rounding: nats that llama.cpp's own arithmetic costs a float32 file: it takes GELU from a
        table in float16.
        check: return what of a model's arguments llama.cpp does not compute.
    """

    name: str
    hf_class: str
    permuted: bool = False
    norm_offset: float = 0.0
    rounding: float = 0.0
    check: Callable[[Any], list[str]] = lambda arguments: []


def arguments_of(config: Config, arguments: Any) -> Any:
    """Return mlx-lm's arguments of a model with further keys of its config.json: ropes, windows
    and the activation, which are put into mlx-lm's classes from outside."""
    published = read_published(config)
    if published is None:
        return arguments
    rope = {k: v for k, v in published.rope.items() if k != "rope_theta"}
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    windows = windows_of(published) or []
    values = vars(arguments) | {
        "rope_scaling": scaling,
        "rope_part": rope.get("partial_rotary_factor", 1.0),
        "windows": windows,
        "unheeded": unheeded_keys(dict(config)),
        "activation": next((published.get(key) for key in KEYS if published.get(key)), "silu"),
    }
    if local := published.ropes.get(SLIDING):
        values |= {"rope_local_base_freq": local["rope_theta"], "local_rope": local}
        full = [index for index, window in enumerate(windows, 1) if window is None]
        values["sliding_window_pattern"] = full[0] if full else len(windows) + 1
    return SimpleNamespace(**values)


def _check_published(architecture: GGUFArchitecture, arguments: Any) -> list[str]:
    """Return what `arguments_of` added that llama.cpp does not compute."""
    if not hasattr(arguments, "windows"):
        return []
    gemma = architecture.name == "gemma3"
    differs = [f"{key} = {value!r}" for key, value in arguments.unheeded.items()]
    if architecture.name != "llama" and (arguments.rope_scaling or {}).get("rope_type") == "llama3":
        differs.append("rope_type = llama3")  # its tensor is llama's alone
    if not same(arguments.activation, "gelu_pytorch_tanh" if gemma else "silu"):
        differs.append(f"hidden_act = {arguments.activation}")
    if arguments.rope_part != 1.0:
        differs.append(f"partial_rotary_factor = {arguments.rope_part}")
    if gemma:
        every = arguments.sliding_window_pattern
        pattern = [i % every != 0 for i in range(1, len(arguments.windows) + 1)]
        both = {None} < set(arguments.windows)  # llama.cpp knows no model of one kind alone
        if not both or [window is not None for window in arguments.windows] != pattern:
            differs.append("layer_types of another pattern")
        if arguments.local_rope.get("rope_type", "default") != "default":
            differs.append("scaled rope of sliding layers")
    elif shorter := [*filter(None, within(arguments.max_position_embeddings, arguments.windows))]:
        differs.append(f"sliding_window = {shorter[0]}")
    return differs


def _check_experts(arguments: Any) -> list[str]:
    dense = bool(arguments.mlp_only_layers) or arguments.decoder_sparse_step != 1
    return ["layers without experts"] * dense + ["norm_topk_prob = false"] * (
        not arguments.norm_topk_prob
    )


def _check_gemma3(arguments: Any) -> list[str]:
    scale, width = arguments.query_pre_attn_scalar, arguments.hidden_size
    whole = arguments.num_hidden_layers == GEMMA3_27B_LAYERS
    expected = width // arguments.num_attention_heads if whole else arguments.head_dim
    return [f"query_pre_attn_scalar = {scale:g}, but {expected}"] * (scale != expected)


ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", "LlamaForCausalLM", permuted=True),
    "mistral": GGUFArchitecture("llama", "MistralForCausalLM", permuted=True),
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": GGUFArchitecture("qwen3moe", "Qwen3MoeForCausalLM", check=_check_experts),
    "gemma3_text": GGUFArchitecture(
        "gemma3",
        "Gemma3ForCausalLM",
        norm_offset=1.0,
        rounding=0.05,
        check=_check_gemma3,
    ),
}


def architecture_of(config: Config) -> GGUFArchitecture:
    """Return the entry of a model's `model_type`. Raises ModelError: not found."""
    kind = config.get("model_type")
    architecture = ARCHITECTURES.get(str(kind))
    if architecture is None:
        raise ModelError(
            f"model_type {kind!r} cannot be exported as GGUF: only {', '.join(ARCHITECTURES)}."
            " Write safetensors with"
            " `mlx_parallm merge`, and try llama.cpp's convert_hf_to_gguf.py on them"
        )
    return architecture


def check_arguments(architecture: GGUFArchitecture, arguments: Any) -> None:
    """Raises ModelError: llama.cpp would not compute what mlx-lm does."""
    if differs := [*_check_published(architecture, arguments), *architecture.check(arguments)]:
        raise ModelError(
            f"this {arguments.model_type} cannot be GGUF: llama.cpp has no"
            f" {' and no '.join(differs)}"
        )


def tensor_name(architecture: GGUFArchitecture, mlx_name: str, layers: int) -> str:
    """Return GGUF's name of mlx-lm's "model.layers.0.self_attn.q_proj.weight". Raises
    ModelError: it has none."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, layers)
    gguf_name = names.get_name(
        mlx_name.replace(".switch_mlp.", ".experts."), try_suffixes=(".weight", ".bias")
    )
    if gguf_name is None:
        raise ModelError(
            f"tensor {mlx_name!r} has no name in GGUF's"
            f" {architecture.name}: this model has other layers"
        )
    return str(gguf_name)


def row_order(architecture: GGUFArchitecture, mlx_name: str, arguments: Any) -> np.ndarray | None:
    """Return which of mlx-lm's rows stands in each row of the file, [out] int64; None = the same
    rows.

    In a head of d rows mlx-lm rotates row i with row i + d/2, llama.cpp row 2i with row 2i + 1.
    """
    if not architecture.permuted or not any(part in mlx_name for part in (".q_proj.", ".k_proj.")):
        return None
    heads = (
        arguments.num_attention_heads if ".q_proj." in mlx_name else arguments.num_key_value_heads
    )
    size = head_size(arguments)
    return np.arange(heads * size).reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)


def offset_of(architecture: GGUFArchitecture, name: str) -> float:
    """Return the number that a tensor of the file has more than mlx-lm's."""
    return architecture.norm_offset if name.endswith("_norm.weight") else 0.0


def head_size(arguments: Any) -> int:
    return int(
        getattr(arguments, "head_dim", None)
        or arguments.hidden_size // arguments.num_attention_heads
    )


def rope_factors(model: nn.Module) -> np.ndarray | None:
    """Return what llama.cpp divides each rotation's frequency by, [head_dim / 2] float32: Llama
    3's rope scaling."""
    rope = next(
        (
            module
            for name, module in model.named_modules()
            if name.endswith("layers.0.self_attn.rope")
        ),
        None,
    )
    if getattr(rope, "kind", None) != "llama3":
        return None
    assert rope is not None
    periods = mx.array(rope._freqs)
    plain = model.args.rope_theta ** (mx.arange(0, rope.dims, 2) / rope.dims)
    return np.array(periods / plain, np.float32)


def write_metadata(writer: gguf.GGUFWriter, arguments: Any) -> None:
    """Write the architecture's numbers from mlx-lm's arguments, which have its defaults.

    Raises ModelError: a kind of rope scaling that is not in the table.
    """
    size = head_size(arguments)
    writer.add_block_count(arguments.num_hidden_layers)
    writer.add_context_length(int(arguments.max_position_embeddings))
    writer.add_embedding_length(arguments.hidden_size)
    writer.add_feed_forward_length(arguments.intermediate_size)
    writer.add_head_count(arguments.num_attention_heads)
    writer.add_head_count_kv(arguments.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(arguments.rope_theta))
    writer.add_layer_norm_rms_eps(float(arguments.rms_norm_eps))
    writer.add_vocab_size(arguments.vocab_size)
    _write_rope_scaling(writer, getattr(arguments, "rope_scaling", None) or {})
    if writer.arch == "qwen3moe":
        writer.add_expert_count(arguments.num_experts)
        writer.add_expert_used_count(arguments.num_experts_per_tok)
        writer.add_expert_feed_forward_length(arguments.moe_intermediate_size)
    if writer.arch == "gemma3":
        writer.add_sliding_window(arguments.sliding_window)
        writer.add_sliding_window_pattern(arguments.sliding_window_pattern)
        writer.add_rope_freq_base_swa(float(arguments.rope_local_base_freq))


def read_metadata(number: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return config.json's numbers from a file's: the way back of `write_metadata`.

    Args:
        number: returns the value of a key of the architecture, or its default; without one it
            raises.
        name: `general.architecture`.

    Raises ModelError: a shape of heads, or a kind of rope scaling, that is not written either.
    """
    width, heads = int(number("embedding_length")), int(number("attention.head_count"))
    size = int(number("attention.key_length", width // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, size) != size:
            raise ModelError(
                f"{name}.{key} = {number(key)}, but a head has {size} numbers: this is not read"
            )
    config: dict[str, Any] = {
        "num_hidden_layers": int(number("block_count")),
        "max_position_embeddings": int(number("context_length")),
        "hidden_size": width,
        "intermediate_size": int(number("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)),
        "head_dim": size,
        "rope_theta": _shortest(number("rope.freq_base", 10000.0)),
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
        "hidden_act": "gelu_pytorch_tanh" if name == "gemma3" else "silu",
    }
    scaling, factor = number("rope.scaling.type", "none"), number("rope.scaling.factor", 1.0)
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": _shortest(factor)}
    elif scaling != "none":
        raise ModelError(
            f"{name}.rope.scaling.type = {scaling!r} is not read: only linear, and llama3's tensor"
        )
    if name == "qwen3moe":
        config |= {
            "num_experts": int(number("expert_count")),
            "num_experts_per_tok": int(number("expert_used_count")),
            "moe_intermediate_size": int(number("expert_feed_forward_length")),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if name == "gemma3":
        whole = config["num_hidden_layers"] == GEMMA3_27B_LAYERS
        config |= {
            "sliding_window": int(number("attention.sliding_window")),
            "sliding_window_pattern": int(number("attention.sliding_window_pattern", 6)),
            "rope_local_base_freq": _shortest(number("rope.freq_base_swa", 10000.0)),
            "query_pre_attn_scalar": width // heads if whole else size,
        }
    return config


def _shortest(number: float) -> float:
    """Return the shortest decimal number of a float32: 1e-05, if the file has
    9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _write_rope_scaling(writer: gguf.GGUFWriter, scaling: Config) -> None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    elif kind not in ("default", "llama3"):  # Llama 3's is a tensor: rope_factors
        raise ModelError(
            f"rope scaling of type {kind!r} cannot be exported as GGUF: only linear and llama3"
        )
