"""One pass over the logits for both the draw and the normaliser of the log-probability.

`Masses` keeps exp(logit - largest) summed over blocks of 128 tokens. A token is drawn in two stages, the block by its
mass and the token within its block, each by Gumbel's maximum (`mx.random.categorical`): the distribution is the same as
over the whole vocabulary, with (V / 128 + 128) random numbers and logarithms a row instead of V.
Times: docs/benchmarks/serving.md.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.models.cpu_kernels import exp_minus

BLOCK = 128


@dataclass(frozen=True)
class Masses:
    """logits [n, N, 128] float32 in N = ⌈V / 128⌉ blocks, padded with -inf; largest [n, 1];
    blocks [n, N]: Σ exp(x - largest) over a block."""

    logits: mx.array
    largest: mx.array
    blocks: mx.array

    @staticmethod
    def of(logits: mx.array) -> "Masses":
        """Of [n, V] float32."""
        rows, vocab = logits.shape
        largest = logits.max(axis=-1, keepdims=True)
        masses = exp_minus(logits, largest)
        if padding := -vocab % BLOCK:
            masses = mx.pad(masses, [(0, 0), (0, padding)])
            logits = mx.pad(logits, [(0, 0), (0, padding)], constant_values=-mx.inf)
        shape = (rows, -1, BLOCK)
        return Masses(logits.reshape(shape), largest, masses.reshape(shape).sum(axis=-1))

    @property
    def logsumexp(self) -> mx.array:
        """[n]; NaN where a logit is."""
        return mx.log(self.blocks.sum(axis=-1)) + self.largest.squeeze(-1)

    def draw(self, keys: mx.array) -> mx.array:
        """[n] tokens, each with its own key of `keys` [n, 2] uint32. One of mass 0 is never drawn."""
        return _draw(mx.log(self.blocks), self.logits, keys)


def _draw_row(blocks: mx.array, logits: mx.array, key: mx.array) -> mx.array:
    for_block, for_token = mx.random.split(key)
    block = mx.random.categorical(blocks, key=for_block)
    token = mx.random.categorical(mx.take(logits, block, axis=0), key=for_token)
    return block * BLOCK + token


_draw = mx.vmap(_draw_row)
