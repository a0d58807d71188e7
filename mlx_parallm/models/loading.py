"""Finds and loads checkpoints through mlx-lm: a directory, a hub id, or the shipped `builtin:tiny`.

Everything returned is evaluated, hidden arrays (rope frequencies) included: a pending array must not be handed to
another thread (docs/design.md).
"""

import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.config import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import load_config, load_hf_model, load_hf_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer

BUILTIN_TINY = "builtin:tiny"
WEIGHT_PATTERNS = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
QUANTIZE_BITS = 4
QUANTIZE_GROUP_SIZE = 64


@dataclass(frozen=True)
class LoadedModel:
    model: nn.Module
    config: dict[str, Any]
    path: Path
    max_model_len: int

    @property
    def vocab_size(self) -> int:
        return vocabulary_size(self.config)


def resolve_model_path(base_path: str, revision: str | None = None) -> Path:
    """The local directory of a model; downloads a hub id. Raises ModelError."""
    if base_path == BUILTIN_TINY:
        return Path(str(importlib.resources.files("mlx_parallm"))) / "assets" / "tiny"
    path = Path(base_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: not a Hugging Face model directory")
        return path
    if path.is_file() or base_path.startswith((".", "/", "~")) or base_path.count("/") != 1:
        raise ModelError(f"no model at {base_path!r}: neither a directory nor a hub id (owner/name)")
    return _download(base_path, revision)


def load_model(config: ModelConfig, *, quantize: bool = False) -> LoadedModel:
    """Loads and evaluates the base model; 4-bit quantises it first when asked. Raises ModelError."""
    path = resolve_model_path(config.base_path, config.revision)
    try:
        model, model_config = load_hf_model(path, lazy=True, trust_remote_code=config.trust_remote_code)
        dtype = _dtype(config.dtype)
        if dtype is not None:
            model.set_dtype(dtype)
        if quantize and "quantization" not in model_config:
            quantize_base(model)
        model.freeze()
        model.eval()
        evaluate_module(model)  # weights are read here: a damaged file shows now
    except FileNotFoundError as error:
        raise ModelError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    return LoadedModel(model, model_config, path, _context_length(model_config))


def read_config(path: Path) -> dict[str, Any]:
    """config.json, with the EOS ids of generation_config.json. Raises ModelError."""
    try:
        return dict(load_config(path))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'} cannot be read: {error}") from error


def vocabulary_size(config: dict[str, Any]) -> int:
    """Rows of the embedding: token ids are below it. Raises ModelError."""
    size = config.get("text_config", config).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError("config.json has no vocab_size")
    return size


def load_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    """A tokenizer of its own for one thread (fast tokenizers must not be shared between threads)."""
    extra: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.chat_template is not None:
        template = Path(config.chat_template)
        is_file = len(config.chat_template) < 4096 and "\n" not in config.chat_template and template.is_file()
        extra["chat_template"] = template.read_text(encoding="utf-8") if is_file else config.chat_template
    eos = read_config(path).get("eos_token_id")
    try:
        return Tokenizer(load_hf_tokenizer(path, extra, eos_token_ids=eos))
    except Exception as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}") from error


def quantize_base(model: nn.Module) -> None:
    """Quantises every layer that allows it to 4 bits, groups of 64, in place. Raises ModelError if none does."""
    before = sum(isinstance(module, nn.QuantizedLinear) for module in model.modules())

    def eligible(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % QUANTIZE_GROUP_SIZE == 0

    nn.quantize(model, QUANTIZE_GROUP_SIZE, QUANTIZE_BITS, class_predicate=eligible)
    if sum(isinstance(module, nn.QuantizedLinear) for module in model.modules()) == before:
        raise ModelError(f"quantize_base: no layer's width is a multiple of {QUANTIZE_GROUP_SIZE}")


def evaluate_module(module: nn.Module) -> None:
    """Evaluates every array of every submodule, also those that `parameters()` leaves out (`_freqs`, …)."""
    mx.eval([array for child in module.modules() for array in _arrays([*child.values(), *vars(child).values()])])


def on_cpu() -> bool:
    """True when MLX computes on the CPU: float32 is then 10 to 20 times faster than half precision."""
    return mx.default_device().type == mx.DeviceType.cpu


def _arrays(values: Any) -> Iterator[mx.array]:
    for value in values:
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, list | tuple):
            yield from _arrays(value)
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            yield from _arrays(value.values())


def _dtype(name: str) -> mx.Dtype | None:
    if name == "auto":
        return mx.float32 if on_cpu() else None
    return getattr(mx, name)


def _context_length(config: dict[str, Any]) -> int:
    text_config = config.get("text_config", config)
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"):
        if isinstance(text_config.get(key), int):
            return int(text_config[key])
    return 4096


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=WEIGHT_PATTERNS))
    except RepositoryNotFoundError as error:
        raise ModelError(f"no model {repo!r} on the hub (or it is gated: run `hf auth login`)") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo!r} is not in the local cache and the hub cannot be reached") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"{repo!r} cannot be downloaded: {error}") from error
