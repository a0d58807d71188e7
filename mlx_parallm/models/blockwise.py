"""Loss and gradients of any mlx-lm architecture, a few transformer blocks at a time.

Evaluating the graph of a whole training step starves the serving thread (docs/design.md); evaluating it block by block
leaves gaps, keeps one activation per block instead of all (gradient checkpointing), and gives the same gradients.

    LayerStack        (layer_stack.py) the model's own forward, its blocks replaced by callables of ours
    TokenBatch        the tokens, and the positions whose next token is scored; the head is computed there only
    BlockwiseModel    forward: embedding → blocks, evaluated in groups, group inputs kept → head
                      backward: head → groups from last to first, each recomputed and differentiated alone → embedding

An architecture that does more between its blocks than passing the hidden state on is found out once, at start
(`check`), and differentiated as one graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.layer_stack import BlockCall, LayerStack
from mlx_parallm.models.logprobs import token_logprobs_and_entropy
from mlx_parallm.models.parameters import ParameterSlots, scalar

HEAD_ELEMENTS = 1 << 25  # logits of one head evaluation at most: 128 MiB of float32

Objective = Callable[[mx.array, mx.array], tuple[mx.array, tuple[mx.array, ...]]]
"""(logprobs [N], entropy [N]) → (scalar loss, further arrays to be evaluated with it)."""


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded tokens, and what is scored in them."""

    inputs: mx.array  # [B, T] int32
    positions: mx.array  # [N] int32, indices into the flattened [B · T]: where the scored token is predicted
    targets: mx.array  # [N] int32, the scored tokens
    temperature: float | mx.array = 1.0  # or [N] float32


