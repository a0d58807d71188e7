"""What the documentation points at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("mlx_parallm", "scripts", "train_configs", "docs", "tests")
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
TEXTS += [
    p
    for folder in FOLDERS
    for p in sorted((ROOT / folder).rglob("*"))
    if p.suffix in (".py", ".md", ".toml")
]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_page_that_is_mentioned_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    mentioned = set(re.findall(r"\bdocs/[\w/]+\.md\b", text))
    assert not [page for page in mentioned if not (ROOT / page).is_file()]
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", text))
    assert not [link for link in linked if not (path.parent / link).is_file()]


@pytest.mark.parametrize(
    "path", [p for p in TEXTS if p.suffix == ".md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_section_that_is_linked_exists(path: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", path.read_text(encoding="utf-8"))
    wrong = [
        (page, anchor)
        for page, anchor in links
        if anchor not in _anchors(path.parent / page if page else path)
    ]
    assert not wrong


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_tree_in_the_architecture_is_the_package() -> None:
    tree = (
        (ROOT / "docs" / "design.md")
        .read_text(encoding="utf-8")
        .split("\nmlx_parallm/\n")[1]
        .split("```")[0]
    )
    rows = re.findall(r"^  (\S.*)", tree, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"[\w/]+(?:\.py|/)(?=\s|$)", row[:23])}
    there = {
        p.name + "/" * p.is_dir()
        for p in (ROOT / "mlx_parallm").iterdir()
        if not p.name.startswith(("_", "."))
    }
    assert there - named - {"py.typed", "primitives.pyi"} == set(), "not in the tree"
    assert not [name for name in named if not (ROOT / "mlx_parallm" / name).exists()], (
        "no longer there"
    )


def test_the_reading_order_has_every_page() -> None:
    order = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in order} == set()


def test_the_keys_of_the_dashboard_are_those_of_its_tabs() -> None:
    """A key's number is the place of a tab: the page names them in the tabs' order."""
    code = (ROOT / "mlx_parallm/runs/dashboard/static/app.js").read_text(encoding="utf-8")
    tabs = re.findall(r'\["([A-Z][\w-]*)", "\w+"', code.split("const tabs = ")[1].split(";")[0])
    page = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    [row] = re.findall(r"\| `1` to `9` \| .*?: (.*?);", page)
    assert row.split(", ") == [tab.lower() for tab in tabs]
