"""Text for terminals: curves of block characters, and commands that can be pasted whatever the
width. No MLX."""

import itertools
import math
import re
import shlex
from collections.abc import Sequence

from rich.cells import cell_len

from mlx_parallm.rl_training.monitor.evidence import WINDOW

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
NARROWEST = 20


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Draw values as at most `width` block characters, each a mean. Values within [0, 1] are
    drawn on that scale."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(position * len(finite) / count) for position in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = scale_of(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


def scale_of(values: Sequence[float]) -> tuple[float, float]:
    """Return what ▁ and █ stand for: 0 and 1 if all values lie between them, else the lowest
    and the highest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high)


def began_and_now(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean of the first values, of the last ones, and how many make one mean: at most
    `WINDOW`.

    No value is in both means, unless there is only one. [0.375, 0.48] → (0.375, 0.48, 1). Raises
    ValueError: no values.
    """
    if not values:
        raise ValueError("no values: there is no mean")
    count = max(1, min(WINDOW, len(values) // 2))
    return math.fsum(values[:count]) / count, math.fsum(values[-count:]) / count, count


def by_option(command: str) -> list[str]:
    """Divide a command at its options: "a b --c d" → ["a b", "--c d"]."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if parts and not word.startswith("--"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


def command_lines(parts: Sequence[str], width: int | None = None) -> str:
    """Return a shell command as one line, or with a width as a line for each part, none of them
    wider.

    A part that is wider than that is continued in the first column of the next line. A shell reads
    the same words at every width: `"Sort: gat` ends with `'\\` there, and the next line begins with
    `'`.
    """
    if width is None:
        return " ".join(parts)
    lines = [f" {part}" if number else part for number, part in enumerate(parts)]
    return " \\\n".join(_continued(line, max(NARROWEST, width) - 2) for line in lines)


def _continued(line: str, room: int) -> str:
    """Cut a line of a shell command; behind `room` cells there is place for a quote and a
    backslash."""
    if cell_len(line) <= room:
        return line
    cut, column, quote = "", 0, ""
    for atom in re.findall(r"\\.|\$\w+|.", line, re.DOTALL):
        for piece in atom if quote == "'" else [atom]:  # nothing has a meaning in single quotes
            if column + cell_len(piece) > room and column > 1:
                cut, column = f"{cut}{quote}\\\n{quote}", len(quote)
            cut, column = cut + piece, column + cell_len(piece)
            if piece in ("'", '"') and quote in ("", piece):
                quote = "" if quote else piece
    return cut
