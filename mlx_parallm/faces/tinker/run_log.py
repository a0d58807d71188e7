"""Measure a run beside its loss: how old its samples are, and how far sampler and learner differ.

The SDK says for each target which token of which sample it is (provenance spans). The samples are
remembered here with their log-probabilities and the step of the weights that drew them, so every
forward_backward can answer

    staleness:mean, :max       optimizer steps between the weights that sampled a token and those
                               that learn from it; not known of samples from before a checkpoint was
                               loaded
    sampler_gap:mean, :max     |learner - sampler| in nats over the tokens that the present weights
                               sampled at temperature 1: the same number computed twice
    ratio:mean, clip_fraction:mean, trained_tokens:sum, tokens:sum

and each optimizer step is a line of `metrics.jsonl` in the run's directory (recorder.py).
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_parallm.faces.tinker.data import TARGETS, DatumBatch
from mlx_parallm.faces.tinker.learner import Applied, Output
from mlx_parallm.faces.tinker.recorder import RecordedRun
from mlx_parallm.faces.tinker.wire import Datum, ForwardBackward

REMEMBERED_BYTES = 64 << 20  # limit on remembered samples
RECORD_BYTES = 400  # overhead of a sample, beside 4 bytes a token
LINE_KEYS = {  # an answer's metrics → their names in metrics.jsonl
    "trained_tokens:sum": "trained_tokens",
    "ratio:mean": "ratio_mean",
    "clip_fraction:mean": "clip_fraction",
    "entropy:mean": "entropy",
    "staleness:mean": "staleness",
    "staleness:max": "staleness_max",
    "sampler_gap:mean": "logprob_diff_mean",
    "sampler_gap:max": "logprob_diff_max",
}


def _mean(values: Sequence[tuple[float, float]]) -> float:
    """Return the mean weighted by the trained tokens of each request; the mean of the requests
    if none is trained."""
    tokens = math.fsum(weight for _, weight in values)
    if not tokens:
        return math.fsum(value for value, _ in values) / len(values)
    return math.fsum(value * weight for value, weight in values) / tokens


_REDUCED: dict[str, Callable[[Sequence[tuple[float, float]]], float]] = {
    "mean": _mean,
    "max": lambda values: max(value for value, _ in values),
    "sum": lambda values: math.fsum(value for value, _ in values),
}


@dataclass(frozen=True)
class SampleRecord:
    """A sample as it was drawn: by which weights, and its tokens' log-probabilities [T] float32."""

    run: str
    step: int
    temperature: float
    logprobs: np.ndarray
    stopped: bool = True
    generation: int = 0  # number of checkpoints loaded before


class SampleRecords:
    """The newest samples by sequence id. Written by the server's thread, read by the learner's."""

    def __init__(self, most_bytes: int = REMEMBERED_BYTES) -> None:
        self._records: OrderedDict[str, SampleRecord] = OrderedDict()
        self._most, self._bytes = most_bytes, 0

    def add(self, sequence_id: str, record: SampleRecord) -> None:
        self._records[sequence_id] = record
        self._bytes += RECORD_BYTES + record.logprobs.nbytes
        while self._bytes > self._most:
            _, oldest = self._records.popitem(last=False)
            self._bytes -= RECORD_BYTES + oldest.logprobs.nbytes

    def find(self, sequence_id: str) -> SampleRecord | None:
        return self._records.get(sequence_id)


