"""A kind of part of a message's content, beside text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PartKind:
    """
    Attributes:
        name: type of its parts in the one form (`execution/chat_messages.py`), and of Anthropic's
            blocks; also the field that holds the source of a part that is made here.
        plural: for errors.
        types: of its parts, as clients, rows and logs write them; the first is OpenAI's.
        fields: of a part that may hold its source.
        source: (part, its place) → its source. Raises RequestError: it has none, or several.
        columns: of rows.
        calls: types of items of the Responses API whose result is such a part.
    """

    name: str
    plural: str
    types: tuple[str, ...]
    fields: tuple[str, ...]
    source: Callable[[Mapping[str, Any], str], Any]
    columns: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    def part(self, source: Any) -> dict[str, Any]:
        """Return a part in the one form."""
        return {"type": self.name, self.name: source}
