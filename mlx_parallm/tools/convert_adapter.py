"""`mlx_parallm_convert_adapter`: an adapter in another format, its arrays bit for bit.

    mlx-lm   adapters.safetensors, adapter_config.json       what training writes
    peft     adapter_model.safetensors, adapter_config.json  transformers, vLLM, SGLang
    npz      adapters.npz, adapter_config.json               mlx-lm's names, as its first versions kept them; numpy

It reads each of them. mlx-lm's format has one rank and one scale for all layers, PEFT's one `use_rslora`: an adapter
that does not fit is refused. npz has no bfloat16: such arrays become float32, without loss.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.peft import peft_config, peft_tensors
from mlx_parallm.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    NPZ_FILE,
    PEFT_FILE,
    adapter_config,
    adapter_tensors,
    load_adapter,
    save_adapter,
)
from mlx_parallm.system.files import write_directory

Format = Literal["npz", "mlx-lm", "peft"]
OWN_FILES = {ADAPTER_CONFIG, ADAPTER_FILE, NPZ_FILE, PEFT_FILE}


@dataclass(frozen=True)
class ConvertReport:
    path: Path
    layers: int
    kind: str


def convert(source: str | Path, target: Path, layout: Format, *, overwrite: bool = False) -> ConvertReport:
    """Write the adapter at `source` to the directory `target`, under a temporary name that is renamed.

    Args:
        overwrite: replace an adapter at `target`; anything else there is never replaced.

    Raises AdapterError: `source` cannot be read, does not fit the format, or `target` exists; CheckpointError: `target`
    cannot be written.
    """
    _check_target(target, overwrite=overwrite)
    adapter = load_adapter(source, as_stored=True)
    layers, dropout = adapter.layers, _dropout(adapter.config)
    configured = adapter.config.get("num_layers")
    num_layers = configured if isinstance(configured, int) else -1  # -1: all; layers without arrays stay unchanged
    config = (
        peft_config(layers, dropout=dropout)
        if layout == "peft"
        else adapter_config(layers, num_layers=num_layers, dropout=dropout)
    )

    def fill(directory: Path) -> None:
        if layout == "mlx-lm":
            save_adapter(directory, layers, num_layers=num_layers, dropout=dropout)
            return
        if layout == "peft":
            mx.save_safetensors(str(directory / PEFT_FILE), peft_tensors(layers), metadata={"format": "pt"})
        else:
            mx.savez(str(directory / NPZ_FILE), **{key: _for_numpy(a) for key, a in adapter_tensors(layers).items()})
        (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    write_directory(target, fill)
    return ConvertReport(target, len(layers), _kind(layers))


def _check_target(target: Path, *, overwrite: bool) -> None:
    if not (target.exists() or target.is_symlink()):
        return
    if not overwrite:
        raise AdapterError(f"{target} exists already: choose another name, or pass --overwrite")
    if target.is_symlink() or not (target / ADAPTER_CONFIG).is_file():
        raise AdapterError(f"{target} is not an adapter's directory: --overwrite replaces nothing else")
    if others := sorted({file.name for file in target.iterdir()} - OWN_FILES):  # a checkpoint holds an adapter too
        raise AdapterError(f"{target} holds {others[0]} besides an adapter: --overwrite replaces nothing else")


def _dropout(config: Mapping[str, Any]) -> float:
    """Return PEFT's or mlx-lm's dropout; 0 where there is none."""
    dropout = config.get("lora_dropout", config.get("lora_parameters", {}).get("dropout"))
    return float(dropout) if isinstance(dropout, int | float) else 0.0


def _for_numpy(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if array.dtype == mx.bfloat16 else array


def _kind(layers: Mapping[str, LoraPair]) -> str:
    return "DoRA" if any(pair.magnitude is not None for pair in layers.values()) else "LoRA"
