"""Names of a package that are imported at their first use (PEP 562). Imports nothing itself
until then."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


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
