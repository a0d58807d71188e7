"""Rows of a data set: read, checked one by one, each with its prompt. An error names file and line.

`read_rows` → `Rows(train, heldout)`. Formats are TRL's: a column `prompt` that holds a string or a list of messages;
every other column is handed to the reward functions.
"""

import difflib
import hashlib
import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mlx_parallm.config.environment import HUB_PREFIX, EnvironmentConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.log import get_logger

log = get_logger("environments")

INSTALL = "pip install 'mlx-parallm[datasets]'"
PROMPT_COLUMNS = ("prompt", "messages")

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    prompt: Prompt
    columns: Mapping[str, Any]  # every column of the data set; None where the row has none
    key: str  # hash of the prompt


@dataclass(frozen=True, slots=True)
class Rows:
    train: tuple[Row, ...]
    heldout: tuple[Row, ...]
    columns: tuple[str, ...]  # that the rows of both splits have


def read_rows(config: EnvironmentConfig) -> Rows:
    """Both splits. Which rows are held out depends on their prompts alone, not on a seed or on their order.

    Raises ConfigError: a file or package that is missing, a bad row (with file and line), no rows to train on.
    """
    rows = _read(config, config.data or "", config.data_split)
    heldout: list[Row] = []
    if config.heldout_data is not None or config.heldout_split is not None:
        heldout = _read(config, config.heldout_data or config.data or "", config.heldout_split or config.data_split)
        keys = {row.key for row in rows}
        if both := sum(row.key in keys for row in heldout):
            log.warning("held-out prompts are trained on too", environment=config.name, prompts=both)
    elif config.heldout_fraction == 1:  # there to be evaluated only
        rows, heldout = [], rows
    elif config.heldout_fraction and rows:
        rows, heldout = split_heldout(rows, config.heldout_fraction)
    if not (rows or (heldout and config.heldout_fraction == 1)):
        raise ConfigError(f"environments: {config.data} has no rows to train on")
    first = (rows or heldout)[0]
    columns = tuple(name for name in first.columns if not heldout or name in heldout[0].columns)
    if lacking := sorted(set(first.columns) - set(columns)):
        log.warning("held-out rows lack columns of the others", environment=config.name, columns=lacking)
    return Rows(tuple(rows), tuple(heldout), columns)


class Keyed(Protocol):
    @property
    def key(self) -> str: ...  # `prompt_key` of the prompt


K = TypeVar("K", bound=Keyed)


def split_heldout(rows: Sequence[K], fraction: float) -> tuple[list[K], list[K]]:
    """(trained on, held out). Rows of one prompt stay together; which side is theirs depends on the prompt alone."""
    keys = {int(row.key, 16) for row in rows}
    # A small data set keeps at least one prompt on either side; of a single one, none is held out.
    chosen = ({key for key in keys if key < fraction * 2**64} | {min(keys)}) - {max(keys)}
    train: list[K] = []
    heldout: list[K] = []
    for row in rows:
        (heldout if int(row.key, 16) in chosen else train).append(row)
    return train, heldout


def _read(config: EnvironmentConfig, data: str, split: str) -> list[Row]:
    source = rows_of(data, config.data_subset, split, "environments")
    entries = list(source)
    columns = tuple(dict.fromkeys(name for _, entry in entries for name in entry))
    pieces = _pieces(config.prompt_template, columns, data) if config.prompt_template is not None else None
    column = _prompt_column(config, columns, data) if pieces is None else ""
    rows = []
    for where, entry in entries:
        prompt = _from_template(pieces, entry, where) if pieces is not None else _from_column(entry, column, where)
        if isinstance(prompt, list):
            _check_messages(prompt, config, where)
        key = prompt_key(prompt)
        rows.append(Row(prompt, {name: entry.get(name) for name in columns}, key))
    return rows


# ---------------------------------------------------------------------- sources


