"""`mlx_parallm doctor --contracts`: the promises of docs/design.md, tried on this device with this
model and dtype.

`run` tries one contract after the other, each a function of the `Subject` (base, a random adapter
and a running engine, built as a daemon does) that returns its `ContractResult`s, and prints a block
of Markdown to paste into an issue.

First come MLX's own operations (probes.py). float32 is held to the bounds of the tests, and means
whole float32: `doctor` sets MLX_ENABLE_TF32=0 for the contracts unless it is set. In half precision an answer may turn another way where
two tokens are as good as tied, so there it is the log-probabilities up to that token that must
agree, to the rounding of logits.
"""

import asyncio
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mlx_parallm.cli import probes
from mlx_parallm.cli.doctor_report import facts
from mlx_parallm.config.distillation import DistillationSettings
from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.errors import ConfigError, ModelError, ParallmError
from mlx_parallm.models.adapters.linear import SVDLinear
from mlx_parallm.models.experts.targets import number_of_experts
from mlx_parallm.models.loading import LoadedModel, check_model
from mlx_parallm.models.lora import trainer_lora_layers
from mlx_parallm.models.support import layer_without_gradient
from mlx_parallm.rl_training.factory import build_policy
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.plan.preflight import PlannedRun, room_for_evaluations
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.hardware import empty_buffer_cache, float32_is_tf32
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.system.terminal import Console
from mlx_parallm.types import Completion, Request, Rollout, RolloutGroup, SamplingParams
from mlx_parallm.weights import PublishReport, SharedWeights

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
    `weight_bytes`: bytes that a decode step of one sequence reads. `dtype`: of most weights, packed
    ones aside.
    `bandwidth`: of this machine's memory, bytes a second. `rate`: tokens a second of one sequence;
    0 = not measured.
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
        completions = [
            output.completions[0] for output in asyncio.run(self.client.generate_many(requests))
        ]
        if errors := [completion.error for completion in completions if completion.error]:
            raise ModelError(errors[0])
        return completions

    def decode_rate(self, rows: int, tokens: int) -> float:
        """Tokens a second of `rows` greedy sequences with short prompts, after their first
        token."""

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
    """Load and start; no HTTP. Raises ModelError: it cannot be served; ConfigError."""
    lora = config.rl_training.lora
    if not lora.enabled:
        raise ConfigError(
            "the contracts are tried with an adapter: rl_training.lora.enabled = false leaves none"
        )
    check_model(config.model, train=False, quantize=lora.quantize_base)
    config = config.model_copy(update={"server": config.server.model_copy(update={"port": 0})})
    bandwidth = memory_bandwidth()
    empty_buffer_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    serving = Serving(config)
    try:
        loaded = serving.load(quantize=lora.quantize_base)
        loaded_bytes = mx.get_active_memory() - before
        floats = [
            a
            for _, a in tree_flatten(loaded.model.parameters())
            if mx.issubdtype(a.dtype, mx.floating)
        ]
        weight_bytes = bytes_a_token(loaded)
        training = config.rl_training
        policy, untrainable = _trainable(
            lambda: build_policy(loaded, training, make_algorithm(training))
        )
        weights = SharedWeights(loaded.model, policy=POLICY, keep_versions=1)
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


def _trainable(make_policy: Callable[[], TrainedPolicy]) -> tuple[TrainedPolicy | None, str]:
    """Return a policy with a random adapter; or None, and why this model cannot be trained here."""
    try:
        policy = make_policy()
    except ParallmError as error:
        return None, str(error)
    if reason := layer_without_gradient(policy.model):
        return None, reason
    for layer in trainer_lora_layers(policy.model).values():  # B = 0 changes nothing: too easy
        layer.lora_b = mx.random.normal(layer.lora_b.shape) * ADAPTER_SIZE
        if isinstance(layer, SVDLinear):
            layer.lora_e = mx.ones(layer.lora_e.shape)
    mx.eval(policy.slots.read())
    return policy, ""


