"""`mlx_parallm_doctor --contracts`: the promises of docs/design.md, tried on this device with this model and dtype.

`run` tries one contract after the other, each a function of the `Subject` that returns its `Finding`s, and prints a
block of Markdown to paste into an issue.

float32 is held to the bounds of the tests. In half precision an answer may turn another way where two tokens are as
good as tied, so there it is the log-probabilities up to that token that must agree, to the rounding of logits.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mlx_parallm.config.load import Config
from mlx_parallm.errors import ParallmError
from mlx_parallm.rl_training.plan.preflight import Lengths, ModelShape, predict_memory
from mlx_parallm.rl_training.step.algorithms import make_algorithm
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.tools.contract_subject import NEW_TOKENS, POLICY, PROMPT_TOKENS, PROMPTS, Load, Subject, subject_of
from mlx_parallm.tools.doctor import facts
from mlx_parallm.types import Completion, Request, Rollout, RolloutGroup
from mlx_parallm.weights import PublishReport

TEMPERATURE = 0.8
MIN_SEQUENCES, ALONE_S = 4, 8.0  # fewer sequences where asking for them one by one would take longer than this
DISTINCT = 20  # tokens that a comparison must have seen to say something
PUBLISHES, MIN_PUBLISHES, PUBLISH_S = 200, 20, 15.0  # fewer where they would take longer
STREAMS, PAUSE_S = 8, 0.02
HELD_MS, WHOLE_MS = 2.0, 5.0  # p99
BANDWIDTH_SHARE = 0.5  # of the bound, by one sequence
LARGE_STEP_S = 5e-3  # below, a decode step is mostly launching: its rate says nothing about memory
SHARED = 0.5  # of the tokens come before the first that half precision turns another way
MEMORY_SHARE, MEMORY_BYTES = 0.15, 50e6  # above the prediction


@dataclass(frozen=True)
class Rounding:
    """Bounds on |difference| of log-probabilities: of one token and on average; `exact`: tokens must be the same."""

    largest: float
    mean: float
    exact: bool = False


# Half precision: eight units in the last place of a logit between 16 and 32, one on average (docs/off_policy.md).
ROUNDING = {
    mx.float32: Rounding(1e-4, 5e-5, exact=True),
    mx.float16: Rounding(2**-3, 2**-6),
    mx.bfloat16: Rounding(1.0, 0.125),
}


@dataclass(frozen=True)
class Finding:
    """One line of the block. `passed`: None = measured, but not judged."""

    contract: str
    passed: bool | None
    measured: str
    bound: str


def run(config: Config) -> int:
    """Prints the block. Returns 0 when every contract that is judged holds, else 1. Raises ModelError, ConfigError."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    findings: list[Finding] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"loading {config.model.base_path}", total=len(CONTRACTS) + 1)
        with subject_of(config) as subject:
            about = _about(subject)
            for name, contract in CONTRACTS.items():
                progress.update(task, advance=1, description=name)
                findings += tried(name, contract, subject)
    sys.stdout.write(block(about, findings))
    return 1 if any(finding.passed is False for finding in findings) else 0


def block(about: Sequence[str], findings: Sequence[Finding]) -> str:
    """The Markdown to paste."""
    words = {True: "passed", False: "**FAILED**", None: "not judged"}
    rows = [f"| {f.contract} | {words[f.passed]} | {f.measured} | {f.bound} |" for f in findings]
    head = ["| contract | | measured | bound |", "|---|---|---|---|"]
    return "\n".join(["### mlx_parallm contracts", "", *(f"* {line}" for line in about), "", *head, *rows]) + "\n"


def tried(name: str, contract: Callable[[Subject], list[Finding]], subject: Subject) -> list[Finding]:
    """MLX says by RuntimeError what a device cannot do; the other contracts are worth trying all the same."""
    try:
        return contract(subject)
    except (ParallmError, RuntimeError, ValueError) as error:
        return [Finding(name, False, _one_cell(str(error)), "no error")]


# ---------------------------------------------------------------------- the contracts


