"""Finds and loads checkpoints through mlx-lm: a directory, a hub id, or the shipped `builtin:tiny`.

Everything returned is evaluated, hidden arrays (rope frequencies) included: a pending array must
not be handed to another thread (docs/design.md).
"""

import copy
import dataclasses
import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from transformers import PreTrainedConfig

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.models.checkpoint_files import (
    BUILTIN,
    check_directory,
    check_names,
    check_numbers,
    check_quantization,
    directory_of,
    is_awq,
    is_gguf,
    load_fault,
    unknown_layers,
)
from mlx_parallm.models.experts.wide import widen_experts
from mlx_parallm.models.gguf.cache import converted
from mlx_parallm.models.heads.float32_head import widen_head
from mlx_parallm.models.hub import download, fetch_config
from mlx_parallm.models.images.encoder import ImageParts, text_alone
from mlx_parallm.models.mlx_lm_api import (
    load_config,
    tool_parsers,
)
from mlx_parallm.models.ops import use_unpacking
from mlx_parallm.models.published.classes import set_dtype
from mlx_parallm.models.published.generation_config import end_tokens
from mlx_parallm.models.published.mend import load_hf_model
from mlx_parallm.models.published.reader import own_values, read_published
from mlx_parallm.models.published.rope import fixed_ropes, longest_text
from mlx_parallm.models.published.tokenizer_files import is_generic, load_wrapper
from mlx_parallm.models.quantize import load_quantized, restore_zero_points
from mlx_parallm.models.recurrent.fast_paths import prove
from mlx_parallm.models.recurrent.layers import use_chunks
from mlx_parallm.models.support import check_config
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.device.traits import half_precision_is_slow
from mlx_parallm.system.files import is_directory, is_file, local_path
from mlx_parallm.system.heap import give_back_freed_memory
from mlx_parallm.system.log import get_logger

log = get_logger("model")
TOKENIZER_FILES = ("tokenizer*", "tekken.json", "vocab*", "*.tiktoken", "*.model", "*.bpe*")
INDEXED = 2**31 - 1  # numbers of an array that 32 bits count
TEMPLATE_SUFFIXES = (
    ".jinja",
    ".jinja2",
    ".j2",
    ".txt",
    ".json",
)  # files that model.chat_template may name
# Wide bounds: beyond them MLX's errors say nothing, or the model is being built for minutes.
_MOST: dict[str, float] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "rope_theta": 1e30,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4096),
}


@dataclass(frozen=True)
class LoadedModel:
    model: nn.Module
    config: dict[str, Any]
    path: Path
    max_model_len: int
    name: str = ""  # as the configuration or mlx-lm names it: a hub id or a directory
    image_parts: ImageParts | None = None  # None: it reads text alone

    @property
    def vocab_size(self) -> int:
        return vocabulary_size(self.config)

    @property
    def image_reader(self) -> ImageReader | None:
        return None if self.image_parts is None else self.image_parts.reader

    def text_alone(self) -> AbstractContextManager[None]:
        """Let the tree have its language part alone, for the length of a block."""
        return text_alone(
            self.model, None if self.image_parts is None else self.image_parts.encoder
        )


LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    ArithmeticError,
    SystemError,
)
"""What a class of another package raises of a checkpoint that it cannot read."""


def check_model(config: ModelConfig, *, train: bool, quantize: bool = False) -> dict[str, Any]:
    """Refuses what config.json, which it returns, alone shows to be impossible; of a hub id only
    that file is fetched.

    Raises ModelError: no such model, not a checkpoint, an architecture that cannot be served or
    (`train`) trained;
    ConfigError: `quantize` of a checkpoint that is quantised.
    """
    directory = _local(config.base_path, config.dtype)
    file = (
        directory / "config.json" if directory else fetch_config(config.base_path, config.revision)
    )
    model_config = _read_fixed(file.parent, config)
    check_quantization(model_config, config.base_path, quantize=quantize)
    check_config(model_config, train=train)
    return model_config


def resolve_model_path(
    base_path: str, revision: str | None = None, *, fetch: bool = True, dtype: str = "auto"
) -> Path:
    """Return the local directory of a model, complete; downloads a hub id, converts a GGUF file.

    Args:
        fetch: False: only look into the caches.
        dtype: model.dtype, for a GGUF file.

    Raises ModelError, ConfigError, CheckpointError.
    """
    directory = _local(base_path, dtype, convert=fetch) or download(
        base_path, revision, fetch=fetch
    )
    check_directory(directory)
    return directory