@dataclass
class _Since:
    """Sums since the last optimizer step."""

    loss: float = 0.0
    datums: int = 0
    tokens: int = 0
    samples: dict[str, SampleRecord] = field(
        default_factory=dict
    )  # the samples that were trained on
    times: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each request
    # tokens of each request
    numbers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class TinkerRunLog:
    """The log of one run. It belongs to the learner's thread."""

    def __init__(self, recorded: RecordedRun, run: str, step: int) -> None:
        self.recorded, self._run = recorded, run
        self._since = _Since()
        self._step = step  # the last line's step
        self.generation = 0  # number of checkpoints loaded
        self._loaded = ""  # the checkpoint that the model went back to since then

    def note(
        self,
        request: ForwardBackward,
        batch: DatumBatch,
        output: Output,
        step: int,
        records: SampleRecords,
        began: float,
    ) -> dict[str, float]:
        """The metrics of a request's answer; every name ends with how chunks of a call are put
        together.

        `began`: when the learner began it, Unix time.
        """
        metrics = {"loss:sum": output.loss, "tokens:sum": float(batch.tokens)}
        metrics |= self._of_tokens(request, batch, output)
        metrics |= self._of_samples(batch, output, step, records)
        if not request.forward_only:
            since = self._since
            since.loss += output.loss
            since.datums, since.tokens = since.datums + len(batch.data), since.tokens + batch.tokens
            since.times.append((began, time.time()))
            for name, value in metrics.items():
                since.numbers.setdefault(name, []).append((value, metrics["trained_tokens:sum"]))
            since.samples |= self._known_samples(batch, records)
        return metrics

    def applied(self, applied: Applied, learning_rate: float, began: float) -> dict[str, float]:
        """The metrics of an optimizer step's answer; writes the step's line.

        Lines are numbered upwards, also if a client has gone back to an earlier checkpoint.
        """
        since, self._since = self._since, _Since()
        now = time.time()
        self._step = (
            applied.step if not self._loaded and applied.step > self._step else self._step + 1
        )
        values: dict[str, float | str | None] = {
            "policy_version": applied.step,
            "time": now,
            "loss": since.loss,
            "grad_norm": applied.grad_norm,
            "learning_rate": learning_rate,
            "sequences": since.datums,
            "groups": 0,
            "tokens": since.tokens,
            "requests": len(since.times),
            "mismatch_fresh": True,
            "time_train_s": math.fsum(end - begin for begin, end in [*since.times, (began, now)]),
        }
        if self._loaded:
            values["rolled_back_to"], self._loaded = self._loaded, ""
        for name, key in LINE_KEYS.items():
            if numbers := since.numbers.get(name):
                _, _, reduction = name.partition(":")  # how the chunks of a call are reduced
                values[key] = _REDUCED[reduction](numbers)
        values |= _lengths(list(since.samples.values()))
        self.recorded.stepped(self._step, values, (*since.times, (began, now)))
        return {"grad_norm:mean": applied.grad_norm, "step:max": float(applied.step)}

    def loaded(self, path: str) -> None:
        """The model has gone back, or forward, to a checkpoint; its gradients are dropped."""
        self._since, self._loaded = _Since(), path
        self.generation += 1

    def dropped(self) -> None:
        """The gradients were dropped: the next line is not about them."""
        self._since = _Since()

    def _of_tokens(
        self, request: ForwardBackward, batch: DatumBatch, output: Output
    ) -> dict[str, float]:
        columns = batch.loss.columns
        weight = columns["advantages"] if "advantages" in columns else columns["weights"]
        trained = weight != 0
        metrics = {"trained_tokens:sum": float(trained.sum())}
        if output.entropies and trained.any():
            entropies = np.concatenate([array.reshape(-1) for array in output.entropies])
            metrics["entropy:mean"] = float(entropies[trained].mean(dtype=np.float64))
        if "logprobs" in columns and trained.any():
            lp = np.concatenate([array.reshape(-1) for array in output.logprobs])
            ratio = np.exp(np.clip(lp[trained] - columns["logprobs"][trained], -80, 80))
            metrics["ratio:mean"] = float(ratio.mean(dtype=np.float64))
            low, high = (
                batch.loss.settings.get(f"clip_{side}_threshold") for side in ("low", "high")
            )
            if low is not None and high is not None and "sequence_ratio_mask" not in columns:
                metrics["clip_fraction:mean"] = float(((ratio < low) | (ratio > high)).mean())
        return metrics

    def _known_samples(self, batch: DatumBatch, records: SampleRecords) -> dict[str, SampleRecord]:
        """Return this run's samples that the datums name, by sequence id."""
        names = {span.sequence_id for datum in batch.data for span in datum.spans}
        return {
            name: record
            for name, record in ((name, records.find(name)) for name in names if name)
            if record is not None and record.run == self._run
        }

    def _of_samples(
        self, batch: DatumBatch, output: Output, step: int, records: SampleRecords
    ) -> dict[str, float]:
        ages: list[np.ndarray] = []
        gaps: list[np.ndarray] = []
        for datum, logprobs in zip(batch.data, output.logprobs, strict=True):
            if logprobs.ndim == 1:
                for where, sampled, record in _sampled(datum, self._run, records):
                    if record.generation != self.generation:
                        continue
                    ages.append(np.full(len(sampled), step - record.step))
                    if record.step == step and record.temperature == 1.0:
                        gaps.append(np.abs(logprobs[where] - sampled))
        metrics: dict[str, float] = {}
        for name, parts in (("staleness", ages), ("sampler_gap", gaps)):
            if parts:
                values = np.concatenate(parts)
                metrics |= {
                    f"{name}:mean": float(values.mean(dtype=np.float64)),
                    f"{name}:max": float(values.max()),
                }
        return metrics


def _lengths(samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Return how long the samples are, how they ended, and their tokens' mean -log-probability."""
    if not samples:
        return {}
    ended = sum(sample.stopped for sample in samples) / len(samples)
    logprobs = np.concatenate([sample.logprobs for sample in samples])
    numbers = {
        "completion_tokens_mean": len(logprobs) / len(samples),
        "eos_fraction": ended,
        "truncated_fraction": 1 - ended,
    }
    if len(logprobs):
        numbers["rollout_entropy"] = float(-logprobs.mean(dtype=np.float64))
    return numbers


def _sampled(
    datum: Datum, run: str, records: SampleRecords
) -> Iterator[tuple[slice, np.ndarray, SampleRecord]]:
    """The runs of targets that this run's own samples are known of: where, their
    log-probabilities, and the sample."""
    start, count = 0, len(datum.inputs[TARGETS])
    for span in datum.spans:
        where = slice(start, start + span.length)
        start += span.length
        record = records.find(span.sequence_id) if span.sequence_id else None
        if (
            record is None
            or record.run != run
            or span.length <= 0
            or span.offset < 0
            or where.stop > count
        ):
            continue
        sampled = record.logprobs[span.offset : span.offset + span.length]
        if len(sampled) == span.length:
            yield where, sampled, record
