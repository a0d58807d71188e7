"""mlx_parallm_doctor: what it shows here, and one test for each sentence of its advice."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_parallm.cli import doctor_report as doctor_module
from mlx_parallm.cli.doctor_report import Report, advice, matmul_gflops
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.blas import FIX, BlasStatus, blas_status
from mlx_parallm.system.hardware import GIB, Hardware, harmful_variables

BIN = Path(sys.executable).parent
HEALTHY = Report(
    hardware=Hardware("cpu", "x86_64", 2, 16 * GIB, 8 * GIB),
    device="cpu (test)",
    blas=BlasStatus("mkl", "/lib/libmkl_rt.so"),
    gflops={512: 100.0, 2048: 200.0},
    versions={},
    extras={},
    compiler="/usr/bin/g++",
    compile_error=None,
)


def doctor(**environment: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"COLUMNS": "200"} | environment
    return subprocess.run(
        [BIN / "mlx_parallm_doctor"], env=env, capture_output=True, text=True, check=False
    )


def test_a_healthy_machine_gets_no_advice() -> None:
    assert advice(HEALTHY) == []


def test_a_variable_that_does_harm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "0")
    assert harmful_variables() == []
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    (line,) = advice(replace(HEALTHY, harmful=harmful_variables()))
    assert line.startswith("unset MLX_METAL_FAST_SYNCH: ")


def test_who_holds_the_memory_is_named() -> None:
    short = replace(HEALTHY.hardware, available_bytes=GIB)
    (line,) = advice(replace(HEALTHY, hardware=short, holders=["ollama 12.3 GiB"]))
    assert "1.0 GiB of memory are free: stop another process (ollama 12.3 GiB)" in line


def test_the_reference_blas_is_named_with_its_fix() -> None:
    (line,) = advice(
        replace(HEALTHY, blas=BlasStatus("reference", advice=FIX), gflops={512: 5.0, 2048: 5.0})
    )
    assert "reference BLAS" in line
    assert "pip install '.[cpu]'" in line


@pytest.mark.slow
@pytest.mark.long
def test_mlx_imported_first_is_told_apart() -> None:
    program = "import mlx.core, mlx_parallm.cli.doctor_report as d\nprint(d.advice(d.inspect()))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    if sys.platform == "linux" and blas_status().name in ("mkl", "openblas"):
        assert "MLX was imported first" in result.stdout
    else:
        assert "imported first" not in result.stdout


def test_a_fast_blas_that_is_slow_is_questioned() -> None:
    (line,) = advice(replace(HEALTHY, gflops={512: 100.0, 2048: 9.0}))
    assert "9 GFLOP/s" in line
    assert "2 cores" in line


def test_little_memory_is_told() -> None:
    (line,) = advice(replace(HEALTHY, hardware=replace(HEALTHY.hardware, available_bytes=GIB // 2)))
    assert "0.5 GiB" in line


@pytest.mark.skipif(
    sys.platform != "linux" or blas_status().name == "native",
    reason="MLX's CPU backend compiles with g++",
)
def test_a_broken_compiler_is_found_out(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\ncase "$*" in *.cpp*) echo "fatal error: no ld"; exit 1;; esac\n')
    fake.chmod(0o755)
    result = doctor(PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.returncode == 1, result.stdout
    assert "mx.compile fails (fatal error: no ld)" in result.stdout


@pytest.mark.slow
def test_the_command_shows_this_machine() -> None:
    result = doctor()
    assert result.returncode == ("to fix:" in result.stdout), result.stderr
    for word in (
        "device",
        "BLAS",
        "float32 512x512",
        "float32 2048x2048",
        "GFLOP/s",
        "products of few rows",
        "memory",
        "mlx-lm",
        "transformers",
    ):
        assert word in result.stdout


def test_the_measured_speed_is_a_speed() -> None:
    assert 0.1 < matmul_gflops(128) < 1e6


def test_every_cuda_backend_of_mlx_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"mlx": "0.32.4", "mlx-cuda-13": "0.32.4"}
    monkeypatch.setattr(doctor_module, "version", installed.get)
    assert doctor_module.versions()["mlx-cuda-13"] == "0.32.4"
    assert "mlx-cuda-12" not in doctor_module.versions()


def test_without_mlx_it_shows_the_machine_and_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor_module, "mlx_backend_advice", lambda: "MLX has no backend here: pip install 'x[cpu]'"
    )
    with pytest.raises(ConfigError, match=r"x\[cpu\]"):
        doctor_module.run()
    shown = capsys.readouterr().out
    assert "MLX cannot be loaded" in shown and "memory" in shown and "GFLOP" not in shown
