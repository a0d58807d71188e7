"""Sections of the pages of docs/, for tests that compare them with the code."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def section(page: str, heading: str) -> str:
    """Return the text under a heading of docs/PAGE, up to the next one of its level or above.

    Raises AssertionError: there is no such heading.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert found is not None, f"docs/{page} has no heading {heading!r}"
    rest = text[found.end() :]
    end = re.search(
        rf"^#{{1,{len(found[1])}}} \S",
        re.sub(r"(?ms)^( *)```.*?^\1```$", lambda m: " " * len(m[0]), rest),
        re.MULTILINE,
    )
    return rest[: end.start()] if end else rest
