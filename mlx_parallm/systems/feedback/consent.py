"""Who agrees that a chat is learned: by the header X-Feedback, or by a key that was given out for
it. No MLX.

    X-Feedback: learn        yes, for this request; "no" is no, with a key too
    X-Feedback-User: NAME    whose chat it is, if several people share a key
    X-Feedback-Task: NAME    what its reward is compared with; default: the key's name, or "chat".
                             A new name begins with the mean of the key's own rewards
"""

import hmac
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request

from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.server.auth import SHORTEST_KEY, bearer_key
from mlx_parallm.systems.feedback.config import FeedbackConfig

HEADER, USER_HEADER, TASK_HEADER = "X-Feedback", "X-Feedback-User", "X-Feedback-Task"
YES, NO = "learn", "no"
TASK = "chat"
_NAME = re.compile(r"[\w.@:-]{1,64}")


@dataclass(frozen=True, slots=True)
class Consent:
    user: str
    task: str


class Agreement:
    """Says who of a server's clients agrees."""

    def __init__(self, config: FeedbackConfig) -> None:
        self._by_header = "header" in config.opt_in
        self.keys = read_keys(config.keys_file) if config.keys_file is not None else {}

    def of(self, request: Request) -> Consent | None:
        """Return whose chat it is; None: nothing may be learned from it. Raises RequestError: a
        header that says something else."""
        headers = request.headers.getlist(HEADER)
        if wrong := [header for header in headers if header not in (YES, NO)]:
            raise RequestError(f'{HEADER}: {wrong[0][:80]!r} is neither "{YES}" nor "{NO}"')
        header = NO if NO in headers else next(iter(headers), None)
        user, task = (_named(request, name) for name in (USER_HEADER, TASK_HEADER))
        key = self.name_of(request)
        if header == NO or (key is None and not (header == YES and self._by_header)):
            return None
        return Consent(f"{key or ''}/{user or ''}", task or key or TASK)

    def name_of(self, request: Request) -> str | None:
        """Return the name of the key that a request brings, of those in `keys_file`."""
        key = bearer_key(request.scope)
        if key is None:
            return None
        # all of them, whichever fits: the time says nothing
        names = [
            name for each, name in self.keys.items() if hmac.compare_digest(each.encode(), key)
        ]
        return names[0] if names else None


def _named(request: Request, header: str) -> str | None:
    value = request.headers.get(header)
    if value is not None and not _NAME.fullmatch(value):
        raise RequestError(
            f"{header}: {value[:80]!r} is not a name: 1 to 64 letters, digits, . @ : - _"
        )
    return value


def read_keys(path: Path) -> Mapping[str, str]:
    """Return key → name from lines "NAME KEY"; empty lines and those with # are left out. Raises
    ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"feedback.keys_file: {path}: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = line.split()
        where = f"feedback.keys_file: {path}, line {number}"
        if len(words) != 2 or not _NAME.fullmatch(words[0]):
            raise ConfigError(f'{where}: expected "NAME KEY"')
        name, key = words
        if len(key) < SHORTEST_KEY:
            raise ConfigError(f"{where}: a key has {SHORTEST_KEY} characters or more")
        if key in keys:
            raise ConfigError(f"{where}: the key of {keys[key]!r} is there twice")
        keys[key] = name
    if not keys:
        raise ConfigError(f"feedback.keys_file: {path} holds no key")
    twice = [name for name, count in Counter(keys.values()).items() if count > 1]
    if twice:
        raise ConfigError(f"feedback.keys_file: {path}: {twice[0]!r} has two keys")
    return keys
