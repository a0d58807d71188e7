"""How this package and its extras are installed: from a clone. Imports nothing.

It is on no package index yet, so no hint may name it there: whoever registers the name would own
what the hint installs.
"""

CLONE = "in the clone of the repository"


def install(extra: str) -> str:
    """Return the command that brings an extra, and where it is run."""
    return f"pip install '.[{extra}]' {CLONE}"
