"""Bounds of the page's data: texts of a bounded length, numbers that JSON can hold."""

import math
from collections.abc import Mapping
from typing import Any


def cut(text: str | None, most: int) -> str | None:
    return (
        text if text is None or len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"
    )


def sendable(value: Any) -> Any:
    """Replace values that JSON and UTF-8 cannot hold: numbers that are not finite,
    halves of characters."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {str(key): sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [sendable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
