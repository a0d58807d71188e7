"""What is known of a whole batch before the first update of its step. numpy only: the forward passes are the trainer's.

    TrainBatch → scores (the trainer's forward passes, kept in StepPosition) → PreparedBatch → LossInputs

Every number of a token is in a *column*: a flat array [N] over the trained tokens of all sequences of the batch, one
sequence after the other. `MicroBatch.scatter` says where a token's number belongs in the [B, T] arrays of a loss.

All but the scores is a pure function of the batch, the scores and the KL coefficient. So a step that was interrupted
goes on with the very same numbers when its scores are kept, whatever the weights have become.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.sampler_correction import SamplerCorrection

Scores = Mapping[str, np.ndarray]
"""Columns of the trainer's own forward passes, float32: "old_logprobs" (under the weights that the step starts from)
or only "stand_ins" (the same, of the sequences that came without log-probabilities; 0 elsewhere), "ref_logprobs",
"old_values"."""

LOSS_COLUMNS = (
    *("rollout_logprobs", "advantages", "old_logprobs", "weights", "ref_logprobs", "old_values", "returns"),
)


@dataclass(frozen=True)
class PreparedBatch:
    """Columns are [N] float32, `fresh` is [N] bool; None = this algorithm needs none. LossInputs has them by name.

    `kl`: mean of log(policy / reference) over all tokens, before the step. `weights_cut`: share of the tokens whose
    sampler-correction weight was cut or dropped.
    """

    lengths: tuple[int, ...]  # [rows] trained tokens of each sequence
    rollout_logprobs: np.ndarray  # the sampler's; the trainer's own where the sender had none
    advantages: np.ndarray
    fresh: np.ndarray
    old_logprobs: np.ndarray | None = None  # what the ratio is against; None: rollout_logprobs
    weights: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    old_values: np.ndarray | None = None
    returns: np.ndarray | None = None
    kl_penalty: np.ndarray | None = None  # coefficient · log(policy / reference), with kl_in = "reward"
    kl: float | None = None
    weights_cut: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of `finish`

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Those that a loss reads, for these sequences in this order: name → [tokens of the rows]."""
        index = token_index(self.lengths, rows)
        given = {name: getattr(self, name) for name in LOSS_COLUMNS}
        return {name: column[index] for name, column in given.items() if column is not None}

    def fresh_of(self, rows: Sequence[int]) -> np.ndarray:
        """[tokens of the rows] float32: 1 where the token was sampled by the very weights that the step starts from."""
        return self.fresh[token_index(self.lengths, rows)].astype(np.float32)


Finish = Callable[[PreparedBatch], PreparedBatch]
"""The batch-level step of an algorithm: replaces `advantages` (and `returns`). It accounts for `kl_penalty` itself."""


def prepare(
    batch: TrainBatch,
    scores: Scores,
    *,
    correction: SamplerCorrection | None = None,
    kl_penalty: float | None = None,
    finish: Finish | None = None,
) -> PreparedBatch:
    """Args:
        scores: with "old_logprobs" where there is a correction, else with "stand_ins" where sequences came without
            log-probabilities.
        kl_penalty: coefficient of the KL in the reward; None = it is not there.

    A sequence that came without log-probabilities counts as sampled by the policy that the step starts from: its ratio
    starts at 1 and its weight is 1.
    """
    sequences = batch.sequences
    lengths = [sum(sequence.rollout.mask[1:]) for sequence in sequences]
    counts = np.array(lengths, np.int64)
    rollout_logprobs = _column([sequence.rollout.logprobs or () for sequence in sequences], sequences)
    missing = np.repeat([sequence.rollout.logprobs is None for sequence in sequences], counts).astype(bool)
    if missing.any():
        own = scores["old_logprobs"] if "old_logprobs" in scores else scores["stand_ins"]
        rollout_logprobs = np.where(missing, own, rollout_logprobs)
    prepared = PreparedBatch(
        lengths=tuple(lengths),
        rollout_logprobs=rollout_logprobs,
        advantages=_column([sequence.advantages for sequence in sequences], sequences),
        fresh=np.repeat([sequence.fresh for sequence in sequences], counts).astype(bool),
        old_logprobs=scores["old_logprobs"] if correction else None,
        ref_logprobs=scores.get("ref_logprobs"),
        old_values=scores.get("old_values"),
    )
    if correction is not None:
        weights, cut = correction.weights(scores["old_logprobs"], rollout_logprobs, lengths)
        prepared = replace(prepared, weights=weights, weights_cut=_mean(cut))
    if prepared.ref_logprobs is not None:
        prepared = _with_kl(prepared, kl_penalty)
    if finish is not None and counts.any():
        return finish(prepared)
    if prepared.kl_penalty is not None and prepared.kl is not None:
        return replace(prepared, advantages=prepared.advantages + (prepared.kl_penalty.mean() - prepared.kl_penalty))
    return prepared


def _with_kl(prepared: PreparedBatch, coefficient: float | None) -> PreparedBatch:
    """k1 of the policy that the step starts from (the sampler, where that one was not scored) against the reference."""
    assert prepared.ref_logprobs is not None
    policy = prepared.rollout_logprobs if prepared.old_logprobs is None else prepared.old_logprobs
    k1 = policy - prepared.ref_logprobs
    return replace(prepared, kl=_mean(k1), kl_penalty=None if coefficient is None else np.float32(coefficient) * k1)


def token_index(lengths: Sequence[int], rows: Sequence[int]) -> np.ndarray:
    """Where the tokens of these sequences are in a column, in the rows' order."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows] or [np.zeros(0, np.int64)])


def adapted_coefficient(coefficient: float, kl: float, *, target: float, horizon: int, sequences: int) -> float:
    """The next coefficient of the KL: coefficient · (1 + clip(kl / target - 1, ±0.2) · sequences / horizon).

    Ziegler et al. 2019 (arXiv:1909.08593), section 2.2; also verl's and TRL's.

    Worked: coefficient 0.1, kl 0.3, target 0.1 → the error 2 is clipped to 0.2; with 128 sequences of a horizon of
    10,000: 0.1 · (1 + 0.2 · 0.0128) = 0.100256.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * sequences / horizon)


def _column(values: Sequence[Sequence[float]], sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Lists [T] a sequence, empty ones read as 0 → the column of their trained tokens."""
    parts = []
    for row, sequence in zip(values, sequences, strict=True):
        chosen = np.array(sequence.rollout.mask[1:], bool)
        parts.append(np.array(row[1:], np.float32)[chosen] if row else np.zeros(chosen.sum(), np.float32))
    return np.concatenate(parts or [np.zeros(0, np.float32)])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


# ---------------------------------------------------------------------- in a checkpoint


def scores_to_json(scores: Scores) -> dict[str, str]:
    """Bits, not decimals: base64 of little-endian float32."""
    return {name: base64.b64encode(column.astype("<f4").tobytes()).decode() for name, column in scores.items()}


def scores_from_json(data: Mapping[str, str]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32) for name, text in data.items()}
