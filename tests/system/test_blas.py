"""The BLAS under MLX: a fast one where there is one, said in words where there is not. In fresh
interpreters."""

import os
import subprocess
import sys

import pytest

from mlx_parallm.system.blas import THREAD_VARIABLES, blas_status

needs_mkl = pytest.mark.skipif(
    blas_status().name != "mkl", reason="MKL is not under MLX on this machine"
)


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | env,
        check=True,
    )
    return done.stdout.strip()


@needs_mkl
def test_mkls_own_matmul_is_what_mlx_calls() -> None:
    """MKL says so itself when it is asked to be verbose."""
    code = "import mlx_parallm, mlx.core as mx; mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))"
    assert "MKL_VERBOSE SGEMM" in run(code, MKL_VERBOSE="1")


@needs_mkl
def test_too_late_is_said() -> None:
    code = (
        "import mlx.core, mlx_parallm.system.blas as b; s ="
        " b.blas_status(); print(s.name, '|', s.advice)"
    )
    name, advice = run(code).split("|")
    assert name.strip() == "late"
    assert "before" in advice


@needs_mkl
@pytest.mark.parametrize(("env", "expected"), [({}, "1 1"), ({"MKL_NUM_THREADS": "2"}, "None 2")])
def test_cores_are_shared_unless_the_user_decides(env: dict[str, str], expected: str) -> None:
    code = (
        "import ctypes, mlx_parallm, mlx_parallm.system.blas as b; share ="
        " b.share_blas_between(2, 2);"
        "print(share, ctypes.CDLL(b.blas_status().path).MKL_Get_Max_Threads())"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES
    } | env
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == expected
