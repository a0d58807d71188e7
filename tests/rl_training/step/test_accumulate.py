"""`Trainer.accumulate` and `Trainer.apply`: sums over calls, by normalizers of the caller."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from mlx_parallm.rl_training.step.prepare import BatchLoss, prepare
from mlx_parallm.rl_training.step.trainer import Trainer
from tests.rl_training.making import make_config, make_trainer, perturb_adapter, weights
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.scoring import StopAfter

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
    return BatchLoss(weighted, prepare(BATCH, {}), normalizer, normalizer, kl_beta=0.0, max_length=1.0, constants={})


def summed_by_hand(trainer: Trainer) -> tuple[float, float]:
    """Σ -A · log π over every sampled token by the model's plain forward, and the norm of its gradient."""
    model = trainer.policy.model

    def total(model: nn.Module) -> mx.array:
        parts = []
        for sequence in BATCH.sequences:
            tokens, mask = mx.array(sequence.rollout.tokens), mx.array(sequence.rollout.mask[1:])
            logits = model(tokens[None, :-1])[0]
            logprobs = mx.take_along_axis(nn.log_softmax(logits, axis=-1), tokens[1:, None], axis=-1)[:, 0]
            parts.append((-mx.array(sequence.advantages[1:]) * logprobs * mask).sum())
        return mx.stack(parts).sum()

    value, gradients = nn.value_and_grad(model, total)(model)
    return value.item(), float(np.sqrt(sum(np.square(np.array(g)).sum() for _, g in tree_flatten(gradients))))


@pytest.mark.parametrize("normalizer", [1.0, 7.0])
@pytest.mark.parametrize("cuts", [[range(12)], [range(5), range(5, 12)], [[3, 0], [11, 7, 1, 2], [4, 5, 6, 8, 9, 10]]])
def test_calls_add_up_to_the_sum_over_all_tokens(normalizer: float, cuts: list[list[int]]) -> None:
    trainer = learner()
    total, norm = summed_by_hand(trainer)
    losses = [trainer.accumulate(trainer.collate(BATCH.sequences, cut), loss_of(normalizer)) for cut in cuts]
    assert sum(sums.totals["loss"] for sums in losses) == pytest.approx(total / normalizer, rel=1e-5)
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
    trainer = trainer.under(replace(trainer.algorithm, loss=weighted), sequences=12)
    total, norm = summed_by_hand(trainer)
    metrics = trainer.train_step(BATCH).metrics
    assert metrics["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm / tokens, rel=1e-5)
