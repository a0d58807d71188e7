"""pass@k, intervals and differences against numbers that were worked out by hand or by trying
everything."""

import itertools
import random

import pytest

from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import (
    difference,
    estimate,
    gain_is_sure,
    pass_at_k,
)


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_answer(samples):
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_worked_numbers_of_the_docstrings():
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    found = estimate([1.0] * 8 + [0.0] * 2)
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    changed = difference([0.0] * 8 + [1.0] * 2 + [0.0], [1.0] * 8 + [0.0] + [1.0] + [0.0])
    assert changed.p == pytest.approx(0.0390625)
    assert changed.mean == pytest.approx(7 / 11)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_asked(samples, right, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, right, k)


def test_shares_at_the_ends_know_that_they_may_be_off():
    none, all_right = estimate([0.0] * 10), estimate([1.0] * 10)
    assert (none.mean, none.low, none.high) == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
    assert (all_right.mean, all_right.low, all_right.high) == pytest.approx(
        (1.0, 0.7225, 1.0), abs=1e-4
    )


@pytest.mark.parametrize("kind", ["shares", "soft"])
def test_an_interval_holds_the_truth_as_often_as_it_says(kind):
    """400 samples of 40 problems each: 95% of the intervals, give or take three standard errors
    (0.033)."""
    rng = random.Random(7)
    draw = (lambda: float(rng.random() < 0.8)) if kind == "shares" else rng.random
    truth = 0.8 if kind == "shares" else 0.5
    found = [estimate([draw() for _ in range(40)]) for _ in range(400 if kind == "shares" else 100)]
    inside = sum(one.low <= truth <= one.high for one in found) / len(found)
    assert 0.95 - 0.07 <= inside <= 0.995
    assert all(one.low <= one.mean <= one.high for one in found)


def test_an_interval_is_the_same_each_time():
    values = [random.Random(3).random() for _ in range(30)]
    assert estimate(values) == estimate(values)
    assert difference(values, values[::-1]) == difference(values, values[::-1])


def test_without_a_change_there_is_no_difference():
    same = difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    soft = difference([0.2, 0.5], [0.3, 0.5])
    assert soft.p is None
    assert soft.mean == pytest.approx(0.05)


def test_a_pairing_sees_what_two_intervals_do_not():
    """Hard and easy problems, each a little better: the problems differ more than the two
    models."""
    before = [i / 100 for i in range(100)]
    after = [value + 0.02 for value in before]
    found = difference(before, after)
    assert found.low > 0.015
    assert estimate(after).low < estimate(before).high


@pytest.mark.parametrize(
    ("a", "b", "significant"),
    [
        ([0.0] * 8 + [1.0], [1.0] * 8 + [0.0], True),  # p = 0.039
        # 2 · (1 + 8) / 2⁸ = 0.0703, though the interval leaves out 0
        ([0.0] * 7 + [1.0], [1.0] * 7 + [0.0], False),
        ([0.5] * 6, [0.4, 0.3] * 3, True),  # no p: every resample is below 0
        ([0.5] * 6, [0.4, 0.6] * 3, False),
        ([0.25], [1.0], False),  # one problem: a resample is that problem again
        # 2 · ½⁵ = 0.0625: all of five move so by chance
        ([0.5] * 5, [0.4, 0.3, 0.4, 0.3, 0.2], False),
    ],
)
def test_a_difference_is_significant_by_p_else_by_its_interval(a, b, significant):
    assert difference(a, b).significant is significant


def test_a_missing_value_may_be_any_that_there_can_be():
    """Six answers better by a half, nine without a score: they may all have become worse, though no
    answer that was scored has a 0."""
    gained = [(0.5, 1.0)] * 6
    assert not gain_is_sure([*gained, *[(0.5, None)] * 9])
    assert not gain_is_sure([*gained, *[(None, 0.5)] * 9])
    assert gain_is_sure([(0.5, 1.0)] * 20 + [(0.5, None)])
    assert gain_is_sure([(2.0, 3.0)] * 6 + [(2.0, None)] * 3), "of other rewards no bound is known"
