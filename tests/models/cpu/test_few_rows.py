"""Products of few rows: the kernel against float64, alone and together, in threads, after a fork,
under MLX; what is tried, kept and refused."""

import os
import shutil
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.engine import starting
from mlx_parallm.errors import ConfigError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.cpu import few_rows
from mlx_parallm.models.cpu.few_rows import FewRows, Kernel, probe, use_few_rows
from mlx_parallm.system import blas
from mlx_parallm.system.device import traits

SHAPES = int(os.environ.get("FEW_ROWS_SHAPES", "60"))
needs_kernel = pytest.mark.skipif(
    not traits.on_cpu()
    or blas.blas_status().name not in few_rows.THREADS
    or not shutil.which("g++"),
    reason="needs MLX on a CPU with MKL or OpenBLAS, and g++",
)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    loaded = few_rows.load()
    loaded.replace_blas(0)  # what a fork changes is registered
    yield loaded
    loaded.replace_blas(0)


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_decision", [])
    monkeypatch.delenv(few_rows.VARIABLE, raising=False)
    monkeypatch.delenv("MKL_CBWR", raising=False)


def rows_of(generator: np.random.Generator, count: int, width: int) -> few_rows.Matrix:
    """Random numbers [count, width], in rows that may lie apart."""
    apart = int(generator.integers(0, 4)) * 3
    return generator.standard_normal((count, width + apart), dtype=np.float32)[:, :width]


@needs_kernel
def test_each_row_is_right_and_the_same_alone_together_and_on_any_threads(kernel: Kernel) -> None:
    generator = np.random.default_rng(0)
    for _ in range(SHAPES):
        m, n, k = (int(generator.integers(1, most)) for most in (41, 300, 700))
        x, weight = rows_of(generator, m, k), rows_of(generator, n, k)
        y = np.full((m, n + 5), np.nan, dtype=np.float32)
        kernel.multiply(x, weight, y[:, :n], threads=1 + m % 3)
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
        size = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T
        assert (np.abs(y[:, :n] - exact) <= 1e-6 * size).all(), (m, n, k)
        assert np.isnan(y[:, n:]).all()  # what lies between the rows stays
        row = int(generator.integers(m))
        alone = np.empty((1, n), dtype=np.float32)
        kernel.multiply(x[row : row + 1], weight, alone, threads=1)
        assert np.array_equal(alone[0], y[row, :n]), (m, n, k)


@needs_kernel
def test_threads_that_multiply_at_once_and_a_forked_process_get_the_same(kernel: Kernel) -> None:
    generator = np.random.default_rng(1)
    x, weight = (generator.standard_normal((n, 512), dtype=np.float32) for n in (5, 384))
    expected = np.empty((5, 384), dtype=np.float32)
    kernel.multiply(x, weight, expected, threads=3)
    wrong: list[int] = []

    def repeat(thread: int) -> None:
        y = np.empty_like(expected)
        for turn in range(100):
            kernel.multiply(x, weight, y, threads=2 + (thread + turn) % 3)
            if not np.array_equal(y, expected):
                wrong.append(thread)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

    def child() -> int:  # has none of the helpers, and makes its own
        y = np.empty_like(expected)
        kernel.multiply(x, weight, y, threads=3)
        return int(not np.array_equal(y, expected) or not gets_help(kernel))

    assert gets_help(kernel)
    assert in_a_fork(child) == 0


def gets_help(kernel: Kernel) -> bool:
    """Whether another thread takes a part of one of many products, which lasts until it has run."""
    x, weight = np.ones((1, 1024), np.float32), np.ones((2048, 1024), np.float32)
    before, y = kernel.helped(), np.empty((1, 2048), np.float32)
    for _ in range(5000):
        kernel.multiply(x, weight, y, threads=2)
        if kernel.helped() > before:
            return True
    return False


