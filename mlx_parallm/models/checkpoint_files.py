"""The files of a checkpoint, and the errors for those that mlx-lm cannot load.

The same rules hold for a directory and, before a download, for a hub repository's list of files.
"""

import importlib.resources
import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.system.files import is_directory, is_file, local_path

BUILTIN = {"builtin:tiny": "tiny", "builtin:tiny-vision": "tiny_vision"}
"""Models of the package → their folders beside this file."""
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
_SHARD = re.compile(r"(model.*-)(\d+)-of-(\d+)\.safetensors")
_ADAPTER_FILES = {"adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"}
_PYTORCH = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Values of `quantization_config.quant_method` that mlx-lm reads, of some architectures at least.
_READ = ("awq", "bitnet", "compressed-tensors", "fp8", "modelopt", "mxfp4", "mxfp8")
_COMPRESSED = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized")
MODELOPT_FILE = "hf_quant_config.json"  # where older exports of NVIDIA's ModelOpt say it
_INSTEAD = (
    "use the checkpoint that it was made from (with rl_training.lora.quantize_base = true for 4"
    " bits), or convert that one once: `mlx_lm.convert --hf-path"
    " OWNER/NAME -q --mlx-path converted`"
)


def directory_of(model: str) -> Path | None:
    """The directory of a model on this machine, the package's own too; None for an id of the
    hub."""
    if (folder := BUILTIN.get(model)) is not None:
        return Path(str(importlib.resources.files("mlx_parallm"))) / "models" / folder
    return local_path(model) if is_directory(model) else None


def is_gguf(model: str) -> bool:
    """Return whether a model is a GGUF file on this machine."""
    return Path(model).suffix == ".gguf" and is_file(model)


def billions_in(model: str) -> float | None:
    """The size that stands in a model's name: 0.6 of "Qwen3-0.6B"."""
    named = re.search(r"(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", Path(model).name)
    return float(named[1]) if named else None


def check_names(names: Collection[str], where: str) -> None:
    """Raises ModelError unless the file names are those of a checkpoint in safetensors.

    Args:
        where: the directory or hub id, for the message.
    """
    weights = [name for name in names if fnmatch(name, WEIGHTS)]
    if weights and "config.json" in names:
        return
    if _ADAPTER_FILES & set(names):
        raise ModelError(
            f"{where} is an adapter, not a model: set model.lora_path = {where!r}, and"
            " model.base_path to the model it"
            " was trained on"
        )
    if any(name.endswith(".gguf") for name in names):
        raise ModelError(
            f"{where} holds GGUF, llama.cpp's format: name the file itself, model.base_path ="
            " 'DIR/FILE.gguf' (on a hub"
            " after `hf download`), or better the checkpoint that it was made from (its model"
            " card names it)"
        )
    if "config.json" not in names:
        raise ModelError(
            f"{where} has no config.json: not a Hugging Face model directory;"
            f" {_download_hint(where)}"
        )
    if any(fnmatch(name, pattern) for name in names for pattern in _PYTORCH):
        raise ModelError(
            f"{where} has PyTorch weights only (.bin), which mlx-lm does not read; convert it once"
            " (needs torch):"
            ' `python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as'
            f" T; d = '{where}';"
            " M.from_pretrained(d).save_pretrained('converted');"
            " T.from_pretrained(d).save_pretrained('converted')\"`,"
            " then model.base_path = 'converted'"
        )
    others = ", ".join(sorted(name for name in names if name.endswith(".safetensors"))[:3])
    raise ModelError(
        (
            f"No safetensors weights in {where}: expected model.safetensors or"
            " model-00001-of-0000N.safetensors"
        )
        + (f", found {others}" if others else f"; {_download_hint(where)}")
    )


def weight_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint's weights: that of a run has others beside them."""
    return sorted(path.glob(WEIGHTS)) or sorted(path.glob("*.safetensors"))


