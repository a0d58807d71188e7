"""A checkpoint's tower and projector, as mlx-vlm's modules. The language part stays mlx-lm's: the
one that is served and trained, in whose tree the tower's modules lie too."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from transformers import AutoConfig

from mlx_parallm.errors import ModelError
from mlx_parallm.models.checkpoint_files import weight_files
from mlx_parallm.models.loading import LOADING_ERRORS, LoadedModel, evaluate_module

CONNECTORS = (
    "connector",  # Idefics3
    "multi_modal_projector",
    "vision_tower.merger",  # Qwen
    "vision_tower.deepstack_merger_list",
)

# mlx-vlm 0.7.10 computes Qwen3-VL-MoE's tower with the two forms of GELU in each other's places
SAME_TOWER = {"qwen3_vl_moe": "qwen3_vl"}
"""`model_type` → another of mlx-vlm's whose tower is the same."""


class TowerEncoder:
    """Base of the families' encoders. `_model` is mlx-vlm's model without its language part,
    whose modules are, after `over`, those of the tree.
    """

    trained: Sequence[str] = ()

    _own: Any
    _tree: Any = None

    @property
    def _model(self) -> Any:
        if self._tree is not None:
            # the tree's may have been wrapped or replaced since the last call
            names = [name for name, part in self._own.items() if isinstance(part, nn.Module)]
            dict.update(self._own, {name: self._tree[name] for name in names})
        return self._own

    @_model.setter
    def _model(self, model: Any) -> None:
        self._own = model

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {name: part for name, part in self._model.items() if isinstance(part, nn.Module)}

    @property
    def connector(self) -> tuple[str, ...]:
        """Paths of what is between the tower and the language part."""
        paths = [path for name, part in self.modules.items() for path in _paths(name, part)]
        return tuple(path for path in paths if path.rstrip(".0123456789") in CONNECTORS)

    @property
    def frozen_tower(self) -> bool:
        return bool(self.trained) and set(self.trained) <= set(self.connector)

    def hold_inputs_alone(self) -> None:
        """Let a gradient through the tower hold no more than each block's input."""
        hold_blocks_inputs_alone(self.modules.values())

    def over(self, tree: nn.Module) -> Self:
        other = copy.copy(self)
        other._own, other._tree = shallow(self._own), tree
        return other


