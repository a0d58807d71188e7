"""Images as parts of messages: how clients, rows and logs write them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.parts.kind import PartKind

FIELDS = ("image_url", "image", "url")
_SOURCES = (*FIELDS, "source")
_IGNORED = frozenset({"type", "cache_control", "prompt_cache_breakpoint", "place"})


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a client wrote it: a URL, or any value that a reader takes. `where` is the
    place that errors name."""

    where: str
    value: Any
    detail: str | None = None  # OpenAI's: "low", "high", "auto", "original"


def _source(part: Mapping[str, Any], where: str) -> ImageSource:
    written = {key: value for key, value in part.items() if value is not None}
    if "file_id" in written:
        raise RequestError(
            f"{where}.file_id: this server keeps no files: send the image as a data: URL",
            param=f"{where}.file_id",
            code="unsupported_content",
        )
    keys = [key for key in _SOURCES if key in written]
    unknown = sorted(written.keys() - {*_SOURCES, "detail"} - _IGNORED)
    if len(keys) != 1 or unknown:
        reason = (
            f"has no field {unknown[0]!r}" if unknown else f"needs one of {', '.join(_SOURCES)}"
        )
        raise RequestError(f"{where}: an image {reason}", param=where)
    [key] = keys
    value, detail = written[key], written.get("detail")
    if isinstance(value, Mapping) and isinstance(value.get("url"), str):  # OpenAI's chat
        detail = value.get("detail", detail)
        value = value["url"]
    if detail not in (None, "auto", "low", "high", "original"):
        raise RequestError(
            f"{where}.detail: expected auto, low, high or original, got {detail!r}",
            param=f"{where}.detail",
        )
    return ImageSource(where, value, detail)


IMAGE = PartKind(
    "image",
    "images",
    types=("image_url", "input_image", "image"),
    fields=FIELDS,
    source=_source,
    columns=("images", "image"),
    calls=("image_generation_call",),
)
