"""Faults of the GPU: their texts, and one for the whole process."""

import pytest

from mlx_parallm.errors import DeviceFaultError
from mlx_parallm.models.cpu import kernels
from mlx_parallm.system.device.faults import (
    DeviceFaults,
    device_fault,
    raise_device_fault,
    wrong_numbers,
)
from scripts.soak.faulty_evaluations import TEXTS, Plan, inject

KINDS = (
    "out_of_memory",
    "display",
    "timeout",
    "hang",
    "innocent_victim",
    "submissions_ignored",
    "command_buffer",
    "resource_limit",
    "command_queue",
    "out_of_memory",
    "launch",
    "launch",
    "library",
    "library",
)
OTHERS = {
    "Internal Error (0000000e:Internal Error)": "command_buffer",
    "GPU Timeout Error": "timeout",
    "cudaStreamSynchronize(stream_) failed: the launch timed out and was terminated": "timeout",
    "cudaDeviceSynchronize() failed: uncorrectable ECC error encountered": "device",
    "cudaEventRecord(event, stream) failed: driver shutting down": "command_buffer",
    "CUDA out of memory. Tried to allocate 20.00 MiB": "out_of_memory",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory": "out_of_memory",
    "CUBLAS_STATUS_ALLOC_FAILED": "out_of_memory",
    "CUDNN_STATUS_INTERNAL_ERROR": "library",
    "[malloc] Unable to allocate 8589934592 bytes.": "allocation",
    "[metal::malloc] Attempting to allocate 9 bytes which is greater than": "allocation",
}
NONE = (
    "the model broke",
    "Timeout",
    "There is no Stream(gpu, 3) in current thread.",
    "[matmul] Last dimension of first input with shape (2,3) must match",
    "a queue of commands is empty",
    "Failed to compile kernel: error: expected a ';'.",
)


@pytest.mark.parametrize(
    ("text", "kind"), [*zip(TEXTS, KINDS, strict=True), *OTHERS.items()], ids=str
)
def test_texts_of_drivers_are_named(text: str, kind: str) -> None:
    fault = device_fault(RuntimeError(text))
    assert fault is not None and fault.kind.name == kind
    assert fault.text == text and fault.kind.advice


def test_other_errors_are_none() -> None:
    assert [device_fault(RuntimeError(text)) for text in NONE] == [None] * len(NONE)
    assert device_fault(TimeoutError("GPU Timeout Error")) is None, "no error of MLX"


def test_the_fault_behind_an_error_is_found() -> None:
    try:
        try:
            raise RuntimeError(TEXTS[0])
        except RuntimeError as error:
            raise KeyError("a layer") from error
    except KeyError as error:
        fault = device_fault(error)
    assert fault is not None and fault.kind.name == "out_of_memory"
    assert device_fault(wrong_numbers("a gradient is zeros alone")) is not None


def test_the_first_fault_counts_for_all_and_an_allocation_only_for_its_own_work() -> None:
    faults = DeviceFaults()
    refused = RuntimeError("[malloc] Unable to allocate 8 bytes.")
    assert faults.note(refused) is None
    raise_device_fault(refused)
    faults.check()
    first = faults.note(RuntimeError(TEXTS[3]))
    assert faults.note(RuntimeError(TEXTS[4])) is first is faults.first
    with pytest.raises(DeviceFaultError, match="GPU Hang"):
        faults.check()
    with pytest.raises(DeviceFaultError):
        raise_device_fault(RuntimeError(TEXTS[5]))
    ended = DeviceFaults()
    assert ended.note(refused, ends=True) is not None


def test_a_probe_that_meets_a_fault_says_nothing_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels were off for the rest of the run, and other numbers were rounded."""
    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/usr/bin/g++")
    kernels.available.cache_clear()
    try:
        with inject(Plan("raise", "probe", 0, TEXTS[2])), pytest.raises(DeviceFaultError):
            kernels.available()
    finally:
        kernels.available.cache_clear()