def _paths(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{path}" if path else name for path, _ in module.named_modules()]


def shallow(module: Any) -> Any:
    """Return a module of the same parts, whose parts can be replaced."""
    kind: Any = type(module)
    same = kind.__new__(kind)
    same.__dict__.update(module.__dict__)
    dict.update(same, module)
    return same


def check_activation(path: Path, key: str, written: str, computed: str) -> None:
    """Raises ModelError: this activation is not the one that mlx-vlm's modules have."""
    if written != computed:
        raise ModelError(f"{path}: {key} = {written!r}: mlx-vlm's tower computes {computed}")


def hold_blocks_inputs_alone(modules: Iterable[nn.Module]) -> None:
    """Let a gradient hold no more than the input of each block (of modules in lists of one kind),
    and compute the rest of a block again when it comes to it (Chen et al. 2016, arXiv:1604.06174).
    In place."""
    for module in modules:
        for parent in module.modules():
            for value in parent.values():
                blocks = value if isinstance(value, list) else []
                if len({type(block) for block in blocks}) == 1 and isinstance(blocks[0], nn.Module):
                    kind: Any = type(blocks[0])
                    for block in blocks:
                        block.__class__ = _computed_again(kind)


@cache
def _computed_again(kind: Any) -> Any:
    """Return a block's class whose gradient computes its forward again, when the gradient behind
    the block is there. `mx.checkpoint` may do it for all blocks before, and holds what it makes."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        arrays = dict(tree_flatten(self.trainable_parameters()))
        inputs = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        # whole numbers stay beside: a block that reads some on the host would have the forward
        # evaluated while it is traced, and all of it held
        floats = {name: value for name, value in inputs.items() if _is_floating(value)}

        def forward(*primals: mx.array) -> Any:
            values = inputs | dict(zip(floats, primals[len(arrays) :], strict=True))
            positional = [values[str(place)] for place in range(len(args))]
            self.update(tree_unflatten([*zip(arrays, primals, strict=False)]))
            try:
                return kind.__call__(self, *positional, **{name: values[name] for name in kwargs})
            finally:
                self.update(tree_unflatten([*arrays.items()]))

        block: Any = mx.custom_function(forward)

        @block.vjp
        def back(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
            later = mx.depends([*primals], [cotangent])
            new = mx.vjp(lambda *p: [forward(*p)], later, [cotangent])[1]
            weights, others = new[: len(arrays)], new[len(arrays) :]
            # the block before has to wait for them: else all blocks' would be computed at the end
            return (*weights, *(mx.depends(others, weights) if weights and others else others))

        return block(*arrays.values(), *floats.values())

    return type(f"{kind.__name__}ComputedAgain", (kind,), {"__call__": call})


def _is_floating(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)


def load_tower(loaded: LoadedModel) -> tuple[Any, Any, mx.Dtype]:
    """Return mlx-vlm's model without its language part, frozen and evaluated, the checkpoint's
    configuration with all of transformers' defaults, and the type in which both parts compute.

    Raises ModelError: it cannot be built, or arrays of it are missing.
    """
    path = loaded.path
    arrays = (array for _, array in tree_flatten(loaded.model.parameters()))
    dtype = next(array.dtype for array in arrays if mx.issubdtype(array.dtype, mx.floating))
    try:
        config = AutoConfig.from_pretrained(path)
        settings = config.to_dict()
        name = SAME_TOWER.get(config.model_type, config.model_type)
        architecture = import_module(f"mlx_vlm.models.{name}")
        arguments = architecture.ModelConfig.from_dict(dict(settings))
        text = dict(settings["text_config"])
        rope = text.get("rope_parameters") or {}
        text.setdefault(
            "rope_theta", rope.get("rope_theta", 10000.0)
        )  # some of its classes want it
        if "mm_tokens_per_image" in settings:  # Gemma 3's projector looks for it there
            text["mm_tokens_per_image"] = settings["mm_tokens_per_image"]
        arguments.text_config = architecture.TextConfig.from_dict(text)
        vision = dict(settings["vision_config"])
        # the name by which mlx-vlm knows the tower, where transformers has another one
        default = getattr(architecture.VisionConfig, "model_type", vision["model_type"])
        vision["model_type"] = default
        arguments.vision_config = architecture.VisionConfig.from_dict(vision)
        model = architecture.Model(arguments)
        weights = _weights(path)
        tower = architecture.VisionModel
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        if hasattr(tower, "sanitize"):
            weights = tower(arguments.vision_config).sanitize(weights)
        model.pop("language_model")
        weights = _of_parts(weights, [f"{part}." for part in model])
        _quantize_like(model, loaded.config.get("quantization") or {}, weights)
        model.load_weights([*weights.items()])
        model.set_dtype(dtype)
        model.freeze()
        model.eval()
        evaluate_module(model)
    except LOADING_ERRORS as error:
        raise ModelError(f"{path}: the part that sees cannot be loaded: {error}") from error
    return model, config, dtype


def _weights(path: Path) -> dict[str, mx.array]:
    files = weight_files(path)
    if not files:
        raise ValueError("there are no *.safetensors")
    weights: dict[str, mx.array] = {}
    for file in files:
        weights |= cast("dict[str, mx.array]", mx.load(str(file)))
    return weights


def _of_parts(weights: Mapping[str, mx.array], parts: Sequence[str]) -> dict[str, mx.array]:
    """Return the arrays of these parts. A part may come after others: mlx-vlm's names take some
    newer checkpoints' towers for something of the language part."""
    places = {
        name: min((at for part in parts if (at := f".{name}".find(f".{part}")) >= 0), default=-1)
        for name in weights
    }
    return {name[at:]: weights[name] for name, at in places.items() if at >= 0}


def _quantize_like(
    model: nn.Module, quantization: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> None:
    """Quantise the layers of which the checkpoint has scales."""

    def chosen(name: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or f"{name}.scales" not in weights:
            return False
        return quantization.get(name) or True

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=chosen,
        )
