"""`mlx_parallm merge`: add an adapter to the weights of its base model, and save the result as a
model.

Two layouts. `safetensors` keeps the base checkpoint's own files, tensor names and shapes (Hugging
Face's, for a model from there) and changes only the adapted tensors: transformers and mlx-lm load
it. `mlx` writes what mlx-lm holds after
loading: its names, its stacked experts, no unused tensors, `format = "mlx"` in the metadata; for
most dense architectures the names are the same. A quantised base is dequantised to the dtype of its
scales and never quantised again; mlx-lm's quantised checkpoints carry mlx-lm's names already, so
there both layouts use those, and `safetensors` refuses an architecture whose experts mlx-lm stacks.

If the part that sees can be loaded (docs/vision.md), `mlx` writes it too, with an adapter's
layers in it; bits are for the language part.

The output is written under a temporary name and renamed at the end.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_parallm.config.load import Config
from mlx_parallm.errors import AdapterError, ModelError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.linear import dense_weight, merged_rows
from mlx_parallm.models.adapters.peft import expert_names
from mlx_parallm.models.adapters.rope_length import rope_length_of
from mlx_parallm.models.loaded_images import image_support, with_images
from mlx_parallm.models.loading import LoadedModel, resolve_model_path
from mlx_parallm.models.lora import fit_adapter, linear_layers, linear_shapes, load_adapter
from mlx_parallm.models.mlx_lm_api import (
    QuantizedSwitchLinear,
    SwitchLinear,
    dequantize_model,
    save_model,
)
from mlx_parallm.models.published.mend import load_hf_model
from mlx_parallm.models.published.rope import fixed_ropes
from mlx_parallm.models.quantize import quantize_layers
from mlx_parallm.system.files import write_directory

Layout = Literal["safetensors", "mlx"]
COMPANION_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".spm", ".tiktoken", ".py"}
TEMPLATES = "additional_chat_templates"
NOT_COMPANIONS = {
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "adapter_config.json",
}
QUANTIZATION_KEYS = ("quantization", "quantization_config")


@dataclass(frozen=True)
class MergeReport:
    path: Path
    layers: int
    dtype: str
    dequantized: bool
    url: str | None = None


def merge(
    base_model: str,
    lora_path: str | Path,
    output_path: Path,
    *,
    layout: Layout = "safetensors",
    bits: int | None = None,
    push_to_hub: str | None = None,
) -> MergeReport:
    """Write base + adapter to `output_path`, a new directory, and upload it on request.

    Args:
        bits: quantise the sum to so many, as `mlx_lm.convert -q` does; always in mlx-lm's layout.

    Raises ModelError: the output exists; the base cannot be read, or has no tensor of an adapted
    layer's name; the upload failed; AdapterError: the adapter cannot be read or does not fit the
    base; CheckpointError: the result cannot be written.
    """
    _check_absent(output_path)
    if push_to_hub is not None:
        _check_upload(push_to_hub)
    base = resolve_model_path(base_model)
    adapter = load_adapter(lora_path)
    rope_length = rope_length_of(adapter.config, adapter.path)
    loaded = _load(base)
    model, config = loaded.model, loaded.config
    layers = fit_adapter(linear_shapes(model), adapter.layers, str(adapter.path))
    merged = merged_weights(model, layers)
    dequantized = _is_quantized(model, config)
    if dequantized:
        model = _dequantize(model, base)

    def fill(directory: Path) -> None:
        entry: dict[str, Any] = {}
        if bits is not None:
            model.update(tree_unflatten([(f"{p}.weight", w) for p, w in merged.items()]))
            with replace(loaded, model=model).text_alone():
                entry = quantize_layers(model, bits)
            save_model(directory, model)
        elif layout == "mlx" or dequantized:
            _save_from_model(model, merged, directory, layout)
        else:
            _save_from_checkpoint(base, model, merged, directory)
        _copy_companions(base, directory, entry, rope_length)
        _check_absent(output_path)  # again: writing a large model takes minutes

    write_directory(output_path, fill)
    dtype = str(next(iter(merged.values())).dtype).removeprefix("mlx.core.")
    dtype += f", {bits} bits" if bits is not None else ""
    url = _upload(output_path, push_to_hub) if push_to_hub is not None else None
    return MergeReport(output_path, len(merged), dtype, dequantized, url)


def _check_absent(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise ModelError(
            f"{path} exists already: choose another path, a merged model never replaces anything"
        )


def merged_weights(model: nn.Module, layers: Mapping[str, LoraPair]) -> dict[str, mx.array]:
    """Return path → W + scale · (AB)ᵀ, [out, in], with DoRA scaled to the rows' magnitudes;
    summed in float32, rounded once to the base's dtype. Lazy."""
    linear = linear_layers(model)
    merged = {}
    for path, pair in layers.items():
        layer = linear[path]
        dtype = (
            layer.scales.dtype
            if getattr(layer, "mode", "") == "affine"
            else dense_weight(layer).dtype
        )
        merged[path] = merged_rows(dense_weight(layer), pair).astype(dtype)
    return merged


