"""Answers that are too long: rewards that lose by length, and answers that are left out of the batch."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.losses.advantages import PLAIN, Shaping, group_advantages, token_advantages
from mlx_parallm.rl_training.rollout_buffer import NO_VARIANCE, RolloutBuffer
from mlx_parallm.rl_training.step.algorithms import make_algorithm, make_shaping
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import RolloutGroup
from tests.rl_training.making import make_config
from tests.rl_training.rollouts import make_rollout
from tests.rl_training.test_rollout_buffer import make_buffer


def mean_only(rewards: Any) -> tuple[float, ...] | None:
    return group_advantages(rewards, "mean")


def group_of(group_id: str, *rollouts: Any) -> RolloutGroup:
    return RolloutGroup(group_id, "test", tuple(rollouts), index=None)


def buffer_of(store: RolloutStore, shaping: Shaping, size: int = 4) -> RolloutBuffer:
    return make_buffer(store, estimate=mean_only, rollout_batch_size=size, shaping=shaping, group_sizes=[])


def test_what_is_configured() -> None:
    def made(**values: Any) -> Shaping:
        config = make_config(**values)
        return make_shaping(config, make_algorithm(config))

    assert made() == PLAIN
    everything = made(overlong_buffer=4, overlong_length=20, mask_truncated=True, algorithm="reinforce_pp")
    assert everything == Shaping(20, 4, mask_truncated=True, leave_out_marked=True)
    assert made(kl_beta=0.1, kl_in="reward").leave_out_marked, "it makes another advantage of 0"


def test_advantages_are_made_of_rewards_that_lost_by_length() -> None:
    """L_max 8, buffer 4: lengths 4, 6, 8 lose 0, 0.5, 1 → rewards 1, 0.5, 0 → mean 0.5."""
    group = group_of("g", *(make_rollout((5,) * length, reward=1.0) for length in (4, 6, 8)))
    assert token_advantages(group, mean_only) is None
    rows = token_advantages(group, mean_only, replace(PLAIN, overlong_length=8, overlong_buffer=4))
    assert [row[-1] for row in rows] == pytest.approx([0.5, 0.0, -0.5])


def test_the_length_of_an_episode_is_that_of_all_its_segments() -> None:
    last = replace(make_rollout((5,) * 3, reward=1.0), earlier=(make_rollout((6,) * 3),))
    assert replace(PLAIN, overlong_length=8, overlong_buffer=4).reward(last) == 0.5


def test_reported_is_the_environments_reward(store: RolloutStore) -> None:
    store.add(group_of("g", *(make_rollout((5,) * length, reward=1.0) for length in (4, 4, 8, 8))), source="http")
    batch = buffer_of(store, replace(PLAIN, overlong_length=8, overlong_buffer=4)).collect(1, timeout_s=0)
    assert batch.statistics.reward_mean == 1.0
    assert [s.advantages[-1] for s in batch.sequences] == pytest.approx([0.5, 0.5, -0.5, -0.5])


def test_cut_answers_are_left_out_and_count_in_the_mean(store: RolloutStore) -> None:
    """Rewards 1, 0, 0 (cut), 0 → mean 0.25, and three sequences are trained on, after a resume too."""
    rollouts = [make_rollout(reward=reward, stop_reason="stop") for reward in (1.0, 0.0, 0.0, 0.0)]
    rollouts[2] = replace(rollouts[2], stop_reason="length", earlier=(make_rollout(),))
    store.add(group_of("g", *rollouts), source="http")
    buffer = buffer_of(store, replace(PLAIN, mask_truncated=True))
    batch = buffer.collect(1, timeout_s=0)
    assert [s.advantages[-1] for s in batch.sequences] == pytest.approx([0.75, -0.25, -0.25])
    assert batch.statistics.truncated_fraction == 0.25
    again = buffer_of(store, replace(PLAIN, mask_truncated=True)).resume(1, ["g"])
    assert [(s.rollout, s.advantages) for s in again.sequences] == [(s.rollout, s.advantages) for s in batch.sequences]
    assert len(buffer_of(store, PLAIN).resume(1, ["g"]).sequences) == 5


def test_a_group_that_was_cut_throughout_is_dropped(store: RolloutStore) -> None:
    store.add(group_of("g", *(make_rollout(reward=r, stop_reason="length") for r in (0.0, 1.0))), source="http")
    assert buffer_of(store, replace(PLAIN, mask_truncated=True), size=2).collect(1, timeout_s=0) is None
    assert store.drop_reasons() == {NO_VARIANCE: 1}


def test_marked_ones_are_left_out_where_an_advantage_of_0_teaches(store: RolloutStore) -> None:
    rollouts = [make_rollout(reward=reward) for reward in (1.0, 0.0)] + [make_rollout(zero_advantage=True)] * 2
    store.add(group_of("g", *rollouts), source="http")
    batch = buffer_of(store, replace(PLAIN, leave_out_marked=True)).collect(1, timeout_s=0)
    assert [s.advantages[-1] for s in batch.sequences] == pytest.approx([0.75, -0.25])
    assert len(buffer_of(store, PLAIN).resume(1, ["g"]).sequences) == 4
