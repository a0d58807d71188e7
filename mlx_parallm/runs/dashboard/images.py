"""Images of rollouts, small enough for the page."""

import base64
import io
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from mlx_parallm.config.server import cache_directory
from mlx_parallm.environments.row_images import IMAGES
from mlx_parallm.execution.prompt_images import stored_digest
from mlx_parallm.system.packages import is_installed

THUMBNAIL_SIDE = 192  # pixels at most
MOST_THUMBNAILS = 32  # in one response
MOST_PIXELS = 40_000_000
KEPT_THUMBNAILS = 256
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def thumbnails(rollouts: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return name → data URL of the rollouts' first images, without those that cannot be shown. The
    page's own requests carry a key, which an address of an image could not."""
    if not is_installed("PIL"):
        return {}
    names = (name for each in rollouts for name in each["images"])
    shown = ((name, _thumbnail(name)) for name in [*dict.fromkeys(names)][:MOST_THUMBNAILS])
    return {name: url for name, url in shown if url}


@lru_cache(KEPT_THUMBNAILS)
def _thumbnail(name: str) -> str:
    """Return "" for an image that is gone, too large, or damaged: the page says its name."""
    from PIL import Image

    try:
        digest = stored_digest(name)
        with Image.open(cache_directory(IMAGES) / digest, formats=IMAGE_FORMATS) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                return ""
            picture.draft("RGB", (THUMBNAIL_SIDE, THUMBNAIL_SIDE))
            small = picture.convert("RGB")
        small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        file = io.BytesIO()
        small.save(file, "PNG")
    except (OSError, ValueError, SyntaxError, ArithmeticError, Image.DecompressionBombError):
        return ""
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