def prompt_key(prompt: Any) -> str:
    """16 hexadecimal digits of a prompt's hash."""
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def rows_of(data: str, subset: str | None, split: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of a JSONL file, or of a data set of the hub. Raises ConfigError, which begins with `key`."""
    return _hub(data, subset, split, key) if data.startswith(HUB_PREFIX) else json_lines(Path(data), key)


def json_lines(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", row) of every line that is not blank. Raises ConfigError, which begins with `key`."""
    path = path.expanduser()
    if path.suffix in (".csv", ".parquet", ".arrow", ".gz"):
        raise ConfigError(f"{key}: {path} is not JSONL (one JSON object a line): convert it first")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        hint = f' (a data set of the hub is "{HUB_PREFIX}owner/name")'
        raise ConfigError(f"{key}: there is no file {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            hint = " (a JSON array? write one object a line)" if line.strip()[0] in "[]" else ""
            raise ConfigError(f"{key}: {where}: not JSON: {error.msg} at column {error.colno}{hint}") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"{key}: {where}: expected one JSON object, got {type(entry).__name__}")
        yield where, entry


def _hub(data: str, subset: str | None, split: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{key}: {data!r} needs the package: {INSTALL} ({error})") from error
    name = data.removeprefix(HUB_PREFIX)
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{key}: the data set {name!r}, split {split!r}, cannot be loaded: {text}") from error
    for number, entry in enumerate(rows):
        yield f"{data}, {split} row {number}", dict(entry)


# ---------------------------------------------------------------------- prompts


def _prompt_column(config: EnvironmentConfig, columns: Sequence[str], data: str) -> str:
    wanted = PROMPT_COLUMNS if config.prompt_column is None else (config.prompt_column,)
    for name in wanted:
        if name in columns or not columns:
            return name
    first = columns[0]
    raise ConfigError(
        f"environments: {data} has no column {' or '.join(map(repr, wanted))}, only {', '.join(columns)}:"
        f' set prompt_column = "{first}" or prompt_template = "{{{first}}}"'
        f" (beside --data: --set environments.0.prompt_column={first})"
    )


def _pieces(template: str, columns: Sequence[str], data: str) -> list[tuple[str, str | None]]:
    """A template as (literal, column) pairs."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"environments: prompt_template {template!r}: {error} ({{{{ stands for a brace)") from error
    for _, name, specification, conversion in parsed:
        if name is None or not columns:
            continue
        if name not in columns or specification or conversion:
            near = difflib.get_close_matches(name, columns, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"environments: prompt_template names {{{name}}}, which is not a column of {data};"
                f" did you mean {{{near}}}? There are: {', '.join(columns)}"
            )
    return [(literal, name) for literal, name, _, _ in parsed]


def _from_template(pieces: Sequence[tuple[str, str | None]], entry: Mapping[str, Any], where: str) -> str:
    text = ""
    for literal, name in pieces:
        text += literal
        if name is not None:
            if entry.get(name) is None:
                raise ConfigError(f"environments: {where}: column {name!r} of prompt_template is missing")
            text += str(entry[name])
    return text


def _from_column(entry: Mapping[str, Any], column: str, where: str) -> Prompt:
    value = entry.get(column)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return [dict(message) if isinstance(message, Mapping) else message for message in value]
    said = "is missing" if value is None else f"is {value!r}"
    raise ConfigError(f"environments: {where}: column {column!r} {said}; expected a string or a list of messages")


def _check_messages(messages: Sequence[Any], config: EnvironmentConfig, where: str) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(
                f'environments: {where}: message {number} is not {{"role": …, "content": text}}: {message!r}'
            )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"environments: {where}: the last message is the assistant's: leave the answer out")
    if config.system_prompt is not None and messages[0]["role"] == "system":
        raise ConfigError(f"environments: {where}: the row has a system message, and system_prompt is set as well")
    if config.prompt_format == "text":
        raise ConfigError(f'environments: {where}: the prompt is a list of messages, but prompt_format is "text"')
