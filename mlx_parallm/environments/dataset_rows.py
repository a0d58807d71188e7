"""Rows of a data set: read, checked one by one, divided into training and held-out rows. An error
names file and line.

rows_of       (place, row) of a JSONL file, of a data set of the hub, or of Python: every reader of
              rows begins here
read_splits   both splits of anything that is made from rows: prompts here, `[data]`'s examples in
              rl_training
read_prompts  rows with their prompts, in TRL's formats: a column `prompt` that holds a string or a
              list of messages
read_tasks    rows of an environment's tasks, from a file or from Python
SplitRows     which row is number `index` of a split
"""

import difflib
import functools
import hashlib
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mlx_parallm.config.environment import HUB_PREFIX, EnvironmentConfig
from mlx_parallm.environments.base import Split
from mlx_parallm.environments.row_forms import known_row, with_system
from mlx_parallm.environments.row_images import has_images, refuse_images, with_row_images
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.chat_messages import read_messages, read_tools
from mlx_parallm.execution.parts.kinds import all_kinds
from mlx_parallm.execution.user_code import is_reference, load, shown, user_code
from mlx_parallm.system.files import local_path
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.packages import require

log = get_logger("environments")

PROMPT_COLUMNS = ("prompt", "messages")
TASKS_HELDOUT = 0.1  # share of an environment's tasks

Prompt = str | list[dict[str, Any]]
TaskData = str | Path | Sequence[Mapping[str, Any]]
"""A JSONL file, or the rows themselves."""


@dataclass(frozen=True, slots=True)
class DataRow:
    prompt: Any  # a Prompt; of a task, the value of the column that every row needs
    columns: Mapping[str, Any]  # every column of the data set; None if the row has none
    key: str  # hash of the prompt
    tools: Sequence[Mapping[str, Any]] = ()  # definitions for the chat template
    where: str = ""  # file and line


class Keyed(Protocol):
    @property
    def key(self) -> str: ...  # `prompt_key` of the prompt


K = TypeVar("K", bound=Keyed)


Arrange = Callable[[list[int], random.Random], list[int]]
"""(all training rows' numbers, shuffled; the epoch's source of chance) → which row is at which
place of an epoch."""


class SplitRows(Generic[K]):
    """Training rows come in a new order each epoch; held-out rows stay in theirs.

    Args:
        seed: of the orders.
        what: begins the error of an empty split.

    Attributes:
        arrange: changes the order of an epoch; set before the first row is asked for.
    """

    def __init__(
        self,
        train: Sequence[K],
        heldout: Sequence[K],
        *,
        seed: str,
        what: str,
    ) -> None:
        self.train, self.heldout = tuple(train), tuple(heldout)
        self._seed, self._what = seed, what
        self.arrange: Arrange | None = None
        # groups of two epochs may be in flight
        self._order = functools.lru_cache(maxsize=2)(self._ordered)

    def row(self, index: int, split: Split) -> K:
        """Row `index` of a split; the training rows' epoch is index // rows. Raises ConfigError:
        an empty split."""
        rows = self.train if split == "train" else self.heldout
        if not rows:
            raise ConfigError(
                f"{self._what} has no {'training' if split == 'train' else 'held-out'} rows"
            )
        epoch, position = divmod(index, len(rows))
        return rows[self._order(epoch)[position] if split == "train" else position]

    def _ordered(self, epoch: int) -> list[int]:
        order, source = list(range(len(self.train))), random.Random(f"{self._seed}/{epoch}")
        source.shuffle(order)
        return order if self.arrange is None else self.arrange(order, source)


def read_prompts(config: EnvironmentConfig, *, seed: int) -> SplitRows[DataRow]:
    """Read both splits of an [[environments]] entry. Raises ConfigError: as `read_splits`, or a
    bad row."""
    data = config.data or ""
    train, heldout = read_splits(
        functools.partial(_read_prompts, config),
        (data, config.data_split),
        heldout=(config.heldout_data, config.heldout_split),
        fraction=config.heldout_fraction,
        key="environments",
    )
    return SplitRows(
        train,
        heldout,
        seed=f"{config.name}/{seed}",
        what=f"environments: {shown(data)}",
    )


def common_columns(rows: SplitRows[DataRow]) -> tuple[str, ...]:
    """Return the columns of both splits, with a warning for training columns that the held-out
    rows lack."""
    first = (rows.train or rows.heldout)[0].columns
    columns = tuple(name for name in first if not rows.heldout or name in rows.heldout[0].columns)
    if lacking := sorted(set(first) - set(columns)):
        log.warning("held-out rows lack columns of the training rows", columns=lacking)
    return columns


def read_tasks(rows: TaskData, column: str, *, seed: int, what: str) -> SplitRows[DataRow]:
    """Read tasks. Every row needs `column`, whose hash decides which tenth is held out.

    Raises ConfigError, which begins with `what`: no rows, or one without the column (with file and
    line).
    """
    entries: Iterable[tuple[str, Any]] = (
        json_lines(Path(rows), what)
        if isinstance(rows, str | Path)
        else ((f"task {number}", row) for number, row in enumerate(rows))
    )
    tasks = []
    for where, row in entries:
        if not isinstance(row, Mapping) or not row.get(column):
            raise ConfigError(f"{what}: {where} has no {column!r}")
        tasks.append(DataRow(row[column], dict(row), prompt_key(row[column])))
    if not tasks:
        raise ConfigError(f"{what}: there are no tasks in {rows!r}")
    train, heldout = split_heldout(tasks, TASKS_HELDOUT)
    return SplitRows(train, heldout, seed=f"tasks/{seed}", what=what)


