"""Reward functions, called once for each group: f(prompts, completions, **columns) -> one number
for each completion.

`completions` are strings, because the rows' prompts are; every column of rows.jsonl comes as a list
of that length.
"""

import re


def correct(completions, answer, **columns):
    """1 where the last number of the completion is the answer, else 0."""
    return [
        float(last_number(text) == right) for text, right in zip(completions, answer, strict=True)
    ]


def digits(completions, answer, **columns):
    """The share of the answer's digits that are right, from the back: tells wrong answers apart."""
    return [
        share(last_number(text), right) for text, right in zip(completions, answer, strict=True)
    ]


def last_number(text):
    numbers = re.findall(r"\d+", text)
    return numbers[-1] if numbers else ""


def share(answer, right):
    pairs = zip(reversed(answer), reversed(right), strict=False)
    return sum(a == b for a, b in pairs) / max(len(answer), len(right))
