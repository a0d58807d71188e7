"""The protobuf messages of Tinker's API (package `tinker_public`, proto3), and the tensors in them.

The messages are described here and made by protobuf's message factory: there is no generated
module, and the `tinker` package is not imported. Field numbers were read from SDK 0.38; unknown
fields are ignored, as protobuf does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import zstandard
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from mlx_parallm.errors import RequestError
from mlx_parallm.faces.tinker.wire_counts import check_counts

PROTOBUF = "application/x-protobuf"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STOP, LENGTH = 0, 1
EMPTY_CELL = -99999.0
MAX_RANK_OF_TENSOR = 2
MAX_CELLS = 1 << 24  # numbers of all sparse tensors of a request, once they are dense
ZSTD_STEP = 1 << 10  # bytes that are decompressed at once: to 32 MiB at most
LEADING_BYTES = 256
MODEL_ID_TAG, SEQ_ID_TAG = b"\x0a", b"\x10"  # of a ForwardBackwardRequest: field · 8 + type

# "NUMBER NAME TYPE": a trailing * = repeated; `map` = map<string, TYPE>; names after | share a
# oneof.
MESSAGES: Mapping[str, str] = {
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes |encoding, 2 sparse_csr SparseCsr |encoding, 3 dtype int32, 4 shape"
    " int64*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "SampledSequence": (
        "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs"
        " TopkLogprobs"
    ),
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3"
    " topk_prompt_logprobs TopkLogprobs,"
    "4 prompt_cache_hit_tokens int32",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedTensor map, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3"
    " metrics double map",
    "LossConfigValue": "1 number double |value, 2 text string |value",
    "SpanOfSequence": "1 sequence_id string, 2 offset int64, 3 length int64",
    "ProvenanceSpan": "1 prompt_tokens SpanOfSequence |span, 2 sampled_tokens SpanOfSequence |span",
    "EncodedText": "1 tokens bytes",
    "Chunk": "1 encoded_text EncodedText |chunk, 2 image bytes |chunk, 3 dmel bytes |chunk",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs Tensor map, 3 model_input_spans"
    " ProvenanceSpan*,"
    "4 loss_fn_input_spans ProvenanceSpan*",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string,"
    "5 loss_fn_config double map, 6 forward_only bool, 7 loss_fn_config_v2 LossConfigValue map",
}
_TYPES: Mapping[str, Any] = {
    "double": 1,
    "int64": 3,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "bytes": 12,
    "uint32": 13,
}
_MESSAGE_TYPE: Any = 11
_OPTIONAL: Any = 1
_REPEATED: Any = 3
_PACKAGE = "mlx_parallm.faces.tinker"  # of the description here; package names are not on the wire


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="mlx_parallm_tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            words, _, oneof = field.partition("|")
            number, label, kind, *is_map = words.split()
            entry = message.field.add(name=label, number=int(number), label=_OPTIONAL)
            if is_map:
                inner = "".join(part.title() for part in label.split("_")) + "Entry"
                nested = message.nested_type.add(name=inner)
                nested.options.map_entry = True
                nested.field.add(name="key", number=1, label=_OPTIONAL, type=_TYPES["string"])
                _set_type(nested.field.add(name="value", number=2, label=_OPTIONAL), kind)
                entry.label, kind = _REPEATED, f"{name}.{inner}"
            elif kind.endswith("*"):
                entry.label, kind = _REPEATED, kind.removesuffix("*")
            _set_type(entry, kind)
            if oneof:
                declared_names = [declared.name for declared in message.oneof_decl]
                if oneof.strip() not in declared_names:
                    message.oneof_decl.add(name=oneof.strip())
                    declared_names.append(oneof.strip())
                entry.oneof_index = declared_names.index(oneof.strip())
    return file


def _set_type(field: Any, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _MESSAGE_TYPE, f".{_PACKAGE}.{kind}"


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_described())


def message(name: str) -> Any:
    """A new, empty message of that name in MESSAGES."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))()


@dataclass(frozen=True)
class Span:
    """A run of a field: `length` tokens of sample `sequence_id`, from its token `offset` on; ""
    = of a prompt."""

    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True)
