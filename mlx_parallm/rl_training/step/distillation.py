"""Distillation in a step: the scores of teachers, and how it learns from them.

Teachers          the companion that scores; a leaf has it
Scores            "teacher_logprobs" [N] of the sampled tokens, NaN if there is none;
                  "teacher_agrees" [N]: 1 if the token is the teacher's best, NaN = unknown;
                  with mode = "loss" "teacher_ids" [N · K] and "teacher_targets" [N · (K + 1)],
                  or "teacher_targets" [N · V] of the whole vocabulary; with teachers of another
                  family "teacher_within" [N]: the number of the token in its span, and, if the
                  vocabularies are compared by `unlike`, "teacher_both" [V + 1]: 1 for the policy's
                  tokens that the teacher has too, and their share of the teacher's vocabulary
Teaching          the settings, in the algorithm: from these columns to advantages, or to the
                  divergence of each token (`Lesson`)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import mlx.core as mx
import numpy as np

from mlx_parallm.config.distillation import DistillationSettings
from mlx_parallm.losses.distillation import (
    divergence,
    evened,
    teacher_advantages,
    unlike,
    with_tail,
)
from mlx_parallm.models.layouts.layout import TokenBatch, scaled
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.collate import Measure
from mlx_parallm.rl_training.step.prepare import PreparedBatch

TEACHERS = "teachers"
"""The companion's name."""
LOGPROBS, AGREES, IDS, TARGETS, WITHIN, BOTH = (
    "teacher_logprobs",
    "teacher_agrees",
    "teacher_ids",
    "teacher_targets",
    "teacher_within",
    "teacher_both",
)
# keys of metrics.jsonl
TEACHER_KL = "teacher_kl"
MEASURED = (TEACHER_KL, "teacher_agreement", "teacher_spread", "teacher_reward_r", "teacher_share")


def scores_bytes(distillation: DistillationSettings, tokens: int, vocabulary: int) -> int:
    """Return the bytes of a step's scores of `tokens` sampled tokens, as they come from the teacher
    and as columns."""
    columns = 2
    if distillation.mode == "loss" and distillation.top_k:
        columns += 2 * min(distillation.top_k, vocabulary) + 1
    elif distillation.mode == "loss":
        columns += vocabulary
    return 2 * tokens * columns * 4


@dataclass(frozen=True)
class Teaching:
    """The settings of [rl_training.distillation] that a step reads: a `prepare.Signal`."""

    companion: ClassVar[str] = TEACHERS
    column: ClassVar[str] = LOGPROBS
    missing: ClassVar[str] = (
        "rl_training.distillation names teachers, and none was built here: this needs"
        " mlx_parallm.rl_training.distillation, or leave them out"
    )
    mode: Literal["advantage", "loss"]
    weight: float
    reward: bool
    beta: float
    temperature: float | None  # the comparison's; None: the rollout's

    @classmethod
    def of(cls, distillation: DistillationSettings) -> "Teaching | None":
        """None: there is no teacher."""
        if not distillation.active:
            return None
        return cls(
            distillation.mode,
            distillation.weight,
            distillation.reward,
            distillation.beta,
            distillation.temperature,
        )

    def advantages(
        self, advantages: np.ndarray, policy: np.ndarray, teacher: np.ndarray
    ) -> np.ndarray:
        """The advantages that are trained on. [N] each → [N] float32."""
        advantages = advantages if self.reward else np.zeros_like(advantages)
        if self.mode == "loss":
            return advantages
        return advantages + teacher_advantages(policy, teacher, weight=self.weight)

    def learned(
        self,
        prepared: PreparedBatch,
        batch: TrainBatch,
        scores: Mapping[str, np.ndarray],
        policy: np.ndarray,
    ) -> PreparedBatch:
        """The batch with the teachers' advantages, or distributions, and numbers."""
        teacher = scores[LOGPROBS]
        if WITHIN in scores:
            teacher = evened(policy, teacher, scores[WITHIN])
            scores = {**scores, LOGPROBS: teacher}
        return replace(
            prepared,
            advantages=self.advantages(prepared.advantages, policy, teacher),
            recorded={**prepared.recorded, LOGPROBS: teacher},
            compared=Lesson.of(scores, len(teacher), self) if self.mode == "loss" else None,
            metrics={**prepared.metrics, **teacher_numbers(batch, policy, scores)},
        )


