"""Finds and hides secrets: in log lines, saved configurations, data for trackers, traces of agents.
No MLX.

A secret is recognised by its value (the API key, environment variables named *_TOKEN, *_API_KEY,
…), by its place (`http://user:KEY@host`, `Bearer KEY`, `?token=KEY`, a random value after `token
=`), by its form (`hf_…`, `AKIA…`, a private key's block), or by the name of its key.
secret_forms.py has the table of places and forms.
"""

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.system.secret_forms import RUN, SECRET_FORMS, SecretForm

REDACTED = "**********"
# characters of a value that is hidden wherever it occurs; a shorter one would blank out ordinary
# words
SHORTEST = 6
_NAMES = re.compile(
    r"(?:^|[_.-]|(?<=[a-z]))(?:[Tt]oken|TOKEN|(?:[Aa]pi|API|[Aa]ccess|ACCESS|[Ss]ecret|SECRET|[Pp]rivate|PRIVATE"
    r"|[Ss]igning|SIGNING|[Ee]ncryption|ENCRYPTION|[Aa]ccount|ACCOUNT)[_-]?(?:[Kk]ey|KEY)|[Ss]ecret|SECRET"
    r"|[Pp]ass(?:word|wd|phrase)|PASS(?:WORD|WD|PHRASE)|[Cc]redentials?|CREDENTIALS?|[Aa]uthorization|AUTHORIZATION"
    r"|(?:[Ss]et-)?[Cc]ookie)$"
)
_NAMED_PAIR = ("name", "key")  # keys of an object whose "value" is what is named so
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")  # names a secret, and is none
_OF_A_VOCABULARY = (
    "end",
    "eos",
    "bos",
    "pad",
    "unk",
    "mask",
    "sep",
    "cls",
    "stop",
    "start",
    "image",
)
NOT_SECRETS = frozenset(f"{kind}_token" for kind in _OF_A_VOCABULARY)
"""Keys that are named like a secret: tokens of a vocabulary."""


_INVISIBLE = re.compile("[\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{20,8192}={0,2}(?![A-Za-z0-9+/_=-])")


@dataclass(frozen=True, slots=True)
class FoundSecret:
    """`text[start:end]` is a secret of this kind."""

    start: int
    end: int
    kind: str


def environment_secrets() -> list[str]:
    """Return the values of environment variables with a secret's name."""
    return [value for name, value in os.environ.items() if _NAMES.search(name)]


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret: `api_key`, `HF_TOKEN`, `password`, …"""
    return name not in NOT_SECRETS and _NAMES.search(name) is not None


def _is_option(word: object) -> bool:
    """Whether a word of a command, such as `--api-key`, names the next one."""
    return isinstance(word, str) and word.startswith("-") and "=" not in word


def names_a_secret(value: Mapping[Any, Any]) -> bool:
    """Whether an object says in "name" or "key" that its "value" is a secret, as the variables
    of a container do."""
    names = (value.get(key) for key in _NAMED_PAIR) if "value" in value else ()
    return any(isinstance(name, str) and is_secret_name(name) for name in names)


def _matches(form: SecretForm, text: str) -> Iterator[FoundSecret]:
    groups = [name for name in ("secret", "quoted") if name in form.pattern.groupindex]
    for match in form.pattern.finditer(text):
        group: str | int = next((name for name in groups if match[name] is not None), 0)
        if form.check is None or form.check(match[group]):
            yield FoundSecret(*match.span(group), form.kind)


def _decoded(text: str) -> str | None:
    """Return what base64 says, if that is plain text."""
    plain = text.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        content = base64.b64decode(plain + "=" * (-len(plain) % 4))
        decoded = content.decode("ascii")
    except (binascii.Error, ValueError):
        return None
    return decoded if all(sign.isprintable() or sign.isspace() for sign in decoded) else None


def _merged(secrets: Iterable[FoundSecret]) -> list[FoundSecret]:
    """Return secrets in order; two that overlap become one."""
    merged: list[FoundSecret] = []
    # stable: the first form of two equal starts
    for secret in sorted(secrets, key=lambda secret: secret.start):
        if merged and secret.start < merged[-1].end:
            last = merged[-1]
            merged[-1] = FoundSecret(last.start, max(last.end, secret.end), last.kind)
        else:
            merged.append(secret)
    return merged


class Redactor:
    """Hides `secrets` and texts that look like one. `forms`: how these look."""

    def __init__(
        self, secrets: Iterable[str | None] = (), forms: Sequence[SecretForm] = SECRET_FORMS
    ) -> None:
        longest_first = sorted(
            {s for s in secrets if s and len(s) >= SHORTEST}, key=len, reverse=True
        )
        self._values = (
            re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        )
        self._forms = forms

    def find(self, text: str) -> list[FoundSecret]:
        """Return the secrets of a text in order. Two that overlap become one, of the kind of the
        first.

        Signs that are not seen, such as a zero-width space, hide nothing. Text in base64 is a
        secret where what it says holds one.
        """
        if _INVISIBLE.search(text):
            seen = [place for place, sign in enumerate(text) if not _INVISIBLE.match(sign)]
            plain = self.find("".join(text[place] for place in seen))
            return [FoundSecret(seen[s.start], seen[s.end - 1] + 1, s.kind) for s in plain]
        secrets = self._search(text)
        for run in _BASE64.finditer(text):
            inner = _decoded(run[0])
            if inner is not None and (hidden := self._search(inner)):
                secrets.append(FoundSecret(*run.span(), hidden[0].kind))
        return _merged(secrets)

    def _search(self, text: str) -> list[FoundSecret]:
        """Return what the known values and the forms match."""
        secrets = (
            [FoundSecret(*match.span(), "known") for match in self._values.finditer(text)]
            if self._values
            else []
        )
        lowered = text.lower()
        runs = "\n".join(RUN.findall(text))
        lowered_runs = runs.lower()
        for form in self._forms:
            searched = lowered_runs if form.in_run else lowered
            # not any(): most texts have none of them, and this is twice as fast
            for hint in form.hints:
                if hint in searched:
                    break
            else:
                if form.hints:
                    continue
            if not form.in_run or form.pattern.search(runs):
                secrets += _matches(form, text)
        return secrets

    def text(self, text: str) -> str:
        for secret in reversed(self.find(text)):
            text = text[: secret.start] + REDACTED + text[secret.end :]
        return text

    def value(self, value: Any) -> Any:
        """Do the same for every string in nested mappings and lists; a value under a secret's
        name is hidden whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            named = names_a_secret(value)
            return {
                str(key): REDACTED
                if named and key == "value" and item
                else self.named(str(key), item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self.named(before.lstrip("-"), item) if _is_option(before) else self.value(item)
                for before, item in zip(("", *value), value, strict=False)
            ]
        # its repr would escape quotes, and a secret would not match
        if isinstance(value, BaseException):
            return self.text(f"{type(value).__name__}: {value}")
        return value

    def named(self, name: str, value: Any) -> Any:
        """Do the same for `value` under the key `name`."""
        if isinstance(value, str) and _VARIABLE.fullmatch(value):
            return value
        if is_secret_name(name) and isinstance(value, str | list | tuple) and value:
            return REDACTED
        return self.value(value)
