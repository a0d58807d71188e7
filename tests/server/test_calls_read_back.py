"""A call that is rendered as its model writes it is read back equal, whole and streamed."""

import json
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from mlx_parallm.execution.tool_calls import OwnFormat, parse_tool_calls
from mlx_parallm.models.mlx_lm_api import tool_parsers
from mlx_parallm.server.protocol.answer_parts import AnswerFormat, AnswerParts, AnswerSplitter
from tests.server.rendered_calls import FORMATS, calls, same
from tests.server.test_answer_parts import IN_EVERY_FORMAT, shape

BEFORE = ("", "so ", "<think>r</think>", "a < b\n")
AFTER = ("", "", "", " done.", "\nbye <b>")


def answer_format(form: str, tools: Any) -> AnswerFormat:
    parser = import_module(f"{tool_parsers.__name__}.{form}")
    return AnswerFormat(
        ("<think>", "</think>"),
        (parser.tool_call_start, parser.tool_call_end),
        parse=parser.parse_tool_call,
        tools=tools,
        tool_format=form,
    )


def streamed(
    form: AnswerFormat, text: str, cuts: list[int], *, complete: bool = True
) -> AnswerParts:
    splitter, pieces = AnswerSplitter(form), []
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        pieces.append(splitter.feed(text[start:end]))
    pieces.append(splitter.finish(complete=complete))
    calls = [call for piece in pieces for call in piece.tool_calls]
    return AnswerParts(
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.content for piece in pieces),
        calls,
    )


def differences(form: str, count: int, seed: int, every: int = 4) -> Iterator[tuple[Any, ...]]:
    """Each way in which a generated call is not read back. `every`: of so many calls one is also
    streamed by the character, the longest way."""
    for number in range(count):
        rng = Random(f"{form} {seed} {number}")
        tools, made = calls(rng, form)
        before, after = rng.choice(BEFORE), rng.choice(AFTER)
        text = before + (FORMATS[form].render(made) if made else "") + after
        reading = answer_format(form, tools)
        cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))]
        answers = {
            "whole": reading.read(text, "stop"),
            "cut": streamed(reading, text, cuts),
        }
        if number % every == 0:
            answers["characters"] = streamed(reading, text, list(range(1, len(text))))
        expected = [list(call) for call in made]
        for way, parts in answers.items():
            try:
                reasoning, content, got = shape(parts)
            except ValueError as error:
                yield number, way, text, expected, str(error)
                continue
            said = before.replace("<think>r</think>", "r") + after
            plain = "".join((reasoning + content).split()) == "".join(said.split())
            if not (plain and same([list(call) for call in got], expected)):
                yield number, way, text, expected, (reasoning, content, got)
        own = OwnFormat(reading.tool_markers, reading.parse)  # type: ignore[arg-type]
        functions = [tool["function"] for tool in tools]
        episode = parse_tool_calls(text, functions, "own", model_format=own)
        read = [[call.name, dict(call.arguments)] for call in episode]
        if not same(read, expected):
            yield number, "episode", text, expected, read


def shown(parts: AnswerParts) -> Any:
    """An answer with the arguments of its calls as text: of a call that is cut off they are no
    JSON."""
    calls = [call["function"] for call in parts.whole_calls()]
    return (
        parts.reasoning,
        parts.content,
        [(call["name"], call["arguments"]) for call in calls],
    )


def differences_of_cut_answers(form: str, count: int, seed: int) -> Iterator[tuple[Any, ...]]:
    """Each answer that a limit cuts off anywhere and that is not the same whole and streamed."""
    for number in range(count):
        rng = Random(f"cut {form} {seed} {number}")
        tools, made = calls(rng, form)
        text = rng.choice(BEFORE) + FORMATS[form].render(made) + rng.choice(AFTER)
        text = text[: rng.randrange(len(text) + 1)]
        reading = answer_format(form, tools if rng.random() < 0.8 else [])
        whole = shown(reading.read(text, "length"))
        some = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(4))]
        for cuts in (some, list(range(1, len(text))) if number % 4 == 0 else []):
            got = shown(streamed(reading, text, cuts, complete=False))
            if got != whole:
                yield number, cuts, text, whole, got


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_is_cut_off_is_the_same_streamed(form: str) -> None:
    found = list(differences_of_cut_answers(form, 15, seed=1))
    assert not found, found[0]


@pytest.mark.parametrize(
    ("form", "before", "text", "after"),
    [
        ("pythonic", "<|tool_call_start|>[get(a=null, b='", f"{'x' * 300}\0y", "', c=1"),
        # the text ends with a sign that its mark begins with
        ("function_gemma", "<start_function_call>call:get{b:<escape>", "x <", "<escape>"),
        ("gemma4", '<|tool_call>call:get{b:<|"|>', "x <|", '<|"|>'),
    ],
)
def test_a_text_at_which_an_answer_is_cut_off_is_the_same_streamed(
    form: str, before: str, text: str, after: str
) -> None:
    """It is read again at growing distances, so that a stream may have shown more, or less."""
    reading, cut = answer_format(form, []), before + text + after
    whole = shown(reading.read(cut, "length"))
    [(_, arguments)] = whole[2]
    assert arguments.endswith(f'"b": {json.dumps(text)[:-1]}' + '"' * (form == "pythonic"))
    assert shown(streamed(reading, cut, list(range(1, len(cut))), complete=False)) == whole


def test_every_format_has_a_renderer() -> None:
    assert set(FORMATS) == set(IN_EVERY_FORMAT)


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_template_writes_is_read_back(form: str) -> None:
    found = list(differences(form, 25, seed=1))
    assert not found, found[0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FORMATS)
def test_ten_thousand_calls_are_read_back(form: str) -> None:
    found = list(differences(form, 10_000, seed=2, every=20))
    assert not found, found[0]
    cut = list(differences_of_cut_answers(form, 10_000, seed=2))
    assert not cut, cut[0]
