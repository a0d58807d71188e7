"""The weights that samples are drawn with: adapters in the engine's table, under names of this API.

    tinker://RUN/sampler_weights/NAME   a named checkpoint; read from disk when it is asked for
    tinker://RUN/live/N                 the weights of one moment; it shares the trainer's arrays, and no copy is made
    tinker://RUN/inflight/weights       the newest weights; each save replaces them, also for samples that run

`kept` sets of each run stay; of more, the one that was not used for the longest time goes, unless a sample uses it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.errors import RefusedError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import check_adapter, load_adapter
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.weights import SharedWeights

INFLIGHT = "inflight/weights"


@dataclass
class _Entry:
    run: str
    users: int = 0


class SamplerWeights:
    """Any thread that may wait.

    Args:
        shapes: (in, out) of the model's linear layers by path.
        kept: sets of each run.
    """

    def __init__(self, weights: SharedWeights, shapes: Mapping[str, tuple[int, int]], kept: int) -> None:
        self._weights, self._shapes, self._kept = weights, shapes, kept
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def put(self, name: str, run: str, layers: Mapping[str, LoraPair]) -> None:
        """Serve evaluated layers under a name, or replace those that it has."""
        with self._lock:
            self._weights.add_adapter(name, layers)
            self._entries.setdefault(name, _Entry(run))
            self._entries.move_to_end(name)
            self._shrink(run)

    def load(self, name: str, run: str, directory: Path) -> None:
        """Read a named checkpoint unless it is there. Raises AdapterError."""
        if name in self._entries:
            return

        def read() -> None:
            layers = load_adapter(directory).layers
            check_adapter(self._shapes, layers, name)
            self.put(name, run, layers)

        in_mlx_thread(read)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Around a sample. Raises RefusedError, 410: the weights are gone."""
        if name is None:  # the base
            yield
            return
        with self._lock:
            if name not in self._entries:
                raise RefusedError(
                    f"the sampling client's weights ({name}) are no longer in memory: tinker.kept_samplers ="
                    f" {self._kept} sets of a model are kept; make a new sampling client, or save the weights by name",
                    410,
                )
            self._entries[name].users += 1
            self._entries.move_to_end(name)
        try:
            yield
        finally:
            with self._lock:
                if name in self._entries:
                    self._entries[name].users -= 1

    def drop(self, name: str) -> None:
        """Forget a name, whose checkpoint was deleted or overwritten; running samples go on."""
        with self._lock:
            if self._entries.pop(name, None) is not None:
                self._weights.remove_adapter(name)

    def drop_run(self, run: str) -> None:
        """Forget the live weights of a run whose client is gone."""
        with self._lock:
            own = [name for name, entry in self._entries.items() if entry.run == run]
        for name in own:
            self.drop(name)

    def _shrink(self, run: str) -> None:
        own = [name for name, entry in self._entries.items() if entry.run == run]
        for name in own[: max(len(own) - self._kept, 0)]:
            if not self._entries[name].users and not name.endswith(INFLIGHT):
                del self._entries[name]
                self._weights.remove_adapter(name)
