"""`Accepted`: another program's names that mean nothing here, and what becomes of them. A TOML file
beside the code has them:

    [[harmless]]        passes with any value: `why` it changes nothing
    [[warned]]          passes with a warning, unless it is off: `why` says what happens instead
    [[refused]]         is refused, unless it is empty or one of `off`: `why` says what to use (or
                        nothing, where nothing else does it)
    [[refused_value]]   the same of `values` of one `argument`

Each entry has `names`, or `argument`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import tomli


@dataclass(frozen=True)
class Accepted:
    """Names and their reasons. `refused`: name → (the values that switch it off, why).
    `refused_values`: (argument, value) → why."""

    harmless: Mapping[str, str]
    warned: Mapping[str, str]
    refused: Mapping[str, tuple[tuple[Any, ...], str]]
    refused_values: Mapping[tuple[str, str], str]

    def __or__(self, more: "Accepted") -> "Accepted":
        return Accepted(
            {**self.harmless, **more.harmless},
            {**self.warned, **more.warned},
            {**self.refused, **more.refused},
            {**self.refused_values, **more.refused_values},
        )

    @classmethod
    def read(cls, package: str, name: str) -> "Accepted":
        """Read a file of a package."""
        table = tomli.loads(files(package).joinpath(name).read_text(encoding="utf-8"))

        def reasons(kind: str) -> dict[str, str]:
            return {name: entry["why"] for entry in table.get(kind, ()) for name in entry["names"]}

        return cls(
            reasons("harmless"),
            reasons("warned"),
            {
                name: (tuple(entry.get("off", ())), entry.get("why", ""))
                for entry in table.get("refused", ())
                for name in entry["names"]
            },
            {
                (entry["argument"], value): entry["why"]
                for entry in table.get("refused_value", ())
                for value in entry["values"]
            },
        )
