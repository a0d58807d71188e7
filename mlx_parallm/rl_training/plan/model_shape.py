"""`ModelShape`: a model's dimensions and the bytes of its weights, before anything is loaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.engine.cache.batch import can_lie_by_tokens
from mlx_parallm.engine.cache.kv_format import KVFormat
from mlx_parallm.models.evaluations import BlockSize
from mlx_parallm.models.experts.routing import blocks_of_experts, replays_experts
from mlx_parallm.models.experts.wide import widen_experts
from mlx_parallm.models.heads.value_head import VALUE_HEAD_FILE
from mlx_parallm.models.image_support import ImageHook, tower_sizes
from mlx_parallm.models.images.tower_shape import TowerShape
from mlx_parallm.models.loading import check_model
from mlx_parallm.models.lora import (
    are_experts,
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
from mlx_parallm.types import NARROW_IDS

FLOAT, HALF = 4, 2
NARROW = 0.82
"""Activations of a half-precision model against float32: adapters and log-probabilities stay
float32."""
PROJECTIONS = 3  # of a block's experts: gate, up and down
EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded and trained, as far as its shape depends on it.

    Attributes:
        value_head: a head of values is trained beside it.
        router_replay: "off" where no engine samples what is trained on.
        teachers: other models in this process.
        reward_models: paths of those in this process; they share a base that is plain.
        image_hooks: as in `models.images.support`.
    """

    model: ModelConfig
    lora: LoraConfig
    value_head: bool
    router_replay: Literal["off", "on", "auto"]
    max_staleness: int
    kv_bits: int | None
    teachers: Sequence[TeacherConfig]
    reward_models: Sequence[str]
    base_is_plain: bool
    image_hooks: Sequence[ImageHook]


@dataclass(frozen=True)
class ModelShape:
    """A model's dimensions, and its weights as this configuration loads them."""

    weights: int  # bytes
    trained: int  # numbers that are trained: the adapter's, or all
    layers: int
    hidden: int
    intermediate: int  # of one token: active experts together
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    width: int  # bytes of a floating-point weight that is not quantised
    quantized: bool = False
    loading: int = 0  # bytes besides the weights: the largest array, while it is quantised
    by_tokens: bool = False  # keys and values can lie by tokens
    widened: str = ""  # the checkpoint's dtype, where the weights take more than they would in it
    teachers: int = 0  # bytes of other models in this process that score its tokens
    reward_models: int = 0  # bytes of those that score answers in this process
    lends_base: bool = False  # one of them has the base's arrays
    products: int = 0  # numbers of AdaLoRA's B, saved with and without E
    adapted: int = 0  # numbers of the layers that have an adapter
    rounded: int = 0  # qat_bits: numbers of the others, which the trainer holds quantised
    small: int = 0  # trained numbers in arrays whose optimizer states are never in 8 bits
    routes: int = 0  # bytes of a sampled token's recorded experts, where they are repeated
    tower: int = 0  # bytes of the part that sees
    eye: TowerShape | None = None  # of the tower, where it is
    unpacked: int = 0  # numbers of a block's experts that are unpacked for the moment

    @classmethod
    def of(cls, model_config: Mapping[str, Any], options: LoadOptions) -> "ModelShape":
        """Read the shape from a config.json. Raises ModelError: an unknown architecture;
        AdapterError: targets that match nothing."""
        lora = options.lora
        model = blueprint(model_config)
        quantizes = lora.enabled and lora.quantize_base and "quantization" not in model_config
        largest = (
            max(array.size for _, array in tree_flatten(model.parameters())) * HALF
            if quantizes
            else 0
        )
        _quantize_lazily(model, model_config, quantize=lora.enabled and lora.quantize_base)
        dtype, stored = _dtypes(options.model.dtype, model_config)
        model.set_dtype(dtype)
        widen_experts(model)
        routes = _routes(model, options, model_config)
        unpacked = _unpacked_experts(model)
        arrays = tree_flatten(model.parameters())
        weights, count = (
            sum(array.nbytes for _, array in arrays),
            sum(array.size for _, array in arrays),
        )
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
            count = sum(array.size for _, array in arrays)
        tower, seeing, eye = (
            tower_sizes(
                options.image_hooks,
                options.model,
                dtype.size,
                lora.rank if lora.enabled else None,
            )
            if "vision_config" in model_config
            else (0, [], None)
        )
        count += sum(seeing)
        sizes = [*(array.size for _, array in arrays), *seeing]
        text: Mapping[str, Any] = model_config.get("text_config", model_config)
        size = BlockSize.of(model_config)
        head = size.hidden + 1 if options.value_head else 0
        return cls(
            weights=weights,
            trained=count + head,
            layers=len(model.layers),
            hidden=size.hidden,
            intermediate=size.intermediate,
            heads=size.heads,
            kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            vocab=int(text["vocab_size"]),
            width=dtype.size,
            quantized=any(isinstance(module, nn.QuantizedLinear) for module in model.modules()),
            loading=largest,
            by_tokens=can_lie_by_tokens(model),
            widened=stored if dtype.size > DTYPES[stored].size else "",
            teachers=sum(
                _teacher_weights(each, options.model, options.image_hooks)
                for each in options.teachers
            ),
            reward_models=sum(
                _reward_model_weights(each, options) for each in options.reward_models
            ),
            lends_base=any(_borrows_base(each, options) for each in options.reward_models),
            products=lora.use_adalora
            * sum(array.size for name, array in arrays if name.endswith(".lora_b")),
            adapted=adapted,
            rounded=others,
            small=sum(size for size in sizes if size < SMALLEST) + head,
            routes=routes,
            unpacked=unpacked,
            tower=tower,
            eye=eye,
        )

    @property
    def block(self) -> BlockSize:
        """The dimensions of one block."""
        return BlockSize(self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim)

    @property
    def kv_token(self) -> int:
        """Bytes of keys and values of one token, as they are computed."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.width

    def held_token(self, bits: int | None) -> int:
        """Bytes of keys and values of one token, as a row holds them (server.kv_bits)."""
        if bits is None or (kv_format := KVFormat.fitting(bits, [self.head_dim])) is None:
            return self.kv_token
        numbers = 2 * self.layers * self.kv_heads * self.head_dim
        # a scale and a bias for a group
        return numbers * bits // 8 + 2 * numbers // kv_format.group_size * self.width

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


def _routes(model: nn.Module, options: LoadOptions, model_config: Mapping[str, Any]) -> int:
    """Bytes of a sampled token's experts; 0: none are repeated."""
    blocks = len(blocks_of_experts(model))
    if not blocks or not replays_experts(
        model,
        options.router_replay,
        staleness=options.max_staleness,
        rounded=options.lora.qat_bits is not None,
        kv_bits=options.kv_bits,
    ):
        return 0
    text: Mapping[str, Any] = model_config.get("text_config", model_config)
    each = next((int(text[key]) for key in EXPERTS_A_TOKEN if text.get(key)), 1)
    experts = next(layer.num_experts for layer in model.modules() if are_experts(layer))
    return blocks * each * (1 + (experts > NARROW_IDS))


