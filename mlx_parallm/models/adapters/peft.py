"""PEFT's adapter files (`adapter_model.safetensors`, `adapter_config.json`), both ways.

PEFT stores A [r, in] and B [out, r], the transposes of mlx-lm's, and alpha in place of the factor
alpha / r (with `use_rslora` alpha / √r), single layers' own rank and alpha in `rank_pattern` and
`alpha_pattern`.

An adapter of stacked experts has a layer for each of them there, as Hugging Face's checkpoints and
vLLM do: `mlp.experts.3.up_proj` is expert 3 of `mlp.switch_mlp.up_proj`.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_parallm.errors import AdapterError, PatternTimeoutError
from mlx_parallm.models.adapters.adapter import ADAPTER_CONFIG, PEFT_FILE, LoraPair
from mlx_parallm.models.adapters.names import name_of_transformers
from mlx_parallm.models.adapters.settings import check_peft
from mlx_parallm.system.patterns import Pattern, PatternError

PREFIX = "base_model.model."
MAGNITUDE = ".lora_magnitude_vector"
PATTERN_SECONDS = 2.0
DEFAULT_ALPHA = 8  # PEFT's, if the configuration does not say
# the adapter's name, as in lora_A.default.weight
_NAME = r"(?:\.(?P<{}>(?!weight$|weight\.|bias$)[^.]+))?"
_KEY = re.compile(
    r"(?P<path>.+)\.(?:(?P<matrix>lora_[AB])" + _NAME.format("name") + r"\.weight"
    r"|(?P<vector>lora_magnitude_vector)" + _NAME.format("other") + r"(?:\.weight)?)"
)
_NOT_APPLIED: Mapping[str, str] = {
    "modules_to_save": "modules_to_save is not supported, merge the adapter with PEFT",
    "original_module": "it is a copy of the base's weights (modules_to_save)",
    ".bias": "biases are not supported (bias, lora_bias), merge the adapter with PEFT",
    "lora_embedding_": "adapters of embeddings are not supported, adapt"
    " linear layers or merge it with PEFT",
    "trainable_tokens": "trainable_token_indices is not supported, merge the adapter with PEFT",
    "base_layer": "it is a weight of the base, save the adapter with PEFT's"
    " save_embedding_layers=False, or merge it with PEFT",
    ".lora_a": "it is mlx-lm's name in a file of PEFT's",
    ".lora_b": "it is mlx-lm's name in a file of PEFT's",
    "lora_": "this kind of LoRA is not supported, merge the adapter with PEFT",
    ".weight": "it is a whole weight, not an adapter's: merge the adapter with PEFT",
}
"""Part of a name → why the tensor is refused; the first that fits counts."""


EXPERTS = {
    "mlp.switch_mlp": ("mlp.experts", {}),
    "block_sparse_moe.switch_mlp": (
        "block_sparse_moe.experts",
        {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},  # Mixtral's
    ),
}
"""mlx-lm's name of a block of experts → Hugging Face's, and its names of the projections."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_EXPERT = re.compile(
    r"(?P<block>.+)\.(?P<holder>mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\.(?P<name>[^.]+)"
)


def expert_names(path: str, experts: int) -> list[str]:
    """Return Hugging Face's names of the layers that are stacked in the layer `path`. Raises
    AdapterError: this architecture has others."""
    for ours, (theirs, names) in EXPERTS.items():
        prefix, holder, name = path.rpartition(f"{ours}.")
        if holder and name in _PROJECTIONS:
            return [f"{prefix}{theirs}.{e}.{names.get(name, name)}" for e in range(experts)]
    raise AdapterError(
        f"{path}: Hugging Face's checkpoint of this architecture has no layer for each expert, so"
        " PEFT's format has no name for its adapter: keep mlx-lm's"
    )


