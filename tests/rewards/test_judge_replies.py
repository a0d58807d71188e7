"""How the reply of a judge of groups is read, however it is written, and the choice between two."""

import itertools
import json
import math
import os
import random

import pytest

from mlx_parallm.rewards import judge_replies
from mlx_parallm.rewards.group_judge import pairs_of
from mlx_parallm.rewards.judge_replies import read, read_choice

CASES = int(os.environ.get("ATTACK_CASES", "60"))
GOOD = '{"answer_1": {"reason": "r", "score": 0.25}, "answer_2": {"reason": "s", "score": 1}}'
DRAFT = '{"answer_1": {"reason": "?", "score": 1}, "answer_2": {"reason": "?", "score": 0}}'
HALF = '{"answer_1": {"reason": "r", "score": 0.25}}'
REPLIES = {
    # one reply
    GOOD: [0.25, 1],
    f"```json\n{GOOD}\n```": [0.25, 1],
    f"```json {GOOD} ```": [0.25, 1],
    f"```\n{GOOD}": [0.25, 1],
    f"I think {{so}}:\n{GOOD}": [0.25, 1],
    f"{GOOD}\nI hope this helps, {{1}}!": [0.25, 1],
    GOOD.replace("}}", ",},}").replace('"r"', '"r, }"'): [0.25, 1],
    GOOD.replace('"r"', '"two\nlines"'): [0.25, 1],
    f'{{"scores": {GOOD}}}': [0.25, 1],
    '{"Answer 1": 0.25, "answer-02": 1}': [0.25, 1],
    f"{HALF}\n" + '{"answer_2": {"reason": "s", "score": 1}}': [0.25, 1],
    f"```json\n{HALF}\n```\n```json\n" + '{"answer_2": 1}\n```': [0.25, 1],
    # more than one: the last counts, behind the reasoning
    f"{DRAFT}\n{GOOD}": [0.25, 1],
    f"{DRAFT}{GOOD}": [0.25, 1],
    f"For example {DRAFT}. Mine: {GOOD}": [0.25, 1],
    f"```json\n{DRAFT}\n```\nNo:\n```json\n{GOOD}\n```": [0.25, 1],
    f"<think>Perhaps {DRAFT}</think>\n{GOOD}": [0.25, 1],
    f"Perhaps {DRAFT} so\n</think>\n{GOOD}": [0.25, 1],
    f'{{"draft": {DRAFT}, "final": {GOOD}}}': [0.25, 1],
    f'It says {{"answer_2": 1}}, but {HALF}': [0.25, "left it out"],
    f"<think>Perhaps {DRAFT}": ["its reasoning does not end"] * 2,
    f"<think>Perhaps {DRAFT}</think> I cannot tell.": ["it begins 'I cannot tell.'"] * 2,
    f"{DRAFT}\n</think>\nI cannot tell.": ["it begins 'I cannot tell.'"] * 2,
    GOOD.replace('"r"', '"it writes </think>"'): [0.25, 1],
    f"{DRAFT} or rather {GOOD[:-9]}": ["cut off"] * 2,
    f'{DRAFT} or rather {{"sco': ["cut off"] * 2,
    # none
    "": ["there is none"] * 2,
    " \n": ["there is none"] * 2,
    "8": ["it begins '8'"] * 2,
    "[1, 2]": ["it begins"] * 2,
    '{"score": 1}': ["it begins"] * 2,
    GOOD[:-9]: ["cut off"] * 2,
    "[" * 5000: ["it begins"] * 2,
    "{" * 5000: ["more than 300 braces"] * 2,
    '{"a":' * 5000: ["more than 300 braces"] * 2,
    # scores
    '{"answer_1": {"score": "0.8"}, "answer_2": "1"}': [0.8, 1],
    '{"answer_1": {"score": "80%"}, "answer_2": " 8/10 "}': [0.8, 0.8],
    '{"answer_1": 1.5, "answer_2": 1}': ["not from 0 to 1", 1],
    '{"answer_1": "150 %", "answer_2": "1/0"}': ["not from 0 to 1"] * 2,
    '{"answer_1": {"score": 80}, "answer_2": 1}': ["not from 0 to 1", 1],
    '{"answer_1": {"score": -0.1}, "answer_2": 1}': ["not from 0 to 1", 1],
    '{"answer_1": {"score": NaN}, "answer_2": Infinity}': ["not from 0 to 1"] * 2,
    '{"answer_1": {"score": 1e400}, "answer_2": 1}': ["not from 0 to 1", 1],
    '{"answer_1": {"score": "0,8"}, "answer_2": "high"}': ["not a number"] * 2,
    '{"answer_1": {"score": true}, "answer_2": null}': ["not a number"] * 2,
    '{"answer_1": {"reason": "r"}, "answer_2": [1]}': ["not a number"] * 2,
    # names
    '{"answer_1": {"score": 0, "score": 1}, "answer_2": 1}': ["two scores", 1],
    '{"answer_1": 0, "answer_2": 1, "answer_1": 1}': ["two scores", 1],
    '{"answer_1": 0, "answer_2": 1, "Answer 1": 1}': ["two scores", 1],
    '{"answer_2": {"score": 1}, "answer_7": {"score": 0}}': ["left it out", 1],
    '{"answer_0": 1, "answer_2": 1, "answer_१": 1}': ["left it out", 1],
}


