"""The model.rope_length with which an adapter was trained: recorded in its adapter_config.json,
compared on loading the adapter, and followed by merge and export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.errors import AdapterError
from mlx_parallm.models.adapters.adapter import ADAPTER_CONFIG
from mlx_parallm.models.published.rope import ROPE_LENGTH


def record_rope_length(directory: Path, config: Mapping[str, Any]) -> None:
    """Write what `config`, of a model or an adapter, has of it into `directory`'s adapter."""
    if (length := config.get(ROPE_LENGTH)) is None:
        return
    file = directory / ADAPTER_CONFIG
    settings = json.loads(file.read_text(encoding="utf-8")) | {ROPE_LENGTH: length}
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def rope_length_of(adapter: Mapping[str, Any], file: Path) -> int | None:
    """Return the length in an adapter's configuration. Raises AdapterError: it is none."""
    length = adapter.get(ROPE_LENGTH)
    if length is not None and (type(length) is not int or length < 1):
        raise AdapterError(f"{file}: {ROPE_LENGTH} = {length!r} is not a number of tokens")
    return length


def check_rope_length(adapter: Mapping[str, Any], file: Path, loaded: int | None) -> None:
    """Raise AdapterError: the adapter was trained with other ropes than the model is loaded
    with."""
    trained = rope_length_of(adapter, file)
    if trained is not None and trained != loaded:
        raise AdapterError(
            f"{file} was trained with model.rope_length = {trained}; here it is"
            f" {'not set' if loaded is None else loaded}"
        )