def check_directory(path: Path) -> None:
    """Raises ModelError: no checkpoint, shards that are missing or cut short."""
    check_names([file.name for file in path.iterdir()], str(path))
    missing = sorted(_named_shards(path) - {file.name for file in path.glob(WEIGHTS)})
    if missing:
        total = len(_named_shards(path))
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelError(
            f"{path} lacks {len(missing)} of its {total} weight files ({shown});"
            f" {_download_hint(str(path))}"
        )
    for file in path.glob(WEIGHTS):
        try:
            (_, expected), size = _header(file) or ({}, 0), file.stat().st_size
        except OSError as error:  # no permission, a link into a cache or onto a disk that is gone
            reason = error.strerror or error
            raise ModelError(
                f"{file} cannot be read: {reason}; {_download_hint(str(path))}"
            ) from error
        if expected != size:
            reason = (
                f"{size:,} of {expected:,} bytes are there"
                if expected
                else "it has no safetensors header"
            )
            raise ModelError(
                f"{file} is damaged or its download is incomplete: {reason};"
                f" {_download_hint(str(path))}"
            )


def quantization_of(
    config: Mapping[str, Any], directory: Path | None = None
) -> Mapping[str, Any] | None:
    """Return how a checkpoint is quantised; None: it is not. `directory`: for ModelOpt's own file.

    MLX's `quantization` comes before `quantization_config`, which repeats it.
    """
    settings = config.get("quantization") or config.get("quantization_config")
    settings = settings or (config.get("text_config") or {}).get("quantization_config")
    if settings is None and directory is not None and (directory / MODELOPT_FILE).is_file():
        settings = _modelopt_settings(directory / MODELOPT_FILE)
    return settings if isinstance(settings, Mapping) else None


def check_quantization(
    config: Mapping[str, Any], where: str, *, quantize: bool, directory: Path | None = None
) -> None:
    """Raises ModelError: a quantisation that mlx-lm cannot read; ConfigError: `quantize` of a
    quantised checkpoint. `directory`: the checkpoint's, once it is there."""
    settings = quantization_of(config, directory)
    if settings is None:
        return
    method, bits = _method(settings, config), settings.get("bits")
    if (reason := _not_read(method, settings)) is not None:
        raise ModelError(f"{where} {reason}: {_INSTEAD}")
    if quantize:
        size = f"{bits} bits" + (
            f", groups of {settings['group_size']}" if "group_size" in settings else ""
        )
        raise ConfigError(
            f"{where} is already quantised ({size if bits else method}): set"
            " rl_training.lora.quantize_base = false"
        )


def unknown_layers(model: Any, config: Mapping[str, Any]) -> list[str]:
    """Return the layers that MLX's `quantization` names and that a model has not."""
    settings = config.get("quantization") or {}
    paths = {path for path, _ in model.named_modules()}
    return sorted(
        name
        for name, value in settings.items()
        if isinstance(value, Mapping | bool) and name not in paths
    )


