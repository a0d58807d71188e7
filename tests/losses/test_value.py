"""The value loss against verl's number, hand-worked cases, a float64 oracle, finite differences, invariances."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.ppo import value_loss, with_value_loss
from mlx_parallm.losses.types import LossInputs, LossOutputs
from tests.losses import fixtures

_I, _T = np.meshgrid(np.arange(6), np.arange(5), indexing="ij")
OLD_VALUES = 0.1 * ((_I + 2 * _T) % 4) * fixtures.MASK
VALUES = OLD_VALUES + 0.3 * ((_I + _T) % 3 - 1)
REWARDS = [1, 0, 0, 0.5, 0.25, 1]


def returns(gamma: float = 0.99, gae_lambda: float = 0.95) -> np.ndarray:
    """Of the reference values' batch, row by row from the end."""
    found = np.zeros((6, 5))
    for row, length in enumerate(fixtures.LENGTHS):
        next_value = advantage = 0.0
        for t in reversed(range(length)):
            reward = REWARDS[row] if t == length - 1 else 0.0
            advantage = reward + gamma * next_value - OLD_VALUES[row, t] + gamma * gae_lambda * advantage
            next_value = OLD_VALUES[row, t]
            found[row, t] = advantage + next_value
    return found


def inputs(rows: slice = slice(None), values: np.ndarray = VALUES) -> LossInputs:
    def array(numbers: np.ndarray) -> mx.array:
        return mx.array(numbers[rows].astype(np.float32))

    given = fixtures.inputs(0.1, rows=rows)
    return replace(given, values=array(values), old_values=array(OLD_VALUES), returns=array(returns()))


def oracle(values: np.ndarray, clip: float) -> float:
    held = np.clip(values, OLD_VALUES - clip, OLD_VALUES + clip) if clip else values
    terms = np.maximum((values - returns()) ** 2, (held - returns()) ** 2)
    return float(0.5 * terms[fixtures.MASK].mean())


def gradient(given: LossInputs, clip: float) -> np.ndarray:
    return np.array(mx.grad(lambda v: value_loss(replace(given, values=v), clip=clip).loss)(given.values))


def test_verls_number() -> None:
    outputs = value_loss(inputs(), clip=0.2)
    assert outputs.loss.item() == pytest.approx(0.158579, abs=1e-6)
    assert outputs.metrics["value_loss"].item() == pytest.approx(0.158579, abs=1e-6)
    assert outputs.metrics["value_clip_fraction"].item() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [(0.5, 1.0, 0.245, 0.0), (0.5, 0.0, 0.125, 0.5), (0.2, 1.0, 0.32, -0.8), (-0.5, -1.0, 0.405, 0.0)],
)
def test_worked_cases(value: float, target: float, loss: float, slope: float) -> None:
    """V_old = 0.1, clip 0.2: a move with the return is held, the way back is open, inside the bound nothing is held."""
    one = mx.ones((1, 1))
    given = LossInputs(
        logprobs=one,
        rollout_logprobs=one,
        advantages=one,
        mask=one > 0,
        token_normalizer=1.0,
        sequence_normalizer=1.0,
        values=value * one,
        old_values=0.1 * one,
        returns=target * one,
    )
    assert value_loss(given, clip=0.2).loss.item() == pytest.approx(loss, abs=1e-6)
    assert gradient(given, 0.2).item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.05, 0.2])
def test_value_and_gradient_against_the_oracle(clip: float) -> None:
    noisy = VALUES + 0.013 * np.sin(7.0 * _I + 3.0 * _T)  # away from the kinks
    given = inputs(values=noisy)
    assert value_loss(given, clip=clip).loss.item() == pytest.approx(oracle(noisy, clip), rel=1e-5)
    slopes, step = np.zeros((6, 5)), 1e-6
    for place in zip(*np.nonzero(fixtures.MASK), strict=True):
        shifted = [noisy.copy(), noisy.copy()]
        shifted[0][place] += step
        shifted[1][place] -= step
        slopes[place] = (oracle(shifted[0], clip) - oracle(shifted[1], clip)) / (2 * step)
    assert np.linalg.norm(slopes) > 0.01
    np.testing.assert_allclose(gradient(given, clip), slopes, atol=1e-5 * np.abs(slopes).max())


def test_the_parts_of_a_mini_batch_add_up_and_what_is_not_trained_on_is_not_read() -> None:
    whole = value_loss(inputs(), clip=0.2)
    parts = [value_loss(inputs(rows), clip=0.2) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), abs=1e-7)
    for name, metric in whole.metrics.items():
        assert sum(part.metrics[name].item() for part in parts) == pytest.approx(metric.item(), abs=1e-6)
    poisoned = inputs(values=np.where(fixtures.MASK, VALUES, np.nan))
    assert value_loss(poisoned, clip=0.2).loss.item() == pytest.approx(whole.loss.item(), abs=1e-7)
    assert np.isfinite(gradient(poisoned, 0.2)).all()


@pytest.mark.parametrize("missing", ["values", "old_values", "returns"])
def test_what_it_needs(missing: str) -> None:
    with pytest.raises(ValueError, match="needs values, old_values and returns"):
        value_loss(replace(inputs(), **{missing: None}), clip=0.2)


def policy(given: LossInputs) -> LossOutputs:
    loss = -mx.where(given.mask, given.logprobs * given.advantages, 0.0).sum() / given.token_normalizer
    return LossOutputs(loss, {"policy_loss": loss})


@pytest.mark.parametrize("old", [False, True])
def test_beside_a_policy_loss(old: bool) -> None:
    """policy + coefficient · value; approx_kl against what the ratio is against: old_logprobs where they are there."""
    before = fixtures.NEW - 0.2 * np.cos(1.0 + _I + _T) if old else fixtures.rollout_logprobs(0.1)
    given = replace(inputs(), old_logprobs=mx.array(before.astype(np.float32)) if old else None)
    outputs = with_value_loss(policy, clip=0.2, coefficient=0.3)(given)
    assert outputs.loss.item() == pytest.approx(policy(given).loss.item() + 0.3 * 0.158579, abs=1e-6)
    d = (fixtures.NEW - before)[fixtures.MASK]
    assert outputs.metrics["approx_kl"].item() == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-4)
    assert outputs.metrics.keys() == {"policy_loss", "value_loss", "value_clip_fraction", "approx_kl"}
