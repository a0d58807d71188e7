"""Checks values against JSON schemas that come from outside: of a client, a tool, a configuration.

The checker is compiled (`jsonschema-rs`): its regular expressions backtrack within a bound, and a
`$ref` to another document is refused, never fetched.
"""

import json
from functools import lru_cache
from typing import Any

import jsonschema_rs

BACKTRACKS = 100_000  # of one regular expression on one text
# Drafts in which a schema without `$schema` is read: the newest in which it is one (`items` as a
# list is Draft 7's, `exclusiveMinimum: true` Draft 4's).
_DRAFTS: tuple[Any, ...] = (None, jsonschema_rs.Draft7Validator, jsonschema_rs.Draft4Validator)


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
    try:
        first = next(iter(check.iter_errors(value)), None)
    except ValueError as error:  # nested deeper than the library goes, or no UTF-8
        return f"{what} cannot be checked: {error}"
    if first is None:
        return None
    place = "".join(f"/{step}" for step in first.instance_path)
    return f"{place or what}: {first.message}"
