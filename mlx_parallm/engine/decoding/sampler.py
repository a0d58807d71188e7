"""Draw one token for every row in one vectorised call; each row has its own parameters and its own
random stream.

`SamplingBatch` holds the rows' parameters as arrays and is made again only when the rows change.
The order is vLLM's: tokens outside of the grammar → forbidden tokens and bias → penalties →
temperature → min_p → top_k → top_p → draw.

Every row draws with the keys f(random stream of the sequence, number of the token), so a seeded
request gives the same tokens whatever else is in the batch. Its log-probability is that of
softmax(logits / temperature) before all filters; rows that reshape the distribution get the
log-probability of the distribution that was really drawn from beside it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_parallm.engine.grammar import allowed_tokens
from mlx_parallm.engine.logit_edits import stack_edits
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.ops import constant, exp_minus, fused_on_gpu, row_maxima
from mlx_parallm.models.sums import logsumexp
from mlx_parallm.system.device.faults import wrong_numbers
from mlx_parallm.types import SamplingParams, TopLogprob

BLOCK = 128
LEAST_BLOCK = 32  # of shorter ones a vocabulary has many
_OFF = 2.0  # a top_p that keeps everything, beyond what rounding of the cumulated sum can reach


@dataclass(frozen=True)
class BlockedLogits:
    """Logits in N blocks of B tokens, for both the draw and the normaliser of the log-probability
    in one pass.

    A token is drawn in two stages, the block by its mass and the token within its block, each by
    Gumbel's maximum (`mx.random.categorical`): the distribution is the same as over the whole
    vocabulary, with (V / 128 + 128) random numbers and logarithms a row instead of V. Times:
    docs/benchmarks/serving.md.

    logits [n, N · B] float32, -inf behind the vocabulary; masses [n, N]: Σ exp(x - max x) over a
    block; mass [n]: over all; logsumexp [n]: NaN where a logit is.
    """

    logits: mx.array
    masses: mx.array
    mass: mx.array
    logsumexp: mx.array

    @staticmethod
    def split(logits: mx.array) -> "BlockedLogits":
        """Split [n, V] float32."""
        rows, vocab = logits.shape
        largest, size = row_maxima(logits), block_size(vocab)
        if padding := -vocab % size:
            logits = mx.pad(logits, [(0, 0), (0, padding)], constant_values=-mx.inf)
        masses = exp_minus(logits, largest).reshape(rows, -1, size).sum(axis=-1)
        mass = masses.sum(axis=-1)
        return BlockedLogits(logits, masses, mass, _log_plus(mass, largest.squeeze(-1)))

    def draw(self, keys: mx.array) -> mx.array:
        """[n] int32 tokens, each with its own two keys of `keys` [n, 4] uint32. One of mass 0 is
        never drawn."""
        rows, blocks = self.masses.shape
        of_blocks = self.logits.reshape(rows, blocks, -1)
        block = _drawn_block(self.masses, keys[:, :2])
        logits = mx.take_along_axis(of_blocks, block[:, None, None], axis=1).squeeze(1)
        return _place_of(block, _drawn(logits, keys[:, 2:]), constant(logits.shape[-1], mx.int32))


def block_size(vocab: int) -> int:
    """How many tokens a block has: 128, or fewer if then no block is short."""
    size = math.gcd(vocab, BLOCK)
    return size if size >= LEAST_BLOCK else BLOCK


@fused_on_gpu
def _place_of(block: mx.array, within: mx.array, size: mx.array) -> mx.array:
    return block.astype(mx.int32) * size + within.astype(mx.int32)


def _drawn_of(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)


def _block_of(masses: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(mx.log(masses), key=key)


# random numbers have a shape: these are compiled once for each number of rows
_drawn = fused_on_gpu(mx.vmap(_drawn_of), any_shape=False)
_drawn_block = fused_on_gpu(mx.vmap(_block_of), any_shape=False)


@fused_on_gpu
def _log_plus(mass: mx.array, largest: mx.array) -> mx.array:
    return mx.log(mass) + largest


@fused_on_gpu
def _as_number(tokens: mx.array) -> mx.array:
    return tokens.astype(mx.float32) + 1


@dataclass(frozen=True)
class Sampled:
    """Pending arrays of one step; the host reads `arrays`. n rows.

    tokens [n] int32 · logprobs [n] float32 · processed [p] float32 for the rows
    `SamplingBatch.reshaped` · top_tokens, top_logprobs [t, K] for the rows
    `SamplingBatch.wants_top`, unordered · numbers [3 n + p] float32: the tokens + 1, Σ exp(x - max)
    over the `vocab` logits, logprobs and processed. That sum is at least 1, and `vocab` where all
    logits are the same number, so no part of a sound step is zeros.
    """

    tokens: mx.array
    logprobs: mx.array
    processed: mx.array | None
    top_tokens: mx.array | None
    top_logprobs: mx.array | None
    numbers: mx.array
    vocab: int

    @property
    def arrays(self) -> list[mx.array]:
        every = [self.tokens, self.numbers, self.top_tokens, self.top_logprobs]
        return [array for array in every if array is not None]

    def read(self) -> "ReadNumbers":
        """Read the evaluated arrays. Raises DeviceFaultError: it is not a result of a step."""
        tokens, numbers = np.array(self.tokens), np.array(self.numbers)
        count = len(tokens)
        mass = numbers[count : 2 * count]
        if (numbers[:count] != tokens + 1).any() or (mass == 0).any():
            raise wrong_numbers("a sampled token is zeros alone")
        return ReadNumbers(
            tokens.tolist(),
            numbers[2 * count : 3 * count].tolist(),
            numbers[3 * count :].tolist(),
            alike=np.flatnonzero(mass == self.vocab).tolist(),
        )


class ReadNumbers(NamedTuple):
    """`alike`: the rows whose logits, divided by the temperature, are the same number for all
    tokens."""

    tokens: list[int]
    logprobs: list[float]
    processed: list[float]
    alike: list[int]


class SamplingBatch:
    """The parameters of the rows of a step, as arrays.

    `processed_alternatives`: the likeliest tokens are those of the distribution that is drawn from,
    after all filters.
    """

    def __init__(self, rows: tuple[Sequence, ...], *, processed_alternatives: bool = False) -> None:
        self.processed_alternatives = processed_alternatives
        params = [sequence.params for sequence in rows]
        temperatures = np.array([p.temperature or 1.0 for p in params], np.float32)
        greedy = np.array([p.temperature == 0.0 for p in params])
        self.temperature: mx.array | float = (
            1.0 if (temperatures == 1.0).all() else mx.array(temperatures)
        )
        self.all_greedy, self.any_greedy = bool(greedy.all()), bool(greedy.any())
        self.greedy = mx.array(greedy)
        self.streams = np.array([sequence.random_stream for sequence in rows], np.uint64)
        self.edits = [sequence.edits for sequence in rows]
        self.matchers = [sequence.matcher for sequence in rows]
        self.reshaped = [i for i, p in enumerate(params) if p.reshapes_distribution]
        self.filter = _Filter.of(params)
        self.wants_top = [i for i, p in enumerate(params) if p.logprobs]
        self.top_count = max((p.logprobs or 0 for p in params), default=0)

    def keys(self, positions: list[int]) -> mx.array:
        """[n, 4] uint32: two keys for drawing token number positions[i] of each row."""
        numbers = np.array([[2 * position, 2 * position + 1] for position in positions], np.uint64)
        return mx.array(random_keys(self.streams[:, None], numbers).reshape(-1, 4))


def sample(logits: mx.array, batch: SamplingBatch, positions: list[int]) -> Sampled:
    """Draws a token for each row.

    Args:
        logits: [n, V].
        positions: how many tokens each row has drawn so far.
    """
    plain = logits.astype(mx.float32)
    edited = _edit(_constrain(plain, batch), batch)
    raw = _scaled(plain, batch)
    scaled = batch.filter.apply(raw if edited is plain else _scaled(edited, batch))
    raw_blocks = BlockedLogits.split(raw)
    blocks = raw_blocks if scaled is raw else BlockedLogits.split(scaled)
    if batch.all_greedy:
        tokens = mx.argmax(edited, axis=-1).astype(mx.int32)
    else:
        tokens = blocks.draw(batch.keys(positions))
        if batch.any_greedy:
            tokens = mx.where(batch.greedy, mx.argmax(edited, axis=-1).astype(mx.int32), tokens)
    processed = None
    if batch.reshaped:
        chosen = [_rows_of(x, batch.reshaped) for x in (scaled, tokens, blocks.logsumexp)]
        processed = token_logprobs(chosen[0], chosen[1], normalizer=chosen[2])
    shown = (scaled, blocks) if batch.processed_alternatives else (raw, raw_blocks)
    top_tokens, top_logprobs = _alternatives(*shown, batch)
    logprobs = token_logprobs(raw, tokens, normalizer=raw_blocks.logsumexp)
    parts = [_as_number(tokens), raw_blocks.mass, logprobs]
    numbers = mx.concatenate(parts if processed is None else [*parts, processed])
    vocab = logits.shape[-1]
    return Sampled(tokens, logprobs, processed, top_tokens, top_logprobs, numbers, vocab)


def random_keys(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[..., 2] uint32: output number `positions` of the splitmix64 generators started at `streams`
    (both [...] uint64)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        x = streams + (positions + np.uint64(1)) * golden
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x[..., None].view(np.uint32)


def _rows_of(array: mx.array, rows: list[int]) -> mx.array:
    """Return some rows, in ascending order; all of them without a copy."""
    return array if len(rows) == array.shape[0] else array[mx.array(rows)]


def _scaled(logits: mx.array, batch: SamplingBatch) -> mx.array:
    return logits if isinstance(batch.temperature, float) else logits / batch.temperature[:, None]


def _constrain(logits: mx.array, batch: SamplingBatch) -> mx.array:
    """-inf for the tokens that a row's matcher does not let come next."""
    binding = [(i, matcher) for i, matcher in enumerate(batch.matchers) if matcher is not None]
    binding = [(i, matcher) for i, matcher in binding if matcher.binds()]
    if not binding:
        return logits
    allowed = mx.array(allowed_tokens([each for _, each in binding], logits.shape[-1]))
    if len(binding) == logits.shape[0]:
        return mx.where(allowed, logits, -mx.inf)
    index = mx.array([i for i, _ in binding])
    masked = logits * 1.0
    masked[index] = mx.where(allowed, logits[index], -mx.inf)
    return masked


