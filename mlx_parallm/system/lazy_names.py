"""Names of a package that are imported at their first use (PEP 562). Imports nothing itself
until then."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`.

    Args:
        package: its `__name__`.
        homes: modules, by their path in mlx_parallm, each with the names it has, between spaces.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
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
