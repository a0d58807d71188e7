"""`spans.jsonl`: the run's work over time, in lanes: `{"name", "step", "begin", "end"}`, Unix
seconds. No MLX.

Names are those of OpenTelemetry's proposal for RL (semantic-conventions-genai #88) if it has
one: `rl.sample`, `rl.reward`, `rl.train`, `rl.sync`; ours are `rl.wait`, `rl.checkpoint`,
`rl.evaluate`. Sampling and scoring overlap, group by group: of a step they are written as the times
in which any group was sampled, or scored. One further line of each step, `{"name": "versions",
"step", "tokens"}`, has how many of its tokens each policy version sampled.

Nothing needs this file: a failure here costs one warning and never the run.
"""

import json
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from mlx_parallm.errors import CheckpointError
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Rollout

SPANS_FILE = "spans.jsonl"
NAMES = {
    "wait": "rl.wait",
    "train": "rl.train",
    "publish": "rl.sync",
    "checkpoint": "rl.checkpoint",
    "evaluate": "rl.evaluate",
}
MOST_PARTS = 16
"""Most spans of a lane in a step: the shortest pauses are filled until there are so few."""

NEAR_BYTES, NEAR_LINES = 32 << 10, 100
"""How far from its place a line of spans.jsonl may lie: an evaluation ends in a later step."""
NO_STEP = 1 << 62

Times = tuple[float, float]  # begin, end
log = get_logger("train")


class SpanLog:
    """Writes the spans of a step when it is finished. `add` may be called from any thread.

    Args:
        step: the one that a resumed run continues from; spans of later steps are removed.
        most_bytes: of the file; the oldest half goes when it is reached.
    """

    def __init__(self, run: Path, *, step: int = 0, most_bytes: int = sys.maxsize) -> None:
        self._path, self._most = run / SPANS_FILE, most_bytes
        self._step: int | None = step  # None: a resume removes later lines
        self._lock = threading.Lock()  # guards the next one
        self._overlapping: defaultdict[str, list[Times]] = defaultdict(list)
        self._lines: list[str] = []

    def add(self, name: str, times: Times) -> None:
        """Take the time of one group: `name` is rl.sample or rl.reward."""
        with self._lock:
            self._overlapping[name].append(times)

    def ended(self, name: str, step: int, times: Times) -> None:
        """Take the time of a part of a step: `name` is a key of NAMES."""
        self._lines.append(_line(NAMES[name], step, times))

    def finish(self, step: int, rollouts: Iterable[Rollout]) -> None:
        """Write the spans of a step that was trained on these rollouts."""
        with self._lock:
            groups, self._overlapping = self._overlapping, defaultdict(list)
        self._lines += [
            _line(name, step, times) for name in groups for times in merged(groups[name])
        ]
        sampled = Counter[int]()
        for rollout in rollouts:
            if rollout.policy_versions is not None:
                sampled.update(compress(rollout.policy_versions, rollout.mask))
        if sampled:
            self._lines.append(
                json.dumps({"name": "versions", "step": step, "tokens": dict(sampled)}) + "\n"
            )
        self.flush()

    def flush(self) -> None:
        """Write the spans since the last step: after a run, its last checkpoint and
        evaluation. Failed writes (a full disk, a removed directory) are left
        out: a run does not end for its times."""
        lines, self._lines = self._lines, []
        try:
            self._append(lines)
        except OSError as error:
            log.warning("spans are not written", lines=len(lines), reason=str(error))

    def _append(self, lines: list[str]) -> None:
        if self._step is not None and lines:
            try:
                MetricsFile(self._path).cut(self._step)
            # after a power cut: earlier spans are of little worth
            except CheckpointError as error:
                log.warning("spans of earlier steps are set aside", reason=str(error))
                self._path.replace(self._path.with_suffix(".damaged"))
            self._step = None
        if lines:
            text = "".join(lines).encode()
            if self._path.exists() and self._path.stat().st_size + len(text) > self._most:
                self._forget(self._most // 2)
            with self._path.open("ab") as file:
                file.write(text)

    def _forget(self, kept: int) -> None:
        """Keep whole lines in the last `kept` bytes."""
        with self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - kept))
            file.readline()
            write_atomically(self._path, file.read())


def merged(times: Sequence[Times]) -> list[Times]:
    """Return the union of overlapping times, in order, as at most MOST_PARTS parts."""
    parts: list[Times] = []
    for begin, end in sorted(times):
        if parts and begin <= parts[-1][1]:
            parts[-1] = (parts[-1][0], max(parts[-1][1], end))
        else:
            parts.append((begin, end))
    if len(parts) <= MOST_PARTS:
        return parts
    pauses = sorted(parts[place + 1][0] - parts[place][1] for place in range(len(parts) - 1))
    filled = pauses[len(parts) - MOST_PARTS - 1]
    joined = parts[:1]
    for begin, end in parts[1:]:
        if begin - joined[-1][1] <= filled:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _line(name: str, step: int, times: Times) -> str:
    begin, end = (round(time, 4) for time in times)
    return json.dumps({"name": name, "step": step, "begin": begin, "end": end}) + "\n"


def _step_of(text: bytes) -> int:
    """The step of a line; NO_STEP: it is damaged, or not whole."""
    try:
        return int(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):
        return NO_STEP


def lines_of_steps(path: Path, first: int, last: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of these steps from a file in which steps rise, but for an evaluation's
    few: by halves to the first one, from a little before it."""
    with path.open("rb") as file:
        low, high = 0, file.seek(0, 2)
        while high - low > NEAR_BYTES:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline()
            text = file.readline()
            low, high = (middle, high) if _step_of(text) < first else (low, middle)
        file.seek(max(0, low - NEAR_BYTES))
        if file.tell():
            file.readline()
        beyond = 0
        for text in file:
            if not text.endswith(b"\n") or beyond > NEAR_LINES:
                return
            step = _step_of(text)
            if first <= step <= last:
                yield json.loads(text)
            beyond += last < step < NO_STEP
