"""`ModelShape`: a model's dimensions and the bytes of its weights, before anything is loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.engine.cache.batch import can_lie_by_tokens
from mlx_parallm.engine.cache.memory import KVSize
from mlx_parallm.models.blocks_per_eval import BlockSize
from mlx_parallm.models.experts.replay import is_repeated, recorded_bytes
from mlx_parallm.models.experts.wide import widen_experts
from mlx_parallm.models.heads.float32_head import widen_head, widened_numbers
from mlx_parallm.models.heads.value_head import VALUE_HEAD_FILE
from mlx_parallm.models.images.tower_shape import TowerShape
from mlx_parallm.models.loaded_images import tower_sizes
from mlx_parallm.models.loading import check_model
from mlx_parallm.models.lora import (
    find_adapter_file,
    inject_lora,
    linear_shape,
    trainer_lora_layers,
)
from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear
from mlx_parallm.models.ops import UNPACKED_EXPERTS
from mlx_parallm.models.quantize import quantizable
from mlx_parallm.models.scoring.card import RewardModelCard, find_reward_model
from mlx_parallm.models.support import DTYPES, blueprint, stored_dtype
from mlx_parallm.rl_training.step.states_8bit import SMALLEST
from mlx_parallm.system.device.traits import half_precision_is_slow, unpacks_weights

FLOAT, HALF = 4, 2
NARROW = 0.82
"""Activations of a half-precision model against float32: adapters and log-probabilities stay
float32."""
PROJECTIONS = 3  # a block's experts have three: gate, up and down


@dataclass(frozen=True)
class ModelShape:
    """A model's dimensions, and its weights as this configuration loads them."""

    weights: int  # bytes
    trained: int  # numbers that are trained: the adapter's, or all
    layers: int
    block: BlockSize
    vocab: int
    width: int  # bytes of a floating-point weight that is not quantised
    quantized: bool = False
    loading: int = 0  # bytes besides the weights: the largest array, while it is quantised
    by_tokens: bool = False  # keys and values can lie by tokens
    widened: str = ""  # the checkpoint's dtype, if the weights take more than they would in it
    # bytes of the models that companions have in this process, by part (companions.py)
    beside: Mapping[str, int] = field(default_factory=dict)
    reward_models: int = 0  # bytes of the reward models in this process
    lends_base: bool = False  # a reward model shares the base's arrays
    products: int = 0  # parameters of AdaLoRA's B, saved with and without E
    adapted: int = 0  # parameters of the layers that have an adapter
    rounded: int = 0  # qat_bits: parameters of the other layers, which the trainer quantises
    small: int = 0  # trained parameters whose optimizer states are never in 8 bits
    routes: int = 0  # bytes of a sampled token's recorded experts, if they are repeated
    tower: int = 0  # bytes of the part that sees
    eye: TowerShape | None = None  # the tower, if it has one
    head: int = 0  # numbers of the head that each product widens to float32 (model.fp32_lm_head)
    unpacked: int = 0  # numbers of a block's experts that are unpacked for the moment

    def with_smaller(self, key: str) -> "ModelShape":
        """Return it as it is with the next value of this setting (`preflight.SETTINGS`)."""
        trained, small, products = self.trained, self.small, self.products
        if key == "rl_training.lora.enabled":
            return replace(self, trained=trained // 100, small=small // 100)
        if key == "rl_training.lora.rank":
            return replace(self, trained=trained // 2, small=small // 2, products=products // 2)
        if key == "rl_training.lora.quantize_base":
            # with a scale and a bias for 64
            packed = self.weights * (4 + 16 * self.width / 64) / 8 / self.width
            return replace(self, weights=int(packed), quantized=True)
        return self

    @classmethod
    def of(cls, model_config: Mapping[str, Any], config: Config) -> "ModelShape":
        """Read the shape from a config.json. Raises ModelError: an unknown architecture;
        AdapterError: targets that match nothing."""
        training, lora = config.rl_training, config.rl_training.lora
        loaded = LoadedShape.of(
            model_config, config.model.dtype, quantize=lora.enabled and lora.quantize_base
        )
        model, width = loaded.model, loaded.dtype.size
        weights, unpacked = loaded.weights, _unpacked_experts(model)
        if config.model.fp32_lm_head:
            widen_head(model)
        head_numbers, routes = widened_numbers(model), 0
        if is_repeated(model, training, config.server.kv_bits):
            routes = recorded_bytes(model, text_config(model_config))
        arrays = tree_flatten(model.parameters())
        others = adapted = 0
        if lora.enabled:
            # for GGUF they are rounded in their place
            to_mlx = lora.qat_bits is not None and lora.qat_format == "mlx"
            rounded = quantizable(model) if to_mlx else {}
            inject_lora(model, lora)
            layers = trainer_lora_layers(model)
            adapted = sum(math.prod(linear_shape(layer.linear)) for layer in layers.values())
            modules = dict(model.named_modules())
            others = sum(modules[path].weight.size for path in rounded if path not in layers)
            arrays = tree_flatten(model.trainable_parameters())
        tower, seeing, eye = 0, list[int](), None
        if "vision_config" in model_config:
            rank = lora.rank if lora.enabled else None
            tower, seeing, eye = tower_sizes(config.image_hooks(), config.model, width, rank)
        size = BlockSize.of(model_config)
        lent = config.model.base_path if config.base_is_plain else None
        head = size.hidden + 1 if training.algorithm == "ppo" else 0
        sizes = [*(array.size for _, array in arrays), *seeing]
        products = sum(array.size for name, array in arrays if name.endswith(".lora_b"))
        return cls(
            weights=weights,
            trained=sum(sizes) + head,
            layers=len(model.layers),
            block=size,
            vocab=int(text_config(model_config)["vocab_size"]),
            width=width,
            quantized=any(isinstance(module, nn.QuantizedLinear) for module in model.modules()),
            loading=loaded.largest,
            by_tokens=can_lie_by_tokens(model),
            widened=loaded.stored if width > DTYPES[loaded.stored].size else "",
            reward_models=sum(_reward_model_weights(path, lent) for path in config.reward_models),
            lends_base=any(
                _borrows_base(find_reward_model(path), lent) for path in config.reward_models
            ),
            products=products if lora.use_adalora else 0,
            adapted=adapted,
            rounded=others,
            small=sum(size for size in sizes if size < SMALLEST) + head,
            routes=routes,
            head=head_numbers,
            unpacked=unpacked,
            tower=tower,
            eye=eye,
        )

    def kv_size(self, bits: int | None) -> KVSize:
        """Keys and values of one token (`server.kv_bits`)."""
        block = self.block
        return KVSize(self.layers, block.kv_heads, block.head_dim, self.width, bits)

    @property
    def activation(self) -> float:
        """Bytes of one number of an activation, on average."""
        return FLOAT if self.width == FLOAT else FLOAT * NARROW


def _unpacked_experts(model: nn.Module) -> int:
    """Numbers of the three largest projections of quantised experts, which are unpacked."""
    if not unpacks_weights():
        return 0
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, QuantizedSwitchLinear) and module.mode == "affine"
    ]
    sizes = sorted(math.prod(linear_shape(stack)) for stack in stacks)
    return sum([size for size in sizes if size <= UNPACKED_EXPERTS][-PROJECTIONS:])


