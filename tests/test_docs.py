"""What the documentation points at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("mlx_parallm", "scripts", "train_configs", "docs", "tests")
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
TEXTS += [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".py", ".md", ".toml")]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_page_that_is_mentioned_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    mentioned = set(re.findall(r"\bdocs/[\w/]+\.md\b", text))
    assert not [page for page in mentioned if not (ROOT / page).is_file()]
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", text))
    assert not [link for link in linked if not (path.parent / link).is_file()]