class Load:
    """`rows` sequences in flight under the adapter, each followed by the next; counts what
    becomes of them."""

    def __init__(self, subject: Subject, rows: int) -> None:
        self._client, self._prompts, self._rows = subject.client, subject.prompts, rows
        self._stopping, self._running = threading.Event(), threading.Event()
        self._loop = LoopThread("load")
        self.answered = self.failed = 0
        self.versions: set[int] = set()

    def __enter__(self) -> "Load":
        """Return when tokens come, or when it has failed."""
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
    """Bytes a second that a matrix-vector product reads: `size` bytes of float32, the best of
    ten."""
    matrix, vector = mx.random.normal((size // 4 // 4096, 4096)), mx.random.normal((4096, 1))
    mx.eval(matrix, vector)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        mx.eval(matrix @ vector)
        seconds.append(time.perf_counter() - started)
    return matrix.nbytes / min(seconds)


def bytes_a_token(loaded: LoadedModel) -> int:
    """Weights that a decode step of one sequence reads: no table of embeddings, only the chosen
    experts."""
    sizes = {path: array.nbytes for path, array in tree_flatten(loaded.model.parameters())}
    text = loaded.config.get("text_config", loaded.config)
    experts = number_of_experts(text)
    chosen = text.get("num_experts_per_tok", experts) / experts if experts else 1.0
    # a tied table is read whole, as the head
    untied = any("lm_head" in path.split(".") for path in sizes)
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


# ---------------------------------------------------------------------- results

TEMPERATURE = 0.8
# fewer sequences where asking for them one by one would take longer than this
MIN_SEQUENCES, ALONE_S = 4, 8.0
DISTINCT = 20  # fewest distinct tokens for a comparison to count
PUBLISHES, MIN_PUBLISHES, PUBLISH_S = 200, 20, 15.0  # fewer if they would take longer
STREAMS, PAUSE_S = 8, 0.02
HELD_MS, WHOLE_MS = 2.0, 5.0  # p99
BANDWIDTH_SHARE = 0.5  # least share of the bound, with one sequence
LARGE_STEP_S = 5e-3  # below, a decode step is mostly launching: its rate says nothing about memory
SHARED = 0.5  # share of tokens before half precision diverges
MEMORY_SHARE, MEMORY_BYTES = 0.15, 50e6  # above the prediction


@dataclass(frozen=True)
class RoundingTrial:
    """Bounds on |difference| of log-probabilities: of one token and on average; `exact`: tokens
    must be the same."""

    largest: float
    mean: float
    exact: bool = False


# Half precision: eight units in the last place of a logit between 16 and 32, one on average
# (docs/algorithms.md#before-a-step-learns).
ROUNDING = {
    mx.float32: RoundingTrial(1e-4, 5e-5, exact=True),
    mx.float16: RoundingTrial(2**-3, 2**-6),
    mx.bfloat16: RoundingTrial(1.0, 0.125),
}


def rounding(dtype: mx.Dtype) -> RoundingTrial:
    """Return the bounds of a model of this type on the default device."""
    tf32 = dtype == mx.float32 and float32_is_tf32()  # the user wants it: `doctor` switches it off
    return ROUNDING[mx.float16 if tf32 else dtype]


@dataclass(frozen=True)
class ContractResult:
    """One line of the block. `passed`: None = measured, but not judged."""

    contract: str
    passed: bool | None
    measured: str
    bound: str


def run(config: Config) -> int:
    """Print the block. Returns 0 when every contract that is judged holds, else 1. Raises
    ModelError, ConfigError."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    results: list[ContractResult] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("MLX's operations", total=len(CONTRACTS) + 2)
        results += operations()
        progress.update(task, advance=1, description=f"loading {config.model.base_path}")
        with subject_of(config) as subject:
            about = _about(subject)
            for name, contract in CONTRACTS.items():
                progress.update(task, advance=1, description=name)
                results += tried(name, contract, subject)
    sys.stdout.write(block(about, results))
    return 1 if any(result.passed is False for result in results) else 0


def block(about: Sequence[str], results: Sequence[ContractResult]) -> str:
    """The Markdown to paste."""
    words = {True: "passed", False: "**FAILED**", None: "not judged"}
    rows = [f"| {f.contract} | {words[f.passed]} | {f.measured} | {f.bound} |" for f in results]
    head = ["| contract | | measured | bound |", "|---|---|---|---|"]
    return (
        "\n".join(
            ["### mlx_parallm contracts", "", *(f"* {line}" for line in about), "", *head, *rows]
        )
        + "\n"
    )


def tried(
    name: str, contract: Callable[[Subject], list[ContractResult]], subject: Subject
) -> list[ContractResult]:
    """MLX says by RuntimeError what a device cannot do; the other contracts are worth trying all
    the same."""
    try:
        return contract(subject)
    except (ParallmError, RuntimeError, ValueError) as error:
        return [ContractResult(name, False, _one_cell(str(error)), "no error")]


# ---------------------------------------------------------------------- the contracts


def operations() -> list[ContractResult]:
    """MLX's own operations on this device (probes.py): one line, or one for each that is wrong."""
    tried = list(probes.results())
    bound = f"≤ {probes.BOUNDS[mx.float32]:g} in float32, more in half precision"
    wrong = [
        ContractResult(
            f"MLX's {result.name}",
            False,
            _one_cell("; ".join(result.failures[:6]))
            + (f" … {len(result.failures)} in all" if len(result.failures) > 6 else ""),
            bound,
        )
        for result in tried
        if result.failures
    ]
    largest = max(result.error for result in tried)
    rows = ", ".join(map(str, probes.ROWS))
    measured = f"{len(tried)} operations at {rows} rows: off by {largest:.1e} at most in float32"
    return wrong or [ContractResult("MLX's operations", True, measured, bound)]


def bandwidth(subject: Subject) -> list[ContractResult]:
    """Decoding one sequence reads every weight once a token, so memory bandwidth bounds its
    rate."""
    subject.decode_rate(1, 4)  # compiles kernels
    subject.rate, eight = subject.decode_rate(1, 32), subject.decode_rate(8, 32)
    bound = subject.bandwidth / subject.weight_bytes
    measured = (
        f"{subject.rate:.1f} tok/s = {subject.rate / bound:.2f} of the bound; 8 sequences"
        f" {eight:.1f} tok/s"
    )
    expected = (
        f"{bound:.1f} tok/s ({subject.weight_bytes / 1e6:.0f} MB a token at"
        f" {subject.bandwidth / 1e9:.1f} GB/s)"
    )
    if 1 / bound < LARGE_STEP_S:
        return [
            ContractResult(
                "tokens/s, one sequence",
                None,
                measured,
                f"{expected}: weights too small to judge",
            )
        ]
    return [
        ContractResult(
            "tokens/s, one sequence",
            subject.rate >= BANDWIDTH_SHARE * bound,
            measured,
            f"≥ half of {expected}",
        )
    ]


def batched_is_alone(subject: Subject) -> list[ContractResult]:
    """The same requests one by one and all together: the same tokens, with the same
    log-probabilities."""
    results = []
    for name, temperature in (("greedy", 0.0), ("seeded", TEMPERATURE)):
        requests = subject.requests(name, _affordable(subject), temperature=temperature)
        alone = [
            subject.generate([replace(r, request_id=f"{r.request_id}-alone")])[0] for r in requests
        ]
        result = compare(alone, subject.generate(requests), rounding(subject.dtype))
        results.append(replace(result, contract=f"batched = alone, {name}"))
    return results


def compare(
    alone: Sequence[Completion], batched: Sequence[Completion], bound: RoundingTrial
) -> ContractResult:
    """Tokens up to the first that differs, and the log-probabilities before it.

    In full precision another token may come at a tie only (docs/serving.md#equal-answers): both
    were the likeliest, so they have the same log-probability.
    """
    equal = tied = shared = total = 0
    largest = 0.0
    for one, other in zip(alone, batched, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        equal += one.token_ids == other.token_ids
        tied += (
            same < len(pairs) and abs(one.logprobs[same] - other.logprobs[same]) <= bound.largest
        )
        shared, total = shared + same, total + len(one.token_ids)
        differences = np.subtract(one.logprobs[:same], other.logprobs[:same])
        largest = max(largest, float(np.abs(differences).max(initial=0.0)))
    distinct = len({token for completion in alone for token in completion.token_ids})
    up_to_a_tie = f" {tied} up to a tie," if tied else ""
    measured = (
        f"{equal} of {len(alone)} sequences identical,{up_to_a_tie} {shared} of {total} tokens"
        " before a difference;"
        f" log-probabilities differ by {largest:.1e}; {distinct} distinct tokens"
    )
    tokens_agree = equal + tied == len(alone) if bound.exact else shared >= SHARED * total
    passed = None if distinct < DISTINCT else tokens_agree and largest <= bound.largest
    tokens = "all identical up to ties" if bound.exact else "half of the tokens before a difference"
    return ContractResult("batched = alone", passed, measured, f"{tokens}; ≤ {bound.largest:g}")


def publish_under_load(subject: Subject) -> list[ContractResult]:
    """New adapter arrays while sequences stream, as after a training step."""
    if subject.policy is None:
        return [_served_only("publish under load", subject)]
    reports: list[PublishReport] = []
    layers = subject.policy.adapter()
    with Load(subject, STREAMS) as load:
        until = time.monotonic() + PUBLISH_S
        while len(reports) < PUBLISHES and (
            len(reports) < MIN_PUBLISHES or time.monotonic() < until
        ):
            layers = {
                path: replace(pair, b=pair.b + 1e-6, gain=None) for path, pair in layers.items()
            }
            mx.eval([pair.b for pair in layers.values()])
            reports.append(subject.weights.publish_adapter(layers))
            time.sleep(PAUSE_S)
    subject.weights.publish_adapter(subject.policy.adapter())
    held, whole = (
        _p99([report.lock_held_ms for report in reports]),
        _p99([report.total_ms for report in reports]),
    )
    served = not load.failed and load.answered > 0 and len(load.versions) > 1
    counts = f"{load.answered} answered, {load.failed} failed, {len(load.versions)} versions seen"
    times = f"{len(reports)} publishes, {STREAMS} sequences streaming"
    return [
        ContractResult(
            "publish: lock held, p99", held <= HELD_MS, f"{held:.3f} ms", f"≤ {HELD_MS:g} ms"
        ),
        ContractResult(
            "publish: whole, p99",
            whole <= WHOLE_MS,
            f"{whole:.3f} ms; {times}",
            f"≤ {WHOLE_MS:g} ms",
        ),
        ContractResult("publish: requests", served, counts, "0 failed, > 1 version"),
    ]


def engine_is_trainer(subject: Subject) -> list[ContractResult]:
    """One training step on fresh samples of the adapter: |trainer -
    engine|, token by token."""
    name = "engine = trainer log-probabilities"
    if subject.policy is None:
        return [_served_only(name, subject)]
    count = _affordable(subject)
    rollouts = sampled(subject, count)
    sequences = tuple(
        TrainSequence(rollout, (1.0,) * len(rollout.tokens), True) for rollout in rollouts
    )
    training = subject.config.rl_training.model_copy(
        update={"batch_size": count, "update_epochs": 1, "distillation": DistillationSettings()}
    )
    trainer = Trainer(subject.policy, training, make_algorithm(training))
    group = RolloutGroup("contracts", "contracts", rollouts)
    metrics = trainer.train_step(TrainBatch(1, (group,), sequences, BatchStatistics())).metrics
    largest, mean = metrics["logprob_diff_max"], metrics["logprob_diff_mean"]
    if largest is None or mean is None:
        return [
            ContractResult(
                name,
                False,
                "the training step was skipped: loss or gradient not finite",
                "finite",
            )
        ]
    bound = rounding(subject.dtype)
    measured = (
        f"max {largest:.1e}, mean {mean:.1e}; {metrics['tokens']:.0f} tokens of"
        f" {count} sequences, with adapter"
    )
    passed = largest <= bound.largest and mean <= bound.mean
    return [
        ContractResult(name, passed, measured, f"max ≤ {bound.largest:g}, mean ≤ {bound.mean:g}")
    ]


def sampled(subject: Subject, count: int) -> tuple[Rollout, ...]:
    """Return what the engine samples under the adapter, with its log-probabilities."""
    requests = [
        replace(r, adapter=POLICY)
        for r in subject.requests("train", count, temperature=TEMPERATURE)
    ]
    return tuple(map(_rollout, requests, subject.generate(requests)))


def memory(subject: Subject) -> list[ContractResult]:
    """The peak of all of the above against what `rl_training.preflight` says for it before anything
    is loaded.

    One-sided: here serving and training take turns, while the prediction is for both at once.
    """
    if subject.policy is None:
        return [_served_only("memory against preflight", subject)]
    rows = max(_affordable(subject), STREAMS)
    training = subject.config.rl_training
    atropos = training.atropos.model_copy(update={"rollout_batch_size": rows})
    training = training.model_copy(update={"batch_size": rows, "atropos": atropos})
    config = subject.config.model_copy(update={"rl_training": training})
    shape = PlannedRun.of(config, subject.loaded.config).shape
    lengths = Lengths(PROMPT_TOKENS, NEW_TOKENS)
    room = room_for_evaluations(deterministic=training.deterministic)
    predicted = PlannedRun(config, shape, lengths, room=room).memory.of_mlx
    peak = mx.get_peak_memory()
    measured = f"peak {peak / 1e9:.2f} GB, {subject.loaded_bytes / 1e9:.2f} of it after loading"
    passed = peak <= (1 + MEMORY_SHARE) * predicted + MEMORY_BYTES
    return [
        ContractResult(
            "memory against preflight",
            passed,
            measured,
            f"≤ {predicted / 1e9:.2f} GB + {MEMORY_SHARE:.0%}",
        )
    ]


CONTRACTS: dict[str, Callable[[Subject], list[ContractResult]]] = {
    "tokens/s against memory bandwidth": bandwidth,
    "batched = alone": batched_is_alone,
    "publish under load": publish_under_load,
    "engine = trainer": engine_is_trainer,
    "memory": memory,
}


def _served_only(contract: str, subject: Subject) -> ContractResult:
    return ContractResult(
        contract,
        None,
        f"not tried: {_one_cell(subject.untrainable)}",
        "a model that can be trained",
    )


def _one_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]


def _affordable(subject: Subject) -> int:
    """Sequences that can be asked for one by one in the time."""
    return int(min(PROMPTS, max(MIN_SEQUENCES, ALONE_S * subject.rate / NEW_TOKENS)))


def _rollout(request: Request, completion: Completion) -> Rollout:
    prompt, sampled = len(request.prompt_token_ids), len(completion.token_ids)
    return Rollout(
        tokens=request.prompt_token_ids + completion.token_ids,
        mask=(0,) * prompt + (1,) * sampled,
        logprobs=(0.0,) * prompt + completion.logprobs,
        policy_versions=(0,) * prompt + completion.policy_versions,
        temperature=TEMPERATURE,
        scores={"reward": 1.0},
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def _about(subject: Subject) -> list[str]:
    quantized = "quantised, " if "quantization" in subject.loaded.config else ""
    dtype = str(subject.dtype).removeprefix("mlx.core.")
    name, kind = subject.config.model.base_path, subject.loaded.config.get("model_type")
    return [
        *facts(),
        f"{name} ({kind}), {quantized}{dtype}, {subject.model_bytes / 1e9:.3f} GB of weights",
    ]
