"""Products of few rows, x · Wᵀ in float32, by a kernel of ours where it is faster than the BLAS.

A decode step reads all weights for 1 to 32 rows. `few_rows.cpp` is compiled at the first start on
such a processor, kept in the user's cache, and tried beside the BLAS on the model's own weights.
As far as it is the faster one, and gives the same numbers, MLX's products of up to so many rows go
to it. Everything else goes to the BLAS as before: other types, other layouts, small products.
docs/benchmarks/serving.md#products-of-few-rows.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from mlx_parallm.config.server import cache_directory
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.system.blas import blas_status, is_reproducible
from mlx_parallm.system.device.traits import on_cpu
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.log import get_logger

VARIABLE = "MLX_PARALLM_FEW_ROWS"
OFF = "off"
SOURCE = Path(__file__).with_suffix(".cpp")
FEWEST_WEIGHTS, LEAST_WIDTH, LEAST_OUTPUTS = 1 << 16, 256, 32  # of a product that is ours
FLAGS = (
    "-O2",
    "-march=native",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-pthread",
    f"-DFEWEST_WEIGHTS={FEWEST_WEIGHTS}",
    f"-DLEAST_WIDTH={LEAST_WIDTH}",
    f"-DLEAST_OUTPUTS={LEAST_OUTPUTS}",
)
CLASSES = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows that are tried
TRIED_BYTES = 48 << 20  # of weights: more than fit into a small machine's caches
ROUNDS = 3
NOISE = 1.1  # a class that takes so much longer than the BLAS is no loss yet
COMPILER_S = 120.0  # it takes one
AGREES = 1e-5  # relative to the largest output
# a BLAS → its function that says how many threads it has
THREADS = {"mkl": "MKL_Get_Max_Threads", "openblas": "openblas_get_num_threads"}
log = get_logger(__name__)
# MLX's table of functions is the process's, and so is what is decided about it
_decision: list["FewRows"] = []  # one entry once `use_few_rows` has decided
_deciding = threading.Lock()

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class FewRows:
    """Hold what computes products of few rows.

    Attributes:
        rows: up to so many rows the kernel does; 0: the BLAS does all.
        gains: rows of a product → times as fast as the BLAS, as tried.
        why: the reason where it is 0.
    """

    rows: int = 0
    gains: tuple[tuple[int, float], ...] = ()
    why: str = ""

    def words(self) -> str:
        gains = ", ".join(f"{rows}: {gain:.1f}" for rows, gain in self.gains)
        tried = f" (times the BLAS' speed, by rows: {gains})" if gains else ""
        if not self.rows:
            return f"by the BLAS: {self.why}{tried}"
        return f"by the kernel up to {self.rows} rows{tried}"


class Kernel:
    """The compiled `few_rows.cpp`, beside the BLAS under MLX."""

    def __init__(self, library: Path) -> None:
        """Raises OSError: it cannot be loaded, or it or the BLAS lacks a function."""
        status = blas_status()
        self._library = ctypes.CDLL(str(library))
        self._blas = ctypes.CDLL(status.path)
        try:
            self._multiply = self._library.few_rows_multiply
            self._count_threads = self._blas[THREADS[status.name]]
        except AttributeError as error:
            raise OSError(str(error)) from error

    def multiply(self, x: Matrix, weight: Matrix, y: Matrix, threads: int | None = None) -> None:
        """y [m, n] = x [m, k] · weight [n, k]ᵀ on so many threads, None: as many as the BLAS has.
        Rows may lie apart."""
        threads = self._count_threads() if threads is None else threads
        self._multiply(*_operands(x, weight, y), threads)

    def multiply_by_blas(self, x: Matrix, weight: Matrix, y: Matrix) -> None:
        """The same by the BLAS."""
        row_major, as_it_is, transposed = 101, 111, 112
        self._blas.cblas_sgemm(row_major, as_it_is, transposed, *_operands(x, weight, y))

    def helped(self) -> int:
        """Return how many pieces of products other threads than the caller's have computed."""
        return int(self._library.few_rows_helped())

    def replace_blas(self, rows: int) -> bool:
        """Let MLX's products of up to so many rows go to the kernel, on as many threads as the
        BLAS has; False: there is no place where MLX calls a BLAS."""
        functions = (
            ctypes.cast(function, ctypes.c_void_p)
            for function in (self._blas.cblas_sgemm, self._count_threads)
        )
        return bool(self._library.few_rows_use(*functions, rows))


