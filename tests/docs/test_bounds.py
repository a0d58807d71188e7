"""SECURITY.md's bounds are those of the code."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_made_of_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "generate_bounds.py"))
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert page == script["render"](page), "run .venv/bin/python scripts/generate_bounds.py"
    monkeypatch.setattr(script["fields"], "MAX_BODY_BYTES", 7 << 20)
    assert page != script["render"](page)
