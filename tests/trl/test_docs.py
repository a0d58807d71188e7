"""docs/trl.md has the arguments as they are."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "scripts" / "generate_trl_docs.py"))["render"](page)
    assert page == made, "run .venv/bin/python scripts/generate_trl_docs.py"
