"""Faults of the GPU, by the texts that Metal, CUDA and MLX give them. No MLX.

    device_fault(error)    the named fault behind an exception; None: it is another error
    raised_by_mlx(error)   whether MLX has raised it, and not a tool, a reward, or a library
    DeviceFaults           of one process: any thread notes them, and the first counts for all

MLX raises the error of a command buffer late, in the thread whose stream it was, as a RuntimeError
(0.32.4). What was computed since the last evaluation that is known to be whole may be zeros by
then, in the other threads' streams too. So a fault ends the process: nothing more is published,
no token more is accepted, and a supervisor starts again from the last weights that were whole.
"""

import dis
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from mlx_parallm.errors import DeviceFaultError

TEXT_LENGTH = 400  # characters of the driver's text in our message


@dataclass(frozen=True)
class FaultKind:
    """`signs`: a pattern over the error's text. `advice`: what a user can do about it. `spoils`:
    other results may be wrong; else the error came before anything was computed."""

    name: str
    says: str
    signs: re.Pattern[str]
    advice: str
    spoils: bool = True


def _kind(name: str, says: str, signs: str, advice: str, *, spoils: bool = True) -> FaultKind:
    return FaultKind(name, says, re.compile(signs, re.IGNORECASE), advice, spoils)


_METAL = r"kIOGPUCommandBufferCallbackError"
_SMALLER = "a smaller rl_training.token_budget or server.batch_size needs less"
_SHORTER = "a smaller rl_training.max_eval_ms makes evaluations shorter"
KINDS = (
    _kind(
        "allocation",
        "MLX could not get memory",
        r"\[(?:metal::)?malloc\w*\] (?:Unable|Attempting) to allocate|\[malloc_or_wait\]",
        _SMALLER,
        spoils=False,
    ),
    _kind(
        "resource_limit",
        "too many buffers at once",
        r"Resource limit \(\d+\) exceeded",
        "a new process begins with none; shorter runs between restarts: rl_training.restart_every",
    ),
    _kind(
        "command_queue",
        "the driver gives no more command queues",
        r"Failed to make new command queue|\[metal\S*\].*command queue",
        "a new process begins with none; shorter runs between restarts: rl_training.restart_every",
    ),
    _kind(
        "out_of_memory",
        "the GPU ran out of memory",
        rf"Insufficient Memory|{_METAL}OutOfMemory"
        r"|CUDA\w*[ :_].*out of memory|\bcu(?:da)?\w*\(?.*failed: out of memory"
        r"|out of memory.*\b(?:CUDA|GPU)\b|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|(?:CUBLAS|CUDNN)_STATUS_(?:INTERNAL_ERROR_\w*)?ALLOC(?:ATION)?_FAILED",
        _SMALLER,
    ),
    _kind(
        "display",
        "the GPU's work kept the display from being drawn",
        rf"Impacting Interactivity|{_METAL}ImpactingInteractivity",
        f"{_SHORTER}; a display that sleeps is not drawn",
    ),
    _kind(
        "hang",
        "the GPU hangs",
        rf"GPU Hang|{_METAL}Hang",
        f"{_SHORTER}; a driver that hangs again needs a restart of the machine",
    ),
    _kind(
        "innocent_victim",
        "the GPU was reset because of another program's or thread's work",
        rf"InnocentVictim|victim of GPU error|{_METAL}Stolen",
        "what else computes on this GPU?",
    ),
    _kind(
        "submissions_ignored",
        "the driver takes no more work of this process",
        r"SubmissionsIgnored|excessive GPU errors|Ignored \(for causing|CallbackErrorBlacklisted",
        "only a new process computes again",
    ),
    _kind(
        "timeout",
        "the GPU's work took too long",
        rf"GPU Timeout|{_METAL}Timeout|launch timed out|cudaErrorLaunchTimeout"
        r"|CUDA_ERROR_LAUNCH_TIMEOUT",
        _SHORTER,
    ),
    _kind(
        "launch",
        "a kernel failed on the GPU",
        r"unspecified launch failure|illegal (?:memory access|instruction|address)"
        r"|misaligned address|device-side assert|invalid program counter|launch out of resources"
        r"|too many resources requested for launch|CUDA_ERROR_(?:LAUNCH|ILLEGAL|MISALIGNED)\w*"
        r"|cudaErrorLaunch\w*|hardware stack error",
        "does it come again at the same place, please report it with the model's name",
    ),
    _kind(
        "device",
        "the GPU is gone",
        r"uncorrectable ECC|CUDA_ERROR_(?:ECC|DEVICE|UNKNOWN)\w*|fallen off the bus"
        r"|no CUDA-capable device|GPU is lost|device (?:was )?removed|Access ?Revoked",
        "look at the system's log: a restart of the machine may be needed",
    ),
    _kind(
        "library",
        "a library of the GPU failed",
        r"\b(?:CUBLAS|CUDNN|CUFFT|CUSPARSE|CUSOLVER|NCCL)_(?:STATUS_|ERROR_)?\w+"
        r"|\b(?:cublas|cudnn|cufft|nccl)\w*\(?.* failed",
        "does it come again at the same place, please report it with the model's name",
    ),
    _kind(
        "command_buffer",
        "a command buffer failed on the GPU",
        rf"\[METAL\] Command buffer execution failed|{_METAL}\w*|Internal Error \(0000000e"
        r"|\bcu(?:da)?[A-Z]\w*\(.*\) failed|\bcu(?:da)?[A-Z]\w+ failed:|\bCUDA error",
        "does it come again at the same place, please report it with the model's name",
    ),
)
_OF_OPERATION = re.compile(r"\[(?!METAL\]|metal::|malloc)[^]]*\] ", re.IGNORECASE)
"""How the errors begin that MLX's operations raise by themselves; they may show a user's words,
such as the name of a file."""
WRONG_NUMBERS = FaultKind(
    "wrong_numbers",
    "an evaluation gave numbers that cannot be right",
    re.compile(r"(?!)"),
    "the GPU reported no error: `mlx_parallm doctor` compares it with the CPU",
)


