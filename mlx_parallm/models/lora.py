"""LoRA: into the trainer's tree, on disk, and in the serving tree.

    inject_lora           trainer: mlx-lm's LoRALinear in place, A ~ U(±1/√in), B = 0, float32
    adapter_layers        trainer → AdapterWeights: the arrays that are published and saved
    load_adapter          disk → layers; reads mlx-lm's and PEFT's formats
    save_adapter          layers → disk in mlx-lm's format
    prepare_for_serving   server: wraps every linear layer (served_lora.py)

The update is y = Wx + scale · (xA)B with scale = alpha / rank (Hu et al. 2021, arXiv:2106.09685). Shapes are mlx-lm's:
A [in, r], B [r, out].
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.errors import AdapterError
from mlx_parallm.models.layer_stack import LayerStack
from mlx_parallm.models.mlx_lm_api import LoRALinear, QuantizedSwitchLinear, SwitchLinear
from mlx_parallm.models.served_lora import LoraContext, ServedLinear

ADAPTER_FILE = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"
SPECIFICATION_FILE = "lora_weights.safetensors"  # the name that the specification prints; means ADAPTER_FILE beside it


@dataclass(frozen=True)
class LoraSpec:
    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str = "all-linear"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class LoraPair:
    """One layer's update: a [in, r], b [r, out], both float32, and the factor scale = alpha / rank."""

    a: mx.array
    b: mx.array
    scale: float


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter as it is served. Immutable: a publish makes a new one, requests in flight may keep the old."""

    name: str
    version: int
    layers: Mapping[str, LoraPair]
    serial: int = field(default_factory=count(1).__next__)  # tells arrays apart: names and versions may come again

    @property
    def arrays(self) -> list[mx.array]:
        return [array for pair in self.layers.values() for array in (pair.a, pair.b)]


@dataclass(eq=False)
class AdapterPlace:
    """A name under which an adapter is served. Publishing and replacing rebind `weights` (weights.py, under the write
    lock). A request holds its place to its end: one that has left the table keeps what it held. `pinned`: it holds one
    version of the policy for ever, and its tokens say so."""

    name: str
    weights: AdapterWeights
    pinned: bool = False


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as it lies on disk."""

    path: Path
    layers: Mapping[str, LoraPair]
    config: dict[str, Any]


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by path, quantised ones too; in the trainer's tree the base inside a LoRALinear counts."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, ServedLinear):
            found[path] = module.linear
        elif isinstance(module, nn.Linear | nn.QuantizedLinear) and not path.endswith(".linear"):
            found[path] = module
        elif isinstance(module, LoRALinear):
            found[path] = module.linear
    return found


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear or quantised linear layer."""
    out_features, in_features = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear):
        in_features = in_features * 32 // layer.bits
    return in_features, out_features


def inject_lora(model: nn.Module, spec: LoraSpec) -> list[str]:
    """Freezes the model and puts mlx-lm's LoRALinear around the targets. Uses this thread's MLX random state.

    Returns the paths of the adapted layers. Raises AdapterError when a target matches nothing.
    """
    model.freeze()
    paths = _target_paths(model, spec.target_modules)
    layers = linear_layers(model)
    adapted = [(path, LoRALinear.from_base(layers[path], r=spec.rank, dropout=0.0, scale=spec.scale)) for path in paths]
    model.update_modules(tree_unflatten(adapted))
    for _, layer in adapted:
        layer.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    return paths


def load_into_trainer(model: nn.Module, layers: Mapping[str, LoraPair]) -> None:
    """Puts stored arrays into the LoRALinear layers of the trainer's tree. Raises AdapterError when they do not fit."""
    own = trainer_lora_layers(model)
    if set(own) != set(layers):
        missing, extra = sorted(set(own) - set(layers)), sorted(set(layers) - set(own))
        raise AdapterError(f"the adapter adapts other layers: missing {missing[:3]}, unexpected {extra[:3]}")
    for path, layer in own.items():
        pair = layers[path]
        if pair.a.shape != layer.lora_a.shape or pair.b.shape != layer.lora_b.shape:
            raise AdapterError(
                f"{path}: the adapter has A {pair.a.shape} B {pair.b.shape}, the configuration asks for"
                f" A {layer.lora_a.shape} B {layer.lora_b.shape}"
            )
        factor = pair.scale / layer.scale
        layer.lora_a = pair.a.astype(mx.float32)
        layer.lora_b = pair.b.astype(mx.float32) if factor == 1.0 else pair.b.astype(mx.float32) * factor
    mx.eval(model.trainable_parameters())


