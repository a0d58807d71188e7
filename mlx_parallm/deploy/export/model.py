"""The model that is exported: a base, with or without an adapter, and its tokenizer. Its tensors
are read one at a time.

The checkpoint is loaded lazily. A tensor's rows are computed in pieces, an adapter is added in
float32 and a quantised base is dequantised meanwhile; then the layer is forgotten, so memory holds
one tensor.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import AdapterError, ModelError
from mlx_parallm.execution.prompt_images import PARTS
from mlx_parallm.models.adapters.adapter import ADAPTER_CONFIG, LoraPair
from mlx_parallm.models.adapters.linear import dense_weight, merged_rows
from mlx_parallm.models.adapters.rope_length import rope_length_of
from mlx_parallm.models.gguf.architectures import arguments_of
from mlx_parallm.models.loading import load_tokenizer, read_config, resolve_model_path
from mlx_parallm.models.lora import AdapterFile, fit_adapter, linear_shapes, load_adapter
from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear
from mlx_parallm.models.published.mend import load_hf_model
from mlx_parallm.models.published.rope import fixed_ropes
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.run_files.directory import FINAL, checkpoint_at
from mlx_parallm.runs.run import open_run
from mlx_parallm.system.hardware import empty_buffer_cache

CHUNK_NUMBERS = 1 << 24  # numbers of a tensor that are computed at once: 64 MB in float32
ZERO = np.float32(0)
NO_TEMPLATE = "none"
QUANTIZED = nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear


@dataclass(frozen=True)
class ModelSource:
    """Name the model to export.

    Attributes:
        base: directory, hub id or "builtin:tiny".
        adapter: its file or directory; None = the base is exported as it is.
        name: of the files, and in the file.
        chat_template: text or file, in the place of the tokenizer's own; None = that one; "none" =
            there need be none.
        notes: remarks for the reader of the report.
        revision: of a hub id.
        run: the directory of the run that trained it, if any.
    """

    base: str
    adapter: Path | None = None
    name: str = "model"
    chat_template: str | None = None
    notes: tuple[str, ...] = ()
    revision: str | None = None
    run: Path | None = None


def source_of_run(
    path: Path, *, name: str | None = None, chat_template: str | None = None
) -> ModelSource:
    """Return the trained result of a run directory or step: an adapter, or a whole model.

    Args:
        name: default: the run's.
        chat_template: default: the run's own setting.

    Raises ConfigError: no run; ModelError: it has no checkpoint.
    """
    run = open_run(path)
    step = checkpoint_at(path / FINAL) or checkpoint_at(path)
    if step is None:
        raise ModelError(f"{path} has no complete checkpoint yet: nothing to export")
    config = run.load_config()
    template, name = chat_template or config.model.chat_template, name or run.name
    options = config.model.chat_template_kwargs
    note = (
        f"the run renders chats with {options}: give llama-server --chat-template-kwargs"
        f" '{json.dumps(options)}' too"
    )
    notes: tuple[str, ...] = (note,) if options else ()
    if config.rl_training.lora.quantize_base:
        notes += (
            (
                "the run trained beside a base in 4 bits; the adapter is"
                " added to the base as it was before"
            ),
        )
    if (step / "config.json").is_file():  # a run that trained all weights
        return ModelSource(str(step), None, name, template, notes, run=run.path)
    return ModelSource(
        config.model.base_path, step, name, template, notes, config.model.revision, run.path
    )


@dataclass(frozen=True)
class OpenModel:
    """A model whose weights are still on disk.

    Attributes:
        arguments: mlx-lm's model arguments, with its defaults.
        config: config.json with the EOS ids of generation_config.json.
        layers: the adapter by path; empty = none.
        tokenizer: of the thread that opened it.
    """

    source: ModelSource
    path: Path
    model: nn.Module
    config: dict[str, Any]
    tokenizer: Tokenizer
    adapter: AdapterFile | None
    notes: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> Any:
        return arguments_of(self.config, self.model.args)

    @property
    def layers(self) -> dict[str, LoraPair]:
        return dict(self.adapter.layers) if self.adapter else {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every weight's shape by mlx-lm's name, in the order of `tensors()`."""
        return {
            tensor.name: tensor.shape
            for module in _leaves(self.model)
            for tensor in self._of(*module)
        }

    def tensors(self) -> Iterator["SourceTensor"]:
        """Yield every weight under mlx-lm's name. A layer's weights are dropped when the next
        one is asked for, so this can be done once."""
        for path, module in _leaves(self.model):
            yield from self._of(path, module)
            dict.clear(module)
            empty_buffer_cache()

    def _of(self, path: str, module: nn.Module) -> Iterator["SourceTensor"]:
        quantized = ("scales", "biases") if isinstance(module, QUANTIZED) else ()
        for name, value in list(module.items()):
            if isinstance(value, mx.array) and name not in quantized and not name.startswith("_"):
                yield SourceTensor(
                    f"{path}.{name}",
                    module,
                    name,
                    self.layers.get(path) if name == "weight" else None,
                )


