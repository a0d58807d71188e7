"""Settings of glibc's malloc, so that it keeps freed memory for the next arrays, on Linux CPU.
Imports no MLX.

MLX's CPU backend allocates every array with malloc. glibc returns free memory at the end of its
heap to the kernel, and then each page of the next array costs a page fault: elementwise operations
on arrays of 3 to 32 MiB took three to six times as long, training steps 1.1 to 1.2 times
(docs/benchmarks/training.md#a-grpo-step). On macOS and CUDA MLX keeps buffers itself.
"""

import ctypes
import os
import sys
from typing import Any

from mlx_parallm.system.blas import has_cuda_backend

# bytes from which an array is mapped by itself: the largest that glibc chooses by itself
MAPPED_FROM = 32 << 20
KEPT_BYTES = 1 << 30  # free memory at the heap's end that stays; holes between arrays stay too
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h
VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_ARENA_MAX",
)


def keep_freed_memory() -> None:
    """Set malloc for the whole process: keep freed memory, in one arena, because arenas do not
    share it. Threads that have used malloc before keep their arena. `VARIABLES`, or glibc.malloc
    in GLIBC_TUNABLES, take precedence."""
    malloc = _glibc()
    chosen = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(
        name in os.environ for name in VARIABLES
    )
    if malloc is None or chosen:
        return
    if malloc.mallopt(_MMAP_THRESHOLD, MAPPED_FROM) and malloc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES):
        malloc.mallopt(_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Return all freed memory to the kernel, holes too: after work whose arrays differ from
    later ones."""
    malloc = _glibc()
    if malloc is not None:
        malloc.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library, or None if it is not glibc (musl) or MLX keeps buffers itself. A
    preloaded malloc goes unnoticed."""
    if sys.platform != "linux" or has_cuda_backend():
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
