"""`mlx_parallm convert`: an adapter in another format, its arrays bit for bit.

    mlx-lm  adapters.safetensors, adapter_config.json       what training writes
    peft    adapter_model.safetensors, adapter_config.json  transformers, vLLM, SGLang
    npz     adapters.npz, adapter_config.json               mlx-lm's first versions; numpy
    peft-adalora  as peft, with singular values             PEFT, to continue with AdaLoRA

It reads each of them. A new format is a function and a line in `FORMATS`. mlx-lm's format has one
rank and one scale for all layers, PEFT's one `use_rslora`: an adapter that does not fit is refused.
npz has no bfloat16: such arrays become float32, without loss. An AdaLoRA adapter is a LoRA adapter
in the others, in PEFT's without the triplets that are pruned.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import AdapterError, CheckpointError, ParallmError
from mlx_parallm.models.adapters.adalora import PARAMETERS, pruned, save_adalora
from mlx_parallm.models.adapters.adapter import ADALORA_FILE, LoraPair
from mlx_parallm.models.adapters.names import name_here
from mlx_parallm.models.adapters.peft import save_peft
from mlx_parallm.models.adapters.rope_length import record_rope_length
from mlx_parallm.models.adapters.settings import ADALORA_SCHEDULE
from mlx_parallm.models.loading import read_config, resolve_model_path
from mlx_parallm.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    NPZ_FILE,
    PEFT_FILE,
    adapter_config,
    adapter_tensors,
    linear_layers,
    load_adapter,
    save_adapter,
)
from mlx_parallm.models.support import blueprint
from mlx_parallm.system.files import write_directory
from mlx_parallm.system.log import get_logger

SHARED = "model.layers."
"""Begins the names that most classes of transformers and mlx-lm share."""
log = get_logger(__name__)
OWN_FILES = {ADAPTER_CONFIG, ADAPTER_FILE, ADALORA_FILE, NPZ_FILE, PEFT_FILE}


@dataclass(frozen=True)
class ConvertReport:
    path: Path
    layers: int
    kind: str


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as it is written: its layers, and their common configuration."""

    layers: Mapping[str, LoraPair]
    num_layers: int  # -1: all; layers without arrays stay as they are
    dropout: float
    base: str  # the model that it adapts; "" = its configuration does not say
    adalora: Mapping[str, Any]  # how a training pruned its ranks; empty = not known


def _write_npz(directory: Path, adapter: StoredAdapter) -> None:
    layers = _named_by_mlx_lm(adapter)
    arrays = {key: _for_numpy(array) for key, array in adapter_tensors(layers).items()}
    mx.savez(str(directory / NPZ_FILE), **arrays)
    config = adapter_config(
        layers, num_layers=adapter.num_layers, dropout=adapter.dropout, base=adapter.base
    )
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_mlx_lm(directory: Path, adapter: StoredAdapter) -> None:
    save_adapter(
        directory,
        _named_by_mlx_lm(adapter),
        num_layers=adapter.num_layers,
        dropout=adapter.dropout,
        base=adapter.base,
        adalora=adapter.adalora,
    )


def _write_peft(directory: Path, adapter: StoredAdapter) -> None:
    layers = {path: pair for path, pair in pruned(adapter.layers).items() if pair.b.size}
    save_peft(directory, layers, dropout=adapter.dropout, base=adapter.base)


def _write_adalora(directory: Path, adapter: StoredAdapter) -> None:
    save_adalora(
        directory,
        adapter.layers,
        dropout=adapter.dropout,
        base=adapter.base,
        schedule=adapter.adalora,
    )


def _named_by_mlx_lm(adapter: StoredAdapter) -> Mapping[str, LoraPair]:
    """Return the layers under the names of mlx-lm's class of the base: PEFT's have transformers'.
    If the base is not on this machine they keep theirs, with a warning where few classes share
    them."""
    try:
        base = resolve_model_path(adapter.base, fetch=False)
        names = linear_layers(blueprint(read_config(base)))
    except ParallmError as error:
        if not all(path.startswith(SHARED) for path in adapter.layers):
            log.warning("layers keep their names", base=adapter.base, reason=str(error))
        return adapter.layers
    return {name_here(path, names): pair for path, pair in adapter.layers.items()}


FORMATS: dict[str, Callable[[Path, StoredAdapter], None]] = {
    "npz": _write_npz,
    "mlx-lm": _write_mlx_lm,
    "peft": _write_peft,
    "peft-adalora": _write_adalora,
}


def convert(
    source: str | Path, target: Path, layout: str, *, overwrite: bool = False
) -> ConvertReport:
    """Write the adapter at `source` to the directory `target`, under a temporary name that is
    renamed.

    Args:
        layout: a name of FORMATS.
        overwrite: replace an adapter that is there already; anything else is never replaced.

    Raises AdapterError: no such format, `source` cannot be read or does not fit the format, or
    `target` exists. Raises CheckpointError: `target` cannot be written.
    """
    if layout not in FORMATS:
        raise AdapterError(f"--format {layout}: expected one of {', '.join(FORMATS)}")
    _check_target(target, overwrite=overwrite)
    loaded = load_adapter(source, as_stored=True)
    num_layers = loaded.config.get("num_layers")
    adapter = StoredAdapter(
        loaded.layers,
        num_layers if isinstance(num_layers, int) else -1,
        _dropout(loaded.config),
        _base(loaded.config),
        _adalora(loaded.config),
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error

    def fill(directory: Path) -> None:
        FORMATS[layout](directory, adapter)
        record_rope_length(directory, loaded.config)

    write_directory(target, fill)
    return ConvertReport(target, len(adapter.layers), _kind(adapter.layers))


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise AdapterError(f"{target} exists already: choose another name, or pass --overwrite")
    if target.is_symlink() or not (target / ADAPTER_CONFIG).is_file():
        raise AdapterError(
            f"{target} is not an adapter's directory: --overwrite replaces nothing else"
        )
    # a checkpoint holds an adapter too
    if others := sorted({file.name for file in target.iterdir()} - OWN_FILES):
        raise AdapterError(
            f"{target} holds {others[0]} besides an adapter: --overwrite replaces nothing else"
        )


def _dropout(config: Mapping[str, Any]) -> float:
    """Return PEFT's or mlx-lm's dropout; 0 if there is none."""
    dropout = config.get("lora_dropout", config.get("lora_parameters", {}).get("dropout"))
    return float(dropout) if isinstance(dropout, int | float) else 0.0


def _base(config: Mapping[str, Any]) -> str:
    """Return the base's name in PEFT's or mlx-lm's configuration; "" if it has none."""
    return str(config.get("base_model_name_or_path") or config.get("model") or "")


def _adalora(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule in PEFT's configuration, or that of a training here."""
    settings = config if config.get("peft_type") == "ADALORA" else config.get(PARAMETERS) or {}
    return {name: settings[name] for name in ADALORA_SCHEDULE if name in settings}


def _for_numpy(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if array.dtype == mx.bfloat16 else array


def _kind(layers: Mapping[str, LoraPair]) -> str:
    if any(pair.svd is not None for pair in layers.values()):
        return "AdaLoRA"
    return "DoRA" if any(pair.magnitude is not None for pair in layers.values()) else "LoRA"
