"""Checks of a model by its config.json alone, before its weights are downloaded or read.

    blueprint          the architecture at full size; its arrays are never evaluated, so it costs no
                       memory
    check_config       raises ModelError naming the layer that cannot be trained on this device
    layers_by_token    which layers of a model train slowly: their graph visits one token after
                       another

Differentiating the blueprint finds a layer whose forward is a kernel without a gradient: MLX raises
while it builds the graph. Whether it can be served shows at load (`engine/cache/batch.py`).
docs/models.md has both for all architectures.
"""

import io
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.layer_stack import BlockCall, LayerStack
from mlx_parallm.models.mlx_lm_api import make_prompt_cache
from mlx_parallm.models.published.mend import model_classes, unheeded_keys
from mlx_parallm.models.published.reader import own_values
from mlx_parallm.system.device.faults import raise_device_fault
from mlx_parallm.system.log import get_logger

log = get_logger(__name__)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
BUILD_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RuntimeError,
)
# growth of a block's graph from 64 to 256 tokens: 1 to 2.4 (attention in pieces) without a loop
# over tokens, nearly 4 with one
GROWTH = 3.0
ARCHITECTURES = "all architectures and their abilities are listed in docs/models.md"


def blueprint(config: Mapping[str, Any]) -> nn.Module:
    """The architecture that a config.json describes. Raises ModelError: mlx-lm has none of that
    name, or cannot build it; the loading would fail the same way."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ModelError("config.json has no model_type: not a language model's checkpoint")
    try:
        model_class, args_class = model_classes(dict(config))
    except ValueError as error:
        raise ModelError(
            f"model_type {name!r} is unknown to mlx-lm {version('mlx-lm')}: try `pip"
            f" install -U mlx-lm`; {ARCHITECTURES}"
        ) from error
    # one of mlx-lm's modules (olmo) ends the process when its package is missing
    except SystemExit as error:
        raise ModelError(
            f"model_type {name!r} needs a package that is not installed: mlx-lm names it above"
        ) from error
    [(high, low)] = np.array(mx.random.state).tolist()
    try:
        return model_class(args_class.from_dict(dict(config)))
    except BUILD_ERRORS as error:
        raise ModelError(
            f"model_type {name!r}: mlx-lm cannot build it from this config.json: {error!r}"
            f"{own_values(config)}"
        ) from error
    finally:
        # restore the random state, which the lazy initial weights have advanced
        mx.random.seed(high << 32 | low)


def stored_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """The dtype of a checkpoint's arrays, by its config.json; bfloat16 if it does not say."""
    text = config.get("text_config", config)
    places = [(each, key) for each in (config, text) for key in ("dtype", "torch_dtype")]
    name = next((each[key] for each, key in places if each.get(key)), None)
    return DTYPES.get(str(name).removeprefix("torch."), mx.bfloat16)


def check_config(config: Mapping[str, Any], *, train: bool) -> None:
    """Raises ModelError when the architecture is unknown or cannot be built, or (`train`)
    differentiated."""
    if "model_file" in config:
        return  # code of the checkpoint, which is not here yet
    check_keys(config, train=train)
    model = blueprint(config)
    name = config["model_type"]
    try:
        make_prompt_cache(model)
    except BUILD_ERRORS as error:
        raise ModelError(f"model_type {name!r}: mlx-lm cannot make its cache: {error!r}") from error
    try:
        reason = layer_without_gradient(model) if train else ""
    except BUILD_ERRORS as error:
        raise_device_fault(error)
        raise ModelError(
            f"model_type {name!r}: mlx-lm cannot compute it from this config.json: {error!r}"
        ) from error
    if reason:
        raise ModelError(f"model_type {name!r} cannot be trained here: {reason}; {ARCHITECTURES}")


def check_keys(config: Mapping[str, Any], *, train: bool) -> None:
    """Raises ModelError (`train`), or warns, where config.json has keys that change what the model
    computes and that nothing here heeds: it would be another model than the published one."""
    if not (keys := unheeded_keys(config)):
        return
    words = ", ".join(f"{key} = {value!r}" for key, value in keys.items())
    if train:
        raise ModelError(
            f"config.json has {words}, which mlx-lm {version('mlx-lm')} does not compute for"
            f" {config['model_type']!r}: it would train another model than the published one"
        )
    log.warning("config.json is not followed: another model than the published one", keys=words)


def layer_without_gradient(model: nn.Module) -> str:
    """The first kind of block that MLX cannot differentiate on this device, and why; "" when there
    is none.

    Traces one block of each kind; evaluates nothing.
    """
    reasons: list[str] = []
    seen: set[str] = set()

    def visit(index: int, hidden: Any, call: BlockCall) -> Any:
        block = stack.blocks[index]
        kind = "/".join(type(module).__name__ for module in block.modules())
        if kind not in seen and isinstance(hidden, mx.array) and not reasons:
            seen.add(kind)
            try:
                mx.vjp(lambda h: _first(block(h, *call.args, **call.kwargs)), [hidden], [hidden])
            except (ValueError, RuntimeError) as error:
                raise_device_fault(error)
                if "vjp" in str(error).lower():
                    reasons.append(
                        f"layer {index} ({_layer_name(block)}) has no"
                        f" gradient on this device: {error}"
                    )
        return hidden

    was_training = model.training
    try:
        stack = LayerStack(model.train())
        stack.walk(mx.zeros((1, 4), mx.int32), visit)
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise_device_fault(error)
        return reasons[0] if reasons else ""
    finally:
        model.train(was_training)
    return reasons[0] if reasons else ""


def layers_by_token(model: nn.Module) -> list[str]:
    """Name the first layer of each kind whose graph visits one token after another, as "layer 3
    (attn: Class), …".

    Compares a block's graph of 64 tokens with that of 256, about four times as large then;
    evaluates nothing.
    """
    sizes: dict[int, list[int]] = {}
    kinds: dict[str, int] = {}

    def visit(index: int, hidden: Any, call: BlockCall) -> Any:
        block = stack.blocks[index]
        output = block(mx.zeros(hidden.shape, hidden.dtype), *call.args, **call.kwargs)
        first = kinds.setdefault(
            "/".join(type(module).__name__ for module in block.modules()), index
        )
        if first == index:
            drawn = io.StringIO()
            mx.export_to_dot(drawn, _first(output))
            sizes.setdefault(index, []).append(drawn.getvalue().count("->"))
        return output

    was_training = model.training
    try:
        stack = LayerStack(model.train())
        for length in (64, 256):
            stack.walk(mx.zeros((1, length), mx.int32), visit)
    except BUILD_ERRORS:
        return []
    finally:
        model.train(was_training)
    return [
        f"layer {i} ({_layer_name(stack.blocks[i])})"
        for i, (short, long) in sizes.items()
        if long > GROWTH * short
    ]


def _layer_name(block: Any) -> str:
    """The class of the block's mixer (attention, state space, …): its first child that is
    neither norm nor MLP."""
    for name, child in getattr(block, "children", dict)().items():
        if isinstance(child, nn.Module) and not any(
            part in name for part in ("norm", "mlp", "feed_forward", "ln")
        ):
            return f"{name}: {type(child).__name__}"
    return type(block).__name__


def _first(output: Any) -> mx.array:
    return output[0] if isinstance(output, tuple | list) else output
