"""Names of a package that are imported at their first use."""

import subprocess
import sys

import pytest

from mlx_parallm.systems import traces
from mlx_parallm.systems.traces.trace import Trace


def test_a_name_is_its_modules_and_an_unknown_one_is_named() -> None:
    assert traces.Trace is Trace
    assert {*traces.__all__, "__doc__"} <= set(dir(traces))
    with pytest.raises(AttributeError, match=r"mlx_parallm.systems.traces.*'Tracer'"):
        traces.Tracer  # noqa: B018


LAZY = (
    "mlx_parallm",
    "mlx_parallm.faces.primitives",
    "mlx_parallm.systems.traces",
    "mlx_parallm.systems.orchestrator",
)
PROGRAM = f"""
import importlib, sys
packages = [importlib.import_module(name) for name in {LAZY}]
print({{"mlx.core", "transformers"}} & set(sys.modules))
print(all(getattr(package, name).__name__ for package in packages for name in package.__all__))
"""


@pytest.mark.slow
def test_nothing_large_is_imported_with_the_package_and_every_name_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["set()", "True"]
