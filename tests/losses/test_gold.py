"""The losses of two vocabularies against TRL's GOLD (numbers that scripts/parity/gold.py recorded) and
against float64, and a span's share against an enumeration."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.distillation import evened, teacher_advantages, unlike
from mlx_parallm.rl_training.distillation.alignment import Placed, common_spans
from scripts.parity.gold import OFFSETS, OURS, ROWS, THEIRS, VOCABULARIES, logits

GOLD = json.loads((Path(__file__).parents[1] / "data" / "gold.json").read_text())
NONE_LEFT = -80.0


def sides(way: str, keep: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """ids and targets of the teacher's best tokens, the tokens of both, their share."""
    ours, theirs = VOCABULARIES
    same = [ours.index(word) if word in ours and way == "hybrid" else -1 for word in theirs]
    numbers = np.array(logits(ROWS, THEIRS, 1.7))
    logs = numbers - np.log(np.exp(numbers).sum(-1, keepdims=True))
    order = np.argsort(-logs, axis=-1)[:, :keep]
    best = np.take_along_axis(logs, order, -1)
    rest = 1 - np.exp(best).sum(-1, keepdims=True)
    rest = np.log(np.maximum(rest, 0), where=rest > 1e-12, out=np.full_like(rest, NONE_LEFT))
    both = np.isin(np.arange(OURS), same)
    return (
        np.array(same)[order],
        np.concatenate([best, rest], -1),
        both,
        float(both.sum() / len(theirs)),
    )


def loss_of(way: str, beta: float, keep: int = THEIRS) -> tuple[np.ndarray, np.ndarray]:
    ids, targets, both, share = sides(way, keep)

    def total(student: mx.array) -> mx.array:
        pair = mx.array(ids.astype(np.int32)), mx.array(targets.astype(np.float32))
        return unlike(student, *pair, mx.array(both), beta=beta, share=share).sum()

    value, slope = mx.value_and_grad(total)(mx.array(logits(ROWS, OURS, 2.1)))
    return np.array(value) / ROWS, np.array(slope) / ROWS


def in_float64(student: np.ndarray, way: str, beta: float, keep: int) -> float:
    """The formula again, a row after the other."""
    ids, targets, both, share = sides(way, keep)
    total = 0.0
    for row, best, numbers in zip(student, ids, targets, strict=True):
        p, q = np.exp(row - row.max()), np.exp(numbers)
        p = p / p.sum()
        shared = 0.0
        for token, mass in zip(best, q, strict=False):
            if token >= 0:
                s, m = p[token], beta * mass + (1 - beta) * p[token]
                shared += {
                    0.0: mass * np.log(mass / s) + s - mass,
                    1.0: s * np.log(s / mass) + mass - s,
                }.get(beta, beta * mass * np.log(mass / m) + (1 - beta) * s * np.log(s / m))
        alone = sorted((mass for token, mass in zip(best, q, strict=False) if token < 0))[::-1]
        mine = [*sorted(p[~both])[::-1], *[0.0] * keep][: len(alone)]
        apart = sum(abs(a - b) for a, b in zip(mine, alone, strict=True))
        rest = 1 - sum(mine) - sum(p[token] for token in best if token >= 0)
        total += share * shared + (1 - share) * (apart + abs(rest - q[-1]))
    return total / len(student)


@pytest.mark.parametrize(("way", "beta"), [("uld", 0.5), ("hybrid", 0.5), ("hybrid", 0.1)])
def test_values_and_slopes_are_golds(way: str, beta: float) -> None:
    value, slope = loss_of(way, beta)
    expected, slopes = GOLD["losses"][f"{way} {beta}"]
    assert value == pytest.approx(expected, abs=1e-6)
    assert slope == pytest.approx(np.array(slopes), abs=1e-6)