# ---------------------------------------------------------------------- splits


def read_splits(
    read: Callable[[str, str], list[K]],
    train: tuple[str, str],
    *,
    heldout: tuple[str | None, str | None],
    fraction: float,
    key: str,
) -> tuple[list[K], list[K]]:
    """Return (training rows, held-out rows). Which rows are held out depends on their prompts
    alone, not on a seed or on their order; a `fraction` of 1 holds out all, for data that is only
    evaluated.

    Args:
        read: (file or hub data set, split) → its rows.
        train: rows to train on; `heldout`: rows that are held out instead of a fraction, None for
            the same.
        key: begins the errors.

    Raises ConfigError: as `read` does, or there are no rows to train on.
    """
    data, split = train
    rows, others = read(data, split), list[K]()
    if heldout != (None, None):
        others = read(heldout[0] or data, heldout[1] or split)
        keys = {row.key for row in rows}
        if both := sum(row.key in keys for row in others):
            log.warning(
                "held-out prompts are trained on too", data=shown(heldout[0] or data), prompts=both
            )
    elif fraction == 1:
        rows, others = [], rows
    elif fraction and rows:
        rows, others = split_heldout(rows, fraction)
    if not (rows or (others and fraction == 1)):
        raise ConfigError(f"{key}: {shown(data)} has no rows to train on")
    return rows, others


def split_heldout(rows: Sequence[K], fraction: float) -> tuple[list[K], list[K]]:
    """Return (training, held-out). Rows of one prompt stay together; the prompt alone decides
    their side."""
    keys = {int(row.key, 16) for row in rows}
    # A small data set keeps at least one prompt on either side; of a single one, none is held out.
    chosen = ({key for key in keys if key < fraction * 2**64} | {min(keys)}) - {max(keys)}
    train: list[K] = []
    heldout: list[K] = []
    for row in rows:
        (heldout if int(row.key, 16) in chosen else train).append(row)
    return train, heldout


def prompt_key(prompt: Any) -> str:
    """16 hexadecimal digits of a prompt's hash."""
    text = json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------- sources


