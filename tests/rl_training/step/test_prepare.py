"""Columns of a batch: alignment, KL in the reward, TIS and MIS against float64, bits in a
checkpoint."""

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from rich.console import Console

from mlx_parallm.config.algorithm import sampler_bounds
from mlx_parallm.config.load import parse_config
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.daemon import training_run
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.options import check_kv_bits
from mlx_parallm.rl_training.step import prepare as prepare_module
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.coefficients import adapted_coefficient
from mlx_parallm.rl_training.step.prepare import (
    MEASURED_MISMATCH,
    MISMATCH_BOUND,
    PreparedBatch,
    SamplerCorrection,
    StepPosition,
    expected_mismatch,
    prepare,
    sampler_correction,
)
from mlx_parallm.types import Rollout
from tests.rl_training.making import make_config, make_policy
from tests.rl_training.rollouts import make_rollout
from tests.rl_training.tiny_models import make_model

TWO_TURNS = Rollout(
    tokens=(5, 20, 2, 30, 21, 2),
    mask=(0, 1, 1, 0, 1, 1),
    logprobs=(0.0, -0.1, -0.2, 0.0, -0.3, -0.4),
    policy_versions=(0,) * 6,
    temperature=1.0,
    scores={"reward": 1.0},
)
TWO_TOKENS = make_rollout((5, 6), logprob=-1.5)


def batch_of(*rollouts: Rollout, fresh: tuple[bool, ...] = (True, False)) -> TrainBatch:
    sequences = tuple(
        TrainSequence(
            rollout, tuple(10.0 * row + t for t in range(len(rollout.tokens))), fresh[row]
        )
        for row, rollout in enumerate(rollouts)
    )
    return TrainBatch(1, (), sequences, BatchStatistics())


def test_columns_are_the_trained_tokens_one_sequence_after_the_other() -> None:
    prepared = prepare(batch_of(TWO_TURNS, TWO_TOKENS), {})
    assert prepared.lengths == (4, 2)
    np.testing.assert_allclose(prepared.rollout_logprobs, [-0.1, -0.2, -0.3, -0.4, -1.5, -1.5])
    assert prepared.advantages.tolist() == [1.0, 2.0, 4.0, 5.0, 13.0, 14.0]
    assert prepared.fresh.tolist() == [True] * 4 + [False] * 2
    assert {prepared.rollout_logprobs.dtype, prepared.advantages.dtype} == {np.dtype(np.float32)}
    assert set(prepared.loss_columns()) == {"rollout_logprobs", "advantages"}


def test_the_first_token_and_a_row_without_a_trained_one() -> None:
    none = replace(TWO_TOKENS, mask=(1, 0, 0, 0, 0))
    prepared = prepare(batch_of(none, TWO_TOKENS), {})
    assert prepared.lengths == (0, 2)
    assert prepared.advantages.tolist() == [13.0, 14.0]


def test_an_empty_batch() -> None:
    prepared = prepare(batch_of(), {"ref_logprobs": np.zeros(0, np.float32)}, kl_penalty=0.1)
    assert (prepared.lengths, prepared.kl, len(prepared.advantages)) == ((), None, 0)


def test_who_came_without_log_probabilities_counts_as_sampled_now() -> None:
    own = np.array([-9, -9, -9, -9, -0.7, -0.8], np.float32)
    batch = batch_of(TWO_TURNS, replace(TWO_TOKENS, logprobs=None))
    prepared = prepare(batch, {"stand_ins": own})
    np.testing.assert_allclose(prepared.rollout_logprobs, [-0.1, -0.2, -0.3, -0.4, -0.7, -0.8])
    assert prepared.old_logprobs is None
    corrected = prepare(
        batch, {"old_logprobs": own}, correction=SamplerCorrection("tis", "token", 2.0, 0.5)
    )
    assert corrected.old_logprobs is own
    np.testing.assert_allclose(corrected.weights[4:], 1.0)
    np.testing.assert_allclose(
        corrected.weights[:4], np.exp(own[:4] - prepared.rollout_logprobs[:4]), rtol=1e-6
    )


def test_kl_in_the_reward_is_taken_off_centred() -> None:
    """k1 = 0.1, 0.2, …, against the sampler: β · (mean - k1) is added to each token's advantage,
    whose sum stays."""
    batch = batch_of(TWO_TURNS, TWO_TOKENS)
    k1 = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    plain = prepare(batch, {})
    ref = (plain.rollout_logprobs - k1).astype(np.float32)
    prepared = prepare(batch, {"ref_logprobs": ref}, kl_penalty=0.5)
    assert prepared.kl == pytest.approx(0.35, abs=1e-6)
    np.testing.assert_allclose(prepared.kl_penalty, 0.5 * k1, atol=1e-6)
    np.testing.assert_allclose(prepared.advantages - plain.advantages, 0.5 * (0.35 - k1), atol=1e-6)
    assert prepared.advantages.sum() == pytest.approx(plain.advantages.sum(), abs=1e-5)


