"""The benchmarks' peers: their virtual environments, their servers as processes, and which BLAS
one really has."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.server_process import server_process

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/peers/bin/python"
# all cases fit into one batch; the rest: defaults
FLAGS = ("--decode-concurrency", "64", "--prompt-concurrency", "8")


def environment(blas: str) -> dict[str, str]:
    """Return the environment variables of a process of build/peers: "mkl" puts MKL under its MLX
    first, "reference" leaves what pip installed."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "LD_PRELOAD")
    }
    if blas == "reference":
        return variables
    library = next(Path(PYTHON.parents[1], "lib").glob("libmkl_rt.so*"))
    return variables | {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(library.parent)}


@contextmanager
def mlx_lm_server(model: Path, blas: str, flags: Sequence[str] = FLAGS) -> Iterator[str]:
    """Serve a checkpoint while the block runs; give its URL. `blas`: "mkl" or "reference";
    raises when it is not."""
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is missing: run scripts/bench/setup_peers")
    command = [
        PYTHON,
        ROOT / "scripts/bench/mlx_lm_server.py",
        blas,
        "--model",
        model,
        "--log-level",
        "ERROR",
        *flags,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with server_process(
        lambda port: [*command, "--port", str(port)], directory=ROOT, environment=environment
    ) as running:
        url, process = running
        loaded = (
            "mkl" if "libmkl_rt" in Path(f"/proc/{process.pid}/maps").read_text() else "reference"
        )
        assert loaded == blas, f"the peer runs on {loaded}"
        yield url


@contextmanager
def llama_server(file: Path, parallel: int, context: int) -> Iterator[str]:
    """Serve a GGUF file by llama.cpp while the block runs; gives its URL. `context`: positions
    of each sequence."""
    command = [sys.executable, ROOT / "scripts/bench/llama_server.py", file]
    options = ["--parallel", str(parallel), "--context", str(context)]
    with server_process(lambda port: [*command, *options, "--port", str(port)]) as (url, _):
        yield url


def version() -> str:
    """Return the versions that setup_peers installed."""
    code = (
        "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('mlx-lm', 'mlx',"
        " 'mkl')), sep=', ')"
    )
    return subprocess.run(
        [str(PYTHON), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
