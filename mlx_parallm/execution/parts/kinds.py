"""The kinds of parts of messages beside text, a line each, and what is asked of them. No other file
tells them apart: what a model makes of one is its reader's (`execution/prompt_images.py`)."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlx_parallm.execution.parts.images import IMAGE
from mlx_parallm.execution.parts.kind import PartKind

KINDS: tuple[PartKind, ...] = (IMAGE,)

Shown = Collection[str]
"""Names of kinds: those that a model reads."""


def all_kinds() -> Shown:
    return [kind.name for kind in KINDS]


def source_fields() -> list[str]:
    """Return the fields of parts that may hold a source."""
    return [name for kind in KINDS for name in kind.fields]


def written_types() -> list[str]:
    """Return the types of parts, a kind each."""
    return [kind.types[0] for kind in KINDS]


def row_columns() -> list[str]:
    return [name for kind in KINDS for name in kind.columns]


def kind_of(part: Any, shown: Shown | None = None) -> PartKind | None:
    """Return the kind of a part as clients, rows and logs write it; None: it is a text, unknown,
    or of a kind that is not `shown`; None there means all."""
    written = part.get("type") if isinstance(part, Mapping) else None
    kind = next((kind for kind in KINDS if written in kind.types), None)
    return kind if kind is not None and (shown is None or kind.name in shown) else None


def kind_of_row(row: Mapping[str, Any]) -> PartKind | None:
    """Return the first kind of which a row has a column."""
    held = (kind for kind in KINDS if any(row.get(name) is not None for name in kind.columns))
    return next(held, None)


def made_by(call: str, result: Any) -> list[dict[str, Any]] | None:
    """Return the result of a call of the Responses API as a content of parts; None: it is none."""
    return next(([kind.part(result)] for kind in KINDS if call in kind.calls), None)


def mark_of(part: Mapping[str, Any]) -> str:
    """Return the word for a part that is no text, in a text for people."""
    kind = kind_of(part)
    return str(part.get("type", "part")) if kind is None else kind.name


def unread_in(prompt: str | Iterable[Mapping[str, Any]], shown: Shown) -> str:
    """Name the first kind in a prompt of `read_messages` that is not `shown`; "": all are."""
    if isinstance(prompt, str):
        return ""
    contents = (message.get("content") for message in prompt)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    unread = (kind.plural for part in parts if (kind := kind_of(part)) and kind.name not in shown)
    return next(unread, "")
