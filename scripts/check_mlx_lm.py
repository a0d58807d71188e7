"""Which mlx-lm names that this project uses are gone, after mlx-lm has moved. Exit code 1 when
there are any.

Run it when mlx-lm is upgraded and the tests do not even start: it imports each name on its own, and
nothing of ours. What the package uses is in mlx_parallm/models/mlx_lm_api.py; scripts and tests may
take their own names.
"""

import ast
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("mlx_parallm", "scripts", "tests")


def names_in(source: str) -> Iterator[str]:
    """Dotted mlx-lm names that a file imports ("mlx_lm.utils.load_config"), anywhere in it, or
    reads as attributes of `mlx_lm` ("mlx_lm.load")."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").partition(".")[0] == "mlx_lm"
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name.partition(".")[0] == "mlx_lm"
            )
        elif isinstance(node, ast.Attribute) and re.fullmatch(
            r"mlx_lm(\.\w+)+", dotted := ast.unparse(node)
        ):
            yield dotted


def exists(dotted: str) -> bool:
    """True for a module, or an attribute of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name and not dotted.startswith(error.name):
                raise  # something that mlx-lm itself needs
            continue
        for name in parts[length:]:
            if not hasattr(target, name):
                return False
            target = getattr(target, name)
        return True
    return False


def used() -> dict[str, list[str]]:
    """Name → the files that use it."""
    files_of: dict[str, list[str]] = {}
    for file in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in names_in(file.read_text(encoding="utf-8")):
            files_of.setdefault(name, []).append(file.relative_to(ROOT).as_posix())
    return files_of


def report(names: dict[str, list[str]]) -> list[str]:
    """One line for each name that is gone."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    works = re.search(r'"mlx-lm>=([\d.]+)', project)
    assert works, "pyproject.toml names the mlx-lm that this project works with"
    here = importlib.metadata.version("mlx-lm")
    return [
        (
            f"{name} is gone in mlx-lm {here} (it is in {works[1]}, which this project is known to"
            " work with); used by "
        )
        + ", ".join(dict.fromkeys(files))
        for name, files in names.items()
        if not exists(name)
    ]


if __name__ == "__main__":
    gone = report(used())
    print(
        "\n".join(gone)
        or f"mlx-lm {importlib.metadata.version('mlx-lm')} has every name that is used"
    )
    sys.exit(bool(gone))
