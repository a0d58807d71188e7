"""PEFT's adapter files (`adapter_model.safetensors`, `adapter_config.json`), both ways.

PEFT stores A [r, in] and B [out, r], the transposes of mlx-lm's, and alpha in place of the factor alpha / r (with
`use_rslora` alpha / √r), single layers' own rank and alpha in `rank_pattern` and `alpha_pattern`.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import regex

from mlx_parallm.errors import AdapterError
from mlx_parallm.models.adapters.adapter import ADAPTER_CONFIG, PEFT_FILE, LoraPair

PREFIX = "base_model.model."
MAGNITUDE = ".lora_magnitude_vector"
PATTERN_SECONDS = 2.0


def is_peft(tensors: Mapping[str, mx.array]) -> bool:
    return any(".lora_A." in key for key in tensors)


def read_peft(tensors: Mapping[str, mx.array], config: Mapping[str, Any], file: Path) -> dict[str, LoraPair]:
    """Return the layers by path. Raises AdapterError: tensors that would be left out, or are missing."""
    dora = bool(config.get("use_dora"))
    alphas = _Pattern(config.get("alpha_pattern") or {}, file)
    layers = {}
    for key, a in tensors.items():
        path, separator, _ = key.partition(".lora_A.")
        if not separator:
            if ".lora_B." not in key and not (dora and MAGNITUDE in key):
                raise AdapterError(f"{file}: {key} is no LoRA tensor (modules_to_save is not supported)")
            continue
        b = tensors.get(key.replace(".lora_A.", ".lora_B."))
        if b is None:
            raise AdapterError(f"{file}: {path} has lora_A but no lora_B")
        magnitude = tensors.get(path + MAGNITUDE, tensors.get(f"{path}{MAGNITUDE}.weight"))
        if dora and magnitude is None:
            raise AdapterError(f"{file}: use_dora is true, but {path} has no magnitude vector")
        name, rank = path.removeprefix(PREFIX), int(a.shape[0])
        alpha = float(alphas.of(name, config.get("lora_alpha", rank)))
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        layers[name] = LoraPair(a.T, b.T, scale, magnitude if dora else None)
    return layers


def peft_tensors(layers: Mapping[str, LoraPair]) -> dict[str, mx.array]:
    tensors = {f"{PREFIX}{path}.lora_A.weight": mx.contiguous(pair.a.T) for path, pair in layers.items()}
    tensors |= {f"{PREFIX}{path}.lora_B.weight": mx.contiguous(pair.b.T) for path, pair in layers.items()}
    magnitudes = {path: pair.magnitude for path, pair in layers.items() if pair.magnitude is not None}
    return tensors | {f"{PREFIX}{path}{MAGNITUDE}": magnitude for path, magnitude in magnitudes.items()}


def peft_config(layers: Mapping[str, LoraPair], *, dropout: float, base: str = "") -> dict[str, Any]:
    """adapter_config.json; `base`: the model that it adapts, "" = not known. Raises AdapterError: layers with and
    without a magnitude, or a factor that no alpha gives exactly (`use_rslora` is one setting for all layers)."""
    dora = {pair.magnitude is not None for pair in layers.values()}
    if len(dora) != 1:
        raise AdapterError("PEFT's use_dora is one setting for all layers, this adapter has layers of both kinds")
    factors = {path: (int(pair.a.shape[-1]), pair.scale) for path, pair in layers.items()}
    for whole, rslora in ((True, False), (True, True), (False, False), (False, True)):
        roots = {path: rank**0.5 if rslora else rank for path, (rank, _) in factors.items()}
        alphas = {path: _alpha(roots[path], scale, whole=whole) for path, (_, scale) in factors.items()}
        if None not in alphas.values():
            break
    else:
        raise AdapterError(f"no lora_alpha gives exactly the factors {sorted({s for _, s in factors.values()})[:3]}")
    first = next(iter(layers))
    rank, alpha = factors[first][0], alphas[first]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "use_dora": dora.pop(),
        "target_modules": sorted(layers),
        "rank_pattern": {re.escape(path): value for path, (value, _) in factors.items() if value != rank},
        "alpha_pattern": {re.escape(path): value for path, value in alphas.items() if value != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save_peft(directory: Path, layers: Mapping[str, LoraPair], *, dropout: float, base: str = "") -> None:
    """Write both files into `directory`. Raises AdapterError: PEFT's format cannot hold this adapter."""
    config = peft_config(layers, dropout=dropout, base=base)
    mx.save_safetensors(str(directory / PEFT_FILE), peft_tensors(layers), metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Pattern:
    """alpha_pattern, by PEFT's rule: the first key that matches the path's end as a regular expression counts.

    The adapter may be anybody's, and an expression can take for ever: all of them together have PATTERN_SECONDS.
    """

    def __init__(self, pattern: Mapping[str, Any], file: Path) -> None:
        self._file, self._left_s = file, PATTERN_SECONDS
        try:
            self._entries = [(regex.compile(rf"(.*\.)?({key})$"), value) for key, value in pattern.items()]
        except (regex.error, RecursionError) as error:
            raise AdapterError(f"{file.parent / ADAPTER_CONFIG}: alpha_pattern: {error}") from error

    def of(self, path: str, default: Any) -> Any:
        """The layer's value. Raises AdapterError: the expressions take too long."""
        started = time.perf_counter()
        try:
            for expression, value in self._entries:
                if expression.match(path, timeout=max(self._left_s - (time.perf_counter() - started), 1e-3)):
                    return value
        except TimeoutError as error:
            message = f"alpha_pattern: its regular expressions take more than {PATTERN_SECONDS:g} s"
            raise AdapterError(f"{self._file.parent / ADAPTER_CONFIG}: {message}") from error
        finally:
            self._left_s -= time.perf_counter() - started
        return default


def _alpha(divisor: float, scale: float, *, whole: bool) -> float | None:
    """Return the alpha with alpha / divisor = scale to the last bit, if there is one; `whole`: whole numbers only."""
    product = scale * divisor
    above, below = math.nextafter(product, math.inf), math.nextafter(product, 0.0)
    near = (float(round(product)),) if whole else (product, above, below)
    return next((alpha for alpha in near if alpha / divisor == scale), None)
