"""SharedWeights: what the trainer publishes and the engine reads, behind one read-write lock.

    engine thread    with shared.read() as view: …build a step's graph…      read side, some 100 µs
    trainer thread   shared.publish_adapter(layers)          evaluates first, then write side

Under the write lock references are rebound and nothing else; no array is copied. A graph that is
already built keeps the arrays that it was built with, so the engine need not hold the lock while it
is evaluated (docs/design.md).
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.errors import AdapterError, PublishTimeoutError
from mlx_parallm.models.adapters.adapter import AdapterSlot, AdapterWeights, LoraPair
from mlx_parallm.models.adapters.linear import gain
from mlx_parallm.models.adapters.served import TURNED
from mlx_parallm.models.lora import linear_layers
from mlx_parallm.models.sums import NEW_ZEROS, raise_stored_faults, zeros_of
from mlx_parallm.models.threads import in_loader_thread
from mlx_parallm.system.device.faults import DeviceFaults, wrong_numbers
from mlx_parallm.system.device.traits import may_lose_results

T = TypeVar("T")


@dataclass(frozen=True)
class PublishReport:
    """`version` is the new policy version. Times in ms; `total_ms` includes the evaluation
    before the lock."""

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
                if not self._condition.wait_for(
                    lambda: not (self._writing or self._readers), timeout_s
                ):
                    raise PublishTimeoutError(
                        f"could not get the weight lock within {1000 * (timeout_s or 0):.0f} ms"
                    )
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
    """Versions and adapters under the read lock."""

    policy_version: int
    revision: int  # counts changes of any of the weights
    base_serial: int  # counts changes of the base's arrays
    adapters: Mapping[str, AdapterWeights]


class VersionArchive(Protocol):
    """Versions of the policy that lie on disk. Called by any thread."""

    def versions(self) -> Sequence[int]: ...

    def load(self, version: int) -> Mapping[str, LoraPair]:
        """Evaluated arrays. Raises AdapterError: it is not there (any more)."""


class AdapterShelf(Protocol):
    """Adapters that lie on disk under their own names: the first request for one puts it into
    the table."""

    def holds(self, name: str) -> bool:
        """Return whether an adapter of that name lies on disk. Any thread; quick."""

    def names(self) -> Sequence[str]:
        """Return the names of the adapters. May read the disk."""

    def load(self, name: str) -> object:
        """Put it into the table, in a thread that may wait. Raises ModelNotFoundError: it is
        gone, or does not fit."""


class PolicyHistory:
    """Versions of the policy's adapter that can still be asked for: the last `keep` in memory,
    archived ones from disk, of which as many again stay loaded."""

    def __init__(
        self,
        policy: str | None,
        keep: int,
        archive: VersionArchive | None,
        ready: Callable[[Mapping[str, LoraPair]], dict[str, LoraPair]] = dict,
    ) -> None:
        self._policy, self._limit, self._archive, self._ready = policy, keep, archive, ready
        self._kept: dict[int, AdapterSlot] = {}  # rebound, never changed: read without a lock
        self._loaded: dict[int, AdapterSlot] = {}
        self._held: dict[int, AdapterSlot] = {}
        self._holders: dict[int, int] = {}  # how many hold a version
        self._holding = threading.Lock()
        self._loading = threading.Lock()

    def keep(self, adapter: AdapterWeights) -> None:
        """Note what is published; the newest counts as one of `keep`."""
        self._kept = _last({**self._kept, adapter.version: self._slot(adapter)}, self._limit)

    def versions(self) -> list[int]:
        return sorted(
            {*self._kept, *self._held, *(self._archive.versions() if self._archive else ())}
        )

    def in_memory(self, version: int) -> AdapterSlot | None:
        return self._kept.get(version) or self._loaded.get(version) or self._held.get(version)

    def hold(self, version: int) -> None:
        """Keep a version in memory, however many follow it, until `release` was called as often.
        Raises AdapterError: not found."""
        slot = self.find(version)
        if slot is None:
            raise AdapterError(f"version {version} is not kept; there are {self.versions()}")
        with self._holding:
            self._holders[version] = self._holders.get(version, 0) + 1
            self._held = {**self._held, version: slot}

    def release(self, version: int) -> None:
        with self._holding:
            left = self._holders.pop(version, 0) - 1
            if left > 0:
                self._holders[version] = left
                return
            self._held = {each: slot for each, slot in self._held.items() if each != version}

    def find(self, version: int) -> AdapterSlot | None:
        """Find a version in memory or on disk, or None."""
        if slot := self.in_memory(version):
            return slot
        with self._loading:
            if version not in self._loaded:
                try:
                    if self._archive is None or version not in self._archive.versions():
                        return None
                    layers = self._ready(self._archive.load(version))
                    slot = self._slot(AdapterWeights(self._policy or "", version, layers))
                except AdapterError:  # removed meanwhile
                    return None
                self._loaded = _last({**self._loaded, version: slot}, self._limit)
            return self._loaded.get(version)

    @property
    def serials(self) -> set[int]:
        """Serials of all versions in memory."""
        return {
            slot.weights.serial
            for slot in (*self._kept.values(), *self._loaded.values(), *self._held.values())
        }

    def _slot(self, adapter: AdapterWeights) -> AdapterSlot:
        return AdapterSlot(f"{self._policy}@{adapter.version}", adapter, pinned=True)


class SharedWeights:
    """The serving tree's weights: base arrays, adapters by name, and the policy's version.

    Args:
        model: the serving tree *before* `prepare_for_serving` wraps it (its parameter slots are
            noted here).
        policy: name of the adapter being trained, or None when all weights are (or nothing is).
        version: the first policy version.
        keep_versions: newest versions of the policy's adapter that stay in memory; each costs its
            arrays' bytes.
        archive: older ones.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: str | None = None,
        version: int = 0,
        keep_versions: int,
        archive: VersionArchive | None = None,
    ) -> None:
        self.policy = policy
        self.lock = ReadWriteLock()
        self.shelf: AdapterShelf | None = None
        self.faults = DeviceFaults()  # after a fault of the device no new weights are served
        self.history = PolicyHistory(policy, keep_versions, archive, self._ready)
        self._model = model
        self._parameters = parameter_slots(model)
        self._slots: dict[str, AdapterSlot] = {}
        self._content_of: Callable[[Mapping[str, LoraPair]], str] | None = None
        self._proof = WeightsProof()
        self._version = version
        self._revision = 0
        self._base_serial = 0

    @property
    def version(self) -> int:
        return self._version

    @contextmanager
    def read(self) -> Iterator[WeightsView]:
        with self.lock.read():
            yield WeightsView(self._version, self._revision, self._base_serial, self.adapters())

    def adapters(self) -> dict[str, AdapterWeights]:
        return {name: slot.weights for name, slot in self._slots.items()}

    def find(self, name: str) -> AdapterSlot | None:
        """The slot of a name, or of POLICY@VERSION, which may be read from disk."""
        version = self._version_of(name)
        return self._slots.get(name) if version is None else self.history.find(version)

    def loader(self, name: str) -> Callable[[], object] | None:
        """Return the call that reads the version, or the adapter of the shelf, from disk, for a
        thread that may wait; None = nothing to read."""
        version, shelf = self._version_of(name), self.shelf
        # in the table too: it may be on its way out
        if version is None and shelf is not None and shelf.holds(name):
            return lambda: shelf.load(name)
        if version is None or self.history.in_memory(version):
            return None
        return lambda: self.in_loader(lambda: self.history.find(version))

    def in_loader(self, function: Callable[[], T]) -> T:
        """Run `function` in the loader's thread (`in_loader_thread`). Raises DeviceFaultError: the
        device has failed, there or elsewhere, which counts for all threads."""
        with self.faults.watched():
            return in_loader_thread(function)

    def add_adapter(self, name: str, layers: Mapping[str, LoraPair]) -> AdapterWeights:
        """Add or replace an adapter under the present policy version. Raises AdapterError: the
        policy's own name."""
        if name == self.policy and name in self._slots:
            raise AdapterError(
                f"{name!r} is the policy being trained: its adapter is replaced by training only"
            )
        adapter = AdapterWeights(name, self._version, self._ready(layers))
        mx.eval(adapter.arrays)
        raise_stored_faults()
        if self._content_of is not None:
            adapter = replace(adapter, content=self._content_of(adapter.layers))
        with self.lock.write():
            self.faults.check()
            self._put(adapter)
        return adapter

    def note_contents(self, content_of: Callable[[Mapping[str, LoraPair]], str]) -> None:
        """Note of each adapter that is added, as it is loaded, what stands for its arrays; of those
        that are here at once."""
        with self.lock.write():
            self._content_of = content_of
            for slot in self._slots.values():
                content = slot.weights.content or content_of(slot.weights.layers)
                slot.weights = replace(slot.weights, content=content)

    def remove_adapter(self, name: str) -> None:
        """Raises AdapterError: unknown, or the policy's own."""
        if name == self.policy:
            raise AdapterError(f"{name!r} is the policy being trained: it cannot be removed")
        if name not in self._slots:
            raise AdapterError(f"no adapter {name!r}")
        with self.lock.write():
            self._slots = {key: slot for key, slot in self._slots.items() if key != name}
            self._revision += 1

    def publish_adapter(
        self,
        layers: Mapping[str, LoraPair],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        again: Callable[[], Mapping[str, LoraPair]] | None = None,
    ) -> PublishReport:
        """Make `layers` the policy's adapter under `version`, a higher number than before (the
        next one).

        Args:
            again: makes the layers anew. With it, numbers that have become 0 are computed again.

        Raises PublishTimeoutError: nothing changed. DeviceFaultError: these are not the weights
        that training made.
        """
        assert self.policy is not None, "SharedWeights was made without a policy adapter"
        number = self._next(version)
        adapter = AdapterWeights(self.policy, number, self._ready(layers))
        slot = self._slots.get(self.policy)

        def rebind() -> None:
            self._put(adapter)
            self._version = number

        served = {} if slot is None else _numbered(slot.weights.arrays)

        def recomputed() -> dict[str, mx.array]:
            assert again is not None and self.policy is not None
            return _numbered(AdapterWeights(self.policy, number, self._ready(again())).arrays)

        check = _Check(served, recomputed if again else None)
        return self._publish(_numbered(adapter.arrays), check, rebind, number, timeout_s)

    def publish_parameters(
        self,
        parameters: Mapping[str, mx.array],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        again: Callable[[], Mapping[str, mx.array]] | None = None,
    ) -> PublishReport:
        """Rebind base parameters by path (full-weight training), as `publish_adapter`. Raises
        PublishTimeoutError, DeviceFaultError."""
        number = self._next(version)
        bindings = [(*self._parameters[path], array) for path, array in parameters.items()]
        adapters = self._over(parameters)

        def rebind() -> None:
            for module, key, array in bindings:
                module[key] = array
                module.pop(TURNED, None)  # it holds the old weight
            for slot, before, adapter in adapters:
                if slot.weights is before:
                    slot.weights = adapter
            self._version = number
            self._base_serial += 1
            self._revision += 1

        def recomputed() -> dict[str, mx.array]:
            assert again is not None
            made = again()
            return _with_gains(made, self._over(made))

        served = {path: self._parameters[path][0][self._parameters[path][1]] for path in parameters}
        check = _Check(served, recomputed if again else None)
        return self._publish(_with_gains(parameters, adapters), check, rebind, number, timeout_s)

    def _ready(self, layers: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
        """Add the missing gains of DoRA layers, over the base as it is now; one layer after the
        other."""
        made = dict(layers)
        linear = (
            linear_layers(self._model)
            if any(pair.magnitude is not None for pair in made.values())
            else {}
        )
        for path, pair in layers.items():
            if pair.magnitude is not None and pair.gain is None:
                factor = gain(linear[path], pair.a, pair.b, pair.scale, pair.magnitude)
                mx.eval(factor)
                made[path] = replace(pair, gain=factor)
        return made

    def _over(self, parameters: Mapping[str, mx.array]) -> "_Updated":
        """The DoRA adapters that are served, as they are and with their gains over these arrays
        of the base. Lazy."""

        def layer(path: str, linear: nn.Module) -> nn.Linear:
            made = nn.Linear(1, 1, bias="bias" in linear)
            for key in made:
                made[key] = parameters.get(f"{path}.{key}", linear[key])
            return made

        updates = []
        for slot in self._slots.values():
            doras = {
                path: pair
                for path, pair in slot.weights.layers.items()
                if pair.magnitude is not None
            }
            linear = linear_layers(self._model) if doras else {}
            made = dict(slot.weights.layers)
            for path, pair in doras.items():
                assert pair.magnitude is not None
                factor = gain(layer(path, linear[path]), pair.a, pair.b, pair.scale, pair.magnitude)
                made[path] = replace(pair, gain=factor)
            if doras:
                updates.append(
                    (slot, slot.weights, AdapterWeights(slot.name, slot.weights.version, made))
                )
        return updates

    def _next(self, version: int | None) -> int:
        number = self._version + 1 if version is None else version
        assert number > self._version, "policy versions count upwards"
        return number

    def _put(self, adapter: AdapterWeights) -> None:
        """Put an adapter into its slot, under the write lock. Requests that hold the slot continue
        with the new arrays."""
        slot = self._slots.get(adapter.name)
        if slot is None:
            self._slots = {**self._slots, adapter.name: AdapterSlot(adapter.name, adapter)}
        else:
            slot.weights = adapter
        if adapter.name == self.policy:
            self.history.keep(adapter)
        self._revision += 1

    def _version_of(self, name: str) -> int | None:
        """Return VERSION of POLICY@VERSION; None for other names."""
        policy, separator, version = name.rpartition("@")
        return int(version) if separator and policy == self.policy and version.isdecimal() else None

    def _publish(
        self,
        arrays: dict[str, mx.array],
        check: "_Check",
        rebind: Any,
        version: int,
        timeout_s: float | None,
    ) -> PublishReport:
        started = time.perf_counter()
        mx.eval(list(arrays.values()))
        raise_stored_faults()
        zeros = self._proof.check(arrays, check.served, check.again) if may_lose_results() else {}
        evaluated = time.perf_counter()
        with self.lock.write(timeout_s):
            entered = time.perf_counter()
            self.faults.check()
            rebind()
            self._proof.note(zeros)
            left = time.perf_counter()
        return PublishReport(
            version,
            1e3 * (entered - evaluated),
            1e3 * (left - entered),
            1e3 * (time.perf_counter() - started),
        )


@dataclass(frozen=True)
class _Check:
    """Hold the references of new weights: the served ones, and the same computed again."""

    served: dict[str, mx.array]
    again: Callable[[], dict[str, mx.array]] | None


class WeightsProof:
    """Whether weights may be served, by what was served before. One thread's.

    Zeros that are new may be right: Lion's steps are all of one length and take a weight back to
    where it began, AdaLoRA takes ranks away, a rollback goes to a B of zeros. So they are computed
    again, and where that gives other numbers the device has failed.
    """

    def __init__(self) -> None:
        self._zeros: dict[str, int] = {}  # number of zeros in each served array

    def check(
        self,
        new: dict[str, mx.array],
        old: dict[str, mx.array],
        again: Callable[[], dict[str, mx.array]] | None,
    ) -> dict[str, int]:
        """Return the zeros of each of the new arrays, for `note`.

        Args:
            again: computes the new arrays again; None: zeros in them are taken for the truth.

        Raises DeviceFaultError: zeros are where the old arrays have none, and are not when they
        are computed again.
        """
        zeros = zeros_of(new)
        if again is None:
            return zeros
        if grown := [name for name, count in zeros.items() if count > new[name].size // NEW_ZEROS]:
            before = {name: old[name] for name in grown if name in old and name not in self._zeros}
            counts = self._zeros | zeros_of(before)
            bounds = {name: new[name].size // NEW_ZEROS for name in grown}
            odd = [n for n in grown if zeros[n] > counts.get(n, new[n].size) + bounds[n]]
            right = zeros_of(again()) if odd else {}
            for name in odd:
                if zeros[name] > right[name] + bounds[name]:
                    raise wrong_numbers(
                        f"{name} has {zeros[name]} zeros of {new[name].size} numbers, and"
                        f" {right[name]} when it is computed again"
                    )
        return zeros

    def note(self, zeros: dict[str, int]) -> None:
        """Note that the weights with these zeros are served now."""
        self._zeros = zeros


_Updated = list[tuple[AdapterSlot, AdapterWeights, AdapterWeights]]


def _with_gains(parameters: Mapping[str, mx.array], updated: _Updated) -> dict[str, mx.array]:
    return dict(parameters) | _numbered([a for _, _, each in updated for a in each.arrays])


def _numbered(arrays: Sequence[mx.array]) -> dict[str, mx.array]:
    return {f"array {number} of the adapter": array for number, array in enumerate(arrays)}


def _last(slots: dict[int, AdapterSlot], count: int) -> dict[int, AdapterSlot]:
    return dict(list(slots.items())[max(len(slots) - count, 0) :])


def parameter_slots(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Map each parameter's path to (module, key). Taken before wrapping, so that paths are the
    checkpoint's."""
    return {
        f"{path}.{key}" if path else key: (module, key)
        for path, module in model.named_modules()
        for key, value in module.items()
        if isinstance(value, mx.array) and not key.startswith("_")
    }
