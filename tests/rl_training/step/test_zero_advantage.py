from mlx_parallm.losses.advantages import group_advantages, token_advantages
from tests.rollout_store.groups import make_group, make_rollout


def test_a_zeroed_rollout_counts_in_the_mean_and_learns_nothing() -> None:
    """Rewards 3, 0, 0 → mean 1 → 2, -1, -1; the last one is zeroed by its environment."""
    rollouts = (make_rollout(3.0), make_rollout(0.0), make_rollout(0.0, zero_advantage=True))
    group = make_group(rollouts=rollouts)
    rows = token_advantages(group, lambda rewards: group_advantages(rewards, "mean"))
    assert rows == ((2.0,) * 5, (-1.0,) * 5, (0.0,) * 5)


def test_it_wins_over_the_environments_own_advantages() -> None:
    rollouts = (make_rollout(), make_rollout(zero_advantage=True))
    group = make_group(rollouts=rollouts, advantages=(0.5, 0.5))
    assert token_advantages(group, lambda _: None) == ((0.5,) * 5, (0.0,) * 5)


def test_a_group_that_is_zeroed_throughout_says_nothing() -> None:
    rollouts = (make_rollout(1.0, zero_advantage=True), make_rollout(0.0, zero_advantage=True))
    assert token_advantages(make_group(rollouts=rollouts), lambda rewards: group_advantages(rewards)) is None
