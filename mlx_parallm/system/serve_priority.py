"""Priority of the engine and the trainer on one device (`rl_training.serve_priority`). No MLX.

Both submit work at any time. While the other one has work, the one with the lower priority rests
after each piece (a decode step, an evaluation of a few blocks) for the time that the piece took. So
the other one has the device alone about half of the time, no rest is longer than the last piece,
and nothing can hang. With "balanced" the trainer, whose pieces are longer, rests half as long
(docs/benchmarks/serving.md#serving-while-training). With "chat" it does so too, and while the
engine answers a chat (engine/lanes.py) it rests until that has ended, at most `REST` times as
long as the piece took.

They also share the device's faults: one of either ends both. And a supervisor hears of each piece.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from mlx_parallm.system.device.faults import DeviceFaults
from mlx_parallm.system.device.heartbeat import ENGINE, TRAINER, WRITER, Heartbeat

Priority = Literal["balanced", "serve", "train", "chat"]

REST = 30.0
"""Times its last piece that others rest for chats: 3 of 100 gaps between tokens are longer."""
TRAINER_RESTS = {"balanced": 0.5, "serve": 1.0, "train": 0.0, "chat": 0.5}
"""The trainer's rest after an evaluation, as a share of the evaluation's time."""


class Turns:
    """The engine thread calls `step`, `chats` and `engine_idle`, the trainer `training`,
    `after_evaluation`, `publishing` and `writing`. `faults`: the device's, for both."""

    def __init__(self, priority: Priority = "balanced") -> None:
        self._priority = priority
        self._engine_idle, self._trainer_idle = threading.Event(), threading.Event()
        self._no_chat = threading.Event()
        for event in (self._engine_idle, self._trainer_idle, self._no_chat):
            event.set()
        self._resumed = perf_counter()
        self.faults = DeviceFaults()
        self._engine_beat, self._trainer_beat = Heartbeat(ENGINE), Heartbeat(TRAINER)
        self._writer_beat = Heartbeat(WRITER)

    @property
    def engine_rests(self) -> bool:
        """True while the engine rests after each of its steps: then none may run during a rest."""
        return self._priority == "train" and not self._trainer_idle.is_set()

    @property
    def trains(self) -> bool:
        """True while a training step is under way."""
        return not self._trainer_idle.is_set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose a step of the engine."""
        self._engine_idle.clear()
        self._engine_beat.beat()
        started = perf_counter()
        yield
        if self._priority == "train":
            self._trainer_idle.wait(perf_counter() - started)

    def engine_works(self) -> None:
        """Note that the engine carries out a command."""
        self._engine_beat.beat()

    def chats(self, served: bool) -> None:
        """Note whether the engine answers a chat for which the trainer rests."""
        (self._no_chat.clear if served else self._no_chat.set)()

    def engine_idle(self) -> None:
        """Note that the engine has no work."""
        self._engine_beat.rest()
        self._engine_idle.set()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enclose a training step."""
        self._trainer_idle.clear()
        self._trainer_beat.beat()
        self._resumed = perf_counter()
        try:
            yield
        finally:
            self._trainer_beat.rest()
            self._trainer_idle.set()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Enclose what the trainer does between a step and the next."""
        self._trainer_beat.beat()
        try:
            yield
        finally:
            self._trainer_beat.rest()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Enclose the writing of a checkpoint, during which the trainer computes nothing."""
        self._trainer_beat.rest()
        self._writer_beat.beat()
        try:
            yield
        finally:
            self._writer_beat.rest()

    def after_evaluation(self) -> None:
        """Rest between two evaluations of the trainer, if the priority wants it. Raises
        DeviceFaultError: the engine has met a fault of the device."""
        self.faults.check()
        self._trainer_beat.beat()
        took = perf_counter() - self._resumed
        if rest := TRAINER_RESTS[self._priority] * took:
            self._engine_idle.wait(rest)
        self._no_chat.wait(REST * took)
        self._resumed = perf_counter()
