"""Promised module names that lie in a group of folders now: `import mlx_parallm.primitives` finds
the module there.

Both names are one module object, so a class has one identity. Imports nothing but the standard
library.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

MOVED = {
    "mlx_parallm.primitives": "mlx_parallm.faces.primitives",
    "mlx_parallm.rl_training.atropos_client": "mlx_parallm.faces.atropos.client",
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