class BlockwiseModel:
    """Scores tokens and differentiates a loss over them, `blocks_per_eval` blocks at a time (0 = all at once).

    `between_blocks` is called after each evaluation: the place to give the serving thread a turn.
    `longest_eval_ms`: of all evaluations since it was last set to 0.
    Gradients are lists in the order of `slots.names`. Every array that leaves a method is evaluated.
    """

    def __init__(
        self, model: nn.Module, *, blocks_per_eval: int = 1, between_blocks: Callable[[], None] = lambda: None
    ) -> None:
        self.model = model
        self.slots = ParameterSlots(model)
        self._between_blocks = between_blocks
        self.longest_eval_ms = 0.0
        self._blocks_per_eval = blocks_per_eval
        self._stack: LayerStack | None = None
        self.fallback = ""
        try:
            self._use(LayerStack(model))
            self._check()
        except (ValueError, TypeError) as error:
            self._stack = None
            self.fallback = f"{error}: training evaluates the whole graph at once"

    def _use(self, stack: LayerStack) -> None:
        count = len(stack.blocks)
        size = self._blocks_per_eval or count
        self._stack = stack
        self._groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
        prefixes = [f"{stack.path}.{index}." for index in range(count)]
        owner = [next((i for i, p in enumerate(prefixes) if name.startswith(p)), None) for name in self.slots.names]
        self._group_slots = [[s for s, block in enumerate(owner) if block in group] for group in self._groups]
        self._outer_slots = [s for s, block in enumerate(owner) if block is None]

    # ------------------------------------------------------------------ scoring

    def score(self, batch: TokenBatch) -> tuple[mx.array, mx.array]:
        """Log-probabilities and entropies of the scored tokens, both [N] float32, without gradients."""
        if self._stack is None:
            results = _score_rows(self._plain_rows(batch), batch, slice(None))
            self._evaluate(*results)
            return results
        _, _, rows = self._forward(batch, keep_last_group=False)
        parts = [self._score_chunk(rows, batch, chunk) for chunk in self._chunks(batch)]
        return mx.concatenate([part[0] for part in parts]), mx.concatenate([part[1] for part in parts])

    def _score_chunk(self, rows: mx.array, batch: TokenBatch, chunk: slice) -> tuple[mx.array, mx.array]:
        assert self._stack is not None
        scored = _score_rows(self._stack.head(rows[chunk]), batch, chunk)
        self._evaluate(*scored)
        return scored

    # ------------------------------------------------------------------ loss and gradients

    def loss_and_gradients(
        self, batch: TokenBatch, objective: Objective, sums: list[mx.array] | None = None
    ) -> tuple[mx.array, tuple[mx.array, ...], list[mx.array]]:
        """Loss, the objective's further arrays, and float32 gradients added to `sums` (of earlier micro-batches)."""
        gradients: list[mx.array | None] = list(sums) if sums is not None else [None] * len(self.slots)
        if self._stack is None:
            loss, extras = self._whole(batch, objective, gradients)
        elif len(chunks := self._chunks(batch)) == 1:
            loss, extras = self._backward_fused(batch, objective, gradients)
        else:
            loss, extras = self._backward_chunked(batch, objective, gradients, chunks)
        complete = [
            g if g is not None else mx.zeros(p.shape) for g, p in zip(gradients, self.slots.read(), strict=True)
        ]
        return loss, extras, complete

    def _whole(self, batch: TokenBatch, objective: Objective, gradients: list[mx.array | None]) -> Any:
        def loss(parameters: list[mx.array]) -> tuple[mx.array, tuple[mx.array, ...]]:
            with self.slots.bound(parameters):
                return objective(*_score_rows(self._plain_rows(batch), batch, slice(None)))

        (value, extras), new = mx.value_and_grad(loss)(self.slots.read())
        self._add(gradients, range(len(self.slots)), new, value, *extras)
        return value, extras

    def _plain_rows(self, batch: TokenBatch) -> mx.array:
        logits = self.model(batch.inputs)
        return mx.take(logits.reshape(-1, logits.shape[-1]), batch.positions, axis=0)

    def _backward_fused(self, batch: TokenBatch, objective: Objective, gradients: list[mx.array | None]) -> Any:
        """Last group, head and loss are one graph: the last group's forward is not computed twice."""
        starts, calls, _ = self._forward(batch, keep_last_group=True)
        last = len(self._groups) - 1
        own = self._group_slots[last] + self._outer_slots
        stack = self._stack
        assert stack is not None

        def loss(hidden: mx.array, parameters: list[mx.array]) -> tuple[mx.array, tuple[mx.array, ...]]:
            with self.slots.bound(parameters, own):
                out = self._run(last, hidden, calls)
                rows = mx.take(out.reshape(-1, out.shape[-1]), batch.positions, axis=0)
                return objective(*_score_rows(stack.head(rows), batch, slice(None)))

        below = self._trainable_below(last)
        parameters = self.slots.read(own)
        (value, extras), results = mx.value_and_grad(loss, argnums=(0, 1) if below else 1)(starts[last], parameters)
        cotangent, new = results if below else (None, results)
        self._add(gradients, own, new, value, *extras, cotangent)
        starts.pop()
        self._backward_groups(batch, starts, calls, cotangent, gradients)
        return value, extras

    def _backward_chunked(
        self, batch: TokenBatch, objective: Objective, gradients: list[mx.array | None], chunks: list[slice]
    ) -> Any:
        """The head in pieces (logits of all rows would not fit): score, differentiate the loss by the scores, then the
        head piece by piece with those as cotangents."""
        starts, calls, rows = self._forward(batch, keep_last_group=False)
        parts = [self._score_chunk(rows, batch, chunk) for chunk in chunks]
        scores = [mx.concatenate([part[i] for part in parts]) for i in (0, 1)]
        (value, extras), slopes = mx.value_and_grad(objective, argnums=(0, 1))(*scores)
        self._evaluate(value, *extras, *slopes)
        stack, outer = self._stack, self._outer_slots
        assert stack is not None
        row_gradients = []
        for chunk in chunks:

            def head(hidden: mx.array, *parameters: mx.array, chunk: slice = chunk) -> list[mx.array]:
                with self.slots.bound(parameters, outer):
                    return list(_score_rows(stack.head(hidden), batch, chunk))

            _, new = mx.vjp(head, [rows[chunk], *self.slots.read(outer)], [slope[chunk] for slope in slopes])
            self._add(gradients, outer, new[1:], new[0])
            row_gradients.append(new[0])
        shape = (*batch.inputs.shape, rows.shape[-1])
        flat = mx.zeros((shape[0] * shape[1], shape[2]), rows.dtype)
        cotangent = flat.at[batch.positions].add(mx.concatenate(row_gradients)).reshape(shape)
        self._backward_groups(batch, starts, calls, cotangent, gradients)
        return value, extras

    def _backward_groups(
        self,
        batch: TokenBatch,
        starts: list[mx.array],
        calls: list[BlockCall],
        cotangent: mx.array | None,
        gradients: list[mx.array | None],
    ) -> None:
        """From the last of `starts` to the first, then the embedding. `starts` is used up, to free the activations."""
        while starts and cotangent is not None:
            group, hidden = len(starts) - 1, starts.pop()
            own = self._group_slots[group]

            def block(hidden: mx.array, *parameters: mx.array, group: int = group, own: list[int] = own) -> mx.array:
                with self.slots.bound(parameters, own):
                    return self._run(group, hidden, calls)

            parameters = self.slots.read(own)
            if self._trainable_below(group):
                _, (cotangent, *new) = mx.vjp(block, [hidden, *parameters], [cotangent])
            else:
                closed = hidden

                def constant(*parameters: mx.array, hidden: mx.array = closed, block: Any = block) -> mx.array:
                    return block(hidden, *parameters)

                _, new = mx.vjp(constant, parameters, [cotangent])
                cotangent = None
            self._add(gradients, own, new, cotangent)
        if cotangent is not None and self._outer_slots:
            self._backward_embedding(batch, cotangent, gradients)

    def _backward_embedding(self, batch: TokenBatch, cotangent: mx.array, gradients: list[mx.array | None]) -> None:
        stack = self._stack
        assert stack is not None

        def embed(*parameters: mx.array) -> mx.array:
            seen: list[mx.array] = []

            def visit(_: int, hidden: mx.array, __: BlockCall) -> mx.array:
                seen.append(hidden)
                return hidden

            with self.slots.bound(parameters, self._outer_slots):
                stack.walk(batch.inputs, visit)
            return seen[0]

        _, new = mx.vjp(embed, self.slots.read(self._outer_slots), [cotangent])
        self._add(gradients, self._outer_slots, new)

    # ------------------------------------------------------------------ parts

    def _forward(self, batch: TokenBatch, *, keep_last_group: bool) -> tuple[list[mx.array], list[BlockCall], mx.array]:
        """Group inputs, the blocks' other arguments, and the scored rows [N, D] after the last block.

        `keep_last_group`: the last group is left to the caller; the rows are then meaningless.
        """
        assert self._stack is not None
        starts: list[mx.array] = []
        calls: list[BlockCall] = []
        firsts = {group.start for group in self._groups}
        final: list[mx.array] = []
        stack = self._stack

        def visit(index: int, hidden: mx.array, call: BlockCall) -> mx.array:
            if index in firsts:
                self._evaluate(hidden, *(a for a in (*call.args, *call.kwargs.values()) if isinstance(a, mx.array)))
                starts.append(hidden)
            calls.append(call)
            if not (keep_last_group and index >= self._groups[-1].start):
                hidden = stack.blocks[index](hidden, *call.args, **call.kwargs)
            final[:] = [hidden]
            return hidden

        stack.walk(batch.inputs, visit)
        rows = mx.take(final[0].reshape(-1, final[0].shape[-1]), batch.positions, axis=0)
        if not keep_last_group:
            self._evaluate(rows)
        return starts, calls, rows

    def _run(self, group: int, hidden: mx.array, calls: list[BlockCall]) -> mx.array:
        assert self._stack is not None
        for index in self._groups[group]:
            hidden = self._stack.blocks[index](hidden, *calls[index].args, **calls[index].kwargs)
        return hidden

    def _trainable_below(self, group: int) -> bool:
        return bool(self._outer_slots) or any(self._group_slots[:group])

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
        size = max(64, HEAD_ELEMENTS // self._vocabulary)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)] or [slice(0, 0)]

    # ------------------------------------------------------------------ the check at start

    def _check(self) -> None:
        """Raises ValueError where blocks cannot be taken apart: other glue between them, or other gradients."""
        stack = self._stack
        assert stack is not None
        tokens = (mx.arange(16, dtype=mx.int32) % 7).reshape(2, 8)
        passed: list[Any] = []

        def visit(index: int, hidden: mx.array, call: BlockCall) -> Any:
            if passed and hidden is not passed[-1]:
                raise ValueError(f"the model does more before block {index} than passing the hidden state on")
            passed.append(stack.blocks[index](hidden, *call.args, **call.kwargs))
            return passed[-1]

        stack.walk(tokens, visit)
        if len(passed) != len(stack.blocks) or not all(isinstance(hidden, mx.array) for hidden in passed):
            raise ValueError("the model's blocks are not called once each with one hidden state")
        self._vocabulary = stack.head(passed[-1].reshape(-1, passed[-1].shape[-1])[:1]).shape[-1]
        batch = TokenBatch(tokens, mx.arange(0, 16, 3), mx.array([1, 2, 3, 4, 5, 6], mx.int32))
        self._check_gradients(batch)

    def _check_gradients(self, batch: TokenBatch) -> None:
        def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
            return (logprobs + 0.1 * entropy).sum(), ()

        value, _, gradients = self.loss_and_gradients(batch, objective)
        expected: list[mx.array | None] = [None] * len(self.slots)
        whole, _ = self._whole(batch, objective, expected)
        worst = max((_distance(g, e) for g, e in zip(gradients, expected, strict=True)), default=0.0)
        if max(worst, _distance(value, whole)) > 0.02:
            raise ValueError(f"block-by-block gradients of this architecture are off by {worst:.2g} (relative)")


def _score_rows(logits: mx.array, batch: TokenBatch, rows: slice) -> tuple[mx.array, mx.array]:
    temperature = batch.temperature if isinstance(batch.temperature, float) else batch.temperature[rows]
    return token_logprobs_and_entropy(logits, batch.targets[rows], temperature)


def _distance(a: mx.array, b: mx.array | None) -> float:
    """‖a - b‖ / ‖b‖; infinite where there is no number. bfloat16 models reach 1e-3 here, a wrong graph 0.1 and more."""
    assert b is not None
    size = scalar(mx.sqrt(mx.square(b).sum()))
    off = scalar(mx.sqrt(mx.square(a - b).sum()))
    return off / size if size > 0 else (0.0 if off == 0 else float("inf"))