def _teacher_weights(teacher: TeacherConfig, model: ModelConfig, hooks: Sequence[ImageHook]) -> int:
    """Bytes of a teacher's own weights, loaded as the policy's: 0 where it has none here. Raises
    ModelError: no such model; ConfigError: quantised already."""
    if teacher.kind != "model":
        return 0
    own_model = model.model_copy(update={"base_path": teacher.path, "revision": teacher.revision})
    return _loaded_weights(own_model, teacher.quantize, hooks)


def _reward_model_weights(path: str, options: LoadOptions) -> int:
    """Bytes of a reward model: of its base only where the policy does not lend it its own. Raises
    ConfigError: there is none; AdapterError: it has no adapter file; ModelError: no such base."""
    directory = find_reward_model(path)
    card = RewardModelCard.read(directory)
    if not card.adapter:
        return _loaded_weights(card.model_config(directory), False, options.image_hooks)
    files = (find_adapter_file(directory), directory / VALUE_HEAD_FILE)
    added = sum(file.stat().st_size for file in files)
    if _borrows_base(path, options):
        return added
    base = _loaded_weights(card.model_config(directory), card.quantized, options.image_hooks)
    return base + added


def _borrows_base(path: str, options: LoadOptions) -> bool:
    card = RewardModelCard.read(find_reward_model(path))
    return options.base_is_plain and card.is_of(options.model.base_path)


def _loaded_weights(model: ModelConfig, quantize: bool, hooks: Sequence[ImageHook]) -> int:
    options = LoadOptions(
        model,
        LoraConfig(quantize_base=quantize),
        value_head=False,
        router_replay="off",
        max_staleness=0,
        kv_bits=None,
        teachers=(),
        reward_models=(),
        base_is_plain=False,
        image_hooks=hooks,
    )
    return ModelShape.of(check_model(model, train=False, quantize=quantize), options).weights


def _dtypes(dtype_name: str, model_config: Mapping[str, Any]) -> tuple[mx.Dtype, str]:
    """The dtype of the weights as `models.loading` chooses it, and the name of the checkpoint's."""
    dtype = stored_dtype(model_config)
    stored = str(dtype).removeprefix("mlx.core.")
    if dtype_name != "auto":
        return DTYPES[dtype_name], stored
    return (mx.float32 if half_precision_is_slow() else dtype), stored


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
