"""Rank 0 leads a training step, the other ranks follow it: the same `train_step` on the same batch and state.

Nothing is assumed about what a follower already has: at the start of every step the ranks compare fingerprints of all
that a step changes, and where they differ (a resume, a rollback, other hardware) rank 0's arrays are copied.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_parallm.config.load import Config
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import RankLostError
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.parameters import scalar
from mlx_parallm.rl_training.factory import build_trainer
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.ranks import Ranks
from mlx_parallm.rl_training.step.step_position import StepPosition
from mlx_parallm.rl_training.step.trainer import StepResult, Trainer
from mlx_parallm.system.log import get_logger

log = get_logger("ranks")

DIGEST_PIECE = 1 << 22
PLACES = 1640531527  # 2³² times the golden ratio squared: Knuth's multiplicative hashing


@dataclass(frozen=True)
class Step:
    """What rank 0 tells the others before a step. `state`: of `Trainer.state`."""

    training: RLTrainingConfig
    batch: TrainBatch
    position: StepPosition | None
    state: dict[str, Any]


class LeadingTrainer(Trainer):
    """Rank 0's. A step that loses a rank ends unfinished, like one that was asked to stop."""

    def train_step(
        self,
        batch: TrainBatch,
        *,
        position: StepPosition | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        if self.ranks.size > 1:
            self.ranks.tell(Step(self._config, batch, position, self.state()))
            agree(self)
        return super().train_step(batch, position=position, should_stop=lambda: should_stop() or bool(self.ranks.lost))


def follow(config: Config, ranks: Ranks, stop: threading.Event) -> None:
    """A rank that is not 0, from the model's load to the end of the run. The base model is this machine's own
    (`model.base_path`); what is trained, and how, comes from rank 0. `stop`: asks rank 0 to end the run. Raises
    RankLostError, ModelError."""
    quantize = config.rl_training.lora.enabled and config.rl_training.lora.quantize_base
    loaded = load_model(config.model, quantize=quantize)
    work = ranks.told(stop)
    if not isinstance(work, Step):
        return
    trainer = build_trainer(loaded, work.training, ranks=ranks)
    del loaded  # arrays that training moves away from are free
    while isinstance(work, Step):
        trainer.restore(work.state)
        agree(trainer)
        trainer.train_step(work.batch, position=work.position, should_stop=stop.is_set)
        ranks.check()
        work = ranks.told(stop)


def agree(trainer: Trainer) -> None:
    """Gives every rank the weights, optimizer state and reference of rank 0. Raises RankLostError: another model."""
    ranks, state = trainer.ranks, _state(trainer)
    everyone = ranks.exchange((_shapes(state), _fingerprint(state)))
    if everyone is None or all(prints == everyone[0] for prints in everyone):
        return
    if any(shapes != everyone[0][0] for shapes, _ in everyone):
        raise RankLostError("the ranks train different models: model.base_path must name the same one everywhere")
    log.info("training state taken from rank 0" if ranks.rank else "training state given to the other ranks")
    own = [_bits(array) if ranks.rank == 0 else mx.zeros_like(_bits(array)) for array in state.values()]
    mx.eval(own)
    given = ranks.sum(own)
    if given is None or ranks.rank == 0:
        return
    arrays = [
        mx.view(bits, array.dtype).reshape(array.shape) for bits, array in zip(given, state.values(), strict=True)
    ]
    mx.eval(arrays)
    _restore(trainer, dict(zip(state, arrays, strict=True)))


def _state(trainer: Trainer) -> dict[str, mx.array]:
    """Every array that a step changes, or that it is measured against."""
    names, policy = trainer.policy.slots.names, trainer.policy
    state = {f"weights.{name}": array for name, array in zip(names, policy.slots.read(), strict=True)}
    state |= {f"optimizer.{name}": array for name, array in trainer.optimizer.state().items()}
    reference = policy.reference_arrays or []
    return state | {f"reference.{names[i]}": array for i, array in enumerate(reference)}


def _restore(trainer: Trainer, state: dict[str, mx.array]) -> None:
    def part(kind: str) -> dict[str, mx.array]:
        return {name.removeprefix(kind): array for name, array in state.items() if name.startswith(kind)}

    trainer.policy.slots.write(list(part("weights.").values()))
    trainer.optimizer.restore(part("optimizer."))
    if trainer.policy.reference_arrays is not None:
        trainer.policy.reference_arrays = list(part("reference.").values())


def _shapes(state: dict[str, mx.array]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(array.shape), str(array.dtype)) for name, array in state.items()]


def _fingerprint(state: dict[str, mx.array]) -> list[int]:
    return [_digest(_bits(array)) for array in state.values()]


def _digest(bits: mx.array) -> int:
    """Sum modulo 2³² of each element times an odd number that its place gives: one bit more or less, or two elements
    in each other's places, make another sum. In pieces, for the temporary arrays' sake."""
    words = mx.view(bits, mx.uint32) if bits.dtype == mx.uint64 else bits
    total = 0
    for start in range(0, words.size, DIGEST_PIECE):
        piece = words[start : start + DIGEST_PIECE].astype(mx.uint32)
        places = mx.arange(start, start + piece.size, dtype=mx.uint32) * PLACES | 1
        total += int(scalar((piece * places).sum()))
    return total % (1 << 32)


def _bits(array: mx.array) -> mx.array:
    """Unsigned integers, flat: sums with zeros are exact, whatever the numbers are."""
    return mx.view(array.reshape(-1), {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size])
