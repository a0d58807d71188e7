"""Group advantages against hand-worked numbers and the values of other trainers."""

import numpy as np
import pytest

from mlx_parallm.rl_training.advantages import group_advantages, token_advantages
from mlx_parallm.types import RolloutGroup
from tests.rl_training.rollouts import make_group, make_rollout


def test_population_std() -> None:
    assert group_advantages([1, 0, 0]) == pytest.approx([1.414214, -0.707107, -0.707107], abs=1e-6)
    expected = np.array([0.5, 0.25, 1]) - 7 / 12
    assert group_advantages([0.5, 0.25, 1]) == pytest.approx(expected / expected.std(), abs=1e-6)


def test_mean_only() -> None:
    assert group_advantages([1, 0, 0], "mean") == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert group_advantages([0.5, 0.25, 1], "mean") == pytest.approx([-0.083333, -0.333333, 0.416667], abs=1e-6)


@pytest.mark.parametrize(
    "rewards", [[0.5] * 4, [0.1 + 0.2, 0.3, 0.3], [1e9 + 1e-6, 1e9], [0.7]], ids=["equal", "rounding", "large", "one"]
)
def test_equal_rewards_have_no_variance(rewards: list[float]) -> None:
    """0.1 + 0.2 is not 0.3: divided by its own std that difference would be an advantage of 1.4."""
    assert group_advantages(rewards) is None
    assert group_advantages(rewards, "mean") is None


def test_a_small_real_difference_counts() -> None:
    assert group_advantages([0.001, 0.002]) == pytest.approx([-1, 1], abs=1e-4)


def test_advantages_go_to_every_token() -> None:
    group = make_group("g", [1, 0])
    assert token_advantages(group, group_advantages) == ((pytest.approx(1.0),) * 5, (pytest.approx(-1.0),) * 5)
    assert token_advantages(make_group("g", [1, 1]), group_advantages) is None


def test_an_environments_own_advantages_win() -> None:
    rollouts = (make_rollout(reward=1), make_rollout(reward=1))
    per_rollout = RolloutGroup("g", "test", rollouts, advantages=(0.3, 0.0))
    assert token_advantages(per_rollout, group_advantages) == ((0.3,) * 5, (0.0,) * 5)
    per_token = RolloutGroup("g", "test", rollouts, advantages=((0, 0, 0, 1.0, 2.0), (0, 0, 0, 0, 0)))
    assert token_advantages(per_token, group_advantages) == ((0, 0, 0, 1.0, 2.0), (0, 0, 0, 0, 0))
    assert token_advantages(RolloutGroup("g", "test", rollouts, advantages=(0.0, 0.0)), group_advantages) is None
