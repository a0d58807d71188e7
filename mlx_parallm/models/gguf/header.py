"""The header of a GGUF file, checked before a reader believes it: counts within the file's size,
and tensors side by side in its data. No MLX.

    magic, version u32, tensors u64, keys u64
    a key      name, type u32, value; an array: type u32, count u64, values
    a tensor   name, dimensions u32, each u64, type u32, offset u64 in the data
    data       from the next multiple of general.alignment on
"""

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mlx_parallm.errors import ModelError

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type."""
STRING, ARRAY, UINT32 = 8, 9, 4
ALIGNMENT = "general.alignment"
SCORES = "tokenizer.ggml.scores"
MOST_ENTRIES = 20_000_000
"""Keys, tensors and entries of arrays together: each is read by itself."""
LONGEST_NAME = 1000
DEEPEST, MOST_DIMENSIONS = 4, 4


def check_header(path: Path) -> None:
    """Raises ValueError: the header cannot be of a whole file, and why; OSError."""
    with path.open("rb") as file:
        _Header(file, path.stat().st_size).check()


def check_finite(path: Path, name: str, value: Any) -> None:
    """Raises ModelError: a number of a key is not finite."""
    values = value if isinstance(value, list) else [value]
    for each in values:
        # an unused token's score may be -inf
        if isinstance(each, float) and not math.isfinite(each) and (each != each or name != SCORES):
            raise ModelError(f"{path}: {name} holds {each}, which is not a number to compute with")


class _Header:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._left = MOST_ENTRIES
        self._alignment = 32

    def check(self) -> None:
        self._file.seek(8)
        tensors, keys = self._numbers("<QQ")
        self._count(keys, 13, "keys")
        names = set[str]()
        for _ in range(keys):
            name = self._key()
            if name in names:
                raise ValueError(f"the key {name} appears twice")
            names.add(name)
        self._count(tensors, 32, "tensors")
        places = sorted(self._tensor() for _ in range(tensors))
        data = -(-self._file.tell() // self._alignment) * self._alignment
        end, before = 0, ""
        for offset, size, name in places:
            if offset < end:
                raise ValueError(f"the tensors {before} and {name} overlap")
            end, before = offset + size, name
            if data + end > self._size:
                raise ValueError(
                    f"the tensor {name} ends at byte {data + end}, and the file at {self._size}"
                )

    def _key(self) -> str:
        name = self._name("a key's name")
        [kind] = self._numbers("<I")
        if name == ALIGNMENT and kind == UINT32:
            [self._alignment] = self._numbers("<I")
            if self._alignment < 8 or self._alignment & (self._alignment - 1):
                raise ValueError(f"{ALIGNMENT} = {self._alignment} is not a power of two from 8 on")
        else:
            self._skip(kind, name, 0)
        return name

    def _skip(self, kind: int, name: str, depth: int) -> None:
        if kind in SIZES:
            self._move(SIZES[kind], name)
        elif kind == STRING:
            self._text(name)
        elif kind == ARRAY and depth < DEEPEST:
            inner, count = self._numbers("<IQ")
            self._count(count, SIZES.get(inner, 8), name)
            if inner in SIZES:
                self._move(count * SIZES[inner], name)
                return
            for _ in range(count):
                self._skip(inner, name, depth + 1)
        else:
            raise ValueError(f"{name} has a value of the type {kind}, which is not known here")

    def _tensor(self) -> tuple[int, int, str]:
        """Return the tensor's offset, its bytes and its name."""
        name = self._name("a tensor's name")
        [dimensions] = self._numbers("<I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions")
        shape = self._numbers(f"<{dimensions}Q")
        kind, offset = self._numbers("<IQ")
        if kind not in set(GGMLQuantizationType):
            raise ValueError(f"the tensor {name} has the type {kind}, which is not known here")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape and shape[0] % block:
            raise ValueError(f"the tensor {name} has rows of {shape[0]}, not of blocks of {block}")
        if offset % self._alignment:
            raise ValueError(
                f"the tensor {name} lies at {offset}, no multiple of {ALIGNMENT}"
                f" = {self._alignment}"
            )
        return offset, math.prod(shape) // block * size, name

    def _count(self, number: int, each: int, what: str) -> None:
        """Raises ValueError: the rest of the file is too short for so many."""
        left = self._size - self._file.tell()
        if number * each > left or number > self._left:
            raise ValueError(f"{what}: {number} entries, with {left} bytes left in the file")
        self._left -= number

    def _name(self, what: str) -> str:
        [length] = self._numbers("<Q")
        if length > LONGEST_NAME:
            raise ValueError(f"{what} has {length} characters, and {LONGEST_NAME} are the most")
        name = self._file.read(length).decode(errors="replace")
        return name if name.isprintable() else ascii(name)

    def _text(self, what: str) -> None:
        [length] = self._numbers("<Q")
        if length > self._size - self._file.tell():
            raise ValueError(f"{what} has {length} characters, more than are left in the file")
        self._file.seek(length, 1)

    def _move(self, count: int, what: str) -> None:
        if count > self._size - self._file.tell():
            raise ValueError(f"{what} does not end within the file")
        self._file.seek(count, 1)

    def _numbers(self, form: str) -> tuple[int, ...]:
        size = struct.calcsize(form)
        content = self._file.read(size)
        if len(content) < size:
            raise ValueError("the file ends within its header")
        return struct.unpack(form, content)