def in_a_fork(child: Callable[[], int]) -> int:
    """Return the exit status of a forked process that runs `child` and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on
        if (pid := os.fork()) == 0:
            os._exit(child())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@needs_kernel
def test_mlx_goes_through_the_kernel_up_to_so_many_rows(kernel: Kernel) -> None:
    generator = np.random.default_rng(2)
    numbers, weights = (generator.standard_normal((n, 640), dtype=np.float32) for n in (12, 300))
    added = generator.standard_normal((12, 300), dtype=np.float32)
    x, weight, bias = mx.array(numbers), mx.array(weights), mx.array(added)

    def through_mlx(rows: int) -> few_rows.Matrix:
        return np.array(x[:rows] @ weight.T)

    def by(multiply: Callable[..., None], rows: int) -> few_rows.Matrix:
        y = np.empty((rows, 300), dtype=np.float32)
        multiply(numbers[:rows], weights, y)
        return y

    assert kernel.replace_blas(8)
    assert np.array_equal(through_mlx(8), by(kernel.multiply, 8))
    assert np.array_equal(through_mlx(1), by(kernel.multiply, 1))
    assert not np.array_equal(by(kernel.multiply, 12), by(kernel.multiply_by_blas, 12))
    assert np.array_equal(through_mlx(12), by(kernel.multiply_by_blas, 12))
    scaled = np.array(mx.addmm(bias[:8], x[:8], weight.T, alpha=0.5, beta=-2.0))
    exact = -2.0 * added[:8] + 0.5 * (numbers[:8].astype(np.float64) @ weights.T)
    np.testing.assert_allclose(scaled, exact, atol=1e-4)
    others = (x[:8, :600] @ weight[:, :600].T, x[:8] @ mx.contiguous(weight.T), weight @ x[:8].T)
    products = (
        numbers[:8, :600] @ weights[:, :600].T,
        numbers[:8] @ weights.T,
        weights @ numbers[:8].T,
    )
    for found, product in zip(others, products, strict=True):
        np.testing.assert_allclose(np.array(found), product, atol=1e-4)
    assert kernel.replace_blas(0)
    assert np.array_equal(through_mlx(8), by(kernel.multiply_by_blas, 8))


class Clock:
    """Time that passes only while something multiplies."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def way(self, cost: Callable[[int], float], wrong_at: int = 0) -> few_rows.Product:
        def multiply(x: few_rows.Matrix, weight: few_rows.Matrix, y: few_rows.Matrix) -> None:
            self.now += cost(len(x))
            y[:] = x @ weight.T + (0.1 if len(x) == wrong_at else 0.0)

        return multiply


@pytest.mark.parametrize(
    ("cost", "wrong_at", "rows", "words"),
    [
        (lambda rows: 0.5, 0, 64, "by the kernel up to 64 rows"),
        (lambda rows: 0.5 if rows <= 4 else 2.0, 0, 4, "8: 0.5)"),
        (lambda rows: 1.05 if rows == 2 else 0.8, 0, 64, "2: 1.0"),  # noise
        (lambda rows: 2.0, 0, 0, "by the BLAS: it is the faster one"),
        (lambda rows: 0.5, 8, 0, "by the BLAS: its numbers differ at 8 rows"),
    ],
)
def test_the_kernel_gets_the_rows_up_to_which_it_is_faster_and_right(
    monkeypatch: pytest.MonkeyPatch,
    cost: Callable[[int], float],
    wrong_at: int,
    rows: int,
    words: str,
) -> None:
    clock = Clock()
    monkeypatch.setattr(few_rows, "time", clock)
    weights = [np.ones((8, 16), dtype=np.float32), np.ones((4, 24), dtype=np.float32)]
    chosen = probe(weights, kernel=clock.way(cost, wrong_at), blas=clock.way(lambda rows: 1.0))
    assert chosen.rows == rows
    assert words in chosen.words()