class Datum:
    """One example. `tokens` [N] int32; `inputs`: the loss's, [N] or [N, K]; `spans`: what the N
    targets come from."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class ForwardBackward:
    """A forward_backward or, `forward_only`, a forward request. `seq_id` 0 = not numbered."""

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float | str]
    data: tuple[Any, ...]  # Datum messages, read by `read_datum`
    forward_only: bool
    size: int = 0  # bytes of the message
    content: bytes = b""  # a digest of it: the same request has the same


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """The body without its Content-Encoding. Raises RequestError: another encoding than zstd,
    larger than `most`."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(f"Content-Encoding {encoding!r} is not read here: send zstd, or none")
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        parts, size = [], 0
        for start in range(0, len(body), ZSTD_STEP):
            if reader.eof:
                raise RequestError(
                    "the body is not valid zstd: it goes on behind its frame; send one whole frame"
                )
            parts.append(reader.decompress(body[start : start + ZSTD_STEP]))
            size += len(parts[-1])
            if size > most:
                raise BodyTooLargeError(most, b"".join(parts)[:LEADING_BYTES])
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not valid zstd: {error}") from error
    if not reader.eof or reader.unused_data:
        what = "ends before its frame does" if not reader.eof else "goes on behind its frame"
        raise RequestError(f"the body is not valid zstd: it {what}; send one whole frame")
    return b"".join(parts)


class BodyTooLargeError(RequestError):
    """`leading`: the first bytes of the body, decompressed."""

    def __init__(self, most: int, leading: bytes) -> None:
        super().__init__(f"the body is larger than {most} bytes once it is decompressed")
        self.leading = leading


def leading_number(body: bytes) -> tuple[str, int] | None:
    """The model's id and the seq_id that a serialized ForwardBackwardRequest begins with,
    without reading the rest."""
    # a longer id is not one of this server
    if body[:1] != MODEL_ID_TAG or len(body) < 2 or body[1] > 127:
        return None
    end = 2 + body[1]
    if body[end : end + 1] != SEQ_ID_TAG:
        return None
    number, shift = 0, 0
    for byte in body[end + 1 : end + 6]:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return body[2:end].decode(errors="replace"), number
    return None


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Raises RequestError: not such a message, or more datums and other messages than one
    request may hold."""
    request = message("ForwardBackwardRequest")
    try:
        if not check_counts(body):
            raise DecodeError("no protobuf")
        request.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(
            "the body is no protobuf ForwardBackwardRequest (the tinker SDK sends one since 0.25)"
        ) from error
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        config[key] = value.text if value.HasField("text") else value.number
    return ForwardBackward(
        request.model_id,
        request.seq_id,
        request.loss_fn,
        config,
        tuple(request.data),
        request.forward_only,
        len(body),
        blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest(),
    )


def check_cells(data: Sequence[Any]) -> None:
    """Raises RequestError: the sparse tensors of these Datum messages would be too large as
    arrays."""
    shapes = (t.shape for d in data for t in d.loss_fn_inputs.values() if t.HasField("sparse_csr"))
    cells = sum(math.prod(max(size, 0) for size in shape) for shape in shapes)
    if cells > MAX_CELLS:
        raise RequestError(
            f"the sparse tensors of the request have {cells} cells, {MAX_CELLS} are read: send"
            " fewer datums a request"
        )


def read_datum(datum: Any, where: str) -> Datum:
    """Raises RequestError: an image or audio, a tensor that is no tensor."""
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            shown = {"image": "an image", "dmel": "audio"}.get(
                kind or "", "a chunk of unknown kind"
            )
            raise RequestError(
                f"{where}: the model input holds {shown}; this server trains on token ids only"
            )
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}: model_input"))
    inputs = {
        name: read_tensor(tensor, f"{where}: {name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    spans = []
    for entry in datum.loss_fn_input_spans:
        kind = entry.WhichOneof("span")
        span = entry.sampled_tokens if kind == "sampled_tokens" else entry.prompt_tokens
        spans.append(
            Span(span.sequence_id if kind == ("sampled_tokens") else "", span.offset, span.length)
        )
    return Datum(np.concatenate(parts) if parts else np.zeros(0, np.int32), inputs, tuple(spans))


def read_tensor(tensor: Any, where: str) -> np.ndarray:
    """A dense array, [N] or [N, K], float32 or int64. Raises RequestError."""
    dtypes = {
        FLOAT32: np.dtype("<f4"),
        INT64: np.dtype("<i8"),
        INT32: np.dtype("<i4"),
        BFLOAT16: np.dtype("<u2"),
    }
    if tensor.dtype not in dtypes:
        raise RequestError(
            f"{where}: dtype {tensor.dtype} is not float32, int64, int32 or bfloat16"
        )
    dtype, shape = dtypes[tensor.dtype], tuple(tensor.shape)
    sparse = tensor.HasField("sparse_csr")
    values = _numbers(tensor.sparse_csr.values if sparse else tensor.dense, dtype, where)
    if tensor.dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if sparse:
        return _dense(tensor.sparse_csr, values, shape, where)
    if not shape:
        shape = values.shape
    if (
        len(shape) > MAX_RANK_OF_TENSOR
        or any(size < 0 for size in shape)
        or int(np.prod(shape)) != values.size
    ):
        raise RequestError(
            f"{where}: {values.size} numbers do not have the shape {list(shape)}; [N] or [N,"
            " K] is"
            " read"
        )
    return values.reshape(shape)


def _dense(csr: Any, values: np.ndarray, shape: tuple[int, ...], where: str) -> np.ndarray:
    """A CSR matrix as an array: 0 where it holds nothing."""
    rows = _numbers(csr.crow_indices, np.dtype("<i8"), where)
    columns = _numbers(csr.col_indices, np.dtype("<i8"), where)
    fits = (
        len(shape) == MAX_RANK_OF_TENSOR
        and min(shape) >= 0
        and shape[0] * shape[1] <= MAX_CELLS
        and len(rows) == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == len(values) == len(columns)
        and bool((np.diff(rows) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not fits:
        raise RequestError(f"{where}: the sparse indices do not fit the shape {list(shape)}")
    array = np.zeros(shape, values.dtype)
    array[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return array


def _numbers(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestError(f"{where}: {len(data)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: `logprobs` of each datum, [N] or [N, K] float32.

    One record holds neighbours of the same width K: in a record only the first dimension may
    differ.
    """
    output = message("ForwardBackwardOutput")
    output.loss_fn_output_type = "ArrayRecord"
    start = 0
    while start < len(logprobs):
        trailing = logprobs[start].shape[1:]
        end = start
        while end < len(logprobs) and logprobs[end].shape[1:] == trailing:
            end += 1
        part = [np.ascontiguousarray(array, "<f4") for array in logprobs[start:end]]
        record = output.loss_fn_outputs.add(num_datums=len(part))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(array.tobytes() for array in part)
        tensor.offsets = np.cumsum([0, *(array.nbytes for array in part)]).astype("<i8").tobytes()
        tensor.dtype = FLOAT32
        tensor.trailing_shape.extend(trailing)
        start = end
    for name, value in metrics.items():
        output.metrics[name] = value
    data: bytes = output.SerializeToString()
    return data


