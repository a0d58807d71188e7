"""The list of transformer blocks inside any mlx-lm model, and its forward with callables of ours in their places.

Embedding, masks, norm and head stay the architecture's own code: nothing here knows one architecture from another.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass
class BlockCall:
    """A block's arguments besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Stand:
    """Takes a block's place in the model's list; shows the block's attributes."""

    def __init__(self, block: Any, call: Callable[..., Any]) -> None:
        self._block, self._call = block, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


class LayerStack:
    """The list of blocks inside a model. `path` is its dotted name. Raises ValueError where there is none."""

    def __init__(self, model: nn.Module) -> None:
        wanted = list(getattr(model, "layers", None) or [])
        self.model = model
        for path, module in model.named_modules():
            for key, value in module.items():
                if wanted and isinstance(value, list) and len(value) == len(wanted) and _same(value, wanted):
                    self._owner, self._key, self.blocks = module, key, wanted
                    self.path = f"{path}.{key}" if path else key
                    return
        raise ValueError("the model has no list of layers")

    def samples(self) -> set[int]:
        """The first two blocks of each kind: blocks of one kind differ in the numbers of their arrays alone."""
        found: dict[Any, list[int]] = {}
        for index, block in enumerate(self.blocks):
            found.setdefault(_kind(block), []).append(index)
        return {index for indices in found.values() for index in indices[:2]}

    @contextmanager
    def only(self, kept: set[int]) -> Iterator[None]:
        """All other blocks pass the hidden state on as it is, also in the model's own forward."""

        def pass_on(hidden: mx.array, *_: Any, **__: Any) -> mx.array:
            return hidden

        blocks = self.blocks
        self.blocks = [b if index in kept else _Stand(b, pass_on) for index, b in enumerate(blocks)]
        original, self._owner[self._key] = self._owner[self._key], self.blocks
        try:
            yield
        finally:
            self.blocks, self._owner[self._key] = blocks, original

    @contextmanager
    def _replaced(self, calls: Sequence[Callable[..., Any]]) -> Iterator[None]:
        original = self._owner[self._key]
        self._owner[self._key] = [_Stand(block, call) for block, call in zip(self.blocks, calls, strict=True)]
        try:
            yield
        finally:
            self._owner[self._key] = original

    def walk(self, inputs: mx.array, visit: Callable[[int, mx.array, BlockCall], Any], cache: Any = None) -> Any:
        """Runs the model's forward on [B, T] tokens; `visit(i, hidden, call)` stands for block i. `cache`: one entry a
        block, as the model's own. Returns what the model does."""

        def stand(index: int) -> Callable[..., Any]:
            return lambda hidden, *args, **kwargs: visit(index, hidden, BlockCall(args, kwargs))

        with self._replaced([stand(index) for index in range(len(self.blocks))]):
            return self.model(inputs) if cache is None else self.model(inputs, cache=cache)

    def forward(self, inputs: mx.array) -> tuple[mx.array, Any]:
        """The model's own forward: logits [B, T, V], and what left the last block (of most architectures [B, T, D])."""
        last: list[Any] = []

        def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
            last[:] = [self.blocks[index](hidden, *call.args, **call.kwargs)]
            return last[0]

        return self.walk(inputs, visit), last[0]

    def hidden(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """What the head would read: hidden states [B, T, D] of [B, T] tokens, behind the final norm. Raises ValueError:
        the architecture has head and blocks in one module."""
        if self._owner is self.model:
            raise ValueError("this architecture shows no hidden states")
        found = self._owner(inputs, cache=cache)
        if not isinstance(found, mx.array) or found.shape[:2] != inputs.shape or found.ndim != 3:
            raise ValueError("this architecture shows no hidden states")
        return found

    def embed(self, inputs: mx.array, cache: Any = None) -> tuple[mx.array, list[BlockCall]]:
        """The first block's input [B, T, D], and what each block gets besides the hidden state."""
        first: list[mx.array] = []
        calls: list[BlockCall] = []

        def visit(_: int, hidden: mx.array, call: BlockCall) -> mx.array:
            first.append(hidden)
            calls.append(call)
            return hidden

        self.walk(inputs, visit, cache)
        return first[0], calls

    def head(self, hidden: mx.array) -> mx.array:
        """Final norm and head of rows [N, D] that left the last block → logits [N, V]."""
        rows = hidden[None]

        def first(*_: Any, **__: Any) -> mx.array:
            return rows

        def later(passed: mx.array, *_: Any, **__: Any) -> mx.array:
            return passed

        with self._replaced([first] + [later] * (len(self.blocks) - 1)):
            return self.model(mx.zeros((1, hidden.shape[0]), mx.int32))[0]


def _kind(block: Any) -> Any:
    """Equal for blocks of the same modules with the same settings and shapes."""
    found = []
    for path, module in block.named_modules():
        settings = [(key, _setting(value)) for key, value in [*vars(module).items(), *module.items()]]
        found.append((path, type(module), tuple(sorted(settings, key=lambda setting: setting[0]))))
    return tuple(sorted(found, key=lambda entry: entry[0]))


def _setting(value: Any) -> Any:
    """What is no plain value counts as itself: blocks that share it are of one kind, others are not."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, mx.array):
        return value.shape, str(value.dtype)
    if isinstance(value, nn.Module):
        return type(value)  # it is looked at by itself
    if isinstance(value, list | tuple):
        return tuple(map(_setting, value))
    if isinstance(value, dict):
        return tuple((key, _setting(inner)) for key, inner in sorted(value.items(), key=str))
    return tuple(sorted(map(str, value))) if isinstance(value, set | frozenset) else id(value)


def _same(a: list[Any], b: list[Any]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))
