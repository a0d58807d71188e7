"""Hardware of this machine. MLX is imported inside functions only: `detect` needs none,
`mlx_device` does."""

import errno
import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil

from mlx_parallm.system.blas import has_cuda_backend
from mlx_parallm.system.device.traits import computes_beside_python, is_cpu
from mlx_parallm.system.footprint import MemoryUse, machine_bytes, process_bytes

GIB, MIB = 2**30, 2**20
# 1/2 of the memory that is free once the model is loaded; activations and the trainer take the rest
KV_CACHE_SHARE = 2
PREFIX_CACHE_SHARE = 20  # 1/20 of all memory
PREFIX_DISK_SHARE, PREFIX_DISK_MOST = 20, 20 << 30  # 1/20 of the free disk
# share of Metal's wired memory: a larger model leaves too little for the cache (mlx-lm's number)
WIRED_SHARE = 0.9
# set by mlx.launch --backend jaccl
JACCL_VARIABLES = ("MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR")
TF32 = "MLX_ENABLE_TF32"
HARMFUL = {
    "MLX_METAL_FAST_SYNCH": "two streams of work have locked the GPU with it (ml-explore/mlx#3830)"
}
RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Hardware:
    """`memory_bytes` is the machine's memory, `available_bytes` is free now; on Metal the GPU
    shares both."""

    backend: Literal["cpu", "metal", "cuda"]
    processor: str
    cores: int
    memory_bytes: int
    available_bytes: int


def detect() -> Hardware:
    """Return this machine's hardware, without loading MLX."""
    whole, free = machine_memory()
    return Hardware(_backend(), platform.machine(), usable_cores(), whole, free)


def machine_memory() -> tuple[int, int]:
    """Return (all, free) bytes of the machine's memory, as far as this process may have it."""
    whole, free = machine_bytes(), int(psutil.virtual_memory().available)
    return whole, min(free, max(0, whole - process_bytes()))


def usable_cores() -> int:
    """Return the number of cores for this process (containers often allow fewer than the machine
    has)."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launched_rank() -> int | None:
    """Return this process's rank from mlx.launch or mpirun; None: it was started alone."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    return None if rank is None else int(rank)


def launched_with_jaccl() -> bool:
    """Whether the ranks of this launch are connected by JACCL."""
    return any(name in os.environ for name in JACCL_VARIABLES)


def use_whole_float32() -> None:
    """Let float32 products be whole float32 (`float32_is_tf32`), unless the user has chosen. Before
    MLX computes."""
    os.environ.setdefault(TF32, "0")


def harmful_variables() -> list[str]:
    """Return "NAME: why" for each variable of the environment that does harm to MLX."""
    return [
        f"{name}: {why}"
        for name, why in HARMFUL.items()
        if os.environ.get(name, "0") not in ("", "0")
    ]


def memory_present() -> tuple[int, int]:
    """Return (free, total) bytes of the memory that holds the model: the GPU's or the machine's.
    Loads MLX."""
    import mlx.core as mx

    info: Mapping[str, Any] = {} if is_cpu() else mx.device_info()
    whole = next(
        (
            int(info[key])
            for key in ("max_recommended_working_set_size", "total_memory")
            if key in info
        ),
        0,
    )
    machine, available = machine_memory()
    if not whole:
        return available, machine
    return int(info.get("free_memory", min(whole, available))), whole


def prefix_cache_bytes(configured: int | None, *, deterministic: bool, processes: int = 1) -> int:
    """Return `server.prefix_cache_bytes`; if it is None, 1/PREFIX_CACHE_SHARE of all memory,
    which `processes` share. Loads MLX.

    In deterministic mode None means no cache: keys and values of a decode step differ in the last
    bits from those of a prefill, and a resumed run has not the cache of the earlier one.
    """
    if configured is not None:
        return configured
    return 0 if deterministic else memory_present()[1] // (PREFIX_CACHE_SHARE * processes)


