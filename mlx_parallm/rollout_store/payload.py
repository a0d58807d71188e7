"""How a `RolloutGroup` lies in the database: packed columns behind a JSON header, compressed;
nothing is rounded.

`store.py` is the only user. Layout before zlib: 4 bytes header length (little-endian) · header
(JSON) · columns. The header holds everything that is not per token, and for each column its `array`
type code and length. Columns come in a fixed order: for each rollout tokens, mask, logprobs (when
there are any), policy_versions, processed_logprobs and forced (when there are any), what travels
with them (companions.py, in its order), then the same of its earlier segments; then the advantages,
row by row. Before all of them: what companions share in a group. Log-probabilities are float32
values in Python floats: a column whose values survive float32 is stored in 4 bytes a token, any
other in 8. All platforms of MLX are little-endian.
"""

import dataclasses
import json
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, cast

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.companions import COMPANIONS
from mlx_parallm.types import Rollout, RolloutGroup

_LENGTH_BYTES = 4
MAX_REJECT_BYTES = 1 << 20  # compressed; a larger reject keeps its reason only
MAX_REJECT_VALUES = 1 << 20  # numbers, or characters of a text
# tokens shrink to a quarter at any level; the trainer's cores have better things to do
_COMPRESSION_LEVEL = 1


def encode_group(group: RolloutGroup) -> bytes:
    """Packs a group. `decode_group` gives it back equal, each float to the last bit.

    Raises RolloutRejectedError when `metadata`, `scores` or `extra` hold something that JSON does
    not know, or an integer does not fit 64 bits.
    """
    columns, shared, header = _ColumnWriter(), [], dict[str, Any]()
    for companion in COMPANIONS:
        entries, blocks, context = companion.pack_group(group)
        header |= entries
        shared.append(context)
        for block in blocks:
            columns.bytes(block)
    for rollout in group.rollouts:
        for segment in (rollout, *rollout.earlier):
            columns.segment(segment, shared)
    per_token = bool(group.advantages) and isinstance(
        cast(tuple[Any, ...], group.advantages)[0], tuple
    )
    if per_token:
        for row in cast(tuple[tuple[float, ...], ...], group.advantages):
            columns.floats(row)
    header |= {
        "group_id": group.group_id,
        "environment": group.environment,
        "index": group.index,
        "metadata": dict(group.metadata),
        "advantages": len(group.advantages)
        if group.advantages is not None and per_token
        else group.advantages,
        "rollouts": [_rollout_header(rollout, shared) for rollout in group.rollouts],
        "columns": columns.description,
    }
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise RolloutRejectedError(f"group {group.group_id} cannot be stored: {error}") from error
    return zlib.compress(
        len(text).to_bytes(_LENGTH_BYTES, "little") + text + columns.data, _COMPRESSION_LEVEL
    )


def decode_group(payload: bytes) -> RolloutGroup:
    """The group that `encode_group` packed. Raises ValueError, KeyError or zlib.error when the
    bytes are damaged."""
    raw = zlib.decompress(payload)
    start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    header = json.loads(raw[_LENGTH_BYTES:start])
    columns = _ColumnReader(memoryview(raw)[start:], header["columns"])
    shared = [each.unpack_group(header, columns.next_bytes) for each in COMPANIONS]
    rollouts = tuple(_rollout(entry, columns, shared) for entry in header["rollouts"])
    advantages = header["advantages"]
    if isinstance(advantages, int):
        advantages = tuple(columns.next() for _ in range(advantages))
    elif advantages is not None:
        advantages = tuple(advantages)
    return RolloutGroup(
        group_id=header["group_id"],
        environment=header["environment"],
        rollouts=rollouts,
        advantages=advantages,
        index=header["index"],
        metadata=header["metadata"],
    )


def encode_reject(payload: Any) -> bytes | None:
    """Returns JSON values, a RolloutGroup, or anything with a repr as compressed JSON; None:
    large or deep."""
    if _is_large(payload):
        return None
    try:
        packed = zlib.compress(json.dumps(payload, default=_as_json).encode(), _COMPRESSION_LEVEL)
    except RecursionError:
        return None
    return packed if len(packed) <= MAX_REJECT_BYTES else None


