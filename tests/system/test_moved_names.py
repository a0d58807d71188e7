"""Promised names of modules that were moved: the same object under both names, with `python -m`
too."""

import importlib
import subprocess
import sys

import pytest

from mlx_parallm.system.moved_names import MOVED, keep_moved_names


@pytest.mark.parametrize("name", MOVED)
def test_both_names_are_one_module(name: str) -> None:
    assert importlib.import_module(name) is importlib.import_module(MOVED[name])
    assert importlib.import_module(name).__name__ == MOVED[name]


def test_names_below_are_one_module_whichever_is_imported_first() -> None:
    program = (
        "import sys\nimport mlx_parallm.trl.config as old\nimport mlx_parallm.faces.trl.config as"
        " new\nassert old is new and old.GRPOConfig is new.GRPOConfig\nassert new.__spec__.name =="
        " new.__name__ == 'mlx_parallm.faces.trl.config'\nfrom"
        " mlx_parallm.faces.primitives.environment import *\nimport"
        " mlx_parallm.primitives.environment\nassert mlx_parallm.primitives.environment is"
        " sys.modules['mlx_parallm.faces.primitives.environment']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_not_there_is_an_import_error_with_the_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"mlx_parallm\.primitives\.weather"):
        importlib.import_module("mlx_parallm.primitives.weather")


def test_a_second_call_changes_nothing() -> None:
    before = list(sys.meta_path)
    keep_moved_names()
    assert sys.meta_path == before


def test_python_m_runs_a_moved_module() -> None:
    command = [sys.executable, "-m", "mlx_parallm.primitives.environment"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
