"""How many messages a serialized ForwardBackwardRequest holds, counted before protobuf makes an
object of each.

An empty datum is two bytes on the wire and 250 in memory. The scan goes through the tags of the
messages that hold repeated fields, and passes over everything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_parallm.errors import RequestError

CHUNK_DATUMS = 16_384  # limit of a request, as clients are told
MOST_FIELDS = 1 << 20  # tags of one request: each message has one, each number, each text
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True)
class WireFields:
    """A message. `most`: how often a field may come, and its name; `inner`: fields that are
    scanned too; `packed`: the field of packed numbers, whose bytes count."""

    most: Mapping[int, tuple[int, str]]
    inner: Mapping[int, "WireFields"] = field(default_factory=dict)
    packed: int | None = None


ONCE = 1
_TENSOR = WireFields({4: (32, "shape")}, packed=4)  # bytes of two or three numbers
_INPUT = WireFields({1: (ONCE, "key"), 2: (ONCE, "value")}, {2: _TENSOR})
_DATUM = WireFields(
    {
        1: (4096, "model_input"),
        2: (64, "loss_fn_inputs"),
        3: (65_536, "model_input_spans"),
        4: (65_536, "loss_fn_input_spans"),
    },
    {2: _INPUT},
)
REQUEST = WireFields(
    {3: (CHUNK_DATUMS, "data"), 5: (64, "loss_fn_config"), 7: (64, "loss_fn_config_v2")},
    {3: _DATUM},
)


class _NotProtobufError(ValueError):
    pass


class _Scan:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self._left = MOST_FIELDS

    def message(self, at: int, end: int, fields: WireFields) -> None:
        """Raises RequestError: too many of a field; _NotProtobufError."""
        counts = dict.fromkeys(fields.most, 0)
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise RequestError(
                    f"the request holds more than {MOST_FIELDS} protobuf fields: send fewer datums"
                )
            tag, at = self._varint(at, end)
            number, kind = tag >> 3, tag & 7
            start, after = self._value(kind, at, end)
            if after > end:
                raise _NotProtobufError
            if number in counts:
                counts[number] += after - start if number == fields.packed and kind == LENGTH else 1
                _check(fields, number, counts[number])
                if kind == LENGTH and (inner := fields.inner.get(number)) is not None:
                    self.message(start, after, inner)
            at = after

    def _value(self, kind: int, at: int, end: int) -> tuple[int, int]:
        """Return the begin and end of a field's value."""
        if kind == LENGTH:
            size, at = self._varint(at, end)
            return at, at + size
        if kind == VARINT:
            return at, self._varint(at, end)[1]
        if kind in _FIXED:
            return at, at + _FIXED[kind]
        raise _NotProtobufError  # a group, which no client sends

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        if at < end and (first := self._body[at]) < 128:
            return first, at + 1
        value = shift = 0
        for position in range(at, min(at + 10, end)):
            byte = self._body[position]
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position + 1
            shift += 7
        raise _NotProtobufError


def _check(fields: WireFields, number: int, count: int) -> None:
    """Raises RequestError: a message has that field too often."""
    most, name = fields.most[number]
    if count > most:
        unit = "bytes of" if number == fields.packed else "entries of"
        advice = (
            ": send the datums in several requests" if fields is REQUEST and name == "data" else ""
        )
        raise RequestError(
            f"a message of the request holds more than {most} {unit} {name!r}{advice}"
        )


def check_counts(body: bytes) -> bool:
    """Whether the body has the form of protobuf. Raises RequestError: more messages than a
    request may hold."""
    try:
        _Scan(body).message(0, len(body), REQUEST)
    except _NotProtobufError:
        return False
    return True
