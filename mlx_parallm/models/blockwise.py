"""Loss and gradients of any mlx-lm architecture, a few transformer blocks at a time.

Evaluating the graph of a whole training step starves the serving thread (docs/design.md);
evaluating it block by block leaves gaps, keeps one activation per block instead of all (gradient
checkpointing), and gives the same gradients.

    LayerStack        (layer_stack.py) the model's own forward, its blocks replaced by callables of
                      ours
    TokenBatch        (layout.py) the tokens, and the positions whose next token is scored: the head
                      sees those only
    Layout            (layout.py) rows as they are, with the prompts that they share computed once,
                      or packed
    BlockwiseModel    forward: embedding → blocks, evaluated in groups, group inputs kept → head
                      backward: head → groups from last to first, each recomputed and differentiated
                          alone → embedding

The logits are a model's largest array: [scored tokens, vocabulary]. Where they would be large the
head goes in pieces: once, where neither the head is trained nor the loss looks at the entropy
(`scores_and_directions`), else a second time for the gradient (`BlockwiseModel._learn_rows_twice`);
docs/benchmarks/training.md#memory has memory and times.

A check at start finds the architectures that do more between their blocks than passing the hidden
state on; those are differentiated as one graph. It computes two blocks of each kind: what it
compares does not depend on the numbers in the weights, and each of its ten passes over all of them
would take a minute at 14 B parameters on a CPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.blocks_per_eval import BlockLimits, graph_nodes
from mlx_parallm.models.heads.language_head import (
    TRAINED_HEAD,
    UNPACKED_HEAD,
    Scores,
    cut_wide_heads,
    head_rows,
    scores_and_directions,
    scores_in_pieces,
    split_pieces,
    token_scores,
)
from mlx_parallm.models.heads.value_head import is_value_head, value_head_of
from mlx_parallm.models.layer_stack import (
    ROUNDED,
    BlockCall,
    BlockOutput,
    LayerStack,
    arrays_in,
    check_stack,
    distance,
    floats_in,
    hidden_of,
    norm,
    outputs_in,
    refilled,
    resolved,
)
from mlx_parallm.models.layouts.forced_routing import counting, forcing
from mlx_parallm.models.layouts.layout import (
    CompactRows,
    Layout,
    PackedRows,
    PlainRows,
    SharedRows,
    TokenBatch,
    TreeRows,
    compare_layouts,
    layout_of,
)
from mlx_parallm.models.ops import fused, unpacks
from mlx_parallm.models.parameters import FeatureGradient, ParameterSlots, own_slots
from mlx_parallm.models.sums import PassProof, Signals, flags_of
from mlx_parallm.system.device.traits import compiles_gradients, may_lose_results

ROUNDING_OF_ALL = 1e-6
"""How far rounding puts one gradient off, in norms of all gradients together."""

Objective = Callable[..., tuple[mx.array, tuple[mx.array, ...]]]
"""Scores → (scalar loss, further arrays to be evaluated with it); all are different arrays."""


class BlockwiseModel:
    """Scores tokens and differentiates a loss over them, `blocks_per_eval` blocks at a time (0 =
    all at once; `BlockLimits`: as many as these say, for each batch anew).

    `between_blocks` is called after each evaluation: the place to give the serving thread a turn.
    `longest_eval_ms`: of all evaluations since it was last set to 0. `experts_forced`: pairs of a
    scored token and a layer whose experts were repeated; `experts_differing`: those of them for
    which the router would have chosen others; `prompt_experts_…`: the same of prompts' tokens;
    since `forget_routing`. `expert_load`: [layers, experts] tokens that gradients were computed of,
    where it is set to an array (of zeros); the model's experts are watched then. `fallback`: why
    the model is differentiated as one graph; `unshared`, `unpacked`, `unmerged`: why prompts are
    not shared, sequences not packed, and rows no tree; else "". Gradients are lists in the order of
    `slots.names`. Every array that leaves a method is evaluated. `loss_reached`: whether the newest
    loss has a slope by the hidden states; `signals`: of its gradients and further arrays, where a
    device may lose results. `feature_slopes`: the gradient by `features` of the newest
    `loss_and_gradients`. Those of `FeatureGradient.parts` are 0 here.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        blocks_per_eval: int | BlockLimits,
        between_blocks: Callable[[], None] = lambda: None,
        features: FeatureGradient | None = None,
    ) -> None:
        cut_wide_heads(model)
        self.model = model
        self.slots = ParameterSlots(model)
        self.feature_slopes: mx.array | None = None
        self._features = features
        # gradients of `slots`, then those of the features
        self._places = ParameterSlots(model, features.held if features else None)
        self._own = own_slots(self._places.names, features)
        self._between_blocks = between_blocks
        self.longest_eval_ms, self.loss_reached = 0.0, True
        self.signals = Signals([])
        self.forget_routing()
        self.expert_load: np.ndarray | None = None
        self._blocks_per_eval = blocks_per_eval
        self._nodes: dict[int, int] = {}  # nodes of a block's graph, by the bits of a row's length
        self._checking, self._pass = True, PassProof()
        self._stack: LayerStack | None = None
        self.unshared = self.unpacked = self.unmerged = ""
        # blocks read what earlier ones returned, or embeddings that are trained
        self._carries = False
        self.fallback = self._why_whole()
        if self.fallback and may_lose_results():  # a lost result of the check looks the same
            self.fallback = self._why_whole()
        why = self.fallback or "its blocks read more than one hidden state" * self._carries
        if why or self._stack is None:
            self.unshared = self.unpacked = self.unmerged = why
        else:
            with self._stack.only(self._stack.samples()):
                self.unshared, self.unpacked, self.unmerged = compare_layouts(
                    model, self._stack, self.score
                )
        self._checking = False

    def _why_whole(self) -> str:
        """Take the model apart. Return why that is not possible; "": it is."""
        try:
            self._use(LayerStack(self.model))
            self._check()
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            self._stack = None
            return f"{error}: training evaluates the whole graph at once"
        return ""

    def forget_routing(self) -> None:
        """Count repeated experts anew."""
        self.experts_forced = self.experts_differing = 0
        self.prompt_experts_forced = self.prompt_experts_differing = 0

    @property
    def shares_prompts(self) -> bool:
        """True when `SharedRows` are used."""
        return not self.unshared

    @property
    def packs_rows(self) -> bool:
        """True when `PackedRows` are used."""
        return not self.unpacked

    @property
    def merges_rows(self) -> bool:
        """True when `TreeRows` are used."""
        return not self.unmerged

    def _use(self, stack: LayerStack) -> None:
        count = len(stack.blocks)
        self._stack = stack
        prefixes = [f"{stack.path}.{index}." for index in range(count)]
        self._owner = [
            next((i for i, p in enumerate(prefixes) if name.startswith(p)), None)
            for name in self.slots.names
        ]
        self._outer_slots = [
            s for s in own_slots(self.slots.names, self._features) if self._owner[s] is None
        ]
        self._below_slots = [s for s in self._outer_slots if not is_value_head(self.slots.names[s])]
        inside = {id(module) for block in stack.blocks for module in block.modules()}
        outside = [module for module in self.model.modules() if id(module) not in inside]
        self._unpacks = any(unpacks(module) for module in self.model.modules())
        unpacked = any(unpacks(module) for module in outside)
        self._head_times = TRAINED_HEAD if self._below_slots else UNPACKED_HEAD if unpacked else 1
        if self._features is not None:
            self._below_slots.append(len(self.slots))
        self._group(1 if isinstance(self._blocks_per_eval, BlockLimits) else self._blocks_per_eval)

    def _group(self, size: int) -> None:
        """Evaluate `size` blocks together from now on; 0: all."""
        assert self._stack is not None
        count = len(self._stack.blocks)
        size = size or count
        self._groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
        self._group_slots = [
            [s for s, block in enumerate(self._owner) if block in group] for group in self._groups
        ]
        if self._features is not None:
            for group, slots in zip(self._groups, self._group_slots, strict=True):
                slots += [len(self.slots)] * (group.start < self._features.levels)

    def _group_for(self, batch: TokenBatch) -> None:
        """Choose how many blocks are evaluated together, if that is not set."""
        limits = self._blocks_per_eval
        if self._stack is None or not isinstance(limits, BlockLimits) or self._checking:
            return
        span = batch.inputs.shape[1]
        if (nodes := self._nodes.get(span.bit_length())) is None:
            hidden, calls, carried = self._embed(layout := self._layout(batch))
            self._group(1)
            first = self._run(0, hidden, layout, calls, carried)
            nodes = graph_nodes(first) - graph_nodes(hidden)
            self._nodes[span.bit_length()] = nodes
        compact = self._compact(batch)
        tokens = batch.inputs.size if compact is None else compact.tokens
        # groups of about one size
        count = len(self._stack.blocks)
        groups = -(-count // limits.blocks(count, tokens, span, nodes))
        self._group(-(-count // groups))

    # ------------------------------------------------------------------ scoring

    def score(self, batch: TokenBatch) -> Scores:
        """Log-probabilities, entropies and (with a value head) values of the scored tokens, [N]
        float32 each. Raises DeviceFaultError."""
        return self._pass.proved("score", lambda: self._score(batch))

    def _score(self, batch: TokenBatch) -> Scores:
        self._group_for(batch)
        with self._forcing(batch):
            if self._stack is None:
                with self._counting() as counts:
                    results = self._plain_scores(batch)
                    self._evaluate(*results, *counts)
                return results
            chunks = self._chunks(batch)
            layout, together = self._layout(batch), len(chunks) == 1
            rows = self._forward(batch, layout, keep_last_group=False, with_head=together).rows
            return self._score_pieces(rows, batch, chunks)

    def _score_pieces(self, rows: mx.array, batch: TokenBatch, chunks: list[slice]) -> Scores:
        parts = []
        for chunk in chunks:
            parts.append(self._scores(rows[chunk], batch, chunk))
            self._evaluate(*parts[-1], hidden=rows if len(chunks) == 1 else None)
        return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))

    def _scores(self, rows: mx.array, batch: TokenBatch, chunk: slice) -> Scores:
        """Score rows [n, D] that left the last block; `chunk`: which of the scored tokens they
        are."""
        return self._with_values(token_scores(self._head(rows), batch, chunk), rows)

    def _head(self, rows: mx.array) -> mx.array:
        assert self._stack is not None
        return self._stack.head(rows)

    def _plain_scores(self, batch: TokenBatch) -> Scores:
        if value_head_of(self.model) is None:
            return token_scores(
                _rows_at(self.model(batch.inputs), batch.positions), batch, slice(None)
            )
        logits, hidden = LayerStack(self.model).forward(batch.inputs)
        scores = token_scores(_rows_at(logits, batch.positions), batch, slice(None))
        return self._with_values(scores, _rows_at(hidden, batch.positions))

    def _with_values(self, scores: Scores, rows: mx.array) -> Scores:
        head = value_head_of(self.model)
        return scores if head is None else (*scores, head(rows))

    # ------------------------------------------------------------------ loss and gradients

    def loss_and_gradients(
        self,
        batch: TokenBatch,
        objective: Objective,
        sums: list[mx.array] | None = None,
        *,
        fuse: bool = False,
    ) -> tuple[mx.array, tuple[mx.array, ...], list[mx.array]]:
        """Loss, the objective's further arrays, and float32 gradients added to `sums` (of earlier
        micro-batches).

        `fuse`: the objective may be part of a `fused` function. It evaluates no array, and reads
        numbers that change from call to call by `as_data`. Raises DeviceFaultError.
        """
        loss, extras, gradients, self.signals = self._pass.proved(
            "learn", lambda: self._learn(batch, objective, sums, fuse)
        )
        return loss, extras, gradients

    def _learn(
        self, batch: TokenBatch, objective: Objective, sums: list[mx.array] | None, fuse: bool
    ) -> tuple[mx.array, tuple[mx.array, ...], list[mx.array], Signals]:
        gradients: list[mx.array | None] = (
            list(sums) if sums is not None else [None] * len(self.slots)
        )
        gradients += [] if self._features is None else [None]
        self._group_for(batch)
        with self._forcing(batch, counts=self.expert_load is not None):
            if self._stack is None:
                loss, extras = self._whole(batch, objective, gradients)
            elif len(chunks := self._chunks(batch)) == 1 or (
                len(self._groups) == 1 and self._known_slopes(batch)
            ):
                loss, extras = self._backward_at_once(batch, objective, gradients, chunks, fuse)
            else:
                loss, extras = self._backward_chunked(batch, objective, gradients, chunks)
        if self._features is not None:
            self.feature_slopes = gradients.pop()
        complete = [
            g if g is not None else mx.zeros(p.shape)
            for g, p in zip(gradients, self.slots.read(), strict=True)
        ]
        signals = Signals([*complete, *extras] if may_lose_results() else [])
        self._pass.read_beside(signals)
        return loss, extras, complete, signals

    def _whole(
        self, batch: TokenBatch, objective: Objective, gradients: list[mx.array | None]
    ) -> Any:
        def loss(parameters: list[mx.array]) -> tuple[mx.array, list[mx.array], Any]:
            with self._places.bound(parameters, self._own), counting() as counts:
                value, extras = objective(*self._plain_scores(batch))
                return value, counts, extras

        (value, counts, extras), new = mx.value_and_grad(loss)(self._places.read(self._own))
        self._add(gradients, self._own, new, value, *extras, *counts)
        self._note(counts)
        return value, extras

    def _known_slopes(self, batch: TokenBatch) -> bool:
        """True when a loss reaches a row through its token's log-probability only, and trains
        nothing of the head."""
        return not (self._outer_slots or batch.entropy_slope or batch.measure)

    def _backward_at_once(
        self,
        batch: TokenBatch,
        objective: Objective,
        gradients: list[mx.array | None],
        chunks: list[slice],
        fuse: bool,
    ) -> Any:
        """Last group, head and loss are one graph: the last group's forward is not computed
        twice."""
        layout = self._layout(batch)
        passed = self._forward(batch, layout, keep_last_group=True)
        last = len(self._groups) - 1
        slots = self._group_slots[last] + self._outer_slots
        reads = self._reads(last, passed)

        def loss(
            hidden: mx.array, before: list[mx.array], parameters: list[mx.array]
        ) -> tuple[mx.array, list[mx.array], Any]:
            with self._places.bound(parameters, slots), counting() as counts:
                carried = passed.carried | refilled(reads, passed.carried, before)
                rows = self._rows_at(
                    self._run(last, hidden, layout, passed.calls, carried), layout.positions
                )
                if len(chunks) == 1:
                    value, extras = objective(*self._scores(rows, batch, slice(None)))
                else:
                    value, extras = objective(*scores_in_pieces(self._head, rows, batch, chunks))
                return value, counts, extras

        below = self._trainable_below(last)
        hidden = passed.starts.pop()
        arguments = (
            hidden,
            floats_in([passed.carried[output] for output in reads]),
            self._places.read(slots),
        )
        slopes = mx.value_and_grad(loss, argnums=(0, 1, 2) if below else 2)
        # Compiled functions are not kept: a trace is freed with its function, on the thread that
        # drops it.
        (value, counts, extras), results = (self._fused(slopes, hidden.size) if fuse else slopes)(
            *arguments
        )
        cotangent, of_reads, new = results if below else (None, [], results)
        if len(self._groups) == 1:
            self._pass.look(hidden)
        self._add(gradients, slots, new, value, *extras, cotangent, *of_reads, *counts)
        self._note(counts)
        if below:
            self._pull_back(reads, passed, of_reads)
        self._backward_groups(layout, passed, cotangent, gradients)
        return value, extras

    def _backward_chunked(
        self,
        batch: TokenBatch,
        objective: Objective,
        gradients: list[mx.array | None],
        chunks: list[slice],
    ) -> Any:
        layout = self._layout(batch)
        passed = self._forward(batch, layout, keep_last_group=False)
        rows, shape = passed.rows, passed.starts[-1].shape
        learn = self._learn_rows_once if self._known_slopes(batch) else self._learn_rows_twice
        value, extras, slopes = learn(rows, batch, objective, gradients, chunks)
        flat = mx.zeros((passed.starts[-1].size // rows.shape[-1], rows.shape[-1]), rows.dtype)
        assert self._stack is not None
        cotangent = self._stack.unflat(flat.at[layout.positions].add(slopes), shape)
        self._backward_groups(layout, passed, cotangent, gradients)
        return value, extras

    def _learn_rows_once(
        self,
        rows: mx.array,
        batch: TokenBatch,
        objective: Objective,
        gradients: Any,
        chunks: list[slice],
    ) -> tuple[mx.array, tuple[mx.array, ...], mx.array]:
        """Loss, its further arrays and its slopes by the rows [N, D], from one pass over the
        head."""
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
        (value, extras), slopes = mx.value_and_grad(objective, argnums=tuple(range(len(scores))))(
            *scores
        )
        self._evaluate(value, *extras, *slopes)
        outer, by_row = self._outer_slots, []
        for chunk in chunks:

            def head(
                hidden: mx.array, *parameters: mx.array, chunk: slice = chunk
            ) -> list[mx.array]:
                with self._places.bound(parameters, outer):
                    return list(self._scores(hidden, batch, chunk))

            piece = rows[chunk]
            size = len(piece) * self._vocabulary
            new = self._vjp(
                head, [piece, *self._places.read(outer)], [slope[chunk] for slope in slopes], size
            )
            self._add(gradients, outer, new[1:], new[0])
            by_row.append(new[0])
        return value, extras, mx.concatenate(by_row)

    def _backward_groups(
        self,
        layout: Layout,
        passed: "_Passed",
        cotangent: mx.array | None,
        gradients: list[mx.array | None],
    ) -> None:
        """Go from the last of the group inputs to the first, then the embedding. Empties them,
        to free the activations."""
        reached, slopes = flags_of(cotangent), list[mx.array]()
        while passed.starts and cotangent is not None:
            group, hidden = len(passed.starts) - 1, passed.starts.pop()
            slots, reads = self._group_slots[group], self._reads(group, passed)
            before = floats_in([passed.carried[output] for output in reads])
            writes = [output for output in passed.slopes if output.block in self._groups[group]]

            def block(
                hidden: mx.array,
                *arrays: mx.array,
                group: int = group,
                slots: list[int] = slots,
                reads: list[BlockOutput] = reads,
                count: int = len(before),
                writes: list[BlockOutput] = writes,
            ) -> list[mx.array]:
                with self._places.bound(arrays[count:], slots):
                    carried = passed.carried | refilled(reads, passed.carried, list(arrays[:count]))
                    out = self._run(group, hidden, layout, passed.calls, carried)
                    return [out, *_apart([carried[output] for output in writes])]

            parameters = self._places.read(slots)
            cotangents = [
                cotangent,
                *(slope for output in writes for slope in passed.slopes.pop(output)),
            ]
            if self._trainable_below(group):
                cotangent, *new = self._vjp(
                    block, [hidden, *before, *parameters], cotangents, hidden.size
                )
                self._pull_back(reads, passed, new[: len(before)])
                self._add(gradients, slots, new[len(before) :], cotangent, *new[: len(before)])
                slopes += flags_of(cotangent)
            else:
                constants = [hidden, *before]

                def constant(
                    *parameters: mx.array, constants: list[mx.array] = constants, block: Any = block
                ) -> list[mx.array]:
                    return cast("list[mx.array]", block(*constants, *parameters))

                new = self._vjp(constant, parameters, cotangents, hidden.size)
                cotangent = None
                self._add(gradients, slots, new)
        if cotangent is not None and self._below_slots:
            self._backward_embedding(layout, passed, cotangent, gradients)
        self.loss_reached = all(flag.item() for flag in reached)
        if self.loss_reached:
            self._pass.keep(slopes)

    def _backward_embedding(
        self,
        layout: Layout,
        passed: "_Passed",
        cotangent: mx.array,
        gradients: list[mx.array | None],
    ) -> None:
        writes = list(passed.slopes)

        def embed(*parameters: mx.array) -> list[mx.array]:
            with self._places.bound(parameters, self._below_slots):
                hidden, _, carried = self._embed(layout)
                return [hidden, *_apart([carried[output] for output in writes])]

        cotangents = [cotangent, *(slope for output in writes for slope in passed.slopes[output])]
        new = self._vjp(embed, self._places.read(self._below_slots), cotangents, cotangent.size)
        self._add(gradients, self._below_slots, new)

    def _reads(self, group: int, passed: "_Passed") -> list[BlockOutput]:
        """Return the outputs of earlier groups that a group's blocks read, besides its input."""
        outputs = [a for index in self._groups[group] for a in outputs_in(passed.calls[index])]
        return [
            output for output in dict.fromkeys(outputs) if output.block not in self._groups[group]
        ]

    def _pull_back(
        self, reads: list[BlockOutput], passed: "_Passed", slopes: list[mx.array]
    ) -> None:
        """Add slopes to those of a group's inputs."""
        left = iter(slopes)
        for output in reads:
            new = [next(left) for _ in floats_in(passed.carried[output])]
            old = passed.slopes.get(output)
            passed.slopes[output] = (
                new if old is None else [a + b for a, b in zip(old, new, strict=True)]
            )

    # ------------------------------------------------------------------ parts

    def _forcing(self, batch: TokenBatch, *, counts: bool = False) -> AbstractContextManager[None]:
        compact = None if self._stack is None else self._compact(batch)
        return forcing(batch, compact, counts=counts)

    @contextmanager
    def _counting(self) -> Iterator[list[mx.array]]:
        """Note the block's counts, which evaluates them."""
        with counting() as counts:
            yield counts
        self._note(counts)

    def _note(self, counts: list[mx.array]) -> None:
        for array in counts:
            layer, forced, other, prompts, others, *load = cast("list[int]", array.tolist())
            self.experts_forced += forced
            self.experts_differing += other
            self.prompt_experts_forced += prompts
            self.prompt_experts_differing += others
            if self.expert_load is not None:
                self.expert_load[layer] += np.array(load)

    def _layout(self, batch: TokenBatch) -> Layout:
        compact = self._compact(batch)
        return PlainRows(batch.inputs, batch.positions) if compact is None else layout_of(compact)

    def _compact(self, batch: TokenBatch) -> CompactRows | None:
        """Return the batch's compact rows where this model can compute them."""
        used = {
            SharedRows: self.shares_prompts,
            PackedRows: self.packs_rows,
            TreeRows: self.merges_rows,
        }
        return batch.compact if batch.compact is not None and used[type(batch.compact)] else None

    def _embed(self, layout: Layout) -> tuple[mx.array, list[Any], dict[BlockOutput, Any]]:
        """The first block's input, the blocks' other arguments, and what of these is
        differentiated: arrays [B, T, …] that depend on weights outside the blocks, perhaps. Each
        is an `BlockOutput` of block -1 in the arguments."""
        assert self._stack is not None
        hidden, calls = layout.embed(self._stack)
        lifted: dict[BlockOutput, Any] = {}
        if not (self._below_slots and isinstance(layout, PlainRows)):
            return hidden, calls, lifted
        places: dict[int, BlockOutput] = {}

        def lift(value: Any) -> Any:
            if (
                not floats_in(value)
                or not isinstance(value, mx.array)
                or value.shape[:2] != hidden.shape[-3:-1]
            ):
                return value
            output = places.setdefault(id(value), BlockOutput(-1, len(places)))
            lifted[output] = value
            return output

        calls = [
            BlockCall(tuple(map(lift, c.args)), {k: lift(v) for k, v in c.kwargs.items()})
            for c in calls
        ]
        return hidden, calls, lifted

    def _forward(
        self,
        batch: TokenBatch,
        layout: Layout,
        *,
        keep_last_group: bool,
        with_head: bool = False,
    ) -> "_Passed":
        """Embedding and blocks. `keep_last_group`: the last group is left to the caller; the
        rows mean nothing then. `with_head`: a single group is evaluated with the next one."""
        hidden, calls, carried = self._embed(layout)
        alone = len(self._groups) == 1
        # the compiled function reads it
        if not alone or (keep_last_group and compiles_gradients()):
            self._evaluate(*arrays_in(calls), *arrays_in(list(carried.values())), hidden=hidden)
        passed = _Passed([hidden], calls, carried, hidden)
        with self._counting() as counts:
            for group in range(len(self._groups) - 1):
                hidden = self._run(group, hidden, layout, calls, carried)
                self._evaluate(*arrays_in(list(carried.values())), *counts, hidden=hidden)
                passed.starts.append(hidden)
            if not keep_last_group:
                hidden = self._run(len(self._groups) - 1, hidden, layout, calls, dict(carried))
                passed.rows = self._rows_at(hidden, layout.positions)
                if counts or not (alone and with_head):
                    self._evaluate(*counts, hidden=passed.rows)
        return passed

    def _rows_at(self, hidden: mx.array, positions: mx.array) -> mx.array:
        """A hidden state's rows [N, W] at positions of the flattened tokens."""
        assert self._stack is not None
        return mx.take(self._stack.flat(hidden), positions, axis=0)

    def _run(
        self,
        group: int,
        hidden: mx.array,
        layout: Layout,
        calls: list[Any],
        carried: dict[BlockOutput, Any],
    ) -> mx.array:
        """Add the further outputs of the group's blocks to `carried`."""
        assert self._stack is not None
        for index in self._groups[group]:
            output = layout.run(self._stack.blocks[index], hidden, resolved(calls[index], carried))
            hidden = hidden_of(output)
            if isinstance(output, tuple):
                carried |= {
                    BlockOutput(index, place): value for place, value in enumerate(output) if place
                }
        return hidden

    def _trainable_below(self, group: int) -> bool:
        return bool(self._below_slots) or any(self._group_slots[:group])

    def _fused(self, function: Callable[..., Any], size: int) -> Callable[..., Any]:
        """See `ops.fused`. Weights that are unpacked would be unpacked all at once."""
        return function if self._unpacks else fused(function, size)

    def _vjp(
        self,
        function: Callable[..., Any],
        primals: list[mx.array],
        cotangents: list[mx.array],
        size: int,
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

    def _evaluate(self, *arrays: mx.array | None, hidden: mx.array | None = None) -> None:
        started = perf_counter()
        mx.eval([array for array in (hidden, *arrays) if array is not None])
        self._pass.look(hidden)
        self.longest_eval_ms = max(self.longest_eval_ms, 1000 * (perf_counter() - started))
        self._between_blocks()

    def _chunks(self, batch: TokenBatch) -> list[slice]:
        count = batch.positions.shape[0]
        size = head_rows(count, self._vocabulary, times=self._head_times)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)] or [
            slice(0, 0)
        ]

    # ------------------------------------------------------------------ the checks at start

    def _check(self) -> None:
        """Raises ValueError where blocks cannot be taken apart: other glue between them, or
        other gradients."""
        assert self._stack is not None
        tokens = (mx.arange(16, dtype=mx.int32) % 7).reshape(2, 8)
        self._vocabulary = check_stack(self._stack, tokens)
        self._carries = any(self._stack.returns) or bool(
            self._embed(PlainRows(tokens, mx.array([0])))[2]
        )
        with self._stack.only(self._stack.samples()):
            self._check_gradients(
                TokenBatch(tokens, mx.arange(0, 16, 3), mx.array([1, 2, 3, 4, 5, 6], mx.int32))
            )

    def _check_gradients(self, batch: TokenBatch) -> None:
        def objective(
            logprobs: mx.array, *others: mx.array
        ) -> tuple[mx.array, tuple[mx.array, ...]]:
            return sum((0.1 * other for other in others), logprobs).sum(), ()

        value, _, gradients = self.loss_and_gradients(batch, objective)
        expected: list[mx.array | None] = [None] * len(self._places)
        whole, _ = self._whole(batch, objective, expected)
        pairs = [(g, e) for g, e in zip(gradients, expected, strict=False) if e is not None]
        size = math.hypot(*(norm(e) for _, e in pairs))
        # a gradient that is 0 but for rounding (of a scalar in front of a norm) tells nothing
        worst = max(
            (distance(g, e) for g, e in pairs if norm(g - e) > ROUNDING_OF_ALL * size),
            default=0.0,
        )
        if max(worst, distance(value, whole)) > ROUNDED:
            raise ValueError(
                f"block-by-block gradients of this architecture are off by {worst:.2g} (relative)"
            )


@dataclass
class _Passed:
    """Values that a forward pass keeps for the backward pass. `slopes`: gradients of the outputs
    that later groups have read, by output."""

    starts: list[mx.array]  # the groups' inputs
    calls: list[Any]  # the blocks' other arguments
    carried: dict[BlockOutput, Any]
    rows: mx.array  # [N, W], the scored rows after the last block
    slopes: dict[BlockOutput, list[mx.array]] = field(default_factory=dict)


def _apart(values: Any) -> list[mx.array]:
    """Return new arrays: MLX takes one cotangent only for an array that a function returns
    twice, or just passes on."""
    return [array + 0 for array in floats_in(values)]


def _rows_at(hidden: mx.array, positions: mx.array) -> mx.array:
    """[B, T, D] → [N, D]."""
    return mx.take(hidden.reshape(-1, hidden.shape[-1]), positions, axis=0)