def by_expert(layers: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
    """Return the layers with those of stacked experts taken apart."""
    apart: dict[str, LoraPair] = {}
    for path, pair in layers.items():
        if pair.a.ndim == 2:
            apart[path] = pair
            continue
        for e, name in enumerate(expert_names(path, pair.a.shape[0])):
            apart[name] = LoraPair(pair.a[e], pair.b[e], pair.scale)
    return apart


def stacked(layers: Mapping[str, LoraPair], file: Path) -> dict[str, LoraPair]:
    """Return the layers with those of experts stacked as mlx-lm has them. Raises AdapterError:
    some of a block's experts have none, or they differ in rank or factor."""
    whole: dict[str, LoraPair] = {}
    parts: dict[str, dict[int, LoraPair]] = {}
    for path, pair in layers.items():
        match = _EXPERT.fullmatch(path)
        ours = f"{match['holder']}.switch_mlp" if match else ""
        names = {theirs: mine for mine, theirs in EXPERTS[ours][1].items()} if match else {}
        name = names.get(match["name"], match["name"]) if match else ""
        if match is None or name not in _PROJECTIONS:
            whole[path] = pair
            continue
        parts.setdefault(f"{match['block']}.{ours}.{name}", {})[int(match["number"])] = pair
    for path, experts in parts.items():
        if sorted(experts) != list(range(len(experts))):
            absent = next(e for e in range(max(experts)) if e not in experts)
            raise AdapterError(
                f"{file}: expert {absent} of {path} has no adapter and expert {max(experts)} has"
                " one: all experts of a block or none"
            )
        pairs = [experts[e] for e in range(len(experts))]
        if len({(pair.a.shape, pair.b.shape, pair.scale) for pair in pairs}) > 1 or any(
            pair.magnitude is not None for pair in pairs
        ):
            raise AdapterError(
                f"{file}: the experts of {path} have to be LoRA of one rank and one factor"
            )
        a, b = mx.stack([pair.a for pair in pairs]), mx.stack([pair.b for pair in pairs])
        whole[path] = LoraPair(a, b, pairs[0].scale)
    return whole


def is_peft(tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> bool:
    return "peft_type" in config or any(".lora_A" in key or ".lora_B" in key for key in tensors)


def read_peft(
    tensors: Mapping[str, mx.array], config: Mapping[str, Any], file: Path
) -> dict[str, LoraPair]:
    """Return the layers by path. Raises AdapterError: a setting or a tensor that would be left
    out, or one that is missing; ValueError: shapes that are not LoRA's."""
    config_file = file.parent / ADAPTER_CONFIG
    check_peft(config, config_file)
    dora, parts = bool(config.get("use_dora")), _parts_of_layers(tensors, file)
    alphas, ranks = (
        _Pattern(name, config.get(name) or {}, config_file)
        for name in ("alpha_pattern", "rank_pattern")
    )
    layers = {}
    for path, leaves in parts.items():
        for part, needed in (("lora_A", True), ("lora_B", True), ("lora_magnitude_vector", dora)):
            if needed != (part in leaves):
                absent = (
                    "no magnitude vector (use_dora is true)"
                    if part == "lora_magnitude_vector"
                    else f"no {part}"
                )
                extra = "a magnitude vector, but use_dora is not true"
                raise AdapterError(f"{file}: {path} has {absent if needed else extra}")
        a, b = leaves["lora_A"], leaves["lora_B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.size or not b.size:
            raise ValueError(
                f"{path}: lora_A {a.shape} and lora_B {b.shape} are not [rank, in] and [out, rank]"
            )
        rank = int(a.shape[0])
        if (configured := ranks.of(path, config.get("r", rank))) != rank:
            raise AdapterError(
                f"{file}: {path} has rank {rank}, {ADAPTER_CONFIG} {configured} (r, rank_pattern)"
            )
        alpha = float(alphas.of(path, config.get("lora_alpha", DEFAULT_ALPHA)))
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        layers[path] = LoraPair(a.T, b.T, scale, leaves.get("lora_magnitude_vector"))
    return stacked(layers, file)


def _parts_of_layers(tensors: Mapping[str, mx.array], file: Path) -> dict[str, dict[str, mx.array]]:
    """Return path → part → its tensor. Raises AdapterError: a tensor that is not part of a linear
    layer's adapter."""
    layers: dict[str, dict[str, mx.array]] = {}
    keys: dict[tuple[str, str], str] = {}
    adapters: set[str | None] = set()
    for key, tensor in tensors.items():
        if (match := _KEY.fullmatch(key)) is None:
            raise AdapterError(f"{file}: {key} is not a LoRA tensor: {_reason(key)}")
        path, part = match["path"].removeprefix(PREFIX), match["matrix"] or match["vector"]
        first = keys.setdefault((path, part), key)
        adapters.add(match["name"] or match["other"])
        if first != key or len(adapters) > 1:
            other = first if first != key else next(iter(tensors))
            raise AdapterError(f"{file}: {key} and {other} are of two adapters, a file holds one")
        layers.setdefault(path, {})[part] = tensor
    return layers


def _reason(key: str) -> str:
    return next(
        (reason for part, reason in _NOT_APPLIED.items() if part in key),
        "its name has another form",
    )


def peft_tensors(layers: Mapping[str, LoraPair]) -> dict[str, mx.array]:
    tensors = {
        f"{PREFIX}{path}.lora_A.weight": mx.contiguous(pair.a.T) for path, pair in layers.items()
    }
    tensors |= {
        f"{PREFIX}{path}.lora_B.weight": mx.contiguous(pair.b.T) for path, pair in layers.items()
    }
    magnitudes = {
        path: pair.magnitude for path, pair in layers.items() if pair.magnitude is not None
    }
    return tensors | {
        f"{PREFIX}{path}{MAGNITUDE}": magnitude for path, magnitude in magnitudes.items()
    }


def peft_config(
    layers: Mapping[str, LoraPair], *, dropout: float, base: str = ""
) -> dict[str, Any]:
    """adapter_config.json; `base`: the model that it adapts, "" = not known. Raises
    AdapterError: layers with and without a magnitude, or a factor that no alpha gives exactly
    (`use_rslora` is one setting for all layers)."""
    dora = {pair.magnitude is not None for pair in layers.values()}
    if len(dora) != 1:
        raise AdapterError(
            "PEFT's use_dora is one setting for all layers, this adapter has layers of both kinds"
        )
    factors = {path: (int(pair.a.shape[-1]), pair.scale) for path, pair in layers.items()}
    for whole, rslora in ((True, False), (True, True), (False, False), (False, True)):
        roots = {path: rank**0.5 if rslora else rank for path, (rank, _) in factors.items()}
        alphas = {
            path: _alpha(roots[path], scale, whole=whole) for path, (_, scale) in factors.items()
        }
        if None not in alphas.values():
            break
    else:
        raise AdapterError(
            "no lora_alpha gives exactly the factors"
            f" {sorted({s for _, s in factors.values()})[:3]}"
        )
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
        "rank_pattern": {
            re.escape(path): value for path, (value, _) in factors.items() if value != rank
        },
        "alpha_pattern": {
            re.escape(path): value for path, value in alphas.items() if value != alpha
        },
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save_peft(
    directory: Path, layers: Mapping[str, LoraPair], *, dropout: float, base: str = ""
) -> None:
    """Write both files into `directory`. Raises AdapterError: PEFT's format cannot hold this
    adapter."""
    layers = {name_of_transformers(path): pair for path, pair in by_expert(layers).items()}
    config = peft_config(layers, dropout=dropout, base=base)
    mx.save_safetensors(str(directory / PEFT_FILE), peft_tensors(layers), metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Pattern:
    """alpha_pattern or rank_pattern, by PEFT's rule: the first key that matches the path's end as a
    regular expression counts.

    The adapter may be a stranger's, and an expression can run forever: all of them together have
    PATTERN_SECONDS.
    """

    def __init__(self, name: str, pattern: Mapping[str, Any], file: Path) -> None:
        self._name, self._file, self._left_s = name, file, PATTERN_SECONDS
        try:
            self._entries = [
                (Pattern(rf"(.*\.)?({key})$"), value) for key, value in pattern.items()
            ]
        except PatternError as error:
            raise AdapterError(f"{file}: {name}: {error}") from error

    def of(self, path: str, default: Any) -> Any:
        """The layer's value. Raises AdapterError: the expressions take too long."""
        started = time.perf_counter()
        try:
            for expression, value in self._entries:
                left_s = self._left_s - (time.perf_counter() - started)
                if expression.match(path, seconds=left_s):
                    return value
        except PatternTimeoutError as error:
            message = f"its regular expressions take more than {PATTERN_SECONDS:g} s"
            raise AdapterError(f"{self._file}: {self._name}: {message}") from error
        finally:
            self._left_s -= time.perf_counter() - started
        return default


def _alpha(divisor: float, scale: float, *, whole: bool) -> float | None:
    """Return the alpha with alpha / divisor = scale to the last bit, if there is one; `whole`:
    whole numbers only."""
    product = scale * divisor
    above, below = math.nextafter(product, math.inf), math.nextafter(product, 0.0)
    near = (float(round(product)),) if whole else (product, above, below)
    return next((alpha for alpha in near if alpha / divisor == scale), None)
