"""The protobuf messages of Tinker's API, and the tensors in them.

`wire.proto` has the messages, and scripts/generate_tinker_proto.py makes `wire_pb2` of it; the
`tinker` package is not imported. Unknown fields are ignored, as protobuf does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from mlx_parallm.errors import RequestError
from mlx_parallm.faces.tinker import wire_pb2
from mlx_parallm.faces.tinker.wire_counts import check_counts

PROTOBUF = "application/x-protobuf"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STOP, LENGTH = 0, 1
EMPTY_CELL = -99999.0
MAX_RANK_OF_TENSOR = 2
MAX_CELLS = 1 << 24  # numbers of all sparse tensors of a request, once they are dense
ZSTD_STEP = 1 << 10  # bytes that are decompressed at once: to 32 MiB at most
LEADING_BYTES = 256
MODEL_ID_TAG, SEQ_ID_TAG = b"\x0a", b"\x10"  # ForwardBackwardRequest's tags: field · 8 + type


@dataclass(frozen=True)
class Span:
    """A run of a field: `length` tokens of sample `sequence_id`, from its token `offset` on; ""
    = of a prompt."""

    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True)
class Datum:
    """One example. `tokens` [N] int32; `inputs`: the loss's, [N] or [N, K]; `spans`: the parts
    that the N targets come from."""

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
                    "the body is not valid zstd: it continues behind its frame; send one frame"
                )
            parts.append(reader.decompress(body[start : start + ZSTD_STEP]))
            size += len(parts[-1])
            if size > most:
                leading = b"".join(part[:LEADING_BYTES] for part in parts)
                raise BodyTooLargeError(most, leading[:LEADING_BYTES])
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not valid zstd: {error}") from error
    if not reader.eof or reader.unused_data:
        what = "ends before its frame does" if not reader.eof else "continues behind its frame"
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
    request = wire_pb2.ForwardBackwardRequest()
    try:
        if not check_counts(body):
            raise DecodeError("no protobuf")
        request.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(
            "the body is not a protobuf ForwardBackwardRequest (tinker sends one since 0.25)"
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
    """Raises RequestError: an image or audio, a tensor that is not a tensor."""
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
            Span(span.sequence_id if kind == "sampled_tokens" else "", span.offset, span.length)
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
            f"{where}: {values.size} numbers do not have the shape"
            f" {list(shape)}; [N] or [N, K] is read"
        )
    return values.reshape(shape)


def _dense(csr: Any, values: np.ndarray, shape: tuple[int, ...], where: str) -> np.ndarray:
    """A CSR matrix as an array: 0 if it holds nothing."""
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
        raise RequestError(f"{where}: {len(data)} bytes are not a whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: `logprobs` of each datum, [N] or [N, K] float32.

    One record holds neighbours of the same width K: in a record only the first dimension may
    differ.
    """
    output = wire_pb2.ForwardBackwardOutput()
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
    """A SampleResponse. `prompt_logprobs` [P]: NaN if a token has none."""
    response = wire_pb2.SampleResponse()
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
