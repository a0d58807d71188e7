"""Held-out rows: the algorithm's own loss and metrics on them, every few steps.

Keys of a metrics line: `eval/<metric>` for the loss and each of its metrics (eval/loss,
eval/rewards/accuracies, …), for KTO also eval/auc; `heldout_score` is the one number that is better
when higher: accuracy of pairs, AUC of labels, minus the loss for SFT. The line of step 1 has the
same of the untrained model as `eval_before/…`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config.data import SORTED, DataConfig
from mlx_parallm.losses.aot import sorted_margins
from mlx_parallm.losses.types import LossInputs
from mlx_parallm.models.parameters import scalar
from mlx_parallm.rl_training.data.batches import (
    advantages_of,
    kto_constants,
    mismatched,
)
from mlx_parallm.rl_training.data.learned_tokens import Unit
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import FEWEST
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.types import Rollout

SCORE = "heldout_score"
ACCURACY = "rewards/accuracies"
SHOWN = {
    "eval/loss": "loss",
    f"eval/{ACCURACY}": "accuracy",
    "eval/rewards/margins": "margin",
    "eval/auc": "AUC",
}


class HeldOut:
    """Args:
    units: held out; the first `data.eval_rows` of them are measured.
    last: the step after which they are measured in any case.
    measures_kl: the KTO loss has a KL.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        trainer: Trainer,
        data: DataConfig,
        *,
        weights: tuple[float, float],
        last: int,
        measures_kl: bool,
    ) -> None:
        self._units, self._trainer, self._weights = units[: data.eval_rows], trainer, weights
        self._every, self._last, self._measures_kl = data.eval_every, last, measures_kl
        preference = trainer.options.preference
        self._sorted = [kind for kind in preference.loss_types if kind in SORTED]
        self._ld_alpha = preference.ld_alpha
        self._reference_moves = trainer.options.reference == "ema"
        self._rollouts = [sequence.rollout() for unit in self._units for sequence in unit.sequences]
        self._reference: list[np.ndarray] | None = None
        self._before: dict[str, float] = {}

    @property
    def measures(self) -> bool:
        """Whether there are rows to measure."""
        return bool(self._units)

    @property
    def rows(self) -> int:
        return len(self._units)

    def before(self) -> dict[str, float]:
        """Measure the untrained model. The metrics line of step 1 has the same numbers."""
        numbers = self.numbers()
        self._before = {
            key.replace("eval/", "eval_before/"): value
            for key, value in numbers.items()
            if key != SCORE
        }
        return numbers

    def measure(self, step: int) -> dict[str, float]:
        """Return the numbers for a step's metrics line; empty if no evaluation is due."""
        due = step == self._last or (self._every > 0 and step % self._every == 0)
        numbers = self.numbers() if due else {}
        return numbers | (self._before if step == 1 else {})

    def measure_end(self, step: int) -> dict[str, float]:
        """Return the numbers of a step that turns out to be the last; empty if `measure` has
        returned them."""
        measured = self._every > 0 and step % self._every == 0
        return {} if measured else self.numbers()

    def numbers(self) -> dict[str, float]:
        """The metrics under the weights as they are now; empty without held-out rows."""
        if not self._units:
            return {}
        algorithm = self._trainer.algorithm
        scores = self._trainer.token_scores(self._rollouts)
        rows = [of_row[0] for of_row in scores]
        values = [of_row[2] for of_row in scores] if algorithm.scores_values else None
        reference = self._reference_logprobs() if algorithm.needs_reference else None
        inputs = self._inputs(rows, reference, values)
        if algorithm.compared is not None:
            width = inputs.mask.shape[1]
            measured = _padded([of_row[2] for of_row in scores], (len(scores), width))
            named: dict[str, Any] = {algorithm.compared.name: measured}
            inputs = replace(inputs, **named)
        outputs = algorithm.loss(inputs)
        numbers = {"eval/loss": scalar(outputs.loss)}
        numbers |= {f"eval/{name}": scalar(value) for name, value in outputs.metrics.items()}
        if algorithm.name == "kto" and reference is not None:
            ratios = [math.fsum(now - then) for now, then in zip(rows, reference, strict=True)]
            auc = area_under_curve(ratios, [unit.label for unit in self._units])
            return numbers | ({} if auc is None else {"eval/auc": auc, SCORE: auc})
        score = numbers.get(f"eval/{ACCURACY}", -numbers["eval/loss"])
        return numbers | {SCORE: score}

    def _inputs(
        self,
        rows: Sequence[np.ndarray],
        reference: Sequence[np.ndarray] | None,
        values: Sequence[np.ndarray] | None,
    ) -> LossInputs:
        """All held-out rows at once: only their scored tokens, so this is small."""
        advantages = zip(self._units, advantages_of(self._units, self._weights), strict=True)
        sides = [advantage for unit, advantage in advantages for _ in unit.sequences]
        shape = (len(rows), max(len(row) for row in rows))
        return LossInputs(
            logprobs=_padded(rows, shape),
            rollout_logprobs=mx.zeros(shape),
            ref_logprobs=None if reference is None else _padded(reference, shape),
            values=None if values is None else _padded(values, shape),
            advantages=mx.broadcast_to(mx.array(sides)[:, None], shape),
            mask=mx.arange(shape[1])[None] < mx.array([len(row) for row in rows])[:, None],
            token_normalizer=float(sum(len(row) for row in rows)),
            sequence_normalizer=float(len(rows)),
            constants=self._constants(),
            row_constants=self._row_constants(rows, reference),
        )

    def _constants(self) -> Mapping[str, float]:
        if self._trainer.algorithm.name != "kto":
            return {}
        after = [*self._units[1:], self._units[0]]
        foreign = [mismatched(unit, other) for unit, other in zip(self._units, after, strict=True)]
        if not self._measures_kl:
            return kto_constants(self._units, foreign, no_ratios)
        return kto_constants(self._units, foreign, self._trainer.log_ratios)

    def _row_constants(
        self, rows: Sequence[np.ndarray], reference: Sequence[np.ndarray] | None
    ) -> Mapping[str, mx.array]:
        if reference is None or not self._sorted:
            return {}
        margins = sorted_margins(self._sorted, rows, reference, ld_alpha=self._ld_alpha)
        return {kind: mx.array(numbers) for kind, numbers in margins.items()}

    def _reference_logprobs(self) -> list[np.ndarray]:
        if self._reference is None or self._reference_moves:
            with self._trainer.policy.reference():
                self._reference = self._trainer.logprobs(self._rollouts)
        return self._reference