def is_awq(config: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint's layers are packed by AWQ."""
    settings = quantization_of(config)
    return settings is not None and _method(settings, config) == "awq"


def load_fault(
    directory: Path, config: Mapping[str, Any], error: Exception, hint: str = ""
) -> ModelError:
    """Return the error of a checkpoint that mlx-lm could not load, by its quantisation if it has
    one of another program's; else with `hint`."""
    settings = quantization_of(config, directory)
    method = "mlx" if settings is None else _method(settings, config)
    if method == "mlx":
        reason = " ".join(str(error).split()) or type(error).__name__
        return ModelError(f"{directory} cannot be loaded: {reason}{hint}")
    reason = " ".join(str(error).split()) or type(error).__name__
    return ModelError(
        f"{directory} is quantised by {method.upper()}, which mlx-lm does not read for"
        f" {config.get('model_type')} ({reason:.120}): {_INSTEAD}"
    )


def check_numbers(model: Any, where: str) -> None:
    """Raises ModelError: a layer whose weight is packed or in 8 bits, and that has no scales: its
    numbers would be taken for the weights themselves."""
    for path, module in model.named_modules():
        weight = module.get("weight")
        scaled = any("scale" in name for name in module)
        if weight is not None and hasattr(weight, "dtype") and not scaled:
            kind = str(weight.dtype).rpartition(".")[2]
            if not kind.startswith(("float", "bfloat", "complex")):
                raise ModelError(
                    f"{where}: {path}.weight holds {kind} numbers without scales, which are no"
                    f" weights: {_INSTEAD}"
                )


def _method(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the program or format that wrote quantised weights: "mlx", "fp8", …"""
    if settings is config.get("quantization"):
        return "mlx"
    return str(settings.get("quant_method")).lower()


def _not_read(method: str, settings: Mapping[str, Any]) -> str | None:
    """Return why a quantisation is not read, or None."""
    bits, form = settings.get("bits"), settings.get("format")
    if method == "none":
        return "has a quantization_config without quant_method"
    named = f"is quantised by {method.upper()}{f' to {bits} bits' if bits else ''}"
    refused = method not in ("mlx", *_READ)
    if method == "awq":
        backend, version = (str(settings.get(key) or "").lower() for key in ("backend", "version"))
        refused = bits != 4 or version not in ("", "gemm") or backend == "llm-awq"
    elif method == "compressed-tensors":
        named += f" as {form}"
        refused = form not in _COMPRESSED or not all(map(_fits_packing, _weights_of(settings)))
    elif method == "modelopt":
        algorithm = settings.get("quantization", settings).get("quant_algo")
        named += f" as {algorithm}"
        refused = algorithm != "NVFP4"
    return f"{named}, which mlx-lm does not read" if refused else None


def _weights_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemes of compressed-tensors' groups, where they are integers."""
    if settings.get("format") != "pack-quantized":
        return []
    groups = settings.get("config_groups") or {}
    return [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]


def _fits_packing(scheme: Mapping[str, Any]) -> bool:
    """Whether mlx-lm's bias of minus eight scales is a scheme's own: 4 bits about zero."""
    return scheme.get("num_bits", 4) == 4 and scheme.get("symmetric", True) is True


def _modelopt_settings(file: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("quantization", {}), dict):
        raise ModelError(f"{file} cannot be read: expected the object `quantization`")
    return {"quant_method": "modelopt", **settings}


def _named_shards(path: Path) -> set[str]:
    """The weight files that the index names, or that the shards' own names ("…-of-00003") imply."""
    index = path / INDEX_FILE
    if index.is_file():
        try:
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{index} cannot be read: {error!r}; {_download_hint(str(path))}"
            ) from error
    shards = [match for file in path.glob(WEIGHTS) if (match := _SHARD.fullmatch(file.name))]
    return {
        f"{shard[1]}{number:0{len(shard[2])}d}-of-{shard[3]}.safetensors"
        for shard in shards
        for number in range(1, int(shard[3]) + 1)
    }


def safetensors_header(file: Path) -> dict[str, Any] | None:
    """Name → {dtype, shape, data_offsets}, and __metadata__; None where the file is no
    safetensors file (https://github.com/huggingface/safetensors) or of another length than its
    header says. Raises OSError."""
    size = file.stat().st_size
    return None if (header := _header(file)) is None or header[1] != size else header[0]


def numbers_in(header: Mapping[str, Any]) -> int:
    """Return the number of parameters in a `safetensors_header`."""
    return sum(
        math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
    )


def _header(file: Path) -> tuple[dict[str, Any], int] | None:
    """The header, and the bytes that a file with it has."""
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > 100_000_000:
                return None
            header = json.loads(stream.read(length))
            tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
            ends = [
                tensor["data_offsets"][1] for tensor in tensors if math.prod(tensor["shape"]) >= 0
            ]
            return header, int(8 + length + max(ends, default=0))
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, OverflowError):
            return None


def _download_hint(where: str) -> str:
    return f"fetch it completely: `hf download OWNER/NAME --local-dir {where}`"
