"""`mlx_parallm doctor`: device, BLAS and its measured speed, memory, versions, and what to do about
anything slow.

`inspect` measures and returns a `Report`; `advice` is a pure function of it; `run` prints both.
`facts` returns the two lines that a bug report begins with (`cli/contracts.py` prints them).
"""

import atexit
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from rich.markup import escape
from rich.table import Table

from mlx_parallm import __version__
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.blas import CUDA_PACKAGES, BlasStatus, blas_status
from mlx_parallm.system.footprint import others_holding
from mlx_parallm.system.hardware import (
    GIB,
    Hardware,
    detect,
    float32_is_tf32,
    harmful_variables,
    mlx_device,
)
from mlx_parallm.system.packages import extras, missing, mlx_backend_advice, version
from mlx_parallm.system.terminal import Console

SIZES = (512, 2048)  # sizes of the square float32 products that are timed
# for the larger one; on the same two cores the reference BLAS reaches 5, MKL over 80
SLOW_GFLOPS = 20.0
LOW_MEMORY_BYTES = 2 * GIB
PACKAGES = ("mlx", "mlx-lm", "transformers")


@dataclass(frozen=True)
class Report:
    """`gflops`: edge of a square float32 product → its speed; `compile_error`: None when mx.compile
    works.

    `float32`: what products are computed in; `few_rows`: by what those of few rows are computed;
    `holders`: other processes that hold much memory; `harmful`: variables of the environment, each
    with the reason.
    Where MLX cannot be loaded `device` is None and nothing is measured.
    """

    hardware: Hardware
    device: str | None
    blas: BlasStatus
    gflops: dict[int, float]
    versions: dict[str, str | None]
    extras: dict[str, bool]
    compiler: str | None
    compile_error: str | None
    float32: str = ""
    few_rows: str = ""
    holders: Sequence[str] = ()
    harmful: Sequence[str] = ()


def run() -> int:
    """Print the report and the advice. Return 0 when there is none, else 1. Raises ConfigError,
    after the report: MLX cannot be loaded."""
    console = Console()
    if no_mlx := _cannot_load_mlx():
        console.print(_table(inspect_without_mlx()))
        raise ConfigError(no_mlx)
    from mlx_parallm.models.threads import release_streams

    atexit.register(release_streams)
    report = inspect()
    console.print(_table(report))
    sentences = advice(report)
    for line in sentences:
        console.print(f"[yellow]to fix:[/yellow] {escape(line)}", soft_wrap=True, highlight=False)
    if not sentences:
        console.print("[green]nothing to fix[/green]")
    return 1 if sentences else 0


def inspect() -> Report:
    """Measure this machine; takes a few seconds with the reference BLAS, well under one
    otherwise."""
    from mlx_parallm.models.ops import few_rows_here

    return Report(
        hardware=detect(),
        device=mlx_device(),
        blas=blas_status(),
        gflops={size: matmul_gflops(size) for size in SIZES},
        versions=versions(),
        extras=extras(),
        compiler=_compiler(),
        compile_error=_compile_error(),
        float32=float32_words(),
        few_rows=few_rows_here().words(),
        holders=others_holding(),
        harmful=harmful_variables(),
    )


def inspect_without_mlx() -> Report:
    """Return what can be said about this machine before MLX is loaded."""
    return Report(detect(), None, blas_status(), {}, versions(), extras(), _compiler(), None)


