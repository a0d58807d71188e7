"""What others met on Metal and what is done about it, where no other test shows it. The table of
docs/operations.md#a-mac has all of it."""

import os
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
from structlog.testing import capture_logs

from mlx_parallm.cli import command
from mlx_parallm.cli.command import end_of_training
from mlx_parallm.distributed import ranks
from mlx_parallm.models import loading
from mlx_parallm.models.cpu import kernels
from mlx_parallm.models.ops import fused
from mlx_parallm.system import footprint
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from mlx_parallm.system.footprint import others_holding
from mlx_parallm.system.packages import wrong_wheel
from mlx_parallm.system.signals import EndLimit
from tests.altered import Altered

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[metal::Device] Unable to load kernel v_copyfloat32float32", True),
        ("program_source: error: language version 4.0 is not supported on this OS", True),
        ("[matmul] Last dimension of first input", False),
    ],
)
def test_a_wheel_for_another_macos_is_named(text: str, named: bool) -> None:
    line = wrong_wheel(RuntimeError(text))
    assert (line is not None and "--force-reinstall" in line and text[:40] in line) == named


def test_programs_that_hold_much_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(pid: int, name: str, size: float | None) -> SimpleNamespace:
        memory = None if size is None else SimpleNamespace(rss=int(size * GIB))
        return SimpleNamespace(info={"pid": pid, "name": name, "memory_info": memory})

    others = [
        process(os.getpid(), "python", 20),
        process(-1, "bash", 0.1),
        process(-2, "LM Studio", 7),
        process(-3, "another user's", None),
        process(-4, "ollama", 12.3),
    ]
    monkeypatch.setattr(footprint, "machine_bytes", lambda: 32 * GIB)
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: iter(others))
    assert others_holding() == ["ollama 12.3 GiB", "LM Studio 7.0 GiB"]


@pytest.mark.usefixtures("informative_logs")
def test_jaccl_is_called_experimental(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(mx.distributed, "init", lambda: group)
    monkeypatch.setenv("MLX_RANK", "0")
    said = []
    for backend in ("", "MLX_IBV_DEVICES"):
        if backend:
            monkeypatch.setenv(backend, "devices.json")
        with capture_logs() as logs:
            ranks.join().close()
        said.append([line["event"] for line in logs if "JACCL is experimental" in line["event"]])
    assert [len(events) for events in said] == [0, 1]


@pytest.mark.parametrize("code", [0, 2])
def test_a_run_on_a_gpu_ends_before_native_libraries_clean_up(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of one's own that ran last makes MLX's destructors fail."""
    ended = list[int]()
    monkeypatch.setattr(command, "os", Altered(os, _exit=ended.append))
    assert end_of_training(code) == code and ended == []
    monkeypatch.setenv(DEVICE_VARIABLE, GPU_LIKE)
    end_of_training(code)
    assert ended == [code or EndLimit.exit_code]


def test_no_gradient_is_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(x: mx.array) -> mx.array:
        return x

    monkeypatch.setattr(kernels, "_compiles", lambda: True)
    assert fused(plain, 1 << 30) is not plain
    monkeypatch.setenv(DEVICE_VARIABLE, GPU_LIKE)
    assert fused(plain, 1 << 30) is plain


@pytest.mark.usefixtures("informative_logs")
def test_weights_that_32_bits_do_not_count_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 4)
    for most, warnings in ((31, 1), (32, 0)):
        monkeypatch.setattr(loading, "INDEXED", most)
        with capture_logs() as logs:
            loading.evaluate_module(layer)
        assert [line["shapes"] for line in logs] == ["(4, 8)"] * warnings
