"""The optimizer over a policy's parameters: float32 masters and global-norm clipping.

    PolicyOptimizer    all that is trained, by slots; the arrays bound in the tree may be views of
                       bundles of several
    ParameterGroup     the parameters that one of MLX's optimizers updates at one rate

Small arrays are laid end to end in bundles, so that an adapter of hundreds of arrays costs a dozen
operations and not thousands; AdamW and Lion are elementwise, so this changes no number. Muon and
Adafactor look at whole matrices: there each array is alone. States in 8 bits have blocks: there
each array begins one (states_8bit.py).
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.config.training import LearningSection
from mlx_parallm.errors import CheckpointError
from mlx_parallm.models.heads.value_head import is_value_head
from mlx_parallm.models.ops import fused
from mlx_parallm.models.parameters import ParameterSlots, scalar, to_host
from mlx_parallm.models.sums import NEW_ZEROS, Signals, evaluated, has_signal, total, zeros_of
from mlx_parallm.rl_training.step import states_8bit
from mlx_parallm.rl_training.step.adaptive_ranks import AdaptiveRanks
from mlx_parallm.rl_training.step.states_8bit import AdamW8bit, Lion8bit
from mlx_parallm.system.device.faults import wrong_numbers
from mlx_parallm.system.device.traits import may_lose_results

MEASURED_ELEMENTS = 1 << 20
"""The most weights that `Movement` is measured on: all of a small adapter, an even sample of
anything larger."""
HostCopy = list[dict[str, Any]]
"""Masters and states of each group, as trees of numpy's arrays."""
BUNDLE_ELEMENTS = 1 << 20  # 4 MiB of float32; larger arrays stand alone
QUANTISED = {"adamw_8bit": AdamW8bit, "lion_8bit": Lion8bit}
ELEMENTWISE = ("adamw", "lion", "sgd", *QUANTISED)
UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
UNITS = {states_8bit.ABSMAX: states_8bit.BLOCK}
"""End of a state's name → how many numbers of the parameter one of its numbers is of, if that is
not one."""
STATE_BYTES = {"adamw": 8.0, "muon": 4.0, "lion": 4.0, "adafactor": 0.0, "sgd": 0.0} | {
    "adamw_8bit": 2 * states_8bit.STATE_BYTES,
    "lion_8bit": states_8bit.STATE_BYTES,
}
"""Bytes of the optimizer's state for each trained number, without masters (Adafactor: a row and
a column a matrix)."""


def state_bytes(kind: str, numbers: int, small: int) -> float:
    """Return the bytes of the optimizer's state for `numbers` parameters; `small` of them are in
    arrays whose states are never quantised."""
    return small * STATE_BYTES[unquantised(kind)] + (numbers - small) * STATE_BYTES[kind]


def unquantised(kind: str) -> str:
    """The same optimizer with float32 states."""
    return kind.partition("_")[0]


def unit_of(kind: str) -> int:
    """See `UNITS`."""
    return next((unit for end, unit in UNITS.items() if kind.endswith(end)), 1)


@dataclass(frozen=True)
class Movement:
    """How far one update moved the trained weights: L2 norms of the update and of the weights
    before it, and the share of weights that changed in the tree's own dtype. A value head is
    left out: it is never served and has its own rate. With bfloat16 an update below half a unit
    in the last place (2^-9 of the weight) moves nothing that is served."""

    update_norm: float
    weight_norm: float
    weights_moved: float


@dataclass(frozen=True)
class Update:
    """`grad_norm` before clipping. Not `applied`: the gradient was not finite, nothing changed,
    nothing `moved`."""

    grad_norm: float
    applied: bool
    moved: Movement | None = None


