"""Every mlx-lm name that is used is there, and one module holds those of the package. When
mlx-lm has moved so far that no test starts, `scripts/check_mlx_lm.py` says the same."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = runpy.run_path(str(ROOT / "scripts" / "check_mlx_lm.py"))
API = "mlx_parallm/models/mlx_lm_api.py"


@pytest.mark.slow
@pytest.mark.long
def test_nothing_has_disappeared_and_the_package_takes_it_from_one_module() -> None:
    used = CHECK["used"]()
    assert CHECK["report"](used) == []
    files = {file for files in used.values() for file in files if file.startswith("mlx_parallm/")}
    assert files == {API}


def test_what_disappeared_is_named_with_its_version_and_its_user() -> None:
    gone = {
        "mlx_lm.utils.no_such": ["a.py"],
        "mlx_lm.no_module.x": ["b.py"],
        "mlx_lm.utils.load_config": ["c.py"],
    }
    first, second = CHECK["report"](gone)
    assert first.startswith("mlx_lm.utils.no_such is gone in mlx-lm 0.") and first.endswith(
        "used by a.py"
    )
    assert "known to work with" in first
    assert second.startswith("mlx_lm.no_module.x is gone")


def test_names_are_found_wherever_they_stand() -> None:
    source = (
        "import mlx_lm.utils as u\ndef f():\n    from mlx_lm.models import qwen3\n    return"
        " mlx_lm.tuner.lora.X\n"
    )
    found = set(CHECK["names_in"](source + "from . import mlx_lm\nimport mlx_lmx\n"))
    assert {"mlx_lm.utils", "mlx_lm.models.qwen3", "mlx_lm.tuner.lora.X"} <= found
    assert not any("mlx_lmx" in name for name in found)
