"""SharedWeights: what the trainer publishes and the engine reads, behind one read-write lock.

    engine thread    with shared.read() as view: …build the graph of one step…   (read side, a few hundred µs)
    trainer thread   shared.publish_adapter(layers)                               (evaluates first, then the write side)

Under the write lock references are rebound and nothing else; no array is copied. A graph that is already built keeps
the arrays that it was built with, so the engine need not hold the lock while it is evaluated (docs/design.md).
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.errors import AdapterError, PublishTimeoutError
from mlx_parallm.models.lora import AdapterWeights, LoraPair


@dataclass(frozen=True)
class PublishReport:
    """`version` is the new policy version. Times in ms; `total_ms` includes the evaluation before the lock."""

    version: int
    lock_wait_ms: float
    lock_held_ms: float
    total_ms: float


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @contextmanager
    def read(self) -> Iterator[None]:
        with self._condition:
            while self._writing or self._writers_waiting:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def write(self, timeout_s: float | None = None) -> Iterator[None]:
        """Raises PublishTimeoutError when the readers have not left in time."""
        with self._condition:
            self._writers_waiting += 1
            try:
                if not self._condition.wait_for(lambda: not (self._writing or self._readers), timeout_s):
                    raise PublishTimeoutError(f"the weight lock was not had within {1000 * (timeout_s or 0):.0f} ms")
                self._writing = True
            finally:
                self._writers_waiting -= 1
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()


@dataclass(frozen=True)
class WeightsView:
    """What a reader sees while it holds the read side."""

    policy_version: int
    adapters: Mapping[str, AdapterWeights]


class SharedWeights:
    """The serving tree's weights: base arrays, adapters by name, and the policy's version.

    Args:
        model: the serving tree *before* `prepare_for_serving` wraps it (its parameter slots are noted here).
        policy: name of the adapter being trained, or None when all weights are (or nothing is).
        version: the first policy version.
    """

    def __init__(self, model: nn.Module, *, policy: str | None = None, version: int = 0) -> None:
        self.policy = policy
        self.lock = ReadWriteLock()
        self._slots = parameter_slots(model)
        self._adapters: dict[str, AdapterWeights] = {}
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    @contextmanager
    def read(self) -> Iterator[WeightsView]:
        with self.lock.read():
            yield WeightsView(self._version, self._adapters)

    def adapters(self) -> dict[str, AdapterWeights]:
        return dict(self._adapters)

    def add_adapter(self, name: str, layers: Mapping[str, LoraPair]) -> AdapterWeights:
        """Adds or replaces an adapter under the present policy version. Raises AdapterError: the policy's own name."""
        if name == self.policy and name in self._adapters:
            raise AdapterError(f"{name!r} is the policy being trained: its adapter is replaced by training only")
        adapter = AdapterWeights(name, self._version, dict(layers))
        mx.eval(adapter.arrays)
        with self.lock.write():
            self._adapters = {**self._adapters, name: adapter}
        return adapter

    def remove_adapter(self, name: str) -> None:
        """Raises AdapterError: unknown, or the policy's own."""
        if name == self.policy:
            raise AdapterError(f"{name!r} is the policy being trained: it cannot be removed")
        if name not in self._adapters:
            raise AdapterError(f"no adapter {name!r}")
        with self.lock.write():
            self._adapters = {key: value for key, value in self._adapters.items() if key != name}

    def publish_adapter(self, layers: Mapping[str, LoraPair], *, timeout_s: float | None = None) -> PublishReport:
        """Makes `layers` the policy's adapter under the next version. PublishTimeoutError: nothing changed."""
        assert self.policy is not None, "SharedWeights was made without a policy adapter"
        version = self._version + 1
        adapter = AdapterWeights(self.policy, version, dict(layers))
        policy = self.policy

        def rebind() -> None:
            self._adapters = {**self._adapters, policy: adapter}
            self._version = version

        return self._publish(adapter.arrays, rebind, version, timeout_s)

    def publish_parameters(
        self, parameters: Mapping[str, mx.array], *, timeout_s: float | None = None
    ) -> PublishReport:
        """Rebinds base parameters by path (full-weight training) under the next version. Raises PublishTimeoutError."""
        version = self._version + 1
        bindings = [(*self._slots[path], array) for path, array in parameters.items()]

        def rebind() -> None:
            for module, key, array in bindings:
                module[key] = array
            self._version = version

        return self._publish(list(parameters.values()), rebind, version, timeout_s)

    def _publish(self, arrays: list[mx.array], rebind: Any, version: int, timeout_s: float | None) -> PublishReport:
        started = time.perf_counter()
        mx.eval(arrays)
        asked = time.perf_counter()
        with self.lock.write(timeout_s):
            entered = time.perf_counter()
            rebind()
            left = time.perf_counter()
        return PublishReport(
            version, 1e3 * (entered - asked), 1e3 * (left - entered), 1e3 * (time.perf_counter() - started)
        )


def parameter_slots(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter lives: path → (module, key). Taken before wrapping, so that paths are the checkpoint's."""
    return {
        f"{path}.{key}" if path else key: (module, key)
        for path, module in model.named_modules()
        for key, value in module.items()
        if isinstance(value, mx.array) and not key.startswith("_")
    }
