"""Promised names that lie elsewhere: `import mlx_parallm.primitives` finds the module in its group
of folders, and a package's lazy names are imported at their first use (PEP 562).

Both names of a module are one object, so a class has one identity. Imports nothing but the standard
library.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

MOVED = {
    "mlx_parallm.primitives": "mlx_parallm.faces.primitives",
    "mlx_parallm.rl_training.atropos_client": "mlx_parallm.faces.atropos.client",
    "mlx_parallm.rl_training.data.rows": "mlx_parallm.rl_training.data.examples",
    "mlx_parallm.rl_training.weight_updater": "mlx_parallm.rl_training.publish.weight_updater",
    "mlx_parallm.tools": "mlx_parallm.deploy",
    "mlx_parallm.trl": "mlx_parallm.faces.trl",
}
"""The promised name (docs/stability.md), and the module that it means. Names below it move
along."""


class _AliasLoader(InspectLoader):
    """Loads a module by its new name and hands out the same object."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the alias's there

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for `python -m`. Raises ImportError: the module has none."""
        if not isinstance(self._spec.loader, InspectLoader):
            raise ImportError(f"{self._spec.name} has no code to run")
        return self._spec.loader.get_code(self._spec.name)

    def get_source(self, fullname: str) -> str | None:
        """Return the text for a traceback."""
        loader = self._spec.loader
        return loader.get_source(self._spec.name) if isinstance(loader, InspectLoader) else None


class _MovedNames(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (place := _new_name(fullname)) is None:
            return None
        if (spec := importlib.util.find_spec(place)) is None:
            return None
        alias = ModuleSpec(fullname, _AliasLoader(spec), origin=spec.origin)
        alias.submodule_search_locations = spec.submodule_search_locations
        return alias


def _new_name(name: str) -> str | None:
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        if place := MOVED.get(".".join(parts[:count])):
            return ".".join([place, *parts[count:]])
    return None


def keep_moved_names() -> None:
    """Make the names of `MOVED` importable. A second call changes nothing."""
    if not any(isinstance(finder, _MovedNames) for finder in sys.meta_path):
        # first: a moved package's __path__ finds its modules a second time
        sys.meta_path.insert(0, _MovedNames())


def lazy_names(
    package: str, homes: Mapping[str, str], absent: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`.

    Args:
        package: its `__name__`.
        homes: modules, by their path in mlx_parallm, each with the names it has, between spaces.
        absent: a module whose `INSTEAD` says of names that are not here what to use; importing
            one raises ImportError with it.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            if absent is not None and not name.startswith("_"):
                instead = importlib.import_module(f"mlx_parallm.{absent}").INSTEAD.get(name)
                if instead is not None:
                    raise ImportError(f"{package} has no {name}: {instead}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"mlx_parallm.{home_of[name]}"), name)
        except ImportError as error:
            from mlx_parallm.system.packages import missing  # here: it reads what is installed

            if (line := missing(error)) is None:
                raise
            raise ImportError(line) from error

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *home_of})

    return get, names