def test_what_a_judge_may_reply():
    for text, expected in REPLIES.items():
        for verdict, wanted in zip(read(text, 2, 10).verdicts, expected, strict=True):
            if isinstance(wanted, str):
                assert verdict.score is None and wanted in verdict.reason, (text, verdict)
            else:
                assert verdict.score == wanted, (text, verdict)
    assert read('{"answer_2": 1, "answer_7": 0}', 2, 10).unknown == ["answer_7"]
    long = json.dumps({"answer_1": {"reason": "x" * 99 + "\ud800", "score": 0}})
    assert read(long, 1, 10).verdicts[0].reason == "x" * 20 + " …"


def dressed(rng, reply):
    """The reply as a judge that no schema holds may write it."""
    text = json.dumps(reply, indent=rng.choice([None, 1]))
    if rng.random() < 0.3:
        text = text.replace("}", ",}")
    text = rng.choice(
        ["{}", "```json\n{}\n```", "Well {{x}}: {} Done.", '{{"scores": {}}}']
    ).format(text)
    other = json.dumps({name: {"reason": "not yet", "score": 0.123} for name in reply})
    before = ["", f"Say {other} as asked. ", f"<think>hm {other}</think>", f"{other}\n</think>\n"]
    return rng.choice(before) + text


def test_however_it_is_written_a_reply_is_read_or_has_no_score():
    rng = random.Random(2)
    for _ in range(2 * CASES):
        scores = [rng.choice([0.0, 0.05, 0.5, 1.0]) for _ in range(rng.randint(1, 5))]
        written = [rng.choice([s, str(s), f"{s:.0%}"]) for s in scores]
        reply = {
            f"answer_{n}": {"reason": rng.choice(['a "b" {c}', "d\ne", "é,"]), "score": score}
            for n, score in enumerate(written, 1)
        }
        text = dressed(rng, reply)
        found = read(text, len(scores), 99)
        assert [verdict.score for verdict in found.verdicts] == scores, text
        cut = text[: rng.randint(0, len(text))]
        for verdict, score in zip(read(cut, len(scores), 99).verdicts, scores, strict=True):
            assert verdict.score in (None, score) or "</think>" not in cut, cut


def test_commas_without_end_and_a_reply_without_end(monkeypatch):
    """Each superfluous comma was one more reading of the whole reply."""
    readings = []

    class Decoder:
        def raw_decode(self, text, place=0):
            readings.append(place)
            return decoder.raw_decode(text, place)

    decoder = judge_replies.DECODER
    monkeypatch.setattr(judge_replies, "DECODER", Decoder())
    more = ",".join(f'"k{number}": ["a,}}\\",]", 1, ]' for number in range(3000))
    reply = f'{{"answer_1": {{"reason": "a,}} , ]\\" ,}}", "score": 1,}}, {more},}}'
    [verdict] = read(reply, 1, 240).verdicts
    assert (verdict.score, verdict.reason) == (1, 'a,} , ]" ,}')
    assert len(readings) == 2
    [verdict] = read("no" * 200_001, 1, 240).verdicts
    assert "more than 400000 characters" in verdict.reason and len(readings) == 2
    [verdict] = read('{"answer_1": {"reason": "a,, }", "score": 0.5,, ,\n},,,}', 1, 240).verdicts
    assert (verdict.score, verdict.reason) == (0.5, "a,, }")
    readings.clear()
    [verdict] = read('{"x": [' * 299 + ",]" * 150_000, 1, 240).verdicts
    assert "too many within each other" in verdict.reason and len(readings) < 40
    # braces of another kind cost nothing: they are not read to the end
    code = "if (a) { b(1, 2) } " * 200 + "x" * 300_000
    [verdict] = read(f'{code}{{"answer_1": 0.5,}}', 1, 240).verdicts
    assert verdict.score == 0.5