def _edit(logits: mx.array, batch: SamplingBatch) -> mx.array:
    """Bias and penalties on the few entries that they touch."""
    rows = [i for i, edit in enumerate(batch.edits) if edit is not None and edit.size]
    # a forced end of reasoning comes whatever forbids it
    rows = [i for i in rows if (m := batch.matchers[i]) is None or not m.ends_thinking]
    if not rows:
        return logits
    table = stack_edits([edit for i in rows if (edit := batch.edits[i]) is not None])
    index, tokens = mx.array(rows)[:, None], mx.array(table.tokens)
    repetition = mx.array(table.repetition)
    chosen = logits[index, tokens] + mx.array(table.bias)
    chosen = mx.where(chosen > 0, chosen / repetition, chosen * repetition) - mx.array(
        table.subtract
    )
    edited = logits * 1.0  # the raw logits stay: the plain log-probability is theirs
    edited[index, tokens] = chosen
    return edited


def _alternatives(
    logits: mx.array, blocks: BlockedLogits, batch: SamplingBatch
) -> tuple[mx.array | None, mx.array | None]:
    """The likeliest tokens of [n, V] logits; the sampled token has the log-probability that is
    reported for it."""
    if not batch.wants_top:
        return None, None
    rows = batch.wants_top
    return top_logprobs(_rows_of(logits, rows), batch.top_count, _rows_of(blocks.logsumexp, rows))


