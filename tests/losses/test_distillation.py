"""Divergences from a teacher against float64, and TRL's own GKD loss (frozen numbers)."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.distillation import (
    LEAST_LOGPROB,
    divergence,
    teacher_advantages,
    with_divergence,
    with_tail,
)
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from tests.losses import fixtures

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
BOUND = 3e-6

TRL_GKD = {
    (1.0, 0.0): (
        1.1256012477,
        [0.0401451867, -0.039175477, -0.0010853009, 0.0768104511, -0.0420545723, -0.0346402877],
    ),
    (1.0, 0.1): (
        0.0886303817,
        [0.0031359904, -0.0036811026, -0.0001180899, 0.0066758757, -0.0039027002, -0.0021099734],
    ),
    (1.0, 0.5): (
        0.2179425741,
        [0.0059244328, -0.0111033305, -0.0004682515, 0.0202222933, -0.0114470673, -0.0031280769],
    ),
    (1.0, 0.9): (
        0.0918388214,
        [0.0003148358, -0.0050005333, -0.000259195, 0.0109028334, -0.0050413769, -0.000916564],
    ),
    (1.0, 1.0): (
        1.2138736256,
        [-0.0165480456, -0.0668922946, -0.0037343944, 0.1645885794, -0.0668838097, -0.0105300351],
    ),
    (0.9, 0.0): (
        1.3007565536,
        [0.0493034233, -0.0484824977, -0.0009806707, 0.0895316453, -0.0520395901, -0.0373323101],
    ),
    (0.9, 0.1): (
        0.0989435168,
        [0.0038028483, -0.0045284834, -0.0001069895, 0.0076904792, -0.0047952015, -0.0020626531],
    ),
    (0.9, 0.5): (
        0.2390172051,
        [0.0071897979, -0.0133378808, -0.0004172325, 0.023114241, -0.0137133903, -0.0028355353],
    ),
    (0.9, 0.9): (
        0.1020335523,
        [0.0002982855, -0.0059781214, -0.0002315309, 0.0127329649, -0.006005025, -0.0008165732],
    ),
    (0.9, 1.0): (
        1.3986472685,
        [-0.0267999842, -0.0823208435, -0.0034636547, 0.2040075976, -0.0819304343, -0.0094926809],
    ),
}
"""(temperature, β): the loss, and its slopes by the student's logits at row 0, position 1. Made with
trl 1.16.0 and torch in float64: `GKDTrainer.generalized_jsd_loss(student, teacher, labels=[[-100, 1,
2], [0, 3, -100]], beta=β, temperature=temperature)` with the logits of `gkd_logits`."""


def gkd_logits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Student and teacher [2, 3, 6], and which positions count."""
    i, t, v = np.meshgrid(np.arange(2), np.arange(3), np.arange(6), indexing="ij")
    counted = np.array([[False, True, True], [True, True, False]])
    return 2 * np.sin(1.3 * i + 0.7 * t + 2.1 * v), 2 * np.cos(0.9 * i - 1.1 * t + 1.7 * v), counted


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def buckets(logits: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    """Probabilities of all tokens, or of these and of the sum of all others."""
    chances = np.exp(log_softmax(logits))
    if ids is None:
        return chances
    chosen = np.take_along_axis(chances, ids, -1)
    others = chances.copy()
    np.put_along_axis(others, ids, 0.0, -1)
    return np.concatenate([chosen, others.sum(-1, keepdims=True)], -1)


def kl(of: np.ndarray, to: np.ndarray) -> np.ndarray:
    there = of > 0
    logs = [np.log(np.where(there, chances, 1.0)) for chances in (of, to)]
    return np.where(there, of * (logs[0] - logs[1]), 0.0).sum(-1)


def oracle(
    student: np.ndarray, teacher: np.ndarray, ids: np.ndarray | None, beta: float
) -> np.ndarray:
    p, q = buckets(student, ids), buckets(teacher, ids)
    if beta in (0.0, 1.0):
        return kl(p, q) if beta else kl(q, p)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def slopes(student: np.ndarray, *others: object) -> np.ndarray:
    """Five-point difference quotients of the sum, by each logit."""
    found, h = np.zeros_like(student), 1e-4
    for place in np.ndindex(*student.shape):
        step = np.zeros_like(student)
        step[place] = h
        values = [oracle(student + k * step, *others)[place[0]] for k in (-2, -1, 1, 2)]
        found[place] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
    return found


def logits(seed: int, width: int, scale: float = 3.0) -> np.ndarray:
    numbers = scale * np.random.default_rng(seed).normal(size=(4, width))
    return numbers.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("width", "k"), [(7, None), (7, 3), (60, None), (60, 8), (60, 60)])
def test_values_and_slopes_are_those_of_float64(width: int, k: int | None, beta: float) -> None:
    student, teacher = logits(1, width), logits(2, width)
    ids = None if k is None else np.argsort(-teacher, -1)[:, :k]
    places = None if ids is None else mx.array(ids.astype(np.int32))
    targets = with_tail(mx.array(teacher.astype(np.float32)), places)

    def values(z: mx.array) -> mx.array:
        return divergence(with_tail(z, places), targets, beta=beta)

    z = mx.array(student.astype(np.float32))
    assert np.abs(np.array(values(z)) - oracle(student, teacher, ids, beta)).max() <= BOUND
    found = np.array(mx.grad(lambda z: values(z).sum())(z))
    assert np.abs(found - slopes(student, teacher, ids, beta)).max() <= BOUND


