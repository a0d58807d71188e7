"""AdaLoRA's budget (Zhang et al. 2023, arXiv:2303.10512, as in PEFT's RankAllocator): which
triplets of an adapter, (column of A, singular value E, row of B), keep their singular value.

    budget_at               the cubic schedule: triplets that are left after a step
    AdaptiveRanks           one adapter's: importance of every number, masks of every E

Importance of a number w with gradient g: I = |w g|, smoothed to Ī = β1 Ī + (1 - β1) I, its
uncertainty Ū = β2 Ū + (1 - β2) |I - Ī|, score Ī Ū. A triplet's score is E's plus the means of its
column's and its row's. After an update the triplets with the lowest scores have E = 0; until the
last allocation they can come back, since E continues learning. The orthogonal regulariser
w · mean ‖AᵀA - 1‖, over all A and Bᵀ, has no data in it, so its gradient is added here.
"""

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.config.training import AdaLoraConfig

Slots = tuple[int, int, int]  # slots of A, B and E of a layer


def budget_at(
    step: int, total_steps: int, initial: int, target: int, config: AdaLoraConfig
) -> int | None:
    """Return how many triplets are left after a step (1, 2, …); None: nothing is allocated then.

    Worked: 10 steps, tinit 2, tfinal 2, deltaT 2, 40 → 16 triplets: none after steps 1 to 3, after
    step 4 int(24 · (1 - 2/6)³ + 16) = 23, after 6 16 (16.9), after 8 and later 16.
    """
    last = total_steps - config.tfinal
    if step >= last:
        return target
    if step <= config.tinit or step % config.deltaT:
        return None
    left = 1.0 - (step - config.tinit) / (last - config.tinit)
    return int((initial - target) * left**3 + target)


class AdaptiveRanks:
    """Reads and masks the arrays of an adapter, which are in the order of the slots' `names`."""

    def __init__(
        self,
        names: Sequence[str],
        arrays: Sequence[mx.array],
        config: AdaLoraConfig,
        total_steps: int,
    ) -> None:
        numbers = {name: slot for slot, name in enumerate(names)}
        paths = sorted(name.removesuffix(".lora_e") for name in names if name.endswith(".lora_e"))
        self._layers: list[Slots] = [
            (numbers[f"{p}.lora_a"], numbers[f"{p}.lora_b"], numbers[f"{p}.lora_e"]) for p in paths
        ]
        self._names, self._config, self._total_steps = names, config, total_steps
        slots = [slot for layer in self._layers for slot in layer]
        self._sensitivity = {slot: mx.zeros(arrays[slot].shape) for slot in slots}
        self._uncertainty = {slot: mx.zeros(arrays[slot].shape) for slot in slots}
        # mask of each E, after the last allocation
        self._kept: dict[int, mx.array] = {}
        self._initial = sum(arrays[e].size for _, _, e in self._layers)
        self._target = self._config.target_r * len(self._layers)

    def regularised(
        self, gradients: Sequence[mx.array], arrays: Sequence[mx.array]
    ) -> list[mx.array]:
        """The gradients with the regulariser's: of ‖C‖, C = AᵀA - 1, it is 2 A C / ‖C‖. Lazy."""
        weight, result = self._config.orth_reg_weight, list(gradients)
        if not weight:
            return result
        share = weight / (2 * len(self._layers))
        for a, b, _ in self._layers:
            result[a] = result[a] + share * _slope(arrays[a])
            result[b] = result[b] + share * _slope(arrays[b].T).T
        return result

    def after_update(
        self, step: int, arrays: Sequence[mx.array], gradients: Sequence[mx.array], factor: float
    ) -> dict[int, mx.array]:
        """Measure an update of a step; return the masked E's by slot, evaluated, if there are any.

        Args:
            arrays: after the update. `gradients`: of it; clipping multiplied them by `factor`.
        """
        last = self._total_steps - self._config.tfinal
        if step < last:
            self._kept = {}  # left by a shorter run
            self._measure(arrays, gradients, factor)
        budget = budget_at(step, self._total_steps, self._initial, self._target, self._config)
        if budget is None:
            return {}
        kept = self._kept or self._chosen(budget)
        if step >= last and kept:
            self._kept = kept
        masked = {slot: mx.where(keep, arrays[slot], 0.0) for slot, keep in kept.items()}
        mx.eval(masked, kept)
        return masked

    def _measure(
        self, arrays: Sequence[mx.array], gradients: Sequence[mx.array], factor: float
    ) -> None:
        beta1, beta2 = self._config.beta1, self._config.beta2
        sensitivity, uncertainty = dict[int, mx.array](), dict[int, mx.array]()
        for slot, mean in self._sensitivity.items():
            importance = mx.abs(arrays[slot] * gradients[slot] * factor)
            sensitivity[slot] = beta1 * mean + (1 - beta1) * importance
            off = mx.abs(importance - sensitivity[slot])
            uncertainty[slot] = beta2 * self._uncertainty[slot] + (1 - beta2) * off
        mx.eval(sensitivity, uncertainty)
        self._sensitivity, self._uncertainty = sensitivity, uncertainty

    def _chosen(self, budget: int) -> dict[int, mx.array]:
        """The triplets [r] of each E above the lowest scores that the budget has no room for; {}
        if it has room for all, or nothing was measured."""
        scores = {e: self._scores(a, b, e) for a, b, e in self._layers}
        every, left_out = np.concatenate(list(scores.values())), self._initial - budget
        if left_out <= 0 or not every.any():
            return {}
        threshold = np.partition(every, left_out - 1)[left_out - 1]
        return {slot: mx.array(score > threshold) for slot, score in scores.items()}

    def _scores(self, a: int, b: int, e: int) -> np.ndarray:
        score = {slot: self._sensitivity[slot] * self._uncertainty[slot] for slot in (a, b, e)}
        return np.array(score[e] + (score[a].mean(axis=0) + score[b].mean(axis=1)))

    # ------------------------------------------------------------------ checkpoint

    def state(self) -> dict[str, mx.array]:
        """The tensors for `optimizer.safetensors`: `<parameter>.sensitivity`, `.uncertainty`, and
        after the last allocation `.kept`."""
        return dict(self._parts())

    def _parts(self) -> Iterator[tuple[str, mx.array]]:
        for slot, array in self._sensitivity.items():
            yield f"{self._names[slot]}.sensitivity", array
            yield f"{self._names[slot]}.uncertainty", self._uncertainty[slot]
        for slot, array in self._kept.items():
            yield f"{self._names[slot]}.kept", array.astype(mx.uint8)

    def restore(self, tensors: Mapping[str, mx.array]) -> None:
        """Load what `state` returned, which has the shapes of this one."""
        for slot in self._sensitivity:
            self._sensitivity[slot] = tensors[f"{self._names[slot]}.sensitivity"]
            self._uncertainty[slot] = tensors[f"{self._names[slot]}.uncertainty"]
        self._kept = {
            e: tensors[f"{self._names[e]}.kept"] != 0
            for _, _, e in self._layers
            if f"{self._names[e]}.kept" in tensors
        }
        mx.eval(self._sensitivity, self._uncertainty, self._kept)


def _slope(a: mx.array) -> mx.array:
    """d ‖AᵀA - 1‖ / dA of A [n, r]; 0 if the columns are orthonormal. Lazy."""
    c = a.T @ a - mx.eye(a.shape[1])
    norm = mx.sqrt(mx.square(c).sum())
    return 2.0 * (a @ c) / mx.where(norm > 0, norm, 1.0)
