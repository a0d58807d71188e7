"""Random numbers of the games. TextArena draws from Python's and numpy's global ones, which all
threads of the process share.

`give_numbers` puts stand-ins for `random` and numpy into the modules of a game. They draw from the
`Numbers` of the game that this thread plays (`drawing_from`); outside a game they are the modules
themselves. So a game repeats from its seed, whatever is drawn on other threads meanwhile, and
nothing that others draw depends on the games.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

PACKAGE = "textarena"
_thread = threading.local()


class Numbers:
    """The numbers of one game, as `random.seed` and `numpy.random.seed` would begin them."""

    def __init__(self, seed: int) -> None:
        self.python, self.numpy = random.Random(seed), np.random.RandomState(seed)


@contextmanager
def drawing_from(numbers: Numbers) -> Iterator[None]:
    """Let the modules of games draw from `numbers` on this thread."""
    before = _now()
    _thread.numbers = numbers
    try:
        yield
    finally:
        _thread.numbers = before


def give_numbers(module: str) -> None:
    """Put the stand-ins into the loaded modules of TextArena, and of the package of `module`, which
    has the game's class."""
    packages = {PACKAGE, module.partition(".")[0]}
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] in packages and isinstance(loaded, ModuleType):
            names = vars(loaded)
            for key, value in list(names.items()):
                if (stand_in := _STAND_INS.get(id(value))) is not None:
                    names[key] = stand_in
                elif (stand_in := _STAND_INS.get(id(_owner(value)))) is not None:
                    names[key] = _by_name(stand_in, value.__name__)


def _owner(function: Any) -> Any:
    """Return the object whose method a function is."""
    return getattr(function, "__self__", None)


def _by_name(stand_in: ModuleType, name: str) -> Callable[..., Any]:
    """Return a function for one that a game has imported by its name."""
    return lambda *values, **options: getattr(stand_in, name)(*values, **options)


def _now() -> Numbers | None:
    return getattr(_thread, "numbers", None)


class _Python(ModuleType):
    """`random`: its functions are methods of `random.Random`."""

    def __getattr__(self, name: str) -> Any:
        numbers = _now()
        if numbers is None or not hasattr(random.Random, name):
            return getattr(random, name)
        return getattr(numbers.python, name)


class _NumpyRandom(ModuleType):
    """`numpy.random`: its functions are methods of `RandomState`."""

    def __getattr__(self, name: str) -> Any:
        numbers = _now()
        if numbers is None or not hasattr(np.random.RandomState, name):
            return getattr(np.random, name)
        return getattr(numbers.numpy, name)


class _Numpy(ModuleType):
    """numpy, with a stand-in for `numpy.random`."""

    def __getattr__(self, name: str) -> Any:
        return _STAND_INS[id(np.random)] if name == "random" else getattr(np, name)


_PYTHON, _NUMPY_RANDOM = _Python("random"), _NumpyRandom("numpy.random")
# by the id of a module, and of the object whose methods its functions are
_STAND_INS: dict[int, ModuleType] = {
    id(random): _PYTHON,
    id(_owner(random.random)): _PYTHON,
    id(np.random): _NUMPY_RANDOM,
    id(_owner(np.random.rand)): _NUMPY_RANDOM,
    id(np): _Numpy("numpy"),
}
