"""Finds and hides secrets: in log lines, saved configurations, data for trackers, traces of agents. No MLX.

A secret is recognised by its value (the API key, environment variables named *_TOKEN, *_API_KEY, …), by its place
(`http://user:KEY@host`, `Bearer KEY`, `?token=KEY`, a random value after `token =`), by its form (`hf_…`, `AKIA…`, a
private key's block), or by the name of its key.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REDACTED = "**********"
SHORTEST = 6  # characters of a value that is hidden wherever it occurs; a shorter one would blank out ordinary words
_NAMES = re.compile(
    r"(^|_)(token|(api|access|secret|private)_?key|secret|password|passwd|credentials?)$", re.IGNORECASE
)
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")  # names a secret, and is none
NOT_SECRETS = ("end_token",)  # keys of the configuration that are named like a secret


@dataclass(frozen=True, slots=True)
class SecretForm:
    """How a kind of secret looks. `hints`: one of these texts stands in every match, in any case, so that most texts
    need no search. The secret is the pattern's group "secret", or the whole match. `random`: it also looks random."""

    kind: str
    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    random: bool = False


def _form(kind: str, hints: str, pattern: str, flags: int = 0, *, random: bool = False) -> SecretForm:
    return SecretForm(kind, tuple(hints.split()), re.compile(pattern, flags), random)


_ANY_CASE = re.IGNORECASE
SECRET_FORMS: tuple[SecretForm, ...] = (
    _form(
        "private_key",
        "-----begin",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?s:.*?)-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\:,-]*)",
    ),
    _form("url_password", "://", r"://(?P<secret>[^/\s@'\"<>{}$]+)@"),
    _form("url_key", "key= token=", r"[?&](?:api_?key|key|token|access_token)=(?P<secret>[^&\s'\"<>{}$]+)", _ANY_CASE),
    _form("bearer", "bearer", r"\bbearer\s+(?P<secret>(?=\S*\d|\S{20})[^\s'\",$<>{}\\]{6,})", _ANY_CASE),
    _form("huggingface", "hf_", r"\bhf_[A-Za-z0-9]{12,}"),
    _form("anthropic", "sk-ant-", r"\bsk-ant-[A-Za-z0-9_-]{12,}"),
    _form("openai", "sk-", r"\bsk-(?:[A-Za-z0-9_]{12,}[A-Za-z0-9_-]*|(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{16,})"),
    _form("wandb", "wandb_v1_", r"\bwandb_v1_\w{12,}"),
    _form("aws", "akia asia abia acca", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    _form("github", "ghp_ gho_ ghu_ ghs_ ghr_ _pat_", r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})"),
    _form("gitlab", "glpat-", r"\bglpat-[A-Za-z0-9_-]{20,}"),
    _form(
        "slack",
        "xox hooks.slack.com xapp-",
        r"\bxox[abeprs]-[A-Za-z0-9-]{10,}|\bxapp-[A-Za-z0-9-]{20,}"
        r"|hooks\.slack\.com/services/(?P<secret>[A-Z0-9]+/[A-Z0-9]+/[A-Za-z0-9]{16,})",
    ),
    _form(
        "google",
        "aiza ya29. gocspx-",
        r"\bAIza[A-Za-z0-9_-]{35}|\bya29\.[A-Za-z0-9_-]{20,}|\bGOCSPX-[A-Za-z0-9_-]{20,}",
    ),
    _form("stripe", "_live_ _test_ whsec_", r"\b(?:[spr]k_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9+/=]{20,})"),
    _form("jwt", "eyj", r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    _form("npm", "npm_", r"\bnpm_[A-Za-z0-9]{36}"),
    _form("pypi", "pypi-", r"\bpypi-[A-Za-z0-9_-]{40,}"),
    _form(
        "secret",
        "key secret token passw pwd credential",
        r"(?:key|secret|token|passw(?:or)?d|pwd|credentials?)(?:\\?[\"'])?(?:\s{0,4}(?:[:=]|=>){1,2}\s{0,4}|\s)"
        r"(?:\\?[\"'])?(?P<secret>[A-Za-z0-9+/_~.-]{16,}={0,2})",
        _ANY_CASE,
        random=True,
    ),
)
_CHARACTER_CLASSES = re.compile(r"[a-z]+|[A-Z]+|[0-9]+|[^A-Za-z0-9]+")
_LEAST_CHANGES = 0.3  # of the character class, for each character: random base64 has 0.6, hexadecimal 0.45, names 0.15


def _looks_random(text: str) -> bool:
    """Whether letters and digits change as often as in a random text."""
    runs = _CHARACTER_CLASSES.findall(text)
    letters = sum(map(str.isalpha, text))
    return any(map(str.isdigit, text)) and letters >= 3 and (len(runs) - 1) / len(text) >= _LEAST_CHANGES


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


class Redactor:
    """Hides `secrets` and texts that look like one. `forms`: how these look."""

    def __init__(self, secrets: Iterable[str | None] = (), forms: Sequence[SecretForm] = SECRET_FORMS) -> None:
        longest_first = sorted({s for s in secrets if s and len(s) >= SHORTEST}, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._forms = forms

    def find(self, text: str) -> list[FoundSecret]:
        """Return the secrets of a text in order. They do not overlap: of two that do, the parts are one of the kind
        that stands first in the list of forms."""
        found = [FoundSecret(*match.span(), "known") for match in self._values.finditer(text)] if self._values else []
        lowered = text.lower()
        for form in self._forms:
            for hint in form.hints:  # not any(): most texts have none of them, and this is twice as fast
                if hint in lowered:
                    break
            else:
                continue
            for match in form.pattern.finditer(text):
                group = "secret" if "secret" in form.pattern.groupindex and match["secret"] is not None else 0
                if not form.random or _looks_random(match[group]):
                    found.append(FoundSecret(*match.span(group), form.kind))
        merged: list[FoundSecret] = []
        for secret in sorted(found, key=lambda secret: secret.start):  # stable: the first form of two equal starts
            if merged and secret.start < merged[-1].end:
                last = merged[-1]
                merged[-1] = FoundSecret(last.start, max(last.end, secret.end), last.kind)
            else:
                merged.append(secret)
        return merged

    def text(self, text: str) -> str:
        for secret in reversed(self.find(text)):
            text = text[: secret.start] + REDACTED + text[secret.end :]
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
        if is_secret_name(name) and isinstance(value, str | list | tuple) and value:
            return REDACTED
        return self.value(value)