@dataclass(frozen=True)
class Lesson:
    """The teacher's distribution at the trained tokens of a step. `ids`: None = all tokens.
    `temperature`: of the comparison; None: the rollout's."""

    name: ClassVar[str] = "divergence"
    ids: np.ndarray | None  # [N, K] int32
    targets: np.ndarray  # [N, K + 1] float32, the last one of the rest; or [N, V]
    beta: float
    temperature: float | None = None
    both: np.ndarray | None = None  # [V + 1] float32; None: the vocabularies are one

    @classmethod
    def of(
        cls, scores: Mapping[str, np.ndarray], tokens: int, teaching: Teaching
    ) -> "Lesson | None":
        """None: the scores have no distribution."""
        if TARGETS not in scores or not tokens:
            return None
        ids = scores[IDS].reshape(tokens, -1).astype(np.int32) if IDS in scores else None
        targets = scores[TARGETS].reshape(tokens, -1)
        return cls(ids, targets, teaching.beta, teaching.temperature, scores.get(BOTH))

    def measure(self, columns: np.ndarray) -> Measure:
        """The divergence [n] of the tokens at these columns, from a model's logits."""
        ids = None if self.ids is None else mx.array(self.ids[columns])
        targets = mx.array(self.targets[columns])
        share = 0.0 if self.both is None else float(self.both[-1])
        both = None if self.both is None else mx.array(self.both[:-1] > 0)

        def measured(logits: mx.array, batch: TokenBatch, chunk: slice) -> tuple[mx.array, ...]:
            wide = scaled(logits, batch, chunk, self.temperature)
            if both is not None and ids is not None:
                pair = ids[chunk], targets[chunk]
                return (unlike(wide, *pair, both, beta=self.beta, share=share),)
            student = with_tail(wide, None if ids is None else ids[chunk])
            return (divergence(student, targets[chunk], beta=self.beta),)

        return measured


def teacher_numbers(
    batch: TrainBatch, policy: np.ndarray, scores: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return the numbers about teachers for a step's line: those of `MEASURED` that exist.

    teacher_kl: mean of log π - log π_T over the scored tokens, an estimate of KL(π ‖ π_T).
    teacher_spread: the deviation of that number. teacher_agreement: share of the tokens that are
    the teacher's best. teacher_reward_r: correlation of reward and mean log π_T - log π of an
    answer, each against its group's mean: 0 or less if the teacher does not prefer what is
    rewarded. teacher_share: share of the trained tokens that were scored.
    """
    teacher, agrees = scores[LOGPROBS], scores.get(AGREES)
    gap = policy.astype(np.float64) - teacher
    scored = ~np.isnan(gap)
    numbers = {"teacher_share": float(scored.mean())} if len(scored) else {}
    if not scored.any():
        return numbers
    numbers |= {TEACHER_KL: float(gap[scored].mean()), "teacher_spread": float(gap[scored].std())}
    if agrees is not None and (seen := ~np.isnan(agrees)).any():
        numbers["teacher_agreement"] = float(agrees[seen].mean(dtype=np.float64))
    if (correlation := _reward_correlation(batch, -gap)) is not None:
        numbers["teacher_reward_r"] = correlation
    return numbers


def _reward_correlation(batch: TrainBatch, prefers: np.ndarray) -> float | None:
    """Return the correlation of rewards and of the means of `prefers` [N] over each answer, within
    groups; None: no group has both."""
    ends = np.cumsum([sequence.trained for sequence in batch.sequences])
    means = {
        id(sequence.rollout): prefers[end - sequence.trained : end].mean()
        for sequence, end in zip(batch.sequences, ends, strict=True)
        if sequence.trained
    }
    pairs: list[np.ndarray] = []
    for group in batch.groups:
        rows = [
            (rollout.reward, means[id(rollout)])
            for rollout in group.scored
            if not np.isnan(means.get(id(rollout), np.nan))
        ]
        if len(rows) > 1:
            pairs.append(np.array(rows) - np.mean(rows, axis=0))
    if not pairs:
        return None
    rewards, preferred = np.concatenate(pairs).T
    spread = float(np.sqrt(np.square(rewards).sum() * np.square(preferred).sum()))
    return float((rewards * preferred).sum() / spread) if spread > 1e-9 else None


def sequence_groups(batch: TrainBatch) -> list[tuple[int, int, int]]:
    """The group, the rollout in it and the segment of each sequence of a batch, as numbers; of a
    given one the first rollout and segment.

    Raises ValueError: the sequences are not those of the groups.
    """
    places: list[tuple[int, int, int]] = []
    if not batch.sequences:
        return places
    for number, group in enumerate(batch.groups):
        if len(places) < len(batch.sequences) and batch.sequences[len(places)].from_dataset:
            places.append((number, 0, 0))
            continue
        places += [
            (number, answer, segment)
            for answer, rollout in enumerate(group.rollouts)
            for segment in range(len(rollout.segments))
        ]
    if len(places) != len(batch.sequences):
        raise ValueError(f"{len(batch.sequences)} sequences of groups that have {len(places)}")
    return places
