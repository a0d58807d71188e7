"""Groups of answers from the datums of a step, and rewards from their advantages, against
numbers worked by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_parallm.faces.tinker.data import DatumBatch, DatumLimits, read_batch
from mlx_parallm.faces.tinker.groups import (
    LIVE_STEPS,
    DrawnAnswer,
    LiveGroups,
    SampleRecord,
    TrainedAnswer,
    group_of,
    inferred_rewards,
    step_groups,
    trained_answers,
)
from mlx_parallm.faces.tinker.learner import Output
from mlx_parallm.faces.tinker.wire import read_forward_backward
from tests.tinker.serving import request_of

NAN = math.nan


@pytest.mark.parametrize(
    ("advantages", "rewards"),
    [
        ([0.5, -0.5, -0.5, 0.5], [1, 0, 0, 1]),  # of rewards 1, 0, 0, 1
        ([1.0, -1.0], [2, 0]),  # of 3 and 2, divided by their deviation 0.5: the scale is lost
        ([0.0, 0.0], [0, 0]),  # all right or all wrong: that is lost too
        ([0.25], [NAN]),
        ([0.5, NAN], [NAN, NAN]),
    ],
)
def test_a_reward_is_the_advantage_above_the_groups_lowest(
    advantages: list[float], rewards: list[float]
) -> None:
    np.testing.assert_array_equal(inferred_rewards(advantages), rewards)


def read(
    data: list[dict[str, Any]], loss: str = "importance_sampling"
) -> tuple[DatumBatch, Output]:
    """With log-probabilities of the trainer -1, -2, … and entropies 10, 20, … at the targets."""
    batch = read_batch(read_forward_backward(request_of(data, loss)), DatumLimits(64, 300))
    counts = [len(entry["tokens"]) for entry in data]
    logprobs = [-np.arange(1, count + 1, dtype=np.float32) for count in counts]
    return batch, Output(logprobs, 0.0, [-10 * row for row in logprobs])


def answers(
    data: list[dict[str, Any]], loss: str = "importance_sampling", **records: SampleRecord
) -> list[TrainedAnswer]:
    return trained_answers(*read(data, loss), records.get)


def policy(prompt: list[int], drawn: list[int], advantage: float, **fields: Any) -> dict[str, Any]:
    """A datum as rl_loop makes it: the prompt's targets have log-probability and advantage 0."""
    tokens, before = [*prompt, *drawn], len(prompt) - 1
    return {
        "tokens": tokens[:-1],
        "target_tokens": [0] * before + drawn,
        "logprobs": [0.0] * before + [-0.5] * len(drawn),
        "advantages": [0.0] * before + [advantage] * len(drawn),
    } | fields


def test_an_answer_is_what_was_sampled_behind_its_prompt() -> None:
    spans = {"spans": [("", 0, 1), ("s", 0, 3)]}
    [plain, named] = answers(
        [policy([7, 8], [9, 10, 2], 0.5), policy([7, 8], [9, 10, 2], 0.5, **spans)],
        s=SampleRecord("run", 4, 0.7, np.zeros(3, np.float32), stopped=False),
    )
    for answer in (plain, named):
        assert answer.tokens.tolist() == [7, 8, 9, 10, 2] and answer.sampled.tolist() == [
            False,
            False,
            True,
            True,
            True,
        ]
        assert answer.trainer_logprobs.tolist() == [
            0,
            0,
            -2,
            -3,
            -4,
        ] and answer.entropies.tolist() == [
            0,
            0,
            20,
            30,
            40,
        ]
        assert answer.advantage == 0.5 and answer.prompt == np.array([7, 8], np.int32).tobytes()
    assert (plain.sequences, plain.stopped, plain.versions.tolist()) == ((), None, [-1] * 5)
    assert (named.sequences, named.stopped, named.versions.tolist()) == (
        ("s",),
        False,
        [-1, -1, 4, 4, 4],
    )
    assert named.temperature == 0.7


def test_turns_between_which_the_environment_speaks_are_one_answer() -> None:
    """The client's spans say what was sampled; an advantage that differs between tokens is none
    of the answer."""
    entry = policy(
        [7, 8], [9, 20, 21, 10], 0.25, spans=[("", 0, 1), ("a", 0, 1), ("", 0, 2), ("b", 0, 1)]
    )
    entry["advantages"] = [0.0, 0.25, 0.0, 0.0, 0.25]
    [answer] = answers([entry])
    assert answer.sampled.tolist() == [False, False, True, False, False, True]
    assert answer.sequences == ("a", "b") and answer.advantage == 0.25
    entry["advantages"] = [0.0, 0.25, 0.0, 0.0, 0.5]
    assert math.isnan(answers([entry])[0].advantage)


