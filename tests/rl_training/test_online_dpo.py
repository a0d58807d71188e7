"""Online DPO: the pairs of a batch, a step against float64 numbers, and a run that is resumed."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.losses.advantages import Shaping, best_and_worst, pair_advantages
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.rollout_buffer import NO_PAIR
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import RolloutGroup
from tests.rl_training.bandit_run import running
from tests.rl_training.making import make_config, make_trainer, perturb_adapter
from tests.rl_training.rollouts import make_group, make_rollout, random_groups
from tests.rl_training.test_rollout_buffer import Player, make_buffer

PLAIN = Shaping(0, 0, mask_truncated=False, leave_out_marked=False)


@pytest.mark.parametrize(
    ("rewards", "sides"),
    [
        ([0.2, 0.9, 0.9, 0.1], (0, 1, 0, -1)),
        ([1.0, 0.0], (1, -1)),
        ([-3.0, -2.0], (-1, 1)),
        ([0.5, 0.5, 0.5], None),
        ([0.5, 0.5 + 1e-9], None),
        ([1e8, 1e8 + 1], None),
    ],
)
def test_best_and_worst(rewards: list[float], sides: tuple[float, ...] | None) -> None:
    assert best_and_worst(rewards) == sides


def sides_of(group: RolloutGroup, shaping: Shaping = PLAIN) -> list[float] | None:
    rows = pair_advantages(group, best_and_worst, shaping)
    assert rows is None or [len(row) for row in rows] == [len(r.tokens) for r in group.rollouts]
    return None if rows is None else [row[-1] for row in rows]


def test_an_answer_that_may_not_be_trained_on_is_in_no_pair() -> None:
    group = make_group("g", [0.0, 3.0, 1.0])
    assert sides_of(group) == [-1, 1, 0]
    first, best, last = group.rollouts
    marked = replace(group, rollouts=(first, replace(best, zero_advantage=True), last))
    assert sides_of(marked) == [-1, 0, 1]
    several = replace(group, rollouts=(first, replace(best, earlier=(first,)), last))
    assert sides_of(several) == [-1, 0, 1]
    cut = replace(group, rollouts=(replace(first, stop_reason="length"), best, last))
    assert sides_of(cut) == [-1, 1, 0]
    assert sides_of(cut, replace(PLAIN, mask_truncated=True)) == [0, 1, -1]
    alone = replace(group, rollouts=(replace(first, zero_advantage=True), best))
    assert sides_of(alone) is None


def test_an_environments_own_advantages_take_the_place_of_the_reward() -> None:
    group = make_group("g", [0.0, 3.0, 1.0])
    assert sides_of(replace(group, advantages=(2.0, 1.0, -1.0))) == [1, 0, -1]


def test_length_penalties_come_first() -> None:
    long = make_rollout(range(5, 15), reward=1.0)
    short = make_rollout((5, 6), reward=0.5)
    group = RolloutGroup("g", "test", (long, short))
    assert sides_of(group) == [1, -1]
    shaping = Shaping(10, 5, mask_truncated=False, leave_out_marked=False)  # the long one loses 1
    assert sides_of(group, shaping) == [-1, 1]


def test_a_batch_is_the_pairs_of_its_groups_and_ties_are_dropped(store: RolloutStore) -> None:
    rewards = ([0.0, 0.5, 1.0, 0.5], [1.0] * 4, [2.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.9])
    player = Player(store, lambda index: rewards[index % 4])
    options = {"group_sizes": [4], "rollout_batch_size": 12, "request_groups": player}
    buffer = make_buffer(store, pairs=True, estimate=best_and_worst, **options)
    buffer.request(1)
    batch = buffer.collect(1, timeout_s=1)
    assert batch is not None
    assert batch.group_ids == ("g0", "g2", "g3")
    pairs = [
        (chosen.rollout.reward, rejected.rollout.reward)
        for chosen, rejected in zip(batch.sequences[0::2], batch.sequences[1::2], strict=True)
    ]
    assert pairs == [(1.0, 0.0), (2.0, 0.0), (1.0, 0.9)]
    assert {sequence.advantages[-1] for sequence in batch.sequences[0::2]} == {1.0}
    assert store.drop_reasons() == {NO_PAIR: 1}
    assert batch.statistics.dropped_without_variance == 1
    assert batch.statistics.groups_without_variance == pytest.approx(1 / 4)
    again = make_buffer(store, pairs=True, estimate=best_and_worst, **options)
    resumed = again.resume(1, batch.group_ids)
    assert [s.rollout for s in resumed.sequences] == [s.rollout for s in batch.sequences]


def test_a_tie_that_is_kept_makes_no_pair(store: RolloutStore) -> None:
    player = Player(store, lambda index: [1.0, 1.0] if index % 2 else [0.0, 1.0])
    buffer = make_buffer(
        store,
        pairs=True,
        estimate=best_and_worst,
        request_groups=player,
        dynamic_sampling=False,
    )
    buffer.request(1)
    batch = buffer.collect(1, timeout_s=1)
    assert batch is not None
    assert (len(batch.groups), len(batch.sequences)) == (4, 4)
    assert batch.statistics.groups_without_variance == 0.5


@pytest.mark.parametrize("wpo", [False, True])
def test_a_step_is_dpo_of_the_pairs_in_float64(wpo: bool) -> None:
    """A twin that scores one sequence at a time with the plain model, adapter on and off; a pair's
    weight in WPO is exp of the means of log p - log Σ p² of both."""
    preference = {"beta": 0.3, "wpo": wpo}
    config = make_config(
        algorithm="online_dpo", preference=preference, max_grad_norm=0.0, temperature=0.8
    )
    trainer = make_trainer(config, needs_reference=True)
    perturb_adapter(trainer.policy)
    chosen_from = random_groups(4, size=3)
    sequences = []
    for group in chosen_from:
        rows = pair_advantages(group, best_and_worst)
        assert rows is not None
        order = sorted(range(3), key=lambda place, rows=rows: -rows[place][0])
        for place in (order[0], order[-1]):
            rollout = replace(group.rollouts[place], temperature=0.8)
            sequences.append((rollout, rows[place]))

    def scored(rollout: object) -> tuple[float, float]:
        tokens, mask = rollout.tokens, rollout.mask
        logits = np.array(trainer.policy.model(mx.array([tokens]))[0].astype(mx.float32))
        scaled = logits.astype(np.float64) / 0.8
        norm = np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1)) + scaled.max(-1)
        logs = scaled - norm[:, None]
        taken = [t for t in range(1, len(tokens)) if mask[t]]
        found = np.array([logs[t - 1, tokens[t]] for t in taken])
        collision = np.array([-np.log(np.exp(2 * logs[t - 1]).sum()) for t in taken])
        return found.sum(), (found + collision).mean()

    policy, aligned = np.array([scored(rollout) for rollout, _ in sequences]).T
    with trainer.policy.reference():
        reference = np.array([scored(rollout)[0] for rollout, _ in sequences])
    ratios = policy - reference
    margins = 0.3 * (ratios[0::2] - ratios[1::2])
    batch = TrainBatch(
        1,
        tuple(chosen_from),
        tuple(TrainSequence(rollout, row, fresh=True) for rollout, row in sequences),
        BatchStatistics(),
    )
    metrics = trainer.train_step(batch).metrics
    weights = np.exp(aligned[0::2] + aligned[1::2]) if wpo else 1.0
    wanted = (weights * np.log1p(np.exp(-margins))).mean()
    assert metrics["loss"] == pytest.approx(wanted, rel=3e-6)
    assert metrics["rewards/margins"] == pytest.approx(margins.mean(), abs=3e-6)
    assert metrics["rewards/accuracies"] == pytest.approx((margins > 0).mean())
    assert np.abs(margins).max() > 1e-3


def test_a_run_raises_its_reward_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    values = {"algorithm": "online_dpo", "preference": {"beta": 0.1}, "total_steps": 12}
    with running(tmp_path / "whole", **values) as run:
        assert make_algorithm(run.config).pairs
        assert run.loop.run() == "finished"
        lines = list(run.parts.metrics.read())
    rewards = [line["reward_mean"] for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    with running(tmp_path / "cut", **values | {"total_steps": 5}) as run:
        run.loop.run()
    with running(tmp_path / "cut", resume=True, **values) as run:
        assert run.loop.run() == "finished"
        resumed = list(run.parts.metrics.read())
    assert [line["step"] for line in resumed] == list(range(1, 13))


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"kl_beta": 0.1}, "kl_beta is set, but the loss of online_dpo does not read it"),
        ({"entropy_weight": 0.1}, "entropy_weight is set, but the loss of online_dpo"),
        ({"sampler_correction": "tis"}, "sampler_correction is set, but the loss of online_dpo"),
        ({"advantage": "std"}, "advantage is set, but algorithm = 'online_dpo' does not read"),
        ({"preference": {"gamma": 0.5}}, "gamma is an option of simpo: online_dpo does not use"),
        ({"preference": {"loss_type": "sft"}}, 'loss_type = "sft" learns from rows of a file'),
    ],
)
def test_what_it_does_not_read_is_refused(training: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"rl_training": {"algorithm": "online_dpo"} | training})