def load_model(config: ModelConfig, *, quantize: bool = False) -> LoadedModel:
    """Loads and evaluates the base model; 4-bit quantises it first when asked. Raises
    ModelError, ConfigError."""
    path = resolve_model_path(config.base_path, config.revision, dtype=config.dtype)
    model_config = _read_fixed(path, config)
    check_quantization(model_config, config.base_path, quantize=quantize, directory=path)
    try:
        if quantize:
            model, model_config = load_quantized(
                path,
                trust_remote_code=config.trust_remote_code,
                cache=config.quantized_cache_directory(),
                rope_length=config.rope_length,
            )
        else:
            model, model_config = load_hf_model(
                path,
                lazy=True,
                trust_remote_code=config.trust_remote_code,
                model_config=model_config,
            )
        check_numbers(model, config.base_path)
        if unknown := unknown_layers(model, model_config):
            log.warning(
                "config.json's quantization names layers that the model has not",
                layers=", ".join(unknown[:5]),
                count=len(unknown),
            )
        dtype = _dtype(config.dtype)  # None: no number of MLX's types compares with it
        if is_awq(read_config(path)) and dtype is not None and dtype == mx.float32:
            restore_zero_points(model)
        _make_ready(model, config.dtype, fp32_lm_head=config.fp32_lm_head)
    except ModelError:
        raise
    except FileNotFoundError as error:
        raise ModelError(f"{path}: {error}") from error
    except LOADING_ERRORS as error:
        raise load_fault(path, model_config, error, own_values(model_config)) from error
    give_back_freed_memory()  # the memory of the weights as they were read
    return LoadedModel(model, model_config, path, _context_length(model_config), config.base_path)


def adopt_model(
    model: nn.Module, tokenizer: Any = None, *, fp32_lm_head: bool = False
) -> LoadedModel:
    """Wrap a model that mlx-lm has loaded. The result is a copy that shares the arrays of the right
    dtype.

    `path` is the directory that the tokenizer came from, if any: a checkpoint there gives the
    configuration, else the model's own arguments do. `fp32_lm_head`: model.fp32_lm_head. Raises
    ModelError: it has none.
    """
    name = str(getattr(tokenizer, "name_or_path", ""))
    path = Path(name)
    if name and is_file(path / "config.json"):
        config = read_config(path)
    elif dataclasses.is_dataclass(arguments := getattr(model, "args", None)):
        config = dataclasses.asdict(arguments)  # type: ignore[arg-type]
    else:
        raise ModelError(
            f"{type(model).__name__} is not a model of mlx-lm: it has no args,"
            " and its tokenizer no checkpoint"
        )
    copied = copy.deepcopy(model)
    _make_ready(copied, "auto", fp32_lm_head=fp32_lm_head)
    return LoadedModel(copied, config, path, _context_length(config), name)


def read_config(path: Path) -> dict[str, Any]:
    """config.json, with the EOS ids of generation_config.json. Raises ModelError: also a number
    that no model has."""
    try:
        config = dict(load_config(path))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'} cannot be read: {error}") from error
    for part in (config, config.get("text_config")):
        for name, number in part.items() if isinstance(part, dict) else ():
            if (
                (most := _MOST.get(name))
                and isinstance(number, int | float)
                and not 0 < number <= most
            ):
                raise ModelError(
                    f"{path / 'config.json'}: {name} = {number}: expected"
                    f" more than 0, at most {most:g}"
                )
    return config


def _read_fixed(path: Path, config: ModelConfig) -> dict[str, Any]:
    """config.json with the ropes that model.rope_length asks for. Raises ModelError."""
    read = read_config(path)
    return read if config.rope_length is None else fixed_ropes(read, config.rope_length)


def vocabulary_size(config: dict[str, Any]) -> int:
    """Rows of the embedding: token ids are below it. Raises ModelError."""
    size = config.get("text_config", config).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError("config.json has no vocab_size")
    return size


