"""Make text from elsewhere safe for a terminal: model text, names of environments, ids of groups.
No MLX.

A control character in it is shown as an escape (`\\x1b`) and never reaches the terminal, which
would obey it. Every console of the package is this module's `Console`, and `log.py` escapes each
value of a line, so that no caller has to think of it.
"""

import re
from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

PLAIN_WIDTH = 1000
"""Width of what is printed if there is no terminal."""
_LINES = "\n\t"
# ASCII's and Latin-1's control characters, marks that change the direction of text, other line
# ends, half characters
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escaped(text: str, *, lines: bool = False) -> str:
    """Return the text with its control characters as escapes. `lines`: keep line ends and tabs."""
    keep = _LINES if lines else ""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def beginning_of(text: str, most: int) -> str:
    """Return the text on one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def end_of(text: str, most: int) -> str:
    """Return the end of the text so: a prompt has its question there."""
    line = " ".join(text.split())
    return line if len(line) <= most else "…" + line[1 - most :]


class Console(rich.console.Console):
    """Escape every text that is printed, wherever it stands: in a table, a panel, a live
    display."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = escaped(renderable, lines=True)
        elif isinstance(renderable, Text):
            renderable = _escaped(renderable)
        return super().render(renderable, options)


def as_text(parts: Iterable[RenderableType]) -> str:
    """Return what a command prints; coloured on a terminal, elsewhere as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False)
    text = capture.get()
    return text if console.is_terminal else "\n".join(line.rstrip() for line in text.split("\n"))


def _escaped(text: Text) -> Text:
    unsafe = [match for match in _UNSAFE.finditer(text.plain) if match[0] not in _LINES]
    if not unsafe:
        return text
    result = text.blank_copy()
    for part in text.divide(sorted({end for match in unsafe for end in match.span()})):
        part.plain = escaped(part.plain, lines=True)
        result.append_text(part)
    return result


def duration(seconds: float) -> str:
    """Return a time as people say it: 0.28 s, 55 s, 12 min, 2 h 50 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
