"""The list of transformer blocks inside any mlx-lm model, and its forward with callables of ours in
their places.

Embedding, masks, norm and head stay the architecture's own code: nothing here knows one
architecture from another. Most blocks take the hidden state as their first argument. Others take it
by keyword, or behind another array (GPT-J, Talkie): `_HiddenArgument` reads the place from the
block's signature, so that everyone here passes it first.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.sums import total

HIDDEN_NAMES = ("x", "h", "hidden_states")
"""mlx-lm's names of the hidden state if it is not a block's first parameter."""


@dataclass
class BlockCall:
    """A block's arguments besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class BlockOutput:
    """A placeholder in a block's arguments: the value that block number `block` returned in place
    `place`, behind the hidden state."""

    block: int
    place: int


class _Stand:
    """Takes a block's place in the model's list; shows the block's attributes."""

    def __init__(self, block: Any, call: Callable[..., Any]) -> None:
        self._block, self._call = block, call

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The block's: OLMo Hybrid chooses a block's mask by its class."""
        return type(self._block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


@dataclass(frozen=True)
class _HiddenArgument:
    """The place of the hidden state among a block's arguments: the position and name of the
    parameter."""

    position: int
    name: str

    @classmethod
    def of(cls, block: Any) -> "_HiddenArgument":
        """Read the signature: the parameter with one of `HIDDEN_NAMES`, or else the first."""
        if not callable(block):  # the model calls the block's parts itself
            return cls(0, "")
        names = list(inspect.signature(block).parameters)
        name = next((name for name in names if name in HIDDEN_NAMES), names[0])
        return cls(names.index(name), name)

    def as_called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable with the block's own order of arguments for `call`, which takes the
        hidden state first."""

        def own_order(*args: Any, **kwargs: Any) -> Any:
            if self.name in kwargs:
                return call(kwargs.pop(self.name), *args, **kwargs)
            return call(
                args[self.position], *args[: self.position], *args[self.position + 1 :], **kwargs
            )

        return own_order

    def hidden_first(self, block: Any) -> Any:
        """Return the block, or a stand for it that takes the hidden state first."""
        if self.position == 0:
            return block

        def call(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            return block(*args[: self.position], hidden, *args[self.position :], **kwargs)

        return _Stand(block, call)


class LayerStack:
    """The list of blocks inside a model. `path` is its dotted name. Raises ValueError where
    there is none."""

    def __init__(self, model: nn.Module) -> None:
        wanted = list(getattr(model, "layers", None) or [])
        self.model = model
        for path, module in model.named_modules():
            for key, value in module.items():
                if (
                    wanted
                    and isinstance(value, list)
                    and len(value) == len(wanted)
                    and _same(value, wanted)
                ):
                    self._owner, self._key = module, key
                    self._places = [_HiddenArgument.of(block) for block in wanted]
                    self.blocks = [
                        place.hidden_first(b) for place, b in zip(self._places, wanted, strict=True)
                    ]
                    self.path = f"{path}.{key}" if path else key
                    # how much each block returns beside the hidden state
                    self.returns = [0] * len(wanted)
                    # (block, place): None in each forward
                    self._empty: set[tuple[int, int]] = set()
                    # axes of the hidden state in front of [B, T, D] (Gemma 3n)
                    self._lead: tuple[int, ...] = ()
                    return
        raise ValueError("the model has no list of layers")

    def note(self, outputs: Sequence[Any]) -> None:
        """Learn from the blocks' outputs in the model's own forward: the hidden state's axes,
        and how much more."""
        self.returns = [len(output) - 1 if isinstance(output, tuple) else 0 for output in outputs]
        self._empty = {
            (i, p)
            for i, n in enumerate(self.returns)
            for p in range(1, n + 1)
            if outputs[i][p] is None
        }
        self._lead = hidden_of(outputs[0]).shape[:-3]

    def flat(self, hidden: mx.array) -> mx.array:
        """[…, B, T, D] as [B · T, W], a row for each token."""
        lead = len(self._lead)
        return mx.moveaxis(hidden.reshape(*self._lead, -1, hidden.shape[-1]), lead, 0).flatten(1)

    def unflat(self, rows: mx.array, shape: Sequence[int]) -> mx.array:
        """[N, W] of `flat` as a hidden state of that shape."""
        return mx.moveaxis(rows.reshape(-1, *self._lead, shape[-1]), 0, len(self._lead)).reshape(
            shape
        )

    def returned(self, index: int, hidden: mx.array, other: Callable[[BlockOutput], Any]) -> Any:
        """Return a block's output: `hidden`, and `other(output)` for each value that the block
        returns beside the hidden state."""
        if not (count := self.returns[index]):
            return hidden
        places = range(1, count + 1)
        return hidden, *(
            None if (index, p) in self._empty else other(BlockOutput(index, p)) for p in places
        )

    def samples(self) -> set[int]:
        """The first two blocks of each kind: blocks of one kind differ in the numbers of their
        arrays alone. All, where blocks read what others returned."""
        if any(self.returns):
            return set(range(len(self.blocks)))
        by_kind: dict[Any, list[int]] = {}
        for index, block in enumerate(self.blocks):
            by_kind.setdefault(_kind(block), []).append(index)
        return {index for indices in by_kind.values() for index in indices[:2]}

    @contextmanager
    def only(self, kept: set[int]) -> Iterator[None]:
        """All other blocks pass the hidden state on as it is, also in the model's own forward."""

        def pass_on(hidden: mx.array, *_: Any, **__: Any) -> mx.array:
            return hidden

        blocks = self.blocks
        self.blocks = [b if index in kept else _Stand(b, pass_on) for index, b in enumerate(blocks)]
        try:
            with self._replaced(self.blocks):
                yield
        finally:
            self.blocks = blocks

    @contextmanager
    def _replaced(self, calls: Sequence[Callable[..., Any]]) -> Iterator[None]:
        """`calls` take the hidden state first, and are in the model's own forward."""
        original = self._owner[self._key]
        stands = zip(self.blocks, self._places, calls, strict=True)
        self._owner[self._key] = [
            _Stand(block, place.as_called(call)) for block, place, call in stands
        ]
        try:
            yield
        finally:
            self._owner[self._key] = original

    def walk(
        self, inputs: mx.array, visit: Callable[[int, mx.array, BlockCall], Any], cache: Any = None
    ) -> Any:
        """Runs the model's forward on [B, T] tokens; `visit(i, hidden, call)` stands for block
        i. `cache`: one entry a block, as the model's own. Returns the model's output."""

        def stand(index: int) -> Callable[..., Any]:
            def call(hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
                output = visit(index, hidden, BlockCall(args, kwargs))
                if index < len(self.blocks) - 1:
                    return output
                # a new object: some models write into what left the last block
                last = hidden_of(output)[...]
                return (last, *output[1:]) if isinstance(output, tuple) else last

            return call

        with self._replaced([stand(index) for index in range(len(self.blocks))]):
            return self.model(inputs) if cache is None else self.model(inputs, cache=cache)

    def forward(self, inputs: mx.array) -> tuple[mx.array, Any]:
        """The model's own forward: logits [B, T, V], and what left the last block (of most
        architectures [B, T, D])."""
        last: list[Any] = []

        def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
            last[:] = [self.blocks[index](hidden, *call.args, **call.kwargs)]
            return last[0]

        return self.walk(inputs, visit), hidden_of(last[0])

    def hidden(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Return the head's input: hidden states [B, T, D] of [B, T] tokens, behind the final norm.
        Raises ValueError: the architecture has head and blocks in one module."""
        if self._owner is self.model:
            raise ValueError("this architecture shows no hidden states")
        states = self._owner(inputs, cache=cache)
        if not isinstance(states, mx.array) or states.shape[:2] != inputs.shape or states.ndim != 3:
            raise ValueError("this architecture shows no hidden states")
        return states

    def embed(self, inputs: mx.array, cache: Any = None) -> tuple[mx.array, list[BlockCall]]:
        """The first block's input [B, T, D], and each block's further arguments:
        what earlier blocks returned is an `BlockOutput` there."""
        first: list[mx.array] = []
        calls: list[BlockCall] = []

        def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
            first.append(hidden)
            calls.append(call)
            return self.returned(index, hidden, lambda output: output)

        self.walk(inputs, visit, cache)
        return first[0], calls

    def head(self, rows: mx.array) -> mx.array:
        """Final norm and head of rows [N, W] that left the last block → logits [N, V]."""
        width = rows.shape[-1]
        for size in self._lead:
            width //= size
        hidden = self.unflat(rows, (*self._lead, 1, rows.shape[0], width))

        def stand(index: int) -> Callable[..., Any]:
            return lambda passed, *_, **__: self.returned(
                index, passed if index else hidden, lambda _: None
            )

        with self._replaced([stand(index) for index in range(len(self.blocks))]):
            return self.model(mx.zeros((1, rows.shape[0]), mx.int32))[0]


def hidden_of(output: Any) -> mx.array:
    """The hidden state in a block's output."""
    return output[0] if isinstance(output, tuple) else output


def _kind(block: Any) -> Any:
    """Equal for blocks of the same modules with the same settings and shapes."""
    modules = []
    for path, module in block.named_modules():
        settings = [
            (key, _setting(value)) for key, value in [*vars(module).items(), *module.items()]
        ]
        modules.append(
            (path, type(module), tuple(sorted(settings, key=lambda setting: setting[0])))
        )
    return tuple(sorted(modules, key=lambda entry: entry[0]))


def _setting(value: Any) -> Any:
    """Return a value that compares equal for equal settings. An object is compared by identity:
    only blocks that share it are of one kind."""
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


def arrays_in(calls: Any) -> list[mx.array]:
    """The arrays among the blocks' arguments."""
    if isinstance(calls, mx.array):
        return [calls]
    if isinstance(calls, BlockCall):
        return arrays_in([*calls.args, *calls.kwargs.values()])
    return (
        [array for call in calls for array in arrays_in(call)]
        if isinstance(calls, list | tuple)
        else []
    )


def floats_in(values: Any) -> list[mx.array]:
    """Return the arrays of real numbers among them."""
    return [array for array in arrays_in(values) if mx.issubdtype(array.dtype, mx.floating)]


def refilled(
    outputs: list[BlockOutput], carried: dict[BlockOutput, Any], arrays: list[mx.array]
) -> dict[BlockOutput, Any]:
    """Return these outputs with `arrays` in the places of their floating ones."""
    left = iter(arrays)

    def filled(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value))
        return next(left) if floats_in(value) else value

    return {output: filled(carried[output]) for output in outputs}


def outputs_in(call: Any) -> list[BlockOutput]:
    """The outputs of earlier blocks among a block's arguments."""
    arguments = [*call.args, *call.kwargs.values()] if isinstance(call, BlockCall) else []
    return [argument for argument in arguments if isinstance(argument, BlockOutput)]


def resolved(call: Any, carried: dict[BlockOutput, Any]) -> Any:
    """The call with the values of earlier blocks' outputs in their places."""
    if not outputs_in(call):
        return call

    def value(argument: Any) -> Any:
        return carried[argument] if isinstance(argument, BlockOutput) else argument

    return BlockCall(
        tuple(map(value, call.args)), {key: value(a) for key, a in call.kwargs.items()}
    )


EXACT, ROUNDED = 1e-3, 0.02
"""Bounds on relative differences that are only rounding, in float32 and below it (see
`distance`)."""
ROUNDED_ON_GPU = 0.05
"""The same for two layouts of rows on a GPU, in any type: 0.004 to 0.006 in float32, whose
products are TF32 there, and 0.03 in bfloat16 (an H100, docs/benchmarks/machines.md#cuda). Wrong
graphs are at 0.1."""

_ARGUMENTS = (
    mx.array,
    str,
    int,
    float,
    list,
    tuple,
    dict,
    type(None),
    BlockOutput,
)  # a block's arguments, without those that it writes into


def check_stack(stack: LayerStack, tokens: mx.array) -> int:
    """The vocabulary. Raises ValueError: there is other glue between the blocks than one hidden
    state, or the head does not look at each row alone, so that it cannot go in pieces."""
    entered: list[mx.array] = []
    passed: list[Any] = []

    def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
        if passed and hidden is not hidden_of(passed[-1]):
            raise ValueError(
                f"the model does more before block {index} than passing the hidden state on"
            )
        entered.append(hidden)
        others = [
            type(a).__name__
            for a in [*call.args, *call.kwargs.values()]
            if not isinstance(a, _ARGUMENTS)
        ]
        if others:
            raise ValueError(
                f"the model's blocks write into one {others[0]}, which later ones and the head read"
            )
        passed.append(stack.blocks[index](hidden, *call.args, **call.kwargs))
        return passed[-1]

    stack.walk(tokens, visit)  # nothing of it is evaluated
    if len(passed) != len(stack.blocks) or not all(
        isinstance(hidden_of(output), mx.array) for output in passed
    ):
        raise ValueError("the model's blocks are not called once each with one hidden state")
    stack.note(passed)
    _check_arguments(stack, tokens)
    rows = stack.flat(entered[0])
    logits, piece = stack.head(rows), slice(1, 3)
    if distance(stack.head(rows[piece]), logits[piece]) > ROUNDED:
        raise ValueError("the model's head does not look at each position alone")
    return int(logits.shape[-1])


def _check_arguments(stack: LayerStack, tokens: mx.array) -> None:
    """Raises ValueError: a block's further arguments, or the head, depend on what
    earlier blocks gave.

    In the blocks' places are sums that depend on all arguments and cost nothing: in the model's own
    forward, and one after another with the arguments that the model makes if no block changes
    anything.
    """

    def fingerprint(array: mx.array) -> mx.array:
        """Return a number from 0 to 1 that differs for other numbers."""
        values = mx.clip(mx.nan_to_num(array.astype(mx.float32)).reshape(-1), -1, 1)
        part = (values * mx.cos(mx.arange(values.size))).sum() / mx.sqrt(
            mx.square(values).sum() + 1e-6
        )
        return mx.square(mx.sin(10 * part))

    def stand(index: int, hidden: mx.array, call: BlockCall) -> mx.array:
        change = sum(map(fingerprint, arrays_in(call)), mx.array(0.5))
        # In another direction at each block: a norm would take a mere factor back.
        direction = (
            mx.cos((index + 1.0) * mx.arange(hidden.shape[-1]))
            * 2
            * mx.abs(hidden).astype(mx.float32).mean()
        )
        return ((hidden + change * direction) / (1 + change)).astype(hidden.dtype)

    passed: list[mx.array] = []

    carried: dict[BlockOutput, Any] = {}

    def returned(index: int, hidden: mx.array) -> Any:
        def other(output: BlockOutput) -> mx.array:
            carried[output] = fingerprint(hidden * output.place)
            return carried[output]

        return stack.returned(index, hidden, other)

    def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
        passed.append(stand(index, hidden, call))
        return returned(index, passed[-1])

    logits = stack.walk(tokens, visit)
    hidden, calls = stack.embed(tokens)
    carried.clear()
    for index, call in enumerate(calls):
        hidden = stand(index, hidden, resolved(call, carried))
        returned(index, hidden)
    one_by_one = stack.head(stack.flat(hidden))
    if (
        distance(hidden, passed[-1]) > EXACT
        or distance(one_by_one, logits.reshape(one_by_one.shape)) > ROUNDED
    ):
        raise ValueError("the model does more beside its blocks than passing the hidden state on")


def distance(a: mx.array, b: mx.array | None) -> float:
    """‖a - b‖ / ‖b‖; infinite without a number. float32 models reach 1e-6 here, bfloat16 1e-3,
    wrong graphs 0.1."""
    assert b is not None
    size, off = norm(b), norm(a - b)
    return off / size if size > 0 else (0.0 if off == 0 else float("inf"))


def norm(a: mx.array) -> float:
    """‖a‖, over all of its numbers."""
    return scalar(mx.sqrt(total(mx.square(a))))