def prefix_disk_bytes(configured: int | None, folder: Path, *, off: bool) -> int:
    """Return `server.prefix_disk_bytes`; if it is None, on macOS 1/PREFIX_DISK_SHARE of the disk
    that is free where `folder` is to be, at most PREFIX_DISK_MOST, and elsewhere 0. `off`: then it
    is always 0."""
    if off or configured is not None:
        return 0 if off else configured or 0
    if sys.platform != "darwin":
        return 0
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return min(PREFIX_DISK_MOST, shutil.disk_usage(there).free // PREFIX_DISK_SHARE)


def kv_cache_bytes(
    configured: int | None, *, deterministic: bool, processes: int = 1
) -> int | None:
    """`server.kv_cache_bytes`; if it is None, 1/KV_CACHE_SHARE of the memory that is free now,
    which `processes` share. Loads MLX.

    In deterministic mode None means no bound, because free memory differs between runs.
    """
    if configured is not None:
        return configured
    return None if deterministic else memory_present()[0] // (KV_CACHE_SHARE * processes)


def async_scheduling(configured: bool | None, *, deterministic: bool) -> bool:
    """`server.async_scheduling`; if it is None, whether the device computes beside Python. Loads
    MLX.

    In deterministic mode None means off: which version draws a token would depend on when it was
    started.
    """
    if configured is not None:
        return configured
    return not deterministic and computes_beside_python()


def wire_memory(model_bytes: int, wired: float | str = "off") -> str | None:
    """Let Metal keep a part of its memory from being paged out (`server.wired_memory`). Does
    nothing where MLX's default device is not a Metal GPU. Loads MLX.

    Args:
        wired: "off", "weights" (as much as they take), or a share of what Metal recommends. Panics
            of the macOS kernel were reported with any (docs/operations.md#a-mac).

    Return advice for a model that takes more than `WIRED_SHARE` of that memory, else None.
    """
    import mlx.core as mx

    info = {} if is_cpu() else mx.device_info()
    if "max_recommended_working_set_size" not in info:
        return None
    most, whole = int(info["max_recommended_working_set_size"]), int(info["memory_size"])
    if wired != "off":
        mx.set_wired_limit(min(most, model_bytes) if wired == "weights" else int(wired * most))
    if model_bytes <= WIRED_SHARE * most:
        return None
    sizes = (
        f"the model takes {model_bytes / GIB:.1f} GiB of the {most / GIB:.1f}"
        " GiB that Metal keeps in memory: "
    )
    wanted = int(model_bytes / WIRED_SHARE)
    if wanted > WIRED_SHARE * whole:
        return sizes + "it will be slow on this machine; a quantized or a smaller one fits"
    return sizes + (
        f"`sudo sysctl iogpu.wired_limit_mb={-(-wanted // MIB)}` raises that"
        " until the next start of macOS"
    )


def memory_use(processes: int = 1) -> list[MemoryUse]:
    """Return what this process takes of each memory that holds its arrays. Loads MLX.

    Args:
        processes: share this machine; each may have its part.
    """
    import mlx.core as mx

    arrays = mx.get_active_memory() + mx.get_cache_memory()
    machine = machine_bytes() // processes
    if is_cpu():
        return [MemoryUse("process", process_bytes(), machine)]
    if sys.platform == "darwin":  # one memory for both
        return [MemoryUse("process", max(process_bytes(), arrays), machine)]
    gpu = MemoryUse("gpu", arrays, memory_present()[1] // processes)
    return [gpu, MemoryUse("process", process_bytes(), machine)]


def bound_buffer_cache(share: float, *, processes: int = 1) -> int:
    """Let MLX keep at most this share of the memory as freed buffers for the next arrays
    (`server.buffer_cache`), and return the bytes. MLX's own bound stays if it is lower, as on a
    CPU; on a GPU it has none that protects the machine. Loads MLX."""
    import mlx.core as mx

    wanted = int(share * memory_present()[1]) // processes
    before = mx.set_cache_limit(wanted)
    if before < wanted:
        mx.set_cache_limit(before)
    return min(before, wanted)


def empty_buffer_cache() -> None:
    """Give freed buffers back to the system once this thread's own work is done: emptied beside
    work in flight, Metal has answered with errors and wrong data. Loads MLX."""
    import mlx.core as mx

    mx.synchronize()
    mx.clear_cache()


@cache
def float32_is_tf32() -> bool:
    """Whether float32 products keep ten bits of the mantissa here, as MLX lets M5 and CUDA do
    unless MLX_ENABLE_TF32 is 0. Measured once, on a GPU only. Loads MLX."""
    import mlx.core as mx

    if is_cpu():
        return False
    fine = mx.full((128, 128), 1 + 2**-12)  # TF32 makes 1 of it
    return not mx.array_equal(fine @ mx.eye(128), fine).item()


def mlx_device() -> str:
    """Return MLX's default device and its name, e.g. "cpu (AMD EPYC)". Loads MLX."""
    import mlx.core as mx

    info = mx.device_info()
    kind = "cpu" if is_cpu() else "gpu"
    return f"{kind} ({info.get('device_name', info.get('architecture', 'unknown'))})"


def _backend() -> Literal["cpu", "metal", "cuda"]:
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "metal"
    return "cuda" if has_cuda_backend() else "cpu"


_NO_ROOM = (
    "can't start new thread",
    "cannot allocate memory",
    "failed to map segment",
    "unable to allocate",
    "bad_alloc",
    "[malloc",
)
_LIMITS = (
    (resource.RLIMIT_AS, "ulimit -v", "bytes of memory"),
    (resource.RLIMIT_NPROC, "ulimit -u", "threads"),
)


def lack_of_room(error: BaseException) -> str | None:
    """Return a line about an error that says that the system gives no more memory or threads; None:
    it is another one."""
    each: BaseException | None = error
    while each is not None:
        lacks = isinstance(each, MemoryError) or getattr(each, "errno", None) == errno.ENOMEM
        if lacks or any(sign in str(each).lower() for sign in _NO_ROOM):
            break
        each = each.__cause__ or each.__context__
    if each is None:
        return None
    limits = [
        f"{soft:,} {what} (`{command}`)"
        for kind, command, what in _LIMITS
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    allowed = f"; this process may have {' and '.join(limits)}" if limits else ""
    return (
        f"the system gives no more memory or threads ({str(each).strip() or type(each).__name__})"
        f"{allowed}: allow more, or choose a smaller model or batch"
    )
