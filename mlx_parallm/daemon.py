"""The composition root of `mlx_parallm_train` and `mlx_parallm_serve`: builds the parts, starts and stops the threads.

    main thread     trains (or waits), ends everything
    http            uvicorn and its asyncio loop            serving.py, server/
    engine          the serving model and its KV cache      serving.py, engine/
    environments    in-process environments                 rl_training/train.py
    shutdown        sigwait                                 signals.py

`rl_training/train.py` builds the trainer's part.
"""

import threading
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from mlx_parallm.blas import blas_status, share_blas_between
from mlx_parallm.config import Config
from mlx_parallm.engine.served_models import DEFAULT
from mlx_parallm.errors import ConfigError
from mlx_parallm.hardware import usable_cores
from mlx_parallm.log import configure_logging, get_logger
from mlx_parallm.models.lora import ADAPTER_FILE, PEFT_FILE, SPECIFICATION_FILE, LoraPair, load_adapter
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.rl_training.train import TrainingRun
from mlx_parallm.serving import Serving
from mlx_parallm.signals import ShutdownWatcher
from mlx_parallm.weights import SharedWeights

log = get_logger("daemon")

COMPUTING_THREADS = 2  # of a training daemon: engine and trainer


def run_server(config: Config, adapters: Mapping[str, str]) -> int:
    """Serves until a signal. `adapters`: name → path, beside `model.lora_path`. Returns the exit code."""
    stop = _begin()
    serving = Serving(config)
    try:
        main_adapter, layers = _adapters_to_serve(config, adapters)
        serving.listen()
        loaded = serving.load(quantize=config.rl_training.lora.quantize_base)
        if stop.is_set():
            return 0
        weights = SharedWeights(loaded.model)
        serving.open(loaded, weights, adapters=layers, main_adapter=main_adapter)
        log.info("serving", url=f"{serving.url}/v1", models=[model.id for model in serving.client.models()])
        stop.wait()
        log.info("stopping")
    finally:
        with mlx_thread():
            serving.close()
    return 0


def run_training(config: Config, *, resume: str | None) -> int:
    """Serves and trains until `total_steps` or a signal. Returns the exit code."""
    stop = _begin()
    share_blas_between(COMPUTING_THREADS, usable_cores())
    run = TrainingRun(config, resume=resume, stop=stop, console=Console(stderr=True))
    try:
        run.execute()
    finally:
        with mlx_thread():
            run.close()
    return 0


def _begin() -> threading.Event:
    """Logging, a word on a slow BLAS, and the event that a shutdown signal sets."""
    configure_logging()
    if advice := blas_status().advice:
        log.warning(
            "matrix products will be 10 to 60 times slower than they could be", blas=blas_status().name, fix=advice
        )
    stop = threading.Event()

    def on_first(name: str) -> None:
        log.info("stopping in order; a second signal exits at once", signal=name)
        stop.set()

    ShutdownWatcher(on_first).start()
    return stop


def _adapters_to_serve(
    config: Config, named: Mapping[str, str]
) -> tuple[str | None, dict[str, Mapping[str, LoraPair]]]:
    """The main adapter's name, and every adapter's layers. Raises AdapterError, ConfigError: a name that is taken."""
    paths = dict(named)
    main_adapter = None
    if config.model.lora_path is not None:
        main_adapter = _adapter_name(config.model.lora_path)
        if main_adapter in paths:
            raise ConfigError(f"two adapters are named {main_adapter!r}: give both as name=path")
        paths[main_adapter] = config.model.lora_path
    for name in paths:
        if name in (DEFAULT, config.model.base_path, *config.server.served_model_names):
            raise ConfigError(f"an adapter cannot be named {name!r}: that means the served model")
    return main_adapter, {name: load_adapter(path).layers for name, path in paths.items()}


def _adapter_name(path: str) -> str:
    """An adapter's directory names it; a file of an unusual name names itself."""
    given = Path(path).expanduser().absolute()
    if given.is_dir():
        return given.resolve().name
    return given.parent.name if given.name in (ADAPTER_FILE, PEFT_FILE, SPECIFICATION_FILE) else given.stem
