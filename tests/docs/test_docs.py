"""What the documentation points at is there."""

import ast
import functools
import re
from pathlib import Path

from tests.pages import section

ROOT = Path(__file__).parents[2]
FOLDERS = ("mlx_parallm", "scripts", "train_configs", "docs", "tests", "examples", "clients")
TEXTS = sorted(ROOT.glob("*.md"))
TEXTS += [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".toml", ".mjs") and "node_modules" not in path.parts
]


def test_every_page_and_section_that_is_named_exists() -> None:
    """Links between pages, and the pages that code, messages and configurations
    name."""
    wrong = []
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        named = {
            (ROOT / page, anchor)
            for page, anchor in re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", text)
        }
        if path.suffix == ".md":
            named |= {
                ((path.parent / page).resolve() if page else path, anchor)
                for page, anchor in re.findall(r"\]\(([\w./-]+\.md)?(?:#([\w-]+))?\)", text)
            }
        wrong += [
            f"{path.relative_to(ROOT)}: {page.name}#{anchor}"
            for page, anchor in named
            if not page.is_file() or (anchor and anchor not in _anchors(page))
        ]
    assert not wrong


@functools.cache
def _anchors(page: Path) -> set[str]:
    """Return them as GitHub makes them of headings; a heading twice on a page has none.
    Those of `<a id="…">` too."""
    text = re.sub(r"(?ms)^( *)(`{3,}).*?^\1\2$", "", page.read_text(encoding="utf-8"))
    anchors = [
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    anchors += re.findall(r'<a id="([\w-]+)"', text)
    return {anchor for anchor in anchors if anchors.count(anchor) == 1}


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


def test_a_tokens_life_is_in_five_files_that_are_read_in_an_hour() -> None:
    """The functions and classes that the page names are there."""
    rows = re.findall(
        r"^\|[^|]*\| `([\w/]+\.py)` \| (.*) \|$", section("design.md", "A token's life"), re.M
    )
    five = {file for file, _ in rows[:8]}
    lines = [(ROOT / "mlx_parallm" / file).read_text().count("\n") for file in five]
    assert len(five) == 5
    assert sum(lines) <= 1500
    missing = [
        f"{file}: {name}"
        for file, cell in rows
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", cell)
        if name not in {*_defined(file), "Request", "Sequence"}
    ]
    assert len(rows) == 15
    assert not missing


def _defined(file: str) -> set[str]:
    """Return the functions, classes and methods (`Class.method`) of a module of the package."""
    tree = ast.parse((ROOT / "mlx_parallm" / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in tree.body if isinstance(node, kinds)]
    inner = [
        f"{node.name}.{method.name}"
        for node in top
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, kinds)
    ]
    return {*(node.name for node in top), *inner}


def test_the_reading_order_has_every_page() -> None:
    order = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in order} == set()


def test_the_keys_of_the_dashboard_are_those_of_its_tabs() -> None:
    """A key's number is the place of a tab: the page names them in the tabs' order."""
    code = (ROOT / "mlx_parallm/runs/dashboard/static/app.js").read_text(encoding="utf-8")
    tabs = re.findall(r'\["([A-Z][\w-]*)", "\w+"', code.split("const tabs = ")[1].split(";")[0])
    page = section("watching.md", "The dashboard")
    [row] = re.findall(r"\| `1` to `9` \| .*?: (.*?);", page)
    assert row.split(", ") == [tab.lower() for tab in tabs]
