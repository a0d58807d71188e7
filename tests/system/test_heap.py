"""Memory that arrays leave is used again without the kernel, whichever thread left it. In fresh
interpreters."""

import os
import subprocess
import sys

import pytest

from mlx_parallm.system.blas import has_cuda_backend
from mlx_parallm.system.heap import VARIABLES

linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or has_cuda_backend(),
    reason="MLX keeps buffers itself on macOS and CUDA",
)
PAGES = 12_288  # of 8 arrays of 6 MiB
COMMON = """
import resource, sys, threading
import mlx_parallm, mlx.core as mx
from mlx_parallm.system.heap import give_back_freed_memory

def churn(times):
    x = mx.ones((1536, 1024))
    for _ in range(times):
        mx.eval([x * i for i in range(8)])

def in_threads():
    for _ in range(10):
        thread = threading.Thread(target=churn, args=(1,))
        thread.start()
        thread.join()

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

churn(3)
"""


@linux_cpu
@pytest.mark.parametrize(
    "work", ["lambda: churn(10)", "in_threads"], ids=["one thread", "ten threads"]
)
def test_arrays_take_the_memory_of_those_before_them(work: str) -> None:
    code = f"{COMMON}\nprint(faults({work}))"
    assert run(code) < PAGES / 4
    assert run(code, MALLOC_TRIM_THRESHOLD_="131072") > PAGES / 4  # the user's own wish is left


@linux_cpu
def test_what_is_given_back_is_new_memory_again() -> None:
    assert run(f"{COMMON}\ngive_back_freed_memory()\nprint(faults(lambda: churn(1)))") > PAGES / 4


@pytest.mark.slow
@linux_cpu
def test_loading_a_model_gives_back_what_it_left() -> None:
    load = "load_model(ModelConfig(base_path='builtin:tiny'))"
    code = f"""{COMMON}
from pathlib import Path
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_model

def resident():  # pages
    return int(Path("/proc/self/statm").read_text().split()[1])

first = {load}
churn(3)
before = resident()
second = {load}
print(before - resident())
"""
    assert run(code) > PAGES / 4


def run(code: str, **environment: str) -> int:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (*VARIABLES, "GLIBC_TUNABLES")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=kept | environment,
        check=True,
    )
    return int(done.stdout)