def test_rows_of_a_file_are_no_answers() -> None:
    """Without spans cross_entropy says nothing of samples; with them an answer has no advantage."""
    row = {"tokens": [1, 2], "target_tokens": [2, 3], "weights": [0.0, 1.0]}
    assert answers([row], "cross_entropy") == []
    [answer] = answers([row | {"spans": [("", 0, 1), ("s", 0, 1)]}], "cross_entropy")
    assert answer.advantages is None and answer.logprobs is None and math.isnan(answer.advantage)
    wide = {"tokens": [1, 2], "target_tokens": np.ones((2, 2), int), "weights": np.ones((2, 2))}
    assert answers([wide | {"spans": [("s", 0, 2)]}], "cross_entropy") == []


def test_groups_and_their_numbers_are_those_of_a_training_run() -> None:
    right, wrong, alone = answers(
        [policy([7], [9, 2], 0.5), policy([7], [5], -0.5), policy([8], [9], 0.0)]
    )
    first, second = group_of("a", [right, wrong], "ppo"), group_of("b", [alone], "ppo")
    assert [rollout.reward for rollout in first.rollouts] == [1.0, 0.0]
    assert first.advantages == ((0.0, 0.5, 0.5), (0.0, -0.5)) and first.rollouts[0].mask == (
        0,
        1,
        1,
    )
    step = step_groups(3, [(first, [right, wrong]), (second, [alone])], weights=2)
    assert step.tokens.columns["advantages"].tolist() == [0.5, 0.5, -0.5, 0.0]
    assert step.tokens.columns["trainer_logprobs"].tolist() == [-1.0, -2.0, -1.0, -1.0]
    assert [sequence.trained for sequence in step.batch.sequences] == [2, 1, 1]
    numbers = step.numbers()
    assert (numbers["inferred_reward"], numbers["judged_by"]) == (0.5, "inferred_reward")
    assert step_groups(3, [(second, [alone])], weights=2).numbers()["judged_by"] == "loss", (
        "no reward is known"
    )
    assert numbers["groups_without_variance"] == 0.5
    assert (
        numbers["completion_tokens_mean"] == pytest.approx(4 / 3)
        and numbers["rollout_entropy"] == 0.5
    )
    assert step_groups(1, [], weights=0).numbers()["inferred_reward"] is None


def test_sampler_and_learner_are_compared_on_the_same_weights_at_temperature_1() -> None:
    spans = [("", 0, 0), ("s", 0, 2)]
    entry = policy([7], [9, 2], 0.5, spans=spans)
    found = [
        answers([entry], s=SampleRecord("run", step, temperature, np.zeros(2, np.float32)))[0]
        for step, temperature in ((4, 1.0), (3, 1.0), (4, 0.5))
    ]
    numbers = step_groups(5, [(group_of("a", found, "ppo"), found)], weights=4).numbers()
    assert (numbers["logprob_diff_mean"], numbers["logprob_diff_max"]) == (1.0, 1.5), (
        "-1 and -2 against -0.5"
    )
    assert numbers["staleness"] == pytest.approx(1 / 3)
    later = step_groups(5, [(group_of("a", found, "ppo"), found)], weights=4, generation=1)
    assert later.joined == {}, "a checkpoint was loaded since: step 4 is another one"


def drawn(name: str, prompt: int = 1, step: int = 0, size: int = 1) -> DrawnAnswer:
    return DrawnAnswer(name, (prompt,), (5,) * size, (-0.5,) * size, 1.0, step, stopped=True)


def test_samples_wait_by_prompt_and_weights_until_a_step_takes_them() -> None:
    live = LiveGroups()
    for sample in (drawn("a"), drawn("b"), drawn("c", prompt=2), drawn("d", step=1)):
        live.add(sample, 0)
    groups = live.waiting()
    assert [sorted(group.answers) for group in groups] == [["a", "b"], ["c"], ["d"]]
    assert [math.isnan(rollout.reward) for rollout in groups[0].group().rollouts] == [True, True]
    for group in groups:
        group.noted(group.group())
    names = ["a", "c", "unknown"]
    assert live.homes(names) == {"a": groups[0], "c": groups[1]} and live.left_by(names) == {
        groups[0].group_id
    }
    live.take(names)
    assert [sorted(group.answers) for group in live.changed()] == [["b"]]
    assert live.waiting() == [groups[0], groups[2]]
    live.add(replace(drawn("e", step=1), generation=1), 0)
    assert [sorted(group.answers) for group in live.waiting()] == [["b"], ["d"], ["e"]], (
        "other weights of that step"
    )