def _load(base: Path) -> LoadedModel:
    """Return a model, with the part that sees if it can be loaded here."""
    try:
        model, config = load_hf_model(base, lazy=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{base} cannot be loaded: {error}") from error
    loaded = LoadedModel(model, config, base, 0)
    if "vision_config" not in config:
        return loaded
    return with_images(loaded, image_support(Config().image_hooks(), base))


def _is_quantized(model: nn.Module, config: Mapping[str, Any]) -> bool:
    quantized = nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear
    return any(key in config for key in QUANTIZATION_KEYS) or any(
        isinstance(m, quantized) for m in model.modules()
    )


def _dequantize(model: nn.Module, base: Path) -> nn.Module:
    model = dequantize_model(model)
    left = [
        name
        for name, array in tree_flatten(model.parameters())
        if not mx.issubdtype(array.dtype, mx.floating)
    ]
    if left:
        raise ModelError(
            f"{base}: {left[0]} is quantised in a way that cannot be"
            " undone here: use the original base"
        )
    return model


def _save_from_model(
    model: nn.Module, merged: Mapping[str, mx.array], directory: Path, layout: Layout
) -> None:
    """Save the loaded tree with the merged weights under mlx-lm's names."""
    if layout == "safetensors" and any(
        isinstance(module, SwitchLinear) for module in model.modules()
    ):
        raise ModelError(
            "this quantised base has its experts stacked in mlx-lm's layout: use --format mlx"
        )
    model.update(tree_unflatten([(f"{path}.weight", weight) for path, weight in merged.items()]))
    save_model(directory, model)
    if layout == "safetensors":
        for file in directory.glob("*.safetensors"):
            _save(file, dict(_load_tensors(file)))  # the same tensors without `format = "mlx"`


def _save_from_checkpoint(
    base: Path, model: nn.Module, merged: Mapping[str, mx.array], directory: Path
) -> None:
    """Copy the base's files one by one, with the adapted tensors replaced."""
    linear = linear_layers(model)
    names, turned = _names_in(base, model)
    places = {names.get(name, name): place for name, place in _places(merged).items()}
    waiting = set(places)
    for file in sorted(base.glob("model*.safetensors")):
        tensors = dict(_load_tensors(file))
        for name in [name for name in tensors if name in waiting]:
            waiting.remove(name)
            path, expert = places[name]
            loaded, new = linear[path].weight, merged[path]
            if expert is not None:
                loaded, new = loaded[expert], new[expert]
            same = _equal(loaded, tensors[name])
            if name in turned and _equal(loaded.T, tensors[name]):
                same, new = not same, mx.contiguous(new.T)  # both: nobody knows which it is
            if not same:
                raise ModelError(f"mlx-lm changes {name!r} when it loads it: use --format mlx")
            tensors[name] = new
        _save(directory / file.name, tensors)
    if waiting:
        raise ModelError(
            f"{base} has no tensor {min(waiting)!r} (mlx-lm renames it): use --format mlx"
        )
    for index in base.glob("*.safetensors.index.json"):
        shutil.copy(index, directory / index.name)


def _names_in(base: Path, model: nn.Module) -> tuple[dict[str, str], set[str]]:
    """Return the model's name of each tensor → the checkpoint's, where loading only renames it
    (what leaves `sanitize` is the object that went in), and the checkpoint's names of those that it
    may turn as well (GPT-2's, which end as before)."""
    if not hasattr(model, "sanitize"):
        return {}, set()
    tensors: dict[str, mx.array] = {}
    for file in sorted(base.glob("model*.safetensors")):
        tensors |= _load_tensors(file)
    names = {id(array): name for name, array in tensors.items()}
    try:
        read = model.sanitize(dict(tensors))
    except KeyError:  # RecurrentGemma's changes the model, once
        return {}, set()
    short = {name.removeprefix("transformer."): name for name in tensors}
    turned = {
        name: short[rest]
        for name, array in read.items()
        if id(array) not in names
        and array.ndim == 2
        and (rest := name.removeprefix("model.")) in short
    }
    kept = {name: names[id(array)] for name, array in read.items() if id(array) in names}
    return kept | turned, set(turned.values())


def _equal(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.array_equal(a, b).item())


def _places(merged: Mapping[str, mx.array]) -> dict[str, tuple[str, int | None]]:
    """The checkpoint's tensor → the adapted layer, and which of its stacked experts."""
    places: dict[str, tuple[str, int | None]] = {}
    for path, weight in merged.items():
        if weight.ndim == 2:
            places[f"{path}.weight"] = path, None
            continue
        try:
            names = expert_names(path, weight.shape[0])
        except AdapterError:  # under mlx-lm's name, or not at all
            names = []
        for e, name in enumerate(names):
            places[f"{name}.weight"] = path, e
        if not names:
            places[f"{path}.weight"] = path, None
    return places


def _load_tensors(file: Path) -> dict[str, mx.array]:
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    return tensors


def _save(file: Path, tensors: dict[str, mx.array]) -> None:
    # the tensors may still be read lazily from `file` itself
    unfinished = file.with_name("unfinished.safetensors")
    mx.save_safetensors(str(unfinished), tensors, metadata={"format": "pt"})
    unfinished.rename(file)


def _copy_companions(
    base: Path, directory: Path, quantization: Mapping[str, Any], rope_length: int | None
) -> None:
    """Copy config.json with this quantisation or none and the ropes of the adapter, and tokenizer,
    chat templates, generation_config, code and licence."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if rope_length is not None:
        config = fixed_ropes(config, rope_length)
    for section in (config, config.get("text_config", {})):
        for key in QUANTIZATION_KEYS:
            section.pop(key, None)
    if quantization:
        config |= dict.fromkeys(QUANTIZATION_KEYS, quantization)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in sorted(base.iterdir()):
        wanted = file.suffix in COMPANION_SUFFIXES and not file.name.endswith(".index.json")
        if (
            file.is_file()
            and file.name not in NOT_COMPANIONS
            and (wanted or file.stem in ("LICENSE", "NOTICE"))
        ):
            shutil.copy(file, directory / file.name)
    if (templates := base / TEMPLATES).is_dir():
        shutil.copytree(templates, directory / TEMPLATES, dirs_exist_ok=True)


def _check_upload(repo: str) -> None:
    """Fail before the work when the upload cannot succeed."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ModelError(f"--push-to-hub {repo!r}: {error}") from error
    if get_token() is None:
        raise ModelError("--push-to-hub needs a hub token: run `hf auth login`, or set HF_TOKEN")


def _upload(directory: Path, repo: str) -> str:
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=directory)
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the merged model is at {directory}, but its upload to {repo!r} failed: {reason}"
        ) from error
    return str(url)
