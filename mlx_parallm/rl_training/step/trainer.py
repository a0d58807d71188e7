"""Trainer: TrainBatch → optimizer updates. Blind to the algorithm, which is a loss and an advantage.

    step = prepare + update_epochs × mini-batches (one optimizer update each) × micro-batches (one backward pass each)

*Prepare*: before the first update of a step the batch is scored once, as far as the algorithm or the sampler correction
needs it: the policy that the step starts from, its values, the reference. Sequences that came without log-probabilities
are scored too: that policy stands in for the one that sampled. These scores stay fixed over mini-batches and epochs,
and `prepare.prepare` makes everything else that a loss reads out of them.

A mini-batch is normalised by its own token count over all its micro-batches, so how it is cut changes nothing. A
mini-batch with a non-finite loss or gradient is skipped and counted. Training stops between two micro-batches when it
is asked to; what the mini-batch in work had gathered is dropped, and `StepPosition` says where to go on.

No host sync beyond the evaluations of the backward pass: numbers are read once a mini-batch.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import structlog

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.losses.advantages import Estimator
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.collate import MicroBatch, MiniBatch, collate, epoch_order
from mlx_parallm.rl_training.step.eval_budget import EvalPace
from mlx_parallm.rl_training.step.objective import make_objective, mismatch, token_batch
from mlx_parallm.rl_training.step.optimizer import PolicyOptimizer, learning_rate_at
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.prepare import (
    Finish,
    PreparedBatch,
    Scores,
    adapted_coefficient,
    prepare,
    token_index,
)
from mlx_parallm.rl_training.step.ranks import ALONE, Ranks
from mlx_parallm.rl_training.step.sampler_correction import sampler_correction
from mlx_parallm.rl_training.step.step_position import StepPosition
from mlx_parallm.types import Rollout

MEASURED = (
    *("loss", "kl", "entropy", "clip_fraction", "ratio_mean", "grad_norm"),
    *("update_norm", "weight_norm", "weights_moved"),
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Algorithm:
    """All that an algorithm is, for the trainer.

    `advantages`: rewards of one group → one number each, None = nothing to learn. `finish`: a step over the whole batch
    (whitening, GAE). `needs_…`: what is scored before the step's first update. `on_data`: it learns from given texts,
    which nothing sampled. `rows_per_example`: consecutive sequences that only make sense together (2: a pair).
    `stop_kl`: a mini-batch whose metric approx_kl is above it is not applied, and ends the updates of the step.
    `entropy_slope`: whether the loss depends on the entropy; without, the head is computed once.
    """

    name: str
    loss: Callable[[LossInputs], LossOutputs]
    advantages: Estimator
    needs_reference: bool = False
    needs_values: bool = False
    finish: Finish | None = None
    stop_kl: float | None = None
    on_data: bool = False
    rows_per_example: int = 1
    entropy_slope: bool = True


@dataclass(frozen=True)
class StepResult:
    """`finished`: false when it was asked to stop. `metrics`: means over the step's mini-batches, None = not known."""

    finished: bool
    position: StepPosition
    metrics: dict[str, float | None]
    seconds: float


@dataclass(frozen=True)
class Sums:
    """Of a mini-batch, over its micro-batches. `gradients`: in the order of `policy.slots`; None without a token."""

    gradients: list[mx.array] | None
    totals: dict[str, float]  # the loss and its metrics
    mismatch: tuple[float, float, float] | None


