"""A GGUF file as a Hugging Face folder: `mlx_parallm convert MODEL.gguf OUT`.

The way back of `export.gguf_file.write_model`, by the same table of architectures. What the file
holds and this module does not understand is refused by name if the model may need it; facts
about the model (author, licence) go into `gguf.json` of the folder. Weights stay as coarse as the
file has them: unpacked, or with `keep` in the file's own 4 and 8 bits where MLX has such blocks
(packed.py).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.errors import ModelError
from mlx_parallm.models.gguf import architectures, packed
from mlx_parallm.models.gguf.header import check_finite, check_header
from mlx_parallm.models.gguf.hf_tokenizer import write_tokenizer
from mlx_parallm.models.mlx_lm_api import save_config, save_model
from mlx_parallm.models.published.mend import model_classes
from mlx_parallm.system.files import free_bytes, write_directory

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
FACTS_FILE = "gguf.json"
MAGIC = b"GGUF"
ROPE_FACTORS = "rope_freqs.weight"
SPLIT_COUNT = "split.count"
PLAIN = ("F32", "F16", "BF16")  # types that are not quantised


@dataclass(frozen=True)
class FolderReport:
    """
    Attributes:
        tensors: of the file.
        parameters: numbers in them.
        left_out: keys of the file that only `gguf.json` keeps.
        notes: remarks for the user.
    """

    path: Path
    model_type: str
    tensors: int
    parameters: int
    types: dict[str, int]
    left_out: list[str]
    notes: list[str]

    def lines(self) -> list[str]:
        """Return the command's output."""
        types = ", ".join(f"{count} {name}" for name, count in self.types.items())
        first = (
            f"{self.path}: {self.model_type}, {self.tensors} tensors ({types}),"
            f" {self.parameters:,} parameters"
        )
        kept = f"{len(self.left_out)} keys of the file about the model are in {FACTS_FILE}"
        return [first, *([kept] if self.left_out else []), *self.notes]


