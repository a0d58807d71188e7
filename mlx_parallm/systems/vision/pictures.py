"""Bytes → a picture, bounded: nothing is decoded before its kind and size are known.

What is not a picture, too large, cut off, or moving is refused with a reason that a client can
read.
"""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_STRETCHED = 200  # times as long as wide
MOST_SCANS = 100
"""Of a progressive JPEG, which encoders write in about ten. Each one is decoded over the whole
picture, so a small file of many takes minutes."""
MOST_EXIF = 100
"""Parts of a JPEG's EXIF, each of at most 64 KB. They are joined one by one as it is opened."""
_SCAN = b"\xff\xda"  # in compressed data a byte 255 has 0 behind it
_EXIF = b"Exif\0\0"
_JPEG = b"\xff\xd8"
_SVG = (b"<svg", b"<?xml", b"<!doctype svg")
_DAMAGED = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    ArithmeticError,
    struct.error,
    zlib.error,
    MemoryError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""Pillow's readers raise any of these on a damaged file."""


class PictureError(ValueError):
    """A picture cannot be read; the message says why."""


def open_picture(data: bytes, max_pixels: int) -> Image.Image:
    """Return the picture in RGB, upright (EXIF's orientation), on white if it is transparent.
    Raises PictureError."""
    if data[:512].lstrip().lower().startswith(_SVG):
        raise PictureError(f"SVG is not read: expected {', '.join(FORMATS)}")
    if data.startswith(_JPEG) and (parts := data.count(_EXIF)) > MOST_EXIF:
        raise PictureError(f"it is a JPEG of {parts} parts of EXIF: at most {MOST_EXIF} are read")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            _check(picture, max_pixels)
            if picture.format == "JPEG" and (scans := data.count(_SCAN)) > MOST_SCANS:
                raise PictureError(f"it is a JPEG of {scans} scans: at most {MOST_SCANS} are read")
            picture.load()
            return as_rgb(picture)
    except PictureError:
        raise
    except UnidentifiedImageError:
        raise PictureError(f"it is not an image that is read here: {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise PictureError(f"it has more than {max_pixels} pixels (vision.max_pixels)") from None
    except _DAMAGED as error:
        raise PictureError(f"it is damaged: {error}") from error


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture of any mode in RGB. Raises PictureError: a mode that has no colours."""
    picture = ImageOps.exif_transpose(picture)
    if picture.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):  # grey levels of 16 bits
        levels = np.asarray(picture).astype(np.int64) >> 8
        picture = Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))
    if picture.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    if picture.mode not in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"):
        raise PictureError(f"its pixels are {picture.mode!r}, which is not a colour")
    return picture.convert("RGB")


def _check(picture: Any, max_pixels: int) -> None:
    """Raises PictureError: by what the file says of itself."""
    width, height = picture.size
    if width < 1 or height < 1:
        raise PictureError(f"it has no pixels ({width} × {height})")
    if width * height > max_pixels:
        raise PictureError(
            f"it has {width} × {height} pixels, and at most {max_pixels} are read"
            " (vision.max_pixels)"
        )
    if max(width, height) > MOST_STRETCHED * min(width, height):
        raise PictureError(
            f"it is {width} × {height}: at most {MOST_STRETCHED} times as long as wide"
        )
    if getattr(picture, "n_frames", 1) > 1:
        raise PictureError(f"it moves ({picture.n_frames} frames): send one frame")
