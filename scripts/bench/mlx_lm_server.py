"""Starts mlx_lm.server in the peers' venv, with MKL loaded under MLX (`mkl`) or as pip install
leaves it (`reference`).

build/peers/bin/python scripts/bench/mlx_lm_server.py mkl --model DIR --port 8000 …

Imports nothing of this package: the peer is measured as its users run it. MKL goes where
mlx_parallm/system/blas.py puts it.
"""

import ctypes
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    blas = sys.argv.pop(1)
    if blas == "mkl":
        library = next(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.argv.insert(1, "server")
    runpy.run_module("mlx_lm", run_name="__main__", alter_sys=True)
