"""Hides secrets in log lines, saved configurations, and data for trackers. No MLX.

A secret is recognised by its value (the API key, environment variables named *_TOKEN, *_API_KEY, …), by its place
(`http://user:KEY@host`, `Bearer KEY`, `?token=KEY`), by its form (`hf_…`, `sk-…`), or by the name of its key.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "**********"
SHORTEST = 6  # characters of a value that is hidden wherever it occurs; a shorter one would blank out ordinary words
_NAMES = re.compile(
    r"(^|_)(token|(api|access|secret|private)_?key|secret|password|passwd|credentials?)$", re.IGNORECASE
)
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")  # names a secret, and is none
NOT_SECRETS = ("end_token",)  # keys of the configuration that are named like a secret
_FORMS = (
    (re.compile(r"(://)[^/\s@'\"]+@"), rf"\1{REDACTED}@"),
    (re.compile(r"([?&](?:api_?key|key|token|access_token)=)[^&\s'\"]+", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"(\bbearer\s+)[^\s'\",$]{6,}", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{12,}|\bsk-[A-Za-z0-9_-]{12,}|\bwandb_v1_\w{12,}"), REDACTED),
)


def environment_secrets() -> list[str]:
    """Return the values of environment variables with a secret's name."""
    return [value for name, value in os.environ.items() if _NAMES.search(name)]


class Redactor:
    """Hides `secrets` and texts that look like one."""

    def __init__(self, secrets: Iterable[str | None] = ()) -> None:
        longest_first = sorted({s for s in secrets if s and len(s) >= SHORTEST}, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(REDACTED, text)
        for form, replacement in _FORMS:
            text = form.sub(replacement, text)
        return text

    def value(self, value: Any) -> Any:
        """Do the same for every string in nested mappings and lists; a value under a secret's name is hidden whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {str(key): self.named(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if isinstance(value, BaseException):  # its repr would escape quotes, and a secret would not match
            return self.text(f"{type(value).__name__}: {value}")
        return value

    def named(self, name: str, value: Any) -> Any:
        """Do the same for `value` under the key `name`."""
        if isinstance(value, str) and _VARIABLE.fullmatch(value):
            return value
        if name not in NOT_SECRETS and _NAMES.search(name) and isinstance(value, str | list | tuple) and value:
            return REDACTED
        return self.value(value)
