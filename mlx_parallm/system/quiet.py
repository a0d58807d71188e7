"""Keep a library's advice to its developers off a user's screen. Imports no library."""

import logging

ADVICE = ("PyTorch was not found",)
"""How such lines begin. transformers logs this one as it is imported; nothing here uses torch."""


def hide_advice() -> None:
    """Leave `ADVICE` out of what transformers logs; its other warnings stay."""
    logger = logging.getLogger("transformers")
    if _is_for_users not in logger.filters:
        logger.addFilter(_is_for_users)


def _is_for_users(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(ADVICE)
