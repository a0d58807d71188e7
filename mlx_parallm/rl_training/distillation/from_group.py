"""A teacher whose log-probabilities came with the group: Atropos' `distill_token_ids` and
`distill_logprobs`, [G][T][K] each, at each position the best K tokens that may be there.

They are in the group's metadata under KEY. The token at position t is looked for among the
entries of position t; one that is not there has no score, and is counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.distillation.remote import rest_of
from mlx_parallm.rl_training.distillation.scoring import Answer, Scored
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rollout_store.distillation import KEY
from mlx_parallm.types import RolloutGroup


@dataclass(frozen=True)
class ScoredAnswer(TrainSequence):
    """A sequence with the scores of the sender's teacher."""

    ids: tuple[Sequence[int], ...] = ()
    logprobs: tuple[Sequence[float], ...] = ()


class GroupTeacher:
    """See the module.

    Args:
        keep: as `Teacher.score` will be asked.
        note: called with the reason if a token or a sequence has no score.

    Raises ConfigError: the whole vocabulary is wanted, which no sender sends.
    """

    reads_images = True  # the sender's teacher has seen them

    def __init__(
        self, name: str, vocab_size: int, keep: int | None, note: Callable[[str], None]
    ) -> None:
        if keep == 0:
            raise ConfigError(
                f"distillation: teacher {name!r}: a group brings a few tokens a position, not the"
                " whole vocabulary: set rl_training.distillation.top_k"
            )
        self.name, self._vocab_size, self._note = name, vocab_size, note

    def has(self, group: RolloutGroup) -> bool:
        return KEY in group.metadata

    def answer(
        self, group: RolloutGroup, number: int, segment: int, sequence: TrainSequence
    ) -> Answer | None:
        """None: the fields are of other sequences, or of another temperature, which is noted."""
        scores = group.metadata[KEY]
        flat = sum(len(rollout.segments) for rollout in group.rollouts[:number]) + segment
        if flat >= len(scores["token_ids"]):
            self._note(f"{self.name}: the group's distill fields have no entry for a sequence")
            return None
        if sequence.rollout.temperature not in (0.0, 1.0):
            self._note(
                f"{self.name}: the sender's log-probabilities are at temperature 1, the answer was"
                f" sampled at {sequence.rollout.temperature:g}"
            )
            return None
        ids, logprobs = scores["token_ids"][flat], scores["logprobs"][flat]
        if len(ids) != len(sequence.rollout.tokens):
            self._note(f"{self.name}: the group's distill fields are of another sequence")
            return None
        return ScoredAnswer(
            sequence.rollout,
            sequence.advantages,
            sequence.fresh,
            ids=tuple(ids),
            logprobs=tuple(logprobs),
        )

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        return [self._one(answer, keep) for answer in answers if isinstance(answer, ScoredAnswer)]

    def _one(self, answer: "ScoredAnswer", keep: int | None) -> Scored:
        trained = answer.rollout.trained_mask
        places = [place for place, chosen in enumerate(trained) if chosen and place]
        logprobs = np.full(len(places), np.nan, np.float32)
        agrees = np.full(len(places), np.nan, np.float32)
        ids = np.zeros((len(places), keep or 0), np.int32)
        targets = np.full((len(places), (keep or 0) + 1), np.nan, np.float32)
        for row, place in enumerate(places):
            best = sorted(
                zip(answer.ids[place], answer.logprobs[place], strict=True),
                key=lambda entry: -entry[1],
            )
            by_id = dict(best)
            token = answer.rollout.tokens[place]
            if token in by_id:
                logprobs[row] = by_id[token]
            else:
                self._note(f"{self.name}: a token is not among those that the sender scored")
            if best:
                agrees[row] = float(best[0][0] == token)
            if keep is not None and best:
                # fewer candidates than wanted: fill up with other tokens, of probability 0
                chosen = best[:keep]
                others = (other for other in range(self._vocab_size) if other not in by_id)
                padding = [(next(others), -math.inf) for _ in range(keep - len(chosen))]
                rest = rest_of([number for _, number in chosen])
                ids[row] = [entry for entry, _ in (*chosen, *padding)]
                targets[row] = [*(number for _, number in (*chosen, *padding)), rest]
        return Scored(logprobs, agrees, ids if keep else None, None if keep is None else targets)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
