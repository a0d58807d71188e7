"""Trainer: TrainBatch → optimizer updates. Blind to the algorithm, which is a loss and an advantage.

    step = update_epochs × mini-batches (one optimizer update each) × micro-batches (one backward pass each)

Sequences that came without log-probabilities are scored before the first update of the step: the policy that the step
starts from stands in for the one that sampled. So their ratio starts at 1, and what it is against stays fixed over
mini-batches and epochs.

A mini-batch is normalised by its own token count over all its micro-batches, so how it is cut changes nothing. A
mini-batch with a non-finite loss or gradient is skipped and counted. Training stops between two micro-batches when it
is asked to; what the mini-batch in work had gathered is dropped, and `StepPosition` says where to go on.

No host sync beyond the evaluations of the backward pass: numbers are read once a mini-batch.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import structlog

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
from mlx_parallm.models.parameters import scalar
from mlx_parallm.rl_training.advantages import Estimator
from mlx_parallm.rl_training.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.collate import MicroBatch, MiniBatch, collate, epoch_order
from mlx_parallm.rl_training.eval_pace import EvalPace
from mlx_parallm.rl_training.optimizer import PolicyOptimizer, learning_rate_at
from mlx_parallm.rl_training.policy import TrainedPolicy
from mlx_parallm.types import Rollout

MEASURED = (
    *("loss", "kl", "entropy", "clip_fraction", "ratio_mean", "grad_norm"),
    *("update_norm", "weight_norm", "weights_moved"),
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Algorithm:
    """All that an algorithm is. `advantages`: rewards of one group → one number each, None = nothing to learn."""

    name: str
    loss: Callable[[LossInputs], LossOutputs]
    advantages: Estimator
    needs_reference: bool = False


@dataclass(frozen=True)
class StepPosition:
    """Where inside a step training stands; JSON by `asdict`. `totals`: sums of the metrics of finished mini-batches.

    `recomputed`: log-probabilities of the trained tokens of each sequence that came without, in the batch's order.
    """

    epoch: int = 0
    order: tuple[int, ...] = ()  # of the sequences, in this epoch
    next_mini_batch: int = 0
    updates: int = 0
    skipped: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    logprob_diff: tuple[float, float] | None = None  # max, mean; measured before the step's first update
    tokens: int = 0
    recomputed: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPosition":
        diff, rows = data["logprob_diff"], data.get("recomputed", ())
        tuples = {"order": tuple(data["order"]), "recomputed": tuple(tuple(row) for row in rows)}
        return cls(**data | tuples | {"logprob_diff": None if diff is None else tuple(diff)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StepResult:
    """`finished`: false when it was asked to stop. `metrics`: means over the step's mini-batches, None = not known."""

    finished: bool
    position: StepPosition
    metrics: dict[str, float | None]
    seconds: float


