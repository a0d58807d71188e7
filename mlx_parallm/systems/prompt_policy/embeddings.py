"""Prompts as numbers. An embedder is called with texts and returns [N, dimensions] float32, rows of
length 1. No MLX.

`HashedEmbedder` needs no model: texts that share words and parts of words get similar rows.
`EndpointEmbedder` asks `/v1/embeddings` of an OpenAI-compatible server: a provider's, or hidden
states of a model that `mlx_parallm serve` serves.
"""

import asyncio
import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from mlx_parallm.errors import EndpointError
from mlx_parallm.execution.openai_client import OpenAIEndpoint

WORD = re.compile(r"\w+|[^\w\s]")
LETTERS = (3, 4)  # lengths of the parts of words
PART_WEIGHT = 0.3  # weight of a part of a word; a word has 1


class Embedder(Protocol):
    """Turns texts into vectors of `dimensions` numbers."""

    dimensions: int

    async def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return [N, dimensions] float32. Raises EndpointError: the model's server cannot be
        asked."""
        ...


class HashedEmbedder:
    """Words, pairs of words and parts of words, hashed into `dimensions` places with a sign
    (arXiv:0902.2206).

    The same text gives the same numbers on every machine.
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    async def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return await asyncio.to_thread(self.embed, texts)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return [N, dimensions] float32; a text without a word is all zeros."""
        rows = np.zeros((len(texts), self.dimensions), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for gram, weight in _grams(text).items():
                code = zlib.crc32(gram.encode(errors="surrogatepass"))
                row[(code >> 1) % self.dimensions] += weight if code & 1 else -weight
        return _unit(rows)


def _grams(text: str) -> dict[str, float]:
    words = WORD.findall(text.lower())
    counts = Counter(words)
    counts.update(f"{a} {b}" for a, b in pairwise(words))
    weights = {gram: 1 + math.log(count) for gram, count in counts.items()}
    parts = Counter(
        f"#{padded[i : i + length]}"
        for word in words
        for padded in [f"<{word}>"]
        for length in LETTERS
        for i in range(len(padded) - length + 1)
    )
    return weights | {part: PART_WEIGHT * (1 + math.log(count)) for part, count in parts.items()}


class EndpointEmbedder:
    """Vectors of a model behind `POST /v1/embeddings`."""

    def __init__(self, endpoint: OpenAIEndpoint, model: str, dimensions: int) -> None:
        self.dimensions, self._endpoint, self._model = dimensions, endpoint, model

    async def __call__(self, texts: Sequence[str]) -> np.ndarray:
        reply = await self._endpoint.post(
            "/embeddings", {"model": self._model, "input": list(texts)}
        )
        try:
            data = sorted(reply["data"], key=lambda entry: entry["index"])
            with np.errstate(over="ignore"):  # `checked` refuses infinity
                rows = np.array([entry["embedding"] for entry in data], np.float32)
        except (LookupError, TypeError, ValueError) as error:
            raise EndpointError(
                f"{self._endpoint.base_url}: this is not a list of embeddings: {str(reply)[:200]}"
            ) from error
        return checked(
            rows, len(texts), self.dimensions, f"{self._model} at {self._endpoint.base_url}"
        )

    async def aclose(self) -> None:
        await self._endpoint.aclose()


def checked(rows: np.ndarray, count: int, dimensions: int, source: str) -> np.ndarray:
    """Return rows of length 1. Raises EndpointError: another number of rows, of numbers in a
    row, or no numbers."""
    if rows.shape != (count, dimensions):
        row_length = rows.shape[1] if rows.ndim == 2 else 0
        raise EndpointError(
            f"{source} gives {len(rows)} vectors of {row_length} numbers for {count} texts, but the"
            f" policy reads {dimensions}: set prompt_policy.ppo.input_dim = {row_length} and a"
            " new prompt_policy.checkpoint_dir"
        )
    if not np.isfinite(rows).all():
        raise EndpointError(f"{source} gives embeddings that are not finite numbers")
    return _unit(rows)


def _unit(rows: np.ndarray) -> np.ndarray:
    # squares may be above float32's largest
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
