"""Files of every kind that a client may send: right colours, upright, or refused with a reason;
never another exception, and never decoded beyond the limit."""

import io
import random
import struct
import warnings
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from mlx_parallm.systems.vision.config import VisionConfig
from mlx_parallm.systems.vision.pictures import PictureError, open_picture
from mlx_parallm.systems.vision.reader import PictureReader
from mlx_parallm.types import PromptImage
from tests.vision.drawn import file_of, noise

RED, WHITE = (255, 0, 0), (255, 255, 255)
MOST = 1_000_000


def colours(data: bytes) -> set[tuple[int, ...]]:
    pixels = np.array(open_picture(data, MOST))
    return {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"", extra: bytes = b"") -> bytes:
    """A PNG of grey levels that says this size, whatever it holds."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [
        chunk(b"IHDR", header),
        extra,
        chunk(b"IDAT", zlib.compress(data)),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_every_mode_becomes_its_colours() -> None:
    red = Image.new("RGB", (4, 4), RED)
    for mode in ("RGB", "P", "RGBA"):
        assert colours(file_of(red.convert(mode))) == {RED}
    assert colours(file_of(red.convert("P"), "GIF")) == {RED}
    assert colours(file_of(red, "WEBP", lossless=True)) == {RED}
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert colours(file_of(clear)) == {WHITE}, "transparent is white"
    assert colours(file_of(Image.new("1", (4, 4), 1))) == {WHITE}
    assert colours(file_of(Image.new("L", (4, 4), 7))) == {(7, 7, 7)}
    deep = Image.fromarray(np.full((4, 4), 0x8123, np.uint16))
    assert colours(file_of(deep)) == {(0x81, 0x81, 0x81)}, "16 bits keep their upper half"
    [print_colour] = colours(file_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert print_colour[0] > 200 and max(print_colour[1:]) < 60


def test_a_photo_is_turned_upright() -> None:
    photo = Image.new("RGB", (20, 10), "blue")
    exif = photo.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert open_picture(file_of(photo, "JPEG", exif=exif), MOST).size == (10, 20)


MOVING = file_of(noise(8, 8, 1), "GIF", save_all=True, append_images=[noise(8, 8, 2)])
REFUSED = {
    "pixels": (png(2000, 1000), r"2000 × 1000 pixels, and at most 1000000"),
    "100 megapixels": (png(10_000, 10_000), r"pixels"),
    "a bomb": (png(60_000, 60_000), r"pixels"),
    "none": (png(0, 5), r"damaged|no pixels|not an image"),
    "a line": (png(4000, 2), r"at most 200 times as long"),
    "moving": (MOVING, r"it moves \(2 frames\)"),
    "a bomb of text": (
        png(2, 2, b"\0" * 6, chunk(b"zTXt", b"k\0\0" + zlib.compress(b"x" * (1 << 27)))),
        r"damaged",
    ),
    "short": (png(100, 100, b"\0" * 50), r"damaged"),
    "BMP": (file_of(noise(4, 4), "BMP"), r"not an image that is read here"),
    "TIFF": (file_of(noise(4, 4), "TIFF"), r"not an image that is read here"),
    "SVG": (b" <?xml version='1.0'?><svg/>", r"SVG is not read"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", r"not an image that is read here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_or_too_large_is_refused(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(PictureError, match=reason):
        open_picture(data, MOST)


def hostile(count: int) -> Iterator[bytes]:
    """Files that were cut, changed, or put together from two."""
    chance = random.Random(0)
    good = [
        file_of(noise(40, 30), kind, **options)
        for kind, options in (
            ("PNG", {}),
            ("JPEG", {}),
            ("JPEG", {"progressive": True}),
            ("WEBP", {}),
            ("GIF", {}),
        )
    ]
    for _ in range(count):
        data = bytearray(chance.choice(good))
        match chance.randrange(4):
            case 0:
                del data[chance.randrange(1, len(data)) :]
            case 1:
                for _ in range(chance.randrange(1, 30)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
            case 2:
                start = chance.randrange(len(data))
                data[start : start + chance.randrange(64)] = chance.randbytes(chance.randrange(64))
            case 3:
                data[: chance.randrange(30)] = chance.choice(good)[: chance.randrange(30)]
        yield bytes(data)


def test_damaged_files_are_read_or_refused_and_nothing_else() -> None:
    read = refused = 0
    for data in hostile(500):
        try:
            picture = open_picture(data, MOST)
        except PictureError:
            refused += 1
        else:
            read += 1
            assert picture.mode == "RGB" and picture.width * picture.height <= MOST
    assert read > 20 and refused > 200, (read, refused)


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    """Two of 0.9 MB held every other picture for minutes."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    assert open_picture(data, 1 << 20).size == (64, 64)
    last = data.rindex(b"\xff\xda")
    many = data[:last] + data[last:-2] * 200 + data[-2:]
    with pytest.raises(PictureError, match=r"2\d\d scans"):
        open_picture(many, 1 << 20)


def test_a_jpeg_of_much_exif_is_refused_before_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20 MB of small parts were joined for 50 s."""
    data, part = file_of(noise(8, 8), "JPEG"), b"\xff\xe1\x00\x0aExif\0\0ab"
    assert open_picture(data[:2] + part * 100 + data[2:], MOST).size == (8, 8)
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(PictureError, match="101 parts of EXIF: at most 100"):
        open_picture(data[:2] + part * 101 + data[2:], MOST)


def test_a_pictures_faults_write_no_lines_of_log() -> None:
    """A file of 60 kB had Pillow warn five thousand times."""
    tags = b"".join(struct.pack("<HHII", tag, 2, 60_000, 8) for tag in range(50))
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 50) + tags
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "JPEG", exif=exif)

    class Processor:
        placeholder, token_id = "", 0

        def patches(self) -> tuple[int, int, int, int]:
            return 1, 1, 1, 1

        def process(self, picture: Image.Image, *, low: bool) -> PromptImage:
            return PromptImage("", "", 0)

    with warnings.catch_warnings(record=True) as written:
        warnings.simplefilter("always")
        open_picture(file.getvalue(), MOST)
        assert written, "Pillow says nothing of this file any more"
        written.clear()
        reader = PictureReader(VisionConfig(), Processor())
        reader.image_of(file.getvalue())
        reader.close()
    assert not written
