"""Shared fixtures: the shipped tiny model's tokenizer, a real engine thread on that model, a server
over it.

The engine serves at most TINY_CONTEXT tokens a sequence, so that tests of the limit are quick.
"""

# isort: off
import mlx_parallm  # noqa: F401  before any test imports MLX: it puts the fast BLAS under it
# isort: on

import atexit
import contextlib
import functools
import gc
import importlib
import os
import re
import signal
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from openai import OpenAI

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.models.loading import load_model, load_tokenizer, resolve_model_path
from mlx_parallm.models.lora import linear_layers, linear_shape, prepare_for_serving
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.device.traits import gpu_like
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights
from tests.altered import unaltered_process
from tests.engine.helpers import engine_options
from tests.server.serving import RunningServer, running_server

# A busy machine makes examples slow, which says nothing about the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

TINY = ModelConfig(base_path="builtin:tiny")
TINY_CONTEXT = 256
# What the tests keep for a next start goes nowhere near the user's own ~/.cache; their processes
# inherit it.
_CACHE = tempfile.TemporaryDirectory(prefix="mlx_parallm_tests_")
atexit.register(_CACHE.cleanup)
os.environ["XDG_CACHE_HOME"] = _CACHE.name
configure_logging(level="error")
gc.disable()  # until all tests are collected
# Each HTTP client reads all certificates of this machine (20 to 40 ms), though no test uses TLS:
# once will do.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes are named by their parameter: a packed body holds the time, and two workers must
    collect the same names."""
    return argname if isinstance(val, bytes) else None


HAS_SLOW = re.compile(r"\bmark\.(slow|long)\b|\beither\b")  # either: a fixture of tests/atropos


@functools.cache
def _has_slow(file: Path) -> bool:
    return HAS_SLOW.search(file.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a slow test are not imported for `-m slow`: each worker would take seconds."""
    if collection_path.suffix == ".py" and config.option.markexpr.startswith(("slow", "long")):
        return not _has_slow(collection_path) or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Workers import the files that all of them collect from different places on: each finds byte
    code that another has kept, where all would compile every file at the same time."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    files = [
        path
        for path in sorted(Path(__file__).parent.rglob("test_*.py"))
        if not pytest_ignore_collect(path, session.config)
    ]
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    first = len(files) * number // count
    for path in files[first:] + files[:first]:
        parts = path.relative_to(session.config.rootpath).with_suffix("").parts
        # what is wrong with a file is said where it is collected
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(parts))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked long is a slow one: `-m "not slow"` leaves it out."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
        if item.get_closest_marker("slow") and not _has_slow(item.path):
            raise pytest.UsageError(f"{item.nodeid}: its file has to say that it is slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("not_gpu_like")
    if marker is not None and gpu_like():
        pytest.skip(marker.kwargs["reason"])


def pytest_collection_finish() -> None:
    """All that collecting made stays until the end: the collector of garbage need not look
    through it time and again, which was a tenth of the fast tests' processor time."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """A thread that has used MLX ends so; otherwise MLX with MKL may abort at exit
    (docs/design.md)."""
    mx.synchronize()
    mx.clear_streams()


@dataclass(frozen=True)
class TinyEngine:
    """A running engine. `linear_shapes`: path → (in, out) of every layer that an adapter may
    target."""

    client: EngineClient
    thread: EngineThread
    weights: SharedWeights
    linear_shapes: dict[str, tuple[int, int]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    """An empty rollout store on disk."""
    store = RolloutStore(tmp_path / "rollouts.sqlite")
    yield store
    store.close()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """The main thread's tokenizer."""
    return load_tokenizer(resolve_model_path(TINY.base_path), TINY)


@pytest.fixture(scope="session")
def tiny_engine() -> Iterator[TinyEngine]:
    """One engine thread for all tests that only ask it things."""
    with running_tiny_engine(TINY_CONTEXT) as engine:
        yield engine


@contextmanager
def running_tiny_engine(
    max_model_len: int, tokenizer: Callable[[], Tokenizer] | None = None
) -> Iterator[TinyEngine]:
    """An engine thread of its own; `tokenizer` makes that of its thread."""
    loaded = load_model(TINY)
    weights = SharedWeights(loaded.model, keep_versions=1)
    shapes = {path: linear_shape(layer) for path, layer in linear_layers(loaded.model).items()}
    lora = prepare_for_serving(loaded.model)
    options = engine_options(
        max_model_len=max_model_len, vocab_size=loaded.vocab_size, max_rows=16, prefill_chunk=64
    )
    models = ServedModels(
        "builtin:tiny",
        adapter_versions=lambda: {
            name: adapter.version for name, adapter in weights.adapters().items()
        },
        version=lambda: weights.version,
    )
    thread = EngineThread(
        lambda: Engine(
            loaded.model,
            tokenizer() if tokenizer else load_tokenizer(loaded.path, TINY),
            weights,
            lora,
            options,
        ),
        models,
    )
    thread.start()
    try:
        yield TinyEngine(thread.client, thread, weights, shapes)
    finally:
        thread.stop()


@pytest.fixture(scope="session")
def server(tiny_engine: TinyEngine) -> Iterator[RunningServer]:
    """An HTTP server over `tiny_engine`, with its own tokenizer."""
    with running_server(
        tiny_engine.client, load_tokenizer(resolve_model_path(TINY.base_path), TINY)
    ) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.openai() as openai:
        yield openai


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """What a test, or a command that it calls here, sets for the whole process is gone after it:
    no test sees which ran before it."""
    with unaltered_process():
        yield


@pytest.fixture
def heeded_interrupt() -> Iterator[None]:
    """Ctrl-C as at a terminal: a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def informative_logs() -> None:
    configure_logging(level="info")
