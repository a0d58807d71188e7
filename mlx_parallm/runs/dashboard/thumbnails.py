"""Small pictures of the images in prompts, as data URLs: the page's own requests carry a key, which
an address of an image could not. Pillow makes them, where it is installed."""

import base64
import io
from collections.abc import Iterable
from functools import lru_cache

from mlx_parallm.config.server import cache_directory
from mlx_parallm.environments.row_images import IMAGES
from mlx_parallm.execution.prompt_images import STORED
from mlx_parallm.system.packages import is_installed

SIDE = 192  # pixels at most
MOST = 32  # of one answer of the routes
MOST_PIXELS = 40_000_000
KEPT = 256
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def thumbnails(names: Iterable[str]) -> dict[str, str]:
    """Return name → data URL of the first images; those that cannot be shown are left out."""
    if not is_installed("PIL"):
        return {}
    shown = ((name, _thumbnail(name)) for name in [*dict.fromkeys(names)][:MOST])
    return {name: url for name, url in shown if url}


@lru_cache(KEPT)
def _thumbnail(name: str) -> str:
    """Return "" for an image that is gone, too large, or damaged: the page says its name."""
    from PIL import Image

    digest = name.removeprefix(STORED)
    if not digest.isalnum():
        return ""
    try:
        with Image.open(cache_directory(IMAGES) / digest, formats=FORMATS) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                return ""
            picture.draft("RGB", (SIDE, SIDE))
            small = picture.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        small.save(file, "PNG")
    except (OSError, ValueError, SyntaxError, ArithmeticError, Image.DecompressionBombError):
        return ""
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
