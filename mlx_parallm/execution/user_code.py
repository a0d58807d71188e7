"""The user's own functions and classes, named `python:file.py:name` or
`python:package.module:name`. No MLX.

`load` imports one, `check_call` checks its parameters before anything is built from it, and
`user_code` is the boundary around every later call: an error of the user's code becomes one line
with the function, its file and the line.

A relative file is looked for beside the configuration file, then in the working directory
(`absolute`, called when a configuration is read, so that a saved one does not depend on either).
"""

import asyncio
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.system.files import is_file, local_path

PREFIX = "python:"
FORM = '"python:file.py:name" or "python:package.module:name"'
THIS_PROCESS = "this_process"
"""The module of objects that a Python program handed over: they have no file that another
process could load."""
# with the separator: not mlx_parallm_rewards/
PACKAGE = str(Path(__file__).parents[1] / "_").removesuffix("_")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")

_STATES = (
    "write a BaseEnvironment instead (from mlx_parallm.primitives import BaseEnvironment, State):"
    " its update_state does what step(text) did"
)
REMOVED = {
    "mlx_parallm.environments.base.Environment": f"{_STATES} (docs/your_environment.md)",
    "mlx_parallm.environments.base.SingleTurn": "leave it out: an EnvironmentSource plays one turn;"
    f" for several {_STATES} (docs/your_environment.md)",
    "rl_primitives": "import from mlx_parallm.primitives instead (docs/library.md)",
}
"""Names that user code may still import → what to write instead."""

T = TypeVar("T")


def is_reference(text: str) -> bool:
    return text.startswith(PREFIX)


def absolute(text: str, directories: Sequence[Path]) -> str:
    """Return a path, or a reference with its path, made absolute by the first of `directories`
    that has the file."""
    prefix, path, name = "", text, ""
    if is_reference(text):
        prefix = PREFIX
        path, colon, name = text.removeprefix(PREFIX).rpartition(":")
        if not path.endswith(".py"):
            return text
        name = colon + name
    places = (directory / local_path(path) for directory in directories)
    file = next((place for place in places if is_file(place)), None)
    return text if file is None else f"{prefix}{file.resolve()}{name}"


def reference_to(value: Any, name: str) -> str:
    """Return a reference by which `load` finds this object in this process, under `name` as far
    as it can be one. A later object of the same name takes its place, so `load` comes soon
    after."""
    word = re.sub(r"\W+", "", name)
    word = word if word.isidentifier() else f"object{word}"
    setattr(sys.modules.setdefault(THIS_PROCESS, ModuleType(THIS_PROCESS)), word, value)
    return f"{PREFIX}{THIS_PROCESS}:{word}"


def shown(reference: str) -> str:
    """Return a reference as its user knows it: an object of this process by its name alone."""
    return reference.removeprefix(f"{PREFIX}{THIS_PROCESS}:")


def load(reference: str, key: str) -> Any:
    """Return the object that `reference` names. `key` is its configuration key, for error texts.

    Raises ConfigError: a wrong form; no such file, module or name; or the file raises an error.
    """
    where, _, name = reference.removeprefix(PREFIX).rpartition(":")
    if not is_reference(reference) or not where or not name.isidentifier():
        raise ConfigError(f"{key}: {reference!r} does not have the form {FORM}")
    module = (
        _run_file(Path(where), f"{key}: {reference}")
        if where.endswith(".py")
        else _import(where, key, reference)
    )
    if module is None or (where == THIS_PROCESS and not hasattr(module, name)):
        raise ConfigError(
            f"{key}: {name} was an object of the Python program that began this run: only that"
            " program can evaluate, by"
            " trainer.evaluate(), or continue, by trainer.train(resume_from_checkpoint=True);"
            " `mlx_parallm eval` needs"
            " [[evaluation.environments]] made of files"
        )
    if not hasattr(module, name):
        public = [
            entry
            for entry, value in vars(module).items()
            if not entry.startswith("_") and callable(value)
        ]
        raise ConfigError(
            f"{key}: {reference}: there is no {name!r} in"
            f" {module.__file__}{did_you_mean(name, public)}"
        )
    return getattr(module, name)


def file_of(reference: str) -> Path:
    """Return the file of a reference that is loaded. Raises TypeError: it is in none."""
    where = reference.removeprefix(PREFIX).rpartition(":")[0]
    file = Path(where) if where.endswith(".py") else Path(inspect.getfile(sys.modules[where]))
    return file.resolve()


def name_of(function: Any) -> str:
    """Return a function's name, or a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: Any) -> bool:
    """Return whether a call returns a coroutine; of an object, `__call__` may be async."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def load_function(reference: str, key: str) -> tuple[Callable[..., Any], inspect.Signature]:
    """Return a function or a callable object, and its signature. Raises ConfigError."""
    function = load(reference, key)
    if isinstance(function, type) or not callable(function):
        kind = (
            "a class" if isinstance(function, type) else f"{type(function).__name__} {function!r}"
        )
        raise ConfigError(f"{key}: {reference} is {kind}, not a function")
    try:
        return function, inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: the parameters of {reference} cannot be read: {error}"
        ) from error


