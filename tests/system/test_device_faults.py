"""Faults of the GPU: their texts, where they come from, and one for the whole process.

DEVICE_FAULT_TEXTS sets the number of texts of users (10,000 take seconds).
"""

import asyncio
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.daemon import _ended
from mlx_parallm.errors import DeviceFaultError, EnvironmentFailedError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.cpu import kernels
from mlx_parallm.system.device.faults import (
    KINDS as FAULT_KINDS,
)
from mlx_parallm.system.device.faults import (
    DeviceFault,
    DeviceFaults,
    device_fault,
    raise_device_fault,
    wrong_numbers,
)
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.weights import SharedWeights
from tests.altered import Altered
from tests.soak.faulty_evaluations import TEXTS, Plan, inject, raise_as_mlx, set_error

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
    "[load_safetensors] Failed to open file GPU Hang.safetensors",
)
SAID = (
    *TEXTS,
    *OTHERS,
    "device removed",
    "GPU Hang",
    "host:31 [0] NCCL INFO NCCL_DEBUG set by environment to INFO",
    "RuntimeError: CUDA error: device-side assert triggered",
    "pytest: 3 failed, GPU Timeout Error in test_kernel",
)


def caught(act: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as error:
        act()
    return error.value


def found(text: str) -> DeviceFault | None:
    """The fault that an evaluation means which raises this text."""
    return device_fault(caught(lambda: raise_as_mlx(text)))


@pytest.mark.parametrize(
    ("text", "kind"), [*zip(TEXTS, KINDS, strict=True), *OTHERS.items()], ids=str
)
def test_texts_of_drivers_are_named(text: str, kind: str) -> None:
    fault = found(text)
    assert fault is not None and fault.kind.name == kind
    assert fault.text == text and fault.kind.advice


def test_other_errors_are_none() -> None:
    assert [found(text) for text in NONE] == [None] * len(NONE)
    assert {kind.name for kind in FAULT_KINDS} == {*KINDS, *OTHERS.values()}


def behind(text: str) -> list[Callable[[], object]]:
    """The ways on which an evaluation's error arrives."""

    def wrapped() -> None:
        try:
            raise_as_mlx(text)
        except RuntimeError as error:
            raise KeyError("a layer") from error

    def in_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(raise_as_mlx, text).result()

    async def awaited() -> None:
        await asyncio.to_thread(raise_as_mlx, text)

    return [lambda: raise_as_mlx(text), wrapped, in_thread, lambda: asyncio.run(awaited())]


def others(text: str) -> list[Callable[[], object]]:
    """The ways on which the same words come from somebody else."""

    def reward() -> None:
        raise RuntimeError(text)

    def environment() -> None:
        try:
            reward()
        except RuntimeError as error:
            raise EnvironmentFailedError(f"all groups fail: {error}") from error

    def in_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(reward).result()

    async def answered() -> None:
        future = asyncio.get_running_loop().create_future()
        future.set_exception(RuntimeError(text))
        await future

    def of_another_library() -> None:
        exec("fail(RuntimeError, text)", {"fail": set_error, "text": text.encode()})

    def thrown() -> None:
        generator = (each for each in (1, 2))
        next(generator)
        generator.throw(RuntimeError(text))

    return [
        reward,
        environment,
        in_thread,
        of_another_library,
        thrown,
        lambda: asyncio.run(answered()),
        lambda: int(text),
        lambda: mx.load(f"{text}.npz"),
    ]


def test_only_what_mlx_raises_is_a_fault() -> None:
    """Each kind of text, from each place: a tool's, a reward's or an environment's words are their
    own error."""
    for text, kind in [*zip(TEXTS, KINDS, strict=True), *OTHERS.items()]:
        for act in behind(text):
            fault = device_fault(caught(act))
            assert fault is not None and fault.kind.name == kind, text
    draw = random.Random(7)
    for number in range(int(os.environ.get("DEVICE_FAULT_TEXTS", "300"))):
        words = ["", "the tool said: ", "Traceback (most recent call last):\n  ", "1 "]
        text = draw.choice(words) + draw.choice(SAID) + draw.choice(["", "\n", " (exit code 1)"])
        acts = others(text)
        act = acts[number % len(acts)]
        error = caught(act)
        assert device_fault(error) is None, (text, act)
        assert DeviceFaults().note(error, ends=True) is None
    assert device_fault(RuntimeError(TEXTS[0])) is None, "nobody has raised it"
    assert device_fault(wrong_numbers("a gradient is zeros alone")) is not None


def test_the_first_fault_counts_for_all_and_an_allocation_only_for_its_own_work() -> None:
    faults = DeviceFaults()
    refused, hang, victim, ignored = (
        caught(lambda text=text: raise_as_mlx(text))
        for text in ("[malloc] Unable to allocate 8 bytes.", *TEXTS[3:6])
    )
    assert faults.note(refused) is None
    raise_device_fault(refused)
    faults.check()
    first = faults.note(hang)
    assert faults.note(victim) is first is faults.first
    with pytest.raises(DeviceFaultError, match="GPU Hang"):
        faults.check()
    with pytest.raises(DeviceFaultError):
        raise_device_fault(ignored)
    ended = DeviceFaults()
    assert ended.note(refused, ends=True) is not None


def test_a_probe_that_meets_a_fault_says_nothing_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels were off for the rest of the run, and other numbers were rounded."""
    monkeypatch.setattr(kernels, "shutil", Altered(shutil, which=lambda name: "/usr/bin/g++"))
    kernels._compiles.cache_clear()
    try:
        with inject(Plan("raise", "probe", 0, TEXTS[2])), pytest.raises(DeviceFaultError):
            kernels.available()
    finally:
        kernels._compiles.cache_clear()


def test_a_fault_in_the_loader_counts_for_all_threads() -> None:
    """Adapters and older versions are read there, and nobody else sees what it raises."""
    turns, weights = Turns(), SharedWeights(nn.Linear(2, 2), policy="policy", keep_versions=1)
    weights.faults = turns.faults
    pair = {"layer": LoraPair(mx.ones((2, 1)), mx.ones((1, 2)), 1.0)}
    assert weights.in_loader(lambda: 7) == 7
    with pytest.raises(KeyError):
        weights.in_loader({}.popitem)
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        weights.in_loader(lambda: raise_as_mlx("[malloc] Unable to allocate 8 bytes."))
    weights.publish_adapter(pair)
    with pytest.raises(DeviceFaultError, match="GPU Hang"):
        weights.in_loader(lambda: raise_as_mlx(TEXTS[3]))
    with pytest.raises(DeviceFaultError):
        turns.after_evaluation()  # the trainer
    with pytest.raises(DeviceFaultError):
        weights.publish_adapter(pair)
    with pytest.raises(DeviceFaultError):
        weights.in_loader(lambda: 7)
    assert weights.version == 1


def test_a_fault_when_all_is_done_is_none_of_the_work() -> None:
    """A finished run ended with a traceback and exit code 1: its engine had failed as it closed."""

    def end(close: Callable[[], object]) -> None:
        with _ended(close, DeviceFaults(), 60.0):
            pass

    # their own thread: it gives its streams back
    with ThreadPoolExecutor(1) as pool:
        pool.submit(end, lambda: raise_as_mlx(TEXTS[5])).result()
        with pytest.raises(KeyError):
            pool.submit(end, {}.popitem).result()
