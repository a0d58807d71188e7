"""The table of log formats and questions: in each cell a log as its program writes it, and what is
learned of it by `build`. A cell is in NOT_THERE where the format has no such thing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import TraceError
from mlx_parallm.systems.traces.builders import Dataset
from mlx_parallm.systems.traces.importers.report import ImportReport
from mlx_parallm.systems.traces.reading import IMPORTERS, read_traces
from tests.traces.log_formats import FORMATS, NotInFormatError, Talk, Turn
from tests.traces.messages import data_set

U, A = (lambda text: Turn("user", text)), (lambda text, **more: Turn("answer", text, **more))
HALF = "\ud800"
INDEPENDENT = ("rollouts", "collected", "verifiers rows", "art")
"""Formats whose sessions are samples of their own."""


def built(folder: Path, name: str, talks: list[Talk]) -> Dataset | str:
    """What `build` makes of the logs; the reason where it makes no row."""
    source, write = FORMATS[name]
    report, traces = ImportReport(), []
    for path in write(folder, talks):
        traces += list(read_traces(path, report, source=source))
    assert report.lines.seen == report.lines.carried + sum(report.lines.left_out.values())
    try:
        return data_set(traces)
    except TraceError as error:
        return str(error)


def learned(made: Dataset | str) -> list[str]:
    """The answers that are learned; a call by its function's name."""
    return [
        message["content"] or message["tool_calls"][0]["function"]["name"]
        for row in (() if isinstance(made, str) else made.train)
        for message in row["messages"]
        if message["role"] == "assistant" and message.get("weight") != 0
    ]


def texts(made: Dataset | str) -> str:
    return json.dumps([] if isinstance(made, str) else made.train, ensure_ascii=False)


def repeated(folder: Path, name: str) -> None:
    """The same conversation stands in the file twice."""
    talk = Talk("S", [U("q"), A("one", name="m1")])
    again = Talk("S", talk.turns, mark="-again")
    assert learned(built(folder, name, [talk, again])) == ["one"]


def forked(folder: Path, name: str) -> None:
    """A session continues from another's beginning: the answer that they share is learned once."""
    first = [U("q"), A("one", name="m1")]
    main = Talk("P", [*first, U("more"), A("two", name="m2")])
    fork = Talk("S", [*first, U("other"), A("three", name="m3")], parent="P", shared=2)
    made = learned(built(folder, name, [main, fork]))
    twice = name in INDEPENDENT
    assert sorted(made) == sorted(["one", *(["one"] if twice else []), "three", "two"])


def resumed(folder: Path, name: str) -> None:
    """As a fork; the longer session is read first."""
    first = [U("q"), A("one", name="m1")]
    made = built(
        folder,
        name,
        [
            Talk("S", [*first, U("more"), A("two", name="m2")]),
            Talk("T", first, parent="S", shared=2, mark="-again"),
        ],
    )
    twice = name in INDEPENDENT
    assert sorted(learned(made)) == sorted(["one", *(["one"] if twice else []), "two"])


def subagent(folder: Path, name: str) -> None:
    side = Talk("H", [U("look"), A("small")], parent="P", is_side=True)
    made = built(folder, name, [Talk("P", [U("q"), A("done")]), side])
    assert learned(made) == ["done"] and isinstance(made, Dataset)
    assert made.left_out["the run of a sub-agent"] == 1


def cut(folder: Path, name: str) -> None:
    """However the program says it, an answer that is not the model's to its end is not learned."""
    reasons = ("length", "max_tokens", "timeout", "error", "content_filter", "pause_turn", "abort")
    for number, reason in enumerate(reasons):
        (inner := folder / str(number)).mkdir()
        made = built(inner, name, [Talk("S", [U("q"), A("the beg", end=reason)])])
        assert learned(made) == [], reason


def interrupted(folder: Path, name: str) -> None:
    talk = Talk("S", [U("q"), A("the beg", cut=True), U("again"), A("whole")])
    assert learned(built(folder, name, [talk])) == ["whole"]


def own_call(folder: Path, name: str) -> None:
    """A call that the API made is in the history, before what it found, and not an answer."""
    talk = Talk("S", [U("q"), Turn("own", "found it"), A("the answer")])
    made = built(folder, name, [talk])
    assert learned(made)[-1:] == ["the answer"] and "found it" in texts(made)
    if name not in ("sharegpt", "atif"):  # they do not say who made a call
        assert learned(made) == ["the answer"]


def own_call_unseen(folder: Path, name: str) -> None:
    """Nothing is learned that rests on a result which the log does not hold."""
    talk = Talk("S", [U("q"), A("hello"), U("who?"), Turn("own", None), A("the answer")])
    assert "the answer" not in learned(built(folder, name, [talk]))


def system(folder: Path, name: str) -> None:
    made = built(folder, name, [Talk("S", [Turn("system", "be brief"), U("q"), A("a")])])
    assert isinstance(made, Dataset)
    first = made.train[0]["messages"][0]
    assert (first["role"], first["content"]) == ("system", "be brief")
    assert learned(made) == ["a"]


def half_a_character(folder: Path, name: str) -> None:
    """It is replaced and counted: `train` refuses a file that holds one."""
    made = built(folder, name, [Talk("S", [U(f"a{HALF}b"), A(f"c{HALF}")])])
    texts(made).encode()
    assert learned(made) == ["c\N{REPLACEMENT CHARACTER}"] and isinstance(made, Dataset)
    assert made.fields["half a surrogate pair, replaced by U+FFFD"] == 2


QUESTIONS: tuple[Callable[[Path, str], None], ...] = (
    *(repeated, forked, resumed, subagent, cut, interrupted),
    *(own_call, own_call_unseen, system, half_a_character),
)
NOT_THERE: dict[str, set[str]] = {
    "openai calls": {"interrupted"},
    "responses": {"interrupted"},
    "recorded": {"subagent", "own_call", "own_call_unseen"},
    "claude-code": {"system"},
    "openinference": {"cut", "own_call", "own_call_unseen"},
    "otlp events": {"own_call", "own_call_unseen"},
    "collected": {
        *("forked", "resumed", "cut", "interrupted", "own_call", "own_call_unseen", "system")
    },
    "rollouts": {
        *("forked", "resumed", "subagent", "interrupted", "own_call", "own_call_unseen"),
        *("system", "half_a_character"),
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_question_has_an_answer_in_every_format(name: str, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {}
    for question in QUESTIONS:
        (folder := tmp_path / question.__name__).mkdir()
        is_there = question.__name__ not in NOT_THERE.get(name, ())
        try:
            question(folder, name)
        except NotInFormatError as error:
            if is_there:
                wrong[question.__name__] = f"not in the format: {error}"
        except AssertionError as error:
            wrong[question.__name__] = str(error)[:300]
        else:
            if not is_there:
                wrong[question.__name__] = "it is in the format"
    assert not wrong


def test_the_table_has_every_importer() -> None:
    assert {source for source, _ in FORMATS.values()} == set(IMPORTERS)
