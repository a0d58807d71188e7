"""The weights that samples are drawn with: adapters in the engine's table, under names of this API.

    tinker://RUN/sampler_weights/NAME   a named checkpoint; read from disk when it is asked for, by
                                        /v1 too
    tinker://RUN/live/N                 the weights of one moment; it shares the trainer's arrays,
                                        and no copy is made
    tinker://RUN/inflight/weights       the newest weights; each save replaces them, also for
                                        samples that run

`kept` sets of each run stay; of more, the one that was not used for the longest time goes, unless a
request uses it.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mlx_parallm.engine.served_models import AdapterUses
from mlx_parallm.errors import AdapterError, ModelNotFoundError, RefusedError, RequestError
from mlx_parallm.faces.tinker.checkpoints import SAMPLER, SCHEME, Checkpoints, read_path
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import fit_adapter, load_adapter
from mlx_parallm.weights import SharedWeights

INFLIGHT = "inflight/weights"
LIVE = "live/"


class SamplerWeights:
    """Any thread that may wait.

    Args:
        shapes: `linear_shapes` of the model.
        uses: which adapters the engine's requests use, those of /v1 too.
        kept: sets of each run.
        total: sets of all runs.
    """

    def __init__(
        self,
        weights: SharedWeights,
        shapes: Mapping[str, tuple[int, ...]],
        uses: AdapterUses,
        kept: int,
        total: int,
    ) -> None:
        self._weights, self._shapes, self._uses, self._kept, self._total = (
            weights,
            shapes,
            uses,
            kept,
            total,
        )
        self._runs: dict[str, str] = {}  # name → run
        self._turns: dict[str, threading.Lock] = {}  # names that are read now
        self._changing = threading.Lock()  # held while arrays are computed and weights change
        # guards the names; held briefly, because the event loop takes it
        self._lock = threading.Lock()

    def put(self, name: str, run: str, layers: Mapping[str, LoraPair]) -> None:
        """Serve evaluated layers under a name, or replace those that it has."""
        with self._changing:
            self._weights.add_adapter(name, layers)
            self._uses.note(name)
            with self._lock:
                self._runs[name] = run
                gone = self._too_many(name)
                for each in gone:
                    del self._runs[each]
            for each in gone:
                self._remove(each)

    def load(self, name: str, run: str, directory: Path) -> None:
        """Read a named checkpoint unless it is there. Raises AdapterError."""
        with self._lock:  # a name that is on its way out is not there any more
            if name in self._runs:
                return
            turn = self._turns.setdefault(name, threading.Lock())

        def read() -> None:
            layers = load_adapter(directory).layers
            self.put(name, run, fit_adapter(self._shapes, layers, name))

        with turn:
            try:
                if name not in self._runs:  # no other thread has read it meanwhile
                    self._weights.in_loader(read)
            finally:
                with self._lock:
                    self._turns.pop(name, None)

    def check(self, name: str | None) -> None:
        """Raises RefusedError, 410: the weights are gone."""
        with self._lock:
            in_memory = name is None or name in self._runs  # None: the base
        if not in_memory:
            raise RefusedError(
                f"the sampling client's weights ({name}) are no longer in memory:"
                " tinker.kept_samplers ="
                f" {self._kept} sets of a model are kept; make a new sampling client, or save the"
                " weights by name",
                410,
            )

    def drop(self, name: str) -> None:
        """Forget a name, whose checkpoint was deleted or overwritten; running samples continue."""
        with self._changing:
            with self._lock:
                run = self._runs.pop(name, None)
            if run is not None:
                self._remove(name)

    def drop_run(self, run: str) -> None:
        """Forget the live weights of a run whose client is gone; named ones are served on."""
        live = (f"tinker://{run}/{LIVE}", f"tinker://{run}/{INFLIGHT}")
        with self._lock:
            live_names = [name for name in self._runs if name.startswith(live)]
        for name in live_names:
            self.drop(name)

    def _remove(self, name: str) -> None:
        with suppress(AdapterError):  # it was removed meanwhile
            self._weights.remove_adapter(name)
        self._uses.forget(name)

    def _too_many(self, put: str) -> list[str]:
        run_names = [name for name, run in self._runs.items() if run == self._runs[put]]
        names, most = (
            (run_names, self._kept)
            if len(run_names) > self._kept
            else (list(self._runs), self._total)
        )
        gone: list[str] = []
        while len(names) - len(gone) > most:
            idle = (
                name
                for name in names
                if name != put and name not in gone and not name.endswith(INFLIGHT)
            )
            oldest = self._uses.least_recent(idle)
            if oldest is None:
                break
            gone.append(oldest)
        return gone


class SamplerShelf:
    """Named sampler checkpoints, for requests of /v1 that name one: a `weights.AdapterShelf`. Any
    thread.

    Args:
        names: of the base: a checkpoint of another one does not fit.
    """

    def __init__(
        self, checkpoints: Checkpoints, samplers: SamplerWeights, names: Sequence[str]
    ) -> None:
        self._checkpoints, self._samplers, self._names = checkpoints, samplers, names

    def holds(self, name: str) -> bool:
        if not name.startswith(SCHEME):
            return False
        try:
            path = read_path(name)
            return path.kind == SAMPLER and self._checkpoints.exists(path)
        except RequestError:
            return False

    def names(self) -> list[str]:
        """Newest run first."""
        runs = [run.run_id for run in self._checkpoints.runs() if run.base_model in self._names]
        checkpoints = (
            checkpoint for run in runs for checkpoint in self._checkpoints.list(run, SAMPLER)
        )
        return [str(checkpoint.path) for checkpoint in checkpoints]

    def load(self, name: str) -> None:
        """Raises ModelNotFoundError."""
        path = read_path(name)
        checkpoint, run = self._checkpoints.find(path), self._checkpoints.run(path.run)
        if checkpoint is None:
            self._samplers.drop(name)
            raise ModelNotFoundError(
                name, self.names(), "the checkpoint was deleted, or its time is over"
            )
        if run is not None and run.base_model not in self._names:
            raise ModelNotFoundError(
                name, self.names(), f"it was trained on the base model {run.base_model!r}"
            )
        try:
            self._samplers.load(name, path.run, checkpoint.directory)
        except AdapterError as error:
            raise ModelNotFoundError(name, self.names(), str(error)) from error