@dataclass(frozen=True)
class AdamWSettings:
    """`max_grad_norm`: the global norm that gradients are clipped to; 0 = no clipping."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


class PolicyOptimizer:
    """Owns the float32 master copy of the slots' arrays; writes them into the tree, in the
    tree's dtype."""

    def __init__(self, slots: ParameterSlots, training: LearningSection) -> None:
        self._slots = slots
        self.kind: str = training.optimizer
        self._max_grad_norm = training.max_grad_norm
        arrays = slots.read()
        self._dtypes = [array.dtype for array in arrays]
        self._stride = -(-sum(array.size for array in arrays) // MEASURED_ELEMENTS)
        self._groups = make_groups(slots.names, arrays, training, slots.layer_norms)
        # signals of the weights in the tree; None: the device loses no results
        self._had_signal = has_signal(arrays) if may_lose_results() else None
        self._adaptive = (
            AdaptiveRanks(slots.names, arrays, allocation, training.total_steps)
            if (allocation := training.lora.allocation) is not None
            else None
        )
        self.write()

    def reload(self) -> None:
        """Take the masters from the tree, whose arrays were just loaded."""
        self._set_masters([array.astype(mx.float32) for array in self._slots.read()])

    @property
    def updates(self) -> int:
        return self._groups[0].updates

    def use_adamw(self, settings: AdamWSettings) -> None:
        """Take these numbers from the next update on; the optimizer is AdamW. All parameters are
        decayed."""
        self._max_grad_norm = settings.max_grad_norm
        for group in self._groups:
            group.use_adamw(settings)

    def update(
        self, gradients: Sequence[mx.array], learning_rate: float, step: int | None = None
    ) -> Update:
        """One update with float32 gradients in slot order; everything is evaluated.

        Args:
            step: of the training, for AdaLoRA's schedule; default: the number of this update.
        """
        if self._adaptive is not None:
            gradients = self._adaptive.regularised(gradients, self._masters())
            mx.eval(gradients)
        sums = [
            group.square_sum([gradients[slot] for slot in group.slots]) for group in self._groups
        ]
        norm = mx.sqrt(sum((squares for squares, _ in sums), mx.array(0.0)))
        packed = [part for _, part in sums]
        mx.eval(norm, packed)
        size = scalar(norm)
        if not size:
            self._check_packed(size, packed, gradients)
        if not math.isfinite(size):
            return Update(size, applied=False)
        clipped = self._max_grad_norm and size > self._max_grad_norm
        factor = self._max_grad_norm / (size + 1e-6) if clipped else None
        before = self._sample()
        for group, part in zip(self._groups, packed, strict=True):
            group.apply(part, learning_rate, factor)
        if any(group.learns_nothing for group in self._groups):
            self._check_packed(size, packed, gradients)
        if self._adaptive is not None:
            masters = self._masters()
            masked = self._adaptive.after_update(
                step or self.updates, masters, gradients, factor or 1.0
            )
            if masked:
                self._set_masters([masked.get(slot, each) for slot, each in enumerate(masters)])
        written = self._write()
        return Update(size, applied=True, moved=self._movement(before, written))

    def _check_packed(
        self, size: float, packed: Sequence[Mapping[str, mx.array]], gradients: Sequence[mx.array]
    ) -> None:
        """Raises DeviceFaultError: gradients were lost as they were packed."""
        if not may_lose_results():
            return
        parts = [array for part in packed for array in part.values()]
        signal = has_signal(parts)
        if size and signal.all():
            return
        again = has_signal(
            [
                array
                for group in self._groups
                for array in group.square_sum([gradients[slot] for slot in group.slots])[1].values()
            ]
        )
        if (again & ~signal).any() or (not size and signal.any()):
            raise wrong_numbers("the gradient as the optimizer takes it is zeros alone")

    def _sample(self) -> list[tuple[int, mx.array]]:
        """Every n-th weight, bundle by bundle. Of many: copies, so that the weights may go."""
        measured = [
            group for group in self._groups if not is_value_head(self._slots.names[group.slots[0]])
        ]
        places: list[int] = []

        def sampled() -> list[mx.array]:
            entries = [entry for group in measured for entry in group.sample(self._stride)]
            places[:] = [slot for slot, _ in entries]
            return [array for _, array in entries]

        # few weights: copies would save nothing
        entries = sampled() if self._stride == 1 else evaluated(sampled, "a sample of the weights")
        return list(zip(places, entries, strict=True))

    def _movement(self, before: list[tuple[int, mx.array]], written: Signals | None) -> Movement:
        """Measure the update, and prove with the same evaluation what was written."""
        squares, weights, moved = mx.array(0.0), mx.array(0.0), mx.array(0)
        for (slot, old), (_, new) in zip(before, self._sample(), strict=True):
            dtype = self._dtypes[slot]
            squares = squares + total(mx.square(new - old))
            weights = weights + total(mx.square(old))
            moved = moved + (new.astype(dtype) != old.astype(dtype)).sum()
        mx.eval(squares, weights, moved, written.flags if written else [])
        self._prove(written)
        if (
            before
            and not scalar(weights)
            and may_lose_results()
            and has_signal([array for _, array in before]).any()
        ):
            raise wrong_numbers("the norm of the weights is 0")
        count = sum(array.size for _, array in before)
        return Movement(
            math.sqrt(self._stride * scalar(squares)),
            math.sqrt(self._stride * scalar(weights)),
            scalar(moved) / count,
        )

    def _masters(self) -> list[mx.array]:
        """Return the masters in slot order."""
        masters: dict[int, mx.array] = {}
        for group in self._groups:
            masters |= dict(zip(group.slots, group.arrays, strict=True))
        return [masters[slot] for slot in range(len(self._dtypes))]

    def _set_masters(self, arrays: Sequence[mx.array]) -> None:
        for group in self._groups:
            group.masters = group.pack([arrays[slot] for slot in group.slots])

    def write(self) -> None:
        """Write the masters into the tree, in its dtype. Raises DeviceFaultError: one becomes zeros
        alone, and does not when it is written again."""
        self._prove(self._write())

    def _write(self) -> Signals | None:
        """Write the masters into the tree; return what proves them (None: a CPU has made them)."""
        arrays = [
            array.astype(dtype) for array, dtype in zip(self._masters(), self._dtypes, strict=True)
        ]
        mx.eval(arrays)
        self._slots.write(arrays)
        return Signals(arrays) if may_lose_results() else None

    def _prove(self, written: Signals | None) -> None:
        if written is None or self._had_signal is None:
            return
        signal, masters = written.read(), self._masters()
        lost = np.flatnonzero(self._had_signal & ~signal).tolist()
        if lost and has_signal([masters[p].astype(self._dtypes[p]) for p in lost]).any():
            raise wrong_numbers(f"{self._slots.names[lost[0]]} is zeros alone")
        self._had_signal = signal

    # ------------------------------------------------------------------ checkpoint

    def host_copy(self, most_bytes: int) -> "HostCopy | None":
        """Return masters and states in host memory; None: they are more, or AdaLoRA has further
        ones."""
        trees = [group.arrays_now() for group in self._groups]
        size = sum(array.nbytes for _, array in tree_flatten(trees))
        return None if self._adaptive is not None or size > most_bytes else tree_map(to_host, trees)

    def put_back(self, copy: "HostCopy") -> None:
        """Take masters and states from `host_copy`, and write the weights into the tree."""
        for group, tree in zip(self._groups, tree_map(mx.array, copy), strict=True):
            group.take_arrays(tree)
        self.write()

    def state(self) -> dict[str, mx.array]:
        """Return the tensors for `optimizer.safetensors`: `step`, `<parameter>.<kind>` for each
        kind of state (AdamW: m, v), and `<parameter>.master` if the tree is narrower than
        float32. With AdaLoRA also the importances."""
        tensors: dict[str, mx.array] = {"step": mx.array(self.updates, mx.uint64)}
        for group in self._groups:
            for kind, arrays in group.state().items():
                names = (self._slots.names[slot] for slot in group.slots)
                tensors |= {
                    f"{name}.{kind}": a for name, a in zip(names, arrays, strict=True) if a.size
                }
        tensors |= {} if self._adaptive is None else self._adaptive.state()
        masters = zip(self._slots.names, self._masters(), self._dtypes, strict=True)
        return tensors | {
            f"{name}.master": array for name, array, dtype in masters if dtype != mx.float32
        }

    def restore(self, tensors: Mapping[str, mx.array]) -> None:
        """Load what `state()` returned. The tree's own arrays must have been loaded. Raises
        CheckpointError."""
        for name, array in self.state().items():
            if name.endswith(".kept"):
                continue  # optional
            if name not in tensors or tensors[name].shape != array.shape:
                shape = tensors[name].shape if name in tensors else "nothing"
                raise CheckpointError(
                    f"optimizer state of {name}: expected {array.shape}, found {shape}"
                )
            if not mx.isfinite(tensors[name]).all().item():
                raise CheckpointError(f"optimizer state of {name}: a number is not finite")
        loaded = zip(self._slots.names, self._slots.read(), strict=True)
        self._set_masters(
            [tensors.get(f"{n}.master", array.astype(mx.float32)) for n, array in loaded]
        )
        for group in self._groups:
            names = [self._slots.names[slot] for slot in group.slots]
            state = {
                kind: [tensors.get(f"{n}.{kind}", mx.zeros((0,))) for n in names]
                for kind in group.state()
            }
            group.restore(tensors["step"], state)
        if self._adaptive is not None:
            self._adaptive.restore(tensors)
        self.write()


class ParameterGroup:
    """The float32 masters of some slots, their optimizer and its state; lists are in the order of
    `slots`.

    `rate`: this group's learning rate in units of the step's.
    """

    def __init__(
        self,
        optimizer: optimizers.Optimizer,
        kind: str,
        rate: float,
        slots: Sequence[int],
        arrays: Sequence[mx.array],
    ) -> None:
        self.slots, self._rate, self._flat = list(slots), rate, kind in ELEMENTWISE
        self._in_blocks = kind in QUANTISED
        self._shapes = [array.shape for array in arrays]
        # as they lie in a bundle
        self._sizes = [
            states_8bit.padded(array.size) if self._in_blocks else array.size for array in arrays
        ]
        self._bundles = bundles(self._sizes) if self._flat else [[i] for i in range(len(arrays))]
        self._optimizer = optimizer
        self._settings: AdamWSettings | None = None
        # since the last update: it is not compiled, since they would be part of its loops
        self._new_settings = False
        self._had_signal = set[tuple[str, str]]()  # masters and states that were not zeros alone
        self.learns_nothing = False  # a gradient of the last update was zeros alone
        self.masters = self.pack(arrays)
        self._optimizer.init(self.masters)

    @property
    def updates(self) -> int:
        return int(scalar(self._optimizer.step))

    @property
    def arrays(self) -> list[mx.array]:
        """The masters, each in its shape."""
        return self._unpack(self.masters)

    def use_adamw(self, settings: AdamWSettings) -> None:
        assert isinstance(self._optimizer, optimizers.AdamW)
        self._new_settings, self._settings = settings != self._settings, settings
        self._optimizer.betas = [settings.beta1, settings.beta2]
        self._optimizer.eps = settings.eps
        self._optimizer.weight_decay = settings.weight_decay

    def square_sum(self, gradients: Sequence[mx.array]) -> tuple[mx.array, dict[str, mx.array]]:
        """Σ g² of this group's gradients (float32), and the gradients as `apply` takes them.
        Lazy."""
        packed = self.pack(gradients)
        return sum((total(mx.square(part)) for part in packed.values()), mx.array(0.0)), packed

    def apply(
        self, gradients: dict[str, mx.array], learning_rate: float, factor: float | None
    ) -> None:
        """One update with the gradients, times `factor` unless it is None; masters and state are
        evaluated. After an exception this group's are unchanged. Raises DeviceFaultError: a
        result is zeros, and is not when it is computed again."""
        optimizer = self._optimizer
        optimizer.learning_rate = learning_rate * self._rate
        state = optimizer.state

        def updated(gradients: Any, masters: Any, state: Any, factor: mx.array | None) -> Any:
            optimizer.state = state
            if factor is not None:
                gradients = {name: array * factor for name, array in gradients.items()}
            return optimizer.apply_gradients(gradients, masters), optimizer.state

        def update(gradients: Any, masters: Any, state: Any) -> Any:
            numbers = 0 if self._new_settings else sum(array.size for array in masters.values())
            # MLX writes into the dictionaries that it is given
            previous = tree_map(lambda array: array, state)
            results = fused(updated, numbers)(
                gradients, masters, previous, None if factor is None else mx.array(factor)
            )
            mx.eval(results)
            return results

        def results() -> Any:
            if self._in_blocks:
                return states_8bit.in_pieces(update, gradients, self.masters, state)
            return update(gradients, self.masters, state)

        try:
            masters, new_state = results()
            odd = self._odd_zeros(gradients, masters, new_state) if may_lose_results() else set()
            if odd and (wrong := odd - self._odd_zeros(gradients, *results())):
                raise wrong_numbers(f"the optimizer's {min(wrong)}")
            self.masters, state = masters, new_state
        finally:
            optimizer.state = state

    def _odd_zeros(self, gradients: Mapping[str, mx.array], masters: Any, state: Any) -> set[str]:
        """Return the results of an update that are zeros alone although they, or their gradient,
        were not, and the masters that have got many zeros."""
        looked = {(name, "gradient"): array for name, array in gradients.items()}
        looked |= {(name, kind): array for name in masters for kind, array in state[name].items()}
        states = Signals(list(looked.values()))
        zeros = zeros_of(masters, states.flags)
        signals = dict(zip(looked, states.read().tolist(), strict=True))
        signals |= {(name, "master"): zeros[name] < masters[name].size for name in masters}
        learns = {name: signals.pop((name, "gradient")) for name in gradients}
        self.learns_nothing = not all(learns.values())
        odd = {
            f"{kind} of {name} is zeros alone"
            for (name, kind), has in signals.items()
            if not has and (learns[name] or (name, kind) in self._had_signal)
        }
        if not odd:
            self._had_signal = {leaf for leaf, has in signals.items() if has}
        bounds = {name: array.size // NEW_ZEROS for name, array in masters.items()}
        many = [name for name, count in zeros.items() if count > bounds[name]]
        before = zeros_of({name: self.masters[name] for name in many})
        grown = [name for name in many if zeros[name] > before[name] + bounds[name]]
        return odd | {f"master of {name} has new zeros" for name in grown}

    def sample(self, stride: int) -> Iterator[tuple[int, mx.array]]:
        """(first slot of a bundle, every n-th of its numbers), bundle by bundle. Lazy copies."""
        if self._in_blocks:  # without what fills up the last block of an array
            for slot, array in zip(self.slots, self.arrays, strict=True):
                yield slot, array.reshape(-1)[::stride]
            return
        for bundle, array in zip(self._bundles, self.masters.values(), strict=True):
            yield self.slots[bundle[0]], array.reshape(-1)[::stride]

    # ------------------------------------------------------------------ checkpoint

    def arrays_now(self) -> dict[str, Any]:
        """Return masters and states as they lie here."""
        return {"masters": self.masters, "state": self._optimizer.state}

    def take_arrays(self, tree: dict[str, Any]) -> None:
        """The counterpart of `arrays_now`."""
        self.masters, self._optimizer.state = tree["masters"], tree["state"]

    def state(self) -> dict[str, list[mx.array]]:
        """Return the optimizer's state besides the step, by kind ("m", "v", …): an array for each
        slot, empty if it has none."""
        kept = [self._optimizer.state[name] for name in self.masters]
        kinds = sorted({kind for entry in kept for kind in entry})
        if self._flat:
            return {
                kind: self._cut(kind, {n: self._optimizer.state[n][kind] for n in self.masters})
                for kind in kinds
            }
        return {kind: [entry.get(kind, mx.zeros((0,))) for entry in kept] for kind in kinds}

    def restore(self, step: mx.array, state: Mapping[str, Sequence[mx.array]]) -> None:
        """The counterpart of `state`, evaluated."""
        for kind, arrays in state.items():
            packed = self.pack(arrays) if unit_of(kind) == 1 else self._laid_out(arrays)
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
        flat = [array.reshape(-1) for array in arrays]
        return self._laid_out(
            [
                array if array.size == size else mx.pad(array, (0, size - array.size))
                for array, size in zip(flat, self._sizes, strict=True)
            ]
        )

    def _laid_out(self, arrays: Sequence[mx.array]) -> dict[str, mx.array]:
        return {
            f"bundle{i}": arrays[bundle[0]]
            if len(bundle) == 1
            else mx.concatenate([arrays[slot] for slot in bundle])
            for i, bundle in enumerate(self._bundles)
        }

    def _unpack(self, packed: Mapping[str, mx.array]) -> list[mx.array]:
        if not self._flat:
            return list(packed.values())
        return [
            flat[: math.prod(shape)].reshape(shape)
            for flat, shape in zip(self._parts(packed, 1), self._shapes, strict=True)
        ]

    def _cut(self, kind: str, packed: Mapping[str, mx.array]) -> list[mx.array]:
        """The same of a state; flat if it has one number for several."""
        unit = unit_of(kind)
        return self._unpack(packed) if unit == 1 else self._parts(packed, unit)

    def _parts(self, packed: Mapping[str, mx.array], unit: int) -> list[mx.array]:
        """Cut the bundles at the slots; `unit`: numbers of a slot for each number in them."""
        parts: list[mx.array] = [None] * len(self._shapes)  # type: ignore[list-item]
        for i, bundle in enumerate(self._bundles):
            start, flat = 0, packed[f"bundle{i}"]
            for slot in bundle:
                parts[slot] = flat[start : start + self._sizes[slot] // unit]
                start += self._sizes[slot] // unit
        return parts


class PlainSGD(optimizers.SGD):
    """MLX's without momentum, and without the state of one: w - rate · (g + weight_decay · w)."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Leave the state empty."""


def make_groups(
    names: Sequence[str],
    arrays: Sequence[mx.array],
    training: LearningSection,
    layer_norms: Collection[str] = (),
) -> tuple[ParameterGroup, ...]:
    """One group for each (optimizer, rate, decay) that the parameters have; a value head is one
    of its own. `layer_norms`: the names that are `nn.LayerNorm`'s."""
    members: dict[tuple[str, float, float, bool], list[int]] = {}
    for slot, (name, array) in enumerate(zip(names, arrays, strict=True)):
        key = (
            kind_of(name, array.shape, training),
            rate_of(name, training),
            0.0
            if name in layer_norms and not training.decay_norms_and_biases
            else decay_of(name, training),
            is_value_head(name),
        )
        members.setdefault(key, []).append(slot)
    wide = [array.astype(mx.float32) for array in arrays]
    return tuple(
        ParameterGroup(
            make_optimizer(kind, decay, training), kind, rate, slots, [wide[s] for s in slots]
        )
        for (kind, rate, decay, _), slots in members.items()
    )


def kind_of(name: str, shape: Sequence[int], training: LearningSection) -> str:
    """Muon is for the matrices of the blocks (and of adapters): embedding, head, norms,
    magnitudes and stacked experts are AdamW's (https://kellerjordan.github.io/posts/muon/). The
    states of small arrays are not quantised."""
    kind = training.optimizer
    if kind in QUANTISED and math.prod(shape) < states_8bit.SMALLEST:
        return unquantised(kind)
    is_matrix = len(shape) == 2 and (
        name.endswith((".lora_a", ".lora_b")) or re.search(r"\.\d+\.", name)
    )
    return kind if kind != "muon" or is_matrix else "adamw"


def rate_of(name: str, training: LearningSection) -> float:
    """LoRA+ (Hayou et al. 2024, arXiv:2402.12354): B learns `loraplus_ratio` times as fast as
    A. A value head has `ppo.value_learning_rate`, that of a reward model
    `preference.head_learning_rate`, on the same schedule."""
    if is_value_head(name):
        return training.head_learning_rate / training.learning_rate
    return training.lora.loraplus_ratio if name.endswith(".lora_b") else 1.0


def decay_of(name: str, training: LearningSection) -> float:
    """Norms and biases are not decayed: pulled to 0 they turn their layer off. Their names are
    those of transformers' `Trainer.get_decay_parameter_names`, so of TRL."""
    left_out = UNDECAYED.search(name.lower()) and not training.decay_norms_and_biases
    return 0.0 if left_out else training.weight_decay


def make_optimizer(kind: str, decay: float, training: LearningSection) -> optimizers.Optimizer:
    """MLX's; the learning rate is set at each update."""
    rate = training.learning_rate
    if kind in ("adamw", "adamw_8bit"):
        return QUANTISED.get(kind, optimizers.AdamW)(
            learning_rate=rate,
            betas=[training.adam_beta1, training.adam_beta2],
            eps=training.adam_eps,
            weight_decay=decay,
            bias_correction=True,
        )
    if kind in ("lion", "lion_8bit"):
        return QUANTISED.get(kind, optimizers.Lion)(learning_rate=rate, weight_decay=decay)
    if kind == "muon":
        return optimizers.Muon(learning_rate=rate, weight_decay=decay)
    if kind == "sgd":
        return PlainSGD(rate, weight_decay=decay)
    # the learning rate is the configuration's, not the paper's own schedule
    assert kind == "adafactor", kind
    return optimizers.Adafactor(
        rate, weight_decay=decay, relative_step=False, scale_parameter=False
    )


def bundles(sizes: Sequence[int]) -> list[list[int]]:
    """Neighbouring slots whose arrays fit into one bundle."""
    parts: list[list[int]] = []
    room = 0
    for slot, size in enumerate(sizes):
        if parts and size <= room:
            parts[-1].append(slot)
            room -= size
        else:
            parts.append([slot])
            room = BUNDLE_ELEMENTS - size
    return parts
