"""Reward computers from Python: parts, methods, groups."""

import random

import pytest

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.computers import (
    ParetoRewardComputer,
    SVRLRewardComputer,
    WeightedRewardComputer,
    create_reward_computer,
)
from tests.rewards.trajectories import trajectory


def right(trajectory):
    return trajectory.text == "4"


def brevity(trajectory):
    return -len(trajectory.text)


def test_a_weighted_sum_of_binary_and_soft_parts():
    computer = WeightedRewardComputer([right, brevity], weights=[1.0, 0.25])
    answers = [trajectory("4"), trajectory("five"), trajectory("4.0")]
    assert computer.compute_rewards(answers) == [0.75, -1.0, -0.75]
    statistics = computer.compute_objective_statistics(answers)
    assert statistics["right"] == pytest.approx(
        {"mean": 1 / 3, "std": 2**0.5 / 3, "min": 0, "max": 1}
    )
    assert statistics["brevity"]["mean"] == pytest.approx(-8 / 3)


def test_a_function_with_trls_signature_is_a_part():
    """It is called once for a group: 1 for the longest answer of its own group."""

    def longest(completions, **columns):
        return [float(len(text) == max(map(len, completions))) for text in completions]

    computer = WeightedRewardComputer([right, longest], weights=[1.0, 0.5])
    answers = [trajectory("4", group="a"), trajectory("44", group="a"), trajectory("4", group="b")]
    assert computer.compute_rewards(answers) == [1.0, 0.5, 1.5]


def test_weights_are_uniform_where_none_are_given():
    assert WeightedRewardComputer([right, brevity]).compute_rewards([trajectory("4")]) == [0.0]


def test_parts_named_as_in_a_configuration_are_called_for_a_group_with_its_metadata(tmp_path):
    (tmp_path / "score.py").write_text(
        "sizes = []\ndef exact(completions, answer, ignore=''):\n"
        "    sizes.append(len(completions))\n    return [float(c.strip(ignore) == a) for c, a"
        " in zip(completions, answer)]\n"
    )
    reference = f"python:{tmp_path / 'score.py'}:exact"
    computer = WeightedRewardComputer(
        [brevity, reference], ["short", "exact"], [0.125, 1.0], options={"exact": {"ignore": "."}}
    )
    answers = [
        trajectory("4.", group="a", answer="4"),
        trajectory("5", group="b", answer="6"),
        trajectory("44", group="a", answer="4"),
    ]
    assert computer.compute_rewards(answers) == [0.75, -0.125, -0.25]
    [function] = computer._by_reference._functions
    assert function.call.func.__globals__["sizes"] == [2, 1]


def test_relative_and_pareto_compare_the_answers_of_one_prompt():
    """A batch of two prompts: the first one's answers are all better than the second one's."""
    answers = [
        trajectory("x" * size, group=group)
        for group, size in [("a", 1), ("b", 9), ("a", 2), ("b", 8)]
    ]
    computer = ParetoRewardComputer(objective_functions=[brevity], objective_names=["brevity"])
    assert computer.compute_rewards(answers, method="relative") == [1.0, -1.0, -1.0, 1.0]
    assert computer.compute_rewards(answers, method="pareto") == [1.0, 0.5, 0.5, 1.0]
    # a Pareto computer's own method
    assert computer.compute_rewards(answers) == [1.0, 0.5, 0.5, 1.0]


def test_trajectories_that_are_alone_in_their_group_are_compared_with_each_other():
    answers = [trajectory("x" * size, group=str(size)) for size in (3, 1, 2)]
    assert ParetoRewardComputer(objectives=[brevity]).compute_rewards(answers) == pytest.approx(
        [1 / 3, 1, 2 / 3]
    )


def test_the_front_of_all_trajectories_has_the_duplicates_and_not_the_incomplete():
    def score(name):
        return lambda trajectory: trajectory.metadata[name]

    points = [(2, 1), (2, 1), (1, 2), (1, 1), (None, 9)]
    answers = [trajectory(first=first, second=second) for first, second in points]
    computer = ParetoRewardComputer([score("first"), score("second")], ["first", "second"])
    assert computer.get_pareto_frontier_indices(answers) == [0, 1, 2]


def test_normalized_rewards_have_mean_0_and_deviation_1_whatever_the_method():
    rng = random.Random(0)
    answers = [trajectory("x" * rng.randint(1, 30), group=rng.choice("ab")) for _ in range(30)]
    computer = WeightedRewardComputer([brevity], normalize=True)
    for method in ("absolute", "relative", "pareto"):
        rewards = computer.compute_rewards(answers, method)
        assert sum(rewards) == pytest.approx(0, abs=1e-12)
        assert sum(value**2 for value in rewards) / 30 == pytest.approx(1)


