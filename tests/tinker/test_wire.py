"""Protobuf and tensors: what the SDK sends is read exactly, and no body causes more than a
RequestError."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from mlx_parallm.errors import RequestError
from mlx_parallm.faces.tinker import wire, wire_pb2
from mlx_parallm.faces.tinker.data import DatumLimits, read_batch
from tests.tinker.serving import request_of

ENTRY: dict[str, Any] = {
    "tokens": [1, 2, 3],
    "target_tokens": [2, 3, 4],
    "weights": [0.5, -1.0, 0.0],
    "spans": [("", 0, 2), ("abc-1", 4, 1)],
}
BODY = request_of(
    [ENTRY, ENTRY], "ppo", model_id="m:train:0", seq_id=7, config={"clip_low_threshold": 0.9}
)


def test_a_request_is_read_exactly() -> None:
    request = wire.read_forward_backward(BODY)
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == (
        "m:train:0",
        7,
        "ppo",
        False,
    )
    assert request.config == {"clip_low_threshold": 0.9} and len(request.data) == 2
    datum = wire.read_datum(request.data[1], "datum 1")
    assert datum.tokens.tolist() == [1, 2, 3] and datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["weights"].tolist() == [0.5, -1.0, 0.0]
    assert datum.spans == (wire.Span("", 0, 2), wire.Span("abc-1", 4, 1))


def statements(file: Any) -> Iterator[str]:
    """Yield the lines of a .proto without its comments."""
    yield from (f'syntax = "{file.syntax}";', f"package {file.package};")
    for message in file.message_type:
        entries, within = {entry.name: entry for entry in message.nested_type}, ""
        yield f"message {message.name} {{"
        for field in message.field:
            has_oneof = field.HasField("oneof_index")
            oneof = message.oneof_decl[field.oneof_index].name if has_oneof else ""
            if oneof != within:
                yield from ["}"] * bool(within) + [f"oneof {oneof} {{"] * has_oneof
                within = oneof
            kind = type_of(field)
            if kind in entries:
                kind = f"map<{', '.join(map(type_of, entries[kind].field))}>"
            elif field.label == FieldDescriptorProto.LABEL_REPEATED:
                kind = f"repeated {kind}"
            yield f"{kind} {field.name} = {field.number};"
        yield from ["}"] * (1 + bool(within))


def type_of(field: Any) -> str:
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return field.type_name.rpartition(".")[2] or scalar


def test_the_generated_code_is_what_the_proto_says() -> None:
    file = FileDescriptorProto()
    wire_pb2.DESCRIPTOR.CopyToProto(file)
    lines = map(str.strip, Path(wire.__file__).with_suffix(".proto").read_text().splitlines())
    expected = [line for line in lines if line and not line.startswith("//")]
    assert list(statements(file)) == expected, "run scripts/generate_tinker_proto.py"


def test_bytes_on_the_wire_are_protobufs() -> None:
    """Field 1 (model_id) and 6 (forward_only) as bytes worked out by hand: tag = number · 8 +
    type."""
    request = wire.read_forward_backward(b"\x0a\x01m" + b"\x10\x03" + b"\x22\x03dro" + b"\x30\x01")
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == (
        "m",
        3,
        "dro",
        True,
    )


def sparse(values: Any, rows: Any, columns: Any, shape: Any) -> Any:
    tensor = wire_pb2.Tensor()
    tensor.dtype = wire.FLOAT32
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.array(values, "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array(rows, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    return tensor


def test_sparse_tensors_are_zero_elsewhere() -> None:
    array = wire.read_tensor(sparse([1.0, 2.0, 3.0], [0, 2, 2, 3], [0, 2, 1], [3, 4]), "weights")
    assert array.tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 0]]


@pytest.mark.parametrize(
    "tensor",
    [
        sparse([1.0], [0, 2], [0], [1, 4]),
        sparse([1.0], [0, 1], [4], [1, 4]),
        sparse([1.0], [0, 1], [0], [1, 1 << 40]),
        sparse([1.0, 1.0], [0, 2, 1, 2], [0, 0], [3, 2]),
        sparse([1.0], [1, 1], [0], [1, 1]),
    ],
)
def test_sparse_indices_that_do_not_fit_are_refused(tensor: Any) -> None:
    with pytest.raises(RequestError, match="sparse indices do not fit"):
        wire.read_tensor(tensor, "weights")


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    tensor = wire_pb2.Tensor()
    tensor.dtype, tensor.dense = wire.BFLOAT16, np.array([0x3FC0, 0xC000], "<u2").tobytes()
    assert wire.read_tensor(tensor, "x").tolist() == [1.5, -2.0]


def test_an_output_keeps_shapes_apart() -> None:
    """Records are rectangular behind the first dimension: [2], [3] together, then [2, 2]."""
    arrays = [
        np.array([1, 2], np.float32),
        np.array([3, 4, 5], np.float32),
        np.ones((2, 2), np.float32),
    ]
    output = wire_pb2.ForwardBackwardOutput()
    output.ParseFromString(wire.write_output(arrays, {"loss:sum": 2.5}))
    first, second = output.loss_fn_outputs
    assert np.frombuffer(first.fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 20]
    assert np.frombuffer(first.fields["logprobs"].data, "<f4").tolist() == [1, 2, 3, 4, 5]
    assert (first.num_datums, second.num_datums) == (2, 1)
    assert list(second.fields["logprobs"].trailing_shape) == [2]
    assert dict(output.metrics) == {"loss:sum": 2.5}


def test_zstd_bodies_and_bombs() -> None:
    assert wire.decompressed(zstandard.compress(BODY), "zstd", 1 << 20) == BODY
    assert wire.decompressed(BODY, "", 1) == BODY
    for body, encoding, said in (
        (zstandard.compress(bytes(1 << 22)), "zstd", "larger than 1048576 bytes"),
        (b"nonsense", "zstd", "not valid zstd"),
        (zstandard.compress(BODY)[:-5], "zstd", "ends before its frame does"),
        (zstandard.compress(BODY) * 2, "zstd", "continues behind its frame"),
        (zstandard.compress(BODY) + bytes(5000), "zstd", "continues behind its frame"),
        (BODY, "br", "send zstd"),
    ):
        with pytest.raises(RequestError, match=said):
            wire.decompressed(body, encoding, 1 << 20)


def test_sparse_tensors_of_a_request_have_a_bound() -> None:
    """Five matrices of 4096 x 1024 are 20 million cells in a few bytes each."""
    request = wire_pb2.ForwardBackwardRequest()
    request.loss_fn = "cross_entropy"
    for _ in range(5):
        datum = request.data.add()
        datum.loss_fn_inputs["weights"].CopyFrom(sparse([], [0] * 4097, [], [4096, 1024]))
    with pytest.raises(RequestError, match=r"20971520.*16777216"):
        read_batch(wire.read_forward_backward(request.SerializeToString()), DatumLimits(64, 320))


def test_a_request_is_known_by_its_first_bytes() -> None:
    assert wire.leading_number(BODY[:20]) == ("m:train:0", 7)
    assert wire.leading_number(request_of([], "ppo", model_id="m", seq_id=70_000)) == ("m", 70_000)
    for body in (b"", b"\x0a", b"\x0a\x05m", request_of([ENTRY], "ppo"), b"\x0a\x01m\x10\xff\xff"):
        assert wire.leading_number(body) is None


def test_no_body_is_more_than_refused() -> None:
    """2,000 bodies with bytes changed, cut or repeated (10,000 over HTTP:
    scripts/tinker/fuzz.py)."""
    rng, read = random.Random(3), 0
    for _ in range(2000):
        body = bytearray(BODY)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(body))
            kind = rng.randrange(3)
            if kind == 0:
                body[at] = rng.randrange(256)
            elif kind == 1:
                del body[at : at + rng.randint(1, 9)]
            else:
                body[at:at] = body[at : at + rng.randint(1, 9)]
        try:
            read_batch(wire.read_forward_backward(bytes(body)), DatumLimits(64, 320))
        except RequestError:
            continue
        read += 1
    assert read < 2000
