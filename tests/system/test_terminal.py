"""terminal.py: no control character of a printed text reaches a terminal."""

import io

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mlx_parallm.system.terminal import Console, escaped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("\x07\x08\r\x7f", r"\x07\x08\r\x7f"),
        ("\x9b2J\x85", r"\x9b2J\x85"),  # Latin-1's own, which some terminals obey
        ("admin\u202etxt", r"admin\u202etxt"),
        ("half \ud83d", r"half \ud83d"),
        ("two\nlines\t", r"two\nlines\t"),
        ("日本語 é 👩\u200d🚀", "日本語 é 👩\u200d🚀"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped("two\nlines\t\x1b", lines=True) == "two\nlines\t\\x1b"


def test_every_text_that_a_console_prints_is_escaped() -> None:
    hostile = "x\x1b]0;pwned\x07\x9b2J"
    table = Table(title=Text(hostile), caption=hostile)
    table.add_column(hostile)
    table.add_row(Text(hostile))
    table.add_row(hostile)
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system="standard")
    for part in (
        hostile,
        Text(hostile, style="red").append(hostile, style="bold"),
        table,
        Panel(Text(hostile)),
    ):
        console.print(part, markup=False)
    console.rule(Text(hostile))
    with console.capture() as capture:
        console.print(Text(hostile))
    shown = console.file.getvalue() + capture.get()
    assert shown.count("pwned") >= 8
    assert "\x1b]" not in shown and "\x9b" not in shown and "\x07" not in shown
    assert "\x1b[31m" in shown, "its own colours stay"


def test_a_text_keeps_its_styles_around_an_escape() -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=60, color_system="standard", highlight=False
    )
    console.print(Text("a\x1b").append("b", style="red"))
    assert console.file.getvalue() == "a\\x1b\x1b[31mb\x1b[0m\n"
