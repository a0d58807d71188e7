"""Rows of a data set, as TRL takes them: a list of dictionaries, a `datasets.Dataset`, or a
JSONL file. No MLX."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.environments.dataset_rows import rows_of
from mlx_parallm.environments.row_forms import known_row
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.parts.kinds import kind_of_row
from mlx_parallm.execution.user_code import user_code

TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected", "messages")


@dataclass(frozen=True)
class DataRows:
    """`conversational`: prompts and completions are lists of messages, which go through the chat
    template; else texts, which go to the model as they are."""

    rows: tuple[dict[str, Any], ...]
    conversational: bool


def read_rows(
    data: Any,
    what: str,
    *,
    text_field: str = "text",
    formatting: Callable[[Any], Any] | None = None,
) -> DataRows:
    """Read a data set that has an end. `formatting`: row → text, of SFT.

    Raises ConfigError, which begins with `what`: none at all, several splits, a stream, no rows, or
    entries that are not rows.
    """
    if data is None:
        raise ConfigError(
            f"{what} is missing: a list of dictionaries, a datasets.Dataset or a JSONL file"
        )
    if isinstance(data, str | Path):
        entries: Iterable[Any] = [row for _, row in rows_of(str(data), None, "train", what)]
    elif isinstance(data, Mapping):
        raise ConfigError(
            f"{what} has several splits: choose one, such as {what}[{next(iter(data), 'train')!r}]"
        )
    elif not isinstance(data, Sized) or not isinstance(data, Iterable):
        raise ConfigError(
            f"{what}: {type(data).__name__} has no length: take as many rows as you need,"
            " list(data.take(1000))"
        )
    else:
        entries = data
    rows = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"{what}, row {number}: expected a dictionary, got {type(entry).__name__}"
            )
        row, _ = known_row(dict(entry), f"{what}, row {number}")
        if formatting is not None:
            with user_code("formatting_func"):
                row = {"text": formatting(row)}
        elif text_field in row and text_field != "text":
            row["text"] = row.pop(text_field)
        rows.append(row)
    if not rows:
        raise ConfigError(f"{what} has no rows")
    read = DataRows(tuple(rows), _conversational(rows[0]))
    _refuse_columns(read, what)
    return read


def with_completions(rows: DataRows, what: str, *, needed: bool) -> DataRows:
    """Split each row into `prompt` and `completion`, a text: the last message is the completion.

    Raises ConfigError, which begins with `what`: a row without a completion if it is `needed`,
    or a completion that is not text and no single message of the assistant.
    """
    split = []
    for number, original in enumerate(rows.rows):
        row, where = dict(original), f"{what}, row {number}"
        if row.get("prompt") is None and row.get("messages"):
            *row["prompt"], row["completion"] = row.pop("messages")
        if isinstance(completion := row.get("completion"), Mapping):
            completion = [completion]
        if isinstance(completion, Sequence) and not isinstance(completion, str):
            if len(completion) != 1 or completion[0].get("role") != "assistant":
                raise ConfigError(f"{where}: the completion is not one message of the assistant")
            completion = completion[0].get("content")
        if needed and not isinstance(completion, str):
            raise ConfigError(
                f"{where}: there is no completion in the text of the last message, which lmbda < 1"
                " trains on: lmbda=1 needs none"
            )
        if completion is not None:
            row["completion"] = completion
        split.append(row)
    return DataRows(tuple(split), rows.conversational)


def _refuse_columns(rows: DataRows, what: str) -> None:
    """Raises ConfigError: columns of other parts beside prompts that are texts."""
    for number, row in enumerate(rows.rows):
        if not rows.conversational and (kind := kind_of_row(row)):
            raise ConfigError(
                f"{what}, row {number}: beside {kind.plural} a prompt is a list of messages,"
                ' [{"role": "user", "content": …}]'
            )


def _conversational(row: Mapping[str, Any]) -> bool:
    values = [row[name] for name in TEXT_COLUMNS if row.get(name) is not None]
    return any(isinstance(value, Sequence) and not isinstance(value, str) for value in values)
