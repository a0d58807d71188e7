"""Memory that arrays leave is used again without the kernel, in whichever thread. In fresh interpreters."""

import os
import subprocess
import sys

import pytest

from mlx_parallm.blas import has_cuda_backend
from mlx_parallm.heap import _VARIABLES

CHURN = """
import resource, sys, threading
import mlx_parallm, mlx.core as mx

def churn(times):  # 8 arrays of 6 MiB = 12,288 pages a time
    x = mx.ones((1536, 1024))
    for _ in range(times):
        mx.eval([x * i for i in range(8)])

def faults():
    churn(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    churn(10)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=faults)
faults() if sys.argv[1] == "main" else thread.start()
"""


@pytest.mark.skipif(sys.platform != "linux" or has_cuda_backend(), reason="MLX keeps buffers itself on macOS and CUDA")
@pytest.mark.parametrize("thread", ["main", "another"])
def test_arrays_take_the_memory_of_those_before_them(thread: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    assert page_faults(thread, kept) < 12_288
    assert page_faults(thread, kept | {"MALLOC_TRIM_THRESHOLD_": "131072"}) > 2 * 12_288  # the user's wish is left


def page_faults(thread: str, environment: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CHURN, thread], capture_output=True, text=True, env=environment, check=True
    )
    return int(done.stdout)
