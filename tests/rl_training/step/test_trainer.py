"""The trainer on tiny models: learning, invariances, reference, skipping, stopping."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.losses.advantages import group_advantages
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.algorithms import Algorithm
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.prepare import BatchLoss, StepPosition, prepare
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.types import Rollout, RolloutGroup
from tests.rl_training.making import (
    assert_same_training,
    make_config,
    make_trainer,
    perturb_adapter,
    weights,
)
from tests.rl_training.rollouts import make_batch, make_rollout, random_groups
from tests.rl_training.scoring import StopAfter, assert_same_metrics, on_policy, policy_logprobs


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_bandit_is_learnt(blocks: int) -> None:
    """Reward 1 for token 9 as the only answer to one prompt: 50 steps of on-policy GRPO make it
    near certain."""
    trainer = make_trainer(
        make_config(blocks_per_eval=blocks, batch=32, batch_size=32, learning_rate=2e-2)
    )
    rng = np.random.default_rng(0)
    prompt = (1, 2, 3)
    chances = []
    for step in range(1, 51):
        probabilities = np.array(
            mx.softmax(trainer.policy.model(mx.array([prompt]))[0, -1].astype(mx.float32))
        )
        chances.append(float(probabilities[9]))
        actions = rng.choice(40, 32, p=probabilities / probabilities.sum())
        rollouts = tuple(
            make_rollout(
                (int(a),),
                prompt=prompt,
                reward=float(a == 9),
                logprob=float(np.log(probabilities[a])),
            )
            for a in actions
        )
        if len({rollout.reward for rollout in rollouts}) > 1:
            trainer.train_step(
                make_batch([RolloutGroup(f"g{step}", "bandit", rollouts)], step=step)
            )
    assert chances[0] < 0.2
    assert chances[-1] > 0.85


@pytest.mark.parametrize("lora", [True, False])
def test_micro_batches_and_their_padding_change_nothing(lora: bool) -> None:
    def trained(budget: int) -> tuple[dict[str, np.ndarray], dict[str, float | None]]:
        trainer = make_trainer(
            make_config(lora=lora, batch_size=16, token_budget=budget, kl_beta=0.1)
        )
        result = trainer.train_step(make_batch(random_groups(4)))
        return weights(trainer), result.metrics

    one, metrics = trained(10_000)
    many, metrics_many = trained(40)
    assert_same_training(many, one)
    assert metrics_many == pytest.approx(metrics, abs=1e-4)


def test_scores_are_cut_row_by_row_also_where_the_algorithm_learns_from_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(token_budget=16)
    trainer = make_trainer(config, algorithm=replace(make_algorithm(config), rows_per_example=2))
    score, cut = trainer.model.score, []
    monkeypatch.setattr(
        trainer.model, "score", lambda batch: cut.append(len(batch.inputs)) or score(batch)
    )
    rollouts = [
        make_rollout(range(20, 19 + length), prompt=(length,) * 3) for length in (12, 13, 14)
    ]
    assert [len(row) for row in trainer.logprobs(rollouts)] == [11, 12, 13]
    assert cut == [1, 1, 1]


def test_what_is_measured() -> None:
    """Every number of a step against the naive twin, with ratios moved by a known shift."""
    config = make_config(batch_size=16, clip_ratio=0.1, kl_beta=0.5)
    trainer = make_trainer(config)
    perturb_adapter(trainer.policy)
    trainer.optimizer.reload()
    batch = on_policy(trainer, make_batch(random_groups(4)), shift=-0.2)
    logprobs = np.concatenate(policy_logprobs(trainer, batch))
    with trainer.policy.reference():
        reference = np.concatenate(policy_logprobs(trainer, batch))
    advantages = np.concatenate(
        [np.array(s.advantages)[np.array(s.rollout.mask, bool)] for s in batch.sequences]
    )
    metrics = trainer.train_step(batch).metrics
    ratio = math.exp(0.2)
    assert metrics["ratio_mean"] == pytest.approx(ratio, abs=1e-4)
    assert metrics["clip_fraction"] == pytest.approx((advantages > 0).mean(), abs=1e-6)
    d = reference - logprobs
    assert metrics["kl"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-3)
    assert metrics["kl"] > 0.01
    surrogate = -np.minimum(ratio * advantages, np.minimum(ratio, 1.1) * advantages).mean()
    assert metrics["loss"] == pytest.approx(surrogate + 0.5 * metrics["kl"], abs=1e-4)
    assert metrics["logprob_diff_max"] == pytest.approx(0.2, abs=1e-4)
    assert metrics["logprob_diff_mean"] == pytest.approx(0.2, abs=1e-4)
    assert 0 < metrics["entropy"] <= math.log(40)
    assert metrics["tokens"] == len(logprobs)
    assert (metrics["optimizer_updates"], metrics["skipped_steps"]) == (1, 0)
    assert metrics["learning_rate"] == config.learning_rate


def test_logits_are_divided_by_the_sampling_temperature() -> None:
    trainer = make_trainer(make_config(batch_size=16))
    groups = [
        replace(
            group, rollouts=tuple(replace(rollout, temperature=0.6) for rollout in group.rollouts)
        )
        for group in random_groups(4)
    ]
    metrics = trainer.train_step(on_policy(trainer, make_batch(groups), temperature=0.6)).metrics
    assert metrics["logprob_diff_max"] < 1e-4
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_only_fresh_tokens_are_compared_with_the_engine() -> None:
    trainer = make_trainer(make_config(batch_size=16))
    batch = on_policy(trainer, make_batch(random_groups(4)))
    stale = tuple(
        replace(
            s,
            fresh=False,
            rollout=replace(s.rollout, logprobs=tuple(v - 1 for v in s.rollout.logprobs)),
        )
        if i % 2
        else s
        for i, s in enumerate(batch.sequences)
    )
    metrics = trainer.train_step(replace(batch, sequences=stale)).metrics
    assert metrics["logprob_diff_max"] < 1e-4 and metrics["mismatch_fresh"] is True


def test_stale_tokens_are_compared_where_there_are_no_others() -> None:
    """Groups over HTTP of an unknown version too: what came without log-probabilities is left
    out."""
    trainer = make_trainer(make_config(batch_size=16))
    batch = on_policy(trainer, make_batch(random_groups(4)))
    own = [np.array(s.rollout.logprobs)[np.array(s.rollout.mask) == 1] for s in batch.sequences]
    sent = [
        replace(s.rollout, logprobs=tuple(v - 0.25 for v in s.rollout.logprobs))
        for s in batch.sequences
    ]
    silent = len(sent) // 2
    sequences = tuple(
        replace(s, fresh=False, rollout=replace(r, logprobs=None) if i < silent else r)
        for i, (s, r) in enumerate(zip(batch.sequences, sent, strict=True))
    )
    metrics = trainer.train_step(replace(batch, sequences=sequences)).metrics
    assert metrics["mismatch_fresh"] is False and sum(map(len, own[silent:])) > 0
    assert metrics["logprob_diff_mean"] == pytest.approx(0.25, rel=1e-3)
    assert metrics["mismatch_kl"] == pytest.approx(math.exp(0.25) - 1 - 0.25, rel=1e-3)
    none = tuple(replace(s, rollout=replace(s.rollout, logprobs=None)) for s in sequences)
    metrics = trainer.train_step(replace(batch, sequences=none)).metrics
    assert metrics["mismatch_kl"] is None and metrics["mismatch_fresh"] is None


def without_logprobs(batch: TrainBatch, rows: Callable[[int], bool]) -> TrainBatch:
    """These rows as an environment sends them that has no log-probabilities."""
    sequences = [
        replace(s, rollout=replace(s.rollout, logprobs=None), fresh=False) if rows(i) else s
        for i, s in enumerate(batch.sequences)
    ]
    return replace(batch, sequences=tuple(sequences))


@pytest.mark.parametrize("epochs", [1, 2])
def test_missing_logprobs_are_the_policys_own_before_the_step(epochs: int) -> None:
    """Like a batch whose sender had said exactly those: in the first update and, unchanged, in
    the later ones."""
    config = make_config(batch_size=8, update_epochs=epochs, token_budget=60)
    known = make_trainer(config)
    batch = on_policy(known, make_batch(random_groups(4)))
    expected = known.train_step(batch).metrics
    trainer = make_trainer(config)
    metrics = trainer.train_step(without_logprobs(batch, lambda row: row % 3 != 0)).metrics
    assert_same_training(weights(trainer), weights(known))
    assert metrics["ratio_mean"] == pytest.approx(expected["ratio_mean"], abs=1e-5)
    assert abs(metrics["ratio_mean"] - 1) > 1e-3  # the later updates
    assert metrics["logprob_diff_max"] < 1e-4  # of the others


def test_the_first_update_has_ratio_1_and_compares_nothing() -> None:
    trainer = make_trainer(make_config(batch_size=16))
    metrics = trainer.train_step(
        without_logprobs(make_batch(random_groups(4)), lambda row: True)
    ).metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["logprob_diff_max"] is None


def test_a_step_that_goes_on_keeps_what_it_has_recomputed() -> None:
    """Stopped after its first update and resumed from JSON: as if it had not been stopped."""
    config = make_config(batch_size=8)
    batch = without_logprobs(make_batch(random_groups(4)), lambda row: True)
    whole = make_trainer(config)
    whole.train_step(batch)
    trainer = make_trainer(config)
    first = trainer.train_step(batch, should_stop=lambda: trainer.optimizer.updates == 1)
    assert (first.finished, first.position.updates) == (False, 1)
    position = StepPosition.from_json(json.loads(json.dumps(first.position.to_json())))
    assert trainer.train_step(batch, position=position).finished
    assert_same_training(weights(trainer), weights(whole))


def test_scoring_stops_when_asked_to() -> None:
    trainer = make_trainer(make_config())
    batch = without_logprobs(make_batch(random_groups(4)), lambda row: True)
    result = trainer.train_step(batch, should_stop=lambda: True)
    assert (result.finished, result.position) == (False, StepPosition())


def test_nothing_is_learnt_from_tokens_that_were_given() -> None:
    """Two turns in one sequence, the EOS (2) of the first twice, a tool's answer between them.
    The gradient is that of four tokens: the answer, its EOS, and the same of turn two; whatever
    stands at the others teaches nothing."""

    def trained(given: float) -> dict[str, np.ndarray]:
        rows = []
        for reward, answer in ((1.0, 20), (0.0, 21)):
            tokens = (5, answer, 2, 2, 30, 31, answer, 2)
            mask = (0, 1, 1, 0, 0, 0, 1, 1)
            logprobs = tuple(-3.0 if sampled else given for sampled in mask)
            rows.append(Rollout(tokens, mask, logprobs, (0,) * 8, 1.0, {"reward": reward}))
        trainer = make_trainer(make_config(batch=2))
        batch = make_batch([RolloutGroup("g", "test", tuple(rows))])
        assert batch.sequences[0].advantages == pytest.approx((1.0,) * 8)
        assert trainer.train_step(batch).metrics["tokens"] == 8
        return weights(trainer)

    plain = trained(0.0)
    for name, array in trained(-9.0).items():
        np.testing.assert_array_equal(array, plain[name])


@pytest.mark.parametrize(
    ("lora", "reference"), [(True, "base"), (True, "initial"), (False, "base")]
)
def test_the_reference_does_not_move(lora: bool, reference: str) -> None:
    config = make_config(lora=lora, reference=reference, kl_beta=0.1, batch_size=16)
    trainer = make_trainer(config)
    batch = make_batch(random_groups(4))
    with trainer.policy.reference():
        before = policy_logprobs(trainer, batch)
    first = trainer.train_step(batch).metrics["kl"]
    assert first == pytest.approx(0.0, abs=1e-6)
    assert trainer.train_step(batch).metrics["kl"] > 1e-4
    with trainer.policy.reference():
        after = policy_logprobs(trainer, batch)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_entropy_bonus_raises_entropy() -> None:
    def entropy_after(weight: float) -> float:
        trainer = make_trainer(
            make_config(entropy_weight=weight, batch_size=16, learning_rate=5e-3)
        )
        perturb_adapter(trainer.policy)
        trainer.optimizer.reload()
        batch = make_batch(random_groups(4))
        return [trainer.train_step(batch).metrics["entropy"] for _ in range(5)][-1]

    assert entropy_after(1.0) > entropy_after(0.0) + 0.01


def poisoned(
    config_loss: Callable[[LossInputs], LossOutputs], *, gradient: bool
) -> Callable[[LossInputs], LossOutputs]:
    """NaN in the loss, or a finite loss whose gradient is infinite (the root of zero)."""

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = config_loss(inputs)
        extra = (
            mx.sqrt(mx.maximum(inputs.logprobs * 0.0, 0.0)).sum()
            if gradient
            else mx.array(math.nan)
        )
        return LossOutputs(outputs.loss + extra, outputs.metrics)

    return loss


@pytest.mark.parametrize("gradient", [False, True])
def test_a_mini_batch_that_is_not_finite_changes_nothing(gradient: bool) -> None:
    config = make_config(batch_size=8)
    honest = make_algorithm(config)
    calls: list[int] = []

    def second_is_poisoned(inputs: LossInputs) -> LossOutputs:
        calls.append(1)
        return (
            poisoned(honest.loss, gradient=gradient)(inputs)
            if len(calls) == 2
            else honest.loss(inputs)
        )

    trainer = make_trainer(config, algorithm=replace(honest, loss=second_is_poisoned))
    result = trainer.train_step(make_batch(random_groups(4)))
    assert (result.metrics["optimizer_updates"], result.metrics["skipped_steps"]) == (1, 1)
    assert trainer.optimizer.updates == 1
    # stops after its first mini-batch: what the other one has to equal
    alone = make_trainer(config)
    stopped = alone.train_step(make_batch(random_groups(4)), should_stop=StopAfter(1))
    assert stopped.position.next_mini_batch == 1
    assert_same_training(weights(trainer), weights(alone))


@pytest.mark.parametrize("micro_batches", [0, 3, 5, 7, 9, 10])
def test_stopping_inside_a_step_and_going_on_gives_the_same_weights(micro_batches: int) -> None:
    """4 micro-batches scored, then 2 epochs of 2 mini-batches, 7 micro-batches in all; the
    second process starts from the first one's arrays."""
    config = make_config(batch_size=8, token_budget=64, update_epochs=2, kl_beta=0.1, packing=False)
    batch = make_batch(random_groups(4), step=3)
    whole = make_trainer(config)
    expected = whole.train_step(batch)
    assert expected.finished
    assert expected.metrics["optimizer_updates"] == 4

    first = make_trainer(config)
    stopped = first.train_step(batch, should_stop=StopAfter(micro_batches))
    assert not stopped.finished
    second = make_trainer(config)
    second.policy.slots.write(first.policy.slots.read())
    second.optimizer.restore(first.optimizer.state())
    position = StepPosition.from_json(stopped.position.to_json())
    finished = second.train_step(batch, position=position)
    assert_same_training(weights(second), weights(whole))
    assert_same_metrics(finished.metrics, expected.metrics)


