"""The one log-probability function against numbers worked out in float64 by hand and by numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.logprobs import token_logprobs, token_logprobs_and_entropy


def test_hand_worked_softmax_and_entropy() -> None:
    # logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8
    logits = mx.array([[math.log(1), math.log(2), math.log(5)]])
    assert token_logprobs(logits, mx.array([2])).item() == pytest.approx(math.log(5 / 8), abs=1e-6)
    # at T = 1/2 the probabilities are proportional to the squares: 1, 4, 25
    assert token_logprobs(logits, mx.array([1]), 0.5).item() == pytest.approx(
        math.log(4 / 30), abs=1e-6
    )
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    logprobs, entropy = token_logprobs_and_entropy(logits, mx.array([0]))
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    assert logprobs.item() == pytest.approx(math.log(1 / 8), abs=1e-6)


def test_matches_numpy_with_a_temperature_per_row() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 6, (5, 7, 301))
    tokens = rng.integers(0, 301, (5, 7))
    temperature = rng.uniform(0.3, 2.0, (5, 7))
    z = logits / temperature[..., None]
    expected = np.take_along_axis(z, tokens[..., None], -1)[..., 0] - np.log(np.exp(z).sum(-1))
    got = token_logprobs(
        mx.array(logits, dtype=mx.float32),
        mx.array(tokens),
        mx.array(temperature, dtype=mx.float32),
    )
    np.testing.assert_allclose(np.array(got), expected, atol=2e-5)


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = mx.random.normal((4, 1000), key=mx.random.key(0)).astype(mx.bfloat16) * 4
    got = token_logprobs(logits, mx.array([1, 2, 3, 4]))
    exact = np.array(logits.astype(mx.float32), dtype=np.float64)
    expected = exact[range(4), [1, 2, 3, 4]] - np.log(np.exp(exact).sum(-1))
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), expected, atol=1e-5)


def test_large_logits_stay_finite() -> None:
    got = token_logprobs(mx.array([[1e4, 0.0, -1e4]]), mx.array([0]))
    assert got.item() == 0.0


def oracle(
    logits: np.ndarray, tokens: np.ndarray, temperature: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    z = logits / temperature[:, None]
    logprobs = z - z.max(-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    return logprobs[range(len(tokens)), tokens], -(np.exp(logprobs) * logprobs).sum(-1)


@pytest.mark.parametrize("spread", [0.1, 4.0, 30.0])
def test_the_written_gradient_is_the_finite_difference_in_float64(spread: float) -> None:
    rng = np.random.default_rng(1)
    logits, tokens = rng.normal(0, spread, (3, 23)), np.array([0, 7, 22])
    temperature, (a, b) = np.array([0.5, 1.0, 2.0]), rng.normal(0, 1, (2, 3))
    expected = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[index] += 1e-6
        down[index] -= 1e-6
        change = [
            x - y
            for x, y in zip(
                oracle(up, tokens, temperature), oracle(down, tokens, temperature), strict=True
            )
        ]
        expected[index] = (a * change[0] + b * change[1]).sum() / 2e-6

    def scores(z: mx.array) -> list[mx.array]:
        return list(
            token_logprobs_and_entropy(z, mx.array(tokens), mx.array(temperature, dtype=mx.float32))
        )

    slopes = [mx.array(a, dtype=mx.float32), mx.array(b, dtype=mx.float32)]
    (logprobs, entropy), (gradient,) = mx.vjp(scores, [mx.array(logits, dtype=mx.float32)], slopes)
    for got, exact in zip((logprobs, entropy), oracle(logits, tokens, temperature), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=2e-5)
    assert np.abs(expected).max() > 0.01


def test_the_gradient_of_half_precision_logits_has_their_type() -> None:
    logits = mx.random.normal((4, 50), key=mx.random.key(0)).astype(mx.bfloat16)
    gradient = mx.grad(lambda z: token_logprobs_and_entropy(z, mx.array([1, 2, 3, 4]))[0].sum())(
        logits
    )
    assert gradient.dtype == mx.bfloat16 and abs(gradient.astype(mx.float32).sum().item()) < 0.05
