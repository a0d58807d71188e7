"""Tiny random models made on the spot, engines over them, and the naive twin: plain mlx-lm, one
sequence at a time."""

import asyncio
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.engine.cache import sharing, token_cache
from mlx_parallm.engine.companions.companion import EngineCompanion
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.live_requests import Failed, Finished, StreamDelta
from mlx_parallm.engine.parts import EngineOptions
from mlx_parallm.engine.prefix_disk.disk import PrefixDisk
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.models.lora import linear_layers, linear_shape, prepare_for_serving
from mlx_parallm.types import CompletionDelta, Request, RequestOutput, SamplingParams
from mlx_parallm.weights import SharedWeights
from tests.tiny_models import QWEN3, make_model

VOCAB = 300
EOS = 299


class ByteTokenizer:
    """Token i is the byte i; 256.. are pieces of several characters; the last one is EOS. Same
    face as `Tokenizer`."""

    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB
    think_markers: tuple[str, str] | None = None

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return b"" if token == EOS else f"<{token}>".encode()

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def detokenizer(self, **_options: bool) -> "ByteDetokenizer":
        return ByteDetokenizer(self)


class ByteDetokenizer:
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = b""

    def add(self, token_id: int) -> str:
        self._bytes += self._tokenizer.token_bytes(token_id)
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError:
            return ""
        self._bytes = b""
        return text

    def finish(self) -> str:
        rest, self._bytes = self._bytes, b""
        return rest.decode(errors="replace")


def qwen3_model(seed: int = 0, **changes: Any) -> nn.Module:
    """A random Qwen3 whose logits are spread enough that greedy tokens vary."""
    return make_model(
        QWEN3 | {"vocab_size": VOCAB, "tie_word_embeddings": False} | changes, seed=seed
    )


def engine_options(**changes: Any) -> EngineOptions:
    """The engine's options in tests, with changes."""
    plain = EngineOptions(
        max_model_len=2048,
        vocab_size=VOCAB,
        max_rows=64,
        prefill_chunk=256,
        max_prefill_ms=None,
        kv_cache_bytes=None,
        by_tokens=True,
        prefix_cache_bytes=1 << 26,
        default_max_tokens=None,
        seed=0,
        architecture="this model",
        processed_alternatives=False,
        close_objects=True,
        prompt_lookup=0,
    )
    return replace(plain, **changes)


@dataclass
class Served:
    """An engine and what it was made of. `plain` is a second tree with the same arrays, for the
    naive twin."""

    engine: Engine
    plain: nn.Module
    weights: SharedWeights
    lora: LoraContext
    layers: dict[str, nn.Module] = field(default_factory=dict)


def serve(
    model: nn.Module,
    *,
    policy: str | None = None,
    keep_versions: int = 1,
    tokenizer: Any = None,
    companions: Iterable[EngineCompanion] = (),
    prefix_disk: PrefixDisk | None = None,
    **options: Any,
) -> Served:
    plain = copy.deepcopy(model)
    layers = linear_layers(plain)
    weights = SharedWeights(model, policy=policy, keep_versions=keep_versions)
    lora = prepare_for_serving(model)
    tokenizer, limits = tokenizer or ByteTokenizer(), engine_options(**options)
    engine = Engine(model, tokenizer, weights, lora, limits, companions, prefix_disk=prefix_disk)
    return Served(engine, plain, weights, lora, layers)


def random_adapter(
    served: Served, seed: int, scale: float = 1.0, rank: int = 4
) -> dict[str, LoraPair]:
    """An adapter on every linear layer, strong enough to change what is generated."""
    keys = mx.random.split(mx.random.key(seed), 2 * len(served.layers))
    layers = {}
    for i, (path, layer) in enumerate(served.layers.items()):
        in_features, out_features = linear_shape(layer)
        a = mx.random.normal((in_features, rank), key=keys[2 * i]) / in_features**0.5
        b = mx.random.normal((rank, out_features), key=keys[2 * i + 1]) / rank**0.5
        layers[path] = LoraPair(a, b, scale)
    mx.eval([array for pair in layers.values() for array in (pair.a, pair.b)])
    return layers


