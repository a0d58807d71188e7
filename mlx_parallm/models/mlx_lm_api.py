"""Every mlx-lm name in use outside model architectures, imported in one place: what to check
when mlx-lm moves."""

from importlib import import_module
from typing import Any

from mlx_parallm.system.files import file_limit_kept

with file_limit_kept():
    from mlx_lm import tool_parsers
    from mlx_lm.models import lfm2, llama, qwen3_moe, qwen3_vl_moe
    from mlx_lm.models.bailing_hybrid import recurrent_gla as chunked_simple_decay
    from mlx_lm.models.base import BaseModelArgs, create_attention_mask
    from mlx_lm.models.base import scaled_dot_product_attention as mlx_lm_attention
    from mlx_lm.models.cache import (
        ArraysCache,
        CacheList,
        KVCache,
        RotatingKVCache,
        make_prompt_cache,
    )
    from mlx_lm.models.ssm import compute_dt as ssm_steps
    from mlx_lm.models.ssm import segsum as segment_sums
    from mlx_lm.models.switch_layers import (
        QuantizedSwitchLinear,
        SwitchGLU,
        SwitchLinear,
        SwitchMLP,
    )
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from mlx_lm.tokenizer_utils import _infer_tool_parser as infer_tool_parser
    from mlx_lm.tokenizer_utils import load as load_hf_tokenizer
    from mlx_lm.utils import (
        MODEL_REMAPPING,
        _get_classes,
        dequantize_model,
        load_config,
        save_config,
        save_model,
    )
    from mlx_lm.utils import load_model as load_mlx_lm_model

OWN_ARCHITECTURES = {
    "idefics3": "mlx_parallm.models.images.idefics3",
    "lfm2_vl": "mlx_parallm.models.images.lfm2_vl",
    "qwen3_vl_moe": "mlx_parallm.models.images.qwen3_vl_moe",
    "smolvlm": "mlx_parallm.models.images.idefics3",
}
"""`model_type` → a module of ours with `Model` and `ModelArgs`, where mlx-lm has none, or does not
read all checkpoints."""


TEXT_ALONE = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""`model_type` of a text model that is saved alone → of the model that sees, whose module reads
it."""


def mlx_lm_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes of a model and of its arguments, as they are. Raises ValueError: none of
    that name."""
    name = OWN_ARCHITECTURES.get(config["model_type"])
    if config["model_type"] == "bailing_hybrid" and "group_norm_size" not in config:
        name = "mlx_lm.models.bailing_moe_v3"  # transformers' Ling, not the one of Ring 2.5
    if name is None:
        config = config | {"model_type": TEXT_ALONE.get(config["model_type"], config["model_type"])}
        classes: tuple[Any, Any] = _get_classes(config)
        return classes
    module = import_module(name)
    return module.Model, module.ModelArgs


__all__ = [
    "MODEL_REMAPPING",
    "ArraysCache",
    "BaseModelArgs",
    "CacheList",
    "KVCache",
    "QuantizedSwitchLinear",
    "RotatingKVCache",
    "SwitchGLU",
    "SwitchLinear",
    "SwitchMLP",
    "TokenizerWrapper",
    "chunked_simple_decay",
    "create_attention_mask",
    "dequantize_model",
    "infer_tool_parser",
    "lfm2",
    "llama",
    "load_config",
    "load_hf_tokenizer",
    "load_mlx_lm_model",
    "make_prompt_cache",
    "mlx_lm_attention",
    "mlx_lm_classes",
    "qwen3_moe",
    "qwen3_vl_moe",
    "save_config",
    "save_model",
    "segment_sums",
    "ssm_steps",
    "tool_parsers",
]
