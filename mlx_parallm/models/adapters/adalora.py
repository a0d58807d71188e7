"""AdaLoRA on disk: PEFT's files (`peft_type` ADALORA), and the factors beside an adapter of
mlx-lm's format.

    read_factors, write_factors    `adalora.safetensors`: E and B of each layer, whose product is
                                   the lora_b of `adapters.safetensors`; with it a training
                                   continues
    read_adalora, save_adalora     PEFT's AdaLoraConfig: A [r, in], E [r, 1], B [out, r], named
                                   lora_A, lora_E and lora_B without ".weight"

The update is B · diag(E) · A · lora_alpha / (init_r + 1e-5), with the constant init_r: a triplet
that is pruned leaves the factor as it is. PEFT writes the triplets that are left, and in
`rank_pattern` which of the init_r they are.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import AdapterError
from mlx_parallm.models.adapters.adapter import (
    ADALORA_FILE,
    ADAPTER_CONFIG,
    PEFT_FILE,
    LoraPair,
    SvdFactors,
)
from mlx_parallm.models.adapters.names import name_of_transformers
from mlx_parallm.models.adapters.settings import ADALORA_SCHEDULE, check_adalora

PREFIX = "base_model.model."
DEFAULT_ALPHA, DEFAULT_RANK = 8, 12  # PEFT's, if the configuration does not say
RANKNUM_EPS = 1e-5
"""PEFT's, added to init_r."""
ROUNDED = 2**-6
"""The largest difference of a product from its rounding to bfloat16, of the largest number."""
PARAMETERS = "adalora_parameters"
"""The key of adapter_config.json under which the schedule of a training stands."""
_KEY = re.compile(r"(?P<path>.+)\.(?P<part>lora_[AEB]|ranknum)(?:\.(?P<name>[^.]+))?")


def scale_of(alpha: float, init_r: int) -> float:
    return alpha / (init_r + RANKNUM_EPS)


def product(e: mx.array, left: mx.array) -> mx.array:
    """diag(E) B [r, out] float32: the lora_b of the same update without E. Lazy."""
    return e.astype(mx.float32)[:, None] * left.astype(mx.float32)


# ---------------------------------------------------------------------- beside mlx-lm's format


def write_factors(directory: Path, layers: Mapping[str, LoraPair]) -> None:
    """Write the factors of the layers that have them; nothing if none has."""
    tensors = {f"{path}.lora_e": pair.svd.e for path, pair in layers.items() if pair.svd}
    tensors |= {f"{path}.lora_b": pair.svd.left for path, pair in layers.items() if pair.svd}
    if tensors:
        mx.save_safetensors(str(directory / ADALORA_FILE), tensors, metadata={"format": "mlx"})


