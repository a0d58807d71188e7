"""Groups of another tokenizer or model are not trained on."""

from dataclasses import replace

import numpy as np
import pytest

from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
from mlx_parallm.rl_training.group_fit import MISMATCH_NATS, LogprobMismatchCheck
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.types import RolloutGroup
from tests.rl_training.making import make_config, make_trainer
from tests.rl_training.rollouts import random_groups


def own_group(trainer: Trainer, *, shift: float = 0.0) -> RolloutGroup:
    """A group with the log-probabilities of the trainer's policy, less `shift`."""
    (group,) = random_groups(1)
    rollouts = []
    for rollout, values in zip(group.rollouts, trainer.logprobs(group.rollouts), strict=True):
        logprobs = np.zeros(len(rollout.tokens))
        logprobs[np.array(rollout.mask, bool)] = values - shift
        rollouts.append(replace(rollout, logprobs=tuple(logprobs.tolist())))
    return replace(group, rollouts=tuple(rollouts))


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return make_trainer(make_config())


def test_distance_is_the_mean_over_sampled_tokens(trainer: Trainer) -> None:
    group = own_group(trainer)
    assert LogprobMismatchCheck(trainer).distance(group.rollouts) == pytest.approx(0.0, abs=1e-5)
    first, second = group.rollouts[:2]
    pairs = zip(second.logprobs, second.mask, strict=True)
    moved = replace(second, logprobs=tuple(value - 6.0 * sampled for value, sampled in pairs))
    expected = 6.0 * second.sampled_tokens / (first.sampled_tokens + second.sampled_tokens)
    assert LogprobMismatchCheck(trainer).distance([first, moved]) == pytest.approx(
        expected, abs=1e-4
    )


def test_only_what_is_far_off_is_named(trainer: Trainer) -> None:
    check = LogprobMismatchCheck(trainer)
    assert not check(own_group(trainer, shift=MISMATCH_NATS - 0.1))
    assert check(own_group(trainer, shift=MISMATCH_NATS + 0.1))


def test_one_unlikely_answer_is_no_other_model(trainer: Trainer) -> None:
    group = own_group(trainer)
    short = min(group.rollouts, key=lambda rollout: len(rollout.tokens))
    far = replace(short, logprobs=tuple(-20.0 * sampled for sampled in short.mask))
    rollouts = tuple(far if rollout is short else rollout for rollout in group.rollouts)
    check = LogprobMismatchCheck(trainer)
    assert check.distance([far]) > MISMATCH_NATS > check.distance(rollouts)
    assert not check(replace(group, rollouts=rollouts))


def test_a_group_that_fits_costs_one_of_its_sequences(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = own_group(trainer)
    scored: list[int] = []
    score = BlockwiseModel.score

    def counting(self: BlockwiseModel, batch: TokenBatch) -> object:
        scored.append(batch.inputs.size)
        return score(self, batch)

    monkeypatch.setattr(BlockwiseModel, "score", counting)
    assert not LogprobMismatchCheck(trainer)(group)
    assert scored == [8]  # the shortest, padded; the group's longest alone is 16
    unknown = tuple(replace(rollout, logprobs=None) for rollout in group.rollouts)
    assert not LogprobMismatchCheck(trainer)(replace(group, rollouts=unknown))
    assert len(scored) == 1
