"""The names under which the engine answers: the base, the policy being trained, adapters. No MLX.

While training, the base's id, its last path component, `default` and the configured names all mean
the policy; the untouched base is `<id>:base`. Otherwise they mean the base. An adapter's name
always means that adapter. A name of the policy followed by `@VERSION` means the policy's adapter as
it was under that version, as long as it is kept.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePath

from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.types import ServedModel

DEFAULT = "default"
BASE_SUFFIX = ":base"


class AdapterUses:
    """Which adapters requests use, and when they did last. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._clock = 0

    def note(self, adapter: str | None) -> None:
        """Note that a request has used an adapter."""
        if adapter is not None:
            with self._lock:
                self._clock += 1
                self._last[adapter] = self._clock

    def forget(self, adapter: str) -> None:
        """Forget an adapter that is no longer served."""
        with self._lock:
            self._last.pop(adapter, None)
            if not self._running[adapter]:
                del self._running[adapter]

    @contextmanager
    def holding(self, adapters: Iterable[str | None]) -> Iterator[None]:
        """Count requests under these adapters as running for the length of the block."""
        names = [adapter for adapter in adapters if adapter is not None]
        with self._lock:
            self._running.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._running.subtract(names)
            for name in names:
                self.note(name)

    def least_recent(self, adapters: Iterable[str]) -> str | None:
        """Return the idle adapter whose last request is the oldest; None: requests run under all
        of them."""
        with self._lock:
            idle = [name for name in adapters if not self._running[name]]
            return min(idle, key=lambda name: self._last.get(name, 0), default=None)


class ServedModels:
    """
    Args:
        base_id: id of the base model as configured (hub id, directory, `builtin:tiny`).
        policy_adapter: name of the adapter being trained, None when there is none.
        trains_base: all weights are being trained: the base is the policy.
        aliases: `server.served_model_names`.
        adapter_versions: present adapters and the policy version under which each was put there.
        version: the present policy version.
        policy_versions: versions that requests can name by number.
        loader: what must be called (in a thread that may wait) before an adapter can be used; None
        = nothing.
        shelved: whether an adapter of that name lies on disk, which `loader` reads;
        `shelved_names`: all of them.
    """

    def __init__(
        self,
        base_id: str,
        *,
        adapter_versions: Callable[[], Mapping[str, int]],
        version: Callable[[], int],
        policy_adapter: str | None = None,
        trains_base: bool = False,
        aliases: tuple[str, ...] = (),
        policy_versions: Callable[[], Sequence[int]] = tuple,
        loader: Callable[[str], Callable[[], object] | None] = lambda adapter: None,
        shelved: Callable[[str], bool] = lambda adapter: False,
        shelved_names: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.loader, self._shelved, self._shelved_names = loader, shelved, shelved_names
        self.uses = AdapterUses()
        self._policy_versions = policy_versions
        self.base_id = base_id
        self._adapter_versions = adapter_versions
        self._version = version
        self._policy_adapter = policy_adapter
        self._trains_base = trains_base
        self._aliases = (
            base_id,
            PurePath(base_id.removeprefix("builtin:")).name,
            DEFAULT,
            *aliases,
        )

    def list(self) -> tuple[ServedModel, ...]:
        """The first is what `default` means."""
        version, base = self._version(), self.base_id
        models = [self._main(version)]
        if self._policy_adapter is not None:
            models.append(ServedModel(base + BASE_SUFFIX, None, base, None, version))
        for name, adapter_version in sorted(self._adapter_versions().items()):
            of_adapter = version if name == self._policy_adapter else adapter_version
            models.append(ServedModel(name, name, base, base, of_adapter))
        return tuple(models)

    def resolve(self, name: str | None) -> ServedModel:
        """The model of a request; None or "" mean the default. Raises ModelNotFoundError with
        what there is."""
        models = self.list()
        for model in models:
            if model.id == name:
                return model
        if not name or name in self._aliases:
            return models[0]
        if self._shelved(name):
            return self._on_shelf(name)
        if "@" in name:
            return self._pinned(name, models)
        raise ModelNotFoundError(name, [*_request_names(models)])

    def shelved(self) -> tuple[ServedModel, ...]:
        """Adapters that lie on disk and are not in the table. Reads the disk."""
        present = self._adapter_versions()
        return tuple(self._on_shelf(name) for name in self._shelved_names() if name not in present)

    def _on_shelf(self, name: str) -> ServedModel:
        return ServedModel(name, name, self.base_id, self.base_id, self._version())

    def taken_by_server(self, name: str) -> bool:
        """Whether no adapter can have this name: it means the base, the policy, a version, or an
        adapter on a shelf."""
        reserved = (*self._aliases, self.base_id + BASE_SUFFIX, self._policy_adapter)
        return name in reserved or "@" in name or "://" in name

    def _pinned(self, name: str, models: tuple[ServedModel, ...]) -> ServedModel:
        requested, _, version = name.rpartition("@")
        policy = models[0]
        versions = {str(each): each for each in self._policy_versions()}
        if requested not in (*self._aliases, "", self._policy_adapter):
            why = "only the policy being trained has versions"
        elif self._trains_base:
            why = "versions are not kept when all weights are trained"
        elif version in versions:
            return replace(
                policy,
                id=name,
                adapter=f"{policy.adapter}@{version}",
                policy_version=versions[version],
            )
        else:
            why = f"available versions: {', '.join(versions) or 'none'}"
        raise ModelNotFoundError(name, [*_request_names(models)], why)

    def _main(self, version: int) -> ServedModel:
        return ServedModel(self.base_id, self._policy_adapter, self.base_id, None, version)


def _request_names(models: Sequence[ServedModel]) -> tuple[str, ...]:
    """Names that a request may use; `default`, which is the first one, is there everywhere."""
    listed = tuple(model.id for model in models)
    return listed if DEFAULT in listed else (*listed, DEFAULT)
