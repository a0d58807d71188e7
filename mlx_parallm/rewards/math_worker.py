"""Script of `math_check.py`'s process: compares answers with math-verify.

It reads lines of JSON [reference, answer] and writes a line for each: 1.0, 0.0, or null for a
reference that cannot be parsed as mathematics.
"""

import json
import logging
import re
import resource
import sys
from contextlib import suppress

MEMORY = 2 << 30
LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")
MATHEMATICS = re.compile(r"[\d\\^=+*/<>|]|^\W*\w\W*$")  # and not a word or two


def main() -> None:
    import math_verify

    assert math_verify.__name__
    logging.disable()
    with suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        reference, answer = json.loads(line)
        sys.stdout.write(json.dumps(score(reference, answer)) + "\n")
        sys.stdout.flush()


def score(reference: str, answer: str) -> float | None:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if not MATHEMATICS.search(reference):
        return None
    # Time-outs are the parent's: math-verify's cannot interrupt an integer power.
    marked = reference if any(mark in reference for mark in LATEX_MARKS) else f"${reference}$"
    gold = parse(marked, parsing_timeout=None)
    if not gold:
        return None
    boxed_first = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    parsed = parse(last_box(answer), boxed_first, parsing_timeout=None)
    return float(verify(gold, parsed, timeout_seconds=None))


def last_box(text: str) -> str:
    """The last \\boxed{…}, alone (math-verify takes two of one line for a set); the whole text
    if it has none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return text[start : place + 1]
    return text


if __name__ == "__main__":
    main()
