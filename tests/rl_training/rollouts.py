"""Groups of rollouts and batches, made by hand."""

from collections.abc import Sequence

import numpy as np

from mlx_parallm.losses.advantages import Estimator, group_advantages, token_advantages
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.types import Rollout, RolloutGroup

PROMPT = 3


def make_rollout(
    completion: Sequence[int] = (5, 6),
    *,
    reward: float = 0.0,
    prompt: Sequence[int] = (1, 2, 3),
    logprob: float = -1.0,
    version: int = 0,
    **others: object,
) -> Rollout:
    given, sampled = len(prompt), len(completion)
    return Rollout(
        tokens=(*prompt, *completion),
        mask=(0,) * given + (1,) * sampled,
        logprobs=(0.0,) * given + (logprob,) * sampled,
        policy_versions=(version,) * (given + sampled),
        temperature=others.pop("temperature", 1.0),
        scores={"reward": reward},
        **others,
    )


def make_group(
    group_id: str, rewards: Sequence[float], *, index: int | None = None, **rollout: object
) -> RolloutGroup:
    rollouts = tuple(make_rollout(reward=reward, **rollout) for reward in rewards)
    return RolloutGroup(group_id, "test", rollouts, index=index)


def random_groups(
    count: int, size: int = 4, *, seed: int = 0, vocab: int = 40
) -> list[RolloutGroup]:
    """Groups of ragged random rollouts with random rewards and plausible behaviour
    log-probabilities."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        rollouts = tuple(
            make_rollout(
                rng.integers(3, vocab, rng.integers(1, 9)).tolist(),
                prompt=rng.integers(3, vocab, rng.integers(1, 6)).tolist(),
                reward=float(rng.normal()),
                logprob=float(-3.7 + 0.3 * rng.normal()),
            )
            for _ in range(size)
        )
        groups.append(RolloutGroup(f"g{seed}-{number}", "test", rollouts, index=number))
    return groups


def make_batch(
    groups: Sequence[RolloutGroup], *, step: int = 1, estimate: Estimator = group_advantages
) -> TrainBatch:
    sequences = []
    for group in groups:
        advantages = token_advantages(group, estimate)
        assert advantages is not None
        for rollout, row in zip(group.rollouts, advantages, strict=True):
            sequences.append(TrainSequence(rollout, row, True))
    return TrainBatch(step, tuple(groups), tuple(sequences), BatchStatistics())
