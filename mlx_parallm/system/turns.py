"""Who comes first where the engine and the trainer share one device (`rl_training.serve_priority`). No MLX.

Both submit work as they please. The one that comes second stands back after each piece of work (a decode step, an
evaluation of a few blocks) for as long as that piece took, while the other has something to do. So the first one has
the device to itself about half of the time, nobody waits longer than for its own last piece, and nothing can hang.
"balanced" is between the two: the trainer, whose pieces are the long ones, stands back half as long
(docs/benchmarks/sharing.md).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Priority = Literal["balanced", "serve", "train"]

TRAINER_RESTS = {"balanced": 0.5, "serve": 1.0, "train": 0.0}
"""How long the trainer stands back after an evaluation, as a share of the evaluation's time."""


class Turns:
    """`step` and `engine_idle` are the engine thread's, `training` and `after_evaluation` the trainer's."""

    def __init__(self, priority: Priority = "balanced") -> None:
        self._priority = priority
        self._engine_idle, self._trainer_idle = threading.Event(), threading.Event()
        self._engine_idle.set()
        self._trainer_idle.set()
        self._resumed = perf_counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the engine."""
        self._engine_idle.clear()
        started = perf_counter()
        yield
        if self._priority == "train":
            self._trainer_idle.wait(perf_counter() - started)

    def engine_idle(self) -> None:
        """The engine has nothing to do."""
        self._engine_idle.set()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a training step."""
        self._trainer_idle.clear()
        self._resumed = perf_counter()
        try:
            yield
        finally:
            self._trainer_idle.set()

    def after_evaluation(self) -> None:
        """Between two evaluations of the trainer."""
        if rest := TRAINER_RESTS[self._priority] * (perf_counter() - self._resumed):
            self._engine_idle.wait(rest)
        self._resumed = perf_counter()
