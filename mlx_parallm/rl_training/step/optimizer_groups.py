"""Groups of parameters that one of MLX's optimizers updates at one rate.

Small arrays are laid end to end in bundles, so that an adapter of hundreds of arrays costs a dozen operations and not
thousands; AdamW and Lion are elementwise, so this changes no number. Muon and Adafactor look at whole matrices: there
each array stands alone.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import mlx.optimizers

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.value_head import is_value_head

BUNDLE_ELEMENTS = 1 << 20  # 4 MiB of float32; larger arrays stand alone
ELEMENTWISE = ("adamw", "lion")
STATE_BYTES = {"adamw": 8, "muon": 4, "lion": 4, "adafactor": 0}
"""Of the optimizer's state for each trained number, masters not counted (Adafactor: a row and a column a matrix)."""


class ParameterGroup:
    """The float32 masters of some slots, their optimizer and its state; lists are in the order of `slots`.

    `rate`: this group's learning rate in units of the step's.
    """

    def __init__(
        self, kind: str, rate: float, slots: Sequence[int], arrays: Sequence[mx.array], config: RLTrainingConfig
    ) -> None:
        self.slots, self._rate, self._flat = list(slots), rate, kind in ELEMENTWISE
        self._shapes = [array.shape for array in arrays]
        self._bundles = bundles([array.size for array in arrays]) if self._flat else [[i] for i in range(len(arrays))]
        self._optimizer = make_optimizer(kind, config)
        self.masters = self.pack(arrays)
        self._optimizer.init(self.masters)

    @property
    def updates(self) -> int:
        return int(scalar(self._optimizer.step))

    @property
    def arrays(self) -> list[mx.array]:
        """The masters, each in its shape."""
        return self._unpack(self.masters)

    def square_sum(self, gradients: Sequence[mx.array]) -> tuple[mx.array, dict[str, mx.array]]:
        """Σ g² of this group's gradients (float32), and the gradients as `apply` takes them. Lazy."""
        packed = self.pack(gradients)
        return sum((mx.square(part).sum() for part in packed.values()), mx.array(0.0)), packed

    def apply(self, gradients: Mapping[str, mx.array], learning_rate: float) -> None:
        """One update; masters and state are evaluated."""
        self._optimizer.learning_rate = learning_rate * self._rate
        self.masters = self._optimizer.apply_gradients(gradients, self.masters)
        mx.eval(self.masters, self._optimizer.state)

    def sample(self, stride: int) -> Iterator[tuple[int, mx.array]]:
        """(first slot of a bundle, every n-th of its numbers), bundle by bundle. Lazy copies."""
        for bundle, array in zip(self._bundles, self.masters.values(), strict=True):
            yield self.slots[bundle[0]], array.reshape(-1)[::stride]

    # ------------------------------------------------------------------ checkpoint

    def state(self) -> dict[str, list[mx.array]]:
        """What the optimizer keeps beside the step, by kind ("m", "v", …): an array a slot, empty where it has none."""
        kept = [self._optimizer.state[name] for name in self.masters]
        kinds = sorted({kind for entry in kept for kind in entry})
        if self._flat:
            return {kind: self._unpack({n: self._optimizer.state[n][kind] for n in self.masters}) for kind in kinds}
        return {kind: [entry.get(kind, mx.zeros((0,))) for entry in kept] for kind in kinds}

    def restore(self, step: mx.array, state: Mapping[str, Sequence[mx.array]]) -> None:
        """The counterpart of `state`, evaluated."""
        for kind, arrays in state.items():
            packed = self.pack(arrays)
            for name, before in ((name, self._optimizer.state[name]) for name in self.masters):
                if kind in before:
                    before[kind] = packed[name]
        self._optimizer.state["step"] = step.astype(mx.uint64)
        mx.eval(self.masters, self._optimizer.state)

    # ------------------------------------------------------------------ bundles

    def pack(self, arrays: Sequence[mx.array]) -> dict[str, mx.array]:
        """Arrays in the order of `slots` as masters, gradients and state are kept. Lazy."""
        if not self._flat:
            return {f"bundle{i}": array for i, array in enumerate(arrays)}
        return {
            f"bundle{i}": arrays[bundle[0]].reshape(-1)
            if len(bundle) == 1
            else mx.concatenate([arrays[slot].reshape(-1) for slot in bundle])
            for i, bundle in enumerate(self._bundles)
        }

    def _unpack(self, packed: Mapping[str, mx.array]) -> list[mx.array]:
        if not self._flat:
            return list(packed.values())
        arrays: list[mx.array] = [None] * len(self._shapes)  # type: ignore[list-item]
        for i, bundle in enumerate(self._bundles):
            start, flat = 0, packed[f"bundle{i}"]
            for slot in bundle:
                size = math.prod(self._shapes[slot])
                arrays[slot] = flat[start : start + size].reshape(self._shapes[slot])
                start += size
        return arrays


def make_groups(
    names: Sequence[str], arrays: Sequence[mx.array], config: RLTrainingConfig
) -> tuple[ParameterGroup, ...]:
    """One group for each (optimizer, rate) that the parameters have; a value head is one of its own."""
    members: dict[tuple[str, float, bool], list[int]] = {}
    for slot, (name, array) in enumerate(zip(names, arrays, strict=True)):
        key = optimizer_of(name, array.shape, config), rate_of(name, config), is_value_head(name)
        members.setdefault(key, []).append(slot)
    wide = [array.astype(mx.float32) for array in arrays]
    return tuple(
        ParameterGroup(kind, rate, slots, [wide[slot] for slot in slots], config)
        for (kind, rate, _), slots in members.items()
    )


def optimizer_of(name: str, shape: Sequence[int], config: RLTrainingConfig) -> str:
    """Muon is for the matrices of the blocks (and of adapters): embedding, head, norms, magnitudes and stacked experts
    are AdamW's (https://kellerjordan.github.io/posts/muon/)."""
    is_matrix = len(shape) == 2 and (name.endswith((".lora_a", ".lora_b")) or re.search(r"\.\d+\.", name))
    return config.optimizer if config.optimizer != "muon" or is_matrix else "adamw"


def rate_of(name: str, config: RLTrainingConfig) -> float:
    """LoRA+ (Hayou et al. 2024, arXiv:2402.12354): B learns `loraplus_ratio` times as fast as A. A value head has
    `ppo.value_learning_rate`, on the same schedule."""
    if is_value_head(name):
        return config.ppo.value_learning_rate / config.learning_rate
    return config.lora.loraplus_ratio if name.endswith(".lora_b") else 1.0


def make_optimizer(kind: str, config: RLTrainingConfig) -> mlx.optimizers.Optimizer:
    """MLX's; the learning rate is set at each update."""
    rate, decay = config.learning_rate, config.weight_decay
    if kind == "adamw":
        betas = [config.adam_beta1, config.adam_beta2]
        return mlx.optimizers.AdamW(learning_rate=rate, betas=betas, weight_decay=decay, bias_correction=True)
    if kind == "lion":
        return mlx.optimizers.Lion(learning_rate=rate, weight_decay=decay)
    if kind == "muon":
        return mlx.optimizers.Muon(learning_rate=rate, weight_decay=decay)
    assert kind == "adafactor", kind  # the learning rate is the configuration's, not the paper's own schedule
    return mlx.optimizers.Adafactor(rate, weight_decay=decay, relative_step=False, scale_parameter=False)


def bundles(sizes: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    room = 0
    for slot, size in enumerate(sizes):
        if found and size <= room:
            found[-1].append(slot)
            room -= size
        else:
            found.append([slot])
            room = BUNDLE_ELEMENTS - size
    return found
