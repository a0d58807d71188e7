"""Whether gradients and scores of a step are what the model gives, and not zeros of a failed
evaluation."""

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.sums import has_signal
from mlx_parallm.system.device.faults import wrong_numbers
from mlx_parallm.system.device.traits import may_lose_results

Result = tuple[mx.array, tuple[Any, ...], list[mx.array]]
"""What `BlockwiseModel.loss_and_gradients` returns; the last two of the further arrays are the
scores' log-probabilities and entropies."""
TRUSTED = 4
"""Times that a gradient of zeros is computed again: a tower's, whose batches have images or none,
would double the work of every second step."""
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
    """Whether gradients are what the loss made. One thread's.

    A gradient of zeros may be right: of an adapter's A while its B is 0, of a loss that reaches no
    token, an expert or a tower that a batch does not use. One that had numbers, or was not seen
    yet, is computed once more; where that gives numbers the device has failed. One that was right
    `TRUSTED` times comes and goes with the batches, and is not computed again.
    """

    def __init__(self, model: BlockwiseModel) -> None:
        self._model = model
        self._silent: set[str] = set()  # were zeros, and are so when they are computed again
        self._right = Counter[str]()  # how often a gradient was rightly zeros

    def learned(self, *arguments: Any, fuse: bool) -> Result:
        """Return what `BlockwiseModel.loss_and_gradients` returns. Raises DeviceFaultError: it is
        zeros, and is not when it is computed again."""
        result = self._model.loss_and_gradients(*arguments, fuse=fuse)
        if not may_lose_results():
            return result
        zeros = self._zeros(result)
        trusted = {name for name in zeros if self._right[name] >= TRUSTED}
        if odd := zeros - self._silent - trusted - self._without_b(zeros):
            again = self._zeros(self._model.loss_and_gradients(*arguments, fuse=fuse))
            if wrong := sorted(odd - again):
                raise wrong_numbers(f"the gradient of {wrong[0]} is zeros alone")
            self._right.update(odd)
        self._silent = zeros
        return result

    def _zeros(self, result: Result) -> set[str]:
        _, extras, gradients = result
        names = [*self._model.slots.names, LOGPROBS]
        signal = has_signal([*gradients, extras[-2]])
        zeros = {name for name, has in zip(names, signal, strict=True) if not has}
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
