"""The numbers that the health line needs: how far the weights moved, how answers ended, which
groups were all alike."""

import dataclasses
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.rl_training.step import optimizer
from mlx_parallm.rl_training.step.batch import BatchStatistics, StatisticsCollector
from mlx_parallm.types import RolloutGroup
from tests.rl_training.making import make_config, make_trainer, perturb_adapter, weights
from tests.rl_training.rollouts import make_batch, make_group, make_rollout, random_groups


def norm(arrays):
    return math.sqrt(sum(float(np.square(array.astype(np.float64)).sum()) for array in arrays))


def trained(**policy):
    dtype = policy.pop("dtype", mx.float32)
    trainer = make_trainer(make_config(batch_size=16, **policy), dtype=dtype)
    perturb_adapter(trainer.policy)
    trainer.optimizer.reload()
    before = weights(trainer)
    metrics = trainer.train_step(make_batch(random_groups(4))).metrics
    return before, weights(trainer), metrics


def test_the_movement_of_an_update_is_measured():
    before, after, metrics = trained()
    assert metrics["update_norm"] == pytest.approx(
        norm([after[name] - before[name] for name in before]), rel=1e-4
    )
    assert metrics["weight_norm"] == pytest.approx(norm(before.values()), rel=1e-4)
    moved = sum(int((after[name] != before[name]).sum()) for name in before)
    assert metrics["weights_moved"] == pytest.approx(
        moved / sum(array.size for array in before.values())
    )


def test_a_sample_is_as_good(monkeypatch):
    _, _, exact = trained()
    monkeypatch.setattr(optimizer, "MEASURED_ELEMENTS", 500)
    _, _, sampled = trained()
    assert sampled["update_norm"] == pytest.approx(exact["update_norm"], rel=0.2)
    assert sampled["weight_norm"] == pytest.approx(exact["weight_norm"], rel=0.2)
    assert sampled["weights_moved"] == pytest.approx(exact["weights_moved"], abs=0.2)


def test_rounding_to_bfloat16_shows():
    """Updates of 1e-6 move few of the bfloat16 weights, and most float32 ones."""
    _, _, narrow = trained(lora=False, learning_rate=1e-6, dtype=mx.bfloat16)
    _, _, wide = trained(lora=False, learning_rate=1e-6)
    assert narrow["weights_moved"] < 0.05 < 0.5 < wide["weights_moved"]


def test_a_step_that_trains_nothing_has_moved_nothing():
    trainer = make_trainer(make_config(batch_size=16))
    assert trainer.train_step(make_batch([])).metrics["update_norm"] is None


def collected(*groups):
    collector = StatisticsCollector()
    for group in groups:
        collector.add_trained(group, 0)
    return collector.result()


def test_groups_that_are_all_wrong_or_all_right_are_counted():
    statistics = collected(
        make_group("a", [0.0, 0.0]),
        make_group("b", [1.0, 1.0]),
        make_group("c", [0.0, 1.0]),
        make_group("d", [0.5] * 2),
    )
    assert (statistics.groups_all_wrong, statistics.groups_all_right) == (0.25, 0.25)


def test_how_answers_ended_is_counted_where_it_is_known():
    ends = ("stop", "length", None, "stop")
    rollouts = tuple(make_rollout(stop_reason=end) for end in ends)
    known = RolloutGroup("a", "test", rollouts, metadata={"out_of_room": 1})
    assert collected(known).eos_fraction == pytest.approx(2 / 3)
    assert (collected(known).truncated_fraction, collected(known).out_of_room_fraction) == (
        1 / 4,
        1 / 4,
    )
    assert collected(make_group("b", [0.0, 1.0])).eos_fraction is None


def test_the_entropy_of_the_rollouts_is_their_mean_surprise():
    group = RolloutGroup(
        "a", "test", (make_rollout((5,), logprob=-0.6), make_rollout((5, 6, 7), logprob=-0.2))
    )
    assert collected(group).rollout_entropy == pytest.approx((0.6 + 3 * 0.2) / 4)
    forced = replace(group.rollouts[1], forced=(0, 0, 0, 1, 0, 1))
    held = collected(replace(group, rollouts=(group.rollouts[0], forced)))
    assert held.rollout_entropy == pytest.approx((0.6 + 0.2) / 2)
    assert (held.forced_fraction, held.completion_tokens_mean) == (0.5, 2.0)


def test_groups_with_one_answer_are_counted():
    """What the policy sampled is compared in all turns, and what it was asked is not."""
    one = make_group("a", [0.0, 1.0])
    other = RolloutGroup("b", "test", (make_rollout((5, 6)), make_rollout((5, 7))))
    asked = RolloutGroup(
        "c", "test", (make_rollout((5, 6), prompt=(1,)), make_rollout((5, 6), prompt=(2, 3)))
    )
    earlier = make_rollout((9,))
    turns = RolloutGroup(
        "d", "test", (make_rollout((5, 6)), make_rollout((5, 6), earlier=(earlier,)))
    )
    alone = make_group("e", [1.0])
    assert collected(one, other, asked, turns, alone).groups_same_answer == 2 / 5


def test_parts_of_the_reward_have_a_mean_and_a_deviation():
    scores = (
        {"reward": 0.7, "rewards/near": 1.0},
        {"reward": 0.1, "rewards/near": 0.5},
        {"reward": 0.0},
    )
    rollouts = tuple(dataclasses.replace(make_rollout(), scores=each) for each in scores)
    statistics = collected(RolloutGroup("a", "test", rollouts))
    line = statistics.to_metrics()
    assert line["rewards/near/mean"] == 0.75  # of the two that have one
    assert line["rewards/near/std"] == pytest.approx(0.125**0.5)  # (2 · 0.25²) / (2 - 1), as TRL's
    assert statistics.reward_max == statistics.environments["test"]["reward_max"] == 0.7
    assert BatchStatistics(**statistics.to_json()) == statistics, "a checkpoint keeps them"


def test_the_deviation_in_groups_is_the_mean_of_their_own():
    """Rewards 0, 1 and 5, 9: sqrt(1/2) and sqrt(8), each by n - 1; a group of one has none."""
    found = collected(
        make_group("a", [0.0, 1.0]), make_group("b", [5.0, 9.0]), make_group("c", [7.0])
    )
    assert found.reward_std_in_groups == pytest.approx((0.5**0.5 + 8**0.5) / 2)