def _reward_model_weights(path: str, lent: str | None) -> int:
    """Bytes of a reward model, with its base unless it is the one that the policy lends. Raises
    ConfigError: there is none; AdapterError: it has no adapter file; ModelError: no such base."""
    directory = find_reward_model(path)
    card = RewardModelCard.read(directory)
    if not card.adapter:
        return loaded_weights(card.model_config(directory), quantize=False)
    files = (find_adapter_file(directory), directory / VALUE_HEAD_FILE)
    added = sum(file.stat().st_size for file in files)
    if _borrows_base(directory, lent):
        return added
    return added + loaded_weights(card.model_config(directory), quantize=card.quantized)


def _borrows_base(directory: Path, lent: str | None) -> bool:
    return lent is not None and RewardModelCard.read(directory).is_of(lent)


def loaded_weights(model: ModelConfig, *, quantize: bool) -> int:
    """Return the bytes of a model's weights as they are loaded. Raises ModelError: no such model;
    ConfigError: quantised already."""
    model_config = check_model(model, train=False, quantize=quantize)
    return LoadedShape.of(model_config, model.dtype, quantize=quantize).weights


@dataclass(frozen=True)
class LoadedShape:
    """A model as `models.loading` loads it, without its numbers.

    Attributes:
        dtype: of its weights that are not quantised; `stored`: the name of the checkpoint's.
        largest: bytes of the largest array, while it is quantised.
    """

    model: nn.Module
    dtype: mx.Dtype
    stored: str
    largest: int

    @classmethod
    def of(cls, model_config: Mapping[str, Any], dtype: str, *, quantize: bool) -> "LoadedShape":
        """`quantize`: to 4 bits, if the checkpoint is not quantised. Raises ModelError."""
        model, largest, kept = blueprint(model_config), 0, stored_dtype(model_config)
        if quantize and "quantization" not in model_config:
            largest = HALF * max(array.size for _, array in tree_flatten(model.parameters()))
        _quantize_lazily(model, model_config, quantize=quantize)
        loaded = mx.float32 if half_precision_is_slow() else kept
        if dtype != "auto":
            loaded = DTYPES[dtype]
        model.set_dtype(loaded)
        widen_experts(model)
        return cls(model, loaded, str(kept).removeprefix("mlx.core."), largest)

    @property
    def weights(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))


def text_config(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    text: Mapping[str, Any] = model_config.get("text_config", model_config)
    return text


def _quantize_lazily(model: nn.Module, model_config: Mapping[str, Any], *, quantize: bool) -> None:
    """Gives the blueprint the layers that a quantised checkpoint, or `quantize_base`, will have."""
    settings = model_config.get("quantization")
    if not isinstance(settings, Mapping):
        if not quantize:
            return
        settings = {"group_size": 64, "bits": 4}
    group_size, bits = int(settings.get("group_size", 64)), int(settings.get("bits", 4))
    mode = str(settings.get("mode", "affine"))
    predicate = getattr(model, "quant_predicate", None)

    def choice(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        if path in settings:
            setting: bool | dict[str, Any] = settings[path]
            return setting
        return True if predicate is None else bool(predicate(path, module))

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=choice)
