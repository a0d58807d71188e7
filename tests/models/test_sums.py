"""Large reductions against float64; MLX's own sum of a row misses each of these bounds by far on
a CPU."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models import sums
from mlx_parallm.models.logprobs import token_logprobs, token_logprobs_and_entropy
from mlx_parallm.models.sums import logsumexp, row_sums, total
from mlx_parallm.rl_training.step.optimizer import ParameterGroup, make_optimizer
from mlx_parallm.system.device.traits import adds_in_order, on_cpu
from tests.rl_training.making import make_config

RNG = np.random.default_rng(0)


@pytest.mark.not_gpu_like(reason="MLX's CPU adds one number after the other")
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5_000_003])
def test_the_sum_of_squares_of_a_large_gradient(size: int) -> None:
    """0.4 % of it was lost at 5 million numbers, 22 % at 150 million."""
    values = RNG.standard_normal(size).astype(np.float32)
    exact = np.square(values.astype(np.float64)).sum()
    assert total(mx.square(mx.array(values))).item() == pytest.approx(exact, rel=2e-6)
    group = ParameterGroup(
        make_optimizer("adamw", 0.0, make_config()),
        "adamw",
        1.0,
        [0],
        [mx.zeros((size,))],
    )
    squares, _ = group.square_sum([mx.array(values)])
    assert squares.item() == pytest.approx(exact, rel=2e-6)


@pytest.mark.not_gpu_like(reason="MLX's CPU adds one number after the other")
@pytest.mark.parametrize("vocabulary", [512, 50_257, 151_936])
def test_log_probabilities_and_entropies_over_a_large_vocabulary(vocabulary: int) -> None:
    """They were off by 2e-4 and 3e-3 nats at 151,936 tokens, in engine and trainer."""
    logits = (3 * RNG.standard_normal((2, 2, vocabulary))).astype(np.float32)
    tokens = RNG.integers(0, vocabulary, (2, 2))
    z = logits.astype(np.float64)
    normalizer = np.log(np.exp(z).sum(-1))
    logprobs = np.take_along_axis(z, tokens[..., None], -1)[..., 0] - normalizer
    entropies = normalizer - (np.exp(z - normalizer[..., None]) * z).sum(-1)
    x, chosen = mx.array(logits), mx.array(tokens)
    assert np.array(token_logprobs(x, chosen)) == pytest.approx(logprobs, abs=5e-6)
    both = token_logprobs_and_entropy(x, chosen)
    assert np.array(both[0]) == pytest.approx(logprobs, abs=5e-6)
    assert np.array(both[1]) == pytest.approx(entropies, abs=2e-5)
    gradient = np.array(mx.grad(lambda x: logsumexp(x).sum())(x))
    assert np.abs(gradient - np.exp(z - normalizer[..., None])).max() < 1e-6


def test_rows_of_any_width() -> None:
    for width in (1, 1024, 1056, 4096, 5001):
        values = RNG.random((3, width)).astype(np.float32)
        assert np.array(row_sums(mx.array(values))) == pytest.approx(
            values.astype(np.float64).sum(-1), rel=3e-6
        )
    assert logsumexp(mx.full((1, 2048), -mx.inf)).item() == -np.inf


def test_a_gpu_keeps_its_own_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU adds in order: elsewhere the results are MLX's to the bit."""
    x = mx.random.normal((2, 5000), key=mx.random.key(0))
    assert adds_in_order() == on_cpu()
    monkeypatch.setattr(sums, "adds_in_order", lambda: False)
    assert mx.array_equal(sums.logsumexp(x), mx.logsumexp(x, axis=-1))
    assert (
        mx.array_equal(sums.row_sums(x), x.sum(axis=-1)) and sums.total(x).item() == x.sum().item()
    )
