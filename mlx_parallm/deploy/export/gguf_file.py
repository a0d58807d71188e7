"""Write a GGUF file, one tensor in memory at a time."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from mlx_parallm.deploy.export.model import OpenModel
from mlx_parallm.deploy.export.quantization import FILE_TYPES, Mixture, encode, size_of
from mlx_parallm.deploy.export.vocabulary import Vocabulary
from mlx_parallm.errors import AdapterError
from mlx_parallm.models.gguf import architectures
from mlx_parallm.models.gguf.architectures import GGUFArchitecture

QUANTIZATION_VERSION = 2
PROBE_WIDTH, PROBE_CONTEXT = 32, 4096
ROPE_FACTORS = "rope_freqs.weight"

Progress = Callable[[int, int], None]
"""Called with the bytes written and the bytes of all tensors."""


def write_model(
    path: Path,
    opened: OpenModel,
    vocabulary: Vocabulary,
    kind: str,
    progress: Progress = lambda done, total: None,
) -> dict[str, int]:
    """Write the model with its adapter merged. Takes the weights out of `opened`. Return how many
    tensors have a type.

    Raises ModelError: a tensor that GGUF does not know, or a number that the type cannot hold;
    OSError.
    """
    architecture = architectures.architecture_of(opened.config)
    arguments = opened.arguments
    architectures.check_arguments(architecture, arguments)
    writer = _writer(architecture, opened.source.name)
    architectures.write_metadata(writer, arguments)
    vocabulary.write(writer)
    writer.add_file_type(int(FILE_TYPES[kind]))
    writer.add_quantization_version(QUANTIZATION_VERSION)

    planned = planned_tensors(opened, kind)
    factors = architectures.rope_factors(opened.model)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for name, shape, type_ in planned.values():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size_of(type_, shape), type_)
    total, done = sum(size_of(type_, shape) for _, shape, type_ in planned.values()), 0
    try:
        _write_header(writer, path)
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in opened.tensors():
            name, _, type_ = planned[tensor.name]
            order = architectures.row_order(architecture, tensor.name, arguments)
            offset = architectures.offset_of(architecture, name)
            pieces = tensor.rows(order, np.float32(offset))
            written = encode(pieces, type_, tensor.shape, tensor.name)
            writer.write_tensor_data(written)
            done += written.nbytes
            progress(done, total)
    finally:
        writer.close()
    types = [type_ for *_, type_ in planned.values()]
    return {used.name: types.count(used) for used in sorted(set(types))}


def planned_tensors(opened: OpenModel, kind: str) -> dict[str, tuple[str, tuple[int, ...], Type]]:
    """Return the name in the file, the shape and the type of each tensor, by mlx-lm's name."""
    architecture, arguments = architectures.architecture_of(opened.config), opened.arguments
    shapes = opened.shapes()
    layers = arguments.num_hidden_layers
    names = {name: architectures.tensor_name(architecture, name, layers) for name in shapes}
    mixture = Mixture(
        kind,
        layers,
        arguments.num_attention_heads // arguments.num_key_value_heads,
        getattr(arguments, "num_experts", 0),
        tied="output.weight" not in names.values(),
    )
    return {
        name: (names[name], shape, mixture.type_of(names[name], shape))
        for name, shape in shapes.items()
    }


def write_adapter(path: Path, opened: OpenModel) -> int:
    """Write the adapter alone, for llama.cpp's `--lora`: float32. Return its layers.

    llama.cpp scales by alpha / rank, with one alpha: B takes up what differs between layers. Raises
    AdapterError: DoRA, or there is no adapter.
    """
    architecture = architectures.architecture_of(opened.config)
    arguments, layers = opened.arguments, opened.layers
    if not layers:
        raise AdapterError(
            "--adapter-only needs an adapter: this run trained all"
            " weights; export the model instead"
        )
    if dora := [path for path, pair in layers.items() if pair.magnitude is not None]:
        raise AdapterError(
            f"{dora[0]} is DoRA, which llama.cpp has no adapters for: leave --adapter-only out"
        )
    first = next(iter(layers.values()))
    alpha = float(first.scale * first.a.shape[-1])
    writer = _writer(architecture, opened.source.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for mlx_path, pair in layers.items():
        name = architectures.tensor_name(
            architecture, f"{mlx_path}.weight", arguments.num_hidden_layers
        )
        order = architectures.row_order(architecture, f"{mlx_path}.weight", arguments)
        # llama.cpp's stacked experts are [experts, r, in] and [experts, out, r]
        a, b = (np.array(array, np.float32).swapaxes(-1, -2) for array in (pair.a, pair.b))
        b = b * np.float32(pair.scale * pair.a.shape[-1] / alpha)
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b if order is None else b[order]))
    try:
        _write_all(writer, path)
    finally:
        writer.close()
    return len(layers)


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    """Write the smallest model that llama.cpp loads with this tokenizer: to try its tokens, not
    to answer."""
    width, rows = PROBE_WIDTH, len(vocabulary.tokens)
    writer = _writer(architectures.ARCHITECTURES["llama"], "vocabulary")
    for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
        add(1)
    for add in (
        writer.add_embedding_length,
        writer.add_feed_forward_length,
        writer.add_rope_dimension_count,
    ):
        add(width)
    writer.add_context_length(PROBE_CONTEXT)
    writer.add_layer_norm_rms_eps(1e-6)
    vocabulary.write(writer)
    square, line = np.zeros((width, width), np.float32), np.ones(width, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((rows, width), np.float32))
    writer.add_tensor("output_norm.weight", line)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", line)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    try:
        _write_all(writer, path)
    finally:
        writer.close()


def _write_all(writer: gguf.GGUFWriter, path: Path) -> None:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def _writer(architecture: GGUFArchitecture, name: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_name(name)
    return writer


def _write_header(writer: gguf.GGUFWriter, path: Path) -> None:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
