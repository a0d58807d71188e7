"""A device that fails: MLX's evaluations raise, give zeros, or hang, once, as a plan says. For
`gpu_faults` and tests.

    inject(plan)                 in this process
    planned(directory, plans)    for `preloaded_train`: each of its processes takes the next plan
"""

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

METAL = "[METAL] Command buffer execution failed: {}."
TEXTS = (
    *map(
        METAL.format,
        (
            "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            "Impacting Interactivity (0000000e:"
            "kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
            "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
            "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
            "Discarded (victim of GPU error/recovery) (00000005:"
            "kIOGPUCommandBufferCallbackErrorInnocentVictim)",
            "Ignored (for causing prior/excessive GPU errors) (00000004:"
            "kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
            "Internal Error (0000000e:Internal Error)",
        ),
    ),
    "[metal::malloc] Resource limit (499000) exceeded.",
    "[metal::CommandEncoder] Failed to make new command queue.",
    "cudaMallocAsync(&data, size, stream) failed: out of memory",
    "cudaGraphLaunch(graph, stream) failed: an illegal memory access was encountered",
    "cuLaunchKernel(kernel, grid, block) failed: unspecified launch failure",
    "cublasLtMatmul(handle, desc) failed with code: 14.",
    "cudnnBackendExecute(handle, plan) failed: CUDNN_STATUS_EXECUTION_FAILED.",
)
PLACES = {
    "publish": {"_publish", "judge"},
    "checkpoint": {"_keep_proved", "_save", "_check_room"},
    "gradient": {"loss_and_gradients", "_zeros"},
    "optimizer": {"apply"},
    "adapter": {"_write"},
    "scores": {"_score_rows"},
    "keys": {"move_rows"},
    "probe": {"_compiles"},
    "sampler": {"collect"},
    "reward model": {"_scores_of"},
}
"""Functions of the package that an evaluation is called from. `engine`, `trainer`, `loader`: the
thread; `evaluation`: the engine's, while the trainer waits for held-out answers."""
SELF_CHECKS = {"_check", "compare_layouts"}
"""What a model computes at its start to see whether a path gives the plain one's numbers. Zeros
there choose the plain path, which is not a fault that could be noticed."""
BY_CPU = "save_kept"  # computes without the GPU, which no longer does
PLAN, STATE = "plans.json", "next"


@dataclass(frozen=True)
class Plan:
    """`kind`: raise, zeros, hang (holding the interpreter) or sleep. `place`: a key of PLACES,
    engine, trainer or any; `after`: so many evaluations there. `text`: of the error; `sticks`:
    every later evaluation raises too."""

    kind: str
    place: str
    after: int
    text: str = ""
    sticks: bool = False


def raise_as_mlx(text: str) -> None:
    """Raise an error as MLX does: from C, with no `raise` of Python. Raises RuntimeError."""
    set_error(RuntimeError, text.encode())


set_error = ctypes.pythonapi.PyErr_SetString
set_error.argtypes, set_error.restype = (ctypes.py_object, ctypes.c_char_p), None


class Injector:
    """Stands before `mx.eval`, `mx.async_eval` and `mx.synchronize`."""

    def __init__(self, plan: Plan, on_fire: Callable[[str], None] = lambda where: None) -> None:
        self.plan, self._on_fire = plan, on_fire
        self._lock, self._seen = threading.Lock(), 0
        self.fired: str | None = None
        """Where: the function of the package that evaluated."""

    def call(self, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self.fired is not None:
            if self.plan.sticks and self.plan.kind == "raise" and BY_CPU not in _callers():
                raise_as_mlx(self.plan.text)
            return real(*arguments)
        callers = _callers()
        where = callers[0] if callers else ""
        arrays = [] if real.__name__ == "synchronize" else _arrays(arguments)
        if not self._is_here(callers) or (self.plan.kind == "zeros" and not _may_be_lost(arrays)):
            return real(*arguments)
        if self.plan.kind == "zeros" and not SELF_CHECKS.isdisjoint(callers):
            return real(*arguments)
        with self._lock:
            self._seen += 1
            if self._seen <= self.plan.after or self.fired is not None:
                return real(*arguments)
            self.fired = where
        self._on_fire(where)
        return self._fire(real, arguments, arrays)

    def _is_here(self, callers: list[str]) -> bool:
        place = self.plan.place
        if place in PLACES:
            return not PLACES[place].isdisjoint(callers)
        thread = threading.current_thread()
        if place == "loader":
            return thread.name == "loader"
        # while it loads there is nothing to lose
        if not {"step", "run"} & set(callers):
            return False
        if place == "trainer":
            return thread is threading.main_thread()
        on_engine = place == "any" or thread.name == "engine"
        return on_engine and (place != "evaluation" or _trainer_evaluates())

    def _fire(self, real: Callable[..., Any], arguments: Any, arrays: list[Any]) -> Any:
        match self.plan.kind:
            case "raise":
                raise_as_mlx(self.plan.text)
            case "hang":
                ctypes.PyDLL(None).sleep(3600)  # the interpreter is held
            case "sleep":
                time.sleep(3600)
            case "zeros":
                result = real(*arguments)
                for array in arrays:
                    array[...] = 0
                real(*arrays)
                return result
        return real(*arguments)


def _trainer_evaluates() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if "rl_training/evaluation" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _may_be_lost(arrays: list[Any]) -> bool:
    """Whether there are numbers besides 0 to lose."""
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    return any(bool(mx.any(array).item()) for array in floats)


def _callers() -> list[str]:
    frame, names = sys._getframe(2), []
    while frame is not None:
        if "mlx_parallm" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def _arrays(tree: Any) -> list[Any]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [a for part in tree for a in _arrays(part)] if isinstance(tree, list | tuple) else []


def patch(injector: Injector) -> Callable[[], None]:
    """Put it before MLX's functions; return what takes it away."""
    before = {name: getattr(mx, name) for name in ("eval", "async_eval", "synchronize")}

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: injector.call(real, arguments)

    for name, real in before.items():
        setattr(mx, name, wrapped(real))
    return lambda: [setattr(mx, name, real) for name, real in before.items()] and None


@contextmanager
def inject(plan: Plan, on_fire: Callable[[str], None] = lambda where: None) -> Iterator[Injector]:
    """Let the device of this process fail once within the block."""
    injector = Injector(plan, on_fire)
    undo = patch(injector)
    try:
        yield injector
    finally:
        undo()


def planned(directory: Path, plans: list[Plan]) -> Path:
    """Write the plans where `take_next` finds them; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PLAN).write_text(json.dumps([asdict(plan) for plan in plans]))
    return directory


def take_next(here: str) -> None:
    """Let this process fail by the next plan that no process has fired."""
    directory = Path(here)
    plans = json.loads((directory / PLAN).read_text())
    fired = fired_of(directory)
    if len(fired) == len(plans):
        return

    def on_fire(where: str) -> None:
        with (directory / STATE).open("a") as file:
            file.write(json.dumps({"where": where, "at": time.time()}) + "\n")

    patch(Injector(Plan(**plans[len(fired)]), on_fire))


def fired_of(directory: Path) -> list[dict[str, Any]]:
    """Return where and when the plans were fired, in their order."""
    file = directory / STATE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
