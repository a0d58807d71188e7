"""The composition root of `mlx_parallm train` and `mlx_parallm serve`: builds the parts, starts and
stops the threads.

    main thread     trains (or waits), ends everything
    http            uvicorn and its asyncio loop            Serving, server/
    engine          the serving model and its KV cache      Serving, engine/
    environments    in-process environments                 rl_training/sources.py
    trackers        W&B, TensorBoard, trackio               rl_training/monitor/trackers.py
    shutdown        sigwait                                 system/signals.py

    supervisor      with --restarts, its own process   cli/supervisor.py

`rl_training/run/` builds the trainer's half around a `Serving`, the serving half:

Serving(config)        binds the port (a taken one fails before anything else is done)
  .listen(sources)     HTTP answers, /health says 503 while loading
  .load()              the base model, evaluated in this thread
  .open(…)             engine thread; every route answers
  .close()             HTTP drains, the engine ends, threads are joined
"""

import contextlib
import gc
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from mlx_parallm.config.data import DATA_ALGORITHMS
from mlx_parallm.config.leaves import client_trainer, imported, leaves
from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.distributed.follower import follow
from mlx_parallm.distributed.ranks import join
from mlx_parallm.engine.adapter_loader import AdapterLoader
from mlx_parallm.engine.client import EngineAdmission, EngineClient
from mlx_parallm.engine.served_models import DEFAULT
from mlx_parallm.engine.starting import start_engine
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import (
    EXIT_AGAIN,
    ConfigError,
    DeviceFaultError,
    EngineUnavailableError,
    MemoryShortError,
    ModelError,
)
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.rope_length import check_rope_length
from mlx_parallm.models.loaded_images import ImageSupport, image_support, with_images
from mlx_parallm.models.loading import (
    LoadedModel,
    check_model,
    load_model,
    load_tokenizer,
    read_config,
    resolve_model_path,
    vocabulary_size,
)
from mlx_parallm.models.lora import ADAPTER_FILE, PEFT_FILE, SPECIFICATION_FILE, load_adapter
from mlx_parallm.models.published.generation_config import sampling_defaults
from mlx_parallm.models.scoring.reward_model import RewardScorer
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.rl_training.dry_run import DryRun
from mlx_parallm.rl_training.monitor.trackers import check_installed
from mlx_parallm.rl_training.run.prepare import PreparedRun
from mlx_parallm.rl_training.sources import InProcessEnvironments, RewardsById, RolloutSource
from mlx_parallm.rl_training.step.ranks import ALONE, Ranks
from mlx_parallm.rl_training.train import TrainingRun
from mlx_parallm.server.app import AddedRouter, create_app
from mlx_parallm.server.auth import check_bind, check_origins
from mlx_parallm.server.connection_limits import connection_limit
from mlx_parallm.server.context import RollbackAPI, ServerDeps, ServerState
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.system.blas import blas_status, share_blas_between
from mlx_parallm.system.device.faults import DeviceFaults, device_fault
from mlx_parallm.system.device.heartbeat import PAUSED
from mlx_parallm.system.files import is_directory, local_path, raise_file_limit
from mlx_parallm.system.footprint import MemoryGuard
from mlx_parallm.system.hardware import launched_rank, memory_use, usable_cores
from mlx_parallm.system.log import RunLog, configure_logging, get_logger
from mlx_parallm.system.power import kept_awake
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.system.signals import END_S, EndLimit, Shutdown
from mlx_parallm.system.terminal import Console
from mlx_parallm.weights import PublishReport, SharedWeights

log = get_logger("daemon")

INTERRUPTED = 130
ENGINE_CHECK_S = 1.0  # a server whose engine is dead ends this soon
COMPUTING_THREADS = 2  # a training daemon's: engine and trainer

Page = Callable[[Path | Callable[[], Sequence[Path]], Redactor, RunCommands | None], AddedRouter]
"""The hook `page` of a leaf: its routes for the run that this process trains, on which people
may order the commands; or for runs that come and go, whose directories the call returns, the
newest first."""


