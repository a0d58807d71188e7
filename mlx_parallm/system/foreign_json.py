"""JSON that came from outside: bounded before it is read; reading it cannot end the process.

Bytes become objects that take twenty times their room ("[[],[],…" is 3 bytes a list), and lists
inside one another are read by recursion.
"""

import json
from collections.abc import Callable
from typing import Any

MAX_CONTAINERS = 1 << 20
MAX_DEPTH = 256  # lists and objects inside one another: what reads them calls itself once a level


class TooDeepError(ValueError):
    """Lists and objects lie too deeply inside one another."""

    def __init__(self) -> None:
        super().__init__(
            f"nested too deeply: at most {MAX_DEPTH} lists and objects in one another are read"
        )


class TooManyContainersError(ValueError):
    """There are so many lists and objects that they would take gigabytes."""


def read_json(
    text: bytes | str,
    *,
    most: int = MAX_CONTAINERS,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Args:
        most: lists and objects that it may hold.
        constant: reads NaN, Infinity and -Infinity; None: as Python's numbers.

    Raises ValueError: no UTF-8, no JSON; TooDeepError; TooManyContainersError. One line each.
    """
    check_containers(text, most)
    try:
        decoded = text if isinstance(text, str) else text.decode()
        value = json.loads(decoded, parse_constant=constant)
    except RecursionError:
        raise TooDeepError from None
    if _containers(text) > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise TooDeepError
    return value


def check_containers(text: bytes | str, most: int = MAX_CONTAINERS) -> None:
    """Raises TooManyContainersError: a text holds more than `most` lists and objects."""
    if len(text) > most and _containers(text) > most:
        raise TooManyContainersError(f"more than {most} lists and objects")


def deeper_than(value: Any, most: int) -> bool:
    """Whether more than `most` lists and objects lie inside one another."""
    level = [value]
    for _ in range(most + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return True


def _containers(text: bytes | str) -> int:
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")
