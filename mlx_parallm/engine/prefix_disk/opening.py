"""Open the prefixes on disk of a model that was loaded."""

import json
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.cache.prefill import leaves
from mlx_parallm.engine.prefix_disk.arrivals import WITHOUT
from mlx_parallm.engine.prefix_disk.disk import PrefixDisk
from mlx_parallm.engine.prefix_disk.files import BlockFiles, hashed
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.mlx_lm_api import ArraysCache, make_prompt_cache
from mlx_parallm.system.device.traits import kind_of_numbers

FORMAT = 2
"""Of the files, and of how keys and values are computed: another number leaves the old files to be
removed as unused."""
COMPUTED_BY = ("mlx", "mlx-lm")  # other versions of them may compute other numbers
WEIGHTS = (".safetensors", ".npz", ".gguf")
SAMPLES = 1024  # numbers of each of the model's arrays that its name is made of


def open_prefix_disk(server: ServerConfig, loaded: LoadedModel, max_bytes: int) -> PrefixDisk:
    """Raises ConfigError: the directory cannot be used."""
    files = BlockFiles(server.prefix_disk_directory(), max_bytes)
    recurrent = any(
        isinstance(cache, ArraysCache) for cache in leaves(make_prompt_cache(loaded.model))
    )
    try:
        return PrefixDisk(files, model_name(loaded, server.kv_bits), recurrent=recurrent)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"server.prefix_disk: {files.folder} cannot be used: {reason}") from error


def model_name(loaded: LoadedModel, kv_bits: int | None) -> str:
    """Return a hash of what keys and values depend on beside texts and adapters: the weights'
    files (names, sizes, times of change), numbers from each array as it was loaded, the
    configuration, the packages and the kind of device that compute them, and how keys and values
    are held."""
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(_files(loaded.path))
        if path.suffix in WEIGHTS
    ]
    config = json.dumps(loaded.config, sort_keys=True, default=str)
    packages = [version(name) for name in COMPUTED_BY]
    settings = repr((FORMAT, packages, kind_of_numbers(), files, config, kv_bits)).encode()
    return hashed(settings, *_samples(loaded.model))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]


def _samples(model: nn.Module) -> list[bytes]:
    arrays = dict(tree_flatten(model.parameters()))
    taken = {
        name: array.reshape(-1)[:: max(1, array.size // SAMPLES)] for name, array in arrays.items()
    }
    shown = {name: each.view(WITHOUT.get(each.dtype, each.dtype)) for name, each in taken.items()}
    mx.eval(list(shown.values()))
    return [
        part
        for name in sorted(shown)
        for part in (
            f"{name} {arrays[name].dtype} {arrays[name].shape}".encode(),
            np.asarray(shown[name]).tobytes(),
        )
    ]