def bandwidth(subject: Subject) -> list[Finding]:
    """Decoding one sequence reads every weight once a token, so memory bandwidth bounds its rate."""
    subject.decode_rate(1, 4)  # compiles kernels
    subject.rate, eight = subject.decode_rate(1, 32), subject.decode_rate(8, 32)
    bound = subject.bandwidth / subject.weight_bytes
    measured = f"{subject.rate:.1f} tok/s = {subject.rate / bound:.2f} of the bound; 8 sequences {eight:.1f} tok/s"
    said = f"{bound:.1f} tok/s ({subject.weight_bytes / 1e6:.0f} MB a token at {subject.bandwidth / 1e9:.1f} GB/s)"
    if 1 / bound < LARGE_STEP_S:
        return [Finding("tokens/s, one sequence", None, measured, f"{said}: weights too small to judge")]
    return [Finding("tokens/s, one sequence", subject.rate >= BANDWIDTH_SHARE * bound, measured, f"≥ half of {said}")]


def batched_is_alone(subject: Subject) -> list[Finding]:
    """The same requests one by one and all together: the same tokens, with the same log-probabilities."""
    findings = []
    for name, temperature in (("greedy", 0.0), ("seeded", TEMPERATURE)):
        requests = subject.requests(name, _affordable(subject), temperature=temperature)
        alone = [subject.generate([replace(r, request_id=f"{r.request_id}-alone")])[0] for r in requests]
        finding = compare(alone, subject.generate(requests), ROUNDING[subject.dtype])
        findings.append(replace(finding, contract=f"batched = alone, {name}"))
    return findings


