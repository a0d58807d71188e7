"""How many blocks of a model one evaluation of the training step computes, where
`rl_training.blocks_per_eval` leaves it open.

The fewer evaluations, the less a GPU waits between them, and the fewer blocks are computed a second
time. Each of these bounds a group of blocks:

    memory   bytes that its blocks keep until their backward pass (`BlockLimits.most_bytes`,
             set by the memory plan)
    nodes    of the graph: building and scheduling it takes time and memory of the host
    work     on a CPU, so that requests get their turn (CPU_WORK, some tenths of a second)
    time     where `rl_training.max_eval_ms` is set, as on Metal: what evaluations took so far
             (`BlockLimits.most_blocks`, which `MicroBatchBudget` adapts)

A clock decides nothing but the last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any

import mlx.core as mx

from mlx_parallm.system.device.traits import computes_beside_python
from mlx_parallm.system.hardware import memory_present

EVAL_SHARE = 8  # share of the memory (1/8) that one evaluation's blocks may keep
CPU_WORK = 4e9  # floating-point operations of one evaluation
CPU_FEWEST = 4  # blocks: larger arrays cost more (docs/benchmarks/training.md#memory)
MOST_NODES = 40_000
BACKWARD = 3  # nodes of forward, forward again and backward, in nodes of a forward pass
FLOAT = 4


@dataclass(frozen=True)
class BlockSize:
    """A transformer block's dimensions. `intermediate`: of one token, active experts together."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> "BlockSize":
        """Read them from a config.json; missing keys count as usual."""
        text: Mapping[str, Any] = model_config.get("text_config", model_config)
        heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
        hidden = int(text.get("hidden_size") or text.get("n_embd") or 1)
        dense = int(text.get("intermediate_size") or 4 * hidden)
        # experts without a size of their own are as large as the feed-forward (Mixtral, gpt-oss)
        of_expert = int(
            text.get("moe_intermediate_size") or (dense if text.get("num_local_experts") else 0)
        )
        experts = of_expert * int(text.get("num_experts_per_tok") or 0)
        return cls(
            hidden=hidden,
            intermediate=experts or dense,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
        )

    def kept(self, span: int) -> float:
        """Numbers that one token of a row of `span` keeps in a block that waits for its backward
        pass (docs/benchmarks/training.md#dry-run)."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = 4.2 * self.hidden + 5 * self.intermediate + 3.2 * heads + 2.5 * kv
        return wide + 1.3 * self.heads * span

    def peak(self, span: int, *, unpacks: bool) -> float:
        """Numbers that one token of a row of `span` takes at the peak of a block's backward pass.
        `unpacks`: its weights are quantised, and unpacked for each product: what has ended waits
        for fewer operations (models/cpu/unpacking.py)."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        scores = self.heads * span
        in_mlp = 13 * self.hidden + (10 if unpacks else 15) * self.intermediate + 4 * heads + 6 * kv
        in_attention = 12 * self.hidden + 7 * self.intermediate + 11 * heads + 8 * kv
        return max(in_mlp + scores, in_attention + 3.4 * scores)

    def work(self, span: int) -> float:
        """Floating-point operations of one token in a block, forward and backward."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        products = 2 * self.hidden * (heads + kv) + 3 * self.hidden * self.intermediate
        return 6.0 * (products + heads * span)


@dataclass
class BlockLimits:
    """The bounds of one model's evaluations.

    Attributes:
        most_bytes: that the blocks of one evaluation may keep; 0: one block.
        most_blocks: bound by measured time; None: no clock decides.
        used: blocks of the newest evaluation.
    """

    size: BlockSize
    most_bytes: int
    most_blocks: int | None = None
    used: int = 1

    def blocks(self, layers: int, tokens: int, span: int, nodes: int = 0) -> int:
        """Return how many blocks are evaluated together.

        Args:
            layers: the model's blocks.
            tokens: of the micro-batch, padding included.
            span: tokens of its longest row.
            nodes: of one block's forward graph; 0: not counted.
        """
        tokens = max(tokens, 1)
        bounds = [layers, self.most_bytes / (FLOAT * tokens * self.size.kept(span))]
        if not computes_beside_python():
            affordable = CPU_WORK / (tokens * self.size.work(span))
            bounds.append(affordable if affordable >= CPU_FEWEST else 1)
        if nodes:
            bounds.append(MOST_NODES / (BACKWARD * nodes))
        if self.most_blocks is not None:
            bounds.append(self.most_blocks)
        self.used = max(1, int(min(bounds)))
        return self.used


def blocks_of(
    configured: int | None, model_config: Mapping[str, Any], most_bytes: int | None = None
) -> int | BlockLimits:
    """Return the configured number of blocks, or what chooses it. `most_bytes`: of the memory plan;
    None: not set, so a share of the memory, and at most half of what is free."""
    if configured is not None:
        return configured
    if most_bytes is None:
        free, whole = memory_present()
        most_bytes = min(whole // EVAL_SHARE, free // 2)
    return BlockLimits(BlockSize.of(model_config), most_bytes)


def graph_nodes(*arrays: mx.array) -> int:
    """Return the number of operations that these arrays wait for. Evaluates nothing."""
    text = StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")
