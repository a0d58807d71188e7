"""An adapter in memory: its layers' arrays, and the slot under whose name it is served."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import mlx.core as mx

ADAPTER_CONFIG = "adapter_config.json"  # mlx-lm's and PEFT's
PEFT_FILE = "adapter_model.safetensors"
ADALORA_FILE = "adalora.safetensors"


@dataclass(frozen=True)
class SvdFactors:
    """AdaLoRA's factors of a pair: its b is e[:, None] · left. e [r], left [r, out]. `pattern`:
    which of the init_r triplets that a training began with these r are."""

    e: mx.array
    left: mx.array
    pattern: tuple[bool, ...]


@dataclass(frozen=True)
class LoraPair:
    """One layer's update: a [in, r] and b [r, out], both float32, and its factor; of stacked
    experts a [experts, in, r] and b [experts, r, out]. With DoRA also
    the magnitude m [out], and in serving `gain` = m / ‖W + scale · (AB)ᵀ‖ [out] over the base
    that it was loaded beside. With AdaLoRA, on disk and in the trainer, the factors of b."""

    a: mx.array
    b: mx.array
    scale: float
    magnitude: mx.array | None = None
    gain: mx.array | None = None
    svd: SvdFactors | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.a, self.b, self.magnitude, self.gain) if array is not None]

    @cached_property
    def batch_of_one(self) -> tuple[mx.array, mx.array]:
        """a [1, in, r] and b [1, r, out]: views, which any thread may read."""
        views = self.a[None], self.b[None]
        mx.eval(views)
        return views


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter as it is served. Immutable: a publish makes a new one, requests in flight may
    keep the old. `content`: stands for its arrays in every process (`SharedWeights.note_contents`);
    None: not known."""

    name: str
    version: int
    layers: Mapping[str, LoraPair]
    # tells arrays apart: names and versions may come again
    serial: int = field(default_factory=count(1).__next__)
    content: str | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [array for pair in self.layers.values() for array in pair.arrays]


@dataclass(eq=False)
class AdapterSlot:
    """A name under which an adapter is served. Publishing and replacing rebind `weights`
    (weights.py, under the write lock). A request holds its slot to its end: a slot that has left
    the table keeps its weights. `pinned`: the slot keeps one version of the policy, and
    its tokens carry that version."""

    name: str
    weights: AdapterWeights
    pinned: bool = False
