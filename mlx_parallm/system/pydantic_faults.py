"""The faults that pydantic finds in data, in words."""

from pydantic import ValidationError


def faults(error: Exception, most: int | None = None) -> str:
    """Return the first `most` faults in one line ("weights.2: Input should be a valid number"); of
    another error its text."""
    if not isinstance(error, ValidationError):
        return str(error)
    texts = (
        f"{'.'.join(map(str, entry['loc']))}: {entry['msg'].removeprefix('Value error, ')}"
        for entry in error.errors(include_url=False)[:most]
    )
    return "; ".join(text.removeprefix(": ") for text in texts)