def _operands(x: Matrix, weight: Matrix, y: Matrix) -> tuple[object, ...]:
    """m, n, k, alpha = 1, x, weight, beta = 0, y as cblas_sgemm wants them."""
    (m, k), n = x.shape, len(weight)
    a, b, c = (
        (ctypes.c_void_p(matrix.ctypes.data), matrix.strides[0] // matrix.itemsize)
        for matrix in (x, weight, y)
    )
    return (m, n, k, ctypes.c_float(1), *a, *b, ctypes.c_float(0), *c)


def use_few_rows(model: nn.Module) -> FewRows:
    """Let the kernel do what it does faster than the BLAS, for the whole process, by trials on the
    first model that has weights for it.

    They take some 0.2 s; the first time on a machine the compiler's second more.

    Raises ConfigError: VARIABLE says something else than "off".
    """
    with _deciding:
        if _decision:
            return _decision[0]
        if why := _not_here():
            return FewRows(why=why)
        weights = _weights(array for _, array in tree_flatten(model.parameters()))
        if not weights:
            return FewRows(why="the model has no float32 weights of that size")
        chosen = _choose(weights, use=True)
        _decision.append(chosen)
        log.info("products of few rows", computed=chosen.words())
        return chosen


def few_rows_here() -> FewRows:
    """Return what computes them in this process, or would for a model of float32 weights: for a
    report."""
    if _decision:
        return _decision[0]
    if why := _not_here():
        return FewRows(why=why)
    return _choose(list(np.ones((TRIED_BYTES >> 22, 1024, 1024), dtype=np.float32)), use=False)


def _choose(weights: list[Matrix], *, use: bool) -> FewRows:
    try:
        kernel = load()
    except (OSError, subprocess.SubprocessError) as error:
        return FewRows(why=f"the kernel cannot be built: {_reason(error)}")
    chosen = probe(weights, kernel=kernel.multiply, blas=kernel.multiply_by_blas)
    if use and chosen.rows and not kernel.replace_blas(chosen.rows):
        return FewRows(why="this build of MLX calls no BLAS that could be replaced")
    return chosen


def _not_here() -> str:
    """Return why the kernel is no question in this process, or ""."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", OFF):
        raise ConfigError(f"{VARIABLE}={wanted}: it may be {OFF!r}, or unset")
    if not on_cpu():
        return "MLX does not compute on a CPU"
    if wanted == OFF:
        return f"{VARIABLE}={OFF}"
    if blas_status().name not in THREADS:
        return "there is no MKL or OpenBLAS under MLX"
    if is_reproducible():
        return "the BLAS adds in one order for every number of rows (MKL_CBWR)"
    return "" if shutil.which("g++") else "there is no g++"


def _weights(arrays: Iterable[mx.array]) -> list[Matrix]:
    """Return some of the float32 matrices, as they lie, up to TRIED_BYTES; of one that is more
    than a quarter of that its first rows."""
    chosen: list[Matrix] = []
    room = TRIED_BYTES
    for array in arrays:
        if array.ndim != 2 or array.dtype != mx.float32 or array.shape[1] < LEAST_WIDTH:
            continue
        outputs = min(array.shape[0], min(room, TRIED_BYTES // 4) // (array.shape[1] * 4))
        if outputs < LEAST_OUTPUTS or outputs * array.shape[1] < FEWEST_WEIGHTS:
            continue
        matrix: Matrix = np.asarray(array)[:outputs]
        if matrix.strides[1] == matrix.itemsize:
            chosen.append(matrix)
            room -= matrix.nbytes
    return chosen


Product = Callable[[Matrix, Matrix, Matrix], None]


def probe(weights: list[Matrix], *, kernel: Product, blas: Product) -> FewRows:
    """Try both on all the weights with each number of rows of CLASSES, until the BLAS wins.

    The kernel gets all numbers of rows up to one, so a row's numbers do not depend on which of
    them stand beside it.
    """
    gains: list[tuple[int, float]] = []
    most = 0
    widest = max(weight.shape[1] for weight in weights)
    numbers = np.random.default_rng(0).standard_normal((max(CLASSES), widest), dtype=np.float32)
    for rows in CLASSES:
        xs = [np.ascontiguousarray(numbers[:rows, : weight.shape[1]]) for weight in weights]
        ys = [np.empty((2, rows, len(weight)), dtype=np.float32) for weight in weights]
        seconds = np.empty((ROUNDS, len(weights), 2))
        for way, y in zip((kernel, blas), ys[0], strict=True):
            way(xs[0], weights[0], y)  # threads are started outside of the stopwatch
        for turn, which in np.ndindex(ROUNDS, 2):
            for i, (x, weight, y) in enumerate(zip(xs, weights, ys, strict=True)):
                started = time.perf_counter()
                (kernel, blas)[which](x, weight, y[which])
                seconds[turn, i, which] = time.perf_counter() - started
        if not all(_agree(*y) for y in ys):
            return FewRows(gains=tuple(gains), why=f"its numbers differ at {rows} rows")
        of_kernel, of_blas = seconds.min(axis=0).sum(axis=0)  # the least is the least disturbed
        gain = float(of_blas / of_kernel)
        gains.append((rows, gain))
        if gain < 1 / NOISE:
            break
        if gain > 1:
            most = rows
    return FewRows(most, tuple(gains), "" if most else "it is the faster one")


def _agree(one: Matrix, other: Matrix) -> bool:
    return bool(np.abs(one - other).max() <= AGREES * np.abs(other).max())


def load() -> Kernel:
    """Load the kernel for this processor; compile it if the user's cache has none.

    Raises OSError, subprocess.SubprocessError: g++ is missing or fails.
    """
    made_of = [SOURCE.read_bytes(), *(flag.encode() for flag in FLAGS), _processor()]
    name = f"few_rows-{hashlib.sha256(bytes(1).join(made_of)).hexdigest()[:16]}.so"
    kept = cache_directory("kernels") / name
    if _is_whole(kept):
        with suppress(OSError):  # a file system that lets nothing be executed
            return Kernel(kept)
    with tempfile.TemporaryDirectory(prefix="mlx_parallm_few_rows_") as scratch:
        made = Path(scratch, name)
        command = ["g++", *FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMPILER_S
        )
        kernel = Kernel(made)
        try:
            content = made.read_bytes()
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(kept, content + hashlib.sha256(content).digest())
            kept.chmod(0o600)  # whatever the umask: one that others may write is not loaded
        except (OSError, CheckpointError) as error:
            log.warning("the kernel of few rows is compiled at each start", reason=str(error))
        return kernel


def _is_whole(library: Path) -> bool:
    """Whether it is there, nobody else can have written it, and it ends with its own hash: what the
    linker makes of half a library may end the process."""
    try:
        entries = [path.stat() for path in (library, library.parent)]
        if any(entry.st_uid != os.getuid() or entry.st_mode & 0o022 for entry in entries):
            return False
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _processor() -> bytes:
    """Return what g++ compiles for: the processor's name and what it can do."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            lines = file.read(1 << 14).split(b"\n\n")[0].splitlines()
    except OSError:
        return platform.processor().encode()
    names = (b"model name", b"flags", b"CPU part", b"Features")
    return b"\n".join(line for line in lines if line.startswith(names))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").split("\n")
        return next((line for line in lines if "error" in line), f"g++ gave {error.returncode}")
    return str(error)