def _cannot_load_mlx() -> str | None:
    """Return why MLX cannot be loaded, with what to install; None: it is loaded now."""
    if advice := mlx_backend_advice():
        return advice
    try:
        import mlx.core  # noqa: F401  the driver or a library of the backend may be missing
    except ImportError as error:
        return missing(error)
    return None


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that results depend on, and of installed CUDA backends
    of MLX."""
    cuda = {name: installed for name in CUDA_PACKAGES if (installed := version(name))}
    return {name: version(name) for name in PACKAGES} | cuda


def facts() -> list[str]:
    """Return a line of versions and a line about the machine."""
    hardware = detect()
    named = [f"{name} {installed or 'not installed'}" for name, installed in versions().items()]
    memory = f"{hardware.memory_bytes / GIB:.0f} GiB"
    machine = [
        f"{platform.system()} {platform.release()} {hardware.processor}",
        mlx_device(),
        f"{hardware.cores} cores",
        f"float32 products: {float32_words()}",
    ]
    return [
        " · ".join([f"mlx-parallm {__version__}", *named, f"Python {platform.python_version()}"]),
        " · ".join([*machine, memory, f"BLAS: {_blas_words(blas_status())}", f"{date.today()}"]),
    ]


def float32_words() -> str:
    """Return the precision of float32 products: "whole" or TF32. Loads MLX."""
    if float32_is_tf32():
        return "TF32 (MLX_ENABLE_TF32=0 makes them whole)"
    return "whole"


def matmul_gflops(size: int) -> float:
    """Return the speed of a [size, size] float32 product in GFLOP/s (2·size³ operations), the
    best of up to five."""
    import mlx.core as mx

    left, right = mx.random.normal((2, size, size))
    mx.eval(left, right)
    best = float("inf")
    started = time.perf_counter()
    for _ in range(5):
        before = time.perf_counter()
        mx.eval(left @ right)
        best = min(best, time.perf_counter() - before)
        if time.perf_counter() - started > 1.0:
            break
    return 2 * size**3 / best / 1e9


def advice(report: Report) -> list[str]:
    """Return a sentence for each thing that makes this installation slow or unusable, with what
    to do."""
    sentences: list[str] = []
    if report.blas.advice:
        sentences.append(f"MLX computes with {_blas_words(report.blas)}: {report.blas.advice}")
    elif report.gflops[SIZES[-1]] < SLOW_GFLOPS:
        sentences.append(
            f"matrix products reach {report.gflops[SIZES[-1]]:.0f} GFLOP/s: is another process"
            f" using the {report.hardware.cores} cores?"
        )
    if report.compile_error:
        sentences.append(
            f"mx.compile fails ({report.compile_error}): repair the C++ compiler at"
            f" {report.compiler}"
            " (Debian: `apt install build-essential`), or set MLX_DISABLE_COMPILE=1"
        )
    if report.hardware.available_bytes < LOW_MEMORY_BYTES:
        free, holders = report.hardware.available_bytes / GIB, ", ".join(report.holders)
        named = f" ({holders})" if holders else ""
        sentences.append(
            f"only {free:.1f} GiB of memory are free: stop another process{named}, or add swap"
        )
    sentences += [f"unset {variable}" for variable in report.harmful]
    return sentences


def _table(report: Report) -> Table:
    table = Table(title="mlx_parallm", show_header=False, title_justify="left")
    hardware = report.hardware
    memory = f"{hardware.available_bytes / GIB:.1f} GiB free of {hardware.memory_bytes / GIB:.1f}"
    table.add_row(
        "device",
        (
            f"{report.device or 'MLX cannot be loaded'}, {hardware.cores} cores,"
            f" {hardware.processor}, {platform.system()}"
        ),
    )
    table.add_row(
        "BLAS", _blas_words(report.blas) + (f" ({report.blas.path})" if report.blas.path else "")
    )
    for size, speed in report.gflops.items():
        table.add_row(f"float32 {size}x{size} product", f"{speed:,.0f} GFLOP/s")
    if report.float32:
        table.add_row("float32 products", report.float32)
    if report.few_rows:
        table.add_row("products of few rows", report.few_rows)
    table.add_row("memory", memory)
    if report.holders:
        table.add_row("held by others", ", ".join(report.holders))
    table.add_row("python", f"{platform.python_version()} ({sys.executable})")
    table.add_row("mlx-parallm", __version__)
    for name, installed in report.versions.items():
        table.add_row(name, installed or "not installed")
    table.add_row(
        "extras", ", ".join(name for name, present in report.extras.items() if present) or "none"
    )
    table.add_row(
        "not installed",
        ", ".join(name for name, present in report.extras.items() if not present) or "none",
    )
    table.add_row("C++ compiler", _compiler_words(report))
    return table


def _blas_words(status: BlasStatus) -> str:
    words = {
        "mkl": "MKL",
        "openblas": "OpenBLAS",
        "native": "the platform's own",
        "reference": "the reference BLAS (one thread, no SIMD)",
        "late": "the reference BLAS (MLX was imported first)",
    }
    return words[status.name]


def _compiler_words(report: Report) -> str:
    if report.device is None:
        return report.compiler or "none"
    if report.compile_error:
        return f"{report.compiler} (mx.compile fails)"
    return (
        f"{report.compiler} (mx.compile works)"
        if report.compiler
        else "none (mx.compile runs uncompiled)"
    )


def _compile_error() -> str | None:
    """Return why compiled kernels fail here; None when they work or, without a compiler, are not
    used."""
    import mlx.core as mx

    # a new constant: MLX keeps compiled kernels in the temporary folder
    fresh = time.time_ns() % 1_000_000 / 1e6
    scaled = mx.compile(lambda x: mx.exp(x) * fresh + 1.0)
    try:
        mx.eval(scaled(mx.ones(7)))
    except RuntimeError as error:
        output = str(error).partition("the output is: ")[2] or str(error)
        lines = output.strip().splitlines() or ["no output"]
        return next((line for line in lines if "error" in line), lines[0])
    return None


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")
