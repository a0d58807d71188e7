"""Every mlx-lm name in use outside model architectures, imported in one place: what to check
when mlx-lm moves."""

from mlx_parallm.system.files import file_limit_kept

with file_limit_kept():
    from mlx_lm import tool_parsers
    from mlx_lm.models.bailing_hybrid import recurrent_gla as chunked_simple_decay
    from mlx_lm.models.base import scaled_dot_product_attention as mlx_lm_attention
    from mlx_lm.models.cache import (
        ArraysCache,
        CacheList,
        KVCache,
        RotatingKVCache,
        make_prompt_cache,
    )
    from mlx_lm.models.switch_layers import (
        QuantizedSwitchLinear,
        SwitchGLU,
        SwitchLinear,
        SwitchMLP,
    )
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from mlx_lm.tokenizer_utils import load as load_hf_tokenizer
    from mlx_lm.utils import MODEL_REMAPPING, dequantize_model, load_config, save_config, save_model
    from mlx_lm.utils import _get_classes as model_classes
    from mlx_lm.utils import load_model as load_hf_model

__all__ = [
    "MODEL_REMAPPING",
    "ArraysCache",
    "CacheList",
    "KVCache",
    "QuantizedSwitchLinear",
    "RotatingKVCache",
    "SwitchGLU",
    "SwitchLinear",
    "SwitchMLP",
    "TokenizerWrapper",
    "chunked_simple_decay",
    "dequantize_model",
    "load_config",
    "load_hf_model",
    "load_hf_tokenizer",
    "make_prompt_cache",
    "mlx_lm_attention",
    "model_classes",
    "save_config",
    "save_model",
    "tool_parsers",
]
