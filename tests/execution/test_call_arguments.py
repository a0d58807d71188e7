"""Arguments as models write them: natural values without quotation marks are texts, and errors name
the argument.

The fault: `TOOL: list_directory(path=/tmp/x)` was "invalid syntax (<tool call>, line 1)". Other
members that were looked at: dates with zeros in front, times, versions, addresses, globs, Windows
paths, words of Python (`from`), commas and brackets in values, apostrophes, positional paths, lists
of paths.
"""

from typing import Any

import pytest

from mlx_parallm.execution.action_grammar import parse_actions
from mlx_parallm.execution.call_arguments import UnreadableError, read_arguments
from mlx_parallm.execution.tool_calls import parse_tool_calls

READ: list[tuple[str, dict[str, Any]]] = [
    ("path=/tmp/x", {"path": "/tmp/x"}),
    ("date=2026-11-25, day=2026-01-05", {"date": "2026-11-25", "day": "2026-01-05"}),
    (
        "path=/tmp/x, n=3, ok=true, no=False, z=null, y=None",
        {"path": "/tmp/x", "n": 3, "ok": True, "no": False, "z": None, "y": None},
    ),
    ("city=New York, text=Hello, world, n=2", {"city": "New York", "text": "Hello, world", "n": 2}),
    (
        "t=12:30, zip=01234, v=1.2.3, p=10%",
        {"t": "12:30", "zip": "01234", "v": "1.2.3", "p": "10%"},
    ),
    (
        "mail=a@b.c, glob=*.py, home=~/x, tag=#1",
        {"mail": "a@b.c", "glob": "*.py", "home": "~/x", "tag": "#1"},
    ),
    ("from=Berlin, to=Rome, max-results=5", {"from": "Berlin", "to": "Rome", "max-results": 5}),
    (
        "a=b-c, w=a/b, k=5kg, n=-5, f=.5, e=1e3",
        {"a": "b-c", "w": "a/b", "k": "5kg", "n": -5, "f": 0.5, "e": 1000.0},
    ),
    ("file=/tmp/a(1).txt, b=false", {"file": "/tmp/a(1).txt", "b": False}),
    (
        "paths=[/tmp/a, /tmp/b], colours=[red, 2, true]",
        {"paths": ["/tmp/a", "/tmp/b"], "colours": ["red", 2, True]},
    ),
    ("colours=[red, 2, true]", {"colours": ["red", 2, True]}),
    ("text=it's fine, n=1", {"text": "it's fine", "n": 1}),
    ('text=say "a, b" ok', {"text": 'say "a, b" ok'}),
    ("where=C:\\new\\dir", {"where": "C:\\new\\dir"}),
    (
        """path=/a, text="x, (y", list=["p", 'q']""",
        {"path": "/a", "text": "x, (y", "list": ["p", "q"]},
    ),
    ("q=what is 2+2?", {"q": "what is 2+2?"}),
]


@pytest.mark.parametrize(("source", "arguments"), READ)
def test_natural_values_are_texts_and_literals_stay_what_they_are(
    source: str, arguments: dict[str, Any]
) -> None:
    assert read_arguments(source, ()) == arguments
    [action] = parse_actions(f"TOOL: f({source})")
    assert (action.error, dict(action.arguments)) == (None, arguments)
    [call] = parse_tool_calls(f"TOOL: f({source})", [{"name": "f"}], "tool_line")
    assert call.arguments == arguments


def test_the_names_of_parameters_tell_a_comma_of_a_value_from_the_next_argument() -> None:
    url = "https://x.y/z?a=1,b=2"
    assert read_arguments(f"url={url}, n=1", ("url", "n")) == {"url": url, "n": 1}
    assert read_arguments("/tmp/x, /tmp/y", ("source", "target")) == {
        "source": "/tmp/x",
        "target": "/tmp/y",
    }


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("path=/a, a=1 b=2", "argument 'a'"),
        ('path=/a, text="x', "argument 'text'"),
        ("path=, n=2", "argument 'path': a value is missing"),
        ("x=1, x=/a", "'x' is repeated"),
        ("x=1, x=2", "'x' is repeated"),
        ("some words here", "no arguments"),
        ("*rest", "has a star"),
        ("/a, /b, /c", "3 arguments without a name, 1 parameters"),
    ],
)
def test_an_error_names_the_argument(source: str, words: str) -> None:
    with pytest.raises(UnreadableError) as error:
        read_arguments(source, ("path",))
    assert words in str(error.value) and "<tool call>" not in str(error.value)