def test_long_numbers_and_many_names_are_read_at_once():
    """Each took the square of its length: minutes."""
    scores = ("1" * 390_000 + "x", "1" + " " * 390_000 + "x")
    for score in scores:
        [verdict] = read(json.dumps({"answer_1": score}), 1, 240).verdicts
        assert verdict.score is None and "is not a number" in verdict.reason
    names = ",".join(f'"{number}":1' for number in range(40_000))
    [verdict] = read(f'{{{names},"0":1,"answer_1":{{"score":1,"score":0}}}}', 1, 240).verdicts
    assert verdict.reason == "the judge gave it two scores"


def test_whatever_it_replies_a_score_is_from_0_to_1():
    rng = random.Random(1)
    pieces = ['"answer_1"', '"answer_2"', '"score"', ":", ",", "{", "}", "1", "0.5", "-1", "1e400"]
    pieces += ["NaN", "null", "true", '"x"', "[", "]", "```json\n", "\n```", "\\", "\ud800", " "]
    good = '{"answer_1": {"reason": "r", "score": 0.5}, "answer_2": {"reason": "s", "score": 1}}'
    for _ in range(10 * CASES):
        text = list(good) if rng.random() < 0.7 else []
        for _ in range(rng.randint(1, 8)):
            place = rng.randint(0, len(text))
            text[place : place + rng.randint(0, 3)] = rng.choices(pieces, k=rng.randint(0, 3))
        found = read("".join(text), 2, 10)
        assert len(found.verdicts) == 2
        for verdict in found.verdicts:
            assert verdict.score is None or 0 <= verdict.score <= 1
            assert verdict.score is not None or verdict.reason
            verdict.reason.encode()


def test_choices_and_pairs_by_hand():
    half, tenth = math.log(0.5), math.log(0.1)
    choices = {
        (("A", math.log(0.3)), ("B", tenth), ("The", half)): 0.75,
        (("B", math.log(0.8)),): 0.2,  # A may have all that is left, 0.2
        (("A", math.log(0.6)), ("The", math.log(0.2))): 0.75,  # B counts as the last one listed
        (("A", 1000.0), ("B", 0.7)): 0.5,  # no probability is above 1
        (("The", -0.01), ("A", -9.0)): "only 0.0% of the probability is on A and B, the first is",
        (("The", math.log(0.9)), ("A", math.log(0.03)), ("B", math.log(0.01))): "only 4.0% of",
        (("The", math.log(0.9)), ("A", math.log(0.045)), ("B", math.log(0.015))): 0.75,
        ((" A", tenth), ("\u2581A", tenth), ("\u0120B", tenth), ("**A", tenth)): 0.75,
        (("AB", half), ("a", half), ("Answer", half), ("", half), ("A", tenth)): 1.0,
        (("A", 1e-7), ("B", -math.inf), ("B", math.nan)): 1.0,
        (("The", half), ("Sure", tenth)): "neither A nor B is among its likeliest tokens, the",
        (("A", -math.inf),): "neither",
        (): "gives no log-probabilities",
        None: "gives no log-probabilities",
    }
    for likely, wanted in choices.items():
        first, second = read_choice(likely).verdicts
        if isinstance(wanted, str):
            assert first.score is second.score is None and wanted in second.reason
        else:
            assert (first.score, second.score) == pytest.approx((wanted, 1 - wanted)), likely
    assert "40% of the probability" in read_choice(next(iter(choices))).verdicts[0].reason
    assert pairs_of([0, 1, 2, 3, 4], 2) == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]]
    assert pairs_of([7], 4) == [] and pairs_of([1, 0], 9) == [[0, 1]]
    for size, others in itertools.product(range(2, 9), range(1, 9)):
        pairs = pairs_of(range(size), others)
        assert len({frozenset(pair) for pair in pairs}) == len(pairs)
        for answer in range(size):
            met = sum(answer in pair for pair in pairs)
            assert met == min(others + others % 2, size - 1), "an odd number counts as the next one"
