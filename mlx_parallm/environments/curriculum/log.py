"""DrawLog: the draws of a run and the rewards that they brought, one JSON object a line, appended
and never changed. A process that is killed loses none of it, so the next one continues exactly
there.

    {"environment": "questions", "group": 12, "row": "0f3a…"}              the row of a group
    {"environment": "questions", "group": 12, "rewards": [0, 1], "version": 5}   what it earned;
                                       rewards null: it failed, and a new attempt would fail too
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_parallm.errors import CheckpointError

DRAWS_FILE = "draws.jsonl"


class DrawLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the entry of each line, and remove a last one that a kill left unfinished.
        Raises CheckpointError: a damaged line, or the file cannot be read."""
        if not self.path.exists():
            return
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        os.truncate(self.path, file.tell() - len(line))
                        return
                    yield _entry(line, f"{self.path}:{number}")
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error.strerror or error}"
            ) from error

    def append(self, entry: dict[str, Any]) -> None:
        """Write one line; one that is only half written is removed. Raises CheckpointError."""
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, before)
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror or error}"
            ) from error


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        whole = isinstance(entry["environment"], str) and isinstance(entry["group"], int)
        if "row" in entry:
            whole &= isinstance(entry["row"], str)
        else:
            rewards, version = entry["rewards"], entry["version"]
            whole &= rewards is None or all(map(math.isfinite, rewards))
            whole &= version is None or isinstance(version, int)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{where}: no draw of a row, and no rewards of one: put the file back from a copy, or"
            " remove it to let the estimates begin anew"
        )
    assert isinstance(entry, dict)
    return entry
