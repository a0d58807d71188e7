"""Adapters that come and go while the server runs. Any thread that may wait; not the engine's, not
the HTTP loop's.

server/api/adapters.py ──thread──► AdapterLoader ──► SharedWeights ──► the engine's next step
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.errors import AdapterError, RefusedError
from mlx_parallm.models.adapters.rope_length import check_rope_length
from mlx_parallm.models.lora import ADAPTER_CONFIG, find_adapter_file, fit_adapter, load_adapter
from mlx_parallm.system.log import get_logger
from mlx_parallm.weights import SharedWeights

LONGEST_NAME = 256


class AdapterLoader:
    """
    Args:
        shapes: (in, out) of the model's linear layers by path.
        names: which names are the server's own.
        roots: directories that adapters may be read from.
        most: adapters loaded at the same time; each keeps its arrays in memory.
        rope_length: model.rope_length.
    """

    def __init__(
        self,
        weights: SharedWeights,
        shapes: Mapping[str, tuple[int, ...]],
        names: ServedModels,
        roots: Sequence[Path],
        most: int,
        *,
        rope_length: int | None = None,
    ) -> None:
        self._most, self._rope_length = most, rope_length
        self._weights, self._shapes, self._names = weights, shapes, names
        self._roots = [Path(os.path.realpath(root.expanduser())) for root in roots]
        self._paths: dict[str, Path] = {}  # name → file it was loaded from
        self._busy: set[str] = set()  # names being loaded or unloaded
        self._free = threading.Condition()

    def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Adds an adapter, or replaces the one of that name; running requests continue under the
        new one. One too many takes the place of the one that was not used for the longest time.

        Args:
            in_place: replace a name that is taken; without it only if `path` is the file it came
                from.

        Raises RefusedError; the adapters there were are as they were.
        """
        self._check_name(name)
        source = self._within_roots(path)
        with self._alone(name):
            if (
                name in self._weights.adapters()
                and not in_place
                and self._paths.get(name) != source
            ):
                message = (
                    f"The lora adapter {name!r} has already been loaded;"
                    " load_inplace = true replaces it"
                )
                raise RefusedError(message, 400, "lora_name")
            try:
                file = find_adapter_file(source)
            except (AdapterError, OSError) as error:
                raise RefusedError(str(error), 404, "lora_path") from error
            for each in (file, file.parent / ADAPTER_CONFIG):
                self._within_roots(str(each))  # a link inside of the directory may lead out of it
            try:
                self._weights.in_loader(lambda: self._add(name, file, source))
            except AdapterError as error:
                raise RefusedError(str(error), 400, "lora_path") from error

    def unload(self, name: str) -> None:
        """Remove a name; running requests keep the weights that they began with. Raises
        RefusedError."""
        self._check_name(name)
        with self._alone(name):
            try:
                self._weights.remove_adapter(name)
            except AdapterError as error:
                raise RefusedError(
                    f"The lora adapter {name!r} cannot be found", 404, "lora_name"
                ) from error
            self._paths.pop(name, None)

    def _add(self, name: str, file: Path, source: Path) -> None:
        adapter = load_adapter(file)
        check_rope_length(adapter.config, adapter.path, self._rope_length)
        layers = fit_adapter(self._shapes, adapter.layers, name)
        before = self._paths.get(name)
        self._take_place(name, source)
        try:
            self._weights.add_adapter(name, layers)
        except AdapterError:
            with self._free:
                self._paths.pop(name) if before is None else self._paths.update({name: before})
            raise

    def _take_place(self, name: str, source: Path) -> None:
        """Counts the adapter before it is there, so that several at once do not exceed the
        bound; unloads those that were not used for the longest time. Raises RefusedError: all of
        them are in use."""
        with self._free:
            while name not in self._paths and len(self._paths) >= self._most:
                idle = self._names.uses.least_recent(
                    each for each in self._paths if each not in self._busy
                )
                if idle is None:
                    reason = (
                        f"{self._most} adapters are loaded and in use"
                        " (server.max_loaded_adapters): unload one first"
                    )
                    raise RefusedError(reason, 400, "lora_name")
                self._weights.remove_adapter(idle)
                del self._paths[idle]
                get_logger(__name__).info("adapter_evicted", name=idle, for_name=name)
            self._paths[name] = source

    def _check_name(self, name: str) -> None:
        if not self._roots:
            raise RefusedError(
                "loading adapters into a running server is off: server.adapter_roots names the"
                " directories that they may be loaded from",
                403,
            )
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            message = f"an adapter's name has 1 to {LONGEST_NAME} printable characters"
            raise RefusedError(message, 400, "lora_name")
        if self._names.taken_by_server(name):
            raise RefusedError(
                f"an adapter cannot be named {name!r} here: that is the server's",
                400,
                "lora_name",
            )

    def _within_roots(self, path: str) -> Path:
        """The path without links and `..`."""
        try:
            real = Path(os.path.realpath(path))
        except (OSError, ValueError) as error:
            raise RefusedError(f"{path!r} is not a path: {error}", 400, "lora_path") from error
        if not any(real.is_relative_to(root) for root in self._roots):
            raise RefusedError(
                f"{path!r} is in none of the directories of server.adapter_roots",
                403,
                "lora_path",
            )
        return real

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One at a time for a name; other names do not wait."""
        with self._free:
            self._free.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            with self._free:
                self._busy.remove(name)
                self._free.notify_all()
