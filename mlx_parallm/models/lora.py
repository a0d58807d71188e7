"""LoRA: into the trainer's tree, on disk, and in the serving tree.

    inject_lora           trainer: LoRALinear or DoRALinear in place, A ~ U(±1/√in), B = 0, float32
    adapter_layers        trainer → AdapterWeights: the arrays that are published and saved
    load_adapter          disk → layers; reads mlx-lm's and PEFT's formats
    save_adapter          layers → disk in mlx-lm's format
    prepare_for_serving   server: wraps every linear layer (served_lora.py)

The update is y = Wx + scale · (xA)B with scale = alpha / rank (Hu et al. 2021, arXiv:2106.09685),
or alpha / √rank (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732); DoRA adds a magnitude, AdaLoRA
singular values (adapters/linear.py). Shapes are mlx-lm's: A [in, r], B [r, out].
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import AdapterError
from mlx_parallm.execution.prompt_images import PARTS
from mlx_parallm.models.adapters.adalora import (
    PARAMETERS,
    product,
    read_adalora,
    read_factors,
    write_factors,
)
from mlx_parallm.models.adapters.adapter import ADAPTER_CONFIG, PEFT_FILE, LoraPair, SvdFactors
from mlx_parallm.models.adapters.linear import (
    AdapterDropout,
    DoRALinear,
    LoRALinear,
    LoRASwitchLinear,
    SVDLinear,
)
from mlx_parallm.models.adapters.names import name_here
from mlx_parallm.models.adapters.peft import is_peft, read_peft
from mlx_parallm.models.adapters.served import (
    LoraContext,
    ServedLinear,
    ServedSwitchLinear,
    serve_switches,
)
from mlx_parallm.models.adapters.settings import check_mlx_lm
from mlx_parallm.models.experts.targets import adaptable, are_experts, check_adapted, refused
from mlx_parallm.models.layer_stack import LayerStack
from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear, SwitchLinear
from mlx_parallm.system.files import is_directory, is_file, local_path

ADAPTER_FILE = "adapters.safetensors"
# the name that the specification prints; means ADAPTER_FILE beside it
SPECIFICATION_FILE = "lora_weights.safetensors"
MAX_RANK = 4096
LINEAR = nn.Linear | nn.QuantizedLinear | SwitchLinear | QuantizedSwitchLinear
# beside an adapter, as vLLM reads them
NEW_EMBEDDINGS = ("new_embeddings.safetensors", "new_embeddings.bin")
NPZ_FILE = "adapters.npz"  # mlx-lm's arrays as its first versions kept them

HEADS = ("lm_head", "language_model.lm_head", "embed_out")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as it lies on disk."""

    path: Path
    layers: Mapping[str, LoraPair]
    config: dict[str, Any]


WEIGHT_READ_DIRECTLY = (
    "prediction_coefs",
    "correction_coefs",  # Gemma 3n
    "self_attention_res_proj",
    "mlp_res_proj",
    "output_attn_res_proj",  # Kimi K3
)
"""Layers whose `weight` mlx-lm's forward reads and rewrites itself (Gemma 3n's AltUp): a
LoRALinear has none."""


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by path that can have an adapter, quantised ones and stacked experts too;
    in the trainer's tree the base inside a LoRALinear counts."""
    layers: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path.endswith(WEIGHT_READ_DIRECTLY):
            continue
        if isinstance(module, ServedLinear | ServedSwitchLinear):
            layers[path] = module.linear
        elif isinstance(module, LINEAR) and not path.endswith(".linear"):
            layers[path] = module
        elif isinstance(module, LoRALinear):
            layers[path] = module.linear
    return layers


def linear_shape(layer: nn.Module) -> tuple[int, ...]:
    """(in, out) of a linear or quantised linear layer, (experts, in, out) of stacked experts."""
    *experts, out_features, in_features = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear | QuantizedSwitchLinear):
        in_features = in_features * 32 // layer.bits
    return *experts, in_features, out_features


