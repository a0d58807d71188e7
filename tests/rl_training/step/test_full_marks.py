"""What answers with full marks look like, on rollouts made by hand, and when a run is said to have
a reward hole.

Members of the kind that were tried: a quoted phrase whose first and last token differ from the
prompt's; one text for every prompt; short labels and numbers (not judged); a task that copies from
the start; several turns; all rewards 0; a reward that is not between 0 and 1.
"""

import pytest

from mlx_parallm.rl_training.monitor.evidence import Evidence
from mlx_parallm.rl_training.monitor.reward_hole import full_marks_to_read, reward_hole
from mlx_parallm.rl_training.step.full_marks import FullMarks, FullMarksCollector, is_piece
from mlx_parallm.types import RolloutGroup
from tests.rl_training.rollouts import make_rollout

END = 2


def group(number, prompt, *answers):
    rollouts = tuple(
        make_rollout((*tokens, END), prompt=prompt, reward=reward, stop_reason="stop")
        for tokens, reward in answers
    )
    return RolloutGroup(f"g{number}", "tasks", rollouts)


def counts(*groups):
    collector = FullMarksCollector()
    for each in groups:
        collector.add(each)
    return collector.result()


def test_a_quoted_phrase_is_a_piece_whose_ends_may_differ():
    """Prompt: 10 11 «20 21 22 23 24 25» 12; an answer's ends may be other tokens, as a tokenizer
    joins them."""
    prompt = (10, 11, 20, 21, 22, 23, 24, 25, 12)
    answers = ((20, 21, 22, 23, 24), 1.0), ((99, 21, 22, 23, 24, 98), 1.0), ((20, 22, 21, 23), 0.0)
    found = counts(group(0, prompt, *answers))
    assert found == FullMarks(
        answers=3, pieces=2, full=2, full_pieces=2, prompts=1, prompts_alike=1
    )


def test_short_answers_are_not_judged():
    """The largest of 47, 48, 90 is in its prompt, and a label is the same for many prompts."""
    groups = [group(n, (10, n, 47, 48, 90), ((47, 48), 1.0), ((90,), 0.0)) for n in range(20, 30)]
    found = counts(*groups)
    assert (found.pieces, found.full, found.prompts, found.prompts_alike) == (0, 10, 10, 0)


def test_one_text_counts_a_prompt_once():
    text = (7, 8, 9, 7, 8)
    groups = [
        group(n, (10, prompt), (text, 3.0), (text, 3.0), ((5, 6, 5, 6), 1.0))
        for n, prompt in enumerate((1, 1, 4))
    ]
    found = counts(*groups)
    assert (found.full, found.prompts, found.prompts_alike) == (6, 2, 2), (
        "full marks are the highest reward, here 3"
    )


def test_nothing_earned_is_no_full_mark_and_several_turns_are_left_out():
    assert counts(group(0, (1, 2, 3, 4, 5, 6), ((2, 3, 4, 5), 0.0))).full == 0
    turns = make_rollout((1, 2, 3, 4), prompt=(5,), reward=1.0)
    several = RolloutGroup("g", "t", (make_rollout((6,), reward=1.0, earlier=(turns,)),))
    assert counts(several) == FullMarks()
    assert counts() == FullMarks()


@pytest.mark.parametrize(
    ("answer", "prompt", "piece"),
    [
        ("b c", "a b c d", True),
        ("a b c d", "a b c d", True),
        ("b d", "a b c d", False),
        ("a b c d e", "a b c d", False),
        ("", "a b", False),
        ("a", "", False),
        ("b b c", "a b b b c", True),  # the first place that fits the first word is not the one
    ],
)
def test_a_stretch_of_the_prompt(answer, prompt, piece):
    assert is_piece(answer.split(), prompt.split()) == piece


def test_a_task_about_short_words_is_no_task_of_quoting():
    """The quickstart, which learned, was told of a hole: in a token a letter, "bc" of "abcd"
    lies in "Sort: dbca"."""
    assert not is_piece("abcd", "Sort: dbca", ragged=True) and not is_piece(
        "bcef", "Sort: ebfc", ragged=True
    )
    assert is_piece("abcd", "Sort: abcd", ragged=True), "sorted before"
    assert is_piece("(abcd)", "Write abcd.", ragged=True) and not is_piece(
        "(abc)", "Write abc.", ragged=True
    )


def lines(count, pieces=0, full=16, prompts=8, alike=1, length=20.0, name="tasks"):
    marks = FullMarks(
        answers=64,
        pieces=pieces,
        full=full,
        full_pieces=pieces,
        prompts=prompts,
        prompts_alike=alike,
    )
    return [
        {
            "full_marks": {name: marks.to_json()},
            "completion_tokens_mean": length,
            "reward_mean": 0.3,
        }
    ] * count


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (
            lines(5, 1),
            lines(5, 5),
            "25 of 80 answers with full marks are nothing but a piece of their prompt",
        ),
        (lines(5, 0), lines(5, 5, length=12.0), "; answers went from 20.0 to 12.0 tokens"),
        (
            lines(5, 0, alike=2),
            lines(5, 0, alike=7),
            "one text earned the full marks of 35 of 40 prompts",
        ),
        (lines(5, 4), lines(5, 5), None),  # so from the start: the task is to quote
        (lines(5, 0), lines(5, 1), None),  # 5 of 80
        (lines(5, 0, full=2), lines(5, 1, full=2), None),  # too few to say
        # so from the start: one answer is right
        (lines(5, 0, alike=5), lines(5, 0, alike=7), None),
        ([], lines(5, 5), None),  # nothing to compare with
        # a run that was begun by an older version
        ([{"reward_mean": 0.3}], lines(5, 5), "25 of 80"),
        (lines(5), [{"reward_mean": 0.3}], None),
    ],
    ids=[
        "pieces",
        "shorter",
        "one text",
        "quotes",
        "few",
        "too few",
        "one answer",
        "no start",
        "older",
        "no marks",
    ],
)
def test_what_grew_is_a_sign(then, now, words):
    sign = reward_hole(Evidence(now, then))
    assert (sign is None) == (words is None)
    if words is not None:
        assert words in sign.words and "reward hole in tasks" in sign.words


def test_the_answers_to_read_begin_with_the_pieces():
    def example(prompt, text, reward=1.0):
        return {"prompt": prompt, "text": text, "reward": reward}

    examples = [
        example("Say one word.", "Sun!"),
        example("End with: So it goes.", "so it goes"),
        example("Say no.", "no", 0.5),
    ]
    found = full_marks_to_read(
        [{"environments": {"old": {}}}, {"environments": {"e": {"examples": examples}}}]
    )
    assert [(each.answer, each.piece) for each in found] == [("so it goes", True), ("Sun!", False)]
    assert full_marks_to_read([]) == ()
