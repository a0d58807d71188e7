"""Pictures drawn on the spot, as files and as data URLs."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes | Image.Image, kind: str = "image/png") -> str:
    data = data if isinstance(data, bytes) else file_of(data)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