def request(
    name: str,
    prompt: list[int] | tuple[int, ...],
    *,
    adapter: str | None = None,
    stream: bool = False,
    **params: Any,
) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**params), adapter=adapter, stream=stream)


def ragged_prompts(
    count: int, seed: int = 0, shortest: int = 1, longest: int = 60
) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(VOCAB - 1) for _ in range(generator.randint(shortest, longest))]
        for _ in range(count)
    ]


def run(engine: Engine, requests: list[Request], max_steps: int = 5000) -> dict[str, RequestOutput]:
    """Adds all, steps to the end, checks that nothing is left over."""
    for item in requests:
        engine.add(item)
    outputs = collect(engine, max_steps)
    engine.check_integrity()
    assert not engine.scheduler.rows and not engine.scheduler.waiting
    return outputs


def collect(engine: Engine, max_steps: int = 5000) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Finished):
                outputs[event.request_id] = event.output
    raise AssertionError("the engine does not come to an end")


def collect_deltas(engine: Engine, max_steps: int = 5000) -> dict[str, list[CompletionDelta]]:
    deltas: dict[str, list[CompletionDelta]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return deltas
        for event in engine.step():
            if isinstance(event, StreamDelta):
                deltas.setdefault(event.request_id, []).append(event.delta)
    raise AssertionError("the engine does not come to an end")


@contextmanager
def short_segments() -> Iterator[None]:
    """With keys and values by tokens, short texts have the size classes and segments of long
    ones."""
    small = {"CLASS_STEP": 8, "PRIVATE_FROM": 24, "SHARED_FROM": 6, "REFERENCE_FROM": 6}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in small.items():
                patch.setattr(sharing, name, value)
            patch.setattr(token_cache, "FIRST_ANSWER", 4)
            patch.setattr(token_cache, "CLASS_STEP", 8)
            sharing.size_class.cache_clear()
            yield
    finally:
        sharing.size_class.cache_clear()


async def until(condition: Callable[[], object]) -> None:
    """Waits for what another thread does: its counters have no event."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


TIE = 1e-4
"""Two logits that lie closer than the contract's 1e-4 are a tie: which one is larger depends on
the processor."""


class Greedy(list[int]):
    """The twin's greedy ids. They equal an answer's ids as the contract says (docs/serving.md):
    id for id up to the first tie of the best logits. There each of the tied ids is right, and
    what follows another one is not compared."""

    def __init__(self, ids: list[int], ties: dict[int, set[int]]) -> None:
        super().__init__(ids)
        self.ties = ties

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list):
            return NotImplemented
        for i, (expected, token) in enumerate(zip(self, other, strict=False)):
            if token != expected:
                return token in self.ties.get(i, ())
        return len(self) == len(other)

    def __ne__(self, other: object) -> bool:  # list has its own
        return not self == other

    __hash__ = None

    def start(self, count: int) -> "Greedy":
        """The first `count` ids."""
        return Greedy(self[:count], self.ties)


def naive_greedy(
    model: nn.Module, prompt: list[int], max_tokens: int, eos: int | None = EOS
) -> Greedy:
    """The twin: mlx-lm's model with mlx-lm's cache, alone, argmax, stopping after EOS."""
    cache = make_prompt_cache(model)
    inputs, tokens, ties = mx.array(prompt)[None], [], {}
    while len(tokens) < max_tokens:
        logits = model(inputs, cache=cache)[0, -1]
        best = mx.argmax(logits)
        close = logits >= logits[best] - TIE
        token, count = mx.stack([best, close.sum()]).tolist()
        if count > 1:
            ties[len(tokens)] = {i for i, tied in enumerate(close.tolist()) if tied}
        tokens.append(token)
        if token == eos:
            break
        inputs = mx.array([[token]])
    return Greedy(tokens, ties)


def full_logits(model: nn.Module, tokens: list[int]) -> mx.array:
    """[T, V] float32 of one forward over the whole sequence, no cache."""
    return model(mx.array(tokens)[None])[0].astype(mx.float32)