def adapted_layer(
    layer: nn.Module,
    rank: int,
    scale: float,
    dropout: AdapterDropout | None = None,
    kind: type[LoRALinear] = LoRALinear,
) -> LoRALinear:
    """Put a new adapter around a linear layer; `kind`: if it is not a stack of experts."""
    kind = LoRASwitchLinear if are_experts(layer) else kind
    return kind(layer, linear_shape(layer), rank, scale, dropout)


def inject_lora(
    model: nn.Module, config: LoraConfig, dropout: AdapterDropout | None = None
) -> list[str]:
    """Freezes the model and puts a LoRALinear, DoRALinear or SVDLinear around the targets. Uses
    this thread's MLX random state.

    Args:
        dropout: what switches the layers' dropout on; default: none has any.

    Returns the paths of the adapted layers. Raises AdapterError when a target or a range of blocks
    matches nothing.
    """
    model.freeze()
    paths = _in_range(model, _target_paths(model, config), config.layers)
    adapt_layers(model, paths, config, dropout)
    return paths


def adapt_layers(
    model: nn.Module, paths: Iterable[str], config: LoraConfig, dropout: AdapterDropout | None
) -> None:
    """Put a new adapter around each of these linear layers of a frozen model, as `inject_lora`
    does."""
    layers = linear_layers(model)
    kind = DoRALinear if config.use_dora else SVDLinear if config.use_adalora else LoRALinear
    adapted = [
        (path, adapted_layer(layers[path], config.rank, config.scale, dropout, kind))
        for path in paths
    ]
    model.update_modules(tree_unflatten(adapted))


def load_into_trainer(model: nn.Module, layers: Mapping[str, LoraPair]) -> None:
    """Puts stored arrays into the LoRALinear layers of the trainer's tree. Raises AdapterError
    when they do not fit."""
    targets = trainer_lora_layers(model)
    layers = named_here(layers, targets, "the adapter")
    if set(targets) != set(layers):
        missing, extra = sorted(set(targets) - set(layers)), sorted(set(layers) - set(targets))
        raise AdapterError(
            f"the adapter adapts other layers: missing {missing[:3]}, unexpected {extra[:3]}"
        )
    for path, layer in targets.items():
        pair = layers[path]
        if isinstance(layer, SVDLinear):
            _load_factors(layer, pair, path)
            continue
        if pair.a.shape != layer.lora_a.shape or pair.b.shape != layer.lora_b.shape:
            raise AdapterError(
                f"{path}: the adapter has A {pair.a.shape} B {pair.b.shape}, the configuration asks"
                f" for A {layer.lora_a.shape} B {layer.lora_b.shape}"
            )
        if (pair.magnitude is not None) != isinstance(layer, DoRALinear):
            kinds = ("LoRA", "DoRA") if pair.magnitude is None else ("DoRA", "LoRA")
            raise AdapterError(
                f"the adapter is {kinds[0]}, the configuration asks for {kinds[1]} (lora.use_dora)"
            )
        factor = pair.scale / layer.scale
        layer.lora_a = pair.a.astype(mx.float32)
        layer.lora_b = (
            pair.b.astype(mx.float32) if factor == 1.0 else pair.b.astype(mx.float32) * factor
        )
        if pair.magnitude is not None:
            layer.m = pair.magnitude.astype(mx.float32)
    mx.eval(model.trainable_parameters())


def _load_factors(layer: SVDLinear, pair: LoraPair, path: str) -> None:
    """Puts a layer's triplets first; those that it has beyond them stay as a training begins.
    Raises AdapterError: it has no factors, or too many."""
    svd, rank = pair.svd, layer.lora_e.size
    if svd is None:
        raise AdapterError(
            "the adapter has no singular values, the configuration asks for AdaLoRA"
            " (lora.use_adalora)"
        )
    count = svd.e.size
    if (
        pair.a.shape != (layer.lora_a.shape[0], count)
        or svd.left.shape != (count, layer.lora_b.shape[1])
        or count > rank
    ):
        raise AdapterError(
            f"{path}: the adapter has A {pair.a.shape} B {svd.left.shape}, the configuration asks"
            f" for A {layer.lora_a.shape} B {layer.lora_b.shape}"
        )
    if count < rank and not svd.left.any().item():
        return  # rank 0: it begins anew
    factor = pair.scale / layer.scale
    e = svd.e.astype(mx.float32) if factor == 1.0 else svd.e.astype(mx.float32) * factor
    if count == rank:
        layer.lora_a = pair.a.astype(mx.float32)
        layer.lora_b, layer.lora_e = svd.left.astype(mx.float32), e
        return
    layer.lora_a = mx.concatenate([pair.a.astype(mx.float32), layer.lora_a[:, count:]], axis=1)
    layer.lora_b = mx.concatenate([svd.left.astype(mx.float32), layer.lora_b[count:]])
    layer.lora_e = mx.concatenate([e, mx.zeros((rank - count,))])


