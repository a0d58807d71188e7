"""A GGUF file's header is checked before a reader believes it."""

import math
import os
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

from mlx_parallm.errors import ModelError
from mlx_parallm.models.gguf.from_gguf import GGUFFile, convert_gguf, model_config
from tests.export.llama import MODELS, checkpoint, write

F32, STRING, ARRAY, U32, FLOAT = 0, 8, 9, 4, 6


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = F32) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def file_of(
    *parts: bytes, tensors: tuple[bytes, ...] = (), data: int = 64, counts: Any = None
) -> bytes:
    numbers = counts or (len(tensors), len(parts))
    head = b"GGUF" + struct.pack("<IQQ", 3, *numbers) + b"".join((*parts, *tensors))
    return head + bytes(-len(head) % 32) + bytes(data)


WHOLE = file_of(ARCHITECTURE, tensors=(tensor("a", (8,), 0), tensor("b", (8,), 32)))
HUGE = 10**12
ATTACKS = {
    "array": (file_of(key("k", ARRAY, struct.pack("<IQ", U32, HUGE))), "k: 1000000000000 entries"),
    "texts": (file_of(key("k", ARRAY, struct.pack("<IQ", STRING, HUGE))), "k: 1000000000000"),
    "bytes": (file_of(key("k", ARRAY, struct.pack("<IQ", 0, 2**63)), data=64), "k: 92233720"),
    "nested": (
        file_of(key("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)),
        "k has a value of the type 9",
    ),
    "text": (file_of(key("k", STRING, struct.pack("<Q", 2**63))), "k has 92233720368547758"),
    "keys": (file_of(ARCHITECTURE, counts=(0, HUGE)), "keys: 1000000000000"),
    "tensors": (file_of(ARCHITECTURE, counts=(HUGE, 1)), "tensors: 1000000000000"),
    "overlap": (
        file_of(ARCHITECTURE, tensors=(tensor("a", (16,), 0), tensor("b", (8,), 32))),
        "a and b overlap",
    ),
    "outside": (file_of(ARCHITECTURE, tensors=(tensor("a", (8,), 64),)), "a ends at byte"),
    "wrapped": (
        file_of(ARCHITECTURE, tensors=(tensor("a", (8,), 2**64 - 32),)),
        "a ends at byte",
    ),
    "product": (
        file_of(ARCHITECTURE, tensors=(tensor("a", (2**32, 2**32, 2**32), 0),)),
        "a ends at byte",
    ),
    "unaligned": (file_of(ARCHITECTURE, tensors=(tensor("a", (8,), 4),)), "a lies at 4"),
    "alignment": (
        file_of(ARCHITECTURE, key("general.alignment", U32, struct.pack("<I", 0))),
        "general.alignment = 0",
    ),
    "type": (file_of(ARCHITECTURE, tensors=(tensor("a", (8,), 0, 99),)), "a has the type 99"),
    "rows": (file_of(ARCHITECTURE, tensors=(tensor("a", (8,), 0, 2),)), "a has rows of 8"),
    "dimensions": (file_of(ARCHITECTURE, tensors=(tensor("a", (1,) * 9, 0),)), "a has 9 dim"),
    "twice": (file_of(ARCHITECTURE, ARCHITECTURE), "appears twice"),
    "nan": (file_of(ARCHITECTURE, key("k", FLOAT, struct.pack("<f", math.nan))), "k holds nan"),
    "inf": (file_of(ARCHITECTURE, key("k", FLOAT, struct.pack("<f", -math.inf))), "k holds -inf"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_header_that_cannot_be_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, reason = ATTACKS[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(WHOLE)
    assert len(GGUFFile(file).tensors) == 2
    file.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        GGUFFile(file)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    write(checkpoint(place / "model", MODELS["llama"]), place / "model.gguf")
    return place / "model.gguf"


@pytest.mark.parametrize("layers", [2**31, 2**32 - 1])
def test_more_layers_than_tensors(real: Path, layers: int, tmp_path: Path) -> None:
    content = bytearray(real.read_bytes())
    place = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    content[place : place + 4] = struct.pack("<I", layers)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=f"block_count = {layers}"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_flipped_bytes_of_a_header_are_read_or_refused(real: Path, tmp_path: Path) -> None:
    """In bounded time and memory, with one line; how many: MLX_PARALLM_CASES."""
    content = real.read_bytes()
    end = int(gguf.GGUFReader(real).data_offset)
    numbers, file = random.Random(58), tmp_path / "model.gguf"
    refused = 0
    for _ in range(int(os.environ.get("MLX_PARALLM_CASES", "100"))):
        changed = bytearray(content)
        for _ in range(numbers.choice([1, 1, 2, 8])):
            changed[numbers.randrange(8, end)] = numbers.choice([0, 1, 127, 128, 255])
        file.write_bytes(changed)
        try:
            model_config(GGUFFile(file))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused
