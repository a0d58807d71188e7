"""What `tools.contracts` tries its contracts on: base, a random adapter and a running engine, built as a daemon does.

subject_of(config) → Subject, whose `requests` are pieces of a text and whose `generate` asks the engine
Load               sequences that stream in a thread of their own while the caller publishes
"""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_parallm.config.load import Config
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.errors import ConfigError, ModelError, ParallmError
from mlx_parallm.models.loading import LoadedModel, check_model
from mlx_parallm.models.lora import trainer_lora_layers
from mlx_parallm.models.support import layer_without_gradient
from mlx_parallm.rl_training.factory import build_policy
from mlx_parallm.rl_training.step.algorithms import make_algorithm
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.serving import Serving
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import Completion, Request, SamplingParams
from mlx_parallm.weights import SharedWeights

POLICY = "policy"
ADAPTER_SIZE = 0.2  # standard deviation of the random B
PROMPTS = 32
PROMPT_TOKENS, NEW_TOKENS = 64, 24  # at most
TEXT = """A harbour town wakes before its boats do. At 5:40 the baker counts 36 loaves, sets 12 aside for the school and
asks who will carry the rest. "Not me," says the apprentice, who has read that f(x) = 3x + 7 grows without end and would
rather find out why. Rain comes from the west; 1,024 drops a second fall on the tin roof, or so he reckons. By noon the
market sells apples, nails, second-hand novels in four languages, and one brass compass that points a little wrong."""