def load_function_of(arguments: Sequence[str], reference: str, key: str) -> Callable[..., Any]:
    """Return a plain function that takes these positional arguments. Raises ConfigError."""
    function, signature = load_function(reference, key)
    check_call(signature, arguments, f"{key}: {reference}")
    if is_async(function):
        raise ConfigError(f"{key}: {reference} is async; it has to be a plain function")
    return function


def check_call(
    signature: inspect.Signature, arguments: Sequence[str], what: str, keywords: Sequence[str] = ()
) -> None:
    """Raises ConfigError: the function does not take these positional arguments and keywords."""
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        called = ", ".join([*arguments, *(f"{name}=…" for name in keywords)])
        raise ConfigError(
            f"{what} takes {signature}, but it is called with ({called}): {error}"
        ) from error


def read_options(cls: type[T], options: Mapping[str, Any], what: str) -> T:
    """Return `options` as an object of the dataclass. Raises ConfigError: an option that it does
    not have, or one that is missing."""
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in options:
        if name not in fields:
            raise ConfigError(
                f"{what} has no option {name!r}{did_you_mean(name, list(fields)) or '.'}"
                f" There are: {', '.join(fields)}"
            )
    for name, entry in fields.items():
        required = entry.default is entry.default_factory is dataclasses.MISSING
        if required and name not in options:
            raise ConfigError(f"{what} needs the option {name!r}")
    return cls(**options)


@contextmanager
def user_code(what: str, error_type: type[ParallmError] = ConfigError) -> Iterator[None]:
    """Turn an error of the user's code into `error_type`, one line with file and line. A
    ParallmError passes."""
    try:
        yield
    except ParallmError:
        raise
    except (Exception, SystemExit) as error:  # boundary: foreign code may raise anything
        raise error_type(f"{what}: {_fault(error)}") from error


async def on_own_thread(
    call: Callable[[], T], name: str, error_type: type[ParallmError] = ConfigError
) -> T:
    """Call a user's function on a daemon thread of its own: one that never returns holds up no
    other call, and no exit. Raises what it raises, and `error_type` for what is no Exception
    (KeyboardInterrupt, CancelledError), which would end the loop."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - boundary: who waits gets it, whatever it is
            if not isinstance(error, Exception):
                error = error_type(f"{name}: {_fault(error)}")
            outcome.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _run_file(path: Path, what: str) -> ModuleType:
    if not is_file(path):
        looked = (
            ""
            if path.is_absolute()
            else " (looked for beside the configuration and in the working directory)"
        )
        raise ConfigError(f"{what}: there is no file {path}{looked}")
    path = path.resolve()
    name = f"user_code:{path}"  # one module for each file, also with several references to it
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(specification)
    _search_in(path.parent)
    sys.modules[name] = module
    try:
        with user_code(what):
            specification.loader.exec_module(module)
    except ParallmError:
        del sys.modules[name]
        raise
    return module


def _import(module: str, key: str, reference: str) -> ModuleType | None:
    if module == THIS_PROCESS:
        return sys.modules.get(THIS_PROCESS)
    _search_in(Path.cwd())
    if "/" in module or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{key}: {reference!r} does not have the form {FORM}")
    with user_code(f"{key}: {reference}"):
        return importlib.import_module(module)


def _search_in(directory: Path) -> None:
    """Let user code import its neighbours. The directory comes last, so that its files hide no
    installed package."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _fault(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    message = f"{type(error).__name__}: {text}{_instead(error)}".removesuffix(": ")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)
    ]
    # The deepest line of the user's files, not of a library that they call.
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {message}" if frames else message


def _instead(error: BaseException) -> str:
    """Return what to write instead of a name that is not, or no longer, in this package."""
    name = ""
    if isinstance(error, ImportError):
        wanted = re.match(r"cannot import name '(\w+)'", str(error))
        name = f"{error.name}.{wanted[1]}" if wanted else error.name or ""
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = f"{error.obj.__name__}.{error.name}"
    for removed, instead in REMOVED.items():
        if f"{name}.".startswith(f"{removed}."):
            return f": {instead}"
    ours = name.startswith("mlx_parallm.")
    return ": docs/stability.md lists what is there to import" if ours else ""


def _is_theirs(filename: str) -> bool:
    return (
        not filename.startswith((PACKAGE, STANDARD_LIBRARY, "<"))
        and "site-packages" not in filename
    )


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return the likeliest of the names as the end of a sentence; "" if none is alike."""
    plain = {each.casefold(): each for each in reversed(names)}
    near = difflib.get_close_matches(name.casefold(), plain, n=1, cutoff=0.4)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""
