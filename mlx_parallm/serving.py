"""The serving half of a daemon: socket, HTTP thread, model, weights, engine thread. Used by `daemon` for both commands.

Serving(config)        binds the port (a taken one fails before anything else is done)
  .listen(routers)     HTTP answers, /health says 503 while loading
  .load()              the base model, evaluated in this thread
  .open(…)             engine thread; every route answers
  .close()             HTTP drains, the engine ends, threads are joined
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlx_parallm.config.load import Config
from mlx_parallm.engine.adapter_loader import AdapterLoader
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.engine.starting import start_engine
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import EngineUnavailableError, ModelError
from mlx_parallm.integrations.atropos.source import EmbeddedQueue
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import (
    LoadedModel,
    load_model,
    load_tokenizer,
    read_config,
    resolve_model_path,
    vocabulary_size,
)
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.sources import RewardsById, RolloutSource
from mlx_parallm.server.app import create_app
from mlx_parallm.server.auth import check_bind, check_origins
from mlx_parallm.server.context import RollbackAPI, ServerDeps, ServerState
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.system.turns import Turns
from mlx_parallm.weights import PublishReport, SharedWeights

LAST_WORDS_S = 0.1  # after the drain: what has been computed is sent


class Serving:
    """Single use; every method is called from the main thread. Raises ConfigError: the port, the key."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.api_key = config.resolve_api_key()
        check_bind(config.server.host, self.api_key)
        check_origins(config.server.cors_origins, self.api_key)
        self._listener = bind_socket(config.server.host, config.server.port)
        self.port: int = self._listener.getsockname()[1]
        self.state = ServerState()
        self.turns = Turns(config.rl_training.serve_priority)
        self._http: ServerThread | None = None
        self._engine: EngineThread | None = None
        self._path: Path | None = None

    @property
    def url(self) -> str:
        host = self.config.server.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}"

    @property
    def model_path(self) -> Path:
        """The base's local directory; a hub id is downloaded at the first access. Raises ModelError."""
        if self._path is None:
            self._path = resolve_model_path(self.config.model.base_path, self.config.model.revision)
        return self._path

    @property
    def vocab_size(self) -> int:
        """From the base's config.json, before anything is loaded."""
        return vocabulary_size(read_config(self.model_path))

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None

    @property
    def client(self) -> EngineClient:
        assert self._engine is not None, "open() comes first"
        return self._engine.client

    def listen(
        self,
        sources: Iterable[RolloutSource] = (),
        rollbacks: RollbackAPI | None = None,
    ) -> None:
        """Starts HTTP with the routes of these sources of rollouts, and of rollbacks where something is trained."""
        sources = list(sources)
        routers = [source.router for source in sources if isinstance(source, EmbeddedQueue)]
        completions = next((source.completions for source in sources if isinstance(source, RewardsById)), None)
        deps = ServerDeps(
            state=self.state,
            config=self.config.server,
            api_key=self.api_key,
            chat_template_kwargs=self.config.model.chat_template_kwargs,
            completions=completions,
            rollbacks=rollbacks,
        )
        self._http = ServerThread(create_app(deps, routers), self._listener)
        self._http.start()

    def load(self, *, quantize: bool = False) -> LoadedModel:
        """Loads the base. Raises ModelError; /health says so too."""
        try:
            return load_model(self.config.model, quantize=quantize)
        except ModelError as error:
            self.state.failed(str(error))
            raise

    def tokenizer(self) -> Tokenizer:
        """A tokenizer for one thread."""
        return load_tokenizer(self.model_path, self.config.model)

    def open(
        self,
        loaded: LoadedModel,
        weights: SharedWeights,
        *,
        adapters: Mapping[str, Mapping[str, LoraPair]],
        main_adapter: str | None,
        trains_base: bool = False,
        adapter_roots: Sequence[Path] = (),
    ) -> None:
        """Starts the engine on the loaded tree and lets every route answer.

        Args:
            weights: made from the tree before this call wraps it.
            adapters: name → layers, served beside the base. Raises AdapterError when one does not fit.
            main_adapter: the adapter that the base's id and `default` mean; None = the base itself.
            adapter_roots: beside server.adapter_roots.
        """
        engine = start_engine(
            self.config,
            loaded,
            weights,
            self.tokenizer,
            adapters=adapters,
            main_adapter=main_adapter,
            trains_base=trains_base,
            turns=self.turns,
        )
        self._engine = engine.thread
        roots = (*self.config.server.adapter_roots, *adapter_roots)
        loader = AdapterLoader(weights, engine.shapes, engine.names, roots)
        self.state.ready(self.client, self.tokenizer(), loader)

    def observe_publish(self, report: PublishReport) -> None:
        """Count a publish of weights in /metrics."""
        self.state.metrics.observe_publish(report.total_ms / 1e3)

    def check(self) -> None:
        """Raises EngineUnavailableError when the engine thread has died: nothing will be answered any more."""
        stats = self.client.stats()
        if not stats.alive:
            raise EngineUnavailableError(stats.error or "the engine thread has ended")

    def close(self) -> None:
        """Drains HTTP, then ends the engine. May be called at any point, and again."""
        try:
            if self._http is not None:
                deadline = time.monotonic() + self.config.server.drain_timeout_s
                self.state.drain(self.config.server.drain_timeout_s)
                self._http.stop(max(deadline - time.monotonic(), LAST_WORDS_S))
            self._listener.close()
        finally:
            if self._engine is not None:
                self._engine.stop()
