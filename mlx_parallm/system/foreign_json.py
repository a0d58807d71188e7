"""JSON that came from outside: bounded before it is read; reading it cannot end the process.

Bytes become objects that take twenty times their room ("[[],[],…" is 3 bytes a list), and lists
inside one another are read by recursion.

Values are checked against JSON schemas by a compiled checker (`jsonschema-rs`): its regular
expressions backtrack within a bound, a `$ref` to another document is refused, never fetched, and
what would take too many steps is not checked (`schema_steps.py`).
"""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jsonschema_rs

from mlx_parallm.system.schema_steps import unbounded_check

MAX_CONTAINERS = 1 << 20
MAX_DEPTH = 256  # lists and objects inside one another: what reads them calls itself once a level
BACKTRACKS = 100_000  # of one regular expression on one text
# Drafts in which a schema without `$schema` is read: the newest in which it is one (`items` as a
# list is Draft 7's, `exclusiveMinimum: true` Draft 4's).
_DRAFTS: tuple[Any, ...] = (None, jsonschema_rs.Draft7Validator, jsonschema_rs.Draft4Validator)


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


@lru_cache(256)
def validator(source: str, *, formats: bool = True) -> Any:
    """Return a `jsonschema_rs` validator of a schema as JSON text. `formats`: whether `format` is
    checked. Raises ValueError: this is no JSON schema, or it refers to another document."""
    schema = json.loads(source)
    options = jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS)
    drafts = _DRAFTS[:1] if isinstance(schema, dict) and "$schema" in schema else _DRAFTS
    reason = ""
    for draft in drafts:
        make = jsonschema_rs.validator_for if draft is None else draft
        try:
            return make(schema, validate_formats=formats, pattern_options=options, offline=True)
        except ValueError as error:
            reason = reason or str(getattr(error, "message", error))
    raise ValueError(f"not a JSON schema: {reason}")


def fault(source: str, value: Any, *, what: str, formats: bool = True) -> str | None:
    """Return what is wrong with a value, by the first place in it; None: it follows the schema, a
    JSON text. `what`: the value's name. Raises ValueError: as `validator`."""
    check = validator(source, formats=formats)
    if (reason := unbounded_check(source, value)) is not None:
        return f"{what} cannot be checked: {reason}"
    try:
        first = next(iter(check.iter_errors(value)), None)
    except ValueError as error:  # nested deeper than the library goes, or no UTF-8
        return f"{what} cannot be checked: {error}"
    if first is None:
        return None
    place = "".join(f"/{step}" for step in first.instance_path)
    return f"{place or what}: {first.message}"
