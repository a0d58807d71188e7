"""Bytes of images that clients name by URLs: data, and http and file as far as [vision] allows."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from mlx_parallm.execution.prompt_images import data_url_bytes
from mlx_parallm.system.foreign_http import BeyondBoundsError, Bounds, async_client
from mlx_parallm.systems.vision.config import VisionConfig
from mlx_parallm.systems.vision.pictures import PictureError

_SHOWN = 60  # characters of a URL in an error


def inline_bytes(url: str, settings: VisionConfig) -> bytes:
    """Return what a data URL holds. Raises PictureError."""
    try:
        data = data_url_bytes(url, settings.max_image_bytes)
    except ValueError as error:
        raise PictureError(str(error)) from None
    return bounded(data, settings)


def file_bytes(url: str, settings: VisionConfig) -> bytes:
    """Return a file's bytes. Raises PictureError: it lies in no allowed directory, or is not
    there."""
    parts = urlsplit(url)
    if not settings.directories:
        raise PictureError("this server reads no files: send a data: URL (vision.directories)")
    path = Path(os.path.realpath(unquote(parts.path)))
    allowed = [Path(os.path.realpath(directory)) for directory in settings.directories]
    inside = parts.netloc in ("", "localhost") and any(map(path.is_relative_to, allowed))
    if not inside or not path.is_file():
        raise PictureError("there is no such file in the directories of vision.directories")
    with path.open("rb") as file:
        return bounded(file.read(settings.max_image_bytes + 1), settings)


async def fetched_bytes(url: str, settings: VisionConfig) -> bytes:
    """Return what a host of `vision.hosts` answers. Redirects are not followed. Raises
    PictureError."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        raise PictureError("its URL cannot be read") from None
    if host not in settings.hosts:
        raise PictureError(
            f"this server fetches no image from {host[:_SHOWN]!r}: send a data: URL (vision.hosts)"
        )
    try:
        async with (
            async_client(
                Bounds(body=settings.max_image_bytes + 1, seconds=settings.timeout_s),
                timeout=settings.timeout_s,
                trust_env=False,
                return_redirects=True,
            ) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise PictureError(f"{host} answered {answer.status_code}")
            data: bytes = await answer.aread()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = type(error).__name__  # no more: the client learns nothing of the network here
        if isinstance(error.__cause__, BeyondBoundsError):
            reason = f"{error} (vision.max_image_bytes, vision.timeout_s)"
        raise PictureError(f"{host} gave no image: {reason}") from error
    return bounded(data, settings)


def bounded(data: bytes, settings: VisionConfig) -> bytes:
    """Return the bytes of an image. Raises PictureError: none, or too many."""
    if len(data) > settings.max_image_bytes:
        raise _too_large(len(data), settings)
    if not data:
        raise PictureError("it is empty")
    return data


def _too_large(size: int, settings: VisionConfig) -> PictureError:
    return PictureError(
        f"it has {size} bytes or more, and at most {settings.max_image_bytes} are read"
        " (vision.max_image_bytes)"
    )