@dataclass(frozen=True)
class DeviceFault:
    """`text`: the driver's own words, one line of them."""

    kind: FaultKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind.says} ({self.text})"


def device_fault(error: BaseException) -> DeviceFault | None:
    """Return the fault of the GPU behind an exception, or behind what it was raised from; None: it
    is another error. Only what MLX raises counts: a tool, a reward function, or another library may
    show the same words."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if isinstance(each, DeviceFaultError) and isinstance(each.fault, DeviceFault):
            return each.fault
        if (kind := _kind_of(each)) is not None and raised_by_mlx(each):
            return DeviceFault(kind, _one_line(each)[:TEXT_LENGTH])
        each = each.__cause__ or each.__context__
    return None


def _kind_of(error: BaseException) -> FaultKind | None:
    text = _one_line(error) if type(error) in _MLX_RAISES else ""
    if not text or _OF_OPERATION.match(text):
        return None
    return next((kind for kind in KINDS if kind.signs.search(text)), None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


_MLX_RAISES = (RuntimeError, MemoryError)
"""For what the device does; themselves, and none that is derived from them."""
_OWN_PACKAGES = {"mlx", "mlx_lm", "mlx_vlm"}
_BY_PYTHON = {"RAISE_VARARGS", "RERAISE", "SEND", "YIELD_VALUE", "RESUME"}
"""Where an exception leaves the frame in which Python has raised it, or in which it was awaited."""


def raised_by_mlx(error: BaseException) -> bool:
    """Return whether MLX has raised an exception: it comes out of a call, not out of a `raise`, and
    the module that made the call uses MLX."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    if dis.opname[frame.f_code.co_code[trace.tb_lasti]] in _BY_PYTHON:
        return False
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    values = (*frame.f_globals.values(), *frame.f_locals.values())
    return package in _OWN_PACKAGES or any(map(_is_of_mlx, values))


def _is_of_mlx(value: object) -> bool:
    """Whether it is a module of MLX, or a function, type or array of one."""
    of = value.__name__ if isinstance(value, ModuleType) else None
    of = of or getattr(value, "__module__", None) or type(value).__module__
    return str(of).partition(".")[0] == "mlx"


def raise_device_fault(error: BaseException) -> None:
    """Raises DeviceFaultError where a fault that spoils other results is behind an error that ends
    only a part of the work."""
    if (fault := device_fault(error)) is not None and fault.kind.spoils:
        raise DeviceFaultError(fault) from error


def wrong_numbers(what: str) -> DeviceFaultError:
    """Return the error of numbers that no sound evaluation gives."""
    return DeviceFaultError(DeviceFault(WRONG_NUMBERS, what))


class DeviceFaults:
    """The faults of this process's device. Any thread.

    The first one that `spoils` is the end of all that computes: `check` raises it in every thread
    from then on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: DeviceFault | None = None

    @property
    def first(self) -> DeviceFault | None:
        """The fault that ends this process; None: there was none."""
        return self._first

    def note(self, error: BaseException, *, ends: bool = False) -> DeviceFault | None:
        """Note the fault behind an error, and return the first one of the process. `ends`: of this
        thread's own work, so that also one that spoils nothing ends the process."""
        fault = device_fault(error)
        if fault is not None and (fault.kind.spoils or ends):
            with self._lock:
                self._first = self._first or fault
        return self._first

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Enclose the work of a separate thread. Raises DeviceFaultError: it has met a fault that
        spoils other results, or another thread has, before it or meanwhile."""
        self.check()
        try:
            yield
        except Exception as error:
            if self.note(error) is None:
                raise
            raise DeviceFaultError(self._first) from error
        self.check()

    def check(self) -> None:
        """Raises DeviceFaultError: a thread has met a fault, and what was computed since may be
        wrong."""
        if self._first is not None:
            raise DeviceFaultError(self._first)
