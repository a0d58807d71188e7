"""Keeps the memory of arrays that are no longer needed for the next ones, on Linux CPU. Imports no MLX.

MLX's CPU backend asks malloc for every array, and glibc gives a large one back to the kernel as soon as it is free: the
next one is new pages, each of which costs a fault at the first touch. Elementwise operations on arrays of a few
megabytes took three to six times as long for that, training steps 1.1 to 1.2 times (docs/benchmarks/rl_step.md).
On macOS and CUDA MLX keeps buffers itself.
"""

import ctypes
import os
import sys

from mlx_parallm.blas import has_cuda_backend

MAPPED_FROM = 32 << 20  # bytes of an array that is mapped by itself, and unmapped at once: weights, mostly
KEPT_BYTES = 1 << 30  # free memory that may stay at the heap's end
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """True where malloc was told. One arena for all threads, as what another thread frees is else not used again.
    Whoever sets one of `_VARIABLES` decides instead; without glibc nothing happens. Before threads are started."""
    if sys.platform != "linux" or has_cuda_backend() or any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, MAPPED_FROM), (_TRIM_THRESHOLD, KEPT_BYTES))
    return all(mallopt(option, value) == 1 for option, value in wanted)
