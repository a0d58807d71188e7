"""Check that gradients and scores of a step are the model's, and not zeros of a failed
evaluation."""

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.blockwise import BlockwiseModel, Objective
from mlx_parallm.models.heads.value_head import value_head_of
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.sums import has_signal
from mlx_parallm.system.device.faults import wrong_numbers
from mlx_parallm.system.device.traits import may_lose_results

Result = tuple[mx.array, tuple[Any, ...], list[mx.array]]
"""The result of `BlockwiseModel.loss_and_gradients`; the last two of the further arrays are the
scores' log-probabilities and entropies."""
TRUSTED = 4
"""Times that a gradient which has become zeros is computed again; from then on at each doubling:
that of an expert, which one batch uses and another does not, would double the work of every second
step."""
LOSS, LOGPROBS = "the slope of the loss", "the log-probabilities"


def proved_scores(model: BlockwiseModel, batch: TokenBatch) -> list[np.ndarray]:
    """Return the model's scores: log-probabilities, entropies, and values. Raises
    DeviceFaultError: one of the first two is zeros, and is not when it is computed again."""
    scores = [np.array(part) for part in model.score(batch)]
    if scores[0].size and not all(part.any() for part in scores[:2]):
        again = [np.array(part) for part in model.score(batch)]
        if any(new.any() and not old.any() for old, new in zip(scores, again, strict=True)):
            raise wrong_numbers(f"{LOGPROBS} of a step are zeros alone")
    return scores


class GradientProof:
    """Check that gradients are the loss's. Used by one thread.

    A gradient of zeros may be right. Of a loss that reaches no token, as of a group with one
    reward: then the slope by the scores, which costs nothing, is zeros too. Of an adapter's A while
    its B is 0. Of an expert or a tower that a batch does not use: one that had numbers, or was not
    seen yet, is computed once more; if that gives numbers the device has failed. What was right
    `TRUSTED` times comes and goes with the batches, and is looked at more and more rarely: of such
    a name alone, a loss may then stay unseen. One evaluation makes many gradients, and it is
    noticed by any other of them.
    """

    def __init__(self, model: BlockwiseModel) -> None:
        self._model = model
        self._silent: set[str] = set()  # were zeros, and are so when they are computed again
        self._became_silent = Counter[str]()

    def learned(
        self, batch: TokenBatch, objective: Objective, sums: list[mx.array] | None, *, fuse: bool
    ) -> Result:
        """Return what `BlockwiseModel.loss_and_gradients` returns. Raises DeviceFaultError: it is
        zeros, and is not when it is computed again."""
        result = self._model.loss_and_gradients(batch, objective, sums, fuse=fuse)
        if not may_lose_results():
            return result
        zeros = self._zeros()
        odd = self._of_a_sum(sums, zeros)
        if flat := LOSS in zeros and self._is_flat(batch, objective, result):
            odd |= zeros & {LOGPROBS}
        else:
            odd |= self._odd(zeros)
        if odd:
            self._model.loss_and_gradients(batch, objective, sums, fuse=fuse)
            if wrong := sorted(odd - self._zeros()):
                raise wrong_numbers(f"the gradient of {wrong[0]} is zeros alone")
        if not flat:
            self._silent = zeros
        return result

    def _is_flat(self, batch: TokenBatch, objective: Objective, result: Result) -> bool:
        """Whether the loss does not depend on the scores, so that all its gradients are zeros.
        Values, and measures of a lesson, are not kept: their truth is unknown."""
        if batch.measure is not None or value_head_of(self._model.model) is not None:
            return False
        _, (*_, logprobs, entropies), _ = result
        slopes = mx.grad(lambda *scores: objective(*scores)[0], argnums=(0, 1))(logprobs, entropies)
        return not has_signal(slopes).any()

    def _of_a_sum(self, sums: list[mx.array] | None, zeros: set[str]) -> set[str]:
        """Those to which earlier micro-batches had given numbers: a sum does not vanish."""
        names = self._model.slots.names
        if not sums or zeros.isdisjoint(names):
            return set()
        signal = has_signal(sums)
        summed = {name for name, has in zip(names, signal, strict=True) if has}
        return summed & zeros

    def _odd(self, zeros: set[str]) -> set[str]:
        """Those that are to be computed again."""
        new = zeros - self._silent - self._without_b(zeros)
        self._became_silent.update(new)
        times = {name: self._became_silent[name] for name in new}
        return {name for name, n in times.items() if n <= TRUSTED or n.bit_count() == 1}

    def _zeros(self) -> set[str]:
        """Return what is zeros alone in the newest result."""
        names = self._model.slots.names
        signal = self._model.signals.read()
        zeros = {name for name, has in zip(names, signal, strict=False) if not has}
        zeros |= set() if signal[-2] else {LOGPROBS}
        return zeros if self._model.loss_reached else {*zeros, LOSS}

    def _without_b(self, zeros: set[str]) -> set[str]:
        """Those of an adapter's A whose B is 0."""
        slots = self._model.slots
        partners = {
            f"{name.removesuffix('.lora_a')}.lora_b": name
            for name in zeros - self._silent
            if name.endswith(".lora_a")
        }
        places = [place for place, name in enumerate(slots.names) if name in partners]
        signal = has_signal(slots.read(places))
        return {
            partners[slots.names[place]]
            for place, has in zip(places, signal, strict=True)
            if not has
        }
