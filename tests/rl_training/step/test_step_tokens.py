"""What a step leaves of each token: the scores at which its gradient was first taken."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.rl_training.step.batch import TrainBatch
from tests.rl_training.making import make_config, make_trainer, perturb_adapter
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.scoring import policy_logprobs, reference_logprobs


def entropies(trainer: object, batch: TrainBatch) -> np.ndarray:
    """-Σ p log p of the whole vocabulary, by the model's plain forward."""
    found = []
    for sequence in batch.sequences:
        logits = np.array(
            trainer.policy.model(mx.array(sequence.rollout.tokens)[None, :-1])[0].astype(mx.float32)
        )
        logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        found.append(
            -(chances * np.log(chances)).sum(-1)[np.array(sequence.rollout.mask[1:], bool)]
        )
    return np.concatenate(found)


@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize("blocks", [0, 1])
def test_they_are_those_of_the_weights_that_the_step_starts_from(budget: int, blocks: int) -> None:
    batch = make_batch(random_groups(3))
    config = make_config(
        batch_size=16, token_budget=budget, blocks_per_eval=blocks, kl_beta=0.1, update_epochs=2
    )
    trainer = make_trainer(config)
    perturb_adapter(trainer.policy)
    before = np.concatenate(policy_logprobs(trainer, batch))
    uncertain, reference = (
        entropies(trainer, batch),
        np.concatenate(reference_logprobs(trainer, batch)),
    )
    trainer.train_step(batch)
    tokens = trainer.step_tokens.columns
    assert tokens["trainer_logprobs"] == pytest.approx(before, abs=1e-4), (
        "the second epoch does not replace the first"
    )
    assert tokens["entropies"] == pytest.approx(uncertain, abs=1e-4)
    assert tokens["reference_logprobs"] == pytest.approx(reference, abs=1e-4)
    rollouts = [sequence.rollout for sequence in batch.sequences]
    sampler = [
        value for r in rollouts for value, own in zip(r.logprobs, r.mask, strict=True) if own
    ]
    assert tokens["logprobs"] == pytest.approx(np.array(sampler, np.float32))
    assert np.abs(np.concatenate(policy_logprobs(trainer, batch)) - before).max() > 1e-3, (
        "the weights have moved"
    )


def test_a_later_update_of_the_step_has_its_own_weights() -> None:
    """Two updates: the first mini-batch is scored by the first weights, the second by those
    after an update."""
    batch = make_batch(random_groups(2))
    trainer = make_trainer(make_config(batch_size=4, learning_rate=5e-2))
    before = np.concatenate(policy_logprobs(trainer, batch))
    trainer.train_step(batch)
    apart = np.abs(trainer.step_tokens.columns["trainer_logprobs"] - before)
    assert np.isfinite(apart).all() and (apart < 1e-4).any() and (apart > 1e-3).any()
