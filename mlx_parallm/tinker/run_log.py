"""What is known of a run beside its loss: how old its samples are, and how far sampler and learner differ.

The SDK says for each target which token of which sample it is (provenance spans). The samples are remembered here with
their log-probabilities and the step of the weights that drew them, so every forward_backward can answer

    staleness:mean, :max       optimizer steps between the weights that sampled a token and those that learn from it
    sampler_gap:mean, :max     |learner - sampler| in nats over the tokens that the present weights sampled at
                               temperature 1: the same number computed twice
    ratio:mean, clip_fraction:mean, trained_tokens:sum, tokens:sum

and each optimizer step a line of `metrics.jsonl` in the run's directory.
"""

import json
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlx_parallm.system.log import get_logger
from mlx_parallm.tinker.checkpoints import Run
from mlx_parallm.tinker.data import TARGETS, DatumBatch
from mlx_parallm.tinker.learner import Applied, Output
from mlx_parallm.tinker.wire import Datum, ForwardBackward

METRICS_FILE = "metrics.jsonl"
REMEMBERED_BYTES = 64 << 20  # of samples
RECORD_BYTES = 400  # of a sample, beside 4 a token

log = get_logger("tinker")


@dataclass(frozen=True)
class SampleRecord:
    """A sample as it was drawn: by which weights, and its tokens' log-probabilities [T] float32."""

    run: str
    step: int
    temperature: float
    logprobs: np.ndarray


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
    requests: int = 0
    numbers: dict[str, list[float]] = field(default_factory=dict)


class TinkerRunLog:
    """Of one run; on the learner's thread."""

    def __init__(self, directory: Path, run: Run) -> None:
        self._file, self._run = directory / METRICS_FILE, run.run_id
        self._since = _Since()
        self._begun = time.time()

    def note(
        self, request: ForwardBackward, batch: DatumBatch, output: Output, step: int, records: SampleRecords
    ) -> dict[str, float]:
        """The metrics of a request's answer; every name ends with how chunks of a call are put together."""
        metrics = {"loss:sum": output.loss, "tokens:sum": float(batch.tokens)}
        metrics |= self._of_tokens(request, batch, output)
        metrics |= self._of_samples(batch, output, step, records)
        if not request.forward_only:
            since = self._since
            since.loss, since.requests = since.loss + output.loss, since.requests + 1
            since.datums, since.tokens = since.datums + len(batch.data), since.tokens + batch.tokens
            for name, value in metrics.items():
                since.numbers.setdefault(name, []).append(value)
        return metrics

    def applied(self, applied: Applied, learning_rate: float) -> dict[str, float]:
        """The metrics of an optimizer step's answer; writes the step's line.

        The step is made: a disk that is full or gone costs the line, not the answer.
        """
        since, self._since = self._since, _Since()
        line: dict[str, float] = {
            "step": applied.step,
            "time": time.time(),
            "loss": since.loss,
            "grad_norm": applied.grad_norm,
            "learning_rate": learning_rate,
            "datums": since.datums,
            "tokens": since.tokens,
            "requests": since.requests,
        }
        for name, values in since.numbers.items():
            key, reduction = name.split(":")
            if key not in line:
                if reduction == "max":
                    line[f"{key}_max"] = max(values)
                else:
                    line[key] = math.fsum(values) / (1 if reduction == "sum" else len(values))
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            log.warning("tinker metrics not written", file=str(self._file), step=applied.step, reason=str(error))
        return {"grad_norm:mean": applied.grad_norm, "step:max": float(applied.step)}

    def dropped(self) -> None:
        """The gradients were dropped: the next line is not about them."""
        self._since = _Since()

    def _of_tokens(self, request: ForwardBackward, batch: DatumBatch, output: Output) -> dict[str, float]:
        columns = batch.loss.columns
        weight = columns["advantages"] if "advantages" in columns else columns["weights"]
        trained = weight != 0
        metrics = {"trained_tokens:sum": float(trained.sum())}
        if "logprobs" in columns and trained.any():
            lp = np.concatenate([array.reshape(-1) for array in output.logprobs])
            ratio = np.exp(np.clip(lp[trained] - columns["logprobs"][trained], -80, 80))
            metrics["ratio:mean"] = float(ratio.mean(dtype=np.float64))
            low, high = (batch.loss.settings.get(f"clip_{side}_threshold") for side in ("low", "high"))
            if low is not None and high is not None and "sequence_ratio_mask" not in columns:
                metrics["clip_fraction:mean"] = float(((ratio < low) | (ratio > high)).mean())
        return metrics

    def _of_samples(self, batch: DatumBatch, output: Output, step: int, records: SampleRecords) -> dict[str, float]:
        ages: list[np.ndarray] = []
        gaps: list[np.ndarray] = []
        for datum, logprobs in zip(batch.data, output.logprobs, strict=True):
            if logprobs.ndim == 1:
                for where, sampled, record in _sampled(datum, self._run, records):
                    ages.append(np.full(len(sampled), step - record.step))
                    if record.step == step and record.temperature == 1.0:
                        gaps.append(np.abs(logprobs[where] - sampled))
        metrics: dict[str, float] = {}
        for name, parts in (("staleness", ages), ("sampler_gap", gaps)):
            if parts:
                values = np.concatenate(parts)
                metrics |= {f"{name}:mean": float(values.mean(dtype=np.float64)), f"{name}:max": float(values.max())}
        return metrics


def _sampled(datum: Datum, run: str, records: SampleRecords) -> Iterator[tuple[slice, np.ndarray, SampleRecord]]:
    """The runs of targets that this run's own samples are known of: where, their log-probabilities, and the sample."""
    start, count = 0, len(datum.inputs[TARGETS])
    for span in datum.spans:
        where = slice(start, start + span.length)
        start += span.length
        record = records.find(span.sequence_id) if span.sequence_id else None
        if record is None or record.run != run or span.length <= 0 or span.offset < 0 or where.stop > count:
            continue
        sampled = record.logprobs[span.offset : span.offset + span.length]
        if len(sampled) == span.length:
            yield where, sampled, record
