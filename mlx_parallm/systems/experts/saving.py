"""An expert as one file: weights and configuration, safetensors or npz, whole or absent.

`best.npz` stands for `best.safetensors` where only that one is there, and the other way round. A
file of a class of your own names it; it is read with that class, never without (`load_expert(path,
MyExpert)`): no file decides what code is run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.models.parameters import check_weights
from mlx_parallm.system.files import TEMPORARY, sync, write_problem
from mlx_parallm.systems.experts.expert import KINDS, ExpertConfig, RNNExpertBase, make_expert

CONFIG_KEY = "expert"  # key in safetensors' metadata; in npz an array of UTF-8 bytes
SUFFIXES = (".safetensors", ".npz")


def save_expert(path: str | Path, expert: RNNExpertBase) -> None:
    """Write an expert to a `.safetensors` or `.npz` file. Raises CheckpointError; an older file
    is then untouched."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path}: an expert is saved as {' or '.join(SUFFIXES)}")
    class_entry = {} if type(expert) in KINDS.values() else {"class": type(expert).__qualname__}
    config = json.dumps({"kind": expert.kind, "config": expert.config.to_dict(), **class_entry})
    weights: dict[str, mx.array] = dict(tree_flatten(expert.parameters()))
    temporary = path.with_name(f"{path.stem}{TEMPORARY}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npz":
            arrays: dict[str, Any] = {name: np.array(value) for name, value in weights.items()}
            arrays[CONFIG_KEY] = np.frombuffer(config.encode(), np.uint8)
            np.savez(temporary, allow_pickle=False, **arrays)
        else:
            mx.save_safetensors(str(temporary), weights, {CONFIG_KEY: config})
        sync(temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError for "Unable to write"
        temporary.unlink(missing_ok=True)
        why = write_problem(path.parent, error)
        raise CheckpointError(f"{path} cannot be written: {why}") from error


def load_expert(path: str | Path, *classes: type[RNNExpertBase]) -> RNNExpertBase:
    """Read an expert that `save_expert` has written.

    Args:
        classes: of your own, of which one may be the file's.

    Raises CheckpointError: no such file, not an expert's, weights that do not fit its configuration
    or are not finite,
        or an expert of a class that is not among `classes`.
    """
    path = _existing(Path(path))
    try:
        weights, text = _read(path)
        described = json.loads(text)
        expert = _make(
            described["kind"], described.get("class"), ExpertConfig(**described["config"]), classes
        )
        check_weights(expert, weights)
        expert.update(tree_unflatten(list(weights.items())))
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path} is not an expert: {error}") from error
    mx.eval(expert.parameters())
    return expert


def _make(
    kind: str, name: str | None, config: ExpertConfig, classes: Sequence[type[RNNExpertBase]]
) -> RNNExpertBase:
    if name is None:
        return make_expert(kind, config)
    for cls in classes:
        if (cls.__qualname__, cls.kind) == (name, kind):
            return cls(config)
    short = name.rpartition(".")[2]
    raise ConfigError(
        f"it is of your class {short}: load_expert(path, {short}), or"
        f" registry.load(directory, {short})"
    )


def _existing(path: Path) -> Path:
    for candidate in (path, *(path.with_suffix(suffix) for suffix in SUFFIXES)):
        if candidate.is_file():
            return candidate
    raise CheckpointError(f"{path}: there is no such expert (docs/systems.md trains one)")


def _read(path: Path) -> tuple[dict[str, mx.array], str]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            weights = {name: mx.array(arrays[name]) for name in arrays.files if name != CONFIG_KEY}
            return weights, bytes(arrays[CONFIG_KEY]).decode()
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    return loaded[0], loaded[1][CONFIG_KEY]
