"""Values and gradient norms of TRL and verl on the same inputs (float64), hand-worked cases, invariances."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.policy_gradient import clipped_surrogate, grpo_loss
from mlx_parallm.losses.types import Aggregation, LossInputs, LossOutputs
from tests.losses import fixtures

Loss = Callable[[LossInputs], LossOutputs]


def value_and_grad(loss: Loss, inputs: LossInputs) -> tuple[float, np.ndarray]:
    value, gradient = mx.value_and_grad(lambda x: loss(replace(inputs, logprobs=x)).loss)(inputs.logprobs)
    return value.item(), np.array(gradient)


def surrogate(aggregation: Aggregation = "token", low: float = 0.2, high: float = 0.28) -> Loss:
    return lambda inputs: clipped_surrogate(inputs, clip_low=low, clip_high=high, aggregation=aggregation)


@pytest.mark.parametrize(
    ("scale", "aggregation", "value", "norm"),
    [
        (0.1, "token", 0.051254, 0.158295),  # TRL dapo; verl ppo token-mean (no clip binds in set A)
        (0.1, "sequence", -0.015323, 0.154209),  # TRL grpo; verl seq-mean-token-mean
        (0.6, "token", 0.278672, 0.193167),  # TRL dapo = verl ppo token-mean without its dual clip
        (0.6, "sequence", 0.166193, 0.156272),  # TRL grpo
    ],
)
def test_other_trainers_numbers(scale: float, aggregation: Aggregation, value: float, norm: float) -> None:
    got, gradient = value_and_grad(surrogate(aggregation), fixtures.inputs(scale))
    assert got == pytest.approx(value, abs=1e-6)
    assert np.linalg.norm(gradient) == pytest.approx(norm, abs=1e-6)


def test_clip_fraction_and_ratio_count_the_tokens_of_set_b() -> None:
    metrics = clipped_surrogate(fixtures.inputs(0.6), clip_low=0.2, clip_high=0.28).metrics
    ratio = np.exp(fixtures.NEW - fixtures.rollout_logprobs(0.6))
    binds = np.where(fixtures.ADVANTAGES > 0, ratio > 1.28, ratio < 0.8) & fixtures.MASK
    assert 0 < binds.sum() < 20
    assert metrics["clip_fraction"].item() == pytest.approx(binds.sum() / 20, abs=1e-6)
    assert metrics["ratio_mean"].item() == pytest.approx(ratio[fixtures.MASK].mean(), abs=1e-5)


def one_token(ratio: float, advantage: float) -> LossInputs:
    return LossInputs(
        logprobs=mx.array([[np.log(ratio)]], mx.float32),
        rollout_logprobs=mx.zeros((1, 1)),
        advantages=mx.array([[advantage]]),
        mask=mx.array([[True]]),
        token_normalizer=1.0,
        sequence_normalizer=1.0,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),  # a bad token already made rarer: the pessimistic branch is the clipped one
        (2.0, -1.0, 2.0, 2.0),  # a bad token made likelier: the gradient has to stay
        (1.0, 0.7, -0.7, -0.7),
    ],
)
def test_which_side_is_clipped(ratio: float, advantage: float, value: float, gradient: float) -> None:
    got, slope = value_and_grad(surrogate(), one_token(ratio, advantage))
    assert got == pytest.approx(value, abs=1e-6)
    assert slope.item() == pytest.approx(gradient, abs=1e-6)


def full_loss(inputs: LossInputs, aggregation: Aggregation = "token") -> LossOutputs:
    return grpo_loss(
        inputs,
        clip_low=0.2,
        clip_high=0.28,
        kl_beta=0.3,
        kl_estimator="k3",
        entropy_weight=0.05,
        aggregation=aggregation,
    )


@pytest.mark.parametrize("scale", [0.1, 0.6])
def test_gradient_equals_finite_differences(scale: float) -> None:
    def in_float64(new: np.ndarray) -> float:
        ratio = np.exp(new - fixtures.rollout_logprobs(scale))
        policy = -np.minimum(ratio * fixtures.ADVANTAGES, np.clip(ratio, 0.8, 1.28) * fixtures.ADVANTAGES)
        d = fixtures.REF - new
        return float((policy + 0.3 * (np.exp(d) - 1 - d) - 0.05 * -fixtures.NEW)[fixtures.MASK].sum() / 20)

    value, gradient = value_and_grad(full_loss, fixtures.inputs(scale))
    assert value == pytest.approx(in_float64(fixtures.NEW), abs=1e-6)
    for i, t in np.ndindex(6, 5):
        step = np.zeros((6, 5))
        step[i, t] = 1e-6
        slope = (in_float64(fixtures.NEW + step) - in_float64(fixtures.NEW - step)) / 2e-6
        assert gradient[i, t] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_cutting_and_padding_a_mini_batch_changes_nothing(aggregation: Aggregation) -> None:
    def loss(inputs: LossInputs) -> LossOutputs:
        return full_loss(inputs, aggregation)

    whole, gradient = value_and_grad(loss, fixtures.inputs(0.6))
    parts = [
        fixtures.inputs(0.6, rows=rows, pad=pad) for rows, pad in ((slice(0, 1), 3), (slice(1, 4), 0), (slice(4, 6), 7))
    ]
    values, gradients = zip(*(value_and_grad(loss, part) for part in parts), strict=True)
    assert sum(values) == pytest.approx(whole, abs=1e-6)
    np.testing.assert_allclose(np.concatenate([g[:, :5] for g in gradients]), gradient, atol=1e-7)
    for name, total in loss(fixtures.inputs(0.6)).metrics.items():
        assert sum(loss(part).metrics[name].item() for part in parts) == pytest.approx(total.item(), abs=1e-6)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_what_the_mask_hides_may_be_anything(poison: float) -> None:
    clean = fixtures.inputs(0.6)
    mask = clean.mask
    dirty = LossInputs(
        **{
            name: mx.where(mask, getattr(clean, name), poison)
            for name in ("logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "entropy")
        },
        mask=mask,
        token_normalizer=20.0,
        sequence_normalizer=6.0,
    )
    value, gradient = value_and_grad(full_loss, dirty)
    expected, expected_gradient = value_and_grad(full_loss, clean)
    assert value == pytest.approx(expected, abs=1e-7)
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_an_absurd_ratio_stays_finite() -> None:
    value, gradient = value_and_grad(surrogate(), one_token(np.exp(80.0), -1.0))
    assert value == pytest.approx(np.exp(20.0), rel=1e-5)
    assert np.isfinite(gradient).all()


def test_kl_and_entropy_weights_need_their_inputs() -> None:
    bare = one_token(1.0, 1.0)
    with pytest.raises(ValueError, match="ref_logprobs"):
        grpo_loss(bare, clip_low=0.2, clip_high=0.2, kl_beta=0.1)
    with pytest.raises(ValueError, match="entropy"):
        grpo_loss(bare, clip_low=0.2, clip_high=0.2, entropy_weight=0.1)
    assert set(grpo_loss(bare, clip_low=0.2, clip_high=0.2).metrics) == {"policy_loss", "ratio_mean", "clip_fraction"}
