"""4-bit quantisation while a checkpoint is loaded, one layer at a time, and its result kept for the
next start.

The checkpoint's tensors are lazy: a layer's weights are read when it is quantised and freed before
the next one is, so memory peaks at the 4-bit model and one layer. Which layers, and how, is
mlx-lm's own choice (`mlx_lm.convert -q`); the arrays are the same bits.

The cache is a directory of mlx-lm checkpoints, each named after its source (files,
sizes, times, versions). It is written under a temporary name and renamed; one that cannot be read
is made again. It may be deleted at any time.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import load_config, save_config, save_model
from mlx_parallm.models.published.mend import load_hf_model
from mlx_parallm.models.published.rope import ROPE_LENGTH, fixed_ropes
from mlx_parallm.system.files import remove_of_the_dead, write_problem
from mlx_parallm.system.hardware import empty_buffer_cache
from mlx_parallm.system.log import get_logger

log = get_logger("quantize")

BITS = 4
GROUP_SIZE = 64
FORMAT = 1  # version of a cache entry, beside mlx-lm's
SOURCE_FILE = "source.json"  # in an entry: its key, and the sizes of its files; written last
DEFAULTS = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}


def load_quantized(
    path: Path,
    *,
    trust_remote_code: bool = False,
    cache: Path | None = None,
    rope_length: int | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in 4 bits and its configuration with mlx-lm's `quantization` entry; scales in the
    checkpoint's dtype.

    Args:
        cache: directory of quantised copies; None = none is read or kept.
        rope_length: model.rope_length; a copy is of one.

    Raises what mlx-lm raises on a checkpoint that it cannot load; ModelError when no layer can be
    quantised.
    """
    key = _key(path) | ({} if rope_length is None else {ROPE_LENGTH: rope_length})
    fixed = None if rope_length is None else fixed_ropes(load_config(path), rope_length)
    entry = cache / _entry_name(path, key) if cache is not None else None
    if entry is not None and (cached := _from_cache(entry, key)) is not None:
        return cached
    model, config = load_hf_model(
        path, lazy=True, trust_remote_code=trust_remote_code, model_config=fixed
    )
    config["quantization"] = quantize_layers(model)
    # code from the checkpoint is not copied into the cache
    if entry is not None and "model_file" not in config:
        _keep(entry, key, model, config)
    return model, config


def restore_zero_points(model: nn.Module) -> None:
    """Make biases of AWQ's layers exact, in float32. mlx-lm rounds them, which are minus a zero
    point of 4 bits times a scale, to the scales' type."""
    for module in model.modules():
        if isinstance(module, nn.QuantizedLinear) and module.mode == "affine":
            scales = module.scales.astype(mx.float32)
            zeros = mx.round(-module.biases.astype(mx.float32) / mx.where(scales == 0, 1, scales))
            module.scales, module.biases = scales, -zeros * scales


def quantizable(model: nn.Module, bits: int = BITS) -> dict[str, dict[str, Any]]:
    """The layers that `quantize_layers` quantises, by path, and how: arguments of
    `to_quantized`."""
    predicate, chosen = getattr(model, "quant_predicate", None), {}
    for path, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if hasattr(layer, "to_quantized") and layer.weight.shape[-1] % GROUP_SIZE == 0:
            choice = True if predicate is None else predicate(path, layer)
            if choice:
                chosen[path] = choice if isinstance(choice, dict) else DEFAULTS | {"bits": bits}
    return chosen


def quantize_layers(model: nn.Module, bits: int = BITS) -> dict[str, Any]:
    """Quantises in place what mlx-lm would; each layer is evaluated, and its old weights freed,
    before the next.

    Returns config.json's `quantization` entry. Raises ModelError if no layer allows it.
    """
    chosen, defaults = quantizable(model, bits), DEFAULTS | {"bits": bits}
    entry: dict[str, Any] = dict(defaults)
    layers = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)[::-1]
    count = 0
    while layers:
        path, layer = layers.pop()
        if path not in chosen:
            continue
        if chosen[path] != defaults:
            entry[path] = chosen[path]
        quantized = layer.to_quantized(**chosen[path])
        mx.eval(quantized.parameters())
        model.update_modules(tree_unflatten([(path, quantized)]))
        del layer
        empty_buffer_cache()
        count += 1
    if count == 0:
        raise ModelError(f"quantize_base: no layer's width is a multiple of {GROUP_SIZE}")
    return entry


def _key(path: Path) -> dict[str, Any]:
    files = [path / "config.json", *sorted(path.glob("model*.safetensors"))]
    return {
        "format": FORMAT,
        "mlx_lm": version("mlx-lm"),
        "mlx": version("mlx"),
        **DEFAULTS,
        "files": [
            [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files
        ],
    }


def _entry_name(path: Path, key: Mapping[str, Any]) -> str:
    """A readable name: the hub's repository, or the directory."""
    repository = next(
        (part for part in path.parts if part.startswith("models--")), path.resolve().name
    )
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return f"{repository.removeprefix('models--')}-{BITS}bit-{digest}"


def _from_cache(entry: Path, key: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]] | None:
    """Loads and evaluates a kept copy; None when there is none that can be read."""
    try:
        source = json.loads((entry / SOURCE_FILE).read_text(encoding="utf-8"))
        if source != {"key": key, "sizes": _sizes(entry)}:
            raise ValueError("its files are not those that were written")
        model, config = load_hf_model(entry, lazy=True)
        mx.eval(model.parameters())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        log.warning(
            "the kept 4-bit copy cannot be read and is made again",
            directory=str(entry),
            reason=write_problem(entry.parent, error),
        )
        return None
    log.info(
        "4-bit weights from the cache", directory=str(entry), size_gb=round(_bytes(entry) / 1e9, 2)
    )
    return model, dict(config)


def _keep(entry: Path, key: Mapping[str, Any], model: nn.Module, config: Mapping[str, Any]) -> None:
    """Writes a cache entry. A failure costs the next start its time and is only logged."""
    temporary = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        remove_of_the_dead(entry.parent, f".{entry.name}.")
        needed = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        if needed > (free := shutil.disk_usage(entry.parent).free):
            raise OSError(f"{needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
        temporary.mkdir()
        save_model(temporary, model)
        save_config(dict(config), temporary / "config.json")
        source = {"key": key, "sizes": _sizes(temporary)}
        (temporary / SOURCE_FILE).write_text(json.dumps(source), encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        temporary.rename(entry)
    except (OSError, RuntimeError) as error:  # MLX says "Unable to write" by RuntimeError
        log.warning(
            "the 4-bit copy cannot be kept for the next start",
            directory=str(entry),
            reason=str(error),
        )
    else:
        log.info(
            "4-bit weights kept for the next start",
            directory=str(entry),
            size_gb=round(_bytes(entry) / 1e9, 2),
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sizes(directory: Path) -> dict[str, int]:
    return {
        file.name: file.stat().st_size
        for file in sorted(directory.iterdir())
        if file.name != SOURCE_FILE
    }


def _bytes(directory: Path) -> int:
    return sum(_sizes(directory).values())
