"""A check whether a group from outside belongs to this model. `RolloutBuffer` calls it before the
group enters a batch."""

from collections.abc import Sequence

import numpy as np

from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Rollout, RolloutGroup

MISMATCH_NATS = 4.0
"""Between the distances of staleness and those of a foreign vocabulary (measured by
`scripts/bench/logprob_mismatch.py` of commit c6501726; builtin:tiny at learning rate 1e-3, which
moves as fast as any run): at most 0.9 nats a token one step after sampling, 2.7 after 16 steps, 2.8
after 32; with the vocabulary shuffled never less than 8.8."""

log = get_logger("train")


class LogprobMismatchCheck:
    """Called with a group: True when it is not this model's. On the trainer's thread.

    The mean of |trainer - sender| over the sampled tokens of the shortest sequence is compared with
    `MISMATCH_NATS`: at most 1/G of a forward pass of the group. Only if it is above that, the
    whole group is scored and decides, for a single unlikely token makes much of a short answer.
    Groups without log-probabilities cannot be judged.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, group: RolloutGroup) -> bool:
        if any(rollout.logprobs is None for rollout in group.rollouts):
            return False
        shortest = min(group.rollouts, key=lambda rollout: len(rollout.tokens))
        if (
            self.distance([shortest]) <= MISMATCH_NATS
            or (distance := self.distance(group.rollouts)) <= MISMATCH_NATS
        ):
            return False
        log.warning(
            "group_of_another_model", group_id=group.group_id, nats_a_token=round(distance, 2)
        )
        return True

    def distance(self, rollouts: Sequence[Rollout]) -> float:
        """Mean of |trainer - sender| over the sampled tokens, in nats."""
        sent = [
            value
            for rollout in rollouts
            for value, sampled in zip(rollout.logprobs or (), rollout.mask, strict=True)
            if sampled
        ]
        return float(
            np.abs(
                np.concatenate(self._trainer.logprobs(rollouts)) - np.array(sent, np.float32)
            ).mean()
        )
