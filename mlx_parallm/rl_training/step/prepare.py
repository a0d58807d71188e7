"""The inputs of a loss for each token, fixed before the first update of a step. The trainer does
the forward passes.

    TrainBatch → scores (the trainer's forward passes, kept in StepPosition) → PreparedBatch →
    BatchLoss → LossInputs

Every number of a token is in a *column*: a flat array [N] over the trained tokens of all sequences
of the batch, one sequence after the other. `MicroBatch.columns` are the places of its tokens in
them.

All but the scores is a pure function of the batch, the scores and the KL coefficient. So a step
that was interrupted continues with the same numbers when its scores are kept, however the weights
have changed since.

*Sampler correction*: weights for the gap between the distribution that was sampled from and the
same weights as the trainer computes them. Engine and trainer add the same numbers in another order
and, below float32, round differently; after an optimizer step more tokens differ. With a
correction, the trainer scores every sequence before the step's first update (`old_logprobs`); the
loss's ratio is against those, and each token's loss is multiplied by a constant made of
exp(old_logprobs - rollout_logprobs). Without one, the ratio is against `rollout_logprobs` itself
and contains that factor already: the two are never used together.

`rollout_logprobs` are those *before* top-k, top-p and the like, as the trainer's are: the same
function of the weights, so that ratio and weight are 1 if nothing but a filter is between
sampler and trainer. The log-probabilities after the filter would multiply every ratio by the mass
that the filter kept.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.config.algorithm import sampler_bounds
from mlx_parallm.config.training import LearningSection
from mlx_parallm.execution.user_code import is_reference
from mlx_parallm.losses.kl import LOG_RATIO_LIMIT
from mlx_parallm.losses.selection import Selection, high_entropy
from mlx_parallm.losses.types import LossInputs, LossOutputs, Number
from mlx_parallm.models.blockwise import Objective
from mlx_parallm.models.ops import as_data
from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.collate import Measure, MicroBatch
from mlx_parallm.system.hardware import float32_is_tf32

Scores = Mapping[str, np.ndarray]
"""Columns of the trainer's own forward passes, [N] float32 over the trained tokens of the batch:
"old_logprobs" (under the weights that the step starts from) or only "stand_ins" (the same, of
the sequences that came without log-probabilities; 0 elsewhere), "ref_logprobs", "old_values",
"entropies", and those of companions (companion.py)."""

Mismatch = tuple[float, float, float, bool]
"""Largest and mean |trainer - engine| and KL(engine || trainer) in nats a token, and whether the
tokens are fresh."""

MISMATCH_BOUND = 1e-3
"""Mean |trainer - engine| in nats a token on the same weights, from which on "auto" corrects: a
thousandth of the sampled tokens' probability on average, two orders below the ratio's
clipping (0.2). It lies between float32 (at most 1.3e-5) and narrower types (at least
2e-3), whatever the model's size."""
MEASURED_MISMATCH: Mapping[tuple[mx.Dtype, bool], float] = {
    (mx.float32, False): 1.3e-5,
    (mx.float32, True): 1.2e-5,
    (mx.float16, False): 5.7e-3,
    (mx.float16, True): 6.6e-3,
    (mx.bfloat16, False): 5.2e-2,
    (mx.bfloat16, True): 4.7e-2,
}
"""Mean |trainer - engine| by (dtype of the activations, 4-bit weights): the largest of the
models of docs/algorithms.md#before-a-step-learns, on a CPU.
`mlx_parallm doctor --contracts` measures it for any model and device."""


