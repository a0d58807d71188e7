"""Parse and walk each Python file of the repository once, for the gates that ask about all of them."""

import ast
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mlx_parallm"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


@dataclass
class Nodes:
    """The nodes of one file by type, and for each its innermost function: "Class.method", or ""."""

    by_type: dict[type, list[ast.AST]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[ast.AST, str] = field(default_factory=dict)

    def add(self, node: ast.AST, prefix: str = "", owner: str = "") -> None:
        """Add a node and all below it; `prefix` is the dotted place of a definition in it."""
        if isinstance(node, Function):
            owner, prefix = prefix + node.name, f"{prefix}{node.name}."
        elif isinstance(node, ast.ClassDef):
            prefix += f"{node.name}."
        self.by_type[type(node)].append(node)
        self.owners[node] = owner
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr_context | ast.operator):
                self.add(child, prefix, owner)


@dataclass(eq=False)
class Source:
    """One Python file. Its tree and nodes are made when first asked for."""

    path: str  # "mlx_parallm/engine/client.py"
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _nodes(self) -> Nodes:
        nodes = Nodes()
        nodes.add(self.tree)
        return nodes

    @property
    def module(self) -> str:
        """Dotted name inside the package: "engine.client"; "engine.__init__" for a package's own
        file."""
        return self.path.removeprefix("mlx_parallm/").removesuffix(".py").replace("/", ".")

    def nodes(self, *types: type[Node]) -> Iterator[Node]:
        """Yield the nodes of these types."""
        for each in types:
            yield from self._nodes.by_type.get(each, ())  # type: ignore[misc]

    def owner(self, node: ast.AST) -> str:
        """Return the innermost function that a node stands in: "Class.method", or ""."""
        return self._nodes.owners[node]

    @cached_property
    def functions(self) -> tuple[tuple[str, Function], ...]:
        """Every function with its dotted name: ("Class.method", node)."""
        return tuple(_functions(self.tree))

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """Every dotted name that is imported anywhere in the file, lazily too:
        "mlx_parallm.types.Rollout"."""
        found = [alias.name for node in self.nodes(ast.Import) for alias in node.names]
        for node in self.nodes(ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ("mlx_parallm." + self.module).split(".")[: -node.level]
                base = ".".join([*parts, base]).rstrip(".")
            found += [f"{base}.{alias.name}" for alias in node.names]
        return tuple(found)


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the functions below a node; expressions hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        below = prefix
        if isinstance(child, Function):
            yield prefix + child.name, child
        if isinstance(child, Function | ast.ClassDef):
            below = f"{prefix}{child.name}."
        yield from _functions(child, below)


def report(missing: Iterable[str]) -> None:
    """Fail with these lines and nothing else: they say what to do."""
    if lines := list(missing):
        pytest.fail("\n".join(lines), pytrace=False)


def tell(places: Iterable[object], advice: str) -> None:
    """Fail with a line for each place, and what to do there."""
    report(f"{place}: {advice}" for place in sorted(map(str, places)))


def sources(*folders: str) -> tuple[Source, ...]:
    """Return the files below these folders, in order, without what protoc generates."""
    return tuple(source for folder in folders for source in _sources_of(folder))


@cache
def _sources_of(folder: str) -> tuple[Source, ...]:
    gc.disable()  # millions of nodes that stay: each collection would look at all of them
    return tuple(
        Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.name.endswith("_pb2.py")
    )
