"""Loss, a loss over some trajectories that is not computed yet, and its batch and algorithm for
the trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.advantages import raw_rewards
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.step.algorithms import Algorithm
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.prepare import PreparedBatch, Scores
from mlx_parallm.types import Rollout, Trajectory

Played = Trajectory | Rollout
Term = Callable[[LossInputs], LossOutputs]
Rows = tuple[tuple[float, ...], ...]


class Evaluates(Protocol):
    def evaluate(self, loss: "Loss") -> float: ...


@dataclass
class Loss:
    """A loss over some trajectories, as a function of the weights. `a + b` and `0.5 * a` are losses
    too.

    The first evaluation scores the reference, the old values, and missing log-probabilities, and
    they stay. So several updates may use the same Loss (PPO's epochs). `metrics`: of the last
    evaluation.
    """

    module: Evaluates
    rollouts: tuple[Rollout, ...]
    terms: tuple[tuple[float, Term], ...]
    advantages: Rows | None = None  # [B][T]
    returns: np.ndarray | None = None  # [N] over the trained tokens
    needs: frozenset[str] = frozenset()  # subset of {"reference", "values"}
    scores: Scores = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def item(self) -> float:
        """Return the loss as a number; nothing is differentiated or changed."""
        return self.module.evaluate(self)

    def __add__(self, other: "Loss") -> "Loss":
        """Raises ConfigError: the trajectories, the advantages or the returns differ."""
        same = self.module is other.module and self.rollouts == other.rollouts
        if not same or (
            None not in (self.advantages, other.advantages) and self.advantages != other.advantages
        ):
            raise ConfigError(
                "losses can be added if they have the same trajectories and advantages"
            )
        if (
            self.returns is not None
            and other.returns is not None
            and not np.array_equal(self.returns, other.returns)
        ):
            raise ConfigError("losses can be added if they have the same returns")
        return replace(
            self,
            terms=self.terms + other.terms,
            advantages=self.advantages or other.advantages,
            returns=other.returns if self.returns is None else self.returns,
            needs=self.needs | other.needs,
            scores={},
            metrics={},
        )

    def __mul__(self, factor: float) -> "Loss":
        return replace(
            self,
            terms=tuple((factor * weight, term) for weight, term in self.terms),
            scores={},
            metrics={},
        )

    __rmul__ = __mul__

    def batch(self, step: int) -> TrainBatch:
        rows = self.advantages or tuple((0.0,) * len(rollout.tokens) for rollout in self.rollouts)
        sequences = (
            TrainSequence(r, row, fresh=False) for r, row in zip(self.rollouts, rows, strict=True)
        )
        return TrainBatch(step, (), tuple(sequences), BatchStatistics())

    def algorithm(self) -> Algorithm:
        """Return the algorithm of an update by this loss."""

        def loss(inputs: LossInputs) -> LossOutputs:
            outputs = [(weight, term(inputs)) for weight, term in self.terms]
            metrics = {
                name: number for _, output in outputs for name, number in output.metrics.items()
            }
            return LossOutputs(
                sum((weight * output.loss for weight, output in outputs), mx.array(0.0)), metrics
            )

        def with_returns(prepared: PreparedBatch) -> PreparedBatch:
            return replace(prepared, returns=self.returns)

        return Algorithm(
            "loss",
            loss,
            raw_rewards,
            needs_reference="reference" in self.needs,
            needs_values="values" in self.needs,
            finish=with_returns,
        )


def segments_of(played: Played) -> tuple[Rollout, ...]:
    """Return the sequences of a trajectory, oldest first."""
    rollout = played.rollout if isinstance(played, Trajectory) else played
    if not isinstance(rollout, Rollout):
        raise ConfigError(
            f"{played!r} is not a trajectory: expected those of RolloutManager.collect_rollouts"
        )
    return rollout.segments


def all_segments(trajectories: Sequence[Played]) -> tuple[Rollout, ...]:
    return tuple(segment for played in trajectories for segment in segments_of(played))


def spread(
    trajectories: Sequence[Played], numbers: Sequence[Any], what: Literal["advantages", "returns"]
) -> tuple[tuple[Rollout, ...], Rows]:
    """Return the sequences of the trajectories, and the numbers of their tokens [T], 0 where not
    sampled.

    `numbers`: one for each trajectory, or for each of its sampled tokens (without the first token
    of a sequence). Raises ConfigError: they do not fit.
    """
    for value, word in ((trajectories, "trajectories"), (numbers, what)):
        if not hasattr(value, "__len__") or isinstance(value, str):
            raise ConfigError(f"{word} is {value!r}: expected a list")
    if len(numbers) != len(trajectories):
        raise ConfigError(f"{len(numbers)} {what} for {len(trajectories)} trajectories")
    rows = []
    for place, (played, entry) in enumerate(zip(trajectories, numbers, strict=True)):
        sampled = [sampled_tokens(segment) for segment in segments_of(played)]
        counts = [int(mask.sum()) for mask in sampled]
        try:
            values = np.asarray(entry, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{what}[{place}] is {entry!r}: expected a number, or one for each token"
            ) from error
        values = np.full(sum(counts), values) if values.ndim == 0 else values
        if values.shape != (sum(counts),) or not np.isfinite(values).all():
            raise ConfigError(
                f"{what}[{place}] is not one finite number, or"
                f" {sum(counts)}, one for each sampled token"
            )
        for mask, part in zip(sampled, np.split(values, np.cumsum(counts)[:-1]), strict=True):
            row = np.zeros(len(mask))
            row[mask] = part
            rows.append(tuple(row.tolist()))
    return all_segments(trajectories), tuple(rows)


def sampled_tokens(rollout: Rollout) -> np.ndarray:
    """Return the mask [T] of trained tokens. The first token of a sequence has nothing before
    it."""
    return np.array((0, *rollout.trained_mask[1:]), bool)
