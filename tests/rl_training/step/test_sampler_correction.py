"""TIS and MIS against float64, the rule of "auto", and what the configuration refuses."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.config.algorithm import sampler_bounds
from mlx_parallm.rl_training.step.prepare import (
    MEASURED_MISMATCH,
    MISMATCH_BOUND,
    SamplerCorrection,
    expected_mismatch,
    sampler_correction,
)
from tests.rl_training.making import make_config, make_policy
from tests.rl_training.tiny_models import make_model

LENGTHS = (3, 0, 2, 1)
OLD = np.array([-1.0, -2.0, -0.5, -3.0, -0.25, -1.5], np.float32)
APART = np.array([0.0, 1.0, -1.0, 0.4, 0.6, 50.0])  # old - rollout
ROLLOUT = (OLD - APART).astype(np.float32)


def test_the_worked_example() -> None:
    old, rollout = np.array([0.0, 0.0, 0.0]), np.array([0.0, -1.0, 1.0])
    weights, cut = SamplerCorrection("tis", "token", 2.0, 0.0).weights(old, rollout, [3])
    np.testing.assert_allclose(weights, [1, 2, math.exp(-1)], rtol=1e-6)
    assert cut.tolist() == [False, True, False]
    weights, cut = SamplerCorrection("mis", "token", 2.0, 0.5).weights(old, rollout, [3])
    np.testing.assert_allclose(weights, [1, 0, 0])
    assert cut.tolist() == [False, True, True]
    for kind in ("tis", "mis"):
        weights, cut = SamplerCorrection(kind, "sequence", 2.0, 0.5).weights(old, rollout, [3])
        np.testing.assert_allclose(weights, [1, 1, 1], rtol=1e-6)
        assert not cut.any()


@pytest.mark.parametrize("kind", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_against_float64_one_token_at_a_time(kind: Any, level: Any) -> None:
    cap, floor = 2.5, 0.7
    expected, cuts, start = [], [], 0
    apart = OLD.astype(np.float64) - ROLLOUT.astype(np.float64)
    for length in LENGTHS:
        row = apart[start : start + length]
        start += length
        for value in row:
            weight = math.exp(min(row.sum() if level == "sequence" else value, 20.0))
            out = weight > cap or (kind == "mis" and weight < floor)
            cuts.append(out)
            expected.append(min(weight, cap) if kind == "tis" else 0.0 if out else weight)
    weights, cut = SamplerCorrection(kind, level, cap, floor).weights(OLD, ROLLOUT, LENGTHS)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert cut.tolist() == cuts
    assert 0 < cut.sum() < len(cuts)
    assert weights.dtype == np.float32


def test_a_sequence_of_many_small_differences_does_not_overflow() -> None:
    weights, _ = SamplerCorrection("mis", "sequence", math.inf, 0.0).weights(
        np.zeros(10_000), np.full(10_000, -1.0), [10_000]
    )
    np.testing.assert_allclose(weights, math.exp(20), rtol=1e-6)


def test_auto_corrects_where_the_measured_mismatch_is_above_the_bound() -> None:
    config = make_config()
    assert sampler_correction(config, make_policy(config).model) is None
    narrow = make_policy(config, dtype=mx.bfloat16)  # its adapter is float32 all the same
    assert sampler_correction(config, narrow.model) == SamplerCorrection("tis", "token", 2.0, 0.5)
    assert sampler_correction(make_config(sampler_correction="none"), narrow.model) is None
    own = config.model_copy(update={"loss": "python:mine.py:loss"})
    assert sampler_correction(own, narrow.model) is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("quantised", [True, False])
def test_the_row_of_a_model(dtype: mx.Dtype, quantised: bool) -> None:
    model = make_model()
    model.set_dtype(dtype)
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    assert expected_mismatch(model) == MEASURED_MISMATCH[dtype, quantised]


def test_the_bound_parts_float32_from_what_is_narrower() -> None:
    for (dtype, _), mismatch in MEASURED_MISMATCH.items():
        assert (mismatch > MISMATCH_BOUND) == (dtype != mx.float32)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (2.0, 0.5)),
        ({"sampler_correction_level": "sequence"}, (3.0, 1 / 3)),
        ({"sampler_correction_cap": 4.0}, (4.0, 0.25)),
        ({"sampler_correction": "mis", "sampler_correction_cap": 5.0, "sampler_correction_floor": 0.5}, (5.0, 0.5)),
    ],
)
def test_bounds(given: dict[str, Any], bounds: tuple[float, float]) -> None:
    assert sampler_bounds(make_config(**given)) == bounds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampler_correction": "mis", "sampler_correction_floor": 2.0}, "has to be below sampler_correction_cap"),
        ({"sampler_correction": "mis", "sampler_correction_cap": 0.5}, "has to be below sampler_correction_cap"),
        ({"sampler_correction": "tis", "sampler_correction_floor": 0.2}, 'with "mis" only'),
        ({"sampler_correction": "none", "sampler_correction_cap": 3.0}, 'cap is set, but sampler_correction = "none"'),
        (
            {"sampler_correction": "none", "sampler_correction_level": "sequence"},
            "level is set, but sampler_correction",
        ),
        ({"kl_target": 0.1}, "kl_beta = 0"),
        ({"kl_in": "reward"}, "kl_beta = 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_config(**given)
