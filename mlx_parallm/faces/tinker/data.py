"""The datums of a request, checked, as sequences of a batch and as columns of the loss.

Position i of a datum's tokens predicts its target i: the client has shifted them. So a sequence is
the tokens and one more that nothing reads, all of them are scored, and the targets are the datum's
own (`TrainSequence.targets`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlx_parallm.errors import RequestError
from mlx_parallm.faces.tinker.losses import (
    DatumLoss,
    LossKind,
    find_loss,
    join_columns,
    loss_settings,
)
from mlx_parallm.faces.tinker.wire import Datum, ForwardBackward, check_cells, read_datum
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.types import Rollout

TARGETS = "target_tokens"
MAX_TARGETS = 1024  # targets a position
PAYS_FROM = 2  # datums with the same prompt, on average: its forward pass is one more


@dataclass(frozen=True)
class DatumLimits:
    """The limits of the base model."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True)
class DatumBatch:
    """A request's datums and its loss, checked."""

    data: tuple[Datum, ...]
    sequences: tuple[TrainSequence, ...]
    loss: DatumLoss

    @property
    def tokens(self) -> int:
        """Input tokens of all datums."""
        return sum(len(datum.tokens) for datum in self.data)

    @cached_property
    def starts(self) -> np.ndarray:
        """[datums + 1]: first column of each datum."""
        return np.cumsum([0, *(sequence.trained for sequence in self.sequences)])

    def by_datum(self, column: np.ndarray) -> list[np.ndarray]:
        """A column in the shapes of the datums' targets, [N] or [N, K] each."""
        parts = np.split(column, self.starts[1:-1])
        return [
            part.reshape(datum.inputs[TARGETS].shape)
            for part, datum in zip(parts, self.data, strict=True)
        ]


