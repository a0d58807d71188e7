"""Advantages and returns of PPO against verl's numbers, a brute-force sum, and cases worked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from mlx_parallm.losses.advantages import raw_rewards
from mlx_parallm.losses.ppo import gae
from mlx_parallm.rl_training.step.algorithms import credit
from mlx_parallm.rl_training.step.prepare import PreparedBatch, prepare
from mlx_parallm.types import Rollout, RolloutGroup
from tests.rl_training.rollouts import make_batch

LENGTHS = (5, 3, 4, 2, 5, 1)
REWARDS = (1, 0, 0, 0.5, 0.25, 1)
VALUES = np.concatenate([[0.1 * ((i + 2 * t) % 4) for t in range(length)] for i, length in enumerate(LENGTHS)])


def prepared(
    lengths: tuple[int, ...], rewards: tuple[float, ...], values: np.ndarray, penalty: np.ndarray | None = None
) -> PreparedBatch:
    """The reward stands on every token, as the trainer has it."""
    count = sum(lengths)
    return PreparedBatch(
        lengths=lengths,
        rollout_logprobs=np.zeros(count, np.float32),
        advantages=np.repeat(np.array(rewards, np.float32), lengths),
        fresh=np.ones(count, bool),
        old_values=values.astype(np.float32),
        kl_penalty=None if penalty is None else penalty.astype(np.float32),
    )


def credited(batch: PreparedBatch, *, gamma: float, gae_lambda: float) -> PreparedBatch:
    return credit(batch, gamma=gamma, gae_lambda=gae_lambda, normalize_advantages=True)


def test_verls_numbers() -> None:
    found = credited(prepared(LENGTHS, REWARDS, VALUES), gamma=0.99, gae_lambda=0.95)
    np.testing.assert_allclose(found.advantages[:5], [1.276118, 0.890426, 1.501413, 1.129974, 1.756116], atol=1e-6)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns[:5], [0.801068, 0.841221, 0.89444, 0.9405, 1.0], atol=1e-6)
    assert found.advantages.dtype == found.returns.dtype == np.float32


def test_the_worked_case() -> None:
    found = gae(np.array([0.0, 1.0]), np.array([0.4, 0.6]), np.array([1]), gamma=1.0, gae_lambda=0.5)
    np.testing.assert_allclose(found, [0.4, 0.4])


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.7), (1.0, 0.0), (0.97, 1.0)])
def test_against_the_sum_that_it_stands_for(gamma: float, gae_lambda: float) -> None:
    """A_t = Σ_k (γλ)^k δ_{t+k} within each sequence; some sequences are empty; every token has a penalty."""
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
        expected += [sum((gamma * gae_lambda) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]
        start += length
    raw = np.array(expected)
    found = credited(prepared(lengths, rewards, values, penalty), gamma=gamma, gae_lambda=gae_lambda)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns, raw + values, atol=1e-6)
    np.testing.assert_allclose(found.advantages, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), atol=1e-5)
    if gamma == 1.0 and gae_lambda == 0.0:
        assert abs(found.returns[-1] - (rewards[5] - penalty[-1])) < 1e-6  # only the last one sees the reward


def test_lambda_1_is_the_reward_to_go_whatever_the_values_are() -> None:
    for values in (VALUES, 5.0 - VALUES):
        found = credited(prepared(LENGTHS, REWARDS, values), gamma=1.0, gae_lambda=1.0)
        np.testing.assert_allclose(found.returns, np.repeat(REWARDS, LENGTHS), atol=1e-6)


def test_a_tools_answer_is_passed_over() -> None:
    """The same sampled tokens with and without given ones between them: the same columns."""
    found = []
    for mask in ((0, 1, 1, 1), (0, 1, 0, 0, 1, 0, 1, 0)):
        rows = [
            Rollout(tuple(range(3, 3 + len(mask))), mask, (0.0,) * len(mask), (0,) * len(mask), 1.0, {"reward": reward})
            for reward in (1.0, 0.0)
        ]
        batch = make_batch([RolloutGroup("g", "test", tuple(rows))], estimate=raw_rewards)
        scores = {"old_logprobs": np.zeros(6, np.float32), "old_values": np.array([0.1, 0.5, 0.3] * 2, np.float32)}
        found.append(prepare(batch, scores, finish=lambda p: credited(p, gamma=0.9, gae_lambda=0.8)))
    np.testing.assert_array_equal(found[0].returns, found[1].returns)
    np.testing.assert_array_equal(found[0].advantages, found[1].advantages)
    # δ = [0.9 · 0.5 - 0.1, 0.9 · 0.3 - 0.5, 1 - 0.3] = [0.35, -0.23, 0.7]; A_1 = -0.23 + 0.72 · 0.7 = 0.274
    np.testing.assert_allclose(found[0].returns[:3], [0.35 + 0.72 * 0.274 + 0.1, 0.774, 1.0], atol=1e-6)


def test_explained_variance() -> None:
    """1 for values that are the returns, 0 for one value everywhere, and what the formula says in between."""

    def explained(values: np.ndarray) -> float:
        return credited(prepared(LENGTHS, REWARDS, values), gamma=1.0, gae_lambda=1.0).metrics["explained_variance"]

    targets = np.repeat(np.array(REWARDS, float), LENGTHS)
    assert explained(targets) == pytest.approx(1.0, abs=1e-6)
    assert explained(np.full(20, 0.7)) == pytest.approx(0.0, abs=1e-6)
    assert explained(VALUES) == pytest.approx(1 - (targets - VALUES).var() / targets.var(), abs=1e-6)
    same = credited(prepared((2, 2), (1, 1), np.zeros(4)), gamma=1.0, gae_lambda=1.0)
    assert "explained_variance" not in same.metrics, "returns without a spread"


def test_a_batch_without_tokens() -> None:
    empty = replace(prepared((0,), (1,), np.zeros(0)))
    assert len(credited(empty, gamma=1.0, gae_lambda=0.95).advantages) == 0
