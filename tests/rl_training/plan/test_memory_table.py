"""The table of models and machines in docs/first_model.md is the preflight's."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_is_that_of_the_preflight() -> None:
    page = (ROOT / "docs" / "first_model.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "scripts" / "generate_memory_table.py"))["render"](page)
    assert page == made, "run .venv/bin/python scripts/generate_memory_table.py"
    assert "Computed, not tried" in page
