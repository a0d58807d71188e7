"""DrawLog: the draws of a run and the rewards that they brought, one JSON object a line, appended
and never changed. A process that is killed loses none of it, so the next one continues exactly
there.

    {"environment": "questions", "group": 12, "row": "0f3a…"}              the row of a group
    {"environment": "questions", "group": 12, "rewards": [0, 1], "version": 5}   what it earned;
                                       rewards null: it failed, and a new attempt would fail too
"""

import itertools
import json
import math
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_parallm.errors import CheckpointError

DRAWS_FILE = "draws.jsonl"


class DrawLog:
    def __init__(self, path: Path) -> None:
        self.path = path
        # where the lines of each environment begin; None: the file was not read yet
        self._places: dict[str, array[int]] | None = None

    def read(self, environment: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the entries of an environment, without the first `after`. The first time all lines
        are read, and a last one that a kill left unfinished is removed; later only its own are.
        Raises CheckpointError: a damaged line, or the file cannot be read."""
        try:
            if self._places is not None:
                yield from self._read_at(self._places.get(environment, array("q"))[after:])
            elif self.path.exists():
                yield from itertools.islice(self._read_all(environment), after, None)
            else:
                self._places = {}
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error.strerror or error}"
            ) from error

    def _read_all(self, environment: str) -> Iterator[dict[str, Any]]:
        places: dict[str, array[int]] = {}
        place = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    os.truncate(self.path, place)
                    break
                entry = _entry(line, f"{self.path}:{number}")
                places.setdefault(entry["environment"], array("q")).append(place)
                place += len(line)
                if entry["environment"] == environment:
                    yield entry
        self._places = places

    def _read_at(self, places: "array[int]") -> Iterator[dict[str, Any]]:
        if places:
            with self.path.open("rb") as file:
                for place in places:
                    file.seek(place)
                    yield _entry(file.readline(), f"{self.path}, byte {place}")

    def find_places(self) -> None:
        """Read all lines, unless they were read. From then on one thread may `read` while another
        one appends. Raises CheckpointError."""
        if self._places is None:
            for _ in self.read(""):
                pass

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
        if self._places is not None:
            self._places.setdefault(entry["environment"], array("q")).append(before)


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        whole = isinstance(entry["environment"], str) and _is_count(entry["group"])
        if "row" in entry:
            whole &= isinstance(entry["row"], str)
        else:
            rewards, version = entry["rewards"], entry["version"]
            finite = isinstance(rewards, list) and all(map(math.isfinite, rewards))
            whole &= (rewards is None or finite) and (version is None or _is_count(version))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{where}: no draw of a row, and no rewards of one: put the file back from a copy, or"
            " remove it to let the estimates begin anew"
        )
    assert isinstance(entry, dict)
    return entry


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
