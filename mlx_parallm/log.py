"""structlog set-up: one line an event on stderr, for people or as JSON; the libraries' `logging` goes the same way.

`configure_logging` is called once by the CLI; `get_logger` anywhere. Fields bound with `structlog.contextvars` (the
server binds `request_id`) appear on every line of that task.
"""

import logging
import sys
from typing import Any

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _StandardError:
    """Looks `sys.stderr` up at each write: the live display and pytest put their own there."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logging(json: bool = False, level: str = "info") -> None:
    """Sends events of at least `level` (debug, info, warning, error) to stderr, as JSON objects or aligned text.

    Third-party `logging` records pass from "warning" on ("debug" shows all of them). May be called again.
    """
    threshold = LEVELS[level]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
    ]
    colors = not json and sys.stderr.isatty()
    renderer: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=_StandardError()),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
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


def get_logger(name: str) -> Any:
    """A structlog logger; `name` says which part speaks."""
    return structlog.get_logger(part=name)
