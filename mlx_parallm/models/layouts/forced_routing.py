"""Which experts a batch of the trainer's forces: those of its scored tokens, and of its prompts'
tokens if they were recorded, in whatever layout the tokens are computed."""

from contextlib import AbstractContextManager

import mlx.core as mx
import numpy as np

from mlx_parallm.models.experts.routing import UNFORCED, ForwardRouting, counted, current, routed
from mlx_parallm.models.layouts.layout import CompactRows, TokenBatch


def forcing(
    batch: TokenBatch, compact: CompactRows | None, *, counts: bool = False
) -> AbstractContextManager[None]:
    """Let this thread's forwards take the experts of `routing_of`."""
    return routed(routing_of(batch, compact, counts=counts))


def counting() -> AbstractContextManager[list[mx.array]]:
    """Count the experts that tokens go to in this thread's forwards: `ForwardRouting.counts`."""
    return counted(current())


def routing_of(
    batch: TokenBatch, compact: CompactRows | None, *, counts: bool = False
) -> ForwardRouting | None:
    """Return the choice of experts that the batch asks for; None: it asks for nothing.

    Args:
        compact: the rows that are computed in the place of the batch's.
        counts: the experts' load is counted, once a scored token, however many rows share it.
    """
    size = batch.inputs.size if compact is None else compact.tokens
    load = None
    if counts:
        places = batch.positions if compact is None else mx.array(np.unique(compact.positions))
        load = mx.zeros((size,), mx.int32)
        load[places] = 1
    if batch.experts is None and batch.prompt_experts is None:
        return ForwardRouting(counted=load) if counts else None
    return ForwardRouting(*_forced(batch, compact, size), counted=load)


def _forced(
    batch: TokenBatch, compact: CompactRows | None, size: int
) -> tuple[mx.array, mx.array | None]:
    """([size, layers, k] int32, [size] bool: the prompts' tokens among them).

    A token that several rows share is computed once: the first row that knows its experts counts,
    and a row that sampled the token behind it before one that has it in its prompt.
    """
    recorded = batch.experts if batch.prompt_experts is None else batch.prompt_experts[1]
    assert recorded is not None
    forced, of_prompts = mx.full((size, *recorded.shape[1:]), UNFORCED, mx.int32), None
    if batch.prompt_experts is not None:
        places, ids = batch.prompt_experts
        at, firsts = np.unique(
            places if compact is None else compact.places.reshape(-1)[places], return_index=True
        )
        forced[mx.array(at)] = ids[mx.array(firsts)].astype(mx.int32)
        of_prompts = mx.zeros((size,), mx.bool_)
        of_prompts[mx.array(at)] = True
    if batch.experts is not None:
        scored = np.array(batch.positions) if compact is None else compact.positions
        rows = np.flatnonzero(np.array(batch.experts[:, 0, 0]) != UNFORCED)
        at, firsts = np.unique(scored[rows], return_index=True)
        if len(at):
            forced[mx.array(at)] = batch.experts[mx.array(rows[firsts])].astype(mx.int32)
            if of_prompts is not None:
                of_prompts[mx.array(at)] = False
    return forced, of_prompts
