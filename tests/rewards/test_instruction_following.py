"""The instruction-following example: each constraint by hand, and the holes that a phrase or a
copy would use."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.instruction_following import make_rows, rewards

PROMPT = "Tell me about rain. Use only lower case letters."
RAIN = "rain falls from dark clouds onto fields."  # 7 words, 6 beside the topic


def scored(text: str, *constraints: dict[str, Any]) -> float:
    return rewards.score([PROMPT], [text], ["rain"], [list(constraints)])[0]


ENDS = {"kind": "ends_with", "phrase": "That is all."}
KEYED = {"kind": "json", "keys": ["title", "text"]}


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"kind": "lower"}, RAIN, "Rain falls from dark clouds onto fields."),
        ({"kind": "upper"}, RAIN.upper(), RAIN),
        ({"kind": "at_most", "words": 7}, RAIN, "rain falls softly from dark clouds onto fields."),
        ({"kind": "at_least", "words": 7}, RAIN, "rain falls from dark clouds above."),
        ({"kind": "sentences", "number": 2}, "Rain falls from dark clouds. Fields drink it.", RAIN),
        ({"kind": "sentences", "number": 1}, RAIN, "rain falls from dark clouds onto fields"),
        (ENDS, f"{RAIN} That is all.", f"That is all. {RAIN}"),
        (
            {"kind": "keyword", "word": "fields", "times": 1},
            RAIN + " Nobody minds it.",
            RAIN + " fields drink.",
        ),
        ({"kind": "no_comma"}, RAIN, "rain, falling from dark clouds onto fields."),
        (
            KEYED,
            json.dumps({"title": "rain", "text": RAIN}),
            json.dumps({"title": "rain", "body": RAIN}),
        ),
        (
            KEYED,
            json.dumps({"title": "rain", "text": RAIN}),
            "Here: " + json.dumps({"title": "rain", "text": RAIN}),
        ),
        (
            KEYED,
            json.dumps({"title": "rain", "text": RAIN}),
            json.dumps({"title": 1, "text": RAIN}),
        ),
    ],
    ids=lambda value: str(value.get("kind")) if isinstance(value, dict) else "",
)
def test_a_constraint_holds_or_not(constraint: dict[str, Any], right: str, wrong: str) -> None:
    assert (scored(right, constraint), scored(wrong, constraint)) == (1.0, 0.0)
    # so it is the constraint that failed
    assert rewards.has_content(wrong, PROMPT, "rain", [constraint])


def test_the_score_is_the_share_of_the_constraints() -> None:
    both = ({"kind": "lower"}, ENDS)
    assert scored(f"{RAIN} that is all.", *both) == 1.0
    assert scored(f"{RAIN} That is all.", *both) == 0.5  # the phrase, but its T is a capital
    assert scored(f"Nice {RAIN.upper()}", *both) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "That is all.",
        "Rain. That is all.",
        "rain that is all. that is all. that is all. that is all.",
        "Rain rain rain rain rain rain rain rain. That is all.",
        "rain is wet is wet is wet is wet is wet is wet that is all.",
        "Tell me about rain. Use only lower case letters. That is all.",
        "Snow falls from dark clouds onto fields. That is all.",
    ],
)
def test_an_answer_without_content_scores_nothing(text: str) -> None:
    assert scored(text, ENDS) == 0.0
    assert scored(text, {"kind": "at_most", "words": 90}) == 0.0


@pytest.mark.parametrize(
    "text", ['{"title": "rain", "text": "rain"}', '{"title": "", "text": ""}', "[" * 100_000]
)
def test_json_without_content_scores_nothing(text: str) -> None:
    assert scored(text, KEYED) == 0.0


def test_the_keyword_alone_is_no_content() -> None:
    assert (
        scored(
            "rain water water water water water.", {"kind": "keyword", "word": "water", "times": 5}
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("topic", "word"),
    [
        ("castles", "castle"),
        ("volcanoes", "volcano"),
        ("libraries", "library"),
        ("glass", "glass"),
    ],
)
def test_the_singular_names_the_topic(topic: str, word: str) -> None:
    assert rewards.names(topic, topic)
    assert rewards.names(word, topic)
    assert not rewards.names("rain", topic)


def test_an_unknown_constraint_is_named() -> None:
    with pytest.raises(KeyError, match="rhyme"):
        scored(RAIN, {"kind": "rhyme"})


def test_topics_and_pairs_are_held_out(tmp_path: Path) -> None:
    make_rows.write_rows(tmp_path, train=300, heldout=80)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )

    def pairs(rows: list[dict[str, Any]]) -> list[set[str]]:
        return [{wanted["kind"] for wanted in row["constraints"]} for row in rows]

    assert not {row["topic"] for row in train} & {row["topic"] for row in heldout}
    assert not [pair for pair in pairs(train) if pair in make_rows.HELD_OUT_PAIRS]
    assert sum(pair in make_rows.HELD_OUT_PAIRS for pair in pairs(heldout)) == 40
    assert set.union(*pairs(train)) == set(rewards.CHECKS) == set(make_rows.KINDS)
    assert all(
        re.search(rf"\b{row['topic']}\b", row["prompt"]) and len(row["constraints"]) == 2
        for row in train
    )
    assert make_rows.make_rows(5, heldout=True, seed=0) != make_rows.make_rows(
        5, heldout=True, seed=1
    )