def _is_large(payload: Any) -> bool:
    """Counts before anything is written as text: millions of numbers would hold up every other
    thread."""
    values, unseen = 0, [payload] if isinstance(payload, str | list | dict) else []
    while unseen:
        value = unseen.pop()
        values += len(value)
        if values > MAX_REJECT_VALUES:
            return True
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        unseen += [entry for entry in inner if isinstance(entry, str | list | dict)]
    return False


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return repr(value)


def _rollout_header(rollout: Rollout, shared: Sequence[Any]) -> dict[str, Any]:
    header: dict[str, Any] = {
        "temperature": rollout.temperature,
        "scores": dict(rollout.scores),
        "stop_reason": rollout.stop_reason,
        "error": rollout.error,
        "zero_advantage": rollout.zero_advantage,
        "processed": rollout.processed_logprobs is not None,
    }
    if rollout.forced is not None:
        header["forced"] = True
    if rollout.logprobs is None:
        header["logprobs"] = False
    for companion, context in zip(COMPANIONS, shared, strict=True):
        header |= companion.pack(rollout, context)[0]
    if rollout.turn_rewards:
        header["turn_rewards"] = list(rollout.turn_rewards)
    if rollout.turn_lengths:
        header["turn_lengths"] = list(rollout.turn_lengths)
    if rollout.extra:
        header["extra"] = dict(rollout.extra)
    if rollout.earlier:
        header["earlier"] = [_rollout_header(segment, shared) for segment in rollout.earlier]
    return header


def _rollout(entry: dict[str, Any], columns: "_ColumnReader", shared: Sequence[Any]) -> Rollout:
    fields = dict[str, Any](
        tokens=columns.next(),
        mask=columns.next(),
        logprobs=columns.next() if entry.get("logprobs", True) else None,
        policy_versions=columns.next(),
        processed_logprobs=columns.next() if entry["processed"] else None,
        forced=columns.next() if entry.get("forced") else None,
    )
    for companion, context in zip(COMPANIONS, shared, strict=True):
        fields |= companion.unpack(entry, context, columns.next_bytes)
    return Rollout(
        **fields,
        temperature=entry["temperature"],
        scores=entry["scores"],
        stop_reason=entry["stop_reason"],
        error=entry["error"],
        zero_advantage=entry["zero_advantage"],
        earlier=tuple(_rollout(segment, columns, shared) for segment in entry.get("earlier", ())),
        turn_rewards=tuple(entry.get("turn_rewards", ())),
        turn_lengths=tuple(entry.get("turn_lengths", ())),
        extra=entry.get("extra", {}),
    )


class _ColumnWriter:
    def __init__(self) -> None:
        self.data = bytearray()
        self.description: list[tuple[str, int]] = []

    def segment(self, segment: Rollout, shared: Sequence[Any]) -> None:
        self.integers(segment.tokens)
        self.integers(segment.mask)
        if segment.logprobs is not None:
            self.floats(segment.logprobs)
        self.integers(segment.policy_versions)
        if segment.processed_logprobs is not None:
            self.floats(segment.processed_logprobs)
        if segment.forced is not None:
            self.integers(segment.forced)
        for companion, context in zip(COMPANIONS, shared, strict=True):
            for block in companion.pack(segment, context)[1]:
                self.bytes(block)

    def integers(self, values: Sequence[int]) -> None:
        for code in "biq":
            try:
                self._append(array(code, values))
            except OverflowError:
                continue
            return
        raise RolloutRejectedError("a token id, mask or policy version does not fit 64 bits")

    def floats(self, values: Sequence[float]) -> None:
        single = array("f", values)
        self._append(single if single.tolist() == list(values) else array("d", values))

    def bytes(self, values: bytes) -> None:
        self._append(array("B", values))

    def _append(self, column: array) -> None:
        self.data += column.tobytes()
        self.description.append((column.typecode, len(column)))


class _ColumnReader:
    def __init__(self, data: memoryview, description: list[tuple[str, int]]) -> None:
        self._data = data
        self._description = iter(description)
        self._position = 0

    def next(self) -> tuple[Any, ...]:
        return tuple(self._column())

    def next_bytes(self) -> bytes:
        return self._column().tobytes()

    def _column(self) -> array:
        code, length = next(self._description)
        column = array(code)
        size = length * column.itemsize
        column.frombytes(self._data[self._position : self._position + size])
        if len(column) != length:
            raise ValueError("the payload is cut short")
        self._position += size
        return column