class Trainer:
    """Owns the optimizer. One thread's, the one that owns the policy's tree.

    `between_blocks` is called after each evaluation of a few blocks (the serving thread's turn).
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        config: RLTrainingConfig,
        algorithm: Algorithm,
        *,
        between_blocks: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy, self.algorithm, self._config = policy, algorithm, config
        self.model = BlockwiseModel(policy.model, blocks_per_eval=config.blocks_per_eval, between_blocks=between_blocks)
        if self.model.fallback and config.blocks_per_eval:
            log.info("not trained block by block", reason=self.model.fallback)
        self.optimizer = PolicyOptimizer(policy.slots, config)
        self._pace = EvalPace(config)
        self._reference_logprobs: dict[int, np.ndarray] = {}  # sequence of this step → its scored tokens'
        if config.lora.dropout > 0:
            log.warning("lora.dropout is off in RL: every pass yields a log-probability that is compared")

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Of each rollout's sampled tokens ([N], the first token of a sequence left out), under today's weights."""
        sequences = [TrainSequence(rollout, (0.0,) * len(rollout.tokens), fresh=False) for rollout in rollouts]
        mini_batch = collate(sequences, range(len(sequences)), token_budget=self._pace.budget)
        found: dict[int, np.ndarray] = {}
        for micro_batch in mini_batch.micro_batches:
            found |= self._scores(micro_batch)
        return [found[row] for row in range(len(sequences))]

    # ------------------------------------------------------------------ a step

    def train_step(
        self,
        batch: TrainBatch,
        *,
        position: StepPosition | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Trains on a batch, from `position` on when a former process was interrupted in it."""
        started = time.perf_counter()
        self._reference_logprobs.clear()
        learning_rate = learning_rate_at(batch.step, self._config)
        at = position or StepPosition()
        completed = self._complete(batch, at, should_stop)
        if completed is None:
            return self._result(at, learning_rate, started, finished=False)
        batch, at = completed
        size, count = self._config.batch_size, len(batch.sequences)
        for epoch in range(at.epoch, self._config.update_epochs):
            if not at.order:
                at = replace(at, order=tuple(epoch_order(count, seed=self._config.seed, step=batch.step, epoch=epoch)))
            for number in range(at.next_mini_batch, math.ceil(count / size)):
                rows = at.order[number * size : (number + 1) * size]
                mini_batch = collate(batch.sequences, rows, token_budget=self._pace.budget)
                after = self._mini_batch(batch, mini_batch, at, learning_rate, should_stop)
                if after is None:
                    return self._result(at, learning_rate, started, finished=False)
                at = replace(after, next_mini_batch=number + 1)
            at = replace(at, epoch=epoch + 1, order=(), next_mini_batch=0)
        return self._result(at, learning_rate, started, finished=True)

    def _complete(
        self, batch: TrainBatch, at: StepPosition, should_stop: Callable[[], bool]
    ) -> tuple[TrainBatch, StepPosition] | None:
        """Fills in the log-probabilities that senders left out; None when asked to stop. Costs a forward pass of them.

        Scored are the micro-batches of the first epoch, so that rounding is the same as in the pass that learns.
        """
        missing = {row for row, sequence in enumerate(batch.sequences) if sequence.rollout.logprobs is None}
        if missing and not at.recomputed:
            found: dict[int, np.ndarray] = {}
            order = epoch_order(len(batch.sequences), seed=self._config.seed, step=batch.step, epoch=0)
            for start in range(0, len(order), self._config.batch_size):
                rows = order[start : start + self._config.batch_size]
                for micro_batch in collate(batch.sequences, rows, token_budget=self._pace.budget).micro_batches:
                    if should_stop():
                        return None
                    if not missing.isdisjoint(micro_batch.rows):
                        found |= self._scores(micro_batch)
            at = replace(at, recomputed=tuple(tuple(found[row].tolist()) for row in sorted(missing)))
        sequences = list(batch.sequences)
        for row, values in zip(sorted(missing), at.recomputed, strict=True):
            rollout, remaining = sequences[row].rollout, iter(values)
            spread = (0.0, *(next(remaining) if sampled else 0.0 for sampled in rollout.mask[1:]))
            sequences[row] = replace(sequences[row], rollout=replace(rollout, logprobs=spread))
        return replace(batch, sequences=tuple(sequences)), at

    def _scores(self, micro_batch: MicroBatch) -> dict[int, np.ndarray]:
        """Log-probabilities of each row's trained tokens, by row."""
        logprobs, _ = self.model.score(_token_batch(micro_batch))
        ends = np.cumsum(micro_batch.mask.sum(axis=1))[:-1]
        return dict(zip(micro_batch.rows, np.split(np.array(logprobs), ends), strict=True))

    def _mini_batch(
        self,
        batch: TrainBatch,
        mini_batch: MiniBatch,
        at: StepPosition,
        learning_rate: float,
        should_stop: Callable[[], bool],
    ) -> StepPosition | None:
        """One optimizer update; None when asked to stop before it."""
        gradients: list[mx.array] | None = None
        parts: list[tuple[mx.array, ...]] = []
        names: list[str] = []
        for micro_batch in self._micro_batches(batch, mini_batch):
            if should_stop():
                return None
            if len(micro_batch.positions) == 0:
                continue
            self.model.longest_eval_ms = 0.0
            objective = self._objective(micro_batch, mini_batch, names)
            tokens = _token_batch(micro_batch)
            loss, extras, gradients = self.model.loss_and_gradients(tokens, objective, gradients)
            parts.append((loss, *extras))
            longest_ms, rows = self.model.longest_eval_ms, len(micro_batch.rows)
            self._pace.measured(longest_ms, tokens=micro_batch.inputs.size, rows=rows)
        if gradients is None:
            return at
        losses, values, diff_max, diff_sum = zip(*parts, strict=True)
        totals = dict(zip(["loss", *names], [_total(losses), *np.sum([np.array(v) for v in values], 0)], strict=True))
        if not math.isfinite(totals["loss"]):
            log.warning("non-finite loss: mini-batch skipped", step=batch.step)
            return replace(at, skipped=at.skipped + 1)
        update = self.optimizer.update(gradients, learning_rate)
        if not update.applied:
            log.warning("non-finite gradient: mini-batch skipped", step=batch.step)
            return replace(at, skipped=at.skipped + 1)
        totals |= {"grad_norm": update.grad_norm}
        if update.moved is not None:
            totals |= asdict(update.moved)
        diff = at.logprob_diff
        fresh = sum(int(part.fresh.sum()) for part in mini_batch.micro_batches)
        if at.updates == 0 and at.skipped == 0 and fresh:
            diff = (max(scalar(value) for value in diff_max), _total(diff_sum) / fresh)
        return replace(
            at,
            updates=at.updates + 1,
            totals={name: at.totals.get(name, 0.0) + float(value) for name, value in totals.items()},
            logprob_diff=diff,
            tokens=at.tokens + mini_batch.tokens,
        )

    def _micro_batches(self, batch: TrainBatch, mini_batch: MiniBatch) -> Iterator[MicroBatch]:
        """Those of a mini-batch, cut again where the budget has been lowered in the meantime."""
        waiting = list(reversed(mini_batch.micro_batches))
        while waiting:
            micro_batch = waiting.pop()
            if micro_batch.inputs.size > self._pace.budget and len(micro_batch.rows) > 1:
                smaller = collate(batch.sequences, micro_batch.rows, token_budget=self._pace.budget)
                waiting += reversed(smaller.micro_batches)
            else:
                yield micro_batch

    def _objective(self, micro_batch: MicroBatch, mini_batch: MiniBatch, names: list[str]) -> Any:
        """Scores [N] → (loss, (metrics [K], max and sum of |logprobs - rollout_logprobs| of fresh tokens))."""
        scatter = mx.array(micro_batch.scatter)
        mask, fresh = mx.array(micro_batch.mask), mx.array(micro_batch.fresh)
        rollout_logprobs = mx.array(micro_batch.rollout_logprobs)
        advantages = mx.array(micro_batch.advantages)
        reference = self._reference(micro_batch) if self.algorithm.needs_reference else None

        def spread(scores: mx.array) -> mx.array:
            return mx.concatenate([scores, mx.zeros((1,))])[scatter]

        def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
            rows = spread(logprobs)
            inputs = LossInputs(
                logprobs=rows,
                rollout_logprobs=rollout_logprobs,
                advantages=advantages,
                mask=mask,
                token_normalizer=float(mini_batch.tokens),
                sequence_normalizer=float(mini_batch.sequences),
                ref_logprobs=None if reference is None else spread(reference),
                entropy=spread(entropy),
            )
            outputs = self.algorithm.loss(inputs)
            names[:] = sorted(outputs.metrics)
            difference = mx.where(fresh, mx.abs(mx.stop_gradient(rows) - rollout_logprobs), 0.0)
            metrics = mx.stack([mx.stop_gradient(outputs.metrics[name]) for name in names])
            return outputs.loss, (metrics, difference.max(), difference.sum())

        return objective

    def _reference(self, micro_batch: MicroBatch) -> mx.array:
        """Reference log-probabilities [N]; computed once a step for each sequence, whatever the number of epochs."""
        cache = self._reference_logprobs
        if any(row not in cache for row in micro_batch.rows):
            with self.policy.reference():
                cache.update(self._scores(micro_batch))
        return mx.array(np.concatenate([cache[row] for row in micro_batch.rows]))

    def _result(self, at: StepPosition, learning_rate: float, started: float, *, finished: bool) -> StepResult:
        known: dict[str, float | None] = {name: total / at.updates for name, total in at.totals.items()}
        diff_max, diff_mean = at.logprob_diff or (None, None)
        metrics = dict.fromkeys(MEASURED) | known
        metrics |= {
            "learning_rate": learning_rate,
            "logprob_diff_max": diff_max,
            "logprob_diff_mean": diff_mean,
            "tokens": at.tokens,
            "optimizer_updates": at.updates,
            "skipped_steps": at.skipped,
        }
        return StepResult(finished, at, metrics, time.perf_counter() - started)


def _token_batch(micro_batch: MicroBatch) -> TokenBatch:
    temperatures = micro_batch.temperatures
    same = float(temperatures[0]) if len(temperatures) and (temperatures == temperatures[0]).all() else None
    return TokenBatch(
        inputs=mx.array(micro_batch.inputs),
        positions=mx.array(micro_batch.positions),
        targets=mx.array(micro_batch.targets),
        temperature=mx.array(temperatures) if same is None else same,
    )


def _total(values: Sequence[mx.array]) -> float:
    return math.fsum(scalar(value) for value in values)
