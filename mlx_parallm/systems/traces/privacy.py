"""Redaction of traces: before anything is written, every secret becomes a placeholder like
`<AWS_1>`.

What counts as a secret is `system/redaction.py`'s; added are user names (of home directories, and
of this user). A placeholder is the same for the same secret within one trace. Each hit is kept with
its surroundings for a person to review; a hit shows the placeholder, never the secret.

`leftovers` scans files that are about to leave this machine.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.system.redaction import (
    SHORTEST,
    FoundSecret,
    Redactor,
    environment_secrets,
    is_secret_name,
    names_a_secret,
)
from mlx_parallm.system.secret_forms import PERSONAL_FORMS, SECRET_FORMS, SecretForm
from mlx_parallm.systems.traces.schema import WORDS, Json, parse_json, read_jsonl
from mlx_parallm.systems.traces.trace import Trace, parse_trace

CONTEXT = 40  # characters of a hit's surroundings, on each side
_EVERYBODY = WORDS["everybody"]
"""Names of home directories that name nobody."""
PLACEHOLDER = re.compile(r"<[A-Z][A-Z_]*_\d+>")


def _user_names(home: Path) -> tuple[SecretForm, ...]:
    nobody = "|".join(sorted(_EVERYBODY))
    path = re.compile(
        rf"(?:/home/|/Users/|\b[A-Za-z]:(?:\\{{1,2}}|/)Users(?:\\{{1,2}}|/))(?!(?:{nobody})\b)"
        r"(?P<secret>[A-Za-z][\w-]{1,31})(?=[/\\\s\"'`:;,)\]]|$)",
        re.IGNORECASE,
    )
    forms = [SecretForm("user", ("/home/", "users"), path)]
    if len(home.name) >= 4 and home.name.lower() not in _EVERYBODY:
        name = rf"(?<![A-Za-z0-9]){re.escape(home.name)}(?![A-Za-z0-9])"
        forms.append(SecretForm("user", (home.name.lower(),), re.compile(name, re.IGNORECASE)))
    return tuple(forms)


@dataclass(frozen=True, slots=True)
class RedactionHit:
    """One hidden text, as the review file shows it."""

    trace: str
    kind: str
    placeholder: str
    context: str  # around it, redacted


class TraceRedactor:
    """Redacts the texts of one trace. Not thread-safe.

    Args:
        trace: its id, for the review.
        redactor: what finds secrets (`secret_finder`); None = nothing is redacted.
        numbers: kind → the highest number that placeholders of this trace have had.
    """

    def __init__(
        self, trace: str, redactor: Redactor | None, numbers: Mapping[str, int] | None = None
    ) -> None:
        self.trace = trace
        self.hits: list[RedactionHit] = []
        self._redactor = redactor
        self._numbers = Counter(numbers or {})
        self._placeholders: dict[str, str] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Kind → hits so far."""
        return dict(Counter(hit.kind for hit in self.hits))

    def text(self, text: str) -> str:
        if self._redactor is None or len(text) < SHORTEST:
            return text
        return self._replaced(text, self._redactor.find(text))

    def value(self, value: Any) -> Any:
        """Return nested JSON with every string redacted, keys too."""
        if isinstance(value, str):
            return self._json_text(value) if value[:1] in ("{", "[") else self.text(value)
        if isinstance(value, Mapping):
            named = names_a_secret(value)
            names = {"value": "secret"} if named else {}
            return {
                self.text(str(key)): self._named(names.get(key, str(key)), item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def _json_text(self, text: str) -> str:
        """Redact text that is JSON (a call's arguments, a tool's result) by its values, so that
        it stays JSON."""
        try:
            parsed = parse_json(text)
        except ValueError:
            return self.text(text)
        cleaned = self.value(parsed)
        return self.text(text) if cleaned == parsed else json.dumps(cleaned, ensure_ascii=False)

    def _named(self, name: str, value: Any) -> Any:
        """A value without spaces under a secret's name is hidden whole."""
        is_text = isinstance(value, str) and len(value) >= SHORTEST
        if self._redactor is None or not is_text or not is_secret_name(name):
            return self.value(value)
        if any(map(str.isspace, value)) or PLACEHOLDER.fullmatch(value):
            return self.text(value)
        return self._replaced(value, [FoundSecret(0, len(value), "secret")])

    def _replaced(self, text: str, secrets: Sequence[FoundSecret]) -> str:
        parts, end, starts = [], 0, []
        for secret in secrets:
            placeholder = self._placeholder(text[secret.start : secret.end], secret.kind)
            parts.append(text[end : secret.start])
            starts.append((sum(map(len, parts)), placeholder, secret.kind))
            parts.append(placeholder)
            end = secret.end
        redacted = "".join([*parts, text[end:]])
        for start, placeholder, kind in starts:
            around = redacted[max(0, start - CONTEXT) : start + len(placeholder) + CONTEXT]
            self.hits.append(RedactionHit(self.trace, kind, placeholder, around))
        return redacted

    def _placeholder(self, secret: str, kind: str) -> str:
        placeholder = self._placeholders.get(secret)
        if placeholder is None:
            self._numbers[kind] += 1
            placeholder = self._placeholders[secret] = f"<{kind.upper()}_{self._numbers[kind]}>"
        return placeholder


def secret_finder(secrets: Iterable[str | None] = (), *, personal: bool = False) -> Redactor:
    """Return a finder of secrets in traces: the forms of secrets, user names, `secrets`, and this
    process's own. `personal`: e-mail addresses, payment cards, IBANs and phone numbers too."""
    forms = (*SECRET_FORMS, *_user_names(Path.home()), *(PERSONAL_FORMS if personal else ()))
    return Redactor([*secrets, *environment_secrets()], forms)


def redact_trace(trace: Trace, finder: Redactor | None) -> tuple[Trace, list[RedactionHit]]:
    """Return the trace without secrets, and every hit. Tokens would show what was hidden: a trace
    with hits keeps none.
    `finder`: None = the trace as it is."""
    if finder is None:
        return trace, []
    redactor = TraceRedactor(trace.id, finder)
    cleaned: Json = redactor.value(trace.to_json())
    if not redactor.hits:
        return trace, []
    for step in cleaned["steps"]:
        metrics = step.get("metrics") or {}
        for name in WORDS["token_fields"]:
            metrics.pop(name, None)
            (metrics.get("extra") or {}).pop(name, None)
    result = parse_trace(cleaned)
    result.note(redacted={**result.get("redacted", {}), **redactor.counts})
    return result, redactor.hits


def review_lines(hits: Iterable[RedactionHit]) -> Iterator[Json]:
    for hit in hits:
        yield asdict(hit)


def leftovers(files: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each secret that is still in these JSONL or text files: where it is and
    its kind.

    Raises TraceError: a file cannot be read.
    """
    finder = secret_finder()
    for file in files:
        for number, value in read_jsonl(file):
            counts = Counter(_kinds(value, finder))
            for kind, count in sorted(counts.items()):
                yield f"{file}:{number}: {kind}" + (f" ({count} times)" if count > 1 else "")


def _kinds(value: Any, finder: Redactor) -> Iterator[str]:
    scan = TraceRedactor("", finder)
    scan.value(str(value) if isinstance(value, ValueError) else value)
    yield from (hit.kind for hit in scan.hits)