def test_kl_in_the_reward_is_of_the_policy_that_the_step_starts_from_where_it_was_scored() -> None:
    batch = batch_of(TWO_TURNS, TWO_TOKENS)
    scores = {
        "old_logprobs": np.full(6, -1.0, np.float32),
        "ref_logprobs": np.full(6, -1.2, np.float32),
    }
    prepared = prepare(
        batch, scores, correction=SamplerCorrection("mis", "token", 2.0, 0.5), kl_penalty=1.0
    )
    np.testing.assert_allclose(prepared.kl_penalty, 0.2, atol=1e-6)


def test_an_algorithm_finishes_the_batch_itself() -> None:
    def whitened(prepared: PreparedBatch) -> PreparedBatch:
        values = prepared.advantages - prepared.kl_penalty
        return replace(
            prepared, advantages=(values - values.mean()) / values.std(), metrics={"mine": 1.0}
        )

    batch = batch_of(TWO_TURNS, TWO_TOKENS)
    ref = prepare(batch, {}).rollout_logprobs - 1
    prepared = prepare(batch, {"ref_logprobs": ref}, kl_penalty=2.0, finish=whitened)
    values = np.array([1.0, 2.0, 4.0, 5.0, 13.0, 14.0])
    np.testing.assert_allclose(
        prepared.advantages, (values - values.mean()) / values.std(), rtol=1e-5
    )
    assert prepared.metrics == {"mine": 1.0}


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.3, 0.1 * (1 + 0.2 * 0.0128)),  # 200 % above, clipped to 20 %
        (0.105, 0.1 * (1 + 0.05 * 0.0128)),
        (0.1, 0.1),
        (0.01, 0.1 * (1 - 0.2 * 0.0128)),
        (-0.2, 0.1 * (1 - 0.2 * 0.0128)),
    ],
)
def test_the_adaptive_coefficient(kl: float, expected: float) -> None:
    found = adapted_coefficient(0.1, kl, target=0.1, horizon=10_000, sequences=128)
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_finds_the_target() -> None:
    """A policy whose KL is 0.05 / coefficient comes to rest at the target 0.1, with the
    coefficient 0.5."""
    coefficient = 0.01
    for _ in range(3_000):
        coefficient = adapted_coefficient(
            coefficient, 0.05 / coefficient, target=0.1, horizon=1_000, sequences=64
        )
    assert coefficient == pytest.approx(0.5, rel=0.01)


def test_scores_keep_their_bits_in_a_checkpoint() -> None:
    column = np.random.default_rng(0).normal(size=257).astype(np.float32) * np.float32(1e-3)
    column[:3] = np.nextafter(np.float32(-1), np.float32(0)), -np.inf, -0.0
    position = StepPosition(
        updates=1, mismatch=(0.1, 0.2, 0.3, False), order=(1, 0), scores={"ref_logprobs": column}
    )
    text = json.dumps(position.to_json())
    again = StepPosition.from_json(json.loads(text))
    assert again.scores["ref_logprobs"].tobytes() == column.tobytes()
    assert (again.order, again.mismatch, again.updates) == ((1, 0), (0.1, 0.2, 0.3, False), 1)
    assert len(text) < 6 * len(column) + 500


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


def correction(config: RLTrainingConfig, model: nn.Module) -> SamplerCorrection | None:
    return sampler_correction(config, model)


def test_auto_corrects_where_the_measured_mismatch_is_above_the_bound() -> None:
    config = make_config()
    assert correction(config, make_policy(config).model) is None
    narrow = make_policy(config, dtype=mx.bfloat16)  # its adapter is float32 all the same
    assert correction(config, narrow.model) == SamplerCorrection("tis", "token", 2.0, 0.5)
    assert correction(make_config(sampler_correction="none"), narrow.model) is None
    own = config.model_copy(update={"loss": "python:mine.py:loss"})
    assert correction(own, narrow.model) is None


