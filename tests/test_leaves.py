"""Leaves: each hook is there, a folder that is deleted takes nothing else along, and the example
of docs/extending.md is a leaf that works. The package is put together of links in a directory of
its own, with what is to be different."""

import inspect
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from mlx_parallm.config import leaves as registry
from mlx_parallm.config.arguments import Arguments
from mlx_parallm.config.environment import Section
from mlx_parallm.config.leaves import LEAVES, Command, Leaf, imported, leaves
from mlx_parallm.config.load import Config, CoreConfig
from mlx_parallm.environments.base import AnyEnvironment
from tests.docs.docs_blocks import blocks
from tests.source_trees import PACKAGE, ROOT, sources
from tests.test_architecture import CORE_UNITS, unit_of

REGISTRY = "mlx_parallm/config/leaves.py"


def package(
    place: Path, *, without: Iterable[str] = (), files: Mapping[str, str] | None = None
) -> Path:
    """Link the package below `place`, without some folders of it, and with files that are new or
    differ."""
    removed, texts = (
        {ROOT / name for name in without},
        {ROOT / name: text for name, text in (files or {}).items()},
    )

    def link(source: Path, target: Path) -> None:
        if source in removed:
            return
        if not any(changed.is_relative_to(source) for changed in removed | set(texts)):
            target.symlink_to(source)
        elif source.is_dir():
            target.mkdir()
            for entry in source.iterdir():
                link(entry, target / entry.name)

    link(PACKAGE, place / PACKAGE.name)
    for name, text in (files or {}).items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
    return place


def run(place: Path, program: str) -> str:
    """Run a program on the package that lies at `place`, and return what it prints."""
    check = "import mlx_parallm; assert mlx_parallm.__file__.startswith({!r})\n"
    result = subprocess.run(
        [sys.executable, "-c", check.format(str(place)) + program],
        capture_output=True,
        text=True,
        cwd=place,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(place)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def folder(module: str) -> str:
    return module.removesuffix(".leaf").replace(".", "/")


def test_every_leaf_is_listed() -> None:
    files = [path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("leaf.py")]
    assert sorted(LEAVES) == sorted(".".join(path.parts) for path in files)
    assert len({leaf.name for leaf in leaves()}) == len(leaves()) == len(LEAVES)
    assert not {leaf.name for leaf in leaves()} & set(CoreConfig.model_fields)


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.name)
def test_what_a_leaf_names_is_there_and_takes_what_it_gets(leaf: Leaf) -> None:
    if leaf.section is not None:
        section = imported(leaf.section)
        assert issubclass(section, Section)
        assert isinstance(Config().section(section), section)
        assert leaf.clients_train is None or leaf.clients_train in section.model_fields
    hooks = ((leaf.check, 1), (leaf.source, 1), (leaf.routes, 2), (leaf.part, 1), (leaf.page, 3))
    for hook, count in hooks:
        if hook is not None:
            inspect.signature(imported(hook)).bind(*[None] * count)
    assert all(issubclass(imported(place), AnyEnvironment) for place in leaf.environments.values())
    assert all(
        isinstance(command, Command) and issubclass(imported(command.arguments), Arguments)
        for command in leaf.commands
    )


@pytest.mark.parametrize("module", LEAVES)
def test_a_deleted_folder_takes_only_its_own_names_along(module: str, tmp_path: Path) -> None:
    leaf = leaves()[LEAVES.index(module)]
    program = (
        "from mlx_parallm.cli.table import COMMANDS, overview\nfrom mlx_parallm.config.load import"
        " Config\noverview()\nprint(*[command.name for command in"
        " COMMANDS], *Config.model_fields)\n"
    )
    names = set(run(package(tmp_path, without=[folder(module)]), program).split())
    own = {command.name for command in leaf.commands} | (
        {leaf.name} if leaf.section is not None else set()
    )
    everything = {command.name for kept in leaves() for command in kept.commands} | set(
        Config.model_fields
    )
    assert names >= everything - own
    assert not names & own


def test_the_core_works_without_any_leaf(tmp_path: Path) -> None:
    units = (
        {unit_of(source.module) for source in sources("mlx_parallm")}
        - CORE_UNITS
        - {"__init__", "__main__"}
    )
    folders = {f"mlx_parallm/{unit.replace('.', '/')}" for unit in units}
    assert {folder(module) for module in LEAVES} <= folders
    core = [
        "mlx_parallm." + s.module.removesuffix(".__init__")
        for s in sources("mlx_parallm")
        if unit_of(s.module) in CORE_UNITS
    ]
    program = (
        f"import importlib, urllib.error, urllib.request\nfor name in {core!r}:\n"
        "    importlib.import_module(name)\nfrom mlx_parallm.config.leaves import leaves\nfrom"
        " mlx_parallm.config.load import load_config\nfrom mlx_parallm.daemon import Serving\nfrom"
        " mlx_parallm.errors import ConfigError\nassert leaves() == ()\ntry:\n    load_config(None,"
        " ['tinker.enabled=true'])\nexcept ConfigError as error:\n    print(error)\nserving ="
        " Serving(load_config(None, ['model.base_path=builtin:tiny', 'server.port=0']))\n"
        "serving.listen()\ntry:\n    urllib.request.urlopen(serving.url + '/health')\nexcept"
        " urllib.error.HTTPError as error:\n    print(error.code)\nserving.close()\n"
    )
    printed = run(package(tmp_path, without=folders), program).splitlines()
    assert printed[0].startswith("--set tinker.enabled=true: unknown key 'tinker'")
    assert "503" in printed  # the server answers: the model has not been loaded


def test_the_example_of_the_page_is_a_leaf_that_works(tmp_path: Path) -> None:
    page = ROOT / "docs" / "extending.md"
    files = {
        b.saved_as: b.text
        for b in blocks(page)
        if (b.saved_as or "").startswith("mlx_parallm/faces/weather/")
    }
    assert len(files) == 3
    lines = (ROOT / REGISTRY).read_text(encoding="utf-8")
    assert '`"mlx_parallm.faces.weather.leaf",` in `LEAVES`' in page.read_text(encoding="utf-8")
    files[REGISTRY] = lines.replace(
        "LEAVES = (\n", 'LEAVES = (\n    "mlx_parallm.faces.weather.leaf",\n'
    )
    program = (
        "import urllib.request\nfrom mlx_parallm.config.load import load_config\nfrom"
        " mlx_parallm.daemon import Serving\nfrom mlx_parallm.errors import ConfigError\ntry:\n"
        "    load_config(None, ['weather.plaice=Paris'])\nexcept ConfigError as error:\n"
        "    print(error)\noptions = ['model.base_path=builtin:tiny', 'server.port=0',"
        " 'weather.place=Paris']\nserving = Serving(load_config(None, options))\nserving.listen()\n"
        "print(urllib.request.urlopen(serving.url + '/weather').read().decode())\nserving.close()\n"
    )
    printed = run(
        package(tmp_path, files={str(k): v for k, v in files.items()}), program
    ).splitlines()
    assert printed[0].endswith("unknown key 'weather.plaice'; did you mean 'weather.place'?")
    assert '{"place":"Paris","sky":"blue"}' in printed


def test_a_leaf_is_read_without_what_is_heavy() -> None:
    program = (
        "import sys\nfrom mlx_parallm.config.leaves import leaves\nassert leaves()\n"
        "loaded = {'mlx', 'pydantic', 'fastapi', 'numpy', 'rich'} & set(sys.modules)\nassert not"
        " loaded, loaded\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert registry.__file__ == str(ROOT / REGISTRY)
