"""Trainer: TrainBatch → optimizer updates. Blind to the algorithm, which is a loss and an
advantage.

    step = prepare + update_epochs × mini-batches (one optimizer update each) × micro-batches (one
    backward pass each)

    collate     rows → a mini-batch, cut into micro-batches              collate.py
    score       the forward passes that the step needs before its first update
    prepare     scores → the columns that a loss reads                   prepare.py
    accumulate  forward and backward of a mini-batch; its gradients are added to those of earlier
                calls
    apply       the optimizer's update with the accumulated gradients    optimizer.py

`train_step` calls these in that order. A caller with its own loop may call `accumulate`
several times before one `apply`: everything is a sum, and the normalizers are the caller's.

*Scores*: before the first update of a step the batch is scored once, as far as the algorithm or the
sampler correction needs it: the policy that the step starts from, its values, the reference.
Sequences that came without log-probabilities are scored too: that policy stands in for the one that
sampled. These scores stay fixed over mini-batches and epochs.

A mini-batch is normalised by its own token count over all its micro-batches, so how it is cut
changes nothing. A mini-batch with a non-finite loss or gradient is skipped and counted. On a stop
request training ends between two micro-batches; the gradients of the current mini-batch are
dropped, and `StepPosition` says where to continue.

No host sync beyond the evaluations of the backward pass: numbers are read once a mini-batch.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
import structlog

from mlx_parallm.config.training import LearningSection
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.blocks_per_eval import blocks_of
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.embedding_noise import EmbeddingNoise
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.support import layers_by_token
from mlx_parallm.rl_training.step.algorithms import Algorithm
from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.coefficients import Coefficients
from mlx_parallm.rl_training.step.collate import (
    MicroBatch,
    MicroBatchBudget,
    MiniBatch,
    collate,
    epoch_order,
)
from mlx_parallm.rl_training.step.companion import StepCompanion
from mlx_parallm.rl_training.step.companions import companions_of
from mlx_parallm.rl_training.step.gradient_proof import GradientProof, proved_scores
from mlx_parallm.rl_training.step.learning_rate import learning_rate_at
from mlx_parallm.rl_training.step.optimizer import (
    PolicyOptimizer,
    Update,
)
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.prepare import (
    BatchLoss,
    MiniBatchLoss,
    Mismatch,
    PreparedBatch,
    Scores,
    StepPosition,
    StepTokens,
    mismatch,
    prepare,
    sampler_correction,
)
from mlx_parallm.rl_training.step.ranks import ALONE, Ranks, RankTask
from mlx_parallm.types import Rollout

MEASURED = (
    "loss",
    "kl",
    "entropy",
    "clip_fraction",
    "ratio_mean",
    "grad_norm",
    "update_norm",
    "weight_norm",
    "weights_moved",
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class StepResult:
    """`finished`: false after a stop request. `metrics`: means over the step's mini-batches,
    None = not measured."""

    finished: bool
    position: StepPosition
    metrics: dict[str, float | None]
    seconds: float


@dataclass(frozen=True)
class Sums:
    """Numbers of a mini-batch, over its micro-batches and all ranks. `totals`: the loss and its
    metrics; empty if the mini-batch has no trained token."""

    totals: dict[str, float]
    mismatch: Mismatch | None


class Trainer:
    """Owns the optimizer. Used by one thread, the one that owns the policy's tree.

    `between_blocks` is called after each evaluation of a few blocks (the serving thread's turn).
    `eval_bytes`: as in `models.blocks_per_eval.blocks_of`. `ranks`: the processes that share this
    training. `companions`: of another trainer of this policy; None: `companions_of` the policy.
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        options: LearningSection,
        algorithm: Algorithm,
        *,
        eval_bytes: int | None = None,
        between_blocks: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
        companions: Mapping[str, StepCompanion] | None = None,
    ) -> None:
        # by name; more may come before the first step
        self.companions = dict(
            companions_of(policy, between_blocks) if companions is None else companions
        )
        self.policy, self.algorithm, self.options = policy, algorithm, options
        self.ranks, self.eval_bytes = ranks, eval_bytes
        blocks = blocks_of(options.blocks_per_eval, policy.model_config, eval_bytes)
        self.model = BlockwiseModel(
            policy.model,
            blocks_per_eval=blocks,
            between_blocks=between_blocks,
            features=next(filter(None, (each.gradient for each in self._carried)), None),
        )
        for companion in self._carried:
            companion.attach(self.model)
        alpha = options.preference.neftune_alpha if algorithm.on_data else 0.0
        self._noise = EmbeddingNoise(policy.model, alpha) if alpha else None
        self._between_blocks = between_blocks
        for layer in layers_by_token(policy.model):
            reason = "its recurrence has no chunks here: its graph visits one token after another"
            log.warning("a layer trains slowly", layer=layer, reason=reason)
        if self.model.fallback and options.blocks_per_eval != 0:
            log.info("not trained block by block", reason=self.model.fallback)
        else:
            if not self.model.shares_prompts:
                log.info("prompts of a group are computed once a row", reason=self.model.unshared)
            if options.packing and not self.model.packs_rows:
                log.info("sequences are not packed", reason=self.model.unpacked)
            if not self.model.merges_rows:
                log.info(
                    "turns of an episode are not computed as a tree", reason=self.model.unmerged
                )
        self.optimizer = PolicyOptimizer(policy.slots, options)
        # tokens of the newest step; an interrupted one knows its last part
        self.step_tokens: StepTokens | None = None
        # accumulated since the last update, in the order of the slots
        self.gradients: list[mx.array] | None = None
        self._in_step = False
        self._proof = GradientProof(self.model)
        self._budget = MicroBatchBudget(*options.eval_limits, blocks)
        self._coefficients = Coefficients(options)
        self._correction = (
            None
            if algorithm.on_data or algorithm.pairs or algorithm.singles
            else sampler_correction(options, policy.model)
        )
        if self._correction is not None:
            fields = asdict(self._correction)
            # a log line has a level already
            log.info("sampler correction", weight_of=fields.pop("level"), **fields)
        if options.lora.dropout > 0 and not algorithm.on_data:
            log.warning(
                "lora.dropout is off in RL: every pass yields a log-probability that is compared"
            )

    def with_algorithm(self, algorithm: Algorithm, *, sequences: int) -> "Trainer":
        """The same trainer, whose steps are one update of so many sequences by another
        algorithm's loss."""
        other = copy.copy(self)
        other.algorithm = algorithm
        changes = {"update_epochs": 1, "batch_size": max(sequences, 1)}
        other.options = self.options.model_copy(update=changes)
        return other

    def change(self, values: Mapping[str, float]) -> None:
        """Take other values of `settings`, which are valid together, from the next step on. Other
        keys of [rl_training] are not the trainer's."""
        taken = {key: value for key, value in values.items() if key in self.settings()}
        self.options = self.options.model_copy(update=taken)
        if "kl_beta" in values:
            self._coefficients.kl = self.options.kl_beta

    def settings(self) -> dict[str, float]:
        """Return the values that `change` may replace, by their keys of [rl_training]."""
        return {"learning_rate": self.options.learning_rate, "kl_beta": self.options.kl_beta}

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the state that lasts from step to step, besides weights and optimizer; as JSON."""
        return self._coefficients.state(self.options)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what `state()` returned."""
        self._coefficients.restore(state, self.options)

    def arrays(self) -> dict[str, mx.array]:
        """Every array that a step computes with and that a checkpoint has, or that it is measured
        against."""
        names, held = self.policy.slots.names, self.policy.held
        arrays = {
            f"weights.{name}": array for name, array in zip(held.names, held.read(), strict=True)
        }
        arrays |= {f"optimizer.{name}": array for name, array in self.optimizer.state().items()}
        reference = self.policy.reference_arrays or []
        return arrays | {
            f"reference.{name}": array for name, array in zip(names, reference, strict=False)
        }

    def restore_arrays(self, arrays: Mapping[str, mx.array]) -> None:
        """Load what `arrays()` returned, evaluated."""

        def part(kind: str) -> dict[str, mx.array]:
            return {
                name.removeprefix(kind): array
                for name, array in arrays.items()
                if name.startswith(kind)
            }

        self.policy.held.write(list(part("weights.").values()))
        self.optimizer.restore(part("optimizer."))
        if self.policy.reference_arrays is not None:
            self.policy.reference_arrays = list(part("reference.").values())

    # ------------------------------------------------------------------ forward only

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Log-probabilities of each rollout's sampled tokens ([N], the first token of a sequence
        left out)."""
        return [scores[0] for scores in self.token_scores(rollouts)]

    def log_ratios(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return log π(y|x) - log π_ref(y|x) of each rollout's sampled tokens."""
        now = self.logprobs(rollouts)
        with self.policy.reference():
            then = self.logprobs(rollouts)
        return [math.fsum(a.astype(np.float64) - b) for a, b in zip(now, then, strict=True)]

    def token_scores(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Log-probabilities, entropies (nats), what `Algorithm.compared` measures and, with a value
        head, values of the same tokens: [2 to 4, N]."""
        sequences = [
            TrainSequence(rollout, (0.0,) * len(rollout.tokens), fresh=False)
            for rollout in rollouts
        ]
        by_row: dict[int, np.ndarray] = {}
        self._make_room()
        for micro_batch in self.collate(sequences, range(len(sequences)), together=1).micro_batches:
            ends = np.cumsum(micro_batch.mask.sum(axis=1))[:-1]
            with self.seeing(micro_batch):
                scores = np.stack(self._scores_of(micro_batch, replay=True, measures=True))
            by_row |= dict(zip(micro_batch.rows, np.split(scores, ends, axis=1), strict=True))
        return [by_row[row] for row in range(len(sequences))]

    def evaluate(
        self, batch: TrainBatch, scores: Scores
    ) -> tuple[float, Mapping[str, float], Scores]:
        """The loss of a batch that is one mini-batch, its metrics, and its scores; nothing is
        differentiated.

        `scores`: those of an earlier call, which are not made again.
        """
        self._make_room()
        complete = self._score(batch, StepPosition(scores=scores), lambda: False)
        assert complete is not None, "nothing asks to stop"
        mini_batch = self._mini_batch(batch, self._order(batch, 0), 0)
        loss = self._loss(batch, self._prepare(batch, complete), mini_batch)
        total, metrics = 0.0, dict[str, float]()
        for micro_batch in mini_batch.micro_batches:
            if not len(micro_batch.positions):
                continue
            with self.seeing(micro_batch):
                scored = self.model.score(
                    micro_batch.token_batch(measure=loss.measure(micro_batch), replay=True)
                )
            value, (numbers, *_) = loss.objective(micro_batch)(*scored)
            total += scalar(value)
            named = zip(loss.metric_names, np.array(numbers).tolist(), strict=True)
            metrics = {name: metrics.get(name, 0.0) + number for name, number in named}
        return total, metrics, complete

    @property
    def _carried(self) -> Iterable[StepCompanion]:
        return self.companions.values()

    def _make_room(self) -> None:
        """Forget what earlier passes needed, unless a step is under way: it continues with what it
        has."""
        for companion in () if self._in_step else self._carried:
            companion.make_room()

    # ------------------------------------------------------------------ a step

    def ask_companions(
        self,
        batch: TrainBatch,
        position: StepPosition | None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepPosition | None:
        """Return the position with the scores of the companion that the algorithm learns from, if
        there is one; those that it has are kept. None after a stop request. Raises ConfigError: it
        is not there."""
        at, signal = position or StepPosition(), self.algorithm.signal
        if signal is None or signal.column in at.scores:
            return at
        if signal.companion not in self.companions:
            raise ConfigError(signal.missing)
        scores = self.companions[signal.companion].score(batch, should_stop)
        return None if scores is None else replace(at, scores={**at.scores, **scores})

    def announce_step(self, batch: TrainBatch, position: StepPosition | None = None) -> None:
        """Make the other ranks begin the same step from the same arrays, before `train_step`.
        Raises RankLostError."""
        self.ranks.announce_step(RankTask(self.settings(), batch, position, self.state()), self)

    def train_step(
        self,
        batch: TrainBatch,
        *,
        position: StepPosition | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Train on a batch, from `position` on if an earlier process was interrupted in it."""
        self._make_room()
        self._in_step = True
        try:
            return self._train_step(batch, position or StepPosition(), should_stop)
        finally:
            self._in_step = False

    def _train_step(
        self, batch: TrainBatch, at: StepPosition, should_stop: Callable[[], bool]
    ) -> StepResult:
        started = time.perf_counter()
        self.drop()
        for companion in self._carried:
            companion.begin_step()

        def stopping() -> bool:
            return should_stop() or bool(self.ranks.lost)

        learning_rate = self._learning_rate(batch, at)
        scored_position = self.ask_companions(batch, at, stopping)
        scores = None if scored_position is None else self._score(batch, scored_position, stopping)
        if scored_position is None or scores is None:
            return self._result(batch, at, None, learning_rate, started, finished=False)
        at, prepared = replace(at, scores=scores), self._prepare(batch, scores)
        if self.algorithm.constants is not None:
            constants = self.algorithm.constants(batch, self.log_ratios)
            batch = replace(batch, constants=constants)
        self.step_tokens = None if self.algorithm.on_data else prepared.step_tokens()
        for epoch in range(at.epoch, self.options.update_epochs):
            at = replace(at, order=at.order or self._order(batch, epoch))
            for number in range(
                at.next_mini_batch, math.ceil(len(at.order) / self._per_update(len(at.order)))
            ):
                learning_rate = self._learning_rate(batch, replace(at, next_mini_batch=number))
                after = self._update(batch, prepared, at, number, learning_rate, stopping)
                if after is None:
                    return self._result(batch, at, prepared, learning_rate, started, finished=False)
                at = replace(after, next_mini_batch=number + 1)
            at = replace(at, epoch=epoch + 1, order=(), next_mini_batch=0)
        result = self._result(batch, at, prepared, learning_rate, started, finished=True)
        for companion in self._carried:
            result.metrics.update(companion.exchanged(self.ranks.exchange))
        self._finish_step(batch.step, prepared)
        return result

    def _learning_rate(self, batch: TrainBatch, at: StepPosition) -> float:
        """Return the learning rate of the update at this position."""
        examples = len(batch.sequences) // self.algorithm.rows_per_example
        in_epoch = math.ceil(examples / self._per_update(examples))
        updates = max(self.options.update_epochs * in_epoch, 1)
        update = min(at.epoch * in_epoch + at.next_mini_batch, updates - 1)
        return learning_rate_at(batch.step, self.options, update=update, updates=updates)

    def _update(
        self,
        batch: TrainBatch,
        prepared: PreparedBatch,
        at: StepPosition,
        number: int,
        learning_rate: float,
        should_stop: Callable[[], bool],
    ) -> StepPosition | None:
        """The optimizer update of the n-th mini-batch; None after a stop request."""
        if at.left_out:
            return replace(at, left_out=at.left_out + 1)
        mini_batch = self._mini_batch(batch, at.order, number)
        loss = self._loss(batch, prepared, mini_batch)
        sums = self.accumulate(mini_batch, loss, should_stop)
        if sums is None or not sums.totals:
            return None if sums is None else at
        first = at.updates == 0 and at.skipped == 0 and not self.algorithm.on_data
        skipped = replace(at, skipped=at.skipped + 1)
        if not math.isfinite(sums.totals["loss"]):
            log.warning("non-finite loss: mini-batch skipped", step=batch.step)
            self.drop()
            return skipped
        if (
            self.algorithm.stop_kl is not None
            and (kl := sums.totals["approx_kl"]) > self.algorithm.stop_kl
        ):
            self.drop()
            return replace(
                at, left_out=1, stopped_at_kl=kl, mismatch=sums.mismatch if first else at.mismatch
            )
        update = self.apply(learning_rate, batch.step)
        if update is None:
            return None
        if not update.applied:
            log.warning("non-finite gradient: mini-batch skipped", step=batch.step)
            return skipped
        if self.options.entropy_target is not None:
            self._coefficients.after_update(sums.totals["bonus_entropy"], self.options)
        totals = sums.totals | {"grad_norm": update.grad_norm}
        if update.moved is not None:
            totals |= asdict(update.moved)
        return replace(
            at,
            updates=at.updates + 1,
            totals={
                name: at.totals.get(name, 0.0) + float(value) for name, value in totals.items()
            },
            mismatch=sums.mismatch if first else at.mismatch,
            tokens=at.tokens + mini_batch.tokens,
        )

    def accumulate(
        self,
        mini_batch: MiniBatch,
        loss: MiniBatchLoss,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Sums | None:
        """Forward and backward of a mini-batch. Its gradients are added to those of earlier
        calls, until `apply` or `drop`. None after a stop request between two micro-batches: then
        all of them are dropped. After an exception `gradients` holds those of the micro-batches
        before it too."""
        parts: list[tuple[Any, ...]] = []
        scores: list[tuple[np.ndarray, mx.array, mx.array]] = []
        stopped = False
        for companion in self._carried:
            companion.begin_gradients()
        for micro_batch in self._micro_batches(mini_batch):
            if stopped := should_stop():
                break
            if len(micro_batch.positions) == 0:
                continue
            self.model.longest_eval_ms = 0.0
            tokens = micro_batch.token_batch(
                entropy_slope=self.algorithm.entropy_slope,
                measure=loss.measure(micro_batch),
                replay=True,
            )
            # companions first: what sees has no dropout, so its gradient is that of these features
            with self.seeing(micro_batch), self._perturbed(mini_batch, micro_batch, tokens):
                value, (*extras, logprobs, entropy), self.gradients = self._proof.learned(
                    tokens, loss.objective(micro_batch), self.gradients, fuse=loss.fuse
                )
                self._note_slopes()
            parts.append((value, *extras))
            scores.append((micro_batch.columns, logprobs, entropy))
            self._budget.observe(
                self.model.longest_eval_ms, tokens=micro_batch.tokens, rows=len(micro_batch.rows)
            )
        if not stopped:
            self._pull_back()
        numbers = [
            (list(loss.metric_names), *(np.array(number) for number in part)) for part in parts
        ]
        if self.step_tokens is not None:
            for columns, logprobs, entropy in scores:
                self.step_tokens.record(columns, np.array(logprobs), np.array(entropy))
        everyone = self.ranks.exchange((self._budget.tokens, numbers), stop=stopped)
        if everyone is None:
            self.drop()
            return None
        self._budget.tokens = min(budget for budget, _ in everyone)  # the same cut on every rank
        parts = [part for _, numbers in everyone for part in numbers]
        if not parts:
            return Sums({}, None)
        names, losses, values, mismatches = zip(*parts, strict=True)
        totals = {
            name: float(total) for name, total in zip(names[0], np.sum(values, 0), strict=True)
        }
        return Sums({"loss": math.fsum(losses)} | totals, mismatch(np.stack(mismatches)))

    def _note_slopes(self) -> None:
        """Give companions the gradient of the micro-batch that is seen now."""
        for companion in self._carried:
            companion.add_slopes(self.model.feature_slopes)

    def _pull_back(self) -> None:
        """Add the gradients of what companions are made by, if it is trained."""
        if self.gradients is None:
            return
        for slot, gradient in chain.from_iterable(each.pull_back() for each in self._carried):
            self.gradients[slot] = self.gradients[slot] + gradient
            mx.eval(self.gradients[slot])
            self._between_blocks()

    @contextmanager
    def _perturbed(
        self, mini_batch: MiniBatch, micro_batch: MicroBatch, tokens: TokenBatch
    ) -> Iterator[None]:
        """The adapter's dropout and the embeddings' noise, in training on rows of a file: other
        ones in each update, dropout also for each micro-batch."""
        if not self.algorithm.on_data:
            yield
            return
        seed, rows = [self.options.seed, self.optimizer.updates], micro_batch.rows
        lengths = [len(mini_batch.batch[row].rollout.tokens) for row in rows]
        with (
            self.policy.dropout.drawn_from([*seed, *rows]),
            self._noise.drawn_from(seed, tokens, rows, lengths) if self._noise else nullcontext(),
        ):
            yield

    @contextmanager
    def seeing(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Let a forward or backward pass have what companions give to it."""
        with ExitStack() as entered:
            for companion in self._carried:
                entered.enter_context(companion.seen(micro_batch.inputs))
            yield

    def apply(self, learning_rate: float, step: int | None = None) -> Update | None:
        """One optimizer update with the accumulated gradients of all ranks, which are used up.
        None: a rank is gone. `step`: `PolicyOptimizer.update`."""
        gradients = self.gradients or [mx.zeros(array.shape) for array in self.policy.slots.read()]
        self.drop()
        summed = self.ranks.sum(gradients)
        return None if summed is None else self.optimizer.update(summed, learning_rate, step)

    def drop(self) -> None:
        """Drop the accumulated gradients."""
        self.gradients = None

    def _finish_step(self, step: int, prepared: PreparedBatch) -> None:
        """Adapt the KL's coefficient for the next step, and update a reference that is a moving
        average."""
        self._coefficients.after_step(prepared.kl, len(prepared.lengths), self.options)
        is_ema = self.options.reference == "ema"
        if is_ema and step % self.options.reference_update_every == 0:
            self.policy.blend_reference(self.options.reference_decay)

    # ------------------------------------------------------------------ its parts

    def _order(self, batch: TrainBatch, epoch: int) -> tuple[int, ...]:
        examples = len(batch.sequences) // self.algorithm.rows_per_example
        return tuple(epoch_order(examples, seed=self.options.seed, step=batch.step, epoch=epoch))

    def _per_update(self, examples: int) -> int:
        """Return how many of a step's examples an update takes. A step on rows of a file is one
        update, however many rows its packs have."""
        return max(examples, 1) if self.algorithm.on_data else self.options.batch_size

    def _mini_batch(self, batch: TrainBatch, order: Sequence[int], number: int) -> MiniBatch:
        """The n-th of this order of examples; cut finer if a rank would get no micro-batch."""
        size, each = self._per_update(len(order)), self.algorithm.rows_per_example
        chosen = order[number * size : (number + 1) * size]
        rows = [each * example + row for example in chosen for row in range(each)]
        whole = self.collate(batch.sequences, rows)
        budget = self.ranks.budget(
            self._budget.tokens, sum(part.tokens for part in whole.micro_batches)
        )
        return (
            whole if budget == self._budget.tokens else self.collate(batch.sequences, rows, budget)
        )

    def _micro_batches(self, mini_batch: MiniBatch) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches, cut again if the budget has become smaller in the
        meantime."""
        each = self.algorithm.rows_per_example
        waiting = list(
            reversed(self.ranks.share(mini_batch.micro_batches, lambda part: part.tokens))
        )
        while waiting:
            micro_batch = waiting.pop()
            if micro_batch.tokens > self._budget.tokens and len(micro_batch.rows) > each:
                waiting += reversed(self.collate(mini_batch.batch, micro_batch.rows).micro_batches)
            else:
                yield micro_batch

    def collate(
        self,
        sequences: Sequence[TrainSequence],
        rows: Sequence[int],
        budget: int | None = None,
        *,
        together: int | None = None,
    ) -> MiniBatch:
        """The mini-batch of these rows.

        Args:
            budget: tokens of a micro-batch; default: the largest allowed now.
            together: rows of an example, which stay in one micro-batch; default: the algorithm's.
        """
        for companion in self._carried:
            sequences = companion.admit(sequences)
        chosen = [sequences[row] for row in rows]
        plain = any(companion.wants_rows(chosen) for companion in self._carried)
        shares = not plain and self._noise is None  # noise is each token's own
        return collate(
            sequences,
            rows,
            token_budget=budget or self._budget.tokens,
            together=together or self.algorithm.rows_per_example,
            share_prompts=self.model.shares_prompts and shares,
            merging=self.model.merges_rows and shares,
            packing=self.options.packing and self.model.packs_rows and not plain,
            companions=self._carried,
        )

    def _score(
        self, batch: TrainBatch, at: StepPosition, should_stop: Callable[[], bool]
    ) -> Scores | None:
        """The forward passes that this step needs, as columns; None after a stop request.

        An interrupted step has them already, except those that a changed configuration needs.
        """
        scores, rows = dict(at.scores), set(range(len(batch.sequences)))
        needs_reference = self.algorithm.needs_reference
        needs_values = self.algorithm.needs_values
        needs_entropies = self.algorithm.needs_entropies
        everything = needs_values or needs_entropies or self._correction is not None
        silent = {row for row in rows if batch.sequences[row].rollout.logprobs is None}
        scored, name = (rows, "old_logprobs") if everything else (silent, "stand_ins")
        scored_already = name in scores or "old_logprobs" in scores
        if needs_entropies and "entropies" not in scores:
            scored_already = False
        if (everything or silent) and not scored_already:
            if at.updates:
                log.warning(
                    "scored after updates of the same step: the configuration was changed",
                    step=batch.step,
                )
            columns = self._score_rows(batch, scored, should_stop, replay=True)
            if columns is None:
                return None
            names = (name, "entropies", "old_values")
            wanted = (True, needs_entropies, needs_values)
            fresh = zip(names, wanted, columns, strict=False)
            # what an interrupted step had stays
            scores = {name: column for name, is_wanted, column in fresh if is_wanted} | scores
        if needs_reference and "ref_logprobs" not in scores:
            with self.policy.reference():
                columns = self._score_rows(batch, rows, should_stop)
            if columns is None:
                return None
            scores["ref_logprobs"] = columns[0]
        return scores

    def _score_rows(
        self,
        batch: TrainBatch,
        rows: set[int],
        should_stop: Callable[[], bool],
        replay: bool = False,
    ) -> np.ndarray | None:
        """Columns of the model's scores of each token; 0 outside of `rows`. `replay`: as in
        `MicroBatch.token_batch`.

        The micro-batches are those of the first epoch, so that rounding is the same as in the pass
        that learns.
        """
        tokens = sum(sequence.trained for sequence in batch.sequences)
        columns = np.zeros((3 if self.algorithm.has_values else 2, tokens), np.float32)
        order, stopped = self._order(batch, 0), False
        numbers = range(math.ceil(len(order) / self._per_update(len(order))))
        parts = [
            part
            for number in numbers
            for part in self._mini_batch(batch, order, number).micro_batches
        ]
        parts = [part for part in parts if len(part.positions) and not rows.isdisjoint(part.rows)]
        for micro_batch in self.ranks.share(parts, lambda part: part.tokens):
            if stopped := should_stop():
                break
            with self.seeing(micro_batch):
                scores = self._scores_of(micro_batch, replay)
            columns[:, micro_batch.columns] = np.stack(scores[: len(columns)])
        everyone = self.ranks.exchange(columns, stop=stopped)
        return None if everyone is None else np.sum(everyone, axis=0)

    def _scores_of(
        self, micro_batch: MicroBatch, replay: bool, measures: bool = False
    ) -> list[np.ndarray]:
        compared = self.algorithm.compared if measures else None
        measure = None if compared is None else compared.measure(micro_batch.columns)
        return proved_scores(self.model, micro_batch.token_batch(replay=replay, measure=measure))

    def _prepare(self, batch: TrainBatch, scores: Scores) -> PreparedBatch:
        return prepare(
            batch,
            scores,
            correction=self._correction,
            kl_penalty=self._coefficients.kl if self.options.kl_in == "reward" else None,
            finish=self.algorithm.finish,
            signal=self.algorithm.signal,
            selection=self.algorithm.selection,
            compared=self.algorithm.compared,
        )

    def _loss(self, batch: TrainBatch, prepared: PreparedBatch, mini_batch: MiniBatch) -> BatchLoss:
        """The algorithm's loss as a mean over the mini-batch."""
        return BatchLoss(
            self.algorithm.loss,
            prepared,
            token_normalizer=float(mini_batch.tokens),
            sequence_normalizer=float(mini_batch.sequences),
            kl_beta=self._coefficients.kl if self.options.kl_in == "loss" else 0.0,
            max_length=float(self.options.loss_length),
            constants=batch.constants,
            fuse=self.algorithm.fuse,
            counted_normalizer=prepared.counted_in(mini_batch.micro_batches),
            entropy_weight=self._coefficients.bonus(self.options),
        )

    def _result(
        self,
        batch: TrainBatch,
        at: StepPosition,
        prepared: PreparedBatch | None,
        learning_rate: float,
        started: float,
        *,
        finished: bool,
    ) -> StepResult:
        means: dict[str, float | None] = {
            name: total / at.updates for name, total in at.totals.items()
        }
        diff_max, diff_mean, mismatch_kl, fresh = at.mismatch or (None, None, None, None)
        metrics = dict.fromkeys(MEASURED) | means
        metrics |= {
            "learning_rate": learning_rate,
            "logprob_diff_max": diff_max,
            "logprob_diff_mean": diff_mean,
            "mismatch_kl": mismatch_kl,
            "mismatch_fresh": fresh,
            **(prepared.metrics if prepared else {}),
            "sampler_weights_cut": prepared.weights_cut if prepared else None,
            **self._coefficients.metrics(self.options),
            "tokens": at.tokens,
            "optimizer_updates": at.updates,
            "skipped_steps": at.skipped,
        }
        if prepared:
            for companion in self._carried:
                metrics |= companion.measured(batch)
        if self.algorithm.stop_kl is not None:
            metrics |= {"mini_batches_left_out": at.left_out, "stopped_at_kl": at.stopped_at_kl}
        return StepResult(finished, at, metrics, time.perf_counter() - started)
