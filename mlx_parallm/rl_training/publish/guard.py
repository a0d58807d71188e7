"""Checks between training and serving, and the states that training goes back to.

PublishGuard     may the trained weights be served? They and the log-probabilities that they give
                 must be finite, other numbers than the served ones, and answer nearly as those do:
                 one forward pass of a few of the step's own sequences measures that.
TrainingStates   the states for a refused update and a rollback
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.types import Rollout

MEASURED_TOKENS = 1024
"""Tokens of the sequences that the KL is measured on, prompts included; one sequence at least."""
NOT_FINITE = "the weights are not finite"
NO_ANSWERS = "the weights are finite, but the log-probabilities that they give are not"
TRIED_TOKENS = 16
NOT_SERVED = -2
"""Stands for the version of a state that was resumed and never served; -1 is that of weights at
the start."""


@dataclass(frozen=True)
class Verdict:
    """`reason`: why the weights are not to be served; "" = they may be. `kl`: nats a token, None
    = not measured."""

    reason: str = ""
    moved: bool = True
    kl: float | None = None


class PublishGuard:
    """Args:
    score: log-probabilities of each rollout's sampled tokens under the trained weights:
    `Trainer.logprobs`.
    max_kl: nats a token; None = not measured.
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        score: Callable[[Sequence[Rollout]], Sequence[np.ndarray]],
        max_kl: float | None,
    ) -> None:
        self._policy, self._score, self._max_kl = policy, score, max_kl
        self.served: list[mx.array] = []  # in the order of `TrainedPolicy.served_arrays`

    def published(self, served: list[mx.array] | None = None) -> None:
        """Note the served weights; None: the trained ones."""
        self.served = self._policy.served_arrays() if served is None else served

    def judge(self, rollouts: Sequence[Rollout]) -> Verdict:
        """Judge the weights as they are now. `rollouts`: those that the step was trained on."""
        if (
            not mx.stack([mx.isfinite(array).all() for array in self._policy.slots.read()])
            .all()
            .item()
        ):
            return Verdict(NOT_FINITE)
        pairs = zip(self.served, self._policy.served_arrays(), strict=True)
        if all(mx.array_equal(old, new).item() for old, new in pairs):
            return Verdict(moved=False)
        if self._max_kl is None:
            return Verdict() if self._answers(rollouts) else Verdict(NO_ANSWERS)
        sample = _sample(rollouts)
        if not sample:
            return Verdict()
        kl = kl_from_served(self._score(sample), sample)
        if kl <= self._max_kl:
            return Verdict(kl=kl)
        return Verdict(
            f"KL {kl:.3g} nats a token from the served version, above {self._max_kl:g}", kl=kl
        )

    def _answers(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether the first tokens of a sequence have finite log-probabilities: a short forward
        pass."""
        first = next((rollout for rollout in rollouts if len(rollout.tokens) > 1), None)
        if first is None:
            return True
        # as texts, whatever their tokens stand for
        tokens = first.tokens[:TRIED_TOKENS]
        n = len(tokens)
        short = Rollout(
            tokens, (0, *[1] * (n - 1)), None, first.policy_versions[:n], first.temperature, {}
        )
        return all(np.isfinite(scores).all() for scores in self._score([short]))


def kl_from_served(logprobs: Sequence[np.ndarray], rollouts: Sequence[Rollout]) -> float:
    """KL(served ‖ trained) in nats a token: Schulman's k3 = r - 1 - ln r, r = trained / served,
    over sampled tokens.

    Args:
        logprobs: of each rollout's sampled tokens under the trained weights, [N] each.

    Two tokens with log-probabilities -1 when sampled and -1.5, -0.5 now: r = 0.6065, 1.6487, k3 =
    0.1065, 0.1487, so 0.1276. With rollouts of older versions it is the distance from those. NaN
    and overflow count as infinite.
    """
    served = [
        value
        for rollout in rollouts
        for value, sampled in zip((rollout.logprobs or ())[1:], rollout.mask[1:], strict=True)
        if sampled
    ]
    log_ratio = np.concatenate(logprobs).astype(np.float64) - np.array(served, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        kl = float(np.mean(np.expm1(log_ratio) - log_ratio))
    return kl if np.isfinite(kl) else float("inf")


def _sample(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The last sequences with log-probabilities of a known version, as many as `MEASURED_TOKENS`
    hold."""
    sample: list[Rollout] = []
    room = MEASURED_TOKENS
    for rollout in reversed(rollouts):
        versions = [
            version
            for version, sampled in zip(rollout.policy_versions, rollout.mask, strict=True)
            if sampled
        ]
        # negative: not known
        if rollout.logprobs is None or not any(rollout.mask[1:]) or min(versions) < 0:
            continue
        room -= len(rollout.tokens)
        if sample and room < 0:
            break
        sample.append(rollout)
    return sample


@dataclass(frozen=True)
class TrainingState:
    """All that training moves, by reference: MLX's arrays never change. `table`:
    `VersionSteps.state()` of then."""

    version: int
    steps: int
    weights: Sequence[mx.array]
    optimizer: Mapping[str, mx.array]
    reference: Sequence[mx.array] | None  # TrainedPolicy.reference_arrays
    numbers: dict[str, Any]  # Trainer.state()
    table: list[list[int]]


class TrainingStates:
    """The newest `keep` versions that were served, with the optimizer that had made them. The
    trainer's thread only."""

    def __init__(self, trainer: Trainer, versions: VersionSteps, keep: int) -> None:
        self._trainer, self._versions, self._limit = trainer, versions, keep
        self._kept: list[TrainingState] = []

    def keep(self, *, served: bool = True) -> None:
        """Keep the present state: it is that of the newest version, unless it was resumed and
        never `served`."""
        state = self.now() if served else replace(self.now(), version=NOT_SERVED)
        self._kept = [*self._kept, state][-self._limit :] if self._limit else []

    def now(self) -> TrainingState:
        version, steps = self._versions.newest
        policy, optimizer = self._trainer.policy, self._trainer.optimizer.state()
        mx.eval(optimizer)
        numbers, table = self._trainer.state(), self._versions.state()
        return TrainingState(
            version, steps, policy.slots.read(), optimizer, policy.reference_arrays, numbers, table
        )

    def kept(self) -> list[int]:
        """Versions."""
        return [state.version for state in self._kept if state.version != NOT_SERVED]

    def find(self, version: int) -> TrainingState | None:
        return next((state for state in self._kept if state.version == version), None)

    def newest(self) -> TrainingState | None:
        return self._kept[-1] if self._kept else None

    def put_back(self, state: TrainingState) -> None:
        self._trainer.policy.slots.write(list(state.weights))
        self._trainer.optimizer.restore(state.optimizer)
        if state.reference is not None:
            self._trainer.policy.reference_arrays = list(state.reference)
        self._trainer.restore(state.numbers)


def digest(policy: TrainedPolicy) -> str:
    """Return a digest of all bits of the trained weights."""
    hasher = hashlib.blake2b(digest_size=16)
    for array in policy.slots.read():
        hasher.update(np.array(array.reshape(-1).view(mx.uint8)).data)
    return hasher.hexdigest()
