"""Ranks and fronts against brute force by their definitions."""

import operator
import random

import pytest

from mlx_parallm.rewards.methods import (
    average_ranks,
    combine,
    pareto_ranks,
    pareto_rewards,
    standardize,
)


def dominates(a, b):
    return all(map(operator.ge, a, b)) and a != b


def fronts_by_definition(points):
    """The front of a point is the length of the longest chain of points that dominate each other
    above it."""
    ranks = {}
    # who dominates a point has a larger sum
    for point in sorted(set(points), key=sum, reverse=True):
        above = [ranks[other] for other in ranks if dominates(other, point)]
        ranks[point] = 1 + max(above, default=-1)
    return [ranks[point] for point in points]


def test_fronts_equal_brute_force_on_200_random_sets():
    """1 to 4 objectives on a grid of integers, so that points, and single objectives, are often
    equal."""
    rng = random.Random(0)
    duplicates = deepest = 0
    for number in range(200):
        size, objectives = rng.randint(1, 200), 1 + number % 4
        points = [
            tuple(rng.randrange(rng.choice([2, 4, 8])) for _ in range(objectives))
            for _ in range(size)
        ]
        expected = fronts_by_definition(points)
        assert pareto_ranks(points) == expected
        assert pareto_rewards(points) == [1 - rank / (max(expected) + 1) for rank in expected]
        duplicates += len(set(points)) < size
        deepest = max(deepest, max(expected))
    assert duplicates > 150  # or the sets do not show what becomes of equal points
    assert deepest >= 7


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
def test_fronts_equal_those_of_moocore(objectives):
    moocore = pytest.importorskip("moocore")
    rng = random.Random(objectives)
    for _ in range(20):
        points = [
            [float(rng.randrange(6)) for _ in range(objectives)] for _ in range(rng.randint(2, 100))
        ]
        ranks = pareto_ranks(points)
        assert [rank == 0 for rank in ranks] == moocore.is_nondominated(
            points, maximise=True, keep_weakly=True
        ).tolist()
        assert ranks == moocore.pareto_rank(points, maximise=True).tolist()


def test_equal_points_are_on_the_front_together():
    """The published implementation dropped the second of two equal points: [1, 0, 1, 0] for this
    set."""
    assert [rank == 0 for rank in pareto_ranks([(2, 1), (2, 1), (1, 2), (1, 1)])] == [
        True,
        True,
        True,
        False,
    ]


def test_all_on_one_front_are_worth_1():
    assert pareto_rewards([(1, 3), (2, 2), (3, 1)]) == [1.0, 1.0, 1.0]
    assert pareto_rewards([]) == []


def test_equal_values_share_the_mean_of_their_ranks():
    assert average_ranks([0.5, 2.0, 0.5, 9.0, 2.0, 2.0]) == [1.5, 4.0, 1.5, 6.0, 4.0, 4.0]
    assert average_ranks([]) == []


def test_z_scores_have_mean_0_and_population_deviation_1():
    assert standardize([1.0, 3.0]) == [-1.0, 1.0]
    assert standardize([7.0, 7.0, 7.0]) == [0.0, 0.0, 0.0]
    rng = random.Random(1)
    values = standardize([rng.random() for _ in range(50)])
    assert sum(values) == pytest.approx(0, abs=1e-12)
    assert sum(value**2 for value in values) / 50 == pytest.approx(1)


PARTS = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 2.0}, {"a": 1.0, "b": None}, {"a": None, "b": None}]


def test_absolute_leaves_out_what_does_not_apply():
    assert combine("absolute", PARTS, {"a": 1.0, "b": 0.25}) == [1.0, 0.5, 1.0, None]


def test_relative_is_the_z_score_of_the_rank_of_the_sum():
    """Sums 1, 0.5, 1, none: ranks 2.5, 1, 2.5; mean 2, deviation sqrt(0.5)."""
    half = 0.5 / 0.5**0.5
    assert combine("relative", PARTS, {"a": 1.0, "b": 0.25}) == pytest.approx(
        [half, -2 * half, half, None]
    )


def test_gdpo_adds_up_z_scores_of_each_part():
    """The paper's example: the sums 0, 1 and 0, 2 of two answers have the same advantages in GRPO;
    here the second answer counts twice where it is better in both parts."""
    half = 0.5 / (0.5**0.5 + 1e-4)
    one = [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
    both = [{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}]
    weights = {"a": 1.0, "b": 1.0}
    assert combine("gdpo", one, weights) == pytest.approx([-half, half])
    assert combine("gdpo", both, weights) == pytest.approx([-2 * half, 2 * half])
    assert combine("gdpo", both, {"a": 1.0, "b": -3.0}) == pytest.approx([2 * half, -2 * half])
    # of a: 1, 0, 1 → mean 2/3, deviation 0.57735; of b: 0, 2 → 1.41421
    unit = 1 / (2**0.5 + 1e-4)
    assert combine("gdpo", PARTS, weights) == pytest.approx(
        [0.57725 - unit, -1.1545 + unit, 0.57725, None], abs=1e-6
    )
    assert combine("gdpo", [{"a": 1.0}], {"a": 1.0}) == [0.0]
    assert combine("gdpo", [{"a": 0.1 + 0.2}, {"a": 0.3}], {"a": 1.0}) == [0.0, 0.0], "rounding"


def test_pareto_ranks_who_has_all_objectives():
    assert combine("pareto", PARTS, {"a": 1.0, "b": 0.25}) == [1.0, 1.0, None, None]


def test_a_negative_weight_is_a_cost_and_a_weight_of_0_no_objective():
    assert combine("pareto", PARTS[:2], {"a": 1.0, "b": -0.25}) == [1.0, 0.5]
    assert combine("pareto", PARTS[:2], {"a": 0.0, "b": 0.25}) == [0.5, 1.0]
    assert combine("pareto", PARTS, {"a": 0.0, "b": 0.0}) == [None] * 4