@pytest.mark.parametrize("kind", ["auto", "none"])
def test_a_quantised_sampler_is_refused_without_a_correction(kind: str, tmp_path: Path) -> None:
    training = {"sampler_correction": kind, "checkpoint_dir": str(tmp_path), "run_name": "run"}
    config = parse_config({"server": {"kv_bits": 4, "port": 0}, "rl_training": training})
    with pytest.raises(ConfigError, match=r"server\.kv_bits"):
        training_run(config, resume=None, stop=threading.Event(), console=Console(quiet=True))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "training",
    [
        {"sampler_correction": "tis"},
        {"sampler_correction": "mis"},
        {"algorithm": "vespo"},
        {"algorithm": "vespo", "lora": {"qat_bits": 4}},
        {"algorithm": "sft"},
    ],
)
def test_a_quantised_sampler_is_allowed_with_a_correction_and_where_nothing_is_sampled(
    training: dict[str, Any],
) -> None:
    data = {"data": {"path": "rows.jsonl"}} if training.get("algorithm") == "sft" else {}
    check_kv_bits(parse_config({"server": {"kv_bits": 8}, "rl_training": training} | data))
    check_kv_bits(parse_config({"rl_training": training} | data))
    pairs = {"rl_training": {"algorithm": "online_dpo"}}  # its loss reads no rollout_logprobs
    check_kv_bits(parse_config({"server": {"kv_bits": 8}} | pairs))


def test_a_loss_of_ones_own_with_a_quantised_sampler_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs: list[str] = []
    monkeypatch.setattr(
        "mlx_parallm.rl_training.options.log",
        SimpleNamespace(warning=lambda event, **fields: logs.append(event)),
    )
    training = {"sampler_correction": "tis", "loss": "python:mine.py:loss"}
    check_kv_bits(parse_config({"rl_training": training}))
    assert not logs
    check_kv_bits(parse_config({"server": {"kv_bits": 8}, "rl_training": training}))
    assert "has to multiply by inputs.weights" in logs[0]
    check_kv_bits(parse_config({"rl_training": training | {"lora": {"qat_bits": 4}}}))
    assert "(lora.qat_bits)" in logs[1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("quantised", [True, False])
def test_the_row_of_a_model(dtype: mx.Dtype, quantised: bool) -> None:
    model = make_model()
    model.set_dtype(dtype)
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    assert expected_mismatch(model) == MEASURED_MISMATCH[dtype, quantised]


def test_float32_that_is_tf32_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 keeps as many bits of the mantissa as float16."""
    monkeypatch.setattr(prepare_module, "float32_is_tf32", lambda: True)
    assert expected_mismatch(make_model()) == MEASURED_MISMATCH[mx.float16, False]
    chosen = correction(make_config(), make_model())
    assert chosen is not None and chosen.kind == "tis"


def test_icepop_is_mis_of_tokens_with_its_own_bounds() -> None:
    """w = 0.4, 0.5, 5 and 5.1: the two within the bounds keep their weight."""
    chosen = correction(make_config(sampler_correction="icepop"), make_model())
    assert chosen == SamplerCorrection("mis", "token", 5.0, 0.5)
    old = np.log(np.array([0.4, 0.501, 4.999, 5.1]))
    weights, cut = chosen.weights(old, np.zeros(4), [4])
    assert weights.tolist() == pytest.approx([0, 0.501, 4.999, 0])
    assert cut.tolist() == [True, False, False, True]


def test_the_bound_parts_float32_from_what_is_narrower() -> None:
    for (dtype, _), mismatch in MEASURED_MISMATCH.items():
        assert (mismatch > MISMATCH_BOUND) == (dtype != mx.float32)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (2.0, 0.5)),
        ({"sampler_correction_level": "sequence"}, (3.0, 1 / 3)),
        ({"sampler_correction_cap": 4.0}, (4.0, 0.25)),
        (
            {
                "sampler_correction": "mis",
                "sampler_correction_cap": 5.0,
                "sampler_correction_floor": 0.5,
            },
            (5.0, 0.5),
        ),
        ({"sampler_correction": "icepop"}, (5.0, 0.5)),
        ({"sampler_correction": "icepop", "sampler_correction_floor": 0.2}, (5.0, 0.2)),
    ],
)
def test_bounds(given: dict[str, Any], bounds: tuple[float, float]) -> None:
    assert sampler_bounds(make_config(**given)) == bounds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"sampler_correction": "mis", "sampler_correction_floor": 2.0},
            "has to be below sampler_correction_cap",
        ),
        (
            {"sampler_correction": "mis", "sampler_correction_cap": 0.5},
            "has to be below sampler_correction_cap",
        ),
        (
            {"sampler_correction": "tis", "sampler_correction_floor": 0.2},
            'with "mis" and "icepop" only',
        ),
        (
            {"sampler_correction": "none", "sampler_correction_cap": 3.0},
            'cap is set, but sampler_correction = "none"',
        ),
        (
            {"sampler_correction": "none", "sampler_correction_level": "sequence"},
            "level is set, but sampler_correction",
        ),
        (
            {"sampler_correction": "icepop", "sampler_correction_level": "sequence"},
            '"mis" has one of sequences',
        ),
        ({"kl_target": 0.1}, "kl_beta = 0"),
        ({"kl_in": "reward"}, "kl_beta = 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_config(**given)