@dataclass(frozen=True)
class PromptSplit:
    """A batch of answers to few prompts, in two parts: the trained tokens, and the prompts, which
    are scored once each.

    Attributes:
        sequences, loss: the datums from their first position on that changes the loss; those that
            have one.
        where: [n] the places of the loss's columns among those of the whole batch.
        prompts: the distinct beginnings.
        numbers: of each datum's beginning; -1 = it has none.
    """

    sequences: tuple[TrainSequence, ...]
    loss: DatumLoss
    where: np.ndarray
    prompts: tuple[TrainSequence, ...]
    numbers: tuple[int, ...]

    def join(self, trained: np.ndarray, prompts: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """A column of the whole batch from those of the parts. `starts`: the whole batch's."""
        column = np.empty(starts[-1], np.float32)
        column[self.where] = trained
        ends = np.cumsum([0, *(sequence.trained for sequence in self.prompts)])
        for start, number in zip(starts[:-1], self.numbers, strict=True):
            if number >= 0:
                part = prompts[ends[number] : ends[number + 1]]
                column[start : start + len(part)] = part
        return column


def split_prompts(batch: DatumBatch) -> PromptSplit | None:
    """Split each distinct prompt off, so that it is computed once. None when that would save
    nothing: the prompts differ, or every position counts in the loss."""
    kind = batch.loss.kind
    if not kind.idle or any(sequence.targets_each > 1 for sequence in batch.sequences):
        return None
    idle = np.logical_and.reduce([batch.loss.columns[name] == 0 for name in kind.idle])
    prompt_numbers: dict[tuple[bytes, bytes], int] = {}
    prompts, trained, where, numbers = (
        list[TrainSequence](),
        list[TrainSequence](),
        list[np.ndarray](),
        list[int](),
    )
    leading = 0
    for datum, start, stop in zip(batch.data, batch.starts[:-1], batch.starts[1:], strict=True):
        busy = np.flatnonzero(~idle[start:stop])
        length = int(busy[0]) if len(busy) else int(stop - start)
        targets = datum.inputs[TARGETS][:length]
        key = (datum.tokens[:length].tobytes(), targets.tobytes())
        if length and key not in prompt_numbers:
            prompt_numbers[key] = len(prompts)
            prompts.append(_sequence(datum, slice(0, length)))
        numbers.append(prompt_numbers[key] if length else -1)
        leading += length
        if len(busy):
            trained.append(_sequence(datum, slice(length, None)))
            where.append(np.arange(start + length, stop))
    if (
        not trained
        or leading < PAYS_FROM * sum(sequence.trained for sequence in prompts)
        or not leading
    ):
        return None
    places = np.concatenate(where)
    columns = {name: column[places] for name, column in batch.loss.columns.items()}
    loss = DatumLoss(kind, batch.loss.settings, columns, batch.loss.datums[places])
    return PromptSplit(tuple(trained), loss, places, tuple(prompts), tuple(numbers))


def read_batch(request: ForwardBackward, limits: DatumLimits) -> DatumBatch:
    """Raises RequestError that says what would be right: the loss, its configuration, a shape, a
    token, a length."""
    kind, settings = find_loss(request.loss), loss_settings(request.loss, request.config)
    if not request.data:
        raise RequestError("the request has no data: send one datum at least")
    check_cells(request.data)
    data = tuple(read_datum(datum, f"datum {i}") for i, datum in enumerate(request.data))
    for i, datum in enumerate(data):
        _check_datum(datum, kind, request.loss, limits, f"datum {i}")
    columns = {name: _column(data, name) for name in (*kind.inputs, *kind.optional)}
    sequences = tuple(_sequence(datum) for datum in data)
    counts = [sequence.trained for sequence in sequences]
    return DatumBatch(
        data, sequences, DatumLoss(kind, settings, columns, np.repeat(np.arange(len(data)), counts))
    )


def _check_datum(datum: Datum, kind: LossKind, loss: str, limits: DatumLimits, where: str) -> None:
    count = len(datum.tokens)
    if not 0 < count <= limits.max_model_len:
        reason = (
            f"the model's context is {limits.max_model_len}; send less"
            if count
            else "send one at least"
        )
        raise RequestError(f"{where}: the model input has {count} tokens; {reason}")
    _check_tokens(datum.tokens, limits, f"{where}: model_input")
    if any(span.length < 0 or span.offset < 0 for span in datum.spans):
        raise RequestError(f"{where}: loss_fn_input_spans hold an offset or a length below 0")
    read = (TARGETS, *kind.inputs, *kind.optional)
    if missing := [name for name in (TARGETS, *kind.inputs) if name not in datum.inputs]:
        raise RequestError(
            f"{where}: {loss} needs the loss_fn_input {missing[0]!r} (it reads {', '.join(read)})"
        )
    # A recipe's own notes may come along; keys that would change the loss must not be ignored.
    if unread := [
        name for name in datum.inputs if name in ("weights", "advantages") and name not in read
    ]:
        raise RequestError(
            f"{where}: {loss} does not read {unread[0]!r} (it reads {', '.join(read)})"
        )
    _check_targets(datum.inputs[TARGETS], count, limits, where)
    for name in (name for name in read[1:] if name in datum.inputs):
        values, shape = datum.inputs[name], datum.inputs[TARGETS].shape
        if values.shape != shape:
            raise RequestError(
                f"{where}: {name} has the shape {list(values.shape)}, target_tokens"
                f" {list(shape)}: send the same"
            )
        if not np.isfinite(values).all():
            raise RequestError(f"{where}: {name} holds a number that is not finite")


def _check_targets(targets: np.ndarray, count: int, limits: DatumLimits, where: str) -> None:
    if not np.issubdtype(targets.dtype, np.integer):
        raise RequestError(f"{where}: target_tokens are {targets.dtype}; send int64 token ids")
    if targets.shape[0] != count:
        raise RequestError(
            f"{where}: {count} input tokens and {targets.shape[0]} target_tokens: position i"
            " predicts target i, so both"
            " have the same length"
        )
    if targets.ndim == 2 and not 1 <= targets.shape[1] <= MAX_TARGETS:
        raise RequestError(
            f"{where}: target_tokens have {targets.shape[1]} columns; 1 to {MAX_TARGETS} are read"
        )
    _check_tokens(targets, limits, f"{where}: target_tokens")


def _check_tokens(tokens: np.ndarray, limits: DatumLimits, where: str) -> None:
    if tokens.size and (tokens.min() < 0 or tokens.max() >= limits.vocab_size):
        wrong = tokens[(tokens < 0) | (tokens >= limits.vocab_size)][0]
        raise RequestError(
            f"{where}: token {wrong} is not in the vocabulary (0 to {limits.vocab_size - 1})"
        )


def _column(data: Sequence[Datum], name: str) -> np.ndarray:
    """[N] float32; weights that are not sent are 1."""
    arrays: list[np.ndarray] = [_input(datum.inputs, name).astype(np.float32) for datum in data]
    return join_columns(arrays)


def _input(inputs: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return inputs[name] if name in inputs else np.ones(inputs[TARGETS].shape, np.float32)


def _sequence(datum: Datum, scored: slice = slice(None)) -> TrainSequence:
    """The datum up to the end of the positions `scored`, which alone have columns."""
    start, stop, _ = scored.indices(len(datum.tokens))
    targets = datum.inputs[TARGETS][:stop].astype(np.int32)
    tokens = (*datum.tokens[:stop].tolist(), 0)
    rollout = Rollout(
        tokens, (*(0,) * (start + 1), *(1,) * (stop - start)), None, (), temperature=1.0, scores={}
    )
    return TrainSequence(rollout, (), fresh=False, targets=targets)
