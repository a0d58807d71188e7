"""AdamW over a policy's parameters: float32 masters, global-norm clipping, learning-rate schedules.

Small arrays are laid end to end in bundles, so that an adapter of hundreds of arrays costs a dozen operations and not
thousands; AdamW is elementwise, so this changes no number. The arrays bound in the tree are then views of a bundle.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.optimizers

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.errors import CheckpointError
from mlx_parallm.models.parameters import ParameterSlots, scalar

BUNDLE_ELEMENTS = 1 << 20  # 4 MiB of float32; larger arrays stand alone
MEASURED_ELEMENTS = 1 << 22
"""How many weights `Movement` is measured on at most: all of a small adapter, an even sample of anything larger."""


@dataclass(frozen=True)
class Movement:
    """How far one update moved what is trained: L2 norms of the update and of the weights before it, and the share of
    weights that are another number than before in the tree's own dtype. With bfloat16 an update below half a unit in
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
        self._max_grad_norm = config.max_grad_norm
        arrays = slots.read()
        self._shapes = [array.shape for array in arrays]
        self._dtypes = [array.dtype for array in arrays]
        self._bundles = _bundles([array.size for array in arrays])
        self._stride = -(-sum(array.size for array in arrays) // MEASURED_ELEMENTS)
        self._adamw = mlx.optimizers.AdamW(
            learning_rate=config.learning_rate,
            betas=[config.adam_beta1, config.adam_beta2],
            weight_decay=config.weight_decay,
            bias_correction=True,
        )
        self.reload()
        self._adamw.init(self._masters)
        self._write()

    def reload(self) -> None:
        """Takes the masters from the tree (whose arrays were just loaded)."""
        self._masters = self._pack([array.astype(mx.float32) for array in self._slots.read()])

    @property
    def updates(self) -> int:
        return int(scalar(self._adamw.step))

    def update(self, gradients: Sequence[mx.array], learning_rate: float) -> Update:
        """One step of AdamW on float32 gradients in slot order; everything is evaluated."""
        bundled = self._pack(gradients)
        norm = mx.sqrt(sum((mx.square(bundle).sum() for bundle in bundled.values()), mx.array(0.0)))
        mx.eval(norm, bundled)
        size = scalar(norm)
        if not math.isfinite(size):
            return Update(size, applied=False)
        if self._max_grad_norm and size > self._max_grad_norm:
            factor = self._max_grad_norm / (size + 1e-6)
            bundled = {name: bundle * factor for name, bundle in bundled.items()}
        self._adamw.learning_rate = learning_rate
        before = self._sample()
        self._masters = self._adamw.apply_gradients(bundled, self._masters)
        mx.eval(self._masters, self._adamw.state)
        self._write()
        return Update(size, applied=True, moved=self._movement(before))

    def _sample(self) -> list[mx.array]:
        """Every n-th weight, bundle by bundle: copies, so that AdamW may still write over what they were taken from."""
        sample = [bundle[:: self._stride] for bundle in self._masters.values()]
        mx.eval(sample)
        return sample

    def _movement(self, before: list[mx.array]) -> Movement:
        squares, weights, moved = mx.array(0.0), mx.array(0.0), mx.array(0)
        for slots, old, new in zip(self._bundles, before, self._sample(), strict=True):
            dtype = self._dtypes[slots[0]]
            squares = squares + mx.square(new - old).sum()
            weights = weights + mx.square(old).sum()
            moved = moved + (new.astype(dtype) != old.astype(dtype)).sum()
        mx.eval(squares, weights, moved)
        count = sum(array.size for array in before)
        return Movement(
            math.sqrt(self._stride * scalar(squares)), math.sqrt(self._stride * scalar(weights)), scalar(moved) / count
        )

    def _write(self) -> None:
        arrays = [array.astype(dtype) for array, dtype in zip(self._unpack(self._masters), self._dtypes, strict=True)]
        mx.eval(arrays)
        self._slots.write(arrays)

    # ------------------------------------------------------------------ bundles

    def _pack(self, arrays: Sequence[mx.array]) -> dict[str, mx.array]:
        return {
            f"bundle{i}": arrays[bundle[0]].reshape(-1)
            if len(bundle) == 1
            else mx.concatenate([arrays[slot].reshape(-1) for slot in bundle])
            for i, bundle in enumerate(self._bundles)
        }

    def _unpack(self, bundles: Mapping[str, mx.array]) -> list[mx.array]:
        arrays: list[mx.array] = [None] * len(self._shapes)  # type: ignore[list-item]
        for i, bundle in enumerate(self._bundles):
            start, flat = 0, bundles[f"bundle{i}"]
            for slot in bundle:
                size = math.prod(self._shapes[slot])
                arrays[slot] = flat[start : start + size].reshape(self._shapes[slot])
                start += size
        return arrays

    # ------------------------------------------------------------------ checkpoint

    def state(self) -> dict[str, mx.array]:
        """For `optimizer.safetensors`: `step`, and `<parameter>.m`, `.v` (and `.master` where the tree is narrower)."""
        tensors: dict[str, mx.array] = {"step": self._adamw.step}
        for kind in ("m", "v"):
            moments = {name: self._adamw.state[name][kind] for name in self._masters}
            tensors |= {f"{n}.{kind}": a for n, a in zip(self._slots.names, self._unpack(moments), strict=True)}
        masters = zip(self._slots.names, self._unpack(self._masters), self._dtypes, strict=True)
        tensors |= {f"{name}.master": array for name, array, dtype in masters if dtype != mx.float32}
        return tensors

    def restore(self, tensors: Mapping[str, mx.array]) -> None:
        """Takes over `state()`. The tree's own arrays must have been loaded. Raises CheckpointError."""
        expected = self.state()
        for name, array in expected.items():
            if name not in tensors or tensors[name].shape != array.shape:
                found = tensors[name].shape if name in tensors else "nothing"
                raise CheckpointError(f"optimizer state of {name}: expected {array.shape}, found {found}")
        self.reload()
        if any(dtype != mx.float32 for dtype in self._dtypes):
            own = self._unpack(self._masters)
            self._masters = self._pack(
                [tensors.get(f"{name}.master", array) for name, array in zip(self._slots.names, own, strict=True)]
            )
        for kind in ("m", "v"):
            moments = self._pack([tensors[f"{name}.{kind}"] for name in self._slots.names])
            for name, moment in moments.items():
                self._adamw.state[name][kind] = moment
        self._adamw.state["step"] = tensors["step"].astype(mx.uint64)
        mx.eval(self._masters, self._adamw.state)
        self._write()


def learning_rate_at(step: int, config: RLTrainingConfig) -> float:
    """The learning rate of all updates of a step (1, 2, …): schedules count steps, not optimizer updates, so that
    update_epochs and batch_size do not move them.

    Warm-up: step / (warmup_steps + 1) of the peak, so the first step already learns and the peak comes at
    warmup_steps + 1. After it: constant, or linear or cosine down to lr_final at total_steps.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.learning_rate
    first = config.warmup_steps + 1
    progress = min((step - first) / max(config.total_steps - first, 1), 1.0)
    share = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr_final + (config.learning_rate - config.lr_final) * share


def _bundles(sizes: Sequence[int]) -> list[list[int]]:
    bundles: list[list[int]] = []
    room = 0
    for slot, size in enumerate(sizes):
        if bundles and size <= room:
            bundles[-1].append(slot)
            room -= size
        else:
            bundles.append([slot])
            room = BUNDLE_ELEMENTS - size
    return bundles