def read_factors(directory: Path, layers: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
    """The layers of mlx-lm's format with the factors that lie beside them, if any do. Raises
    AdapterError: those of another adapter."""
    file = directory / ADALORA_FILE
    if not file.is_file():
        return dict(layers)
    try:
        tensors = mx.load(str(file))
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    assert isinstance(tensors, dict)
    whole = {}
    for path, pair in layers.items():
        e, left = tensors.pop(f"{path}.lora_e", None), tensors.pop(f"{path}.lora_b", None)
        rank = int(pair.a.shape[1])
        if e is None or left is None or e.shape != (rank,) or left.shape != pair.b.shape:
            raise AdapterError(f"{file}: {path} has no factors of rank {rank}: of another adapter")
        if not _fits(e, left, pair.b, file):
            raise AdapterError(
                f"{file}: the factors of {path} do not give its lora_b: of another adapter (without"
                " this file it is read as LoRA)"
            )
        whole[path] = replace(pair, svd=SvdFactors(e, left, (True,) * rank))
    if tensors:
        raise AdapterError(f"{file}: {next(iter(tensors))} is of no layer of the adapter")
    return whole


def _fits(e: mx.array, left: mx.array, b: mx.array, file: Path) -> bool:
    """Whether diag(E) B is lora_b, which may be stored in fewer digits. Raises AdapterError: the
    file was cut."""
    try:
        off = mx.abs(product(e, left) - b.astype(mx.float32)).max()
        return not (off > ROUNDED * mx.abs(b).max()).item()
    except RuntimeError as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error


# ---------------------------------------------------------------------- PEFT's


def read_adalora(
    tensors: Mapping[str, mx.array], config: Mapping[str, Any], file: Path
) -> dict[str, LoraPair]:
    """Return the layers by path; one of rank 0 has a triplet of zeros. Raises AdapterError: a
    setting or a tensor that would be left out, or one that is missing; shapes that do not fit."""
    config_file = file.parent / ADAPTER_CONFIG
    check_adalora(config, config_file)
    init_r, patterns = config.get("init_r", DEFAULT_RANK), config.get("rank_pattern") or {}
    parts: dict[str, dict[str, mx.array]] = {}
    for key, tensor in tensors.items():
        if (match := _KEY.fullmatch(key)) is None:
            raise AdapterError(f"{file}: {key} is not a tensor of AdaLoRA")
        leaves = parts.setdefault(match["path"].removeprefix(PREFIX), {})
        if match["part"] in leaves:
            raise AdapterError(f"{file}: {key} is of a second adapter, a file holds one")
        leaves[match["part"]] = tensor
    layers = {}
    for path, leaves in parts.items():
        if missing := [part for part in ("lora_A", "lora_E", "lora_B") if part not in leaves]:
            raise AdapterError(f"{file}: {path} has no {missing[0]}")
        a, e, b = leaves["lora_A"], leaves["lora_E"], leaves["lora_B"]
        rank = int(a.shape[0]) if a.ndim == 2 else -1
        listed = patterns.get(f"{path}.lora_E")
        pattern = (True,) * rank if listed is None else tuple(map(bool, listed))
        whole = listed is not None or rank == init_r
        if (
            not whole
            or e.shape != (rank, 1)
            or b.ndim != 2
            or b.shape[1] != rank
            or sum(pattern) != rank
        ):
            raise AdapterError(
                f"{file}: {path}: lora_A {a.shape}, lora_E {e.shape} and lora_B {b.shape} are not"
                f" [r, in], [r, 1] and [out, r] with r = {sum(pattern) if listed else init_r}"
                " (init_r, rank_pattern)"
            )
        if "ranknum" in leaves and not (leaves["ranknum"] == init_r).all().item():
            raise AdapterError(f"{file}: {path}: ranknum is not init_r = {init_r}")
        if rank == 0:
            a, e, b = (mx.zeros(shape) for shape in ((1, a.shape[1]), (1, 1), (b.shape[0], 1)))
            pattern = (True,) + (False,) * (init_r - 1)
        e, left = e.reshape(-1), b.T
        scale = scale_of(float(config.get("lora_alpha", DEFAULT_ALPHA)), init_r)
        svd = SvdFactors(e, left, pattern)
        layers[path] = LoraPair(a.T, product(e, left), scale, svd=svd)
    return layers


def pruned(layers: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
    """The layers without the triplets whose singular value is 0; some may have none left. Before
    the first update all are 0, and all stay."""
    values = {path: np.array(pair.svd.e) for path, pair in layers.items() if pair.svd}
    if not any(e.any() for e in values.values()):
        return dict(layers)
    return {
        path: _chosen(pair, values[path] != 0) if path in values else pair
        for path, pair in layers.items()
    }


def _chosen(pair: LoraPair, kept: np.ndarray) -> LoraPair:
    assert pair.svd is not None
    if kept.all():
        return pair
    rows, pattern = mx.array(np.flatnonzero(kept).astype(np.int32)), np.array(pair.svd.pattern)
    pattern[np.flatnonzero(pattern)[~kept]] = False
    svd = SvdFactors(pair.svd.e[rows], pair.svd.left[rows], tuple(pattern.tolist()))
    return replace(pair, a=pair.a[:, rows], b=pair.b[rows], svd=svd)


def save_adalora(
    directory: Path,
    layers: Mapping[str, LoraPair],
    *,
    dropout: float,
    base: str = "",
    schedule: Mapping[str, Any],
) -> None:
    """Write both files. `schedule`: settings of a training (target_r, tinit, …), if they are
    known. Raises AdapterError: layers that are not AdaLoRA's, or of several ranks or factors."""
    tensors: dict[str, mx.array] = {}
    patterns: dict[str, list[bool]] = {}
    kinds = {(len(pair.svd.pattern), pair.scale) if pair.svd else None for pair in layers.values()}
    if None in kinds or len(kinds) != 1:
        raise AdapterError(
            "PEFT's AdaLoRA has singular values, one init_r and one alpha for all layers, this"
            " adapter has not: take --format peft"
        )
    [(init_r, scale)] = [kind for kind in kinds if kind]
    layers = {name_of_transformers(path): pair for path, pair in layers.items()}
    for path, pair in sorted(pruned(layers).items()):
        assert pair.svd is not None
        tensors[f"{PREFIX}{path}.lora_A"] = mx.contiguous(pair.a.T)
        tensors[f"{PREFIX}{path}.lora_E"] = pair.svd.e[:, None]
        tensors[f"{PREFIX}{path}.lora_B"] = mx.contiguous(pair.svd.left.T)
        patterns[f"{path}.lora_E"] = list(pair.svd.pattern)
    ranks = [sum(pattern) for pattern in patterns.values()]
    alpha = scale * (init_r + RANKNUM_EPS)
    config = {
        "peft_type": "ADALORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "init_r": init_r,
        "lora_alpha": round(alpha) if abs(alpha - round(alpha)) < 1e-9 * alpha else alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(layers),
        # PEFT refuses a schedule without a step
        "target_r": max(1, round(sum(ranks) / len(ranks))),
        "total_step": 1,
        **{name: value for name, value in schedule.items() if name in ADALORA_SCHEDULE},
        "rank_pattern": patterns if min(ranks) < init_r else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    mx.save_safetensors(str(directory / PEFT_FILE), tensors, metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
