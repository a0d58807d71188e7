"""Which tokens of a forward a block sees now, for whatever has something of each of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

ALL = slice(None)
_thread = threading.local()

Tokens = slice | np.ndarray
"""Of the flattened tokens of a forward."""


def seen_tokens() -> Tokens:
    """Return those that this thread's forward sees."""
    seen: Tokens = getattr(_thread, "seen", ALL)
    return seen


@contextmanager
def seeing(tokens: Tokens | None) -> Iterator[None]:
    """Forwards of this thread see these tokens only; None: as before."""
    before = seen_tokens()
    _thread.seen = before if tokens is None else tokens
    try:
        yield
    finally:
        _thread.seen = before
