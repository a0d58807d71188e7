"""A teacher's scores of tokens, and the forward pass of a teacher in this process.

Answer      a sequence as a teacher gets it: its tokens, behind the teacher's own prompt perhaps
Scored      log π_T of its trained tokens, whether each is the teacher's best, and its best K
            tokens with the rest as one
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.losses.distillation import with_tail
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts.layout import TokenBatch, scaled
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import MicroBatch, MiniBatch

Collate = Callable[[Sequence[TrainSequence]], MiniBatch]
Answer = TrainSequence


@dataclass(frozen=True)
class Scored:
    """A teacher's scores of the n trained tokens of a sequence. `ids` None: `targets` are of the
    whole vocabulary; `targets` None: no distribution was requested."""

    logprobs: np.ndarray  # [n] float32
    agrees: np.ndarray | None = None  # [n] float32, 1 or 0
    ids: np.ndarray | None = None  # [n, K] int32
    targets: np.ndarray | None = None  # [n, K + 1] float32, the last one of the rest; or [n, V]
    # [n] float32: the token's number in its span, of a teacher with another tokenizer
    within: np.ndarray | None = None


class Teacher(Protocol):
    """One teacher. On the trainer's thread."""

    @property
    def name(self) -> str: ...

    @property
    def reads_images(self) -> bool:
        """Whether it scores answers to prompts that show some, behind the policy's own prompt."""

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        """Return the scores of each answer; None, which is counted, where it fails.

        Args:
            keep: how many of its best tokens are wanted, fewer than the vocabulary has; 0 = all of
                them; None = no distribution.

        Returns None after a stop request. Raises EndpointError: it does not answer.
        """
        ...

    def close(self) -> None: ...


def behind(answer: Answer, prompt: Sequence[int], start: int) -> Answer:
    """The answer's tokens from place `start` on behind another prompt, with the same mask."""
    rollout = answer.rollout
    forced = rollout.forced
    tokens = (*prompt, *rollout.tokens[start:])
    moved = replace(
        rollout,
        tokens=tokens,
        mask=(0,) * len(prompt) + rollout.mask[start:],
        forced=None if forced is None else (0,) * len(prompt) + forced[start:],
        logprobs=None,
        processed_logprobs=None,
        policy_versions=(-1,) * len(tokens),
        earlier=(),
    )
    return replace(answer, rollout=moved, advantages=(0.0,) * len(tokens))


def forward(
    model: BlockwiseModel,
    answers: Sequence[Answer],
    collate: Collate,
    keep: int | None,
    should_stop: Callable[[], bool],
    observe: Callable[[MicroBatch], None] = lambda micro_batch: None,
    seeing: Callable[[MicroBatch], AbstractContextManager[None]] = lambda _: nullcontext(),
    temperature: float | None = None,
) -> list[Scored | None] | None:
    """Score answers by a model's forward passes, a micro-batch at a time, each within `seeing`;
    None after a stop request. `temperature`: of the distributions; None: the rollouts'."""
    columns: list[tuple[MicroBatch, list[np.ndarray]]] = []
    for micro_batch in collate(answers).micro_batches:
        if should_stop():
            return None
        if len(micro_batch.positions):
            model.longest_eval_ms = 0.0
            with seeing(micro_batch):
                scores = model.score(
                    micro_batch.token_batch(
                        entropy_slope=False, measure=_measure(keep, temperature)
                    )
                )
            # a value head's numbers are behind them
            logprobs, _, *measured = scores[: 3 if keep is None else 4 if keep == 0 else 5]
            columns.append((micro_batch, [np.array(part) for part in (logprobs, *measured)]))
            observe(micro_batch)
    scored: list[Scored | None] = [None] * len(answers)
    for micro_batch, parts in columns:
        ends = np.cumsum([answers[row].trained for row in micro_batch.rows])[:-1]
        for row, row_parts in zip(micro_batch.rows, _split(parts, ends), strict=True):
            scored[row] = _scored(row_parts, keep)
    return scored


def _split(parts: Sequence[np.ndarray], ends: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    return list(zip(*(np.split(part, ends) for part in parts), strict=True))


def _scored(parts: Sequence[np.ndarray], keep: int | None) -> Scored:
    logprobs, agrees, *distribution = parts
    if keep is None:
        return Scored(logprobs, agrees)
    if keep == 0:
        return Scored(logprobs, agrees, None, distribution[0])
    return Scored(logprobs, agrees, distribution[0].astype(np.int32), distribution[1])


def _measure(
    keep: int | None, temperature: float | None
) -> Callable[[mx.array, TokenBatch, slice], tuple[mx.array, ...]]:
    """(1 if the token is the best one [n]; the best tokens [n, K] and their log-probabilities
    with the rest's [n, K + 1], or those of all tokens [n, V])."""

    def measured(logits: mx.array, batch: TokenBatch, chunk: slice) -> tuple[mx.array, ...]:
        wide = scaled(logits, batch, chunk, temperature)
        agrees = (mx.argmax(wide, axis=-1) == batch.targets[chunk]).astype(mx.float32)
        if keep is None:
            return (agrees,)
        if keep == 0:
            return agrees, with_tail(wide, None)
        ids = mx.argpartition(-wide, keep, axis=-1)[:, :keep].astype(mx.int32)
        return agrees, ids, with_tail(wide, ids)

    return measured
