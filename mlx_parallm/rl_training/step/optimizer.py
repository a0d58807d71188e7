"""The optimizer over a policy's parameters: float32 masters, global-norm clipping, learning-rate schedules.

The arrays bound in the tree may be views of bundles of several (optimizer_groups.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import CheckpointError
from mlx_parallm.models.parameters import ParameterSlots, scalar
from mlx_parallm.models.value_head import is_value_head
from mlx_parallm.rl_training.step.optimizer_groups import make_groups

MEASURED_ELEMENTS = 1 << 22
"""How many weights `Movement` is measured on at most: all of a small adapter, an even sample of anything larger."""


@dataclass(frozen=True)
class Movement:
    """How far one update moved what is trained: L2 norms of the update and of the weights before it, and the share of
    weights that are another number than before in the tree's own dtype; a value head, which is never served and has a
    rate of its own, left out. With bfloat16 an update below half a unit in
    the last place (2^-9 of the weight) moves nothing that is served."""

    update_norm: float
    weight_norm: float
    weights_moved: float


@dataclass(frozen=True)
class Update:
    """`grad_norm` before clipping. Not `applied`: the gradient was not finite, nothing changed, nothing `moved`."""

    grad_norm: float
    applied: bool
    moved: Movement | None = None


class PolicyOptimizer:
    """Owns the float32 master copy of the slots' arrays; writes them into the tree, in the tree's dtype."""

    def __init__(self, slots: ParameterSlots, config: RLTrainingConfig) -> None:
        self._slots = slots
        self.kind: str = config.optimizer
        self._max_grad_norm = config.max_grad_norm
        arrays = slots.read()
        self._dtypes = [array.dtype for array in arrays]
        self._stride = -(-sum(array.size for array in arrays) // MEASURED_ELEMENTS)
        self._groups = make_groups(slots.names, arrays, config)
        self._write()

    def reload(self) -> None:
        """Takes the masters from the tree (whose arrays were just loaded)."""
        self._set_masters([array.astype(mx.float32) for array in self._slots.read()])

    @property
    def updates(self) -> int:
        return self._groups[0].updates

    def update(self, gradients: Sequence[mx.array], learning_rate: float) -> Update:
        """One step on float32 gradients in slot order; everything is evaluated."""
        found = [group.square_sum([gradients[slot] for slot in group.slots]) for group in self._groups]
        norm = mx.sqrt(sum((squares for squares, _ in found), mx.array(0.0)))
        packed = [part for _, part in found]
        mx.eval(norm, packed)
        size = scalar(norm)
        if not math.isfinite(size):
            return Update(size, applied=False)
        if self._max_grad_norm and size > self._max_grad_norm:
            factor = self._max_grad_norm / (size + 1e-6)
            packed = [{name: array * factor for name, array in part.items()} for part in packed]
        before = self._sample()
        for group, part in zip(self._groups, packed, strict=True):
            group.apply(part, learning_rate)
        self._write()
        return Update(size, applied=True, moved=self._movement(before))

    def _sample(self) -> list[tuple[int, mx.array]]:
        """Every n-th weight, bundle by bundle: copies, so that they may still be written over."""
        measured = [group for group in self._groups if not is_value_head(self._slots.names[group.slots[0]])]
        sample = [entry for group in measured for entry in group.sample(self._stride)]
        mx.eval([array for _, array in sample])
        return sample

    def _movement(self, before: list[tuple[int, mx.array]]) -> Movement:
        squares, weights, moved = mx.array(0.0), mx.array(0.0), mx.array(0)
        for (slot, old), (_, new) in zip(before, self._sample(), strict=True):
            dtype = self._dtypes[slot]
            squares = squares + mx.square(new - old).sum()
            weights = weights + mx.square(old).sum()
            moved = moved + (new.astype(dtype) != old.astype(dtype)).sum()
        mx.eval(squares, weights, moved)
        count = sum(array.size for _, array in before)
        return Movement(
            math.sqrt(self._stride * scalar(squares)), math.sqrt(self._stride * scalar(weights)), scalar(moved) / count
        )

    def _masters(self) -> list[mx.array]:
        """In slot order."""
        found: dict[int, mx.array] = {}
        for group in self._groups:
            found |= dict(zip(group.slots, group.arrays, strict=True))
        return [found[slot] for slot in range(len(self._dtypes))]

    def _set_masters(self, arrays: Sequence[mx.array]) -> None:
        for group in self._groups:
            group.masters = group.pack([arrays[slot] for slot in group.slots])

    def _write(self) -> None:
        arrays = [array.astype(dtype) for array, dtype in zip(self._masters(), self._dtypes, strict=True)]
        mx.eval(arrays)
        self._slots.write(arrays)

    # ------------------------------------------------------------------ checkpoint

    def state(self) -> dict[str, mx.array]:
        """For `optimizer.safetensors`: `step`, and `<parameter>.<kind>` of what the optimizer keeps (AdamW: m, v), and
        `<parameter>.master` where the tree is narrower than float32."""
        tensors: dict[str, mx.array] = {"step": mx.array(self.updates, mx.uint64)}
        for group in self._groups:
            for kind, arrays in group.state().items():
                names = (self._slots.names[slot] for slot in group.slots)
                tensors |= {f"{name}.{kind}": a for name, a in zip(names, arrays, strict=True) if a.size}
        masters = zip(self._slots.names, self._masters(), self._dtypes, strict=True)
        return tensors | {f"{name}.master": array for name, array, dtype in masters if dtype != mx.float32}

    def restore(self, tensors: Mapping[str, mx.array]) -> None:
        """Takes over `state()`. The tree's own arrays must have been loaded. Raises CheckpointError."""
        for name, array in self.state().items():
            if name not in tensors or tensors[name].shape != array.shape:
                found = tensors[name].shape if name in tensors else "nothing"
                raise CheckpointError(f"optimizer state of {name}: expected {array.shape}, found {found}")
        loaded = zip(self._slots.names, self._slots.read(), strict=True)
        self._set_masters([tensors.get(f"{n}.master", array.astype(mx.float32)) for n, array in loaded])
        for group in self._groups:
            names = [self._slots.names[slot] for slot in group.slots]
            state = {kind: [tensors.get(f"{n}.{kind}", mx.zeros((0,))) for n in names] for kind in group.state()}
            group.restore(tensors["step"], state)
        self._write()


def learning_rate_at(step: int, config: RLTrainingConfig) -> float:
    """The learning rate of all updates of a step (1, 2, …): schedules count steps, not optimizer updates, so that
    update_epochs and batch_size do not move them.

    Warm-up: step / (warmup_steps + 1) of the peak, so the first step already learns and the peak comes at
    warmup_steps + 1. After it: constant, or linear or cosine down to lr_final, which the step after total_steps would
    have: the last one still learns.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.learning_rate
    first = config.warmup_steps + 1
    progress = min((step - first) / max(config.total_steps + 1 - first, 1), 1.0)
    share = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr_final + (config.learning_rate - config.lr_final) * share
