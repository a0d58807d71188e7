"""Predict the bytes that generating takes, for a memory plan. Evaluates nothing.

The counts were measured with MLX 0.32.4: docs/benchmarks/training.md#dry-run.
"""

import sys
from dataclasses import dataclass

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.cache.kv_format import KVFormat
from mlx_parallm.engine.cache.rectangle import DOUBLING_LIMIT, FIRST_CAPACITY
from mlx_parallm.engine.cache.sharing import PRIVATE_FROM, SHARED_FROM, size_class, worth_a_segment
from mlx_parallm.engine.cache.size_classes import SLACK
from mlx_parallm.models.blocks_per_eval import BlockSize
from mlx_parallm.system.device.traits import unpacks_weights

FLOAT = 4
SAMPLING_COPIES = 6
"""float32 arrays of [rows, vocabulary] of one decode step: logits, noise, log-probabilities."""


@dataclass(frozen=True)
class KVSize:
    """Keys and values of one token.

    Attributes:
        width: bytes of a number, as it is computed.
        bits: `server.kv_bits`.
    """

    layers: int
    heads: int
    head_dim: int
    width: int
    bits: int | None = None

    @property
    def computed(self) -> int:
        """Bytes as they are computed."""
        return 2 * self.layers * self.heads * self.head_dim * self.width

    @property
    def held(self) -> int:
        """Bytes as a row holds them."""
        if self.bits is None or (form := KVFormat.fitting(self.bits, [self.head_dim])) is None:
            return self.computed
        numbers = 2 * self.layers * self.heads * self.head_dim
        # a scale and a bias for a group
        return numbers * self.bits // 8 + 2 * numbers // form.group_size * self.width


@dataclass(frozen=True)
class GenerationSize:
    """Sequences that are generated together, each as long as it may be.

    Attributes:
        rows: that decode at once; fewer than `server.batch_size` where fewer are asked for.
        group: completions of one prompt.
        prompt, completion: tokens of the longest.
        by_tokens: the model's keys and values can lie by tokens (`cache/token_cache.py`).
    """

    server: ServerConfig
    rows: int
    group: int
    prompt: int
    completion: int
    by_tokens: bool

    def kv_bytes(self, size: KVSize) -> int:
        """Bytes of the rows' keys and values, and of a prompt's that is being computed."""
        if self.by_tokens and self.server.kv_layout != "rectangle":
            cases = self._positions_by_tokens()
        else:
            cases = [(self._positions_of_rectangle(), 0)]
        running = 0
        for private, shared in cases:
            # one layer twice: it grows
            case = (private + shared) * size.held + private * size.held // size.layers
            if size.bits is not None and unpacks_weights():  # one layer unpacked: kv_format.Packed
                numbers = (private + shared) * size.computed * FLOAT
                case += numbers // size.width // size.layers
            running = max(running, case)
        return running + self.server.prefill_chunk * size.computed

    def forward_bytes(self, block: BlockSize, vocabulary: int, activation: float) -> int:
        """Bytes of a chunk of a prompt in one block, and of a decode step's logits. `activation`:
        bytes of a number of the former."""
        prefill = self.server.prefill_chunk * 4 * (block.hidden + block.intermediate) * activation
        return int(prefill + self.rows * vocabulary * FLOAT * SAMPLING_COPIES)

    def _positions_by_tokens(self) -> list[tuple[int, int]]:
        """Positions of the rows' own arrays (`cache/size_classes.py`), and of prompts that a group
        holds once: of the longest prompts, and of the longest ones that are copied into each row,
        which can take more."""
        most = self.server.max_model_len or sys.maxsize
        capacity = min(self.server.batch_size, self.rows + self.rows // SLACK)

        def arrays(positions: int) -> int:
            return capacity * min(most, size_class(positions))

        copied = min(self.prompt, (SHARED_FROM if self.group > 1 else PRIVATE_FROM) - 1)
        cases = [(arrays(self.completion + copied), 0)]
        if worth_a_segment(self.prompt, self.group):
            cases.append((arrays(self.completion), -(-self.rows // self.group) * self.prompt))
        return cases

    def _positions_of_rectangle(self) -> int:
        """Positions of `cache/rectangle.py` at its capacity: a power of two of rows, positions by
        doubling."""
        rows = min(self.server.batch_size, 1 << (self.rows - 1).bit_length())
        positions = FIRST_CAPACITY
        while positions < self.prompt + self.completion:
            positions = min(2 * positions, positions + DOUBLING_LIMIT)
        return rows * min(positions, self.server.max_model_len or positions)
