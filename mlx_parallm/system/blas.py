"""Loads a fast BLAS for MLX on Linux CPU, before MLX is imported. Imports no MLX.

MLX's Linux CPU wheel links the reference BLAS (one thread, no SIMD). The dynamic linker resolves
`cblas_sgemm` in the global scope first, so a library loaded with RTLD_GLOBAL before the first
`import mlx.core` takes its place: 10 to 60 times faster matrix products. macOS (Accelerate, Metal)
and CUDA need none of this.
"""

import ctypes
import ctypes.util
import importlib.metadata
import os
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CLONE = "in the clone of the repository"
"""Where pip is run. The package is on no index yet, so no hint may name it there: whoever
registers the name would own what the hint installs."""


def install(extra: str) -> str:
    """Return the command that brings an extra, and where it is run."""
    return f"pip install '.[{extra}]' {CLONE}"


FIX = (
    f"`{install('cpu')}` brings MKL (x86-64); or install a system OpenBLAS"
    " (Debian: libopenblas0-pthread)"
)

# MLX's CUDA backends, one for each major version of CUDA
CUDA_PACKAGES = ("mlx-cuda-12", "mlx-cuda-13")
THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_THREAD_SETTERS = {"mkl": "MKL_Set_Num_Threads", "openblas": "openblas_set_num_threads"}


@dataclass(frozen=True)
class BlasStatus:
    """The BLAS of MLX. `name`: "mkl", "openblas", "reference", "native" (macOS, CUDA), "late"
    (MLX came first)."""

    name: str
    path: str | None = None
    advice: str | None = None


_status: list[BlasStatus] = []  # one entry once `preload_fast_blas` has run


def blas_status() -> BlasStatus:
    """Return the result of `preload_fast_blas`, without loading anything."""
    return _status[0] if _status else BlasStatus("reference", advice=FIX)


def preload_fast_blas() -> BlasStatus:
    """Load MKL or a system OpenBLAS with global symbol visibility. Idempotent; does nothing off
    Linux CPU."""
    if not _status:
        _status.append(_preload())
    return _status[0]


def share_blas_between(threads: int, cores: int) -> int | None:
    """Give each of `threads` computing threads its share of the cores; return it, None where
    nothing was set.

    The BLAS' own threads spin while they wait for work. With an engine and a trainer on two cores,
    two BLAS threads took 1.13 to 1.19 times the wall time and 1.8 times the CPU time of one
    (docs/benchmarks/learning.md#quickstart-tasks). Whoever sets MKL_NUM_THREADS, OMP_NUM_THREADS or
    OPENBLAS_NUM_THREADS decides instead.
    """
    status = blas_status()
    setter = _THREAD_SETTERS.get(status.name)
    if (
        setter is None
        or status.path is None
        or any(name in os.environ for name in THREAD_VARIABLES)
    ):
        return None
    share = max(1, cores // threads)
    getattr(ctypes.CDLL(status.path), setter)(share)
    return share


def request_bitwise_reproducible_blas() -> None:
    """Ask MKL for results that do not depend on batch size or threads. Must run before the
    first matrix product."""
    os.environ["MKL_CBWR"] = "AUTO,STRICT"


def is_reproducible() -> bool:
    """Whether MKL was asked, here or by the user, for results that come again."""
    return os.environ.get("MKL_CBWR", "").upper() not in ("", "OFF")


def _preload() -> BlasStatus:
    if sys.platform != "linux" or has_cuda_backend():
        return BlasStatus("native")
    if "mlx.core" in sys.modules:
        return BlasStatus(
            "late",
            advice="`import mlx_parallm` before `import mlx.core`: the reference BLAS is in use",
        )
    for name, path in _candidates():
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, "cblas_sgemm"):
            return BlasStatus(name, path)
    return BlasStatus("reference", advice=FIX)


def has_cuda_backend() -> bool:
    """True when one of MLX's CUDA wheels is installed."""
    for name in CUDA_PACKAGES:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def _candidates() -> list[tuple[str, str]]:
    libraries: list[tuple[str, str]] = []
    if platform.machine() == "x86_64":
        roots = dict.fromkeys([sysconfig.get_path("data"), sys.prefix])
        libraries += [
            ("mkl", str(p))
            for root in roots
            for p in sorted(Path(root, "lib").glob("libmkl_rt.so*"))
        ]
    directories = [
        f"/usr/lib/{platform.machine()}-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ]
    names = ["openblas-pthread/libopenblas.so.0", "libopenblas.so.0", "libopenblas.so"]
    libraries += [
        ("openblas", str(Path(d, n))) for d in directories for n in names if Path(d, n).exists()
    ]
    return libraries
