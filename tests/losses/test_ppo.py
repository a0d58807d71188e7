"""PPO's advantages, returns and value loss: verl's numbers, worked cases, float64 oracles,
invariances."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.advantages import raw_rewards
from mlx_parallm.losses.ppo import gae, value_loss, with_value_loss
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.step.algorithms import credit
from mlx_parallm.rl_training.step.prepare import PreparedBatch, prepare
from mlx_parallm.types import Rollout, RolloutGroup
from tests.losses import fixtures
from tests.rl_training.rollouts import make_batch

_I, _T = np.meshgrid(np.arange(6), np.arange(5), indexing="ij")
OLD_VALUES = 0.1 * ((_I + 2 * _T) % 4) * fixtures.MASK
VALUES = OLD_VALUES + 0.3 * ((_I + _T) % 3 - 1)
REWARDS = (1, 0, 0, 0.5, 0.25, 1)
OLD_COLUMN = OLD_VALUES[fixtures.MASK]


def returns() -> np.ndarray:
    """What `test_verls_advantages` checks, as rows."""
    found = np.zeros((6, 5))
    found[fixtures.MASK] = credited(of_fixture(OLD_COLUMN), gamma=0.99, gae_lambda=0.95).returns
    return found


def inputs(rows: slice = slice(None), values: np.ndarray = VALUES) -> LossInputs:
    def array(numbers: np.ndarray) -> mx.array:
        return mx.array(numbers[rows].astype(np.float32))

    given = fixtures.inputs(0.1, rows=rows)
    return replace(
        given, values=array(values), old_values=array(OLD_VALUES), returns=array(returns())
    )


def oracle(values: np.ndarray, clip: float) -> float:
    held = np.clip(values, OLD_VALUES - clip, OLD_VALUES + clip) if clip else values
    terms = np.maximum((values - returns()) ** 2, (held - returns()) ** 2)
    return float(0.5 * terms[fixtures.MASK].mean())


def gradient(given: LossInputs, clip: float) -> np.ndarray:
    return np.array(
        mx.grad(lambda v: value_loss(replace(given, values=v), clip=clip).loss)(given.values)
    )


def test_verls_value_loss() -> None:
    outputs = value_loss(inputs(), clip=0.2)
    assert outputs.loss.item() == pytest.approx(0.158579, abs=1e-6)
    assert outputs.metrics["value_loss"].item() == pytest.approx(0.158579, abs=1e-6)
    assert outputs.metrics["value_clip_fraction"].item() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (0.5, 1.0, 0.245, 0.0),
        (0.5, 0.0, 0.125, 0.5),
        (0.2, 1.0, 0.32, -0.8),
        (-0.5, -1.0, 0.405, 0.0),
    ],
)
def test_worked_cases(value: float, target: float, loss: float, slope: float) -> None:
    """V_old = 0.1, clip 0.2: a move with the return is held, the way back is open, inside the
    bound nothing is held."""
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
        assert sum(part.metrics[name].item() for part in parts) == pytest.approx(
            metric.item(), abs=1e-6
        )
    poisoned = inputs(values=np.where(fixtures.MASK, VALUES, np.nan))
    assert value_loss(poisoned, clip=0.2).loss.item() == pytest.approx(whole.loss.item(), abs=1e-7)
    assert np.isfinite(gradient(poisoned, 0.2)).all()


@pytest.mark.parametrize("missing", ["values", "old_values", "returns"])
def test_what_it_needs(missing: str) -> None:
    with pytest.raises(ValueError, match="old_values"):
        value_loss(replace(inputs(), **{missing: None}), clip=0.2)


def policy(given: LossInputs) -> LossOutputs:
    loss = (
        -mx.where(given.mask, given.logprobs * given.advantages, 0.0).sum() / given.token_normalizer
    )
    return LossOutputs(loss, {"policy_loss": loss})


@pytest.mark.parametrize("old", [False, True])
def test_beside_a_policy_loss(old: bool) -> None:
    """policy + coefficient · value; approx_kl against what the ratio is against: old_logprobs
    where they are there."""
    before = fixtures.NEW - 0.2 * np.cos(1.0 + _I + _T) if old else fixtures.rollout_logprobs(0.1)
    given = replace(inputs(), old_logprobs=mx.array(before.astype(np.float32)) if old else None)
    outputs = with_value_loss(policy, clip=0.2, coefficient=0.3)(given)
    assert outputs.loss.item() == pytest.approx(
        policy(given).loss.item() + 0.3 * 0.158579, abs=1e-6
    )
    d = (fixtures.NEW - before)[fixtures.MASK]
    assert outputs.metrics["approx_kl"].item() == pytest.approx(
        (np.exp(d) - 1 - d).mean(), rel=1e-4
    )
    assert outputs.metrics.keys() == {
        "policy_loss",
        "value_loss",
        "value_clip_fraction",
        "approx_kl",
    }


def prepared(
    lengths: Sequence[int],
    rewards: Sequence[float],
    values: np.ndarray,
    penalty: np.ndarray | None = None,
) -> PreparedBatch:
    """The reward stands on every token, as the trainer has it."""
    count = sum(lengths)
    return PreparedBatch(
        lengths=tuple(lengths),
        rollout_logprobs=np.zeros(count, np.float32),
        advantages=np.repeat(np.array(rewards, np.float32), lengths),
        fresh=np.ones(count, bool),
        has_rollout_logprobs=np.ones(count, bool),
        old_values=values.astype(np.float32),
        kl_penalty=None if penalty is None else penalty.astype(np.float32),
    )


def of_fixture(values: np.ndarray) -> PreparedBatch:
    return prepared(fixtures.LENGTHS, REWARDS, values)


def credited(batch: PreparedBatch, *, gamma: float, gae_lambda: float) -> PreparedBatch:
    return credit(batch, gamma=gamma, gae_lambda=gae_lambda, normalize_advantages=True)


def test_verls_advantages() -> None:
    found = credited(of_fixture(OLD_COLUMN), gamma=0.99, gae_lambda=0.95)
    np.testing.assert_allclose(
        found.advantages[:5], [1.276118, 0.890426, 1.501413, 1.129974, 1.756116], atol=1e-6
    )
    assert found.returns is not None
    np.testing.assert_allclose(
        found.returns[:5], [0.801068, 0.841221, 0.89444, 0.9405, 1.0], atol=1e-6
    )
    assert found.advantages.dtype == found.returns.dtype == np.float32


def test_a_worked_advantage() -> None:
    found = gae(
        np.array([0.0, 1.0]), np.array([0.4, 0.6]), np.array([1]), gamma=1.0, gae_lambda=0.5
    )
    np.testing.assert_allclose(found, [0.4, 0.4])


@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.7), (1.0, 0.0), (0.97, 1.0)]
)
def test_against_the_sum_that_it_stands_for(gamma: float, gae_lambda: float) -> None:
    """A_t = Σ_k (γλ)^k δ_{t+k} within each sequence; some sequences are empty; every token has a
    penalty."""
    rng = np.random.default_rng(3)
    lengths = (4, 0, 7, 1, 0, 3, 0)
    rewards = tuple(rng.normal(size=len(lengths)).tolist())
    values, penalty = rng.normal(size=sum(lengths)), 0.1 * rng.normal(size=sum(lengths))
    expected, start = [], 0
    for length, reward in zip(lengths, rewards, strict=True):
        v = [*values[start : start + length].astype(np.float32).astype(float), 0.0]
        r = -penalty[start : start + length].astype(np.float32).astype(float)
        if length:
            r[-1] += np.float32(reward)
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        expected += [
            sum((gamma * gae_lambda) ** k * deltas[t + k] for k in range(length - t))
            for t in range(length)
        ]
        start += length
    raw = np.array(expected)
    found = credited(
        prepared(lengths, rewards, values, penalty), gamma=gamma, gae_lambda=gae_lambda
    )
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, raw + values, atol=1e-6)
    np.testing.assert_allclose(
        found.advantages, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), atol=1e-5
    )
    if gamma == 1.0 and gae_lambda == 0.0:
        # only the last one sees the reward
        assert abs(found.returns[-1] - (rewards[5] - penalty[-1])) < 1e-6


def test_lambda_1_is_the_reward_to_go_whatever_the_values_are() -> None:
    for values in (OLD_COLUMN, 5.0 - OLD_COLUMN):
        found = credited(of_fixture(values), gamma=1.0, gae_lambda=1.0)
        np.testing.assert_allclose(found.returns, np.repeat(REWARDS, fixtures.LENGTHS), atol=1e-6)


def test_a_tools_answer_is_passed_over() -> None:
    """The same sampled tokens with and without given ones between them: the same columns."""
    found = []
    for mask in ((0, 1, 1, 1), (0, 1, 0, 0, 1, 0, 1, 0)):
        rows = [
            Rollout(
                tuple(range(3, 3 + len(mask))),
                mask,
                (0.0,) * len(mask),
                (0,) * len(mask),
                1.0,
                {"reward": reward},
            )
            for reward in (1.0, 0.0)
        ]
        batch = make_batch([RolloutGroup("g", "test", tuple(rows))], estimate=raw_rewards)
        scores = {
            "old_logprobs": np.zeros(6, np.float32),
            "old_values": np.array([0.1, 0.5, 0.3] * 2, np.float32),
        }
        found.append(
            prepare(batch, scores, finish=lambda p: credited(p, gamma=0.9, gae_lambda=0.8))
        )
    np.testing.assert_array_equal(found[0].returns, found[1].returns)
    np.testing.assert_array_equal(found[0].advantages, found[1].advantages)
    # δ = [0.9 · 0.5 - 0.1, 0.9 · 0.3 - 0.5, 1 - 0.3] = [0.35, -0.23, 0.7]; A_1 = -0.23 + 0.72 · 0.7
    # = 0.274
    np.testing.assert_allclose(
        found[0].returns[:3], [0.35 + 0.72 * 0.274 + 0.1, 0.774, 1.0], atol=1e-6
    )


def test_explained_variance() -> None:
    """1 for values that are the returns, 0 for one value everywhere, and what the formula says
    in between."""

    def explained(values: np.ndarray) -> float:
        return credited(of_fixture(values), gamma=1.0, gae_lambda=1.0).metrics["explained_variance"]

    targets = np.repeat(np.array(REWARDS, float), fixtures.LENGTHS)
    assert explained(targets) == pytest.approx(1.0, abs=1e-6)
    assert explained(np.full(20, 0.7)) == pytest.approx(0.0, abs=1e-6)
    assert explained(OLD_COLUMN) == pytest.approx(
        1 - (targets - OLD_COLUMN).var() / targets.var(), abs=1e-6
    )
    same = credited(prepared((2, 2), (1, 1), np.zeros(4)), gamma=1.0, gae_lambda=1.0)
    assert "explained_variance" not in same.metrics, "returns without a spread"


def test_a_batch_without_tokens() -> None:
    empty = prepared((0,), (1,), np.zeros(0))
    assert len(credited(empty, gamma=1.0, gae_lambda=0.95).advantages) == 0