def no_ratios(rollouts: Sequence[Rollout]) -> list[float]:
    """Stand in for `Trainer.log_ratios` if the KL is 0 by definition (APO-zero)."""
    return [0.0] * len(rollouts)


def area_under_curve(scores: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Probability that a row with label true scores above one with false, a tie counting ½. None:
    one label only.

    Worked: scores [2, 1, 1], labels [true, true, false]: pairs (2, 1) and (1, 1) → (1 + ½) / 2 =
    0.75.
    """
    values, desirable = np.asarray(scores, np.float64), np.asarray(labels, bool)
    if desirable.all() or not desirable.any():
        return None
    difference = values[desirable][:, None] - values[~desirable][None]
    return float((0.5 * (1.0 + np.sign(difference))).mean())


def _padded(rows: Sequence[np.ndarray], shape: tuple[int, int]) -> mx.array:
    padded = np.zeros(shape, np.float32)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return mx.array(padded)


def describe(numbers: Mapping[str, float]) -> str:
    """The loss and the score's parts as a text."""
    parts = [f"{name} {numbers[key]:.3f}" for key, name in SHOWN.items() if key in numbers]
    return ", ".join(parts) or "there are none"


def in_words(lines: Sequence[Mapping[str, Any]], rows: int) -> str | None:
    """Return the numbers of `rows` held-out rows before training and in the newest evaluation, as
    one line; None: the metrics `lines` do not have both."""
    before, after = (
        next((line for line in each if f"{part}/loss" in line), None)
        for part, each in (("eval_before", lines), ("eval", reversed(lines)))
    )
    if before is None or after is None:
        return None
    pairs = [
        (name, before.get(key.replace("eval/", "eval_before/")), after.get(key))
        for key, name in SHOWN.items()
    ]
    changes = [f"{name} {b:.3f} -> {a:.3f}" for name, b, a in pairs if None not in (b, a)]
    few = ", too few to tell" if rows < FEWEST else ""
    return f"held-out rows: {', '.join(changes)} ({rows} row{'s' * (rows != 1)}{few})"
