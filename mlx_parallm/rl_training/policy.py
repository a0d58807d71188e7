"""TrainedPolicy: the trainer's own module tree, what in it is trained, and the reference hidden in it.

    adapter        `inject_lora` around the targets; reference = the same tree with the adapter taken out ("base"), or
                   with the adapter as it was when the run started ("initial")
    full weights   everything is trained; the reference is a frozen copy (arrays are immutable: it costs memory only
                   once training has moved the weights away from it)

The tree shares its frozen arrays with the serving one (`copy.deepcopy` before either was wrapped), so parameters are
only ever rebound.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.models.lora import (
    LoraPair,
    LoraSpec,
    adapter_layers,
    inject_lora,
    load_adapter,
    load_into_trainer,
    save_adapter,
    trainer_lora_layers,
)
from mlx_parallm.models.mlx_lm_api import save_config, save_model
from mlx_parallm.models.parameters import ParameterSlots

REFERENCE_FILE = "reference.safetensors"
COMPANIONS = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")  # tokenizer, template, generation_config


class TrainedPolicy:
    """Args:
        model: a tree of its own, frozen and evaluated.
        source: the base checkpoint's directory (tokenizer and configuration travel with saved full weights).
        model_config: the base's config.json.
        initial_adapter: arrays to start the adapter from, as `models.lora.load_adapter` reads them.

    Raises ConfigError: full-weight training of a quantised base. AdapterError: targets or shapes that do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RLTrainingConfig,
        *,
        source: Path,
        model_config: Mapping[str, Any],
        initial_adapter: Mapping[str, LoraPair] | None = None,
    ) -> None:
        self.model, self._source, self._model_config = model, source, dict(model_config)
        self.lora = config.lora.enabled
        if self.lora:
            mx.random.seed(config.seed)
            inject_lora(model, LoraSpec(config.lora.rank, config.lora.alpha, config.lora.target_modules))
            if initial_adapter is not None:
                load_into_trainer(model, initial_adapter)
        else:
            if any(isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding) for module in model.modules()):
                raise ConfigError("rl_training.lora.enabled = false trains all weights, but this base is quantised")
            model.unfreeze()
        model.train()  # gated-delta layers have a gradient in this mode only; every dropout is 0
        mx.eval(model.parameters())
        self.slots = ParameterSlots(model)
        self._reference: list[mx.array] | None = None
        if config.kl_beta > 0 and not (self.lora and config.reference == "base"):
            self._reference = self.slots.read()

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(array.size for array in self.slots.read())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The tree is the reference policy for the length of the block."""
        if self._reference is not None:
            with self.slots.bound(self._reference):
                yield
            return
        adapted = trainer_lora_layers(self.model)
        self.model.update_modules(tree_unflatten([(path, layer.linear) for path, layer in adapted.items()]))
        try:
            yield
        finally:
            self.model.update_modules(tree_unflatten(list(adapted.items())))

    # ------------------------------------------------------------------ what leaves the trainer

    def adapter(self) -> dict[str, LoraPair]:
        """The adapter as it is now; shares the arrays, all evaluated."""
        return adapter_layers(self.model)

    def full_parameters(self) -> dict[str, mx.array]:
        """All weights as they are now, by path; shares the arrays."""
        return dict(zip(self.slots.names, self.slots.read(), strict=True))

    def saved_bytes(self) -> int:
        """What `save` writes, but for its configuration file."""
        arrays = [*self.slots.read(), *(self._reference or () if self.lora else ())]
        copied = [] if self.lora else [file for file in self._source.iterdir() if file.suffix in COMPANIONS]
        return sum(array.nbytes for array in arrays) + sum(file.stat().st_size for file in copied)

    def save(self, directory: Path) -> None:
        """Writes an adapter in mlx-lm's format, or a Hugging Face model directory, into an existing directory."""
        if self.lora:
            save_adapter(directory, self.adapter(), num_layers=len(self.model.layers))
        else:
            save_model(directory, self.model)
            save_config(dict(self._model_config), directory / "config.json")
            for file in self._source.iterdir():
                if file.suffix in COMPANIONS and not (directory / file.name).exists():
                    shutil.copyfile(file, directory / file.name)
        if self._reference is not None and self.lora:
            tensors = dict(zip(self.slots.names, self._reference, strict=True))
            mx.save_safetensors(str(directory / REFERENCE_FILE), tensors)

    def load(self, directory: Path) -> None:
        """Takes over what `save` wrote. Raises AdapterError, CheckpointError."""
        if self.lora:
            load_into_trainer(self.model, load_adapter(directory).layers)
            if self._reference is not None and (directory / REFERENCE_FILE).is_file():
                self._reference = self._arranged(read_tensors(directory / REFERENCE_FILE), directory)
        else:
            tensors: dict[str, mx.array] = {}
            for file in sorted(directory.glob("model*.safetensors")):
                tensors |= read_tensors(file)
            self.slots.write(self._arranged(tensors, directory))
        mx.eval(self.slots.read())

    def _arranged(self, tensors: Mapping[str, mx.array], directory: Path) -> list[mx.array]:
        arranged = []
        for name, own in zip(self.slots.names, self.slots.read(), strict=True):
            if name not in tensors or tensors[name].shape != own.shape:
                found = tensors[name].shape if name in tensors else "nothing"
                raise CheckpointError(f"{directory}: {name}: the model has {own.shape}, the checkpoint {found}")
            arranged.append(tensors[name].astype(own.dtype))
        mx.eval(arranged)
        return arranged


def read_tensors(file: Path) -> dict[str, mx.array]:
    """The arrays of one safetensors file of a checkpoint, not yet read from disk. Raises CheckpointError."""
    try:
        tensors = mx.load(str(file))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    assert isinstance(tensors, dict)
    return tensors
