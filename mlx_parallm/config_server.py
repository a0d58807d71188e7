"""[server] and [model]: what is served, and how. Part of `config.py`'s tree."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr

from mlx_parallm.config_environment import Section


class ServerConfig(Section):
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs an API key."""
    port: int = Field(8000, ge=0, le=65535)
    """Port; 0 takes a free one and prints it."""
    batch_size: int = Field(32, ge=1)
    """Sequences decoded together at most."""
    max_concurrent_requests: int = Field(256, ge=1)
    """Requests admitted at once; more are answered 503 with Retry-After."""
    prefill_chunk: int = Field(512, ge=16)
    """Prompt tokens computed between two decode steps."""
    max_model_len: int | None = Field(None, ge=16)
    """Longest prompt + completion; default: the model's own context."""
    api_key: SecretStr | None = None
    """Bearer key of every route but /health. Better: the environment variable MLX_PARALLM_API_KEY, or api_key_file."""
    api_key_file: Path | None = None
    """File that holds the key."""
    served_model_names: tuple[str, ...] = ()
    """Further names under which the model being served (in training: the policy) answers."""
    drain_timeout_s: float = Field(5.0, ge=0)
    """How long shutdown waits for running requests before it aborts them."""


class ModelConfig(Section):
    base_path: str = "builtin:tiny"
    """Directory, hub id, or "builtin:tiny"."""
    revision: str | None = None
    """Hub revision."""
    lora_path: str | None = None
    """Adapter to start from (file or directory, mlx-lm's or PEFT's format)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' dtype; "auto" = float32 on CPU, the checkpoint's elsewhere."""
    chat_template: str | None = None
    """Jinja template, or a file that holds one; default: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the template, e.g. { enable_thinking = false }."""
    trust_remote_code: bool = False
    """Lets the tokenizer run code of the checkpoint."""
    quantized_cache: str = "auto"
    """Directory of quantize_base's 4-bit copies; "auto" = $XDG_CACHE_HOME/mlx_parallm/quantized; "off" keeps none."""

    def quantized_cache_directory(self) -> Path | None:
        """$XDG_CACHE_HOME is ~/.cache when it is not set. None = no copies are read or kept."""
        if self.quantized_cache == "off":
            return None
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mlx_parallm" / "quantized"
        return (root if self.quantized_cache == "auto" else Path(self.quantized_cache)).expanduser()