def trainer_lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {
        path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def adapter_parameters(model: nn.Module) -> Iterator[str]:
    """Yield the dotted path of every array of the trainer's adapter, trained or frozen."""
    for path, layer in trainer_lora_layers(model).items():
        for name, array in layer.items():
            if isinstance(array, mx.array) and not name.startswith("_"):
                yield f"{path}.{name}"


def adapter_layers(model: nn.Module, *, factors: bool = False) -> dict[str, LoraPair]:
    """The trainer's adapter as it is now; shares the arrays. Gains of DoRA layers and the products
    of AdaLoRA's are not evaluated. `factors`: with those of AdaLoRA's layers, to be saved."""
    layers = {}
    for path, layer in trainer_lora_layers(model).items():
        layers[path] = layer.pair()
        if factors and isinstance(layer, SVDLinear):
            svd = SvdFactors(layer.lora_e, layer.lora_b, (True,) * layer.lora_e.size)
            layers[path] = replace(layers[path], svd=svd)
    return layers


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """(in, out), or (experts, in, out), of every layer that an adapter may update, by path."""
    return {path: linear_shape(layer) for path, layer in linear_layers(model).items()}


def named_here(
    layers: Mapping[str, LoraPair], paths: Collection[str], source: str
) -> dict[str, LoraPair]:
    """Return the layers under the names that they have among a model's `paths`. Raises
    AdapterError: two of them are one layer."""
    here: dict[str, LoraPair] = {}
    for path, pair in layers.items():
        name = name_here(path, paths)
        if name in here:
            raise AdapterError(f"{source}: {path} is {name}, which has an adapter already")
        here[name] = pair
    return here


def fit_adapter(
    shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, LoraPair], source: str
) -> dict[str, LoraPair]:
    """Return the layers under the model's names. Raises AdapterError naming the first one that the
    model (`linear_shapes`) lacks or whose shape differs."""
    here = named_here(layers, shapes, source)
    for path, pair in here.items():
        if path not in shapes:
            seeing = path.startswith(PARTS)
            why = "; it is of the part that sees, which is not loaded here" if seeing else ""
            if path in HEADS:
                why = (
                    ": its head is its embedding (tie_word_embeddings), and an adapter of a tied"
                    " head is not supported (docs/algorithms.md)"
                )
            raise AdapterError(f"{source}: the model has no linear layer {path!r}{why}")
        *experts, in_features, out_features = shapes[path]
        rank = pair.a.shape[-1:]
        if pair.a.shape != (*experts, in_features, *rank) or pair.b.shape != (
            *experts,
            *rank,
            out_features,
        ):
            many = f"{experts[0]} experts of " if experts else ""
            raise AdapterError(
                f"{source}: {path} is {many}[{in_features} → {out_features}], the adapter's A is"
                f" {pair.a.shape}"
                f" and B is {pair.b.shape}"
            )
        if pair.magnitude is not None and pair.magnitude.shape != (out_features,):
            raise AdapterError(
                f"{source}: {path} has {out_features} outputs, its magnitude is"
                f" {pair.magnitude.shape}"
            )
    return here


