"""Losses and advantages of a student from a teacher's log-probabilities. Pure functions.

    of the sampled token     teacher_advantages: -weight · (log π - log π_T), beside or in place of
                             the reward's advantage; its expectation is the gradient of the reverse
                             KL of each token (on-policy distillation); `evened` shares a span of
                             tokens, if the teacher has other tokens
    of the distribution      divergence: the generalised JSD(β) of a student's and a teacher's
                             log-probabilities, over the whole vocabulary or over the teacher's best
                             tokens and one bucket with the rest (`with_tail`); `with_divergence`
                             adds it to a policy loss
    of two vocabularies      unlike: the divergence of the tokens that both have, and the distance
                             of the sorted probabilities of the others (ULD, arXiv:2402.12030;
                             GOLD's hybrid, trl.experimental.gold)

β has TRL's meaning (GKD, arXiv:2306.13649): 0 is the forward KL(π_T ‖ π), 1 the reverse KL(π ‖
π_T). The KL over buckets is a lower bound of the whole one, and equal if there are as many
buckets as tokens.

Worked: p = (1/2, 1/4, 1/4), p_T = (1/4, 1/4, 1/2). Reverse KL: ½ ln 2 - ¼ ln 2 = 0.173287; the
forward KL is the same by symmetry. With k = 1, the teacher's best is the third token: p has the
buckets (1/4, 3/4), p_T (1/2, 1/2), reverse KL ¼ ln ½ + ¾ ln 3/2 = 0.130812. JSD(½): m = (3/8, 1/4,
3/8), ½ (½ ln 4/3 + ¼ ln 2/3) twice = 0.042474.
"""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_parallm.losses.types import Aggregation, LossInputs, LossOutputs, aggregate
from mlx_parallm.models.sums import logsumexp, row_sums

LEAST_LOGPROB = -80.0
"""A teacher's smaller log-probabilities count as this one: a token that it rules out has a large
loss, and not an infinite one. exp of it is still a float32."""
OUT = -1e30

Loss = Callable[[LossInputs], LossOutputs]


def teacher_advantages(logprobs: np.ndarray, teacher: np.ndarray, *, weight: float) -> np.ndarray:
    """-weight · (log π - log π_T) of each sampled token; 0 if the teacher has no score (NaN).
    [N] each → [N] float32.

    Worked: log π = -1, log π_T = -0.5, weight 2 → 1: the teacher likes the token better.
    """
    gap = logprobs.astype(np.float64) - np.maximum(teacher.astype(np.float64), LEAST_LOGPROB)
    return np.where(np.isnan(gap), 0.0, -weight * gap).astype(np.float32)


def evened(policy: np.ndarray, teacher: np.ndarray, within: np.ndarray) -> np.ndarray:
    """The teacher's log-probability of each token if every token of a span has an equal part of the
    span's Σ (log π - log π_T). [N] each → [N] float32; a span of one token keeps its number.

    Args:
        teacher: a number a token, whose sum over a span is the span's.
        within: the number of the token in its span; a span begins at 0.

    Worked: a span of log π = -1, -3 and Σ log π_T = -2 has the gap -2, -1 a token: log π_T is 0,
    -2, and both get the advantage +1 · weight.
    """
    spans = np.cumsum(within == 0) - 1
    sizes = np.bincount(spans)
    gap = np.bincount(spans, policy.astype(np.float64) - teacher) / np.maximum(sizes, 1)
    return np.where(sizes[spans] == 1, teacher, policy - gap[spans]).astype(np.float32)


def with_tail(logits: mx.array, ids: mx.array | None) -> mx.array:
    """log-softmax of logits, over all tokens or of these and the rest as one. [n, V], [n, k] → [n,
    V] or [n, k + 1] float32.

    The rest's mass is a sum over its own logits: 1 minus the others would lose it to rounding.
    """
    scaled = logits.astype(mx.float32)
    normalizer = logsumexp(scaled)[:, None]
    if ids is None:
        return scaled - normalizer
    rest = logsumexp(mx.put_along_axis(scaled, ids, mx.array(OUT), axis=-1))[:, None]
    rest = mx.maximum(rest, normalizer + LEAST_LOGPROB)  # no token: no mass
    chosen = mx.take_along_axis(scaled, ids, axis=-1)
    return mx.concatenate([chosen, rest], axis=-1) - normalizer