def test_a_client_that_sends_no_ids_is_understood_by_its_tokens() -> None:
    """Two equal samples and two turns: each is found once, with its weights and how it ended."""
    live = LiveGroups()
    for name in ("a", "b"):
        live.add(DrawnAnswer(name, (7, 8), (9, 2), (-0.5, 0.0), 0.7, 3, stopped=True), 0)
    live.add(DrawnAnswer("turn", (7, 8, 9, 2, 20), (10,), (-0.5,), 0.7, 4, stopped=False), 0)
    live.add(DrawnAnswer("other", (7, 8), (9, 3), (-0.5, -0.5), 1.0, 3, stopped=True), 0)
    certain = policy([7, 8], [9, 2], 0.0) | {"logprobs": [0.0, -0.5, 0.0]}
    turns = policy([7, 8], [9, 2, 20, 10], 0.5) | {"advantages": [0.0, 0.5, 0.5, 0.0, 0.5]}
    turns["logprobs"] = [0.0, -0.5, -0.5, 0.0, -0.5]
    found = trained_answers(*read([certain, turns, certain]), {}.get, live.claim)
    assert [answer.sequences for answer in found] == [("a",), ("b", "turn"), ()]
    assert found[0].sampled.tolist() == [0, 0, 1, 1], (
        "a token that was certain has log-probability 0"
    )
    assert found[1].sampled.tolist() == [0, 0, 1, 1, 0, 1] and found[1].versions.tolist() == [
        -1,
        -1,
        3,
        3,
        -1,
        4,
    ]
    assert (found[0].stopped, found[1].stopped, found[0].temperature) == (True, False, 0.7)
    joined = step_groups(9, [(group_of("a", found, "ppo"), found)], weights=5).joined
    assert joined == {"staleness": pytest.approx(9 / 5), "staleness_max": 2}, (
        "four tokens of 3 and one of 4"
    )
    live.take(name for answer in found for name in answer.sequences)
    assert [sorted(group.answers) for group in live.waiting()] == [["other"]]
    row = {"tokens": [7, 8, 9], "target_tokens": [8, 9, 3], "weights": [0.0, 1.0, 1.0]}
    [distilled] = trained_answers(*read([row], "cross_entropy"), {}.get, live.claim)
    assert distilled.sequences == ("other",)


def test_an_answer_is_the_longest_sample_that_it_holds() -> None:
    """One sample is the beginning of another one: each datum is its own sample."""
    live = LiveGroups()
    for name, tokens in (("short", (9,)), ("long", (9, 2)), ("next", (10,))):
        prompt = (7, 9, 2) if name == "next" else (7,)
        live.add(DrawnAnswer(name, prompt, tokens, (-0.5,) * len(tokens), 1.0, 0, stopped=True), 0)
    found = trained_answers(
        *read([policy([7], [9, 2, 10], 0.5), policy([7], [9], 0.5)]), {}.get, live.claim
    )
    assert [answer.sequences for answer in found] == [("long", "next"), ("short",)]


def test_old_samples_give_their_tokens_back_and_are_known_on() -> None:
    live = LiveGroups(most_bytes=2000, most_samples=6)
    live.add(drawn("old"), 0)
    assert live.too_old(LIVE_STEPS) == []
    [old] = live.too_old(LIVE_STEPS + 1)
    live.dropped([old])
    assert live.waiting() == [] and live.too_old(99) == [] and set(live.homes(["old"])) == {"old"}
    for number in range(5):
        live.add(drawn(str(number), prompt=number, size=1), LIVE_STEPS)
    assert live.make_room() == []
    kept = [sorted(group.answers) for group in live.waiting()]
    assert kept == [[], ["1"], ["2"], ["3"], ["4"]], "five of about 440 bytes do not fit into 2000"
    assert [part.sequence_id for part in live.claim(np.array([0, 5], np.int32))] == ["0"]
    live.add(drawn("more", prompt=0), LIVE_STEPS)
    assert live.make_room() == [] and live.homes(["old", "0"]).keys() == {"0"}, (
        "the oldest went, which was dropped"
    )


def test_a_prompt_that_samples_share_is_counted_and_held_once() -> None:
    live = LiveGroups(most_bytes=20_000)
    for number in range(8):
        live.add(
            DrawnAnswer(str(number), tuple(range(1000)), (5,), (-0.5,), 1.0, 0, stopped=True), 0
        )
    assert live.make_room() == []
    [group] = live.waiting()
    assert (
        len(group.answers) == 8
        and len({id(answer.prompt) for answer in group.answers.values()}) == 1
    )