@dataclass(frozen=True)
class StepPosition:
    """Position of training within a step, so that a step which a shutdown interrupted is continued
    exactly.

    `totals`: sums of the metrics of finished mini-batches. `scores`: those made before the first
    update, under weights that no longer exist.
    """

    epoch: int = 0
    order: tuple[int, ...] = ()  # order of the examples this epoch
    next_mini_batch: int = 0
    updates: int = 0
    skipped: int = 0
    left_out: int = 0  # mini-batches, because the policy had moved too far (Algorithm.stop_kl) …
    stopped_at_kl: float | None = None  # … and the KL at the first of them
    totals: dict[str, float] = field(default_factory=dict)
    mismatch: Mismatch | None = None  # before the first update
    tokens: int = 0
    scores: Scores = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPosition":
        mismatch = data["mismatch"]
        scores = {
            name: np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)
            for name, text in data["scores"].items()
        }
        read = {"order": tuple(data["order"]), "scores": scores}
        return cls(**data | read | {"mismatch": None if mismatch is None else tuple(mismatch)})

    def to_json(self) -> dict[str, Any]:
        """Scores keep their bits: base64 of little-endian float32."""
        scores = {
            name: base64.b64encode(c.astype("<f4").tobytes()).decode()
            for name, c in self.scores.items()
        }
        return asdict(replace(self, scores={})) | {"scores": scores}


@dataclass(frozen=True)
class StepTokens:
    """The numbers of every token that a step trained on: columns [N] float32 over the batch's
    sequences, one after the other; NaN = not known.

    `trainer_logprobs`, `entropies`: when the token's gradient was first taken. `logprobs`: the
    sampler's. `advantages`: as the loss read them. `reference_logprobs`: only if a reference was
    scored. More of them by companions.
    """

    columns: Mapping[str, np.ndarray]

    def record(self, places: np.ndarray, logprobs: np.ndarray, entropies: np.ndarray) -> None:
        """Keep the scores of a micro-batch, [its N], at these places of the columns; a later
        epoch's are not kept."""
        for name, values in (("trainer_logprobs", logprobs), ("entropies", entropies)):
            column = self.columns[name]
            column[places] = np.where(np.isnan(column[places]), values, column[places])


class Compared(Protocol):
    """A number of the model's distribution that a loss reads, at the trained tokens of a step: its
    divergence from another one, in distillation.

    `name`: the field of LossInputs that the number becomes.
    """

    @property
    def name(self) -> str: ...

    def measure(self, columns: np.ndarray) -> Measure:
        """Return the function that gives one number for each of the tokens at these columns."""
        ...


@dataclass(frozen=True)
class PreparedBatch:
    """Columns are [N] float32, `fresh` and `has_rollout_logprobs` [N] bool; None = not needed.
    LossInputs has them by name.

    `kl`: mean of log(policy / reference) over all tokens, before the step. `weights_cut`: share of
    the tokens whose sampler-correction weight was cut or dropped.
    """

    lengths: tuple[int, ...]  # [rows] trained tokens of each sequence
    rollout_logprobs: np.ndarray  # the sampler's; the trainer's own if the sender had none
    advantages: np.ndarray
    fresh: np.ndarray  # sampled by the very weights that the step starts from
    has_rollout_logprobs: np.ndarray  # the sender has sent a log-probability
    old_logprobs: np.ndarray | None = None  # denominator of the ratio; None: rollout_logprobs
    weights: np.ndarray | None = None
    counted: np.ndarray | None = None  # 1: of the top entropies
    selected: np.ndarray | None = None
    entropies: np.ndarray | None = None  # nats, under the weights that the step starts from
    ref_logprobs: np.ndarray | None = None
    old_values: np.ndarray | None = None
    returns: np.ndarray | None = None
    # coefficient · log(policy / reference), with kl_in = "reward"
    kl_penalty: np.ndarray | None = None
    kl: float | None = None
    weights_cut: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # by `finish` and companions
    recorded: Mapping[str, np.ndarray] = field(default_factory=dict)  # by companions, [N]
    compared: Compared | None = None  # what the loss reads of the policy's distributions
    # by `finish`: numbers of each row [rows], by their names in LossInputs.row_constants
    row_constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    def loss_columns(self) -> dict[str, np.ndarray]:
        """The columns that a loss reads, by their names in LossInputs."""
        columns = {
            "rollout_logprobs": self.rollout_logprobs,
            "advantages": self.advantages,
            "old_logprobs": self.old_logprobs,
            "weights": self.weights,
            "counted": self.counted,
            "selected": self.selected,
            "ref_logprobs": self.ref_logprobs,
            "old_values": self.old_values,
            "returns": self.returns,
        }
        return {name: column for name, column in columns.items() if column is not None}

    def counted_in(self, micro_batches: Sequence[MicroBatch]) -> float | None:
        """Return how many of their tokens are of the top entropies; None: all count."""
        if self.counted is None:
            return None
        return max(sum(float(self.counted[part.columns].sum()) for part in micro_batches), 1.0)

    def step_tokens(self) -> StepTokens:
        """Return each token's numbers before the first update; the trainer records the rest."""
        unknown = np.full(len(self.advantages), np.nan, np.float32)
        columns = {
            "logprobs": np.where(
                self.has_rollout_logprobs, self.rollout_logprobs, np.float32(np.nan)
            ),
            "advantages": self.advantages,
            "trainer_logprobs": unknown,
            "entropies": unknown.copy(),
        }
        if self.ref_logprobs is not None:
            columns["reference_logprobs"] = self.ref_logprobs
        return StepTokens({**columns, **self.recorded})