def divergence(student: mx.array, teacher: mx.array, *, beta: float) -> mx.array:
    """JSD(β) = β KL(p_T ‖ m) + (1 - β) KL(p ‖ m), m = β p_T + (1 - β) p; at 0 KL(p_T ‖ p), at 1
    KL(p ‖ p_T). Log-probabilities [n, K] → [n] float32, in nats.

    The teacher's is not differentiated. A row that begins with NaN has no teacher: 0, without a
    slope.
    """
    scored = mx.logical_not(mx.isnan(teacher[:, :1]))
    teacher = mx.stop_gradient(mx.where(scored, mx.maximum(teacher, LEAST_LOGPROB), 0.0))
    return mx.where(scored[:, 0], row_sums(_divergences(student, teacher, beta)), 0.0)


def unlike(
    logits: mx.array, ids: mx.array, teacher: mx.array, both: mx.array, *, beta: float, share: float
) -> mx.array:
    """share · JSD(β) over the tokens that both vocabularies have + (1 - share) · Σ |difference| of
    the sorted probabilities of the others. [n, V] → [n] float32.

    Args:
        ids: [n, K] int32, the student's ids of the teacher's tokens, likeliest first; -1: not one
            of the student's.
        teacher: [n, K + 1], their log-probabilities and the rest's. A row that begins with NaN has
            no teacher: 0, without a slope.
        both: [V] bool, the tokens that the teacher's vocabulary has too.
        share: weight of the tokens that both have; GOLD's is their share of the teacher's
            vocabulary.

    The rest is one more of the sorted probabilities. Values and slopes are TRL's for 0 < β < 1; for
    β = 0 and 1 its divergence lacks the masses' difference, Σ p - Σ p_T over the shared tokens, and
    so is not 0 at its least.

    Worked: p = (1/2, 3/10, 1/5) and p_T = (3/5, 2/5), no token in both: 1/10 + 1/10 + 1/5 = 2/5.
    """
    scored = mx.logical_not(mx.isnan(teacher[:, :1]))
    teacher = mx.stop_gradient(mx.where(scored, mx.maximum(teacher, LEAST_LOGPROB), 0.0))
    logprobs = with_tail(logits, None)
    matched = ids >= 0
    student = mx.take_along_axis(logprobs, mx.maximum(ids, 0), axis=-1)
    shared = row_sums(mx.where(matched, _divergences(student, teacher[:, :-1], beta), 0.0))

    alone = mx.where(both, OUT, logprobs)
    width = min(ids.shape[1], logits.shape[1])
    order = mx.stop_gradient(mx.argsort(-alone, axis=-1)[:, :width])
    ordered = mx.exp(mx.take_along_axis(alone, order, axis=-1))
    # the rank of each of the teacher's other tokens among them
    rank = mx.cumsum(mx.logical_not(matched).astype(mx.int32), axis=-1) - 1
    place = mx.clip(rank, 0, width - 1)
    likest = mx.where(rank < width, mx.take_along_axis(ordered, place, axis=-1), 0.0)
    probabilities = mx.exp(teacher)
    apart = row_sums(mx.where(matched, 0.0, mx.abs(likest - probabilities[:, :-1])))
    rest = 1.0 - row_sums(mx.where(matched, mx.exp(student), likest))
    apart = apart + mx.abs(rest - probabilities[:, -1])
    return mx.where(scored[:, 0], share * shared + (1.0 - share) * apart, 0.0)


def _divergences(student: mx.array, teacher: mx.array, beta: float) -> mx.array:
    """The parts of JSD(β) by token. Log-probabilities [n, K] → [n, K]."""
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    mixture = mx.logaddexp(student + math.log(1.0 - beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def _kl(of: mx.array, to: mx.array) -> mx.array:
    """KL of log-probabilities by token. A mass of 0 adds 0: its logarithm is finite here.

    Σ p (log p - log q) + Σ q - Σ p: the masses' sums are equal, and with them the slope has no part
    that only cancels, so it keeps its digits.
    """
    p, q = mx.exp(of), mx.exp(to)
    return p * (of - to) + (q - p)


def with_divergence(policy_loss: Loss, *, weight: float, aggregation: Aggregation) -> Loss:
    """policy_loss + weight · aggregate(divergence). Metrics: the policy loss's, and distill_loss,
    the token mean of the divergence.

    Raises ValueError: the inputs have no `divergence`.
    """

    def loss(inputs: LossInputs) -> LossOutputs:
        if inputs.divergence is None:
            raise ValueError("distillation as a loss needs the divergence of each token")
        policy = policy_loss(inputs)
        return LossOutputs(
            policy.loss + weight * aggregate(inputs.divergence, inputs, aggregation),
            policy.metrics | {"distill_loss": aggregate(inputs.divergence, inputs)},
        )

    return loss
