"""Predict the bytes of a training step, for a memory plan: `TrainedSize` of the trained weights,
`LargestBatch` of the activations. Evaluates nothing.

The counts were measured with MLX 0.32.4 (`mx.get_peak_memory` around one micro-batch, some sixty
shapes of Qwen3 with an adapter, hidden 256 to 5,120, 1 to 8 layers):
docs/benchmarks/training.md#dry-run.
"""

import sys
from dataclasses import dataclass

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.execution.prompt_images import names_of
from mlx_parallm.models.blocks_per_eval import BlockSize
from mlx_parallm.models.heads import language_head
from mlx_parallm.models.layouts.tree_rows import BLOCK
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.collate import PAYS_BELOW, padded_length
from mlx_parallm.rl_training.step.optimizer import state_bytes

FLOAT = 4
ADALORA = 2 * FLOAT
"""AdaLoRA's sensitivity and uncertainty of each trained number."""
SHARED = 0.85
"""Activations where prompts are shared: the same operations on smaller arrays, so that fewer
wait to be freed."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest completion; `batch`: of all sequences of
    the largest batch, each padded. None: each sequence may be as long as the longest. `largest`: of
    the largest thing that a prompt shows beside texts; `shown`: of all that it shows."""

    prompt: int
    completion: int
    batch: int | None = None
    largest: int = 0
    shown: int = 0

    def within(self, limit: "Lengths") -> "Lengths":
        """These, no longer together than the limit."""
        whole = limit.prompt + limit.completion
        prompt = min(self.prompt, whole - 1)
        completion = min(self.completion, whole - prompt)
        shown = min(self.shown, prompt)
        return Lengths(prompt, completion, largest=min(self.largest, shown), shown=shown)

    def with_batch(self, batch: TrainBatch, placeholder: int | None = None) -> "Lengths":
        """The longest of these and of a batch's. `placeholder`: stands for a feature of what
        is shown, if the model reads it; what one sequence shows counts as equally large."""
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        completions = [rollout.sampled_tokens for rollout in rollouts]
        if not batch.groups:  # rows of a file
            rollouts = [row.rollout for row in batch.sequences]
            completions = [sum(rollout.mask) for rollout in rollouts]
        wholes = [len(rollout.tokens) for rollout in rollouts]
        shown = [
            (rollout.tokens.count(placeholder), len(names))
            for rollout in rollouts
            if placeholder is not None and (names := names_of(rollout))
        ]
        return Lengths(
            max(self.prompt, *(w - c for w, c in zip(wholes, completions, strict=True)), 0),
            max(self.completion, *completions, 0),
            max(self.batch or 0, sum(padded_length(max(whole - 1, 1)) for whole in wholes)),
            max(self.largest, *(-(-tokens // count) for tokens, count in shown), 0),
            max(self.shown, *(tokens for tokens, _ in shown), 0),
        )


@dataclass(frozen=True)
class TrainedSize:
    """Trained parameters, and their optimizer states and copies.

    Attributes:
        small: of them in arrays whose optimizer states are never in 8 bits.
        products: numbers of AdaLoRA's B, saved with E and without.
        width: bytes of a number of the tree that serves.
        reference: `rl_training.reference`; None: the run needs none.
        rollbacks: versions that are kept to go back to; `served`: an adapter's older versions.
    """

    numbers: int
    small: int
    products: int
    width: int
    lora: LoraConfig
    optimizer: str
    reference: str | None
    rollbacks: int
    served: int

    @property
    def state(self) -> float:
        """Bytes of the optimizer's state."""
        return state_bytes(self.optimizer, self.numbers, self.small)

    @property
    def held(self) -> int:
        """Bytes of states and gradients, and of all copies of the trained parameters.

        Those are an adapter's own arrays and the versions that are kept; a float32 copy of all
        weights, if they are narrower; a rollback's copies; the KL's reference.
        """
        lora, states = self.lora.enabled, 1 + self.rollbacks
        kept = FLOAT * states
        kept += FLOAT * (1 + self.served if lora else self.width != FLOAT)
        if lora and self.lora.use_adalora:
            # two moving averages with each version; E · B of the served one, half of the numbers
            kept += ADALORA * states + FLOAT // 2
        if self.reference == "ema":
            kept += FLOAT
        elif self.reference is not None and not (lora and self.reference == "base"):
            kept += FLOAT if lora else self.width
        return self.numbers * kept + int(states * self.state)

    @property
    def updating(self) -> int:
        """Bytes of new weights beside old ones, and of clipped gradients."""
        narrow = 0 if self.lora.enabled or self.width == FLOAT else self.width
        return self.numbers * (3 * FLOAT + narrow)

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint: the trained parameters, the optimizer's state, masters if they
        differ, the reference if nothing else knows it."""
        if not self.lora.enabled:
            copies = (self.width != FLOAT) + (self.reference == "ema")
            return self.numbers * (self.width + FLOAT * copies) + int(self.state)
        reference = self.reference in ("initial", "ema")
        averages = int(self.state) + ADALORA * self.numbers * self.lora.use_adalora
        return self.numbers * FLOAT * (1 + reference) + self.products * FLOAT + averages


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batch of a run.

    Attributes:
        tokens: padding included.
        rows: of a mini-batch; `span`: tokens of each.
        scored: tokens that have a log-probability.
        shared: a prompt is computed once for its group, or its pair.
    """

    tokens: int
    rows: int
    span: int
    scored: int
    shared: bool

    @classmethod
    def of(
        cls, longest: Lengths, *, examples: int, pairs: bool, group: int, most: int, budget: int
    ) -> "LargestBatch":
        """Return it as `collate.py` makes it, of sequences that are all as long as `longest`.

        Args:
            examples: of a mini-batch; `pairs`: each is two sequences.
            group: completions of a prompt, if there are fewest; 1: rows of a file.
            most: tokens of a sequence.
            budget: `rl_training.token_budget`.
        """
        whole = min(longest.prompt + longest.completion, most)
        span = padded_length(max(whole - 1, 1))
        together = 2 if pairs else 1
        group, rows = 2 if pairs else group, examples * together
        computed = rows * span
        once = -(-rows // group) * padded_length(longest.prompt)
        once += rows * padded_length(max(longest.completion - 1, 1))
        if shared := group > 1 and once <= PAYS_BELOW * computed:
            computed = once
        tokens = min(budget, computed, longest.batch or sys.maxsize)
        tokens = max(together * span, tokens)
        return cls(tokens, rows, span, min(tokens, rows * longest.completion), shared)

    @property
    def masks(self) -> int:
        """Bytes of the masks of rows that share prompts, are packed, or become a tree: one of each
        token for as many others as the longest row has, and in a tree for those of its block."""
        return self.tokens * (self.span + BLOCK) if self.rows > 1 else 0

    def backward(
        self,
        block: BlockSize,
        layers: int,
        blocks: int,
        vocabulary: int,
        *,
        number: float,
        trained_head: bool,
        unpacks: bool,
    ) -> tuple[int, int]:
        """Return the bytes of activations and of logits at the peak of the backward pass.

        Args:
            blocks: that one evaluation computes.
            number: bytes of an activation.
            trained_head, unpacks: as in `language_head.peak_bytes`, `BlockSize.peak`.
        """
        logits, whole = language_head.peak_bytes(
            self.scored, vocabulary, block.hidden, trained=trained_head, unpacks=unpacks
        )
        unit = self.tokens * number * (SHARED if self.shared else 1)
        waits = block.kept(self.span)  # kept by a block for its backward pass
        computed = ((blocks - 1) * waits + block.peak(self.span, unpacks=unpacks)) * unit
        # The head's peak comes while the last group waits; if it goes in pieces, before any
        # block is computed again.
        above = max(computed - logits, blocks * waits * unit if whole else 0.0)
        return int(-(-layers // blocks) * block.hidden * unit + above), logits


def recorded_bytes(each: int, tokens: int, *, rollouts: int, examples: int) -> int:
    """Bytes of the recorded experts of a step's rollouts and of those that are sampled meanwhile,
    and of a mini-batch's in 16 bits and 32. `each`: bytes of a token's; `tokens`: of a rollout."""
    wide = 3 * FLOAT // 2 * min(examples, rollouts)
    return each * tokens * (2 * rollouts + wide)