@dataclass(frozen=True)
class SourceTensor:
    """One tensor, not computed yet: a row of `rows()` is the last axis. `shape` is mlx-lm's."""

    name: str
    module: nn.Module
    key: str
    pair: LoraPair | None

    @property
    def shape(self) -> tuple[int, ...]:
        array = self.module[self.key]
        if self.key == "weight" and isinstance(self.module, QUANTIZED):
            return (*array.shape[:-1], array.shape[-1] * 32 // self.module.bits)
        return tuple(array.shape)

    def rows(
        self, order: np.ndarray | None = None, offset: np.float32 = ZERO
    ) -> Iterator[np.ndarray]:
        """Yield numbers + offset as float32 [rows, width], in pieces of at most
        CHUNK_NUMBERS.

        Args:
            order: [rows], which of mlx-lm's rows comes at each place.
        """
        whole = self.module[self.key]
        if self.key == "weight" and isinstance(self.module, QUANTIZED):
            whole = dense_weight(self.module)
        # a bias is a column: its numbers are rows
        width = self.shape[-1] if len(self.shape) > 1 else 1
        whole = whole.reshape(-1, width)
        mx.eval(whole)
        step = max(1, CHUNK_NUMBERS // width)
        places = np.arange(math.prod(self.shape) // width) if order is None else order
        for start in range(0, len(places), step):
            chosen = mx.array(places[start : start + step])
            part = (
                whole[chosen]
                if self.pair is None
                else merged_rows(whole[chosen], self.pair, chosen)
            )
            numbers = np.array(part.astype(mx.float32))
            yield numbers if offset == ZERO else numbers + offset


def open_model(source: ModelSource) -> OpenModel:
    """Open the files; nothing large is read. Raises ModelError; AdapterError: it is of another
    model."""
    path = resolve_model_path(source.base, source.revision)
    adapter = load_adapter(source.adapter) if source.adapter else None
    config = read_config(path)
    if adapter and (length := rope_length_of(adapter.config, adapter.path)) is not None:
        config = fixed_ropes(config, length)
    try:
        model, _ = load_hf_model(path, lazy=True, model_config=config)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{path} cannot be loaded: {reason}") from error
    notes = list(source.notes)
    if adapter is not None:
        if seeing := next((layer for layer in adapter.layers if layer.startswith(PARTS)), None):
            raise AdapterError(
                f"{adapter.path}: {seeing} is of the part that sees, which GGUF files here leave"
                " out: mlx_parallm merge --format mlx writes the model with it"
            )
        try:
            layers = fit_adapter(linear_shapes(model), adapter.layers, str(adapter.path))
            adapter = replace(adapter, layers=layers)
        except AdapterError as error:
            raise AdapterError(
                f"{error}: was it trained on another model than {source.base}?"
            ) from error
        trained_on = adapter.config.get("model") or adapter.config.get("base_model_name_or_path")
        if trained_on and str(trained_on) != source.base:
            notes.append(
                f"{ADAPTER_CONFIG} says that the adapter was trained on"
                f" {trained_on}, not on {source.base}"
            )
    if any(isinstance(module, QUANTIZED) for module in model.modules()):
        notes.append(
            f"{source.base} is quantised: its weights are dequantised, and are as rough as before"
        )
    template = None if source.chat_template == NO_TEMPLATE else source.chat_template
    settings = ModelConfig(base_path=source.base, chat_template=template)
    return OpenModel(source, path, model, config, load_tokenizer(path, settings), adapter, notes)


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (path, module)
        for path, module in sorted(model.named_modules(), key=lambda item: _place(item[0]))
        if any(
            isinstance(value, mx.array) and not key.startswith("_") for key, value in module.items()
        )
    ]


def _place(path: str) -> tuple[int, int, str]:
    """Embedding, blocks in their order, and the rest."""
    parts = path.split(".")
    number = next((int(part) for part in parts if part.isdigit()), None)
    return (0 if "embed_tokens" in parts else 1 if number is not None else 2, number or 0, path)
