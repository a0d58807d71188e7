"""Loss and gradients of any mlx-lm architecture, a few transformer blocks at a time.

Evaluating the graph of a whole training step starves the serving thread (docs/design.md); evaluating it block by block
leaves gaps, keeps one activation per block instead of all (gradient checkpointing), and gives the same gradients.

    LayerStack        (layer_stack.py) the model's own forward, its blocks replaced by callables of ours
    TokenBatch        (layout.py) the tokens, and the positions whose next token is scored: the head sees those only
    Layout            (layout.py) rows as they are, with the prompts that they share computed once, or packed
    BlockwiseModel    forward: embedding → blocks, evaluated in groups, group inputs kept → head
                      backward: head → groups from last to first, each recomputed and differentiated alone → embedding

The logits are a model's largest array: [scored tokens, vocabulary]. Where they would be large the head goes in pieces:
once, where neither the head is trained nor the loss looks at the entropy (`scores_and_directions`), else a second time
for the gradient (`BlockwiseModel._learn_rows_twice`); docs/benchmarks/memory.md has memory and times.

A check at start finds the architectures that do more between their blocks than passing the hidden state on; those are
differentiated as one graph. It computes two blocks of each kind: what it compares does not depend on the numbers in the
weights, and each of its ten passes over all of them would take a minute at 14 B parameters on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.cpu_kernels import fused, unpacks
from mlx_parallm.models.layer_stack import BlockCall, LayerStack
from mlx_parallm.models.layout import (
    CompactRows,
    Layout,
    PlainRows,
    SharedRows,
    TokenBatch,
    layout_of,
    pack_rows,
    packable,
    share_prompts,
    shareable,
)
from mlx_parallm.models.logprobs import token_logprobs_and_entropy
from mlx_parallm.models.parameters import ParameterSlots, scalar
from mlx_parallm.models.sums import total
from mlx_parallm.models.value_head import is_value_head, value_head_of

WHOLE_HEAD = 1 << 22  # logits that are made at once where that is all of them: 16 MiB of float32
HEAD_PIECE = 1 << 20  # logits of one piece of the head where it is not …
FEWEST_HEAD_ROWS = 32  # … and the least number of scored tokens in one, for the speed of the product
UNPACKED_HEAD = 2  # times as many where each piece unpacks the head's weights …
TRAINED_HEAD = 4  # … and where each adds to their gradient

Head = Callable[[mx.array], mx.array]
"""Rows [n, D] → logits [n, V]."""
Scores = tuple[mx.array, ...]
"""(logprobs [N], entropy [N], with a value head values [N]) float32."""
EXACT, ROUNDED = 1e-3, 0.02
"""Bounds on relative differences that are only rounding, in float32 and below it (see `distance`)."""

Objective = Callable[..., tuple[mx.array, tuple[mx.array, ...]]]
"""Scores → (scalar loss, further arrays to be evaluated with it). All of these are different arrays."""


class BlockwiseModel:
    """Scores tokens and differentiates a loss over them, `blocks_per_eval` blocks at a time (0 = all at once).

    `between_blocks` is called after each evaluation: the place to give the serving thread a turn.
    `longest_eval_ms`: of all evaluations since it was last set to 0.
    `fallback`: why the model is differentiated as one graph; `unshared`, `unpacked`: why prompts are not shared, and
    sequences not packed; else "".
    Gradients are lists in the order of `slots.names`. Every array that leaves a method is evaluated.
    """

    def __init__(
        self, model: nn.Module, *, blocks_per_eval: int, between_blocks: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        self.slots = ParameterSlots(model)
        self._between_blocks = between_blocks
        self.longest_eval_ms = 0.0
        self._blocks_per_eval = blocks_per_eval
        self._stack: LayerStack | None = None
        self.fallback = self.unshared = self.unpacked = ""
        try:
            self._use(LayerStack(model))
            self._check()
        except (ValueError, TypeError) as error:
            self._stack = None
            self.fallback = f"{error}: training evaluates the whole graph at once"
        if self._stack is None:
            self.unshared = self.unpacked = self.fallback
        else:
            with self._stack.only(self._stack.samples()):
                self.unshared, self.unpacked = compare_layouts(model, self._stack, self.score)

    @property
    def shares_prompts(self) -> bool:
        """True when `SharedRows` are used."""
        return not self.unshared

    @property
    def packs_rows(self) -> bool:
        """True when `PackedRows` are used."""
        return not self.unpacked

    def _use(self, stack: LayerStack) -> None:
        count = len(stack.blocks)
        size = self._blocks_per_eval or count
        self._stack = stack
        self._groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
        prefixes = [f"{stack.path}.{index}." for index in range(count)]
        owner = [next((i for i, p in enumerate(prefixes) if name.startswith(p)), None) for name in self.slots.names]
        self._group_slots = [[s for s, block in enumerate(owner) if block in group] for group in self._groups]
        self._outer_slots = [s for s, block in enumerate(owner) if block is None]
        self._below_slots = [s for s in self._outer_slots if not is_value_head(self.slots.names[s])]
        inside = {id(module) for block in stack.blocks for module in block.modules()}
        outside = [module for module in self.model.modules() if id(module) not in inside]
        self._unpacks = any(unpacks(module) for module in self.model.modules())
        unpacked = any(unpacks(module) for module in outside)
        self._head_times = TRAINED_HEAD if self._below_slots else UNPACKED_HEAD if unpacked else 1

    # ------------------------------------------------------------------ scoring

    def score(self, batch: TokenBatch) -> Scores:
        """Log-probabilities, entropies and (with a value head) values of the scored tokens, [N] float32 each."""
        if self._stack is None:
            results = self._plain_scores(batch)
            self._evaluate(*results)
            return results
        _, _, rows = self._forward(batch, self._layout(batch), keep_last_group=False)
        return self._score_pieces(rows, batch, self._chunks(batch))

    def _score_pieces(self, rows: mx.array, batch: TokenBatch, chunks: list[slice]) -> Scores:
        parts = []
        for chunk in chunks:
            parts.append(self._scores(rows[chunk], batch, chunk))
            self._evaluate(*parts[-1])
        return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))

    def _scores(self, rows: mx.array, batch: TokenBatch, chunk: slice) -> Scores:
        """Score rows [n, D] that left the last block; `chunk`: which of the scored tokens they are."""
        return self._with_values(token_scores(self._head(rows), batch, chunk), rows)

    def _head(self, rows: mx.array) -> mx.array:
        assert self._stack is not None
        return self._stack.head(rows)

    def _plain_scores(self, batch: TokenBatch) -> Scores:
        if value_head_of(self.model) is None:
            return token_scores(_rows_at(self.model(batch.inputs), batch.positions), batch, slice(None))
        logits, hidden = LayerStack(self.model).forward(batch.inputs)
        scores = token_scores(_rows_at(logits, batch.positions), batch, slice(None))
        return self._with_values(scores, _rows_at(hidden, batch.positions))

    def _with_values(self, scores: Scores, rows: mx.array) -> Scores:
        head = value_head_of(self.model)
        return scores if head is None else (*scores, head(rows))

    # ------------------------------------------------------------------ loss and gradients

    def loss_and_gradients(
        self, batch: TokenBatch, objective: Objective, sums: list[mx.array] | None = None, *, fuse: bool = False
    ) -> tuple[mx.array, tuple[mx.array, ...], list[mx.array]]:
        """Loss, the objective's further arrays, and float32 gradients added to `sums` (of earlier micro-batches).

        `fuse`: the objective may be part of a `fused` function. It evaluates no array, and reads numbers that change
        from call to call by `as_data`.
        """
        gradients: list[mx.array | None] = list(sums) if sums is not None else [None] * len(self.slots)
        if self._stack is None:
            loss, extras = self._whole(batch, objective, gradients)
        elif len(chunks := self._chunks(batch)) == 1 or (len(self._groups) == 1 and self._known_slopes(batch)):
            loss, extras = self._backward_at_once(batch, objective, gradients, chunks, fuse)
        else:
            loss, extras = self._backward_chunked(batch, objective, gradients, chunks)
        complete = [
            g if g is not None else mx.zeros(p.shape) for g, p in zip(gradients, self.slots.read(), strict=True)
        ]
        return loss, extras, complete

    def _whole(self, batch: TokenBatch, objective: Objective, gradients: list[mx.array | None]) -> Any:
        def loss(parameters: list[mx.array]) -> tuple[mx.array, tuple[mx.array, ...]]:
            with self.slots.bound(parameters):
                return objective(*self._plain_scores(batch))

        (value, extras), new = mx.value_and_grad(loss)(self.slots.read())
        self._add(gradients, range(len(self.slots)), new, value, *extras)
        return value, extras

    def _known_slopes(self, batch: TokenBatch) -> bool:
        """True when a loss reaches a row through its token's log-probability only, and trains nothing of the head."""
        return not (self._outer_slots or batch.entropy_slope)

    def _backward_at_once(
        self, batch: TokenBatch, objective: Objective, gradients: list[mx.array | None], chunks: list[slice], fuse: bool
    ) -> Any:
        """Last group, head and loss are one graph: the last group's forward is not computed twice."""
        layout = self._layout(batch)
        starts, calls, _ = self._forward(batch, layout, keep_last_group=True)
        last = len(self._groups) - 1
        slots = self._group_slots[last] + self._outer_slots

        def loss(hidden: mx.array, parameters: list[mx.array]) -> tuple[mx.array, tuple[mx.array, ...]]:
            with self.slots.bound(parameters, slots):
                rows = _rows_at(self._run(last, hidden, layout, calls), layout.positions)
                if len(chunks) == 1:
                    return objective(*self._scores(rows, batch, slice(None)))
                return objective(*scores_in_pieces(self._head, rows, batch, chunks))

        below = self._trainable_below(last)
        parameters = self.slots.read(slots)
        arguments = starts[last], parameters
        slopes = mx.value_and_grad(loss, argnums=(0, 1) if below else 1)
        # What is compiled is never kept: a trace goes with its function, in the thread that dropped it.
        (value, extras), results = (self._fused(slopes, starts[last].size) if fuse else slopes)(*arguments)
        cotangent, new = results if below else (None, results)
        self._add(gradients, slots, new, value, *extras, cotangent)
        starts.pop()
        self._backward_groups(layout, starts, calls, cotangent, gradients)
        return value, extras

    def _backward_chunked(
        self, batch: TokenBatch, objective: Objective, gradients: list[mx.array | None], chunks: list[slice]
    ) -> Any:
        layout = self._layout(batch)
        starts, calls, rows = self._forward(batch, layout, keep_last_group=False)
        learn = self._learn_rows_once if self._known_slopes(batch) else self._learn_rows_twice
        value, extras, slopes = learn(rows, batch, objective, gradients, chunks)
        flat = mx.zeros((starts[-1].size // rows.shape[-1], rows.shape[-1]), rows.dtype)
        cotangent = flat.at[layout.positions].add(slopes).reshape(starts[-1].shape)
        self._backward_groups(layout, starts, calls, cotangent, gradients)
        return value, extras

    def _learn_rows_once(
        self, rows: mx.array, batch: TokenBatch, objective: Objective, gradients: Any, chunks: list[slice]
    ) -> tuple[mx.array, tuple[mx.array, ...], mx.array]:
        """Loss, its further arrays and its slopes by the rows [N, D], from one pass over the head."""
        pieces = []
        for chunk in chunks:
            pieces.append(scores_and_directions(self._head, rows[chunk], batch, chunk))
            self._evaluate(pieces[-1])
        directions, *scores = split_pieces(mx.concatenate(pieces))
        (value, extras), slopes = mx.value_and_grad(objective)(*scores)
        by_row = (slopes[:, None] * directions).astype(rows.dtype)
        self._evaluate(value, *extras, by_row)
        return value, extras, by_row

    def _learn_rows_twice(
        self,
        rows: mx.array,
        batch: TokenBatch,
        objective: Objective,
        gradients: list[mx.array | None],
        chunks: list[slice],
    ) -> tuple[mx.array, tuple[mx.array, ...], mx.array]:
        """The same from two passes; adds the head's own gradients."""
        scores = self._score_pieces(rows, batch, chunks)
        (value, extras), slopes = mx.value_and_grad(objective, argnums=tuple(range(len(scores))))(*scores)
        self._evaluate(value, *extras, *slopes)
        outer, by_row = self._outer_slots, []
        for chunk in chunks:

            def head(hidden: mx.array, *parameters: mx.array, chunk: slice = chunk) -> list[mx.array]:
                with self.slots.bound(parameters, outer):
                    return list(self._scores(hidden, batch, chunk))

            piece = rows[chunk]
            size = len(piece) * self._vocabulary
            new = self._vjp(head, [piece, *self.slots.read(outer)], [slope[chunk] for slope in slopes], size)
            self._add(gradients, outer, new[1:], new[0])
            by_row.append(new[0])
        return value, extras, mx.concatenate(by_row)

    def _backward_groups(
        self,
        layout: Layout,
        starts: list[mx.array],
        calls: list[Any],
        cotangent: mx.array | None,
        gradients: list[mx.array | None],
    ) -> None:
        """Go from the last of `starts` to the first, then the embedding. Empties `starts`, to free the activations."""
        while starts and cotangent is not None:
            group, hidden = len(starts) - 1, starts.pop()
            slots = self._group_slots[group]

            def block(
                hidden: mx.array, *parameters: mx.array, group: int = group, slots: list[int] = slots
            ) -> mx.array:
                with self.slots.bound(parameters, slots):
                    return self._run(group, hidden, layout, calls)

            parameters = self.slots.read(slots)
            if self._trainable_below(group):
                cotangent, *new = self._vjp(block, [hidden, *parameters], [cotangent], hidden.size)
            else:
                closed = hidden

                def constant(*parameters: mx.array, hidden: mx.array = closed, block: Any = block) -> mx.array:
                    return block(hidden, *parameters)

                new = self._vjp(constant, parameters, [cotangent], hidden.size)
                cotangent = None
            self._add(gradients, slots, new, cotangent)
        if cotangent is not None and self._below_slots:
            self._backward_embedding(layout, cotangent, gradients)

    def _backward_embedding(self, layout: Layout, cotangent: mx.array, gradients: list[mx.array | None]) -> None:
        stack = self._stack
        assert stack is not None

        def embed(*parameters: mx.array) -> mx.array:
            with self.slots.bound(parameters, self._below_slots):
                return layout.embed(stack)[0]

        new = self._vjp(embed, self.slots.read(self._below_slots), [cotangent], cotangent.size)
        self._add(gradients, self._below_slots, new)

    # ------------------------------------------------------------------ parts

    def _layout(self, batch: TokenBatch) -> Layout:
        used = self.shares_prompts if isinstance(batch.compact, SharedRows) else self.packs_rows
        if batch.compact is not None and used:
            return layout_of(batch.compact)
        return PlainRows(batch.inputs, batch.positions)

    def _forward(
        self, batch: TokenBatch, layout: Layout, *, keep_last_group: bool
    ) -> tuple[list[mx.array], list[Any], mx.array]:
        """Group inputs, the blocks' other arguments, and the scored rows [N, D] after the last block.

        `keep_last_group`: the last group is left to the caller; the rows are then meaningless.
        """
        assert self._stack is not None
        hidden, calls = layout.embed(self._stack)
        self._evaluate(hidden, *_arrays(calls))
        starts = [hidden]
        for group in range(len(self._groups) - 1):
            hidden = self._run(group, hidden, layout, calls)
            self._evaluate(hidden)
            starts.append(hidden)
        if keep_last_group:
            return starts, calls, hidden
        rows = _rows_at(self._run(len(self._groups) - 1, hidden, layout, calls), layout.positions)
        self._evaluate(rows)
        return starts, calls, rows

    def _run(self, group: int, hidden: mx.array, layout: Layout, calls: list[Any]) -> mx.array:
        assert self._stack is not None
        for index in self._groups[group]:
            hidden = layout.run(self._stack.blocks[index], hidden, calls[index])
        return hidden

    def _trainable_below(self, group: int) -> bool:
        return bool(self._below_slots) or any(self._group_slots[:group])

    def _fused(self, function: Callable[..., Any], size: int) -> Callable[..., Any]:
        """See `cpu_kernels.fused`. Not where weights are unpacked for the moment: all would be unpacked at once."""
        return function if self._unpacks else fused(function, size)

    def _vjp(
        self, function: Callable[..., Any], primals: list[mx.array], cotangents: list[mx.array], size: int
    ) -> list[mx.array]:
        """The slopes by `primals`."""

        def pull(primals: list[mx.array], cotangents: list[mx.array]) -> list[mx.array]:
            return mx.vjp(function, primals, cotangents)[1]

        return cast("list[mx.array]", self._fused(pull, size)(primals, cotangents))

    def _add(
        self,
        gradients: list[mx.array | None],
        indices: Sequence[int],
        new: Sequence[mx.array],
        *others: mx.array | None,
    ) -> None:
        """Adds in float32 and evaluates, together with `others`."""
        for index, gradient in zip(indices, new, strict=True):
            before, wide = gradients[index], gradient.astype(mx.float32)
            gradients[index] = wide if before is None else before + wide
        self._evaluate(*(gradients[index] for index in indices), *others)

    def _evaluate(self, *arrays: mx.array | None) -> None:
        started = perf_counter()
        mx.eval([array for array in arrays if array is not None])
        self.longest_eval_ms = max(self.longest_eval_ms, 1000 * (perf_counter() - started))
        self._between_blocks()

    def _chunks(self, batch: TokenBatch) -> list[slice]:
        count = batch.positions.shape[0]
        size = head_rows(count, self._vocabulary, times=self._head_times)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)] or [slice(0, 0)]

    # ------------------------------------------------------------------ the checks at start

    def _check(self) -> None:
        """Raises ValueError where blocks cannot be taken apart: other glue between them, or other gradients."""
        assert self._stack is not None
        tokens = (mx.arange(16, dtype=mx.int32) % 7).reshape(2, 8)
        self._vocabulary = check_stack(self._stack, tokens)
        with self._stack.only(self._stack.samples()):
            self._check_gradients(TokenBatch(tokens, mx.arange(0, 16, 3), mx.array([1, 2, 3, 4, 5, 6], mx.int32)))

    def _check_gradients(self, batch: TokenBatch) -> None:
        def objective(logprobs: mx.array, *others: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
            return sum((0.1 * other for other in others), logprobs).sum(), ()

        value, _, gradients = self.loss_and_gradients(batch, objective)
        expected: list[mx.array | None] = [None] * len(self.slots)
        whole, _ = self._whole(batch, objective, expected)
        worst = max((distance(g, e) for g, e in zip(gradients, expected, strict=True)), default=0.0)
        if max(worst, distance(value, whole)) > ROUNDED:
            raise ValueError(f"block-by-block gradients of this architecture are off by {worst:.2g} (relative)")


def _rows_at(hidden: mx.array, positions: mx.array) -> mx.array:
    """[B, T, D] → [N, D]."""
    return mx.take(hidden.reshape(-1, hidden.shape[-1]), positions, axis=0)


def _arrays(calls: Any) -> list[mx.array]:
    """The arrays among the blocks' arguments."""
    if isinstance(calls, mx.array):
        return [calls]
    if isinstance(calls, BlockCall):
        return _arrays([*calls.args, *calls.kwargs.values()])
    return [array for call in calls for array in _arrays(call)] if isinstance(calls, list | tuple) else []


def head_rows(count: int, vocabulary: int, *, times: int = 1) -> int:
    """How many of `count` scored tokens one evaluation of the head takes. `times`: UNPACKED_HEAD, TRAINED_HEAD or 1."""
    if count * vocabulary <= WHOLE_HEAD:
        return max(count, 1)
    return max(FEWEST_HEAD_ROWS, HEAD_PIECE // vocabulary) * times


def token_scores(logits: mx.array, batch: TokenBatch, chunk: slice) -> Scores:
    """Score logits [n, V]; `chunk`: which of the scored tokens they are for."""
    temperature = batch.temperature if isinstance(batch.temperature, float) else batch.temperature[chunk]
    return token_logprobs_and_entropy(logits, batch.targets[chunk], temperature, entropy_slope=batch.entropy_slope)


def scores_and_directions(head: Head, rows: mx.array, batch: TokenBatch, chunk: slice) -> mx.array:
    """[n, D + 2] of rows [n, D]: the slope of each token's log-probability by its row; log-probability, entropy.

    A loss that sees only log-probabilities reaches a row through one number, its slope by that token's, so one pass
    over the logits gives scores and gradient: they need not be made again once the slopes are known. One array, so that
    a piece is finished before the next begins.
    """
    count = rows.shape[0]
    (logprobs, entropy), (directions,) = mx.vjp(
        lambda rows: list(token_scores(head(rows), batch, chunk)), [rows], [mx.ones((count,)), mx.zeros((count,))]
    )
    return mx.concatenate([directions.astype(mx.float32), logprobs[:, None], entropy[:, None]], axis=1)


def split_pieces(pieces: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """[N, D + 2] of `scores_and_directions` → directions [N, D], log-probabilities [N], entropies [N]."""
    return pieces[:, :-2], pieces[:, -2], pieces[:, -1]


def scores_in_pieces(head: Head, rows: mx.array, batch: TokenBatch, chunks: Sequence[slice]) -> Scores:
    """(logprobs, entropy) of rows [N, D] in a graph that is differentiated as a whole, a piece of the logits at a
    time. The entropy has no slope."""

    @mx.custom_function
    def scored(rows: mx.array) -> mx.array:
        return mx.concatenate([scores_and_directions(head, rows[chunk], batch, chunk) for chunk in chunks])

    @scored.vjp
    def slopes(rows: mx.array, cotangent: mx.array, pieces: mx.array) -> mx.array:
        directions, _, _ = split_pieces(pieces)
        return (cotangent[:, -2:-1] * directions).astype(rows.dtype)

    _, logprobs, entropy = split_pieces(cast(mx.array, scored(rows)))
    return logprobs, entropy


def check_stack(stack: LayerStack, tokens: mx.array) -> int:
    """The vocabulary. Raises ValueError: there is other glue between the blocks than one hidden state, or the head does
    not look at each row alone, so that it cannot go in pieces."""
    entered: list[mx.array] = []
    passed: list[Any] = []

    def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
        if passed and hidden is not passed[-1]:
            raise ValueError(f"the model does more before block {index} than passing the hidden state on")
        entered.append(hidden)
        passed.append(stack.blocks[index](hidden, *call.args, **call.kwargs))
        return passed[-1]

    stack.walk(tokens, visit)  # nothing of it is evaluated
    if len(passed) != len(stack.blocks) or not all(isinstance(hidden, mx.array) for hidden in passed):
        raise ValueError("the model's blocks are not called once each with one hidden state")
    _check_arguments(stack, tokens)
    rows = entered[0].reshape(-1, entered[0].shape[-1])
    logits, piece = stack.head(rows), slice(1, 3)
    if distance(stack.head(rows[piece]), logits[piece]) > ROUNDED:
        raise ValueError("the model's head does not look at each position alone")
    return int(logits.shape[-1])


def _check_arguments(stack: LayerStack, tokens: mx.array) -> None:
    """Raises ValueError: what a block gets beside the hidden state, or the head, depends on what earlier blocks gave.

    In the blocks' places are sums that depend on all arguments and cost nothing: in the model's own forward, and one
    after another with the arguments that the model makes where no block changes anything.
    """

    def fingerprint(array: mx.array) -> mx.array:
        """From 0 to 1, another one for other numbers."""
        values = mx.clip(mx.nan_to_num(array.astype(mx.float32)).reshape(-1), -1, 1)
        part = (values * mx.cos(mx.arange(values.size))).sum() / mx.sqrt(mx.square(values).sum() + 1e-6)
        return mx.square(mx.sin(10 * part))

    def stand(index: int, hidden: mx.array, call: BlockCall) -> mx.array:
        change = sum(map(fingerprint, _arrays(call)), mx.array(0.5))
        # In another direction at each block: a norm would take a mere factor back.
        direction = mx.cos((index + 1.0) * mx.arange(hidden.shape[-1])) * 2 * mx.abs(hidden).astype(mx.float32).mean()
        return ((hidden + change * direction) / (1 + change)).astype(hidden.dtype)

    passed: list[mx.array] = []

    def visit(index: int, hidden: mx.array, call: BlockCall) -> mx.array:
        passed.append(stand(index, hidden, call))
        return passed[-1]

    logits = stack.walk(tokens, visit)
    hidden, calls = stack.embed(tokens)
    for index, call in enumerate(calls):
        hidden = stand(index, hidden, call)
    one_by_one = stack.head(hidden.reshape(-1, hidden.shape[-1]))
    if distance(hidden, passed[-1]) > EXACT or distance(one_by_one, logits.reshape(one_by_one.shape)) > ROUNDED:
        raise ValueError("the model does more beside its blocks than passing the hidden state on")


def compare_layouts(model: nn.Module, stack: LayerStack, score: Callable[[TokenBatch], Scores]) -> tuple[str, str]:
    """Return why prompts are not shared, and why sequences are not packed ("": they are). Compares three rows, two of
    them with one prompt, in each layout. Gradients follow from the same operations."""
    if reason := shareable(model):
        return reason, packable(model)
    tokens = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 5, 4, 0], [2, 4, 6, 1, 3, 5]], np.int32)
    positions = np.array([2, 4, 5, 8, 9, 13, 15, 17], np.int32)
    batch = TokenBatch(mx.array(tokens), mx.array(positions), mx.arange(8, dtype=mx.int32) % 7)
    rows = score(batch)
    hidden, _ = stack.embed(mx.zeros((1, 4), mx.int32))
    bound = EXACT if hidden.dtype == mx.float32 else ROUNDED

    def why_not(compact: CompactRows) -> str:
        try:
            scores = score(replace(batch, compact=compact))
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            return f"its blocks do not take such keys, values and masks: {error}"
        off = max(distance(a, b) for a, b in zip(scores, rows, strict=True))
        return f"scores are off by {off:.2g} (relative)" if off > bound else ""

    unshared = why_not(share_prompts(tokens, positions))
    if reason := packable(model):
        return unshared, reason
    if not mx.array_equal(hidden[:, 1:], hidden[:, :-1]).item():
        return unshared, "what enters its blocks depends on the position"
    return unshared, why_not(pack_rows(tokens, positions, [1, 2]))


def distance(a: mx.array, b: mx.array | None) -> float:
    """‖a - b‖ / ‖b‖; infinite without a number. float32 models reach 1e-6 here, bfloat16 1e-3, wrong graphs 0.1."""
    assert b is not None
    size = scalar(mx.sqrt(total(mx.square(b))))
    off = scalar(mx.sqrt(total(mx.square(a - b))))
    return off / size if size > 0 else (0.0 if off == 0 else float("inf"))