def rows_of(
    data: str, subset: str | None, split: str, key: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a JSONL file, of a data set of the hub, or of the user's own rows
    ("python:file.py:rows").

    Rows of other programs' layouts get the columns of ours (`row_forms`). Raises ConfigError, which
    begins with `key`.
    """
    for where, row, _ in formed_rows(data, subset, split, key):
        yield where, row


def formed_rows(
    data: str, subset: str | None, split: str, key: str
) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yield (place, row, layout), as `rows_of`. `layout`: the form that the row was read in; None:
    ours."""
    forms: Counter[str] = Counter()
    for where, row in _as_they_are(data, subset, split, key):
        converted, form = known_row(row, f"{key}: {where}")
        if form is not None:
            forms[form] += 1
        yield where, converted, form
    for form, rows in forms.items():
        log.info("rows of another layout are read as messages", layout=form, rows=rows, data=data)


def _as_they_are(
    data: str, subset: str | None, split: str, key: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    if is_reference(data):
        return _user_rows(data, key)
    return (
        _hub(data, subset, split, key)
        if data.startswith(HUB_PREFIX)
        else json_lines(Path(data), key)
    )


def _user_rows(reference: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a list, or those that a function returns."""
    value, name = load(reference, key), reference.rpartition(":")[2]
    with user_code(f"{key}: {shown(reference)}"):
        rows = list(value() if callable(value) else value)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{key}: {name}, row {number}: expected a mapping, got {type(row).__name__}"
            )
        yield f"{name}, row {number}", dict(row)


def json_lines(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", row) of every line that is not blank. Raises ConfigError, which begins
    with `key`."""
    path = local_path(path)
    if path.suffix in (".csv", ".parquet", ".arrow", ".gz"):
        raise ConfigError(f"{key}: {path} is not JSONL (one JSON object a line): convert it first")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        hint = f' (a data set of the hub is "{HUB_PREFIX}owner/name")'
        raise ConfigError(f"{key}: there is no file {path}{hint}") from None
    except (OSError, ValueError) as error:  # not UTF-8; a name that no file can have
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            hint = " (a JSON array? write one object a line)" if line.strip()[0] in "[]" else ""
            raise ConfigError(
                f"{key}: {where}: not JSON: {error.msg} at column {error.colno}{hint}"
            ) from error
        # a number of thousands of digits, lists within lists
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{key}: {where}: no JSON that can be read: {str(error)[:80]}"
            ) from error
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{key}: {where}: expected one JSON object, got {type(entry).__name__}"
            )
        if "\\ud" in line.lower() and not _whole_characters(entry):
            raise ConfigError(
                f"{key}: {where}: a text holds half a surrogate pair, which is not a character"
            )
        yield where, entry


def _whole_characters(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _hub(
    data: str, subset: str | None, split: str, key: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    require(f"{key}: {data!r}", "datasets")
    import datasets

    name = data.removeprefix(HUB_PREFIX)
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{key}: the data set {name!r}, split {split!r}, cannot be loaded: {text}"
        ) from error
    for number, entry in enumerate(rows):
        yield f"{data}, {split} row {number}", dict(entry)


# ---------------------------------------------------------------------- prompts


def _read_prompts(config: EnvironmentConfig, data: str, split: str) -> list[DataRow]:
    entries = list(rows_of(data, config.data_subset, split, "environments"))
    columns = tuple(dict.fromkeys(name for _, entry in entries for name in entry))
    template = (
        _template(config.prompt_template, columns, data)
        if config.prompt_template is not None
        else None
    )
    column = _prompt_column(config, columns, data) if template is None else ""
    rows: list[DataRow] = []
    no_tools: list[str] = []
    for where, entry in entries:
        if template is not None:
            prompt: Prompt = _from_template(template, entry, where)
        else:
            prompt = _from_column(entry, column, where)
            prompt = with_system(prompt, entry, f"environments: {where}", name=column)
        if config.prompt_format == "text":
            refuse_images(entry, prompt, f"environments: {where}")
        elif has_images(entry, prompt):
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = with_row_images(turns, entry, f"environments: {where}", data)
        tools: Sequence[Mapping[str, Any]] = ()
        if isinstance(prompt, list):
            _check_messages(prompt, config, where)
        if config.prompt_format == "chat":
            tools = _template_tools(entry.get("tools"))
            if not tools and entry.get("tools") not in (None, "", [], {}):
                no_tools.append(where)
        rows.append(
            DataRow(
                prompt,
                {name: entry.get(name) for name in columns},
                prompt_key(prompt),
                tools,
                where,
            )
        )
    if no_tools:
        log.warning(
            "a column `tools` holds no definitions of functions: the prompts do not show it",
            rows=len(no_tools),
            first=no_tools[0],
        )
    return rows


def _prompt_column(config: EnvironmentConfig, columns: Sequence[str], data: str) -> str:
    names = PROMPT_COLUMNS if config.prompt_column is None else (config.prompt_column,)
    for name in names:
        if name in columns or not columns:
            return name
    first = columns[0]
    raise ConfigError(
        f"environments: {shown(data)} has no column {' or '.join(map(repr, names))}, only"
        f" {', '.join(columns)}:"
        f' set prompt_column = "{first}" or prompt_template = "{{{first}}}"'
        f" (beside --data: --set environments.0.prompt_column={first})"
    )


def _template(template: str, columns: Sequence[str], data: str) -> list[tuple[str, str | None]]:
    """Parse a template to (literal, column) pairs."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"environments: prompt_template {template!r}: {error} ({{{{ stands for a brace)"
        ) from error
    for _, name, specification, conversion in parsed:
        if name is None or not columns:
            continue
        if name not in columns or specification or conversion:
            near = difflib.get_close_matches(name, columns, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"environments: prompt_template names {{{name}}}, which is not a column of"
                f" {shown(data)};"
                f" did you mean {{{near}}}? There are: {', '.join(columns)}"
            )
    return [(literal, name) for literal, name, _, _ in parsed]


def _from_template(
    template: Sequence[tuple[str, str | None]], entry: Mapping[str, Any], where: str
) -> str:
    text = ""
    for literal, name in template:
        text += literal
        if name is not None:
            if entry.get(name) is None:
                raise ConfigError(
                    f"environments: {where}: column {name!r} of prompt_template is missing"
                )
            text += str(entry[name])
    return text


def _from_column(entry: Mapping[str, Any], column: str, where: str) -> Prompt:
    value = entry.get(column)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value:
        try:
            return read_messages(value, column, shown=all_kinds())
        except RequestError as error:
            reason = str(error).removeprefix(f"{column}: ")
            raise ConfigError(f"environments: {where}: {reason}") from error
    problem = "is missing" if value is None else f"is {value!r}"
    raise ConfigError(
        f"environments: {where}: column {column!r} {problem}; expected"
        " a string or a list of messages"
    )


def _template_tools(value: Any) -> Sequence[Mapping[str, Any]]:
    """Return a column `tools` that holds definitions of functions; a column that holds
    something else is an ordinary one."""
    try:
        tools = read_tools(value)
    except RequestError:
        return ()
    return tools if all(isinstance(tool.get("function"), Mapping) for tool in tools) else ()


def _check_messages(messages: Sequence[Any], config: EnvironmentConfig, where: str) -> None:
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"environments: {where}: the last message is the assistant's: leave the answer out"
        )
    if config.system_prompt is not None and messages[0]["role"] == "system":
        raise ConfigError(
            f"environments: {where}: the row has a system message, and system_prompt is set as well"
        )
    if config.prompt_format == "text":
        raise ConfigError(
            f'environments: {where}: the prompt is a list of messages, but prompt_format is "text"'
        )