def find_adapter_file(path: str | Path) -> Path:
    """Find the weights file of the adapter at `path`, a file or directory. Raises AdapterError."""
    source = local_path(path)
    if is_file(source):
        return source
    directory = (
        source
        if is_directory(source)
        else source.parent
        if source.name == SPECIFICATION_FILE
        else None
    )
    for name in (ADAPTER_FILE, PEFT_FILE, SPECIFICATION_FILE, NPZ_FILE):
        if directory is not None and is_file(directory / name):
            return directory / name
    hint = f"; did you mean {source / 'final'}?" if is_directory(source / "final") else ""
    if directory is not None and is_file(directory / "adapter_model.bin"):
        hint = "; adapter_model.bin is PyTorch's pickle: save it with PEFT again, as safetensors"
    raise AdapterError(
        f"no adapter at {source}: expected a file, or a directory with {ADAPTER_FILE} or"
        f" {PEFT_FILE}{hint}"
    )


def load_adapter(path: str | Path, *, as_stored: bool = False) -> AdapterFile:
    """Reads an adapter in mlx-lm's or PEFT's format, in float32 unless `as_stored`. Raises
    AdapterError."""
    file = find_adapter_file(path)
    config, tensors = _read(file)
    try:
        if config.get("peft_type") == "ADALORA":
            layers = read_adalora(tensors, config, file)
        elif is_peft(tensors, config):
            layers = read_peft(tensors, config, file)
        else:
            layers = read_factors(file.parent, _from_mlx_lm(tensors, config, file))
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise AdapterError(
            f"{file.parent / ADAPTER_CONFIG} does not fit {file.name}: {error!r}"
        ) from error
    if not layers:
        raise AdapterError(f"{file} holds no LoRA tensors")
    if (
        rank := max((pair.a.shape[-1] for pair in layers.values() if pair.a.ndim), default=0)
    ) > MAX_RANK:
        raise AdapterError(f"{file} has rank {rank}: the highest is {MAX_RANK}")
    if not as_stored:
        layers = {path: _wide(pair) for path, pair in layers.items()}
    _evaluate(layers, file)
    return AdapterFile(file, layers, config)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """The configuration beside the file, and the file's arrays, which are read when they are
    used."""
    config_file = file.parent / ADAPTER_CONFIG
    if not config_file.is_file():  # reading a pipe would block forever
        raise AdapterError(f"{file} needs {ADAPTER_CONFIG} beside it (rank and scale stand there)")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        tensors = mx.load(str(file))
    except (OSError, ValueError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("lora_parameters", {}), dict):
        raise AdapterError(f"{config_file} is not an adapter's configuration")
    for name in NEW_EMBEDDINGS:
        if (file.parent / name).exists():
            raise AdapterError(
                f"{file.parent / name}: embeddings of added tokens are not supported: add them"
                " to the base model"
            )
    if not isinstance(tensors, dict):
        raise AdapterError(f"{file} holds one array: an adapter is a safetensors file")
    for key, tensor in tensors.items():
        # quantised weights: float8 is read as uint8, without scales
        if not mx.issubdtype(tensor.dtype, mx.floating):
            kind = str(tensor.dtype).removeprefix("mlx.core.")
            raise AdapterError(
                f"{file}: {key} is {kind}: an adapter's tensors are float32, float16 or bfloat16"
            )
    return config, tensors


def _evaluate(layers: Mapping[str, LoraPair], file: Path) -> None:
    """Raises AdapterError: the file was cut while it was read, or a number is not finite."""
    try:
        mx.eval([pair.arrays for pair in layers.values()])
        mx.eval([[pair.svd.e, pair.svd.left] for pair in layers.values() if pair.svd])
    except RuntimeError as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    for path, pair in layers.items():
        if not math.isfinite(pair.scale) or not all(
            mx.isfinite(array).all().item() for array in pair.arrays
        ):
            raise AdapterError(f"{file}: {path} holds a number that is not finite")