def convert_gguf(
    source: Path, output: Path, *, dtype: str = "bfloat16", keep: bool = False
) -> FolderReport:
    """Write the model of a GGUF file as a new directory: safetensors, config.json, tokenizer.json.

    Args:
        dtype: of the weights, a key of `DTYPES`; with `keep` of the scales, and of what is not
            kept.
        keep: keep quantised weights packed if that rounds nothing. The report counts the others.

    Raises ModelError: the output exists; the file is damaged, or holds something that mlx-lm would
    not compute; `keep` with bfloat16, or with a file that allows it nowhere; CheckpointError: the
    directory cannot be written.
    """
    if output.exists() or output.is_symlink():
        raise ModelError(
            f"{output} exists already: choose another path, a converted"
            " model never replaces anything"
        )
    if keep and dtype == "bfloat16":
        raise ModelError(
            "bfloat16 would round the scales of quantised weights: keep them in float16 or float32"
        )
    file = GGUFFile(source)
    try:
        config = model_config(file)
        model, arguments = _build(config)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"{source}: its numbers make no model: {error}") from error
    kind = str(config["model_type"])
    config |= {"torch_dtype": dtype}
    _check_disk(file, output, DTYPES[dtype], keep=keep)
    wanted = _tensors_of(model, arguments, tied=config["tie_word_embeddings"])
    factors = next((tensor for tensor in file.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is not None:
        config["rope_scaling"] = llama3_scaling(_numbers(factors), config)
    _check_names(file, kind, set(wanted))
    shapes = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    notes: list[str] = []

    def fill(directory: Path) -> None:
        # first: it may refuse, and takes no time
        notes.extend(write_tokenizer(directory, file, config))
        kept = _Kept(model, dtype)
        weights: dict[str, mx.array] = {}
        for tensor in file.tensors:
            if tensor is not factors:
                name = wanted[tensor.name]
                place = _Place(name, shapes[name], arguments, DTYPES[dtype])
                weights |= (keep and kept.pack(tensor, place)) or {name: _weight(tensor, place)}
        if keep:
            config.update(kept.quantize(model, source))
            notes.extend(kept.lines())
        # gemma3's sanitize drops an unused lm_head
        model.load_weights(list(model.sanitize(weights).items()))
        save_model(directory, model)
        save_config(config, directory / "config.json")
        facts = {"file": source.name, "left_out": file.left_out()}
        (directory / FACTS_FILE).write_text(
            json.dumps(facts, indent=2, ensure_ascii=False), encoding="utf-8"
        )

    write_directory(output, fill)
    parameters = sum(int(np.prod(tensor.shape)) for tensor in file.tensors)
    types = [tensor.tensor_type.name for tensor in file.tensors]
    counts = {name: types.count(name) for name in sorted(set(types))}
    return FolderReport(
        output, kind, len(types), parameters, counts, sorted(file.left_out()), notes
    )


class GGUFFile:
    """The keys and tensors of a file; it knows which keys were asked for.

    Raises ModelError: it is not GGUF, damaged, a part of several, an adapter, a projector, or of
    the other byte order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as opened:
                start = opened.read(8)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        if start[:4] != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not begin with GGUF")
        if start[4:6] == b"\0\0":
            raise ModelError(f"{path} is a big-endian GGUF file: only little-endian ones are read")
        try:
            check_header(path)
            reader = gguf.GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except (
            ValueError,
            IndexError,
            KeyError,
            OverflowError,
            TypeError,
            MemoryError,
            UnicodeDecodeError,
        ) as error:
            raise ModelError(f"{path} is damaged or cut short: {error}") from error
        for name, value in self._fields.items():
            check_finite(path, name, value)
        self.tensors: list[gguf.ReaderTensor] = list(reader.tensors)
        self._read_keys = {"general.architecture", "general.type"}
        if (parts := self.get(SPLIT_COUNT, 0)) > 1:
            raise ModelError(
                f"{path} is one of {parts} parts: join them with `llama-gguf-split --merge`"
            )
        if (kind := self.get("general.type", "model")) != "model":
            raise ModelError(f"{path} holds no model but a {kind}: pass the model's own file")
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, and note that it is understood."""
        self._read_keys.add(key)
        return self._fields.get(key, default)

    def number(self, key: str, default: Any = None) -> Any:
        """Return the value of the architecture's key, `{arch}.` left out. Raises ModelError:
        there is none."""
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(
                f"{self.path} has no {self.architecture}.{key}: the file is not complete"
            )
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self.path}: {self.architecture}.{key} differs"
                    " between layers, which is not read"
                )
            value = value[0]
        return value

    def without_meaning(self, prefix: str) -> list[str]:
        """Return the keys under a prefix that were never read."""
        return sorted(
            key for key in self._fields if key.startswith(prefix) and key not in self._read_keys
        )

    def left_out(self) -> dict[str, Any]:
        """Return the parts that the folder's other files lack."""
        header = ("GGUF.",)
        return {
            key: value
            for key, value in self._fields.items()
            if key not in self._read_keys and not key.startswith(header)
        }


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Return config.json of the file's model. Raises ModelError: an architecture, or a key of
    it, that is not known."""
    kind = next(
        (
            kind
            for kind, row in architectures.ARCHITECTURES.items()
            if row.name == file.architecture
        ),
        None,
    )
    if kind is None:
        readable = ", ".join(sorted({row.name for row in architectures.ARCHITECTURES.values()}))
        raise ModelError(
            f"{file.path}: architecture {file.architecture!r} is not read: only {readable}"
        )
    names = {tensor.name for tensor in file.tensors}
    tokens = file.get("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {
        "architectures": [architectures.ARCHITECTURES[kind].hf_class],
        "model_type": kind,
    }
    config |= architectures.read_metadata(file.number, file.architecture)
    config |= {
        "vocab_size": int(file.number("vocab_size", len(tokens))),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
    }
    if (layers := config["num_hidden_layers"]) > len(names):
        raise ModelError(
            f"{file.path}: {file.architecture}.block_count = {layers}, but there are"
            f" {len(names)} tensors"
        )
    if len(tokens) != config["vocab_size"]:
        raise ModelError(
            f"{file.path}: {len(tokens)} tokens, but a vocabulary of {config['vocab_size']}"
        )
    if unknown := file.without_meaning(f"{file.architecture}."):
        raise ModelError(f"{file.path}: {unknown[0]} is not understood, and the model may need it")
    return config


def llama3_scaling(factors: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope scaling of Llama 3 whose divisors of the frequencies are `factors`, [head_dim
    / 2] float32.

    Between its two bounds a divisor is 1 / ((1 - s) / factor + s), s = (L / wavelength - low) /
    (high - low) (transformers, `_compute_llama3_parameters`). Only two of L, low and high follow,
    so low = 1, as Llama has it. Raises ModelError: no such scaling gives these divisors.
    """
    size = 2 * len(factors)
    wavelengths = 2 * np.pi * float(config["rope_theta"]) ** (np.arange(0, size, 2) / size)
    numbers = factors.astype(np.float64)
    factor = float(numbers.max())
    between = (numbers > 1 + 1e-6) & (numbers < factor * (1 - 1e-6))
    if factor <= 1 or not between.any():
        raise ModelError(
            f"the tensor {ROPE_FACTORS} is not a rope scaling of Llama 3's: which one is not known"
        )
    smooth = (1 / numbers[between] - 1 / factor) / (1 - 1 / factor)
    high = 4.0  # Llama's: one divisor alone allows any
    if between.sum() > 1:
        high = round(float(1 - 1 / np.polyfit(1 / wavelengths[between], smooth, 1)[1]), 3)
    length = round(float((wavelengths[between] * (smooth * (high - 1) + 1)).mean()))
    scale = np.clip((length / wavelengths - 1) / (high - 1), 0, 1)
    if not np.allclose(1 / ((1 - scale) / factor + scale), numbers, rtol=1e-4):
        raise ModelError(
            f"the tensor {ROPE_FACTORS} is not a rope scaling of Llama 3's: which one is not known"
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _check_disk(file: GGUFFile, output: Path, dtype: mx.Dtype, *, keep: bool) -> None:
    """Raises ModelError: the weights do not fit the disk of `output`."""

    def bytes_of_number(tensor: gguf.ReaderTensor) -> float:
        bits = packed.bits_of(tensor.tensor_type) if keep else None
        return dtype.size if bits is None else bits / 8 + 2 * dtype.size / packed.GROUP_SIZE

    needed = sum(int(np.prod(tensor.shape)) * bytes_of_number(tensor) for tensor in file.tensors)
    existing = next(parent for parent in output.absolute().parents if parent.exists())
    if needed > (free := free_bytes(existing)):
        raise ModelError(
            f"{file.path} needs {needed / 1e9:.1f} GB in {dtype} for {output}, but"
            f" {free / 1e9:.1f} GB are free there:"
            " free some space, or choose another directory (of the cache: XDG_CACHE_HOME)"
        )


def _check_names(file: GGUFFile, kind: str, wanted: set[str]) -> None:
    """Raises ModelError: the file has other tensors than the model."""
    names = {tensor.name for tensor in file.tensors}
    if unknown := sorted(names - wanted - {ROPE_FACTORS}):
        raise ModelError(
            f"{file.path}: {len(unknown)} tensors have no place in mlx-lm's {kind},"
            f" {unknown[0]} is the first"
        )
    if missing := sorted(wanted - names):
        raise ModelError(
            f"{file.path}: {len(missing)} tensors of {kind} are missing, {missing[0]} is the first"
        )


def _build(config: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    model_class, arguments_class = model_classes(dict(config))
    arguments = arguments_class.from_dict(dict(config))
    return model_class(arguments), arguments


def _tensors_of(model: nn.Module, arguments: Any, *, tied: bool) -> dict[str, str]:
    """Return mlx-lm's name of each tensor by the file's name."""
    row = architectures.ARCHITECTURES[arguments.model_type]
    names = [
        name
        for name, _ in tree_flatten(model.parameters())
        if not (tied and name.startswith("lm_head."))
    ]
    return {
        architectures.tensor_name(row, name, arguments.num_hidden_layers): name for name in names
    }


@dataclass(frozen=True)
class _Place:
    """Place of a tensor: mlx-lm's name and shape, and its architecture's changes."""

    name: str
    shape: tuple[int, ...]
    arguments: Any
    dtype: mx.Dtype

    def check(self, tensor: gguf.ReaderTensor) -> None:
        """Raises ModelError: another shape than the architecture's."""
        if (shape := _shape_of(tensor)) != self.shape:
            raise ModelError(
                f"{tensor.name} has shape {shape}, but"
                f" {self.arguments.model_type} needs {self.shape}"
            )

    def in_order(self, tensor: gguf.ReaderTensor, rows: np.ndarray) -> np.ndarray:
        """Return a tensor's rows, numbers or blocks, in mlx-lm's order."""
        row = architectures.ARCHITECTURES[self.arguments.model_type]
        order = architectures.row_order(row, self.name, self.arguments)
        return rows if order is None else rows[np.argsort(order)]

    def offset(self, tensor: gguf.ReaderTensor) -> float:
        row = architectures.ARCHITECTURES[self.arguments.model_type]
        return architectures.offset_of(row, tensor.name)


class _Kept:
    """The matrices of a model that stay packed, and why others do not."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self._allowed = {
            path for path, module in model.named_modules() if hasattr(module, "to_quantized")
        }
        self._dtype = dtype
        self._bits: dict[str, int] = {}
        self._unpacked: dict[tuple[str, str], list[str]] = {}  # (type, reason) → names in the file

    def pack(self, tensor: gguf.ReaderTensor, place: _Place) -> dict[str, mx.array]:
        """Return the arrays of a matrix that can stay packed, else {}. Raises ModelError: it has
        another shape."""
        place.check(tensor)
        kind, path = tensor.tensor_type, place.name.removesuffix(".weight")
        reason = "MLX has no such blocks"
        if packed.bits_of(kind) is not None:
            reason = "its numbers differ from MLX's by an offset"
            if path in self._allowed and place.offset(tensor) == 0.0:
                rows = np.asarray(tensor.data).reshape(*place.shape[:-1], -1)
                parts = packed.pack(place.in_order(tensor, rows), kind, place.dtype)
                if parts is not None:
                    self._bits[path] = parts.bits
                    return {
                        place.name: parts.weight,
                        f"{path}.scales": parts.scales,
                        f"{path}.biases": parts.biases,
                    }
                reason = f"{self._dtype} would round the scales" + ", float32 does not" * (
                    self._dtype == "float16"
                )
        if kind.name not in PLAIN:
            self._unpacked.setdefault((kind.name, reason), []).append(tensor.name)
        return {}

    def quantize(self, model: nn.Module, source: Path) -> dict[str, Any]:
        """Make the packed layers' places in the model; return config.json's entries. Raises
        ModelError: nothing is."""
        if not self._bits:
            raise ModelError(
                f"{source} has no weights that can stay packed: {'; '.join(self.lines())}"
            )
        every = list(self._bits.values())
        common = {"group_size": packed.GROUP_SIZE, "bits": max(set(every), key=every.count)}
        layers = {path: common | {"bits": bits} for path, bits in self._bits.items()}
        nn.quantize(model, **common, class_predicate=lambda path, _: layers.get(path, False))
        entry = common | {path: layer for path, layer in layers.items() if layer != common}
        return {"quantization": entry, "quantization_config": entry}

    def lines(self) -> list[str]:
        """Return a line about packed tensors, and one for each kind of others."""
        every = list(self._bits.values())
        counts = [f"{every.count(bits)} tensors in {bits} bits" for bits in sorted(set(every))]
        return [f"kept exactly: {', '.join(counts) or 'none'}"] + [
            (
                f"unpacked to {self._dtype}: {len(names)} {kind} tensors,"
                f" {names[0]} the first ({reason})"
            )
            for (kind, reason), names in self._unpacked.items()
        ]


def _weight(tensor: gguf.ReaderTensor, place: _Place) -> mx.array:
    """Return a tensor of the file as mlx-lm has it, evaluated: only one tensor is in memory in
    float32.

    Raises ModelError: another shape than the architecture's; a number that is not finite, in the
    file or in the dtype.
    """
    place.check(tensor)
    numbers = place.in_order(tensor, _numbers(tensor))
    if offset := place.offset(tensor):
        numbers = numbers - np.float32(offset)
    weight = mx.array(np.ascontiguousarray(numbers)).astype(place.dtype)
    if not mx.isfinite(weight).all().item():
        wider = (
            ""
            if not np.isfinite(numbers).all()
            else f" in {place.dtype}: choose --dtype bfloat16 or float32"
        )
        raise ModelError(f"{tensor.name} has numbers that are not finite{wider}")
    return weight


def _shape_of(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """Return the shape in memory; the file has it the other way round."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _numbers(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Return the numbers as float32. Raises ModelError: a type without a reader."""
    try:
        numbers = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        return numbers.reshape(_shape_of(tensor))
    except (NotImplementedError, ValueError) as error:
        raise ModelError(
            f"{tensor.name} of type {tensor.tensor_type.name} cannot be unpacked: {error}"
        ) from error
