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
LIVE = "live/"


@dataclass
class _Entry:
    run: str
    users: int = 0


class SamplerWeights:
    """Any thread that may wait.

    Args:
        shapes: (in, out) of the model's linear layers by path.
        kept: sets of each run.
        total: sets of all runs.
    """

    def __init__(self, weights: SharedWeights, shapes: Mapping[str, tuple[int, int]], kept: int, total: int) -> None:
        self._weights, self._shapes, self._kept, self._total = weights, shapes, kept, total
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._changing = threading.Lock()  # held while arrays are computed and weights change
        self._lock = threading.Lock()  # of the entries: the server's event loop takes it, so it is held for moments

    def put(self, name: str, run: str, layers: Mapping[str, LoraPair]) -> None:
        """Serve evaluated layers under a name, or replace those that it has."""
        with self._changing:
            self._weights.add_adapter(name, layers)
            with self._lock:
                self._entries.setdefault(name, _Entry(run))
                self._entries.move_to_end(name)
                gone = self._too_many(run)
                for each in gone:
                    del self._entries[each]
            for each in gone:
                self._weights.remove_adapter(each)

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
        with self._changing:
            with self._lock:
                entry = self._entries.pop(name, None)
            if entry is not None:
                self._weights.remove_adapter(name)

    def drop_run(self, run: str) -> None:
        """Forget the live weights of a run whose client is gone; named ones are served on."""
        live = (f"tinker://{run}/{LIVE}", f"tinker://{run}/{INFLIGHT}")
        with self._lock:
            own = [name for name in self._entries if name.startswith(live)]
        for name in own:
            self.drop(name)

    def _too_many(self, run: str) -> list[str]:
        own = [name for name, entry in self._entries.items() if entry.run == run]
        oldest = own[: max(len(own) - self._kept, 0)]
        if not oldest:
            oldest = list(self._entries)[: max(len(self._entries) - self._total, 0)]
        return [name for name in oldest if not self._entries[name].users and not name.endswith(INFLIGHT)]
