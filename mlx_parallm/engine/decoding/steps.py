"""Decode steps under way, between `ModelRunner`, which builds and reads them, and `Engine`."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.engine.decoding.sampler import Sampled, SamplingBatch
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.types import TopLogprob


@dataclass(frozen=True)
class LaunchedStep:
    """A step's graph: the decoding rows, their policy version, and the arrays that the host will
    read."""

    rows: tuple[Sequence, ...]
    version: int
    batch: SamplingBatch | None
    sampled: Sampled | None
    pending: list[mx.array]
    prefilled_tokens: int = 0  # tokens of the prompts that it completes
    prompt_tokens: int = 0  # tokens of prompts that it computes
    recorded: tuple[mx.array, ...] = ()  # [rows, …] each
    written: SequenceOf[mx.array] = ()  # `pending` of prompts: keys, values, states


@dataclass(frozen=True)
class DraftStep(LaunchedStep):
    """A step of the only row, which feeds its next token and a draft behind it: `rows` is the
    sequence once more than the draft has tokens."""

    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token of one sequence, read from the device."""

    sequence: Sequence
    token: int
    logprob: float
    processed_logprob: float | None
    top_logprobs: tuple[TopLogprob, ...] | None
    recorded: tuple[bytes, ...] = ()  # for each of the sequence's records