class Signal(Protocol):
    """The way a step learns from a companion's scores; a part of the algorithm, so that each rank
    has it. The scores are columns of the step like its other scores: an interrupted step continues
    with them, and other ranks get them from rank 0.

    `companion`: the name of the one that scores. `column`: of its scores; a step that has it is not
    scored again. `missing`: what to say where that companion is not there.
    """

    @property
    def companion(self) -> str: ...

    @property
    def column(self) -> str: ...

    @property
    def missing(self) -> str: ...

    @property
    def temperature(self) -> float | None:
        """The temperature at which distributions are compared; None: the rollout's."""
        ...

    def learned(
        self,
        prepared: PreparedBatch,
        batch: TrainBatch,
        scores: Mapping[str, np.ndarray],
        policy: np.ndarray,
    ) -> PreparedBatch:
        """Return a prepared batch with these scores in it. `policy` [N]: log-probabilities of the
        weights that the step starts from."""
        ...


Finish = Callable[[PreparedBatch], PreparedBatch]
"""The batch-level step of an algorithm: replaces `advantages` (and `returns`). It accounts for
`kl_penalty` itself."""


@dataclass(frozen=True)
class SamplerCorrection:
    """Truncated ("tis") or masked ("mis") importance sampling. Only "mis" reads `floor`."""

    kind: Literal["tis", "mis"]
    level: Literal["token", "sequence"]
    cap: float
    floor: float

    def weights(
        self, old_logprobs: np.ndarray, rollout_logprobs: np.ndarray, lengths: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights [N] float32, and which were cut or dropped [N] bool. Both inputs are
        [N]; `lengths`: tokens of each row.

        With w = exp(old - rollout) of a token, or of a sequence's sum: TIS is min(w, cap) (Yao et
        al. 2025, fengyao.notion.site/off-policy-rl); MIS is w where floor ≤ w ≤ cap and 0 elsewhere
        (IcePop: arXiv:2510.18855). Sums stay in log space and are bounded by ±20.

        Worked, cap 2, floor 0.5, a sequence with old - rollout = [0, 1, -1]: w = [1, 2.718, 0.368]
        → TIS [1, 2, 0.368], MIS [1, 0, 0]; the sequence's w is 1, so with level "sequence" all
        three are 1.
        """
        log_weights: np.ndarray = old_logprobs.astype(np.float64) - rollout_logprobs.astype(
            np.float64
        )
        if self.level == "sequence":
            rows = np.repeat(np.arange(len(lengths)), np.array(lengths, np.int64))
            sums: np.ndarray = np.bincount(rows, weights=log_weights, minlength=len(lengths))
            log_weights = sums[rows]
        weights = np.exp(np.clip(log_weights, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        cut = weights > self.cap
        if self.kind == "tis":
            return np.minimum(weights, self.cap).astype(np.float32), cut
        cut |= weights < self.floor
        return np.where(cut, 0.0, weights).astype(np.float32), cut


def prepare(
    batch: TrainBatch,
    scores: Scores,
    *,
    correction: SamplerCorrection | None = None,
    kl_penalty: float | None = None,
    finish: Finish | None = None,
    signal: Signal | None = None,
    selection: Selection | None = None,
    compared: Compared | None = None,
) -> PreparedBatch:
    """The columns of a batch, with the tokens that `selection` chooses among them. `compared`: what
    the loss reads, if the signal has nothing. Other arguments: `_prepare`."""
    prepared = _prepare(
        batch, scores, correction=correction, kl_penalty=kl_penalty, finish=finish, signal=signal
    )
    prepared = replace(prepared, compared=prepared.compared or compared)
    if selection is None or not len(prepared.advantages):
        return prepared
    if selection.by_covariance:
        logprobs = _policy_logprobs(prepared)
        chosen = selection.covariant(prepared.advantages, logprobs, batch.step)
        prepared = replace(prepared, selected=chosen.astype(np.float32))
    if selection.top_entropy is not None:
        assert prepared.entropies is not None, "scored, because the algorithm wants them"
        counts = high_entropy(prepared.entropies, selection.top_entropy)
        prepared = replace(prepared, counted=counts.astype(np.float32))
    return prepared


def _prepare(
    batch: TrainBatch,
    scores: Scores,
    *,
    correction: SamplerCorrection | None,
    kl_penalty: float | None,
    finish: Finish | None,
    signal: Signal | None,
) -> PreparedBatch:
    """The columns of a batch before tokens are chosen.

    Args:
        scores: with "old_logprobs" if there is a correction, else with "stand_ins" where
            sequences came without log-probabilities.
        kl_penalty: coefficient of the KL in the reward; None = it is not there.
        signal: how the scores of a companion are learned from; they come last, whatever the
            advantages are.

    A sequence that came without log-probabilities counts as sampled by the policy that the step
    starts from: its ratio starts at 1 and its weight is 1.
    """
    sequences = batch.sequences
    lengths = [sequence.trained for sequence in sequences]
    counts = np.array(lengths, np.int64)
    rollout_logprobs = _column(
        [sequence.rollout.logprobs or () for sequence in sequences], sequences
    )
    missing = np.repeat(
        [sequence.rollout.logprobs is None for sequence in sequences], counts
    ).astype(bool)
    if missing.any():
        computed = scores["old_logprobs"] if "old_logprobs" in scores else scores["stand_ins"]
        rollout_logprobs = np.where(missing, computed, rollout_logprobs)
    prepared = PreparedBatch(
        lengths=tuple(lengths),
        rollout_logprobs=rollout_logprobs,
        advantages=_column([sequence.advantages for sequence in sequences], sequences),
        fresh=np.repeat([sequence.fresh for sequence in sequences], counts).astype(bool),
        has_rollout_logprobs=~missing,
        old_logprobs=scores["old_logprobs"] if correction else None,
        ref_logprobs=scores.get("ref_logprobs"),
        old_values=scores.get("old_values"),
        entropies=scores.get("entropies"),
    )
    if correction is not None:
        weights, cut = correction.weights(scores["old_logprobs"], rollout_logprobs, lengths)
        prepared = replace(prepared, weights=weights, weights_cut=_mean(cut))
    if prepared.ref_logprobs is not None:
        prepared = _with_kl(prepared, kl_penalty)
    if finish is not None and counts.any():
        prepared = finish(prepared)
    elif prepared.kl_penalty is not None and prepared.kl is not None:
        prepared = replace(
            prepared,
            advantages=prepared.advantages + (prepared.kl_penalty.mean() - prepared.kl_penalty),
        )
    if signal is None:
        return prepared
    # against the policy that the step starts from, as the KL is
    return signal.learned(prepared, batch, scores, _policy_logprobs(prepared))


def _policy_logprobs(prepared: PreparedBatch) -> np.ndarray:
    """The policy's that the step starts from; the sampler's, if that one was not scored."""
    return prepared.rollout_logprobs if prepared.old_logprobs is None else prepared.old_logprobs


def _with_kl(prepared: PreparedBatch, coefficient: float | None) -> PreparedBatch:
    """k1 of the policy that the step starts from (the sampler, if that one was not scored)
    against the reference."""
    assert prepared.ref_logprobs is not None
    k1 = _policy_logprobs(prepared) - prepared.ref_logprobs
    return replace(
        prepared,
        kl=_mean(k1),
        kl_penalty=None if coefficient is None else np.float32(coefficient) * k1,
    )


def _column(values: Sequence[Sequence[float]], sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Lists [T] a sequence, empty ones read as 0 → the column of their trained tokens."""
    parts = []
    for row, sequence in zip(values, sequences, strict=True):
        chosen = np.array(sequence.rollout.trained_mask[1:], bool)
        parts.append(
            np.array(row[1:], np.float32)[chosen] if row else np.zeros(chosen.sum(), np.float32)
        )
    return np.concatenate(parts or [np.zeros(0, np.float32)])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