def test_another_algorithm_is_another_function() -> None:
    """The trainer knows none: REINFORCE with its own advantage, without touching the package."""

    def reinforce(inputs: LossInputs) -> LossOutputs:
        loss = (
            -mx.where(inputs.mask, inputs.logprobs * inputs.advantages, 0.0).sum()
            / inputs.token_normalizer
        )
        return LossOutputs(loss, {"my_metric": mx.array(0.25)})

    algorithm = Algorithm("reinforce", reinforce, lambda rewards: group_advantages(rewards, "mean"))
    trainer = make_trainer(make_config(batch_size=16), algorithm=algorithm)
    batch = make_batch(random_groups(4))
    losses = [trainer.train_step(batch).metrics["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert trainer.train_step(batch).metrics["my_metric"] == 0.25


def test_dropout_in_the_configuration_changes_no_logprob() -> None:
    with_dropout = make_config(dropout=0.5, batch_size=16)
    trainer = make_trainer(with_dropout)
    batch = on_policy(trainer, make_batch(random_groups(4)))
    assert trainer.train_step(batch).metrics["logprob_diff_max"] < 1e-5


BATCH = make_batch(random_groups(3))


def learner() -> Trainer:
    trainer = make_trainer(make_config(max_grad_norm=0))
    perturb_adapter(trainer.policy)
    trainer.optimizer.reload()
    return trainer


def weighted(inputs: LossInputs) -> LossOutputs:
    """-A · logprobs over the caller's normalizer."""
    return LossOutputs(aggregate(-inputs.advantages * inputs.logprobs, inputs))


def loss_of(normalizer: float) -> BatchLoss:
    """1: sums."""
    return BatchLoss(
        weighted,
        prepare(BATCH, {}),
        normalizer,
        normalizer,
        kl_beta=0.0,
        max_length=1.0,
        constants={},
    )


def summed_by_hand(trainer: Trainer) -> tuple[float, float]:
    """Σ -A · log π over every sampled token by the model's plain forward, and the norm of its
    gradient."""
    model = trainer.policy.model

    def total(model: nn.Module) -> mx.array:
        parts = []
        for sequence in BATCH.sequences:
            tokens, mask = mx.array(sequence.rollout.tokens), mx.array(sequence.rollout.mask[1:])
            logits = model(tokens[None, :-1])[0]
            logprobs = mx.take_along_axis(
                nn.log_softmax(logits, axis=-1), tokens[1:, None], axis=-1
            )[:, 0]
            parts.append((-mx.array(sequence.advantages[1:]) * logprobs * mask).sum())
        return mx.stack(parts).sum()

    value, gradients = nn.value_and_grad(model, total)(model)
    return value.item(), float(
        np.sqrt(sum(np.square(np.array(g)).sum() for _, g in tree_flatten(gradients)))
    )


@pytest.mark.parametrize("normalizer", [1.0, 7.0])
@pytest.mark.parametrize(
    "cuts", [[range(12)], [range(5), range(5, 12)], [[3, 0], [11, 7, 1, 2], [4, 5, 6, 8, 9, 10]]]
)
def test_calls_add_up_to_the_sum_over_all_tokens(normalizer: float, cuts: list[list[int]]) -> None:
    trainer = learner()
    total, norm = summed_by_hand(trainer)
    losses = [
        trainer.accumulate(trainer.collate(BATCH.sequences, cut), loss_of(normalizer))
        for cut in cuts
    ]
    assert sum(sums.totals["loss"] for sums in losses) == pytest.approx(
        total / normalizer, rel=1e-5
    )
    update = trainer.apply(1e-2)
    assert update.applied
    assert update.grad_norm == pytest.approx(norm / normalizer, rel=1e-5)


def test_an_update_uses_the_gradients_up() -> None:
    trainer = learner()
    everything = trainer.collate(BATCH.sequences, range(12))
    trainer.accumulate(everything, loss_of(1.0))
    first = trainer.apply(1e-2)
    assert first.grad_norm > 0
    assert trainer.apply(0.0).grad_norm == 0.0
    trainer.accumulate(everything, loss_of(1.0))
    trainer.drop()
    assert trainer.apply(0.0).grad_norm == 0.0


def test_a_stop_between_two_micro_batches_drops_everything() -> None:
    trainer = learner()
    before, cut = weights(trainer), trainer.collate(BATCH.sequences, range(12), 24)
    assert len(cut.micro_batches) > 2
    trainer.accumulate(cut, loss_of(1.0))
    assert trainer.accumulate(cut, loss_of(1.0), StopAfter(1)) is None
    assert trainer.apply(0.0).grad_norm == 0.0
    assert all(np.array_equal(array, before[name]) for name, array in weights(trainer).items())


def test_the_steps_own_mean_is_that_sum_over_its_tokens() -> None:
    trainer = learner()
    tokens = sum(sequence.trained for sequence in BATCH.sequences)
    trainer = trainer.with_algorithm(replace(trainer.algorithm, loss=weighted), sequences=12)
    total, norm = summed_by_hand(trainer)
    metrics = trainer.train_step(BATCH).metrics
    assert metrics["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm / tokens, rel=1e-5)