class ServedPart(Protocol):
    """A part of `mlx_parallm serve` that works with the model itself: routes, and the objects
    behind them."""

    @property
    def router(self) -> AddedRouter: ...

    def loaded(self, base: LoadedModel, turns: Turns) -> None:
        """Take the base, before its tree is wrapped for serving."""

    def opened(self, weights: SharedWeights, engine: EngineClient) -> None:
        """Answer from now on."""

    def close(self) -> None:
        """Stop everything that was started."""

    def run_directories(self) -> Sequence[Path]:
        """Return the directories of the newest runs that the part has made, the newest first."""


def _pages(
    runs: Path | Callable[[], Sequence[Path]],
    redactor: Redactor,
    commands: RunCommands | None = None,
) -> list[AddedRouter]:
    hooks: list[Page] = [imported(leaf.page) for leaf in leaves() if leaf.page is not None]
    return [page(runs, redactor, commands) for page in hooks]


def run_server(config: Config, adapters: Mapping[str, str]) -> int:
    """Serve until a signal. Return the exit code.

    Args:
        adapters: name → path, beside `model.lora_path`.

    Raises EngineUnavailableError: the engine thread has died; MemoryShortError.
    """
    with _begin(config.logging.level, config.redactor()) as shutdown:
        shutdown.limit_s = config.server.drain_timeout_s + END_S
        serving, parts = Serving(config, stop=shutdown.stop), list[ServedPart]()

        def close() -> None:
            serving.close()
            for part in parts:
                part.close()

        with _ended(close, serving.turns.faults, shutdown.limit_s):
            with shutdown.interrupts():
                _load_and_answer(serving, adapters, parts)
            while not shutdown.stop.wait(ENGINE_CHECK_S):
                serving.check()
            log.info("stopping")
        serving.check_memory()
    return 0


@contextlib.contextmanager
def _ended(close: Callable[[], None], faults: DeviceFaults, limit_s: float) -> Iterator[None]:
    """Close everything the block has started. After a device fault a close may fail or block
    for it: that is not to hide the fault, nor to take longer than the limit. One that comes when
    the block has ended comes too late to harm."""
    try:
        yield
    except BaseException as error:
        if faults.note(error) is None:
            with mlx_thread():
                close()
            raise
        EndLimit(EXIT_AGAIN).start(limit_s)
        with contextlib.suppress(Exception):
            close()
        if isinstance(error, DeviceFaultError):
            raise
        faults.check()
    try:
        with mlx_thread():
            close()
    except Exception as error:
        if (fault := device_fault(error)) is None:
            raise
        log.warning("the GPU has failed at the end, when everything was done", fault=fault.text)


def _load_and_answer(
    serving: "Serving", adapters: Mapping[str, str], parts: list[ServedPart]
) -> None:
    """Load everything and open `serving`, with the parts that work with its model, which are added
    to `parts`."""
    config = serving.config
    hooks = [imported(leaf.part) for leaf in leaves() if leaf.part is not None]
    parts += [part for make in hooks if (part := make(config)) is not None]
    if parts:
        share_blas_between(COMPUTING_THREADS, usable_cores())
    main_adapter, layers = _adapters_to_serve(
        config.model, adapters, config.server.served_model_names
    )
    check_model(config.model, train=False, quantize=config.rl_training.lora.quantize_base)
    added = [part.router for part in parts]
    if parts:
        added += _pages(
            lambda: [run for part in parts for run in part.run_directories()],
            config.redactor(),
        )
    serving.listen(routers=added)
    loaded = serving.load(quantize=config.rl_training.lora.quantize_base)
    weights = SharedWeights(loaded.model, keep_versions=1)
    for part in parts:
        part.loaded(loaded, serving.turns)
    serving.open(loaded, weights, adapters=layers, main_adapter=main_adapter)
    for part in parts:
        part.opened(weights, serving.client)
    gc.collect()
    gc.freeze()
    models = [model.id for model in serving.client.models()]
    pages = serving.page_urls(with_key=False)
    seen = {"pages": pages} if pages else {}
    log.info("serving", url=f"{serving.url}/v1", models=models, **seen)