# ---------------------------------------------------------------------- the loss of a batch


class MiniBatchLoss(Protocol):
    """A function that `Trainer.accumulate` differentiates: `objective` of each micro-batch, as in
    `BatchLoss`."""

    @property
    def metric_names(self) -> list[str]: ...

    @property
    def fuse(self) -> bool:
        """See `BlockwiseModel.loss_and_gradients`."""
        ...

    def measure(self, micro_batch: MicroBatch) -> Measure | None:
        """Further scores of its tokens, which the objective gets behind the entropy."""
        ...

    def objective(self, micro_batch: MicroBatch) -> Objective: ...


@dataclass(frozen=True)
class BatchLoss:
    """A loss over a prepared batch: every number that it reads but the scores that are
    differentiated.

    The normalizers divide the sums over tokens, or sequences: the counts of a mini-batch give its
    mean, 1 gives sums.
    `max_length`: of a sequence, for losses that divide by it. `kl_beta`: weight of the KL to the
    reference in the loss. `entropy_weight`: of the entropy bonus; None: the loss's own.
    `fuse`: the loss takes arrays for numbers.
    """

    loss: Callable[[LossInputs], LossOutputs]
    prepared: PreparedBatch
    token_normalizer: float
    sequence_normalizer: float
    kl_beta: float
    max_length: float
    constants: Mapping[str, float]
    fuse: bool = False
    counted_normalizer: float | None = None
    entropy_weight: float | None = None
    # names of the loss's metrics, once it was called
    metric_names: list[str] = field(default_factory=list)

    def measure(self, micro_batch: MicroBatch) -> Measure | None:
        """The numbers of its tokens' distributions that the loss reads, if it does."""
        compared = self.prepared.compared
        return None if compared is None else compared.measure(micro_batch.columns)

    def objective(self, micro_batch: MicroBatch) -> Objective:
        """(logprobs, entropy, perhaps what `compared` measures, perhaps values; each [N]) → (loss,
        (metrics [K], parts of the mismatch [8], and the logprobs and the entropy as they came))."""
        scatter, mask = mx.array(micro_batch.scatter), mx.array(micro_batch.mask)

        def spread(column: mx.array) -> mx.array:
            return mx.concatenate([column, mx.zeros((1,))])[scatter]

        place = micro_batch.columns
        columns = {
            name: spread(mx.array(c[place])) for name, c in self.prepared.loss_columns().items()
        }
        rows_of = {
            name: mx.array(numbers[list(micro_batch.rows)])
            for name, numbers in self.prepared.row_constants.items()
        }
        fresh, sent = (
            spread(mx.array(column[place].astype(np.float32)))
            for column in (self.prepared.fresh, self.prepared.has_rollout_logprobs)
        )

        def objective(
            logprobs: mx.array, entropy: mx.array, *others: mx.array
        ) -> tuple[mx.array, tuple[mx.array, ...]]:
            rows = spread(logprobs)
            compared = self.prepared.compared
            measured = {} if compared is None else {compared.name: spread(others[0])}
            values = others[len(measured) :]
            number = as_data if self.fuse else float

            def maybe(value: float | None) -> Number | None:
                return None if value is None else number(value)

            inputs = LossInputs(
                logprobs=rows,
                mask=mask,
                token_normalizer=number(self.token_normalizer),
                sequence_normalizer=number(self.sequence_normalizer),
                entropy=spread(entropy),
                values=spread(values[0]) if values else None,
                max_length=number(self.max_length),
                kl_beta=number(self.kl_beta) if self.kl_beta else 0.0,
                counted_normalizer=maybe(self.counted_normalizer),
                entropy_weight=maybe(self.entropy_weight),
                constants={name: number(constant) for name, constant in self.constants.items()},
                row_constants=rows_of,
                **measured,
                **columns,
            )
            outputs = self.loss(inputs)
            self.metric_names[:] = sorted(outputs.metrics)
            numbers = [mx.stop_gradient(outputs.metrics[name]) for name in self.metric_names]
            metrics = mx.stack(numbers) if numbers else mx.zeros((0,))
            apart = mx.stop_gradient(rows) - columns["rollout_logprobs"]
            parts = mx.concatenate([_mismatch_parts(apart, of) for of in (fresh, sent)])
            return outputs.loss, (
                metrics,
                parts,
                mx.stop_gradient(logprobs),
                mx.stop_gradient(entropy),
            )

        return objective