class Model(nn.Module):
    def __init__(self, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__()
        self.layers = [nn.Linear(512, 256), nn.Linear(128, 512), nn.Linear(512, 128)]
        self.set_dtype(dtype)
        mx.eval(self.parameters())


@needs_kernel
def test_a_model_decides_once_for_the_process(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    tried: list[list[tuple[int, ...]]] = []

    def trial(weights: list[few_rows.Matrix], **ways: Any) -> FewRows:
        tried.append([weight.shape for weight in weights])
        return FewRows(8)

    monkeypatch.setattr(few_rows, "probe", trial)
    assert "no float32 weights" in use_few_rows(Model(mx.bfloat16)).why  # decides nothing
    assert use_few_rows(Model()).rows == 8
    assert use_few_rows(Model()).rows == few_rows.few_rows_here().rows == 8
    assert tried == [[(256, 512), (128, 512)]]


def test_a_large_embedding_is_not_all_that_is_tried() -> None:
    """One product of few is decided by what else the machine does."""
    layers = [mx.zeros((576, 576))] * 30
    shapes = [weight.shape for weight in few_rows._weights([mx.zeros((49_152, 576)), *layers])]
    assert shapes[0] == (few_rows.TRIED_BYTES // 16 // 576, 576) and len(shapes) > 20


def variable_off(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv(few_rows.VARIABLE, few_rows.OFF)


def reproducible(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("MKL_CBWR", "AUTO,STRICT")


def no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("PATH", str(folder))


def broken_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    compiler(folder, "echo 'x.cpp:1: error: no C++20 here' >&2; exit 1")
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    patch.setenv("XDG_CACHE_HOME", str(folder))


def odd_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    gcc = shutil.which("g++")
    compiler(
        folder,
        f'while [ "$1" != -o ]; do shift; done\necho "int x;" | {gcc} -shared -fPIC -xc - -o "$2"',
    )
    patch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    patch.setenv("XDG_CACHE_HOME", str(folder))


def a_gpu(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(few_rows, "on_cpu", lambda: False)


def no_place(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(Kernel, "replace_blas", lambda kernel, rows: False)
    patch.setattr(few_rows, "probe", lambda weights, **ways: FewRows(8))


@needs_kernel
@pytest.mark.parametrize(
    ("arrange", "why"),
    [
        (variable_off, "MLX_PARALLM_FEW_ROWS=off"),
        (reproducible, "adds in one order"),
        (no_compiler, "there is no g++"),
        (broken_compiler, "the kernel cannot be built: x.cpp:1: error: no C++20 here"),
        (odd_compiler, "undefined symbol: few_rows_multiply"),
        (a_gpu, "MLX does not compute on a CPU"),
        (no_place, "calls no BLAS that could be replaced"),
    ],
)
def test_it_is_off_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arrange: Callable[[pytest.MonkeyPatch, Path], None],
    why: str,
) -> None:
    arrange(monkeypatch, tmp_path)
    chosen = use_few_rows(Model())
    assert (chosen.rows, why in chosen.words()) == (0, True), chosen


def test_the_variable_may_say_off_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(few_rows.VARIABLE, "no")
    with pytest.raises(ConfigError, match="MLX_PARALLM_FEW_ROWS=no: it may be 'off'"):
        use_few_rows(Model())


def compiler(folder: Path, does: str) -> None:
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


@needs_kernel
def test_it_is_compiled_once_and_a_damaged_or_foreign_file_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kernel: Kernel,
    request: pytest.FixtureRequest,
) -> None:
    [built] = (few_rows.cache_directory("kernels")).glob("few_rows-*.so")
    count = tmp_path / "count"
    compiler(
        tmp_path,
        f'echo >> {count}\nwhile [ "$1" != -o ]; do shift; done\nhead -c -32 {built} > "$2"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    request.addfinalizer(partial(os.umask, os.umask(0o002)))
    for times, name in ((1, "new"), (1, "new"), (2, "half"), (3, "foreign"), (4, "a file")):
        cache = tmp_path / name
        kernels = cache / "mlx_parallm/kernels"
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        if name == "a file":
            cache.touch()  # nothing can be kept
        elif name != "new":
            kernels.mkdir(parents=True, mode=0o700)
            content = built.read_bytes()
            # the linker ends the process on this half of a library
            (kernels / built.name).write_bytes(content[:8000] if name == "half" else content)
            (kernels / built.name).chmod(0o666 if name == "foreign" else 0o600)
        few_rows.load()
        assert count.read_text() == times * "\n", name
        if name != "a file":
            assert (kernels / built.name).read_bytes() == built.read_bytes()
    kernels = tmp_path / "new/mlx_parallm/kernels"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (kernels, kernels / built.name)]
    assert modes == [0o700, 0o600]


def test_a_server_tries_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    monkeypatch.setattr(starting, "use_few_rows", tried.append)
    with InferenceModule("builtin:tiny"):
        assert len(tried) == 1