def top_logprobs(
    logits: mx.array, count: int, normalizer: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The `count` likeliest tokens and their log-probabilities, unordered: [..., V] float32 → two
    [..., count].

    normalizer: [...], logsumexp of the logits if it is known already.
    """
    count = min(count, logits.shape[-1])
    tokens = mx.argpartition(logits, kth=-count, axis=-1)[..., -count:]
    chosen = mx.take_along_axis(logits, tokens, axis=-1)
    total = logsumexp(logits) if normalizer is None else normalizer
    return tokens, chosen - total[..., None]


def ordered_alternatives(tokens: mx.array, logprobs: mx.array) -> list[tuple[TopLogprob, ...]]:
    """[t, K] alternatives, likeliest first."""
    ids, values = np.array(tokens), np.array(logprobs)
    order = np.argsort(-values, axis=-1, kind="stable")
    ids, values = np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
    return [
        tuple(TopLogprob(token, value) for token, value in zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class _Filter:
    """min_p, top_k and top_p of the rows that have any of them.

    `index`: these rows, m of n; None: no row. `log_min_p`, `top_k`, `top_p`: [m, 1] each;
    None: no row has it. `most`: the largest top_k, where each of the rows has one.
    """

    index: mx.array | None = None
    all_rows: bool = False
    log_min_p: mx.array | None = None
    top_k: mx.array | None = None
    top_p: mx.array | None = None
    most: int | None = None

    @classmethod
    def of(cls, params: list[SamplingParams]) -> "_Filter":
        """Return the filter of rows with these parameters."""
        rows = [row for row, p in enumerate(params) if p.filters]
        chosen = [params[row] for row in rows]
        if not chosen:
            return cls()
        log_min_p = top_k = top_p = None
        if any(p.min_p > 0.0 for p in chosen):
            with np.errstate(divide="ignore"):
                logs = np.log(np.array([p.min_p for p in chosen], np.float32))
            log_min_p = mx.array(logs)[:, None]
        if any(p.top_p < 1.0 or p.top_k > 0 for p in chosen):
            everything = np.iinfo(np.int32).max
            ranks = [min(p.top_k, everything) if p.top_k > 0 else everything for p in chosen]
            shares = [p.top_p if p.top_p < 1.0 else _OFF for p in chosen]
            top_k = mx.array(ranks)[:, None]
            top_p = mx.array(shares, dtype=mx.float32)[:, None]
        every_top_k = all(p.top_k > 0 for p in chosen)
        most = max(p.top_k for p in chosen) if every_top_k else None
        return cls(mx.array(rows), len(rows) == len(params), log_min_p, top_k, top_p, most)

    def apply(self, scaled: mx.array) -> mx.array:
        """Set filtered tokens to -inf; [n, V] logits divided by the temperature."""
        if self.index is None:
            return scaled
        if self.all_rows:
            return self._keep(scaled)
        filtered = scaled * 1.0
        filtered[self.index] = self._keep(scaled[self.index])
        return filtered

    def _keep(self, x: mx.array) -> mx.array:
        if self.log_min_p is not None:
            x = mx.where(x < x.max(axis=-1, keepdims=True) + self.log_min_p, -mx.inf, x)
        if self.top_k is None or self.top_p is None:
            return x
        return mx.where(x < self._threshold(x, self.top_k, self.top_p), -mx.inf, x)

    def _threshold(self, x: mx.array, top_k: mx.array, top_p: mx.array) -> mx.array:
        """[m, 1]: the smallest logit kept. Tokens tied with it are kept too, so the order of a sort
        does not matter.

        A token is kept when its rank is below top_k and the tokens before it have less than top_p
        of the mass.
        """
        # a partition is 8 times cheaper than a sort
        if self.most is not None and self.most < x.shape[-1]:
            x = mx.topk(x, self.most, axis=-1)
        ordered = mx.sort(x, axis=-1)[:, ::-1]
        in_top_k = mx.arange(ordered.shape[-1])[None] < top_k
        mass = mx.softmax(mx.where(in_top_k, ordered, -mx.inf), axis=-1)
        kept = in_top_k & (mx.cumsum(mass, axis=-1) - mass < top_p)
        last = mx.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)
        return mx.take_along_axis(ordered, last, axis=-1)