def _mismatch_parts(apart: mx.array, chosen: mx.array) -> mx.array:
    """[4]: largest and sum of |trainer - engine|, sum of k3 of KL(engine || trainer), number of the
    chosen tokens.
    `apart`: log-probabilities of the trainer - those of the engine."""
    apart = mx.where(chosen > 0, apart, 0.0)
    bounded = mx.clip(apart, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = mx.expm1(bounded) - bounded
    sums = [part.sum(axis=-1).sum() for part in (mx.abs(apart), k3, chosen)]
    return mx.stack([mx.abs(apart).max(), *sums])


def mismatch(parts: np.ndarray) -> Mismatch | None:
    """Parts of a mini-batch's micro-batches [M, 8] → what engine and trainer differ by. Fresh
    tokens count alone if there are some; else all that came with log-probabilities, and what
    was learned since is in it. None: missing."""
    for fresh, (largest, *sums) in ((True, parts[:, :4].T), (False, parts[:, 4:].T)):
        absolute, k3, count = (float(total.sum(dtype=np.float64)) for total in sums)
        if count:
            return float(largest.max()), absolute / count, k3 / count, fresh
    return None


# ---------------------------------------------------------------------- sampler correction


def sampler_correction(training: LearningSection, model: nn.Module) -> SamplerCorrection | None:
    """Return the configured correction for a model. "auto" is TIS where `MEASURED_MISMATCH` of it
    is above `MISMATCH_BOUND`; a loss of the user's own, which need not read weights, has none, and
    VESPO's weight is against the sampler already."""
    kind = training.sampler_correction
    if kind == "auto":
        corrects = training.loss is not None and (
            training.loss == "vespo" or is_reference(training.loss)
        )
        kind = "tis" if not corrects and expected_mismatch(model) > MISMATCH_BOUND else "none"
    if kind == "none":
        return None
    masks = kind in ("mis", "icepop")
    level, bounds = training.sampler_correction_level, sampler_bounds(training)
    return SamplerCorrection("mis" if masks else "tis", level, *bounds)


def expected_mismatch(model: nn.Module) -> float:
    """The row of `MEASURED_MISMATCH` for a model on the default device, adapters aside: they are
    float32 whatever the base is."""
    base = [
        (name, array) for name, array in tree_flatten(model.parameters()) if ".lora_" not in name
    ]
    floats = [array for _, array in base if mx.issubdtype(array.dtype, mx.floating)]
    dtype = max(floats, key=lambda array: array.nbytes).dtype
    if dtype == mx.float32 and float32_is_tf32():
        dtype = mx.float16  # TF32 keeps as many bits of the mantissa
    return MEASURED_MISMATCH[dtype, any(name.endswith(".scales") for name, _ in base)]