@pytest.mark.not_gpu_like(reason="MLX's CPU adds one number after the other")
@pytest.mark.parametrize("beta", BETAS)
def test_a_wide_vocabulary_is_added_up_exactly(beta: float) -> None:
    student, teacher = logits(3, 50_021), logits(4, 50_021)
    ids = np.argsort(-teacher, -1)[:, :64]
    for chosen in (None, ids):
        places = None if chosen is None else mx.array(chosen.astype(np.int32))
        pair = [with_tail(mx.array(z.astype(np.float32)), places) for z in (student, teacher)]
        found = np.array(divergence(*pair, beta=beta))
        assert np.abs(found - oracle(student, teacher, chosen, beta)).max() <= 2e-5


def test_fewer_buckets_are_a_lower_bound_and_all_of_them_the_whole() -> None:
    student, teacher = (mx.array(logits(seed, 40).astype(np.float32)) for seed in (5, 6))
    order = mx.argsort(-teacher, axis=-1)
    found = [
        np.array(
            divergence(with_tail(student, order[:, :k]), with_tail(teacher, order[:, :k]), beta=1.0)
        )
        for k in (1, 4, 16, 40)
    ]
    assert all((a <= b + 1e-6).all() for a, b in itertools.pairwise(found))
    whole = divergence(with_tail(student, None), with_tail(teacher, None), beta=1.0)
    assert found[-1] == pytest.approx(np.array(whole), abs=2e-6)


def test_a_token_without_a_teacher_has_no_loss_and_no_slope() -> None:
    student = mx.array(logits(7, 9).astype(np.float32))
    targets = np.array(with_tail(mx.array(logits(8, 9).astype(np.float32)), None))
    targets[1] = np.nan
    for beta in BETAS:
        value, slope = mx.value_and_grad(
            lambda z, beta=beta: divergence(with_tail(z, None), mx.array(targets), beta=beta).sum()
        )(student)
        assert math.isfinite(value.item())
        assert np.isfinite(np.array(slope)).all()
        assert np.abs(np.array(slope))[1].max() == 0
        assert np.abs(np.array(slope))[0].max() > 1e-3


def test_a_token_that_the_teacher_rules_out_has_a_finite_loss() -> None:
    teacher = mx.array([[0.0, -float("inf")]])
    even = mx.log(mx.array([[0.5, 0.5]]))
    expected = 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - LEAST_LOGPROB)
    assert divergence(even, teacher, beta=1.0).item() == pytest.approx(expected, rel=1e-6)
    assert divergence(even, teacher, beta=0.0).item() == pytest.approx(math.log(2), rel=1e-6)


def test_the_sampled_tokens_advantage() -> None:
    found = teacher_advantages(
        np.array([-1.0, -2.0, -3.0, -1.0]), np.array([-0.5, -2.5, np.nan, -1000.0]), weight=2.0
    )
    assert found == pytest.approx([1.0, -1.0, 0.0, 2.0 * (1.0 + LEAST_LOGPROB)])


def test_the_expected_slope_of_the_advantage_is_that_of_the_reverse_kl() -> None:
    """Σ_y p(y) · A(y) · ∇ log p(y) = -∇ KL(p ‖ q), in float64 by the whole vocabulary."""
    student, teacher = logits(9, 11)[:1], logits(10, 11)[:1]
    p, q = log_softmax(student)[0], log_softmax(teacher)[0]
    advantages = teacher_advantages(p, q, weight=1.0).astype(np.float64)
    chances = np.exp(p)
    by_logit = chances * advantages - chances * (chances * advantages).sum()
    assert by_logit == pytest.approx(-slopes(student, teacher, None, 1.0)[0], abs=BOUND)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_divergence_is_added_to_the_policy_loss(aggregation: str) -> None:
    def policy(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(mx.array(2.0), {"policy_loss": mx.array(2.0)})

    numbers = np.where(fixtures.MASK, 0.25, np.nan)
    inputs = fixtures.inputs(0.1, divergence=numbers)
    outputs = with_divergence(policy, weight=0.5, aggregation=aggregation)(inputs)
    mean = aggregate(mx.full(fixtures.MASK.shape, 0.25), inputs, aggregation).item()
    assert outputs.loss.item() == pytest.approx(2.0 + 0.5 * mean)
    assert outputs.metrics["distill_loss"].item() == pytest.approx(0.25)
    assert outputs.metrics["policy_loss"].item() == 2.0
    with pytest.raises(ValueError, match="divergence of each token"):
        with_divergence(policy, weight=0.5, aggregation="token")(fixtures.inputs(0.1))


@pytest.mark.parametrize(("temperature", "beta"), list(TRL_GKD))
def test_trls_gkd_loss(temperature: float, beta: float) -> None:
    student, teacher, counted = gkd_logits()
    targets = with_tail(mx.array((teacher / temperature).astype(np.float32)).reshape(6, 6), None)
    mask = mx.array(counted.reshape(6))

    def loss(z: mx.array) -> mx.array:
        values = divergence(with_tail(z.reshape(6, 6) / temperature, None), targets, beta=beta)
        return mx.where(mask, values, 0.0).sum() / 4

    value, slope = mx.value_and_grad(loss)(mx.array(student.astype(np.float32)))
    expected, at_one_place = TRL_GKD[temperature, beta]
    assert value.item() == pytest.approx(expected, abs=BOUND)
    assert np.array(slope)[0, 1] == pytest.approx(at_one_place, abs=BOUND)