def run_training(config: Config, *, resume: str | None) -> int:
    """Serve and train until `total_steps` or a signal. Return the exit code."""
    if (leaf := client_trainer(config.model_dump())) is not None:
        raise ConfigError(
            f"{leaf.name}.{leaf.clients_train} = true is for `mlx_parallm serve`: there clients"
            " train, here the"
            " configuration does"
        )
    with RunLog(config.redactor()) as run_log:
        begin = _begin(config.logging.level, run_log.redactor, run_log)
        with begin as shutdown, contextlib.closing(join()) as ranks, kept_awake():
            stop = shutdown.stop
            _share_cores(config.rl_training.algorithm, usable_cores() // ranks.here)
            if ranks.rank > 0:
                with mlx_thread():
                    follow(
                        config.model,
                        ranks,
                        stop,
                        partial(Serving, http=False, processes=ranks.here, stop=stop),
                    )
                return 0
            limit_s = config.server.drain_timeout_s + END_S
            # other ranks wait for this one, and are asked to stop as well
            interrupts = partial(shutdown.interrupts, limit_s)
            loads = interrupts if ranks.size == 1 else contextlib.nullcontext
            with loads():
                run = training_run(
                    config,
                    pages=True,
                    resume=resume,
                    stop=stop,
                    console=Console(stderr=True),
                    run_log=run_log,
                    ranks=ranks,
                )
            paused = False
            with _ended(run.close, run.prepared.serving.turns.faults, limit_s):
                paused = run.execute(loads)
    return PAUSED if paused else 0


def training_run(
    config: Config,
    *,
    stop: threading.Event,
    http: bool = True,
    pages: bool = False,
    ranks: Ranks = ALONE,
    **options: Any,
) -> TrainingRun:
    """Make a run that is served by this process and may use every kind of source. `http`,
    `pages`: as in `Serving`. Further arguments: `PreparedRun`."""
    serve = partial(
        Serving,
        http=http,
        pages=pages,
        processes=ranks.here,
        clients_engine=ranks.clients_engine,
        stop=stop,
    )
    sources = [imported(leaf.source) for leaf in leaves() if leaf.source is not None]
    kinds = (InProcessEnvironments.of, RewardsById, *sources)
    prepared = PreparedRun(
        config, stop=stop, serve=serve, source_kinds=kinds, ranks=ranks, **options
    )
    return TrainingRun(prepared)


def _share_cores(algorithm: str, cores: int) -> None:
    """Give the engine and the trainer a share each; the trainer of data has all of them, since the
    engine has little to do."""
    share_blas_between(1 if algorithm in DATA_ALGORITHMS else COMPUTING_THREADS, cores)


def run_dry_run(config: Config) -> int:
    """A start and a few steps in a directory that is thrown away: shows samples and what the run
    will need."""
    if launched_rank() is not None:
        raise ConfigError("--dry-run measures one process: start it without mlx.launch")
    check_installed(config.logging)  # the probe has no trackers
    # only the dry run prints
    scratch = tempfile.TemporaryDirectory(prefix="mlx_parallm_dry_run_")
    with _begin("warning", config.redactor()) as shutdown, scratch as name:
        shutdown.limit_s = config.server.drain_timeout_s + END_S
        stop = shutdown.stop
        _share_cores(config.rl_training.algorithm, usable_cores())
        run = DryRun(config, training_run, scratch=Path(name), stop=stop, console=Console())
        try:
            run.execute()
        finally:
            with mlx_thread():
                run.close()
        return INTERRUPTED if stop.is_set() else 0


def _begin(level: str, redactor: Redactor, run_log: RunLog | None = None) -> Shutdown:
    """Set up logging, warn of a slow BLAS, and return what a shutdown signal does."""
    # a full garbage collection over all imports would stop all threads for 0.15 s
    gc.freeze()
    configure_logging(level=level, redactor=redactor, run_log=run_log)
    if advice := blas_status().advice:
        log.warning(
            "matrix products will be 10 to 60 times slower than they could be",
            blas=blas_status().name,
            fix=advice,
        )
    stopping = "stopping in order; a second signal exits at once"
    return Shutdown(lambda name: log.info(stopping, signal=name))


def _adapters_to_serve(
    model: ModelConfig, named: Mapping[str, str], aliases: Sequence[str]
) -> tuple[str | None, dict[str, Mapping[str, LoraPair]]]:
    """Return the main adapter's name and every adapter's layers. Raises AdapterError,
    ConfigError: a name is taken."""
    paths = dict(named)
    main_adapter = None
    if model.lora_path is not None:
        main_adapter = _adapter_name(model.lora_path)
        if main_adapter in paths:
            raise ConfigError(f"two adapters are named {main_adapter!r}: give both as name=path")
        paths[main_adapter] = model.lora_path
    for name in paths:
        if name in (DEFAULT, model.base_path, *aliases) or "@" in name:
            raise ConfigError(
                f"an adapter cannot be named {name!r}: that means the"
                " served model, or a version of it"
            )
    read = {name: load_adapter(path) for name, path in paths.items()}
    for adapter in read.values():
        check_rope_length(adapter.config, adapter.path, model.rope_length)
    return main_adapter, {name: adapter.layers for name, adapter in read.items()}


def _adapter_name(path: str) -> str:
    """An adapter's directory names it; a file of an unusual name names itself."""
    file = local_path(path).absolute()
    if is_directory(file):
        return file.resolve().name
    return (
        file.parent.name
        if file.name in (ADAPTER_FILE, PEFT_FILE, SPECIFICATION_FILE)
        else file.stem
    )


LAST_WORDS_S = 0.1  # to send the last answers after the drain


class Serving:
    """Single use; every method is called from one thread. Raises ConfigError: the port, the key.

    Args:
        http: false: no port is taken, and only this process can use the engine.
        pages: true: the leaves that show a run in a browser show this one.
        processes: share this machine's memory.
        clients_engine: the engine that answers clients. None: this process's engine.
        stop: set where memory runs out, so that the process saves and ends (`check_memory`).
    """

    def __init__(
        self,
        config: Config,
        *,
        http: bool = True,
        pages: bool = False,
        processes: int = 1,
        clients_engine: Callable[[EngineClient], EngineClient] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.config, self._processes, self._clients_engine = config, processes, clients_engine
        self._pages, self._trains = pages, False
        self._page_paths: list[str] = []
        self._added: list[AddedRouter] = []
        self.api_key = config.resolve_api_key()
        self._listener: socket.socket | None = None
        if http:
            check_bind(config.server.host, self.api_key)
            check_origins(config.server.cors_origins, self.api_key)
            self._listener = bind_socket(config.server.host, config.server.port)
        self.port: int = self._listener.getsockname()[1] if self._listener is not None else 0
        self.state = ServerState()
        self.turns = Turns(config.rl_training.serve_priority)
        self._http: ServerThread | None = None
        self._engine: EngineThread | None = None
        self._stop = stop or threading.Event()
        self._guard: MemoryGuard | None = None
        self._weights: SharedWeights | None = None
        self._path: Path | None = None
        # the base, once it is loaded, for a reward model that has the same one
        self._base: Future[LoadedModel | None] = Future()
        self._scorer: RewardScorer | None = None
        if http and config.server.reward_model is not None:
            self._scorer = RewardScorer(config.server.reward_model, self._base.result)
            self._scorer.faults = self.turns.faults

    @property
    def url(self) -> str:
        """The server's URL, without /v1; empty without HTTP."""
        if self._listener is None:
            return ""
        host = self.config.server.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}"

    def page_urls(self, *, with_key: bool) -> list[str]:
        """Return the addresses that show the run in a browser. `with_key`: the key is in the
        fragment, which a browser does not send."""
        key = (
            f"#key={quote(self.api_key, safe='')}" if with_key and self.api_key is not None else ""
        )
        return [f"{self.url}{path}{key}" for path in self._page_paths]

    @property
    def model_path(self) -> Path:
        """The base's local directory; a hub id is downloaded at the first access. Raises
        ModelError."""
        if self._path is None:
            self._path = resolve_model_path(
                self.config.model.base_path,
                self.config.model.revision,
                dtype=self.config.model.dtype,
            )
        return self._path

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, from the base's config.json, before anything is loaded."""
        return vocabulary_size(read_config(self.model_path))

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None

    @property
    def client(self) -> EngineClient:
        assert self._engine is not None, "open() comes first"
        return self._engine.client

    @property
    def weights(self) -> SharedWeights:
        """The engine's."""
        assert self._weights is not None, "open() comes first"
        return self._weights

    def listen(
        self,
        sources: Iterable[RolloutSource] = (),
        rollbacks: RollbackAPI | None = None,
        routers: Iterable[AddedRouter] = (),
        *,
        run: Path | None = None,
        commands: RunCommands | None = None,
    ) -> None:
        """Start HTTP with the server's own routes, those of the rollout sources, of `routers`
        and of the leaves, and the pages of the run directory `run`, on which people may order
        `commands`."""
        self._trains = run is not None
        if self._listener is None:
            return
        sources = list(sources)
        added = [*(source.router for source in sources if source.router is not None), *routers]
        if run is not None and self._pages:
            added += _pages(run, self.config.redactor(), commands)
        completions = next(
            (source.completions for source in sources if isinstance(source, RewardsById)), None
        )
        deps = ServerDeps(
            state=self.state,
            config=self.config.server,
            api_key=self.api_key,
            chat_template_kwargs=self.config.model.chat_template_kwargs,
            completions=completions,
            rollbacks=rollbacks,
            scorer=self._scorer,
        )
        for leaf in leaves():
            if leaf.routes is not None and not (sources and leaf.source is not None):
                added += [
                    router
                    for router in [imported(leaf.routes)(self.config.of_leaf(leaf), deps)]
                    if router is not None
                ]
        self._page_paths = [router.page for router in added if router.page is not None]
        self._added = added
        connections = connection_limit(
            self.config.server.max_concurrent_requests, raise_file_limit()
        )
        self._http = ServerThread(create_app(deps, added), self._listener, connections)
        self._http.start()

    def load(self, *, quantize: bool = False) -> LoadedModel:
        """Load the base, with its part that sees. Raises ModelError, ConfigError; /health
        says so too."""
        try:
            loaded = load_model(self.config.model, quantize=quantize)
            return with_images(loaded, self.image_support, self.config.image_hooks())
        except (ModelError, ConfigError) as error:
            self.state.failed(str(error))
            raise

    @cached_property
    def image_support(self) -> ImageSupport | None:
        """The part of the model that sees; None: it reads text alone. Raises ModelError,
        ConfigError."""
        return image_support(self.config.image_hooks(), self.model_path)

    @property
    def image_reader(self) -> ImageReader | None:
        """The reader of that part; None: the model reads text alone. Raises ModelError,
        ConfigError."""
        return None if self.image_support is None else self.image_support.reader

    def tokenizer(self) -> Tokenizer:
        """A tokenizer for one thread."""
        return load_tokenizer(self.model_path, self.config.model, self.image_reader)

    def open(
        self,
        loaded: LoadedModel,
        weights: SharedWeights,
        *,
        adapters: Mapping[str, Mapping[str, LoraPair]],
        main_adapter: str | None,
        trains_base: bool = False,
        adapter_roots: Sequence[Path] = (),
        recorded: Collection[str] = (),
    ) -> None:
        """Start the engine on the loaded tree and let every route answer.

        Args:
            weights: made from the tree before this call wraps it.
            adapters: name → layers, served beside the base. Raises AdapterError when one does not
                fit.
            main_adapter: the adapter that the base's id and `default` mean; None = the base itself.
            adapter_roots: beside server.adapter_roots.
            recorded: see `start_engine`.
        """
        self._load_scorer(loaded)
        weights.faults = self.turns.faults
        training = self.config.rl_training
        engine = start_engine(
            self.config.server,
            loaded,
            weights,
            self.tokenizer,
            base=self.config.model.base_path,
            deterministic=training.deterministic,
            chats_first=training.serve_priority == "chat",
            adapters=adapters,
            main_adapter=main_adapter,
            trains_base=trains_base,
            turns=self.turns,
            processes=self._processes,
            recorded=recorded,
        )
        self._engine, self._weights = engine.thread, weights
        self._guard = self._watch_memory()
        roots = (*self.config.server.adapter_roots, *adapter_roots)
        loader = AdapterLoader(
            weights,
            engine.shapes,
            engine.names,
            roots,
            self.config.server.max_loaded_adapters,
            rope_length=self.config.model.rope_length,
        )
        clients_engine = self._clients_engine(self.client) if self._clients_engine else self.client
        defaults = self._sampling_defaults()
        tokenizer = self.tokenizer()
        self._name_unread_arguments(tokenizer)
        self.state.ready(clients_engine, tokenizer, loader, loaded.image_reader, defaults)

    def _name_unread_arguments(self, tokenizer: Tokenizer) -> None:
        """Log the configuration's template arguments that the chat template does not read."""
        arguments = {"model": self.config.model.chat_template_kwargs} | {
            f"environments.{number}": entry.chat_template_kwargs
            for number, entry in enumerate(self.config.environments)
        }
        for place, values in arguments.items():
            for name in tokenizer.unread_arguments(values):
                key = f"{place}.chat_template_kwargs.{name}"
                log.warning("the model's chat template does not read this argument", key=key)

    def _watch_memory(self) -> MemoryGuard:
        server = self.config.server
        guard = MemoryGuard(
            server.memory_pause,
            server.memory_stop,
            EngineAdmission(self.client, lambda: self.turns.trains),
            lambda reason: self._stop.set(),
            partial(memory_use, self._processes),
        )
        self.state.metrics.watch_memory(guard)
        guard.start()
        return guard

    def memory_health(self) -> str | None:
        """Return a sentence while requests wait for memory; else None."""
        return None if self._guard is None else self._guard.health()

    def check_memory(self) -> None:
        """Raises MemoryShortError: memory ran out, so the process was asked to end."""
        if self._guard is not None and self._guard.stopped is not None:
            raise MemoryShortError(self._guard.stopped)

    def _sampling_defaults(self) -> Mapping[str, float | int]:
        """Return the defaults of requests' sampling (server.generation_config), and log them.
        Raises ModelError: the model's file cannot be read."""
        chosen = self.config.server.generation_config or ("off" if self._trains else "auto")
        if chosen == "off":
            return {}
        defaults = sampling_defaults(self.model_path)
        if defaults.values:
            log.info("sampling defaults from generation_config.json", **defaults.values)
        if defaults.not_applied:
            keys = [f"{name} = {value!r:.60}" for name, value in defaults.not_applied.items()]
            log.warning("generation_config.json: not applied", keys=", ".join(keys))
        return defaults.values

    def _load_scorer(self, loaded: LoadedModel) -> None:
        """Wait for the reward model, which shares the base's arrays where both are loaded alike.
        Raises ConfigError, ModelError, AdapterError: it does not fit its base."""
        if self._scorer is None:
            return
        self._base.set_result(loaded if self.config.base_is_plain else None)
        self._scorer.wait()

    def observe_publish(self, report: PublishReport) -> None:
        """Count a publish of weights in /metrics."""
        self.state.metrics.observe_publish(report.total_ms / 1e3)

    def watch_tools(self, counts: Callable[[], Mapping[str, float]]) -> None:
        """Show the counts of `ToolClient.metrics` in /metrics."""
        self.state.metrics.watch_tools(counts)

    def check(self) -> None:
        """Raises EngineUnavailableError when the engine thread has died: nothing will be
        answered any more. DeviceFaultError: the GPU has failed."""
        self.turns.faults.check()
        stats = self.client.stats()
        if not stats.alive:
            raise EngineUnavailableError(stats.error or "the engine thread has ended")

    def close(self) -> None:
        """Drain HTTP, then end the engine. May be called at any point, and again."""
        try:
            if self._http is not None:
                deadline = time.monotonic() + self.config.server.drain_timeout_s
                self.state.drain(self.config.server.drain_timeout_s)
                self._http.stop(max(deadline - time.monotonic(), LAST_WORDS_S))
            if self._listener is not None:
                self._listener.close()
        finally:
            with contextlib.ExitStack() as stack:
                if self._engine is not None:
                    stack.callback(self._engine.stop)
                if self._scorer is not None:
                    self._base.cancel()
                    stack.callback(self._scorer.close)
                if (support := vars(self).get("image_support")) is not None:
                    stack.callback(support.reader.close)
                for added in self._added:
                    if added.close is not None:
                        stack.callback(added.close)
                self._added = []
                if self._guard is not None:
                    stack.callback(self._guard.close)  # first
