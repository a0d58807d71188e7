"""TrainedPolicy: the trainer's own module tree, which part of it is trained, and the reference that
it contains.

    adapter        `inject_lora` around the targets; reference = the same tree with the adapter
                   taken out ("base"), or with the adapter as it was when the run started
                   ("initial")
    full weights   everything is trained; the reference is a frozen copy (arrays are immutable: it
                   costs memory only once training has moved the weights away from it)
    "ema"          either way: the moving average of the trained weights from the run's start on,
                   kept in float32

The tree shares its frozen arrays with the serving one (`copy.deepcopy` before either was wrapped),
so parameters are only ever rebound.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.config.training import LearningSection, LoraConfig
from mlx_parallm.errors import AdapterError, CheckpointError, ConfigError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.fake_quantized import rounded_layers, use_fake_quantization
from mlx_parallm.models.adapters.linear import AdapterDropout, dense_weight, merged_rows
from mlx_parallm.models.adapters.rope_length import record_rope_length
from mlx_parallm.models.attention import route_attention
from mlx_parallm.models.experts.replay import replay_of
from mlx_parallm.models.heads.value_head import (
    VALUE_HEAD_FILE,
    attach_value_head,
    is_value_head,
    without_value_head,
)
from mlx_parallm.models.images.encoder import ImageEncoder, ImageParts, text_alone
from mlx_parallm.models.lora import (
    adapt_layers,
    adapter_layers,
    adapter_parameters,
    inject_lora,
    linear_layers,
    load_adapter,
    load_into_trainer,
    save_adapter,
    trainer_lora_layers,
)
from mlx_parallm.models.mlx_lm_api import save_config, save_model
from mlx_parallm.models.ops import use_fast_swiglu
from mlx_parallm.models.parameters import ParameterSlots, of_part
from mlx_parallm.models.support import stored_dtype
from mlx_parallm.system.log import get_logger
from mlx_parallm.weights import parameter_slots

log = get_logger(__name__)

REFERENCE_FILE = "reference.safetensors"
# tokenizer, template, generation_config
COMPANIONS = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")


class TrainedPolicy:
    """Args:
        model: its own tree, frozen and evaluated.
        source: the base checkpoint's directory (tokenizer and configuration travel with saved full
            weights).
        base: its name, for who finds a saved adapter.
        model_config: the base's config.json.
        initial_adapter: arrays to start the adapter from, as `models.lora.load_adapter` reads them.
        needs_reference: whether `reference` will be used.
        needs_values: whether the tree gets a value head (models/heads/value_head.py), trained
            beside the rest.
        kv_bits: bits of the engine's keys and values; None: those of the model.
        image_parts: those of the loaded model, whose tree this is; None: it reads texts alone.

    `experts`: those that the trainer watches and repeats.

    Raises ConfigError: full-weight training or `qat_bits` on a quantised base, no hidden state for
    a value head, experts to be repeated that cannot be.
    AdapterError: targets or shapes that do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        training: LearningSection,
        *,
        source: Path,
        model_config: Mapping[str, Any],
        base: str = "",
        initial_adapter: Mapping[str, LoraPair] | None = None,
        needs_reference: bool = False,
        needs_values: bool = False,
        kv_bits: int | None = None,
        watches_experts: bool = True,
        image_parts: ImageParts | None = None,
    ) -> None:
        self.image_parts = image_parts
        encoder = None if image_parts is None else image_parts.encoder
        self.model, self._source, self.model_config, self._base = (
            model,
            source,
            dict(model_config),
            base,
        )
        lora = training.lora
        self.lora = lora.enabled
        self.experts = replay_of(model, training, kv_bits, watches=watches_experts)
        self._adalora = (
            lora.adalora.model_dump() | {"total_step": training.total_steps}
            if lora.use_adalora
            else None
        )
        self.dropout = AdapterDropout(lora.dropout)
        self._choose_trained(lora, encoder, training.seed)
        if self.lora:
            for layer in trainer_lora_layers(model).values():
                mx.eval(layer)  # one by one: DoRA's norms unpack a quantised layer
            if initial_adapter is not None:
                load_into_trainer(model, initial_adapter)
        if needs_values:
            attach_value_head(model)
        # gated-delta layers have a gradient in this mode only; its own dropouts are 0
        model.train()
        mx.eval(model.parameters())
        self.slots = ParameterSlots(model)
        # what a checkpoint replaces and the ranks share: also a part of an adapter that is frozen
        self.held = ParameterSlots(model, frozen=adapter_parameters(model))
        self._value_slots = [
            slot for slot, name in enumerate(self.slots.names) if is_value_head(name)
        ]
        self.reference_arrays: list[mx.array] | None = None  # float32 if it is an average
        self._reference_base: dict[str, mx.array] | None = None  # another model's arrays, by path
        self._reference_replaced = False  # by `use_reference` or `blend_reference`
        # texts that are saved with the weights, by file name
        self.described: Mapping[str, str] = {}
        self._ema = training.reference == "ema"
        if self._ema or (needs_reference and not (self.lora and training.reference == "base")):
            self.reference_arrays = self.slots.read()

    def _choose_trained(self, lora: LoraConfig, encoder: ImageEncoder | None, seed: int) -> None:
        """Put adapters into the tree, or let all its weights be trained. The part that sees is left
        as it is, but for `encoder.trained`."""
        model = self.model
        with text_alone(model, encoder):
            use_fast_swiglu(model, trained=True)
            route_attention(model)
            if self.lora:
                mx.random.seed(seed)
                rounded = rounded_layers(model, lora.qat_bits, lora.qat_format)
                inject_lora(model, lora, self.dropout)
                if lora.qat_bits is not None:
                    use_fake_quantization(model, rounded, stored_dtype(self.model_config))
            else:
                _unfreeze(model)
        if encoder is not None and encoder.trained:
            self._train_images(encoder, lora)
        if self.lora and not trainer_lora_layers(model):
            raise AdapterError(
                "rl_training.lora.target_modules = [] trains nothing: name layers, or set"
                ' vision.train = "connector" or "tower"'
            )

    def _train_images(self, encoder: ImageEncoder, lora: LoraConfig) -> None:
        """Let `encoder.trained` modules be trained: by adapters on their linear layers, or as they
        are. Raises ConfigError: they are quantised; AdapterError: they have no such layer."""
        modules = dict(self.model.named_modules())
        if not self.lora:
            for path in encoder.trained:
                _unfreeze(modules[path])
            return
        paths = [path for path in linear_layers(self.model) if of_part(path, encoder.trained)]
        if not paths:
            raise AdapterError(
                f"the part that sees cannot be trained: {', '.join(encoder.trained)} has no linear"
                " layer that takes an adapter: it learns with"
                " rl_training.lora.enabled = false alone"
            )
        for part in encoder.trained:
            if not any(of_part(path, [part]) for path in paths):
                log.warning("stays as it is: no linear layer of it takes an adapter", module=part)
        adapt_layers(self.model, sorted(paths), lora, self.dropout)

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(array.size for array in self.slots.read())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The tree is the reference policy for the length of the block."""
        if self.reference_arrays is not None:
            trained = self.slots.read()
            with self.slots.bound(
                [
                    array.astype(p.dtype)
                    for array, p in zip(self.reference_arrays, trained, strict=True)
                ]
            ):
                yield
            return
        with self._without_adapter(), self._base_bound(self._reference_base or {}):
            yield

    @contextmanager
    def base(self, first: Sequence[mx.array]) -> Iterator[None]:
        """The tree is the base for the length of the block: without the adapter; where all weights
        train, with `first`, those that the run began with."""
        with self._without_adapter() if self.lora else self.slots.bound(list(first)):
            yield

    def saved(self, directory: Path) -> list[mx.array]:
        """The arrays of a checkpoint of this policy, for `held.bound`. Raises AdapterError,
        CheckpointError: it does not fit."""
        before = self.held.read()
        try:
            if self.lora:
                load_into_trainer(self.model, load_adapter(directory).layers)
                arrays = self.held.read()
                mx.eval(arrays)
                return arrays
        finally:
            self.held.write(before)
        tensors = {
            name: array
            for file in sorted(directory.glob("model*.safetensors"))
            for name, array in read_tensors(file).items()
        }
        self._check_frozen(tensors, directory)
        whole = dict(zip(self.slots.names, before, strict=True)) | tensors if tensors else {}
        return self._arranged(whole, directory, range(len(self.slots)))

    @contextmanager
    def serving(self, served: Mapping[str, mx.array], where: Path) -> Iterator[None]:
        """The tree has these weights, of the names of `full_parameters`, for the length of the
        block.

        Raises CheckpointError: they do not fit; they are from `where`.
        """
        trained = dict(zip(self.slots.names, self.slots.read(), strict=True))
        with self.slots.bound(
            self._arranged(trained | dict(served), where, range(len(self.slots)))
        ):
            yield

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        adapted = trainer_lora_layers(self.model)
        self.model.update_modules(
            tree_unflatten([(path, layer.linear) for path, layer in adapted.items()])
        )
        try:
            yield
        finally:
            self.model.update_modules(tree_unflatten(list(adapted.items())))

    @contextmanager
    def _base_bound(self, arrays: Mapping[str, mx.array]) -> Iterator[None]:
        """The base's arrays are these for the length of the block, in which the adapter is off."""
        places = parameter_slots(self.model) if arrays else {}
        base = {path: places[path][0][places[path][1]] for path in arrays}
        try:
            for path, array in arrays.items():
                places[path][0][places[path][1]] = array.astype(base[path].dtype)
            yield
        finally:
            for path, array in base.items():
                places[path][0][places[path][1]] = array

    def use_reference(self, parameters: Mapping[str, mx.array]) -> None:
        """Take another model of this shape as the reference: arrays by path. Raises ConfigError:
        they do not fit."""
        with self._without_adapter(), without_value_head(self.model):
            current = {
                path: module[key] for path, (module, key) in parameter_slots(self.model).items()
            }
        parts = () if self.image_parts is None else self.image_parts.encoder.modules
        for path, array in [*current.items()]:
            if path not in parameters and of_part(path, parts):
                del current[path]  # a model of texts: it sees with the policy's own eyes
            elif path not in parameters or parameters[path].shape != array.shape:
                other = parameters[path].shape if path in parameters else "missing"
                raise ConfigError(
                    f"the reference is not of this model's shape: {path} is"
                    f" {other}, expected {array.shape}"
                )
        arrays = {path: parameters[path].astype(array.dtype) for path, array in current.items()}
        mx.eval(arrays)
        if self.lora:
            self.reference_arrays, self._reference_base = None, arrays
        else:
            slots = zip(self.slots.names, self.slots.read(), strict=True)
            self.reference_arrays = [arrays.get(name, array) for name, array in slots]
            self._reference_replaced = True

    def blend_reference(self, decay: float) -> None:
        """reference = decay · reference + (1 - decay) · policy; 0 copies the policy.

        Adapter off is B = 0. A reference that is another model is averaged with the policy's
        weights, the adapter merged into them. Raises ConfigError: DoRA, whose gains have no value
        without its adapter; another model in few bits.
        """
        if decay and self._reference_base is not None:
            self._reference_base = self._blended_base(self._reference_base, decay)
            return
        if self.reference_arrays is None:
            if decay and any(name.endswith(".m") for name in self.slots.names):
                raise ConfigError(
                    "the reference is DoRA without its adapter: no average with an adapter exists;"
                    " copy the policy, or train all weights"
                )
            slots = zip(self.slots.names, self.slots.read(), strict=True)
            self.reference_arrays = [
                mx.zeros_like(a) if name.endswith(".lora_b") else a for name, a in slots
            ]
        self._reference_base, self._reference_replaced = None, True
        self.reference_arrays = [
            decay * mean.astype(mx.float32) + (1.0 - decay) * array.astype(mx.float32)
            for mean, array in zip(self.reference_arrays, self.slots.read(), strict=True)
        ]
        mx.eval(self.reference_arrays)

    def _blended_base(self, other: Mapping[str, mx.array], decay: float) -> dict[str, mx.array]:
        """decay · other + (1 - decay) · the policy's weights, by path, in float32."""
        if any(path.endswith(".scales") for path in other):
            raise ConfigError(
                "the reference is another model in few bits: no average of it exists; copy the"
                " policy, or take the model before it was quantised"
            )
        merged = {
            f"{path}.weight": merged_rows(dense_weight(layer.linear), layer.pair())
            for path, layer in trainer_lora_layers(self.model).items()
        }
        with self._without_adapter(), without_value_head(self.model):
            slots = parameter_slots(self.model)
            weights = {path: module[key] for path, (module, key) in slots.items()} | merged
        blended = {
            path: decay * array.astype(mx.float32)
            + (1.0 - decay) * weights[path].astype(mx.float32)
            for path, array in other.items()
        }
        mx.eval(blended)
        return blended

    # ------------------------------------------------------------------ arrays and files

    def adapter(self) -> dict[str, LoraPair]:
        """The adapter as it is now; shares the arrays. All are evaluated but the gains of DoRA and
        the products of AdaLoRA."""
        return adapter_layers(self.model)

    def served_arrays(self) -> list[mx.array]:
        """The trained weights that requests are answered with: all but the value head, as they
        are now."""
        arrays = zip(self.slots.names, self.slots.read(), strict=True)
        return [array for name, array in arrays if not is_value_head(name)]

    def full_parameters(self) -> dict[str, mx.array]:
        """All weights as they are now, by path, the value head left out; shares the arrays."""
        arrays = zip(self.slots.names, self.slots.read(), strict=True)
        return {name: array for name, array in arrays if not is_value_head(name)}

    @property
    def _saved_reference(self) -> list[mx.array]:
        """Empty if a resume makes it again: the base, or the weights that the run began with."""
        return (
            (self.reference_arrays or [])
            if self.lora or self._ema or self._reference_replaced
            else []
        )

    @property
    def keeps_reference(self) -> bool:
        """Whether a checkpoint has its own reference beside the trained weights."""
        return bool(self._saved_reference) or self._reference_base is not None

    def saved_bytes(self) -> int:
        """Bytes that `save` writes, without its configuration file."""
        arrays = [*self.slots.read(), *self._saved_reference]
        if self._adalora is not None:  # the product of E and B too
            layers = trainer_lora_layers(self.model).values()
            arrays += [layer.lora_b for layer in layers]
        copied = (
            []
            if self.lora
            else [file for file in self._source.iterdir() if file.suffix in COMPANIONS]
        )
        return sum(array.nbytes for array in arrays) + sum(file.stat().st_size for file in copied)

    def save(self, directory: Path) -> None:
        """Write an adapter in mlx-lm's format, or a Hugging Face model directory, into an
        existing directory."""
        if self.lora:
            save_adapter(
                directory,
                adapter_layers(self.model, factors=True),
                num_layers=len(self.model.layers),
                base=self._base,
                adalora=self._adalora,
            )
            record_rope_length(directory, self.model_config)
        else:
            with without_value_head(self.model):
                save_model(directory, self.model)
            save_config(dict(self.model_config), directory / "config.json")
            if self.image_parts is not None:  # mlx-lm leaves out what describes the tower
                file = directory / "config.json"
                whole = json.loads(file.read_text()) | {
                    "vision_config": self.model_config["vision_config"]
                }
                file.write_text(json.dumps(whole, indent=4) + "\n")
            for file in self._source.iterdir():
                if file.suffix in COMPANIONS and not (directory / file.name).exists():
                    shutil.copyfile(file, directory / file.name)
        if self._value_slots:
            head = zip(self._value_slots, self.slots.read(self._value_slots), strict=True)
            arrays = {self.slots.names[slot]: array for slot, array in head}
            mx.save_safetensors(str(directory / VALUE_HEAD_FILE), arrays)
        for name, text in self.described.items():
            (directory / name).write_text(text, encoding="utf-8")
        if saved := self._saved_reference:
            mx.save_safetensors(
                str(directory / REFERENCE_FILE), dict(zip(self.slots.names, saved, strict=True))
            )

    def load(self, directory: Path) -> None:
        """Load what `save` wrote. Raises AdapterError, CheckpointError."""
        if self._value_slots and not (directory / VALUE_HEAD_FILE).is_file():
            raise CheckpointError(
                f"{directory} has no value head ({VALUE_HEAD_FILE}): it is neither of PPO"
                " nor of a reward model"
            )
        tensors = read_tensors(directory / VALUE_HEAD_FILE) if self._value_slots else {}
        slots: Sequence[int] = range(len(self.slots))
        if self.lora:
            load_into_trainer(self.model, load_adapter(directory).layers)
            slots = self._value_slots
        else:
            for file in sorted(directory.glob("model*.safetensors")):
                tensors |= read_tensors(file)
            self._check_frozen(tensors, directory)
        self.slots.write(self._arranged(tensors, directory, slots), slots)
        mx.eval(self.slots.read())
        reference = directory / REFERENCE_FILE
        # without it: kl_beta was 0 until now
        if self._ema or (self._saved_reference and reference.is_file()):
            dtype = mx.float32 if self._ema else None
            self.reference_arrays = self._arranged(
                read_tensors(reference), reference, range(len(self.slots)), dtype
            )

    def _check_frozen(self, tensors: Mapping[str, mx.array], where: Path) -> None:
        """Raises CheckpointError: of these full weights some are not trained here, and differ from
        the base's."""
        for path, (owner, key) in parameter_slots(self.model).items():
            if path in self.slots.names or path not in tensors:
                continue
            if not mx.array_equal(owner[key], tensors[path].astype(owner[key].dtype)).item():
                raise CheckpointError(
                    f"{where}: {path} was trained there, and stays as it is here: set vision.train"
                    " as it was, or take the checkpoint as model.base_path"
                )

    def _arranged(
        self,
        tensors: Mapping[str, mx.array],
        where: Path,
        slots: Sequence[int],
        dtype: mx.Dtype | None = None,
    ) -> list[mx.array]:
        """Return these slots' arrays from a file, in `dtype` or in the slot's dtype. Raises
        CheckpointError."""
        arranged = []
        for slot, array in zip(slots, self.slots.read(slots), strict=True):
            name = self.slots.names[slot]
            if name not in tensors or tensors[name].shape != array.shape:
                saved = tensors[name].shape if name in tensors else "nothing"
                raise CheckpointError(
                    f"{where}: {name}: the model has {array.shape}, the checkpoint {saved}"
                )
            arranged.append(tensors[name].astype(dtype or array.dtype))
        mx.eval(arranged)
        return arranged


def _unfreeze(module: nn.Module) -> None:
    """Let all weights of a module be trained. Raises ConfigError: they are quantised."""
    quantised = nn.QuantizedLinear | nn.QuantizedEmbedding
    if any(isinstance(each, quantised) for each in module.modules()):
        raise ConfigError(
            "rl_training.lora.enabled = false trains all weights, but this base is quantised"
        )
    module.unfreeze()


def read_tensors(file: Path) -> dict[str, mx.array]:
    """The arrays of one safetensors file of a checkpoint, read from disk when first used. Raises
    CheckpointError."""
    try:
        tensors = mx.load(str(file))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    assert isinstance(tensors, dict)
    return tensors
