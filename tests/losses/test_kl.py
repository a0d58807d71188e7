"""KL estimators against verl's values on the same inputs, and in the range where the naive formula fails."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.kl import KL_ESTIMATORS, k3
from tests.losses import fixtures


@pytest.mark.parametrize(
    ("name", "value", "norm"), [("k1", 0.0075, 0.223607), ("k2", 0.002688, 0.016394), ("k3", 0.002680, 0.016350)]
)
def test_other_trainers_numbers(name: str, value: float, norm: float) -> None:
    inputs = fixtures.inputs(0.1)

    def mean(logprobs: mx.array) -> mx.array:
        return mx.where(inputs.mask, KL_ESTIMATORS[name](logprobs, inputs.ref_logprobs), 0.0).sum() / 20

    got, gradient = mx.value_and_grad(mean)(inputs.logprobs)
    assert got.item() == pytest.approx(value, abs=1e-6)
    assert np.linalg.norm(np.array(gradient)) == pytest.approx(norm, abs=1e-6)


def test_worked_example() -> None:
    new, ref = mx.array([-1.0]), mx.array([-1.2])
    values = {name: estimator(new, ref).item() for name, estimator in KL_ESTIMATORS.items()}
    assert values == pytest.approx({"k1": 0.2, "abs": 0.2, "k2": 0.02, "k3": 0.018731}, abs=1e-6)


def test_k3_of_a_tiny_difference_is_not_rounding_noise() -> None:
    d = 2.0**-12  # exact in float32, so only k3's own arithmetic is tested
    assert k3(mx.array([0.0]), mx.array([d])).item() == pytest.approx(d * d / 2, rel=2e-3)


@pytest.mark.parametrize("d", [-1000.0, 1000.0])
def test_k3_of_an_absurd_difference_is_finite(d: float) -> None:
    value, gradient = mx.value_and_grad(lambda x: k3(x, mx.array([d])).sum())(mx.array([0.0]))
    assert value.item() == pytest.approx(10.0)
    assert np.isfinite(gradient.item())