def trainer_lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}


def adapter_layers(model: nn.Module) -> dict[str, LoraPair]:
    """The trainer's adapter as it is now; shares the arrays."""
    return {
        path: LoraPair(layer.lora_a, layer.lora_b, float(layer.scale))
        for path, layer in trainer_lora_layers(model).items()
    }


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(in, out) of every layer that an adapter may update, by path."""
    return {path: linear_shape(layer) for path, layer in linear_layers(model).items()}


def check_adapter(shapes: Mapping[str, tuple[int, int]], layers: Mapping[str, LoraPair], source: str) -> None:
    """Raises AdapterError naming the first layer that the model (`linear_shapes`) lacks or whose shape differs."""
    for path, pair in layers.items():
        if path not in shapes:
            raise AdapterError(f"{source}: the model has no linear layer {path!r}")
        in_features, out_features = shapes[path]
        rank = pair.a.shape[-1:]
        if pair.a.shape != (in_features, *rank) or pair.b.shape != (*rank, out_features):
            raise AdapterError(
                f"{source}: {path} is [{in_features} → {out_features}], the adapter's A is {pair.a.shape}"
                f" and B is {pair.b.shape}"
            )


def find_adapter_file(path: str | Path) -> Path:
    """The weights file of an adapter given as file or directory, under any of the usual names. Raises AdapterError."""
    given = Path(path).expanduser()
    if given.is_file():
        return given
    directory = given if given.is_dir() else given.parent if given.name == SPECIFICATION_FILE else None
    for name in (ADAPTER_FILE, PEFT_FILE, SPECIFICATION_FILE):
        if directory is not None and (directory / name).is_file():
            return directory / name
    hint = f"; did you mean {given / 'final'}?" if (given / "final").is_dir() else ""
    raise AdapterError(
        f"no adapter at {given}: expected a file, or a directory with {ADAPTER_FILE} or {PEFT_FILE}{hint}"
    )


def load_adapter(path: str | Path) -> AdapterFile:
    """Reads an adapter in mlx-lm's or PEFT's format. Raises AdapterError."""
    file = find_adapter_file(path)
    config_file = file.parent / ADAPTER_CONFIG
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        tensors = mx.load(str(file))
    except FileNotFoundError as error:
        raise AdapterError(f"{file} needs {ADAPTER_CONFIG} beside it (rank and scale stand there)") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("lora_parameters", {}), dict):
        raise AdapterError(f"{config_file} is not an adapter's configuration")
    if not isinstance(tensors, dict):
        raise AdapterError(f"{file} holds one array: an adapter is a safetensors file")
    peft = any(".lora_A." in key for key in tensors)
    try:
        layers = _from_peft(tensors, config, file) if peft else _from_mlx_lm(tensors, config, file)
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise AdapterError(f"{config_file} does not fit {file.name}: {error!r}") from error
    if not layers:
        raise AdapterError(f"{file} holds no LoRA tensors")
    mx.eval([array for pair in layers.values() for array in (pair.a, pair.b)])
    return AdapterFile(file, layers, config)


def save_adapter(directory: Path, layers: Mapping[str, LoraPair], *, num_layers: int, dropout: float = 0.0) -> None:
    """Writes `adapters.safetensors` and `adapter_config.json` in mlx-lm's format into an existing directory."""
    tensors = {f"{path}.lora_a": pair.a for path, pair in layers.items()}
    tensors |= {f"{path}.lora_b": pair.b for path, pair in layers.items()}
    first = next(iter(layers.values()))
    config = {
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": int(first.a.shape[-1]),
            "scale": first.scale,
            "dropout": dropout,
            "keys": _layer_keys(layers),
        },
    }
    mx.save_safetensors(str(directory / ADAPTER_FILE), tensors, metadata={"format": "mlx"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def prepare_for_serving(model: nn.Module) -> LoraContext:
    """Wraps every linear layer of the serving tree, once, in place; the engine sets the returned context per step."""
    layers = linear_layers(model)
    context = LoraContext()
    model.update_modules(tree_unflatten([(path, ServedLinear(layer, path, context)) for path, layer in layers.items()]))
    return context


def _target_paths(model: nn.Module, targets: tuple[str, ...] | str) -> list[str]:
    layers = linear_layers(model)
    if targets == "all-linear":
        in_blocks = sorted(path for path in layers if ".layers." in f".{path}") or _in_blocks(model, layers)
        if not in_blocks:
            raise AdapterError('target_modules = "all-linear": the model has no linear layer in its blocks')
        return in_blocks
    assert not isinstance(targets, str)
    for target in targets:
        if any(_matches(path, target) for path in layers):
            continue
        if any(
            _matches(p, target) for p, m in model.named_modules() if isinstance(m, SwitchLinear | QuantizedSwitchLinear)
        ):
            raise AdapterError(f"target module {target!r} is a mixture-of-experts layer: adapt attention projections")
        names = sorted({path.rsplit(".", 1)[-1] for path in layers})
        raise AdapterError(f"target module {target!r} matches no linear layer; there are: {', '.join(names)}")
    return sorted(path for path in layers if any(_matches(path, target) for target in targets))


def _in_blocks(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """For architectures that call their list of blocks otherwise (`h`, …)."""
    try:
        prefix = LayerStack(model).path + "."
    except ValueError:
        return []
    return sorted(path for path in paths if path.startswith(prefix))


def _matches(path: str, target: str) -> bool:
    return path == target or path.endswith("." + target)


def _layer_keys(paths: Iterable[str]) -> list[str]:
    """mlx-lm's `keys`: paths inside a block ("self_attn.q_proj"); a layer outside the blocks keeps its full path."""
    keys = set()
    for path in paths:
        _, separator, rest = path.partition("layers.")
        keys.add(rest.partition(".")[2] if separator else path)
    return sorted(keys)


def _from_mlx_lm(tensors: Mapping[str, mx.array], config: Mapping[str, Any], file: Path) -> dict[str, LoraPair]:
    if config.get("fine_tune_type", "lora") != "lora" or any(key.endswith(".m") for key in tensors):
        raise AdapterError(f"{file}: fine_tune_type {config.get('fine_tune_type')!r} is not supported, only 'lora'")
    scale = config.get("lora_parameters", {}).get("scale")
    if not isinstance(scale, int | float):
        raise AdapterError(f"{file.parent / ADAPTER_CONFIG}: lora_parameters.scale is missing")
    layers = {}
    for key, a in tensors.items():
        path, _, leaf = key.rpartition(".")
        if leaf not in ("lora_a", "lora_b"):
            raise AdapterError(f"{file}: {key} is no LoRA tensor")
        if leaf == "lora_a":
            if f"{path}.lora_b" not in tensors:
                raise AdapterError(f"{file}: {path} has lora_a but no lora_b")
            layers[path] = LoraPair(a.astype(mx.float32), tensors[f"{path}.lora_b"].astype(mx.float32), float(scale))
    return layers


def _from_peft(tensors: Mapping[str, mx.array], config: Mapping[str, Any], file: Path) -> dict[str, LoraPair]:
    if config.get("use_dora") or any("lora_magnitude_vector" in key for key in tensors):
        raise AdapterError(f"{file}: DoRA adapters are not supported")
    layers = {}
    for key, a in tensors.items():
        path, separator, _ = key.partition(".lora_A.")
        if not separator:
            if ".lora_B." not in key:
                raise AdapterError(f"{file}: {key} is no LoRA tensor (modules_to_save is not supported)")
            continue
        b = tensors.get(key.replace(".lora_A.", ".lora_B."))
        if b is None:
            raise AdapterError(f"{file}: {path} has lora_A but no lora_B")
        rank = int(a.shape[0])
        alpha = float(config.get("alpha_pattern", {}).get(path.rpartition(".")[2], config.get("lora_alpha", rank)))
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        name = path.removeprefix("base_model.model.")
        layers[name] = LoraPair(a.T.astype(mx.float32), b.T.astype(mx.float32), scale)
    return layers