def test_what_no_part_scores_has_no_reward():
    computer = WeightedRewardComputer([lambda t: None if t.text == "?" else len(t.text)], ["size"])
    played = [trajectory("a"), trajectory("?"), trajectory("abc")]
    assert computer.compute_rewards(played) == [1.0, None, 3.0]
    assert computer.compute_rewards([trajectory("?")]) == [None]
    assert SVRLRewardComputer(lambda _: None).compute_rewards([svrl("42")]) == [None]


def svrl(given, *, spent=0.0, steps=1, **more):
    noted = {"answer": "42", "budget": 10.0, "max_steps": 20, "spent": spent, "final_answer": given}
    return trajectory(steps=steps, **noted | more)


def test_svrl_is_quality_less_the_cost_of_verifying():
    """1 - 0.1 · 3/10 + 0.05 · (20 - 4)/20 and the same without the answer."""
    episodes = [
        svrl("42", spent=3.0, steps=4),
        svrl("41", spent=3.0, steps=4),
        svrl(None, spent=10.0, steps=20),
    ]
    assert SVRLRewardComputer().compute_rewards(episodes) == pytest.approx([1.01, 0.01, -0.1])


def test_svrl_weights_and_evaluator_are_the_callers():
    computer = SVRLRewardComputer(
        lambda episode: 0.5, verification_weight=1.0, efficiency_weight=0.0
    )
    assert computer.compute_rewards([svrl("41", spent=2.5)]) == [0.25]


def test_svrl_objectives_are_task_cost_and_efficiency():
    cheap, dear, slow = svrl("42", spent=1.0), svrl("42", spent=2.0), svrl("42", spent=1.0, steps=2)
    assert SVRLRewardComputer().compute_rewards([cheap, dear, slow], "pareto") == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("given", "answer", "score"),
    [
        ("42.0", "42", 1),
        (" Paris ", "paris", 1),
        ("New  York", "new york", 1),
        ("4", "42", 0),
        ("nan", "nan", 0),
    ],
)
def test_a_final_answer_is_a_number_or_a_text(given, answer, score):
    computer = SVRLRewardComputer(verification_weight=0.0, efficiency_weight=0.0)
    assert computer.compute_rewards([svrl(given, answer=answer)]) == [score]


def test_svrl_wants_the_account_of_its_environment():
    with pytest.raises(RolloutRejectedError, match="max_steps"):
        SVRLRewardComputer().compute_rewards([trajectory("42")])
    with pytest.raises(RolloutRejectedError, match='no "answer"'):
        SVRLRewardComputer().compute_rewards([svrl("42", answer=None)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightedRewardComputer(), "pass its parts"),
        (lambda: WeightedRewardComputer([right], objectives=[right]), "pass its parts"),
        (lambda: WeightedRewardComputer([right, brevity], ["a"]), "1 objective_names for 2 parts"),
        (lambda: WeightedRewardComputer([right], weights=[1, 2]), "2 weights for 1 parts"),
        (lambda: WeightedRewardComputer([right, right]), "two parts have the name 'right'"),
        (lambda: WeightedRewardComputer(["right"]), "neither a function nor"),
        (
            lambda: WeightedRewardComputer([right], weights=[float("nan")]),
            "the weight of 'right' is nan",
        ),
        (lambda: create_reward_computer("parreto"), "did you mean 'pareto'"),
        (
            lambda: WeightedRewardComputer([right]).compute_rewards([trajectory()], "best"),
            "absolute, relative, gdpo, pareto",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_part_that_fails_is_named():
    with pytest.raises(RolloutRejectedError, match=r"KeyError.*'mood'"):
        WeightedRewardComputer([lambda t: t.metadata["mood"]], ["clever"]).compute_rewards(
            [trajectory()]
        )
    with pytest.raises(ConfigError, match=r"\(prompt, response\)"):
        WeightedRewardComputer([lambda prompt, response: 1.0], ["two"])
    with pytest.raises(RolloutRejectedError, match="odd is inf"):
        WeightedRewardComputer([lambda t: float("inf")], ["odd"]).compute_rewards([trajectory()])


def test_computers_by_their_kinds():
    assert isinstance(create_reward_computer("svrl", verification_weight=0.2), SVRLRewardComputer)
    assert isinstance(create_reward_computer("pareto", objectives=[right]), ParetoRewardComputer)
    assert create_reward_computer("custom", objective_functions=[right]).compute_rewards(
        [trajectory("4")]
    ) == [1.0]


def test_functions_of_one_name_are_parts_of_their_own() -> None:
    """Lambdas, closures of one factory, and TRL's signature among them."""

    def scaled(by):
        def score(item):
            return by

        return score

    one = trajectory("a")
    parts = [lambda t: 1.0, lambda t: 2.0, scaled(3.0), scaled(4.0)]
    parts += [lambda completions, **rest: [5.0], lambda completions, **rest: [6.0]]
    computer = ParetoRewardComputer(parts)
    assert list(computer.weights) == [
        *("<lambda>", "<lambda>#2", "score", "score#2", "<lambda>#3", "<lambda>#4"),
    ]
    [found] = computer.compute_parts([one])
    assert list(found.values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