def test_the_reverse_divergence_is_golds_and_the_difference_of_the_masses() -> None:
    _, targets, both, share = sides("hybrid", THEIRS)
    ids = sides("hybrid", THEIRS)[0]
    student = np.exp(np.array(logits(ROWS, OURS, 2.1)))
    student /= student.sum(-1, keepdims=True)
    mass = (np.exp(targets[:, :-1]) * (ids >= 0)).sum() - student[:, both].sum()
    expected = GOLD["losses"]["hybrid 1.0"][0] + share * mass / ROWS
    assert loss_of("hybrid", 1.0)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("way", ["uld", "hybrid"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("keep", [2, 5, THEIRS])
def test_slopes_against_float64(way: str, beta: float, keep: int) -> None:
    value, slope = loss_of(way, beta, keep)
    student = np.array(logits(ROWS, OURS, 2.1))
    assert value == pytest.approx(in_float64(student, way, beta, keep), abs=1e-6)
    step = 1e-4
    for place in np.ndindex(student.shape):
        moved = [student.copy() for _ in range(4)]
        for each, size in zip(moved, (-2, -1, 1, 2), strict=True):
            each[place] += size * step
        far, near, after, behind = (in_float64(each, way, beta, keep) for each in moved)
        quotient = (far - 8 * near + 8 * after - behind) / (12 * step)
        assert slope[place] == pytest.approx(quotient, abs=1e-6)


def test_a_row_without_a_teacher_has_no_loss_and_no_slope() -> None:
    targets = mx.array([[np.nan, np.nan]])
    value, slope = mx.value_and_grad(
        lambda row: unlike(
            row, mx.array([[0]]), targets, mx.array([True, False]), beta=0.5, share=0.5
        ).sum()
    )(mx.array([[1.0, 2.0]]))
    assert value.item() == 0
    assert np.array(slope).tolist() == [[0.0, 0.0]]


def test_spans_are_golds_groups() -> None:
    """TRL puts what is left at the end in one more group; here it is in none."""
    for (ours, theirs), (first, second) in zip(OFFSETS, GOLD["groups"], strict=True):
        sound = [(True,) * len(each) for each in (ours, theirs)]
        spans = common_spans(Placed(tuple(ours), sound[0]), Placed(tuple(theirs), sound[1]))
        pairs = [(list(range(*span.ours)), list(range(*span.theirs))) for span in spans]
        groups = list(zip(first, second, strict=True))
        assert pairs == [(one, two) for one, two in groups][: len(pairs)]
        assert len(groups) - len(pairs) == (ours[-1] != theirs[-1])


def test_a_spans_sum_is_golds_merged_probability() -> None:
    numbers = np.array(logits(ROWS, THEIRS, 1.7))
    logs = numbers - np.log(np.exp(numbers).sum(-1, keepdims=True))
    sums = [logs[0, 4] + logs[1, 1], logs[2, 0]]
    assert sums == pytest.approx(GOLD["merged"], abs=1e-12)


def test_a_span_shares_its_gap_in_equal_parts() -> None:
    rng = np.random.default_rng(0)
    policy, teacher = -3 * rng.exponential(size=(2, 200)).astype(np.float32)
    within = np.concatenate([np.arange(size) for size in rng.integers(1, 5, size=200)])[:200]
    teacher[within == 3] = np.nan  # a token without a score is a span of one
    within[within == 3] = 0
    found = evened(policy, teacher, within.astype(np.float32))
    spans = np.cumsum(within == 0) - 1
    gaps = policy.astype(np.float64) - teacher
    for span in range(spans.max() + 1):
        chosen = spans == span
        expected = np.nan_to_num(-2 * gaps[chosen].sum() / chosen.sum())
        advantages = teacher_advantages(policy[chosen], found[chosen], weight=2.0)
        assert advantages == pytest.approx(np.full(chosen.sum(), expected), abs=2e-6)
    alone = np.bincount(spans)[spans] == 1
    assert np.array_equal(found[alone], teacher[alone], equal_nan=True), "not rounded"
    worked = evened(np.array([-1.0, -3.0]), np.array([-1.0, -1.0]), np.array([0.0, 1.0]))
    assert worked.tolist() == [0.0, -2.0]