@dataclass
class Subject:
    """
    `weight_bytes`: what one decode step of one sequence reads. `dtype`: of most weights, packed ones aside.
    `bandwidth`: of this machine's memory, bytes a second. `rate`: tokens a second of one sequence; 0 = not measured.
    `policy`: None = this model is served only, `untrainable` says why.
    """

    config: Config
    loaded: LoadedModel
    policy: TrainedPolicy | None
    weights: SharedWeights
    client: EngineClient
    prompts: list[tuple[int, ...]]
    weight_bytes: int
    loaded_bytes: int
    dtype: mx.Dtype
    bandwidth: float
    rate: float = 0.0
    untrainable: str = ""

    @property
    def model_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.loaded.model.parameters()))

    def requests(self, name: str, count: int, **params: Any) -> list[Request]:
        """Ragged ones, each with a seed; every other one under the adapter, where there is one."""
        rng = random.Random(count)
        lengths = [rng.randrange(NEW_TOKENS // 2, NEW_TOKENS + 1) for _ in range(count)]
        return [
            Request(
                f"{name}-{number}",
                self.prompts[number % len(self.prompts)],
                SamplingParams(seed=number, max_tokens=length, **params),
                adapter=POLICY if number % 2 and self.policy else None,
            )
            for number, length in enumerate(lengths)
        ]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All together. Raises ModelError when one fails."""
        completions = [output.completions[0] for output in asyncio.run(self.client.generate_many(requests))]
        if errors := [completion.error for completion in completions if completion.error]:
            raise ModelError(errors[0])
        return completions

    def decode_rate(self, rows: int, tokens: int) -> float:
        """Tokens a second of `rows` greedy sequences with short prompts, after their first token."""

        async def times(number: int) -> list[float]:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            request = Request(f"rate-{rows}-{tokens}-{number}", self.prompts[number][:8], params)
            return [time.perf_counter() async for _ in self.client.stream(request)]

        async def all_times() -> list[list[float]]:
            return await asyncio.gather(*(times(number) for number in range(rows)))

        moments = asyncio.run(all_times())
        return rows * (tokens - 1) / (max(m[-1] for m in moments) - max(m[0] for m in moments))


@contextmanager
def subject_of(config: Config) -> Iterator[Subject]:
    """Loads and starts; no HTTP. Raises ModelError: it cannot be served; ConfigError."""
    lora = config.rl_training.lora
    if not lora.enabled:
        raise ConfigError("the contracts are tried with an adapter: rl_training.lora.enabled = false leaves none")
    check_model(config.model, train=False, quantize=lora.quantize_base)
    config = config.model_copy(update={"server": config.server.model_copy(update={"port": 0})})
    bandwidth = memory_bandwidth()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    serving = Serving(config)
    try:
        loaded = serving.load(quantize=lora.quantize_base)
        loaded_bytes = mx.get_active_memory() - before
        floats = [a for _, a in tree_flatten(loaded.model.parameters()) if mx.issubdtype(a.dtype, mx.floating)]
        weight_bytes = bytes_a_token(loaded)
        policy, untrainable = _policy(config, loaded)
        weights = SharedWeights(loaded.model, policy=POLICY)
        adapters = {POLICY: policy.adapter()} if policy else {}
        serving.open(loaded, weights, adapters=adapters, main_adapter=POLICY if policy else None)
        yield Subject(
            config,
            loaded,
            policy,
            weights,
            serving.client,
            prompts=_prompts(serving.tokenizer().encode(TEXT, add_special_tokens=False)),
            weight_bytes=weight_bytes,
            loaded_bytes=loaded_bytes,
            dtype=max(floats, key=lambda array: array.nbytes).dtype,
            bandwidth=bandwidth,
            untrainable=untrainable,
        )
    finally:
        serving.close()


def _policy(config: Config, loaded: LoadedModel) -> tuple[TrainedPolicy | None, str]:
    """With a random adapter; or None, and why this model cannot be trained here."""
    try:
        policy = build_policy(loaded, config.rl_training, make_algorithm(config.rl_training))
    except ParallmError as error:
        return None, str(error)
    if reason := layer_without_gradient(policy.model):
        return None, reason
    for layer in trainer_lora_layers(policy.model).values():  # B = 0 changes nothing: too easy
        layer.lora_b = mx.random.normal(layer.lora_b.shape) * ADAPTER_SIZE
    mx.eval(policy.slots.read())
    return policy, ""


class Load:
    """`rows` sequences in flight under the adapter, each followed by the next; counts what becomes of them."""

    def __init__(self, subject: Subject, rows: int) -> None:
        self._client, self._prompts, self._rows = subject.client, subject.prompts, rows
        self._stopping, self._running = threading.Event(), threading.Event()
        self._loop = LoopThread("load")
        self.answered = self.failed = 0
        self.versions: set[int] = set()

    def __enter__(self) -> "Load":
        """Returns when tokens come, or when it has failed."""
        self._ended = self._loop.submit(self._main())
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._ended.result()
        self._loop.stop()

    async def _main(self) -> None:
        try:
            await asyncio.gather(*(self._row(number) for number in range(self._rows)))
        finally:
            self._running.set()

    async def _row(self, number: int) -> None:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        for turn in itertools.count(number):
            if self._stopping.is_set():
                return
            prompt = self._prompts[turn % len(self._prompts)]
            request = Request(f"load-{number}-{turn}", prompt, params, adapter=POLICY, stream=True)
            reason = None
            try:
                async for delta in self._client.stream(request):
                    self._running.set()
                    self.versions.update(delta.policy_versions)
                    reason = delta.finish_reason or reason
            except ParallmError:
                self.failed += 1
                return
            self.failed += reason != "length"
            self.answered += reason == "length"


def memory_bandwidth(size: int = 1 << 28) -> float:
    """Bytes a second that a matrix-vector product reads: `size` bytes of float32, the best of ten."""
    matrix, vector = mx.random.normal((size // 4 // 4096, 4096)), mx.random.normal((4096, 1))
    mx.eval(matrix, vector)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        mx.eval(matrix @ vector)
        seconds.append(time.perf_counter() - started)
    return matrix.nbytes / min(seconds)


def bytes_a_token(loaded: LoadedModel) -> int:
    """Weights that a decode step of one sequence reads: no table of embeddings, only the chosen experts."""
    sizes = {path: array.nbytes for path, array in tree_flatten(loaded.model.parameters())}
    text = loaded.config.get("text_config", loaded.config)
    experts = next((text[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(key)), 0)
    chosen = text.get("num_experts_per_tok", experts) / experts if experts else 1.0
    untied = any("lm_head" in path.split(".") for path in sizes)  # a tied table is read whole, as the head
    return round(
        sum(
            size * (chosen if ".switch_mlp." in path else 1.0)
            for path, size in sizes.items()
            if not (untied and "embed_tokens" in path.split("."))
        )
    )


def _prompts(tokens: list[int]) -> list[tuple[int, ...]]:
    """Pieces of the text, of many lengths, no two with one beginning."""
    rng = random.Random(0)
    starts = [number * max(1, len(tokens) // (2 * PROMPTS)) for number in range(PROMPTS)]
    return [tuple(tokens[start : start + rng.randrange(8, PROMPT_TOKENS)]) for start in starts]
