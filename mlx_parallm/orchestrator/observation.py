"""`ObservationBuilder`: what the model reads of an episode (text), and what experts read (numbers).

| view | numbers | what |
|---|---|---|
| `physics` | 10 | target, error, landing / 200 m, wind / 10, attempts / 10, zeros: as the expert was trained |
| `schedule` | 3 n + 5 | of each task duration, priority, deadline; then time, share done, late, idle, tasks |
| `arc` | 1805 | two grids of 30 × 30 colours / 9 (-1: outside), then both sizes / 30 and the step / 50 |
| `generic` | 20 | up to 18 numbers of the arguments and the last result, attempts / 10, how many numbers there are |
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_parallm.experts.tasks import projectile_observation

SHOWN_RESULTS, SHOWN_ACTIONS = 5, 3
LONGEST_RESULT = 500  # characters of a result that the model reads in the summary
GRID = 30
GENERIC = 20
ARC_STEPS = 50.0


class ObservationBuilder:
    """Views of an episode. All numbers are float32; a task larger than its view is cut, a smaller one padded."""

    def text(self, prompt: Any, *, step: int, max_steps: int, results: Sequence[str], actions: Sequence[str]) -> str:
        """Return the task, the last 5 results and the last 3 actions, a line each."""
        lines = [as_text(prompt), "", f"Step {step + 1} of at most {max_steps}."]
        if results:
            lines += ["Results so far:", *(f"- {_shortened(result)}" for result in results[-SHOWN_RESULTS:])]
        if actions:
            lines += ["Last actions:", *(f"- {_shortened(action)}" for action in actions[-SHOWN_ACTIONS:])]
        return "\n".join(lines)

    def physics(self, *, target: float, error: float, distance: float, wind: float, attempts: int) -> np.ndarray:
        """Return [10]: the observation of `experts.tasks.ProjectileTask`."""
        return projectile_observation(target, error, distance, wind, attempts)

    def schedule(
        self,
        tasks: Sequence[Mapping[str, float]],
        *,
        count: int = 10,
        time: float = 0.0,
        done: float = 0.0,
        late: float = 0.0,
        idle: float = 0.0,
    ) -> np.ndarray:
        """Return [3 · count + 5]; each of `tasks` has duration, priority and deadline."""
        rows = np.zeros((count, 3), np.float32)
        for row, task in zip(rows, tasks, strict=False):
            row[:] = [task["duration"], task["priority"], task["deadline"]]
        whole = [time, done, late, idle, float(len(tasks))]
        return np.concatenate([rows.reshape(-1), np.asarray(whole, np.float32)])

    def arc(self, shown: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], *, step: int = 0) -> np.ndarray:
        """Return [1805] of two grids of colours 0 to 9. Raises ValueError: a grid larger than 30 × 30, or ragged."""
        parts, sizes = [], []
        for grid in (shown, wanted):
            array = np.asarray(grid, np.float32)
            if array.ndim != 2 or max(array.shape) > GRID:
                raise ValueError(f"a grid has at most {GRID} rows and columns of numbers, not the shape {array.shape}")
            field = np.full((GRID, GRID), -1.0, np.float32)
            field[: array.shape[0], : array.shape[1]] = array / 9
            parts.append(field.reshape(-1))
            sizes += [array.shape[0] / GRID, array.shape[1] / GRID]
        return np.concatenate([*parts, np.asarray([*sizes, step / ARC_STEPS], np.float32)])

    def generic(self, arguments: Mapping[str, Any], result: Any = None, *, attempts: int = 0) -> np.ndarray:
        """Return [20]: the numbers of the arguments and of the last result, in their order."""
        numbers = [*_numbers(arguments), *_numbers(result)][: GENERIC - 2]
        padded = [*numbers, *[0.0] * (GENERIC - 2 - len(numbers)), attempts / 10, float(len(numbers))]
        return np.asarray(padded, np.float32)


def as_text(prompt: Any) -> str:
    """Return a prompt as text: itself, or the contents of its messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):  # True is 1
        yield float(value)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _numbers(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _numbers(entry)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_RESULT else f"{line[:LONGEST_RESULT]} …"