class Trainer:
    """Owns the optimizer. One thread's, the one that owns the policy's tree.

    `between_blocks` is called after each evaluation of a few blocks (the serving thread's turn).
    `ranks`: the processes that share this training.
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        config: RLTrainingConfig,
        algorithm: Algorithm,
        *,
        between_blocks: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.policy, self.algorithm, self._config = policy, algorithm, config
        self.ranks = ranks
        self.model = BlockwiseModel(policy.model, blocks_per_eval=config.blocks_per_eval, between_blocks=between_blocks)
        if self.model.fallback and config.blocks_per_eval:
            log.info("not trained block by block", reason=self.model.fallback)
        else:
            if not self.model.shares_prompts:
                log.info("prompts of a group are computed once a row", reason=self.model.unshared)
            if config.packing and not self.model.packs_rows:
                log.info("sequences are not packed", reason=self.model.unpacked)
        self.optimizer = PolicyOptimizer(policy.slots, config)
        self._pace = EvalPace(config)
        self._kl_coefficient = config.kl_beta
        self._correction = None if algorithm.on_data else sampler_correction(config, policy.model)
        if self._correction is not None:
            own = asdict(self._correction)
            log.info("sampler correction", weight_of=own.pop("level"), **own)  # a log line has a level of its own
        if config.lora.dropout > 0:
            log.warning("lora.dropout is off in RL: every pass yields a log-probability that is compared")

    def state(self) -> dict[str, Any]:
        """What lasts from step to step besides weights and optimizer, as JSON."""
        return {"kl_coefficient": self._kl_coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._config.kl_target is not None:  # else the configuration alone says it, also after a resume
            self._kl_coefficient = state.get("kl_coefficient", self._kl_coefficient)

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Of each rollout's sampled tokens ([N], the first token of a sequence left out), under today's weights."""
        return [scores[0] for scores in self.token_scores(rollouts)]

    def token_scores(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Log-probabilities, entropies (nats) and, with a value head, values of the same tokens: [2 or 3, N]."""
        sequences = [TrainSequence(rollout, (0.0,) * len(rollout.tokens), fresh=False) for rollout in rollouts]
        found: dict[int, np.ndarray] = {}
        for micro_batch in self._collate(sequences, range(len(sequences))).micro_batches:
            ends = np.cumsum(micro_batch.mask.sum(axis=1))[:-1]
            scores = np.stack([np.array(part) for part in self.model.score(token_batch(micro_batch))])
            found |= dict(zip(micro_batch.rows, np.split(scores, ends, axis=1), strict=True))
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
        learning_rate = learning_rate_at(batch.step, self._config)
        at = position or StepPosition()
        scores = self._score_batch(batch, at, should_stop)
        if scores is None:
            return self._result(at, None, learning_rate, started, finished=False)
        at, prepared = replace(at, scores=scores), self._prepare(batch, scores)
        for epoch in range(at.epoch, self._config.update_epochs):
            at = replace(at, order=at.order or self._order(batch, epoch))
            for number in range(at.next_mini_batch, math.ceil(len(at.order) / self._config.batch_size)):
                mini_batch = self._nth_mini_batch(batch, at.order, number)
                after = self._mini_batch(batch, prepared, mini_batch, at, learning_rate, should_stop)
                if after is None:
                    return self._result(at, prepared, learning_rate, started, finished=False)
                at = replace(after, next_mini_batch=number + 1)
            at = replace(at, epoch=epoch + 1, order=(), next_mini_batch=0)
        result = self._result(at, prepared, learning_rate, started, finished=True)
        self._adapt(prepared)
        self.policy.update_reference(batch.step)
        return result

    def _order(self, batch: TrainBatch, epoch: int) -> tuple[int, ...]:
        examples = len(batch.sequences) // self.algorithm.rows_per_example
        return tuple(epoch_order(examples, seed=self._config.seed, step=batch.step, epoch=epoch))

    def _nth_mini_batch(self, batch: TrainBatch, order: Sequence[int], number: int) -> MiniBatch:
        size, each = self._config.batch_size, self.algorithm.rows_per_example
        chosen = order[number * size : (number + 1) * size]
        rows = [each * example + row for example in chosen for row in range(each)]
        whole = self._collate(batch.sequences, rows, together=each)
        budget = self.ranks.budget(self._pace.budget, sum(part.tokens for part in whole.micro_batches))
        if budget == self._pace.budget:
            return whole
        return self._collate(batch.sequences, rows, together=each, budget=budget)

    def _collate(
        self, sequences: Sequence[TrainSequence], rows: Sequence[int], *, together: int = 1, budget: int | None = None
    ) -> MiniBatch:
        return collate(
            sequences,
            rows,
            token_budget=budget or self._pace.budget,
            together=together,
            share_prompts=self.model.shares_prompts,
            packing=self._config.packing and self.model.packs_rows,
        )

    # ------------------------------------------------------------------ before the first update

    def _score_batch(
        self, batch: TrainBatch, at: StepPosition, should_stop: Callable[[], bool]
    ) -> dict[str, np.ndarray] | None:
        """The forward passes that this step needs, as columns (`prepare.Scores`); None when asked to stop.

        An interrupted step has them already, but for those that a changed configuration asks for.
        """
        scores, rows = dict(at.scores), set(range(len(batch.sequences)))
        needs_values, needs_reference = self.algorithm.needs_values, self.algorithm.needs_reference
        everything = needs_values or self._correction is not None
        silent = {row for row in rows if batch.sequences[row].rollout.logprobs is None}
        own, name = (rows, "old_logprobs") if everything else (silent, "stand_ins")
        if (everything or silent) and name not in scores and "old_logprobs" not in scores:
            if at.updates:
                log.warning("scored after updates of the same step: the configuration was changed", step=batch.step)
            columns = self._score_rows(batch, own, should_stop)
            if columns is None:
                return None
            scores |= {name: columns[0]} | ({"old_values": columns[2]} if needs_values else {})
        if needs_reference and "ref_logprobs" not in scores:
            with self.policy.reference():
                columns = self._score_rows(batch, rows, should_stop)
            if columns is None:
                return None
            scores["ref_logprobs"] = columns[0]
        return scores

    def _score_rows(self, batch: TrainBatch, rows: set[int], should_stop: Callable[[], bool]) -> np.ndarray | None:
        """Columns of what the model gives for each token; 0 outside of `rows`.

        Scored are the micro-batches of the first epoch, so that rounding is the same as in the pass that learns.
        """
        lengths = [sum(sequence.rollout.mask[1:]) for sequence in batch.sequences]
        columns = np.zeros((3 if self.algorithm.needs_values else 2, sum(lengths)), np.float32)
        order, stopped = self._order(batch, 0), False
        numbers = range(math.ceil(len(order) / self._config.batch_size))
        parts = [part for number in numbers for part in self._nth_mini_batch(batch, order, number).micro_batches]
        parts = [part for part in parts if len(part.positions) and not rows.isdisjoint(part.rows)]
        for micro_batch in self.ranks.share(parts, lambda part: part.tokens):
            if stopped := should_stop():
                break
            found = [np.array(part) for part in self.model.score(token_batch(micro_batch))]
            columns[:, token_index(lengths, micro_batch.rows)] = np.stack(found[: len(columns)])
        everyone = self.ranks.exchange(columns, stop=stopped)
        return None if everyone is None else np.sum(everyone, axis=0)

    def _prepare(self, batch: TrainBatch, scores: Scores) -> PreparedBatch:
        return prepare(
            batch,
            scores,
            correction=self._correction,
            kl_penalty=self._kl_coefficient if self._config.kl_in == "reward" else None,
            finish=self.algorithm.finish,
        )

    def _adapt(self, prepared: PreparedBatch) -> None:
        """The coefficient of the KL for the next step."""
        target, horizon = self._config.kl_target, self._config.kl_horizon
        if target is not None and prepared.kl is not None:
            self._kl_coefficient = adapted_coefficient(
                self._kl_coefficient, prepared.kl, target=target, horizon=horizon, sequences=len(prepared.lengths)
            )

    # ------------------------------------------------------------------ an update

    def _mini_batch(
        self,
        batch: TrainBatch,
        prepared: PreparedBatch,
        mini_batch: MiniBatch,
        at: StepPosition,
        learning_rate: float,
        should_stop: Callable[[], bool],
    ) -> StepPosition | None:
        """One optimizer update; None when asked to stop before it."""
        if at.left_out:
            return replace(at, left_out=at.left_out + 1)
        sums = self._gradients(batch, prepared, mini_batch, should_stop)
        if sums is None or sums.gradients is None:
            return None if sums is None else at
        if not math.isfinite(sums.totals["loss"]):
            log.warning("non-finite loss: mini-batch skipped", step=batch.step)
            return replace(at, skipped=at.skipped + 1)
        first = at.updates == 0 and at.skipped == 0
        if self.algorithm.stop_kl is not None and (kl := sums.totals["approx_kl"]) > self.algorithm.stop_kl:
            return replace(at, left_out=1, stopped_at_kl=kl, mismatch=sums.mismatch if first else at.mismatch)
        update = self.optimizer.update(sums.gradients, learning_rate)
        if not update.applied:
            log.warning("non-finite gradient: mini-batch skipped", step=batch.step)
            return replace(at, skipped=at.skipped + 1)
        totals = sums.totals | {"grad_norm": update.grad_norm}
        if update.moved is not None:
            totals |= asdict(update.moved)
        return replace(
            at,
            updates=at.updates + 1,
            totals={name: at.totals.get(name, 0.0) + float(value) for name, value in totals.items()},
            mismatch=sums.mismatch if first else at.mismatch,
            tokens=at.tokens + mini_batch.tokens,
        )

    def _gradients(
        self, batch: TrainBatch, prepared: PreparedBatch, mini_batch: MiniBatch, should_stop: Callable[[], bool]
    ) -> Sums | None:
        """Backward passes of all micro-batches; None when asked to stop between two of them."""
        gradients: list[mx.array] | None = None
        parts: list[tuple[mx.array, ...]] = []
        names: list[str] = []
        stopped = False
        for micro_batch in self._micro_batches(batch, mini_batch):
            if stopped := should_stop():
                break
            if len(micro_batch.positions) == 0:
                continue
            self.model.longest_eval_ms = 0.0
            objective = make_objective(
                self.algorithm.loss,
                prepared,
                micro_batch,
                mini_batch,
                kl_beta=self._kl_coefficient if self._config.kl_in == "loss" else 0.0,
                max_length=float(self._config.atropos.max_token_length),
                constants=batch.constants,
                names=names,
            )
            tokens = token_batch(micro_batch, entropy_slope=self.algorithm.entropy_slope)
            loss, extras, gradients = self.model.loss_and_gradients(tokens, objective, gradients)
            parts.append((loss, *extras))
            longest_ms, rows = self.model.longest_eval_ms, len(micro_batch.rows)
            self._pace.measured(longest_ms, tokens=micro_batch.tokens, rows=rows)
        own = [(names, *(np.array(number) for number in part)) for part in parts]
        everyone = self.ranks.exchange((self._pace.budget, own), stop=stopped)
        return None if everyone is None else self._sums(gradients, everyone)

    def _sums(self, gradients: list[mx.array] | None, everyone: list[tuple[int, list[Any]]]) -> Sums | None:
        """Over all ranks, from the numbers of each and this one's gradients; None when a rank is gone."""
        self._pace.budget = min(budget for budget, _ in everyone)  # one cut everywhere
        parts = [part for _, own in everyone for part in own]
        if not parts:
            return Sums(None, {}, None)
        names, losses, values, mismatches = zip(*parts, strict=True)
        totals = {name: float(total) for name, total in zip(names[0], np.sum(values, 0), strict=True)}
        summed = self.ranks.sum(gradients or [mx.zeros(array.shape) for array in self.policy.slots.read()])
        if summed is None:
            return None
        return Sums(summed, {"loss": math.fsum(losses)} | totals, mismatch(np.stack(mismatches)))

    def _micro_batches(self, batch: TrainBatch, mini_batch: MiniBatch) -> Iterator[MicroBatch]:
        """This rank's of a mini-batch, cut again where the budget has been lowered in the meantime."""
        each = self.algorithm.rows_per_example
        waiting = list(reversed(self.ranks.share(mini_batch.micro_batches, lambda part: part.tokens)))
        while waiting:
            micro_batch = waiting.pop()
            if micro_batch.tokens > self._pace.budget and len(micro_batch.rows) > each:
                waiting += reversed(self._collate(batch.sequences, micro_batch.rows, together=each).micro_batches)
            else:
                yield micro_batch

    def _result(
        self,
        at: StepPosition,
        prepared: PreparedBatch | None,
        learning_rate: float,
        started: float,
        *,
        finished: bool,
    ) -> StepResult:
        known: dict[str, float | None] = {name: total / at.updates for name, total in at.totals.items()}
        diff_max, diff_mean, mismatch_kl = at.mismatch or (None, None, None)
        metrics = dict.fromkeys(MEASURED) | known
        metrics |= {
            "learning_rate": learning_rate,
            "logprob_diff_max": diff_max,
            "logprob_diff_mean": diff_mean,
            "mismatch_kl": mismatch_kl,
            **(prepared.metrics if prepared else {}),
            "sampler_weights_cut": prepared.weights_cut if prepared else None,
            "kl_coefficient": self._kl_coefficient if self._config.kl_beta > 0 else None,
            "tokens": at.tokens,
            "optimizer_updates": at.updates,
            "skipped_steps": at.skipped,
        }
        if self.algorithm.stop_kl is not None:
            metrics |= {"mini_batches_left_out": at.left_out, "stopped_at_kl": at.stopped_at_kl}
        return StepResult(finished, at, metrics, time.perf_counter() - started)
