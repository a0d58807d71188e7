"""Has glibc's malloc keep the memory that arrays leave for the next ones, on Linux CPU. Imports no MLX.

MLX's CPU backend asks malloc for every array. glibc gives what is free at the end of its heap back to the kernel, and
each page of the next array is a fault again at the first touch: elementwise operations on arrays of 3 to 32 MiB took
three to six times as long, training steps 1.1 to 1.2 times (docs/benchmarks/rl_step.md). On macOS and CUDA MLX keeps
buffers itself.
"""

import ctypes
import os
import sys
from typing import Any

from mlx_parallm.system.blas import has_cuda_backend

MAPPED_FROM = 32 << 20  # bytes of an array that is mapped, and unmapped, by itself: as far as glibc goes of itself
KEPT_BYTES = 1 << 30  # free memory at the heap's end above which it goes back; holes between arrays stay
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX")


def keep_freed_memory() -> None:
    """For the whole process; threads that have used malloc before keep an arena of their own. One arena for all, as
    arenas do not share what is free. Whoever sets one of `VARIABLES`, or glibc.malloc in GLIBC_TUNABLES, decides
    instead."""
    malloc = _glibc()
    chosen = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in VARIABLES)
    if malloc is None or chosen:
        return
    if malloc.mallopt(_MMAP_THRESHOLD, MAPPED_FROM) and malloc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES):
        malloc.mallopt(_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """All of it, holes too: after work whose arrays are not like those to come."""
    malloc = _glibc()
    if malloc is not None:
        malloc.malloc_trim(0)


def _glibc() -> Any:
    """None where the C library is another (musl), or MLX keeps buffers itself. A preloaded malloc is not noticed."""
    if sys.platform != "linux" or has_cuda_backend():
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
