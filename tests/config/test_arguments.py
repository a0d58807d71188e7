"""Flags that are made of a class's fields."""

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from mlx_parallm.cli.table import COMMANDS
from mlx_parallm.config.arguments import Arguments, AtLeast, Configured, Count, flag, place, setting

GIVEN = []


class Sampled(Configured):
    """A command with a field of each kind."""

    source: Annotated[str, "SRC"] = place()
    """what is read; 100% of it"""
    output: Annotated[Path, "FILE"]
    """where it is written"""
    n: Count = 4
    """answers"""
    form: Literal["sft", "dpo"] = "sft"
    """of the rows"""
    bits: Literal[4, 8] | None = None
    """of a weight"""
    reward: list[str]
    """may be repeated"""
    start: Annotated[float, "X", AtLeast(0)] | None = flag("--from")
    """where it begins"""
    worst: bool = flag(one_of="order")
    """lowest first"""
    best: bool = flag(one_of="order")
    """highest first"""
    problems: int | None = setting("evaluation.problems")
    """of each environment"""
    model: str | None = setting("model.base_path")
    """the model"""

    def run(self) -> int:
        GIVEN.append(self)
        if self.n > 100:
            self.error("--n: too many")
        return 0


class Both(Arguments):
    """Two commands in one."""

    actions: ClassVar = {"sample": Sampled}


def given(*words: str, kind: type[Arguments] = Sampled) -> Sampled:
    parser = ArgumentParser("sampled")
    assert kind.added_to(parser)(parser.parse_args(words)) == 0
    return GIVEN.pop()


def test_fields_are_read_by_their_types() -> None:
    plain = given("a", "--output", "b")
    assert (plain.source, plain.output, plain.n, plain.form) == ("a", Path("b"), 4, "sft")
    assert (plain.bits, plain.reward, plain.start, plain.worst, plain.best) == (
        None,
        [],
        None,
        False,
        False,
    )
    assert plain.overrides == []
    words = "a --output b --n 2 --form dpo --bits 8 --reward x --reward y --from 0.5 --best"
    full = given(*words.split())
    assert (full.n, full.form, full.bits, full.reward, full.start, full.best) == (
        2,
        "dpo",
        8,
        ["x", "y"],
        0.5,
        True,
    )
    assert given("sample", "a", "--output", "b", kind=Both).source == "a"


def test_flags_set_keys_of_the_configuration_after_those_of_set() -> None:
    words = ["a", "--output", "b", "--problems", "3", "--model", 'a"b', "--set", "model.dtype=x"]
    args = given(*words)
    assert args.overrides == [
        "model.dtype=x",
        "evaluation.problems=3",
        r'model.base_path="a\"b"',
    ]
    assert args.settings("model") == ["evaluation.problems=3"]


@pytest.mark.parametrize(
    ("words", "flagged"),
    [
        ("a", "--output"),
        ("--output b", "SRC"),
        ("a --output b --n 0", "--n: at least 1"),
        ("a --output b --n x", "--n: invalid int value: 'x'"),
        ("a --output b --from -1", "--from: at least 0"),
        ("a --output b --form x", "--form"),
        ("a --output b --worst --best", "--best"),
        ("a --output b --n 101", "--n: too many"),
    ],
)
def test_refused_with_exit_code_2(
    words: str, flagged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        given(*words.split())
    assert ended.value.code == 2
    assert flagged in capsys.readouterr().err
    GIVEN.clear()


def test_docstrings_are_the_help_with_the_defaults() -> None:
    parser = ArgumentParser("sampled")
    Sampled.added_to(parser)
    shown = " ".join(parser.format_help().split())
    assert "what is read; 100% of it" in shown and "answers (default: 4)" in shown
    assert "--from X where it begins" in shown and "override one key" in shown


def parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for each in action.choices.values():
                yield from parsers(each)


def test_every_flag_of_every_command_has_a_help() -> None:
    missing = [
        (parser.prog, action.dest)
        for command in COMMANDS
        for parser in parsers(command.parser(command.name)[0])
        for action in parser._actions
        if not action.help and action.dest != "action"
    ]
    assert missing == []
