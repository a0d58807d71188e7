"""Conditions of the configuration: a name, a comparison and a number, as in "score >= 0.8"."""

import math
import operator
import re
from dataclasses import dataclass

COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
FORM = re.compile(r"\s*([^<>=\s][^<>=]*?)\s*(>=|<=|>|<)\s*([^<>=\s]+)\s*")


@dataclass(frozen=True)
class Condition:
    name: str
    comparison: str
    bound: float

    def holds(self, value: float | None) -> bool:
        """Whether a value meets it. None and NaN, which are no number, meet none."""
        return value is not None and COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.name} {self.comparison} {self.bound:g}"


def condition_of(text: str) -> Condition:
    """Raises ValueError: another form, or a bound that is no finite number."""
    match = FORM.fullmatch(text)
    try:
        bound = float(match[3]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        raise ValueError(f'{text!r} is no condition: write "NAME >= 0.8", with >=, <=, > or <')
    return Condition(match[1], match[2], bound)
