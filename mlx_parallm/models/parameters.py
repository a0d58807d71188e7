"""The trainable arrays of a module tree as one flat, named list, and if each of them is bound.

Functions that MLX differentiates bind tracers into the tree; `bound` puts the real arrays back.
Binding a reference is all that ever happens to a slot: augmented or indexed assignment would change
an array that the serving tree shares.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten


class ParameterSlots:
    """Slots of a module's trainable parameters and of the `frozen` ones that are named, in the
    order of `names` (dotted paths, sorted), and behind them those of `beside`: arrays by name that
    are not parameters, and have a gradient."""

    def __init__(
        self,
        model: nn.Module,
        beside: MutableMapping[str, mx.array | None] | None = None,
        frozen: Iterable[str] = (),
    ) -> None:
        names = sorted({name for name, _ in tree_flatten(model.trainable_parameters())} | {*frozen})
        self.names: tuple[str, ...] = (*names, *(beside or ()))
        self._owners: list[tuple[Any, Any]] = [_owner(model, name) for name in names]
        self._owners += [(beside, name) for name in beside or ()]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def layer_norms(self) -> frozenset[str]:
        """The names of parameters of an `nn.LayerNorm`."""
        owners = zip(self.names, self._owners, strict=True)
        return frozenset(name for name, (owner, _) in owners if isinstance(owner, nn.LayerNorm))

    def read(self, indices: Sequence[int] | None = None) -> list[mx.array]:
        owners = self._owners if indices is None else [self._owners[i] for i in indices]
        return [owner[key] for owner, key in owners]

    def write(self, arrays: Sequence[mx.array], indices: Sequence[int] | None = None) -> None:
        owners = self._owners if indices is None else [self._owners[i] for i in indices]
        for (owner, key), array in zip(owners, arrays, strict=True):
            owner[key] = array

    @contextmanager
    def bound(
        self, arrays: Sequence[mx.array], indices: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Binds `arrays` for the length of the block."""
        before = self.read(indices)
        self.write(arrays, indices)
        try:
            yield
        finally:
            self.write(before, indices)


def of_part(path: str, parts: Iterable[str]) -> bool:
    """Whether the module or array at `path` is one of these parts, or in one."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


@dataclass(frozen=True)
class FeatureGradient:
    """Inputs of a model that are differentiated beside its parameters: the one array [N, …] that is
    `held`, by its name.

    `parts`: paths of the modules in the tree that make them; `levels`: blocks that read them too.
    """

    held: MutableMapping[str, Any]
    parts: Sequence[str]
    levels: int = 0


def own_slots(names: Sequence[str], features: FeatureGradient | None) -> list[int]:
    """Return which of these parameters a model's own forward reads: all but those of `parts`."""
    parts = () if features is None else features.parts
    return [slot for slot, name in enumerate(names) if not of_part(name, parts)]


def check_weights(model: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Raises ValueError: these are not all of the model's parameters, of their shapes and
    finite."""
    expected = {name: value.shape for name, value in tree_flatten(model.parameters())}
    if odd := expected.keys() ^ weights.keys():
        raise ValueError(f"missing or unknown weights: {', '.join(sorted(odd))}")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name} has the shape {weights[name].shape}, not {shape}")
        if not mx.isfinite(weights[name]).all().item():
            raise ValueError(f"{name} has numbers that are not finite")


def check_optimizer(optimizer: Optimizer, module: nn.Module, state: Any) -> None:
    """Check a loaded state. Raises ValueError: it is not one of a module's optimizer, or a number
    is not finite.

    Args:
        optimizer: a new one of the same kind and settings.
    """
    bare = dict(tree_flatten(optimizer.state))
    loaded = dict(tree_flatten(state))
    if loaded.keys() - bare.keys():  # it has made an update
        optimizer.init(module.trainable_parameters())
    expected = dict(tree_flatten(optimizer.state))
    if odd := sorted(expected.keys() ^ loaded.keys()):
        raise ValueError(f"missing or unknown states of the optimizer: {', '.join(odd[:5])}")
    for name, array in expected.items():
        value = loaded[name]
        if not isinstance(value, mx.array) or value.shape != array.shape:
            raise ValueError(f"the optimizer's {name} has not the shape {array.shape}")
        smallest = scalar(mx.min(value)) if name.endswith(".v") else 0.0  # a mean of squares
        if smallest < 0 or not mx.isfinite(value).all().item():
            raise ValueError(f"the optimizer's {name} has numbers that none can have")


def to_host(array: mx.array) -> np.ndarray:
    """Return a copy in host memory; bfloat16, which numpy lacks, becomes float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def scalar(array: mx.array) -> float:
    """The number in an array of one real element."""
    value = array.item()
    assert not isinstance(value, complex)
    return float(value)


def _owner(model: nn.Module, name: str) -> tuple[Any, Any]:
    *path, leaf = name.split(".")
    node: Any = model
    for part in path:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node, int(leaf) if isinstance(node, list) else leaf