def save_adapter(
    directory: Path,
    layers: Mapping[str, LoraPair],
    *,
    num_layers: int,
    dropout: float = 0.0,
    base: str = "",
    adalora: Mapping[str, Any] | None = None,
) -> None:
    """Writes `adapters.safetensors` and `adapter_config.json` in mlx-lm's format into an
    existing directory, and the factors of AdaLoRA's layers beside them. `adalora`: its settings."""
    config = adapter_config(layers, num_layers=num_layers, dropout=dropout, base=base)
    config |= {PARAMETERS: dict(adalora)} if adalora else {}
    write_factors(directory, layers)
    mx.save_safetensors(
        str(directory / ADAPTER_FILE), adapter_tensors(layers), metadata={"format": "mlx"}
    )
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def adapter_tensors(layers: Mapping[str, LoraPair]) -> dict[str, mx.array]:
    """The arrays under mlx-lm's names, those of experts as it has them: A [experts, r, in], B
    [experts, out, r]."""
    tensors = {f"{path}.lora_a": _as_stored(pair.a) for path, pair in layers.items()}
    tensors |= {f"{path}.lora_b": _as_stored(pair.b) for path, pair in layers.items()}
    return tensors | {
        f"{path}.m": pair.magnitude for path, pair in layers.items() if pair.magnitude is not None
    }


def _as_stored(array: mx.array) -> mx.array:
    return array if array.ndim == 2 else mx.contiguous(array.swapaxes(-1, -2))


def adapter_config(
    layers: Mapping[str, LoraPair], *, num_layers: int, dropout: float = 0.0, base: str = ""
) -> dict[str, Any]:
    """mlx-lm's adapter_config.json; `base`: the model that it adapts, "" = not known.

    Raises AdapterError: its format has one rank, one scale and one kind for all layers.
    """
    kinds = {
        (int(pair.a.shape[-1]), pair.scale, pair.magnitude is not None) for pair in layers.values()
    }
    if len(kinds) != 1:
        shown = ", ".join(
            f"rank {rank} × {scale:g}{' DoRA' * dora}" for rank, scale, dora in sorted(kinds)[:3]
        )
        raise AdapterError(
            "mlx-lm's format has one rank and scale for all layers,"
            f" this adapter has several: {shown}"
        )
    [(rank, scale, dora)] = kinds
    return ({"model": base} if base else {}) | {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": dropout,
            "keys": _layer_keys(layers),
        },
    }


def prepare_for_serving(model: nn.Module) -> LoraContext:
    """Wraps every linear layer of the serving tree, once, in place; the engine sets the returned
    context per step."""
    layers = linear_layers(model)
    context = LoraContext()
    serve_switches(model, context)
    served: list[tuple[str, nn.Module]] = [
        (path, (ServedSwitchLinear if are_experts(layer) else ServedLinear)(layer, path, context))
        for path, layer in layers.items()
    ]
    model.update_modules(tree_unflatten(served))
    return context


def _target_paths(model: nn.Module, config: LoraConfig) -> list[str]:
    targets, every = config.target_modules, linear_layers(model)
    layers = adaptable(every, config)
    paths = _targets(model, targets, layers, set(every) - set(layers))
    check_adapted((layers[path] for path in paths), config)
    return paths


def _targets(
    model: nn.Module,
    targets: tuple[str, ...] | str,
    layers: Mapping[str, nn.Module],
    experts: Collection[str],
) -> list[str]:
    """`experts`: paths of stacked experts that are not to be adapted."""
    if targets == "all-linear":
        in_blocks = sorted(path for path in layers if ".layers." in f".{path}") or _in_blocks(
            model, layers
        )
        if not in_blocks:
            raise AdapterError(
                'target_modules = "all-linear": the model has no linear layer in its blocks'
            )
        return in_blocks
    assert not isinstance(targets, str)
    for target in targets:
        if any(_matches(path, target) for path in layers):
            continue
        if any(_matches(path, target) for path in experts):
            raise refused(target)
        names = sorted({path.rsplit(".", 1)[-1] for path in layers})
        raise AdapterError(
            f"target module {target!r} matches no linear layer; there are: {', '.join(names)}"
        )
    return sorted(path for path in layers if any(_matches(path, target) for target in targets))


