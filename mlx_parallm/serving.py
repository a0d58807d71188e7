"""The serving half of a daemon: socket, HTTP thread, model, weights, engine thread. Used by `daemon` for both commands.

Serving(config)        binds the port (a taken one fails before anything else is done)
  .listen(routers)     HTTP answers, /health says 503 while loading
  .load()              the base model, evaluated in this thread
  .open(…)             engine thread; every route answers
  .close()             HTTP drains, the engine ends, threads are joined
"""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastapi import APIRouter

from mlx_parallm.config import Config
from mlx_parallm.engine.adapter_loader import AdapterLoader
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.engine.engine import Engine, EngineOptions
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import ConfigError, EngineUnavailableError, ModelError
from mlx_parallm.hardware import kv_cache_bytes, prefix_cache_bytes
from mlx_parallm.models.fast_math import use_fast_rope, use_fast_swiglu
from mlx_parallm.models.loading import (
    LoadedModel,
    load_model,
    load_tokenizer,
    read_config,
    resolve_model_path,
    vocabulary_size,
)
from mlx_parallm.models.lora import LoraPair, check_adapter, linear_shapes, prepare_for_serving
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rollout_store.completions import KeptCompletions
from mlx_parallm.server.app import create_app
from mlx_parallm.server.auth import check_bind, check_origins
from mlx_parallm.server.context import ServerDeps, ServerState
from mlx_parallm.server.routes_training import RollbackDesk
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.turns import Turns
from mlx_parallm.weights import SharedWeights

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
    def client(self) -> EngineClient:
        assert self._engine is not None, "open() comes first"
        return self._engine.client

    def listen(
        self,
        routers: Sequence[APIRouter] = (),
        completions: KeptCompletions | None = None,
        rollbacks: RollbackDesk | None = None,
    ) -> None:
        server = self.config.server
        deps = ServerDeps(
            state=self.state,
            api_key=self.api_key,
            chat_template_kwargs=self.config.model.chat_template_kwargs,
            max_concurrent_requests=server.max_concurrent_requests,
            request_timeout_s=server.request_timeout_s,
            cors_origins=server.cors_origins,
            logprobs_mode=server.logprobs_mode,
            extra_routers=routers,
            completions=completions,
            rollbacks=rollbacks,
        )
        self._http = ServerThread(create_app(deps), self._listener)
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
        shapes = linear_shapes(loaded.model)
        for name, layers in adapters.items():
            check_adapter(shapes, layers, name)
            weights.add_adapter(name, layers)
        names = ServedModels(
            self.config.model.base_path,
            adapter_versions=lambda: {name: adapter.version for name, adapter in weights.adapters().items()},
            version=lambda: weights.version,
            policy_adapter=main_adapter,
            trains_base=trains_base,
            aliases=self.config.server.served_model_names,
            policy_versions=weights.history.versions,
            loader=weights.loader,
        )
        options = self._engine_options(loaded)
        use_fast_swiglu(loaded.model)
        use_fast_rope(loaded.model)
        lora = prepare_for_serving(loaded.model)
        tokenizer = self.tokenizer()
        self._engine = EngineThread(lambda: Engine(loaded.model, tokenizer, weights, lora, options), names, self.turns)
        self._engine.start()
        roots = (*self.config.server.adapter_roots, *adapter_roots)
        self.state.ready(self.client, self.tokenizer(), AdapterLoader(weights, shapes, names, roots))

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

    def _engine_options(self, loaded: LoadedModel) -> EngineOptions:
        server, own = self.config.server, loaded.max_model_len
        deterministic = self.config.rl_training.deterministic
        if server.max_model_len is not None and server.max_model_len > own:
            raise ConfigError(f"server.max_model_len = {server.max_model_len}, but the model's context is {own} tokens")
        return EngineOptions(
            max_model_len=server.max_model_len or own,
            vocab_size=loaded.vocab_size,
            max_rows=server.batch_size,
            prefill_chunk=server.prefill_chunk,
            kv_cache_bytes=kv_cache_bytes(server, deterministic=deterministic),
            prefix_cache_bytes=prefix_cache_bytes(server, deterministic=deterministic),
            default_max_tokens=server.default_max_tokens,
            seed=random.SystemRandom().getrandbits(63),
            processed_alternatives=server.logprobs_mode == "processed",
            architecture=str(loaded.config.get("model_type", "this model")),
        )
