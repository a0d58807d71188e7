"""What this machine is, and the defaults that follow from it. MLX is imported inside functions only.

`detect` needs no MLX, so the configuration can use it; `mlx_device` asks MLX itself.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.system.blas import has_cuda_backend

GIB = 2**30
METAL_EVAL_MS = 1000  # macOS kills GPU work that takes seconds while a display is on (ml-explore/mlx#3267)
KV_CACHE_SHARE = 2  # of the memory that is free once the model is loaded: the rest is for activations, and the trainer
PREFIX_CACHE_SHARE = 20  # of all memory
TOKENS_PER_GIB = 1024  # of a micro-batch: a guard for small machines, far below what the memory holds
RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # of mlx.launch; of mpirun (Open MPI, MPICH)


@dataclass(frozen=True)
class Hardware:
    """`memory_bytes` is the machine's, `available_bytes` what is free now; on Metal the GPU shares both."""

    backend: Literal["cpu", "metal", "cuda"]
    processor: str
    cores: int
    memory_bytes: int
    available_bytes: int


def detect() -> Hardware:
    """This machine, without loading MLX."""
    memory = psutil.virtual_memory()
    return Hardware(_backend(), platform.machine(), usable_cores(), memory.total, memory.available)


def usable_cores() -> int:
    """Cores this process may run on (containers often allow fewer than the machine has)."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launched_rank() -> int | None:
    """The number that mlx.launch or mpirun gave to this process; None: it was started alone."""
    given = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    return None if given is None else int(given)


def defaults(hardware: Hardware) -> dict[str, Any]:
    """Configuration keys whose default depends on the machine (below TOML and the command line in precedence)."""
    found: dict[str, Any] = {}
    if hardware.backend != "cpu":
        found["server.prefill_chunk"] = 2048  # mlx-lm's own step on a GPU; on a CPU it would hold up decoding
    if hardware.backend == "metal":
        found["rl_training.max_eval_ms"] = METAL_EVAL_MS
    affordable = TOKENS_PER_GIB * max(1, hardware.memory_bytes // GIB)
    if affordable < 8192:
        found["rl_training.token_budget"] = affordable
    return found


def memory_present() -> tuple[int, int]:
    """(free now, all there is) in bytes where the model lies: the GPU's memory, or the machine's. Loads MLX."""
    import mlx.core as mx

    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    info: Mapping[str, Any] = mx.device_info() if on_gpu else {}
    whole = next((int(info[key]) for key in ("max_recommended_working_set_size", "total_memory") if key in info), 0)
    machine = psutil.virtual_memory()
    if not whole:
        return machine.available, machine.total
    free = int(info.get("free_memory", min(whole, machine.available)))
    return free, whole


def prefix_cache_bytes(server: ServerConfig, *, deterministic: bool) -> int:
    """`server.prefix_cache_bytes`, by default 1/PREFIX_CACHE_SHARE of all memory. Loads MLX.

    `deterministic`: by default none, as keys and values have other last bits where a decode step computed them, and a
    resumed run does not find what the run before it had kept.
    """
    if server.prefix_cache_bytes is not None:
        return server.prefix_cache_bytes
    return 0 if deterministic else memory_present()[1] // PREFIX_CACHE_SHARE


def kv_cache_bytes(server: ServerConfig, *, deterministic: bool) -> int | None:
    """`server.kv_cache_bytes`, by default 1/KV_CACHE_SHARE of what is free now. Loads MLX.

    `deterministic`: by default no bound, as what is free differs between runs.
    """
    if server.kv_cache_bytes is not None:
        return server.kv_cache_bytes
    return None if deterministic else memory_present()[0] // KV_CACHE_SHARE


def mlx_device() -> str:
    """MLX's default device and its name, e.g. "cpu (AMD EPYC)". Loads MLX."""
    import mlx.core as mx

    info = mx.device_info()
    kind = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
    return f"{kind} ({info.get('device_name', info.get('architecture', 'unknown'))})"


def _backend() -> Literal["cpu", "metal", "cuda"]:
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "metal"
    return "cuda" if has_cuda_backend() else "cpu"