def load_tokenizer(
    path: Path, config: ModelConfig, image_reader: ImageReader | None = None
) -> Tokenizer:
    """A tokenizer of its own for one thread (fast tokenizers must not be shared between
    threads)."""
    extra: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.chat_template is not None:
        extra["chat_template"] = _chat_template(config.chat_template)
    if config.tool_parser not in ("auto", "off"):
        parsers = [module.name for module in pkgutil.iter_modules(tool_parsers.__path__)]
        if config.tool_parser not in parsers:
            raise ModelError(
                f"model.tool_parser = {config.tool_parser!r} is none of: auto, off,"
                f" {', '.join(parsers)}"
            )
        extra["tool_parser_type"] = config.tool_parser
    if not any(next(path.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise ModelError(
            f"{path} has no tokenizer.json, nor another file of a tokenizer: copy them from where"
            " the model's weights come from"
        )
    ends = end_tokens(path, read_config(path))
    if is_generic(path):
        extra["config"] = (
            PreTrainedConfig()
        )  # a config of no family: transformers keeps the tokenizer class
    try:
        return Tokenizer(
            load_wrapper(path, extra, ends),
            reads_tools=config.tool_parser != "off",
            splits_reasoning=config.reasoning_parser != "off",
            image_reader=image_reader,
        )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}") from error


def _chat_template(setting: str) -> str:
    """The template that a setting holds or names. Raises ModelError: a file that is not there or
    cannot be read."""
    if is_file(setting):
        try:
            return local_path(setting).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"model.chat_template: {setting} cannot be read: {error}") from error
    if "{" not in setting and (is_directory(setting) or Path(setting).suffix in TEMPLATE_SUFFIXES):
        raise ModelError(
            f"model.chat_template: there is no file {setting}, and it is not a template in Jinja"
        )
    return setting


def evaluate_module(module: nn.Module) -> None:
    """Evaluates every array of every submodule, also those that `parameters()` leaves out
    (`_freqs`, …). Warns of those beyond `INDEXED`."""
    arrays = [
        array
        for child in module.modules()
        for array in _arrays([*child.values(), *vars(child).values()])
    ]
    if wide := [array.shape for array in arrays if array.size > INDEXED]:
        log.warning(
            "weights of more than 2^31 numbers: operations of MLX have given wrong results for"
            " such arrays without an error (ml-explore/mlx#3327); quantized weights have fewer",
            shapes=", ".join(map(str, wide[:3])),
        )
    mx.eval(arrays)


def _arrays(values: Any) -> Iterator[mx.array]:
    for value in values:
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, list | tuple):
            yield from _arrays(value)
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            yield from _arrays(value.values())


def _make_ready(model: nn.Module, dtype_name: str, *, fp32_lm_head: bool) -> None:
    """Make the model ready in place: dtype, frozen, in evaluation mode, every array evaluated."""
    dtype = _dtype(dtype_name)
    if dtype is not None:
        set_dtype(model, dtype)
        widen_experts(model)
    if not hasattr(model, "_no_grad"):  # as `published/mend.py`, for models that others loaded
        nn.Module.__init__(model)
    model.freeze()
    model.eval()
    evaluate_module(model)  # weights are read here: a damaged file shows now
    use_unpacking(model)
    if fp32_lm_head:
        widen_head(model)
    use_chunks(model)
    prove(model)


def _dtype(name: str) -> mx.Dtype | None:
    if name == "auto":
        return mx.float32 if half_precision_is_slow() else None
    return getattr(mx, name)


def _context_length(config: dict[str, Any]) -> int:
    text_config = config.get("text_config", config)
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
    lengths = [text_config[key] for key in keys if isinstance(text_config.get(key), int)]
    published = read_published(config)
    if not lengths and published is not None:
        lengths = [value for key in keys if isinstance(value := published.get(key), int)]
    length = int(lengths[0]) if lengths else 4096
    longest = longest_text(published) if published is not None else None
    if longest is not None and longest < length:
        log.warning(
            "the context is shorter than the model's: its rope turns longer texts in another way"
            " from their first token on (model.rope_length chooses it for all)",
            context=longest,
            max_position_embeddings=length,
        )
        return longest
    return length


def _local(base_path: str, dtype: str, *, convert: bool = True) -> Path | None:
    """The directory that `base_path` names, made of a GGUF file; None for a hub id. Raises
    ModelError."""
    if (directory := directory_of(base_path)) is not None:
        check_names([file.name for file in directory.iterdir()], str(directory))
        return directory
    if is_gguf(base_path):
        return converted(local_path(base_path), dtype, convert=convert)
    if is_file(base_path) or base_path.startswith((".", "/", "~")) or base_path.count("/") != 1:
        raise ModelError(
            f"no model at {base_path!r}: neither a directory nor a hub id (owner/name), nor one of"
            f" this package's own ({', '.join(BUILTIN)})"
        )
    return None
