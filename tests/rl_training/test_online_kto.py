"""Online KTO: labels, the KL of a batch, a step against float64 numbers, and a run."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.losses.advantages import by_sign, token_advantages
from mlx_parallm.rl_training.rollout_buffer import NO_LABEL
from mlx_parallm.rl_training.step.algorithms import kto_of_rollouts
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import RolloutGroup
from tests.rl_training.bandit_run import running
from tests.rl_training.making import make_config, make_trainer, perturb_adapter
from tests.rl_training.rollouts import make_rollout
from tests.rl_training.test_rollout_buffer import Player, make_buffer

ONE_UPDATE = {"batch_size": 4, "atropos": {"rollout_batch_size": 4}}


@pytest.mark.parametrize(
    ("rewards", "labels"),
    [([0.5, 0.0, -0.1], (1.0, 0.0, -2.0)), ([0.0, 0.0], None), ([-3.0], (-2.0,))],
)
def test_a_label_is_the_sign_of_a_reward(
    rewards: list[float], labels: tuple[float, ...] | None
) -> None:
    assert by_sign(rewards, weights=(1.0, 2.0)) == labels


def batch_of(*groups: RolloutGroup, weights: tuple[float, float] = (1.0, 1.0)) -> TrainBatch:
    sequences = []
    for group in groups:
        rows = token_advantages(group, lambda rewards: by_sign(rewards, weights=weights))
        assert rows is not None
        for rollout, row in zip(group.rollouts, rows, strict=True):
            sequences.append(TrainSequence(rollout, row, fresh=True))
    return TrainBatch(1, groups, tuple(sequences), BatchStatistics())


def single(tokens: list[int], reward: float, *, prompt: int = 2) -> RolloutGroup:
    rollout = make_rollout(tokens, reward=reward)
    mask = (0,) * prompt + (1,) * (len(rollout.tokens) - prompt)
    return RolloutGroup(f"g{tokens}", "test", (replace(rollout, mask=mask),))


def test_the_kl_is_of_each_prompt_with_the_next_answer() -> None:
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def score(rollouts: list) -> list[float]:
        asked.extend((rollout.tokens, rollout.mask) for rollout in rollouts)
        return [3.0, -1.0]

    batch = batch_of(single([5, 6, 7], 1.0), single([8, 9], -1.0, prompt=1))
    first, second = (sequence.rollout for sequence in batch.sequences)
    constants = kto_of_rollouts(batch, score, measures_kl=True)
    assert constants == {"kl": 1.0, "desirable": 1.0, "undesirable": 1.0}
    assert asked[0][0] == (*first.tokens[:2], *second.tokens[1:])
    assert asked[0][1] == (0, 0, *second.mask[1:])
    assert asked[1][0] == (*second.tokens[:1], *first.tokens[2:])
    assert kto_of_rollouts(batch, score, measures_kl=False)["kl"] == 0.0


def test_the_kl_scores_nothing_longer_than_the_sequences_themselves() -> None:
    lengths: list[int] = []

    def score(rollouts: list) -> list[float]:
        lengths.extend(len(rollout.tokens) for rollout in rollouts)
        assert all(len(rollout.mask) == len(rollout.tokens) for rollout in rollouts)
        return [0.0] * len(rollouts)

    long_prompt, long_answer = single([*range(8)], 1.0, prompt=9), single([*range(8, 16)], -1.0)
    batch = batch_of(long_prompt, long_answer)
    kto_of_rollouts(batch, score, measures_kl=True)
    assert max(lengths) == max(len(each.rollout.tokens) for each in batch.sequences)


def test_groups_without_a_label_are_dropped(store: RolloutStore) -> None:
    player = Player(store, lambda index: [0.0, 0.0] if index % 2 else [0.0, 1.0])
    buffer = make_buffer(store, singles=True, estimate=by_sign, request_groups=player)
    buffer.request(1)
    batch = buffer.collect(1, timeout_s=1)
    assert batch is not None
    assert store.drop_reasons().keys() == {NO_LABEL}
    assert {sequence.advantages[-1] for sequence in batch.sequences} == {0.0, 1.0}


def test_a_step_is_kto_in_float64() -> None:
    """A twin that scores one sequence at a time with the plain model, adapter on and off; the
    weights are 1 and 2, the answer with the reward 0 counts as a sequence of loss 0."""
    config = make_config(
        algorithm="online_kto",
        preference={"beta": 0.3, "undesirable_weight": 2.0},
        max_grad_norm=0.0,
        **ONE_UPDATE,
    )
    trainer = make_trainer(config, needs_reference=True)
    perturb_adapter(trainer.policy)
    rewards = (0.5, -2.0, 1.0, -1.0)
    groups = [single([5 + n, 9, 7 + n, 4], reward) for n, reward in enumerate(rewards)]

    def summed(tokens: tuple[int, ...], mask: tuple[int, ...]) -> float:
        logits = np.array(trainer.policy.model(mx.array([tokens]))[0].astype(mx.float32))
        scaled = logits.astype(np.float64)
        norm = np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1)) + scaled.max(-1)
        return sum(scaled[t - 1, tokens[t]] - norm[t - 1] for t in range(1, len(tokens)) if mask[t])

    rows = [group.rollouts[0] for group in groups]
    foreign = [
        ((*one.tokens[:2], *other.tokens[2:]), one.mask)
        for one, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]

    def ratios(sequences: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> np.ndarray:
        now = np.array([summed(*sequence) for sequence in sequences])
        with trainer.policy.reference():
            return now - np.array([summed(*sequence) for sequence in sequences])

    kl = max(0.0, ratios(foreign).mean())
    own = ratios([(row.tokens, row.mask) for row in rows])
    sides = np.sign(rewards)
    losses = np.where(sides > 0, 1.0, 2.0) / (1 + np.exp(sides * 0.3 * (own - kl)))
    metrics = trainer.train_step(batch_of(*groups, weights=(1.0, 2.0))).metrics
    assert metrics["loss"] == pytest.approx(losses.mean(), rel=3e-6)
    assert metrics["kto_kl"] == pytest.approx(kl, abs=3e-6)
    assert metrics["rewards/chosen"] == pytest.approx(0.3 * own[sides > 0].mean(), abs=3e-6)
    assert metrics["rewards/rejected"] == pytest.approx(0.3 * own[sides < 0].mean(), abs=3e-6)
    assert np.abs(own).max() > 1e-3


def test_a_run_raises_its_reward(tmp_path: Path) -> None:
    values = {"algorithm": "online_kto", "total_steps": 12, "batch_size": 16}
    with running(tmp_path / "whole", **values) as run:
        run.bandit.reward = lambda token: 1.0 if token < 20 else -1.0
        assert run.loop.run() == "finished"
        lines = list(run.parts.metrics.read())
    rewards = [line["reward_mean"] for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])
    assert lines[0]["loss"] == pytest.approx(0.5, abs=1e-5)  # policy and reference are the same


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        ({"kl_beta": 0.1}, "kl_beta is set, but the loss of online_kto does not read it"),
        ({"preference": {"gamma": 0.5}}, "gamma is an option of simpo: online_kto does not use"),
        ({"batch_size": 2}, "one KL for a step"),
        ({"update_epochs": 2}, "one KL for a step"),
        ({"batch_size": 1, "atropos": {"rollout_batch_size": 1}}, "at least 2"),
        ({"credit": "turn"}, "credit is set, but algorithm = 'online_kto' does not"),
    ],
)
def test_what_it_does_not_read_is_refused(training: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"rl_training": {"algorithm": "online_kto"} | ONE_UPDATE | training})