def compare(alone: Sequence[Completion], batched: Sequence[Completion], bound: Rounding) -> Finding:
    """Tokens up to the first that differs, and the log-probabilities before it."""
    equal = shared = total = 0
    largest = 0.0
    for one, other in zip(alone, batched, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        equal += one.token_ids == other.token_ids
        shared, total = shared + same, total + len(one.token_ids)
        differences = np.subtract(one.logprobs[:same], other.logprobs[:same])
        largest = max(largest, float(np.abs(differences).max(initial=0.0)))
    distinct = len({token for completion in alone for token in completion.token_ids})
    measured = (
        f"{equal} of {len(alone)} sequences identical, {shared} of {total} tokens before a difference;"
        f" log-probabilities differ by {largest:.1e}; {distinct} distinct tokens"
    )
    tokens_agree = equal == len(alone) if bound.exact else shared >= SHARED * total
    passed = None if distinct < DISTINCT else tokens_agree and largest <= bound.largest
    tokens = "all identical" if bound.exact else "half of the tokens before a difference"
    return Finding("batched = alone", passed, measured, f"{tokens}; ≤ {bound.largest:g}")


def publish_under_load(subject: Subject) -> list[Finding]:
    """New adapter arrays while sequences stream, as after a training step."""
    if subject.policy is None:
        return [_served_only("publish under load", subject)]
    reports: list[PublishReport] = []
    layers = subject.policy.adapter()
    with Load(subject, STREAMS) as load:
        until = time.monotonic() + PUBLISH_S
        while len(reports) < PUBLISHES and (len(reports) < MIN_PUBLISHES or time.monotonic() < until):
            layers = {path: replace(pair, b=pair.b + 1e-6, gain=None) for path, pair in layers.items()}
            mx.eval([pair.b for pair in layers.values()])
            reports.append(subject.weights.publish_adapter(layers))
            time.sleep(PAUSE_S)
    subject.weights.publish_adapter(subject.policy.adapter())
    held, whole = (_p99([getattr(report, name) for report in reports]) for name in ("lock_held_ms", "total_ms"))
    served = not load.failed and load.answered > 0 and len(load.versions) > 1
    counts = f"{load.answered} answered, {load.failed} failed, {len(load.versions)} versions seen"
    times = f"{len(reports)} publishes, {STREAMS} sequences streaming"
    return [
        Finding("publish: lock held, p99", held <= HELD_MS, f"{held:.3f} ms", f"≤ {HELD_MS:g} ms"),
        Finding("publish: whole, p99", whole <= WHOLE_MS, f"{whole:.3f} ms; {times}", f"≤ {WHOLE_MS:g} ms"),
        Finding("publish: requests", served, counts, "0 failed, > 1 version"),
    ]


def engine_is_trainer(subject: Subject) -> list[Finding]:
    """One training step on what the engine has just sampled under the adapter: |trainer - engine|, token by token."""
    name = "engine = trainer log-probabilities"
    if subject.policy is None:
        return [_served_only(name, subject)]
    count = _affordable(subject)
    rollouts = sampled(subject, count)
    sequences = tuple(TrainSequence(rollout, (1.0,) * len(rollout.tokens), True) for rollout in rollouts)
    training = subject.config.rl_training.model_copy(update={"batch_size": count, "update_epochs": 1})
    trainer = Trainer(subject.policy, training, make_algorithm(training))
    group = RolloutGroup("contracts", "contracts", rollouts)
    metrics = trainer.train_step(TrainBatch(1, (group,), sequences, BatchStatistics())).metrics
    largest, mean = metrics["logprob_diff_max"], metrics["logprob_diff_mean"]
    if largest is None or mean is None:
        return [Finding(name, False, "the training step was skipped: loss or gradient not finite", "finite")]
    bound = ROUNDING[subject.dtype]
    measured = f"max {largest:.1e}, mean {mean:.1e}; {metrics['tokens']:.0f} tokens of {count} sequences, with adapter"
    passed = largest <= bound.largest and mean <= bound.mean
    return [Finding(name, passed, measured, f"max ≤ {bound.largest:g}, mean ≤ {bound.mean:g}")]


def sampled(subject: Subject, count: int) -> tuple[Rollout, ...]:
    """What the engine samples under the adapter, with its log-probabilities."""
    requests = [replace(r, adapter=POLICY) for r in subject.requests("train", count, temperature=TEMPERATURE)]
    return tuple(map(_rollout, requests, subject.generate(requests)))


def memory(subject: Subject) -> list[Finding]:
    """The peak of all of the above against what `rl_training.preflight` says for it before anything is loaded.

    One-sided: here serving and training take turns, while the prediction is for both at once.
    """
    if subject.policy is None:
        return [_served_only("memory against preflight", subject)]
    rows = max(_affordable(subject), STREAMS)
    training = subject.config.rl_training
    atropos = training.atropos.model_copy(update={"rollout_batch_size": rows})
    training = training.model_copy(update={"batch_size": rows, "atropos": atropos})
    config = subject.config.model_copy(update={"rl_training": training})
    shape = ModelShape.of(subject.loaded.config, config)
    predicted = predict_memory(config, shape, Lengths(PROMPT_TOKENS, NEW_TOKENS)).of_mlx
    peak = mx.get_peak_memory()
    measured = f"peak {peak / 1e9:.2f} GB, {subject.loaded_bytes / 1e9:.2f} of it after loading"
    passed = peak <= (1 + MEMORY_SHARE) * predicted + MEMORY_BYTES
    return [Finding("memory against preflight", passed, measured, f"≤ {predicted / 1e9:.2f} GB + {MEMORY_SHARE:.0%}")]


CONTRACTS: dict[str, Callable[[Subject], list[Finding]]] = {
    "tokens/s against memory bandwidth": bandwidth,
    "batched = alone": batched_is_alone,
    "publish under load": publish_under_load,
    "engine = trainer": engine_is_trainer,
    "memory": memory,
}


def _served_only(contract: str, subject: Subject) -> Finding:
    return Finding(contract, None, f"not tried: {_one_cell(subject.untrainable)}", "a model that can be trained")


def _one_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]


def _affordable(subject: Subject) -> int:
    """Sequences that can be asked for one by one in the time."""
    return int(min(PROMPTS, max(MIN_SEQUENCES, ALONE_S * subject.rate / NEW_TOKENS)))


def _rollout(request: Request, completion: Completion) -> Rollout:
    given, sampled = len(request.prompt_token_ids), len(completion.token_ids)
    return Rollout(
        tokens=request.prompt_token_ids + completion.token_ids,
        mask=(0,) * given + (1,) * sampled,
        logprobs=(0.0,) * given + completion.logprobs,
        policy_versions=(0,) * given + completion.policy_versions,
        temperature=TEMPERATURE,
        scores={"reward": 1.0},
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def _about(subject: Subject) -> list[str]:
    quantized = "quantised, " if "quantization" in subject.loaded.config else ""
    dtype = str(subject.dtype).removeprefix("mlx.core.")
    name, kind = subject.config.model.base_path, subject.loaded.config.get("model_type")
    return [*facts(), f"{name} ({kind}), {quantized}{dtype}, {subject.model_bytes / 1e9:.3f} GB of weights"]