@dataclass(frozen=True)
class DrawnSample:
    """One sampled sequence: tokens [T], their log-probabilities [T], and the k likeliest at each
    (token, logprob)."""

    stopped: bool
    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]] | None = None


def write_samples(
    samples: Sequence[DrawnSample],
    *,
    cached_tokens: int,
    top_count: int = 0,
    prompt_logprobs: Sequence[float] | None = None,
    prompt_top: Sequence[Sequence[tuple[int, float]]] | None = None,
    prompt_top_count: int = 0,
) -> bytes:
    """A SampleResponse. `prompt_logprobs` [P]: NaN where a token has none."""
    response = message("SampleResponse")
    for sample in samples:
        sequence = response.sequences.add(stop_reason=STOP if sample.stopped else LENGTH)
        sequence.tokens = np.array(sample.tokens, "<i4").tobytes()
        sequence.logprobs = np.array(sample.logprobs, "<f4").tobytes()
        if sample.top is not None:
            _fill_top(sequence.topk_sampled_logprobs, sample.top, top_count)
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.array(prompt_logprobs, "<f4").tobytes()
    if prompt_top is not None:
        _fill_top(response.topk_prompt_logprobs, prompt_top, prompt_top_count)
    response.prompt_cache_hit_tokens = cached_tokens
    data: bytes = response.SerializeToString()
    return data


def _fill_top(target: Any, rows: Sequence[Sequence[tuple[int, float]]], count: int) -> None:
    ids = np.zeros((len(rows), count), "<i4")
    logprobs = np.full((len(rows), count), EMPTY_CELL, "<f4")
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row[:count]):
            ids[i, j], logprobs[i, j] = token, logprob
    target.token_ids, target.logprobs, target.k, target.length = (
        ids.tobytes(),
        logprobs.tobytes(),
        count,
        len(rows),
    )
