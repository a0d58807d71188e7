"""Values of signals, the running mean and the bound on updates, with numbers worked by hand."""

import itertools
import random

import pytest

from mlx_parallm.systems.feedback.signals import Baseline, edit_value, releasable, strongest


def test_the_strongest_kind_decides() -> None:
    assert strongest({"message": 1.0, "thumb": -1.0}) == ("thumb", -1.0)
    assert strongest({"tool": 1.0, "regenerate": -1.0}) == ("regenerate", -1.0)
    assert strongest({}) is None


def test_an_edit_costs_what_it_changes() -> None:
    """abcd → abxd: 3 of 4 letters in common, 2 · 3 / 8 = 0.75."""
    assert edit_value("abcd", "abxd") == pytest.approx(-0.25)
    assert edit_value("abcd", "xyzw") == -1.0
    assert edit_value("a  b\n", "a b") is None


def test_any_two_texts_are_compared_at_once() -> None:
    """difflib's blocks took minutes for the last, in which no other thread ran much."""
    dice = random.Random(7)
    for _ in range(100):
        first, second = ("".join(dice.choices("ab c", k=dice.randrange(1, 12))) for _ in range(2))
        most = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, j in itertools.product(range(len(first)), range(len(second))):
            both = most[i][j] + 1 if first[i] == second[j] else 0
            most[i + 1][j + 1] = max(both, most[i][j + 1], most[i + 1][j])
        if (value := edit_value(first, second)) is not None:
            share = 2 * most[-1][-1] / (len(first) + len(second))
            assert value == pytest.approx(share - 1), (first, second)
    # "a  " is in "a a ": 3 letters of two, 3,334 times, and 2 of one, 3,332 times
    assert edit_value("a " * 10_000, "b" + "a  " * 6_666) == pytest.approx(2 * 16_666 / 39_999 - 1)


def test_the_running_mean_forgets() -> None:
    """d = 0.5, rewards 1, 0, -1: w = 1, 1.5, 1.75; s = 1, 0.5, -0.75; mean s / (w + 1)."""
    baseline, means = Baseline(), []
    for reward in (1.0, 0.0, -1.0):
        baseline = baseline.after(reward, 0.5)
        means.append(baseline.mean)
    assert Baseline().mean == 0.0
    assert means == pytest.approx([1 / 2, 0.5 / 2.5, -0.75 / 2.75])


@pytest.mark.parametrize(
    ("batches", "released", "most", "wanted"),
    [
        (5, [], None, 5),
        (5, [1800.0], 2.0, 1),
        (5, [1800.0, 3000.0], 2.0, 0),
        (5, [-100.0], 1.0, 1),
        (5, [-1700.0], 0.5, 0),  # 5,300 s ago, and one in 7,200 s may be
        (5, [-4000.0], 0.5, 1),
    ],
)
def test_batches_in_an_hour(
    batches: int, released: list[float], most: float | None, wanted: int
) -> None:
    assert releasable(batches, released, most, now=3600.0) == wanted
