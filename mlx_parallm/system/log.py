"""Logging with structlog: a line for each event on stderr, as text or JSON; `logging` of libraries
takes the same way.

The daemon calls `configure_logging` once; `get_logger` works anywhere. Fields bound with
`structlog.contextvars` (the server binds `request_id`) appear on every line of that task. A
`RunLog` gets every line as JSON too. Both hide secrets (`redaction`), and neither hands a control
character of a value to a terminal.
"""

import io
import json as jsonlib
import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import structlog

from mlx_parallm.system.redaction import Redactor
from mlx_parallm.system.terminal import escaped

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
RUN_LOG_FILE = "run.log"
MAX_BYTES, KEPT_FILES = 16 << 20, 3  # bounds of run.log: at most 64 MiB with run.log.1 … .3
HELD_LINES = 1000
PAUSED, RESUMED, CONFIGURED = "paused", "resumed", "configuration written"
"""Events that `explain` reads: a client has paused the engine, lets it continue; a process
begins."""
# a field: this line is for the run log and not for the terminal, which shows it otherwise
FILE_ONLY = "_file_only"


class _StandardError:
    """Writes to the current `sys.stderr`: the live display and pytest replace it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Print nothing: a full disk must not flood the terminal with tracebacks. metrics.jsonl
        ends the run."""


class RunLog:
    """`run.log`: every line of the process as a JSON object, in files of bounded size. Any thread
    may write.

    Lines before `open` are kept for it. As a context manager it records the exception that ends the
    block.
    """

    def __init__(self, redactor: Redactor | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self.redactor, self._max_bytes = redactor or Redactor(), max_bytes
        self._held: deque[str] = deque(maxlen=HELD_LINES)
        self._lock = threading.Lock()
        self._file: _File | None = None

    def open(self, directory: Path) -> None:
        """Append to `directory`/run.log; without a right to open it, nothing is written."""
        try:
            file = _File(
                directory / RUN_LOG_FILE,
                maxBytes=self._max_bytes,
                backupCount=KEPT_FILES,
                encoding="utf-8",
            )
        except OSError:
            return
        with self._lock:
            self._file = file
            while self._held:
                self._emit(file, self._held.popleft())

    def write(self, level: str, event: str, **fields: Any) -> None:
        now = (
            datetime.fromtimestamp(time.time(), UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        line = {"timestamp": now, "level": level, "event": event} | fields
        text = jsonlib.dumps(
            self.redactor.value(line), default=lambda value: self.redactor.text(repr(value))
        )
        with self._lock:
            if self._file is None:
                self._held.append(text)
            else:
                self._emit(self._file, text)

    def processor(
        self, _: Any, level: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Write a copy of the event and return the event, as a structlog processor."""
        copy = structlog.processors.format_exc_info(None, level, dict(event))
        fields = {
            key: value
            for key, value in copy.items()
            if not key.startswith("_") and key not in ("level", "event")
        }
        self.write(str(copy.get("level", level)), str(copy.get("event", "")), **fields)
        return event

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            self.write("error", f"ended by {type(error).__name__}: {error}")
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _emit(self, file: _File, text: str) -> None:
        file.handle(logging.makeLogRecord({"msg": "%s", "args": (text,)}))


def configure_logging(
    json: bool = False,
    level: str = "info",
    *,
    redactor: Redactor | None = None,
    run_log: RunLog | None = None,
    libraries: bool = True,
) -> None:
    """Send events of at least `level` (debug, info, warning, error) to stderr, as JSON objects or
    aligned text.

    Third-party `logging` records pass from "warning" on ("debug" shows all of them); with
    `libraries` false they go if the program has sent them. May be called again.
    """
    threshold = LEVELS[level]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        *([run_log.processor] if run_log else []),
        _for_the_terminal,
        structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
    ]
    colors = not json and sys.stderr.isatty()
    hide = redactor or Redactor()
    renderer: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [_console_renderer(colors)]
    )
    renderer.insert(
        0, lambda _, __, event: {key: _hidden(hide, key, value) for key, value in event.items()}
    )
    renderer.append(lambda _, __, text: hide.text(text))  # tracebacks
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=_StandardError()),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    if not libraries:
        return
    handler = logging.StreamHandler(_StandardError())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.DEBUG if threshold == logging.DEBUG else max(threshold, logging.WARNING))


def _console_renderer(colors: bool) -> structlog.dev.ConsoleRenderer:
    """Return structlog's renderer, which escapes what a value and a traceback hold; its own
    colours stay."""
    renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_traceback)
    for formatter in (column.formatter for column in renderer.columns):
        if isinstance(formatter, structlog.dev.KeyValueColumnFormatter):
            formatter.value_repr = partial(_escaped_value, formatter.value_repr)
    return renderer


def _escaped_value(as_text: Callable[[Any], str], value: Any) -> str:
    return escaped(as_text(value))


def _traceback(file: TextIO, exc_info: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    file.write(escaped(text.getvalue(), lines=True))


def _for_the_terminal(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if event.pop(FILE_ONLY, False):
        raise structlog.DropEvent
    return event


def _hidden(redactor: Redactor, key: str, value: Any) -> Any:
    return value if key.startswith("_") or key == "exc_info" else redactor.named(key, value)


def words_of(text: str) -> str:
    """Return a sentence without its numbers: the same at each step."""
    return re.sub(r"[0-9.,]+", "", text)


def get_logger(name: str) -> Any:
    """Return a structlog logger; `name` is the field `part` of its lines."""
    return structlog.get_logger(part=name)