def _in_range(model: nn.Module, paths: list[str], layers: tuple[int, int] | str) -> list[str]:
    """Return the paths without those in blocks outside the range; paths in no block stay."""
    if layers == "all":
        return paths
    try:
        stack = LayerStack(model)
    except ValueError as error:
        raise AdapterError(f"layers = {layers!r}: {error}") from error
    count = len(stack.blocks)
    start, end = (count - int(layers.split()[1]), count) if isinstance(layers, str) else layers
    if not 0 <= start < end <= count:
        raise AdapterError(f"layers = {layers!r}: the model has {count} blocks")
    wanted = tuple(f"{stack.path}.{index}." for index in range(start, end))
    kept = [
        path for path in paths if path.startswith(wanted) or not path.startswith(f"{stack.path}.")
    ]
    if not kept:
        raise AdapterError(f"layers = {layers!r}: none of the target modules is in these blocks")
    return kept


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
    """mlx-lm's `keys`: paths inside a block ("self_attn.q_proj"); a layer outside the blocks
    keeps its full path."""
    keys = set()
    for path in paths:
        _, separator, rest = path.partition("layers.")
        keys.add(rest.partition(".")[2] if separator else path)
    return sorted(keys)


def _from_mlx_lm(
    tensors: Mapping[str, mx.array], config: Mapping[str, Any], file: Path
) -> dict[str, LoraPair]:
    config_file, parameters = file.parent / ADAPTER_CONFIG, config.get("lora_parameters", {})
    # use_dora: before 0.20
    kind = config.get("fine_tune_type", "dora" if config.get("use_dora") else "lora")
    if kind not in ("lora", "dora"):
        raise AdapterError(
            f"{file}: fine_tune_type {kind!r} is not supported, only 'lora' and 'dora'"
        )
    scale, rank = parameters.get("scale"), parameters.get("rank")
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        reason = "is missing" if scale is None else f"= {scale!r}: must be a number"
        raise AdapterError(f"{config_file}: lora_parameters.scale {reason}")
    check_mlx_lm(config, config_file)
    wanted = ("lora_a", "lora_b", "m") if kind == "dora" else ("lora_a", "lora_b")
    parts: dict[str, dict[str, mx.array]] = {}
    for key, array in tensors.items():
        path, _, leaf = key.rpartition(".")
        if leaf not in wanted or not path:
            raise AdapterError(
                f"{file}: {key} is not a {'LoRA' if kind == 'lora' else 'DoRA'} tensor"
            )
        parts.setdefault(path, {})[leaf] = array
    layers = {}
    for path, leaves in parts.items():
        if missing := [leaf for leaf in wanted if leaf not in leaves]:
            raise AdapterError(f"{file}: {path} has {next(iter(leaves))} but no {missing[0]}")
        a, b = leaves["lora_a"], leaves["lora_b"]
        if a.ndim == b.ndim == 3 and kind == "lora":  # stacked experts
            a, b = (mx.contiguous(array.swapaxes(-1, -2)) for array in (a, b))
        if (
            a.ndim not in (2, 3)
            or a.ndim != b.ndim
            or a.shape[:-2] != b.shape[:-2]
            or a.shape[-1] != b.shape[-2]
            or not a.size
        ):
            raise AdapterError(
                f"{file}: {path}: lora_a {a.shape} and lora_b"
                f" {b.shape} are not [in, r] and [r, out]"
            )
        if rank is not None and rank != a.shape[-1]:
            raise AdapterError(
                f"{file}: {path} has rank {a.shape[-1]}, {ADAPTER_CONFIG} has {rank}"
            )
        layers[path] = LoraPair(a, b, float(scale), leaves.get("m"))
    return layers


def _wide(pair: LoraPair) -> LoraPair:
    magnitude = None if pair.magnitude is None else pair.magnitude.astype(mx.float32)
    a, svd = pair.a.astype(mx.float32), pair.svd
    if svd is None:
        return LoraPair(a, pair.b.astype(mx.float32), pair.scale, magnitude)
    svd = replace(svd, e=svd.e.astype(mx.float32), left=svd.left.astype(mx.float32))
    return LoraPair(a, product(svd.e, svd.left), pair.scale, svd=svd)
