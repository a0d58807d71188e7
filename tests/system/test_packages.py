"""A package that is not installed is one line with its extra and exit code 2, whichever command
needs it.

Tried by hand in fresh environments, plain and with `[cpu]`: all commands of `mlx_parallm`, the
names that `import mlx_parallm` has, and trackers (a dry run let them pass), `--tinker`, `hf:` rows,
`builtin:math`.
"""

import importlib.util
import re
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_parallm.cli import main
from mlx_parallm.cli.command import exit_code
from mlx_parallm.errors import ConfigError
from mlx_parallm.system import packages
from tests.altered import Altered

ROOT = Path(__file__).parents[2]
RUNS_MLX = (
    ["train", "--config", "quickstart"],
    ["train", "--config", "quickstart", "--dry-run"],
    ["train", "--config", "quickstart", "--ranks", "2"],
    ["train", "--config", "quickstart", "--restarts", "1"],
    ["serve", "--model-path", "builtin:tiny"],
    ["prompt-policy"],
    ["eval", "--config", "quickstart"],
    ["replay", "checkpoints/none"],
    ["merge", "--base-model", "builtin:tiny", "--lora-path", "a", "--output-path", "b"],
    ["convert", "a", "b", "--format", "peft"],
    ["export", "--base-model", "builtin:tiny"],
    ["pipeline", "--traces", "a", "--base-model", "builtin:tiny"],
    ["mcp"],
    ["doctor"],
    ["doctor", "--contracts", "--model", "builtin:tiny"],
)


def test_every_extra_of_the_project_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*packages.EXTRAS, "cpu", "cuda"} == set(project["optional-dependencies"])


def test_what_an_extra_brings_is_not_installed_without_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", requirement, maxsplit=1)[0] for requirement in requirements}

    extras = project["optional-dependencies"]
    backends = extras.pop("cpu") + extras.pop("cuda")
    brought = {name for requirements in extras.values() for name in names(requirements)}
    assert names(project["dependencies"]) & (brought | names(backends)) == {"mlx"}


def test_what_an_extra_brings_names_that_extra() -> None:
    for extra, modules in packages.EXTRAS.items():
        for module in modules:
            assert f"pip install '.[{extra}]' in the clone" in packages.needs("x", module)
    assert (
        packages.needs("x", "mcp.server.mcpserver")
        == "x needs the package mcp: pip install '.[mcp]' in the clone of the repository"
    )
    assert (
        packages.needs("x", "never_heard_of")
        == "x needs the package never-heard-of: pip install never-heard-of"
    )


def test_a_missing_module_is_refused_and_a_present_one_is_not() -> None:
    packages.require("x", "json", "mlx_parallm.errors")
    with pytest.raises(ConfigError, match="never-heard-of"):
        packages.require("x", "json", "never_heard_of.inner")


@pytest.fixture
def no_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLX as `pip install mlx-parallm` leaves it on Linux: modules without a library beside
    them."""
    spec = ModuleSpec("mlx", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    find = importlib.util.find_spec
    util = SimpleNamespace(find_spec=lambda name: spec if name == "mlx" else find(name))
    monkeypatch.setattr(packages, "importlib", Altered(importlib, util=util))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    linux = Altered(sys, platform="linux", executable=str(python))
    monkeypatch.setattr(packages, "sys", linux)


@pytest.mark.usefixtures("no_backend")
@pytest.mark.parametrize("command", RUNS_MLX, ids=" ".join)
def test_without_a_backend_every_command_names_the_extras(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: MLX has no backend here")
    assert "pip install '.[cpu]' in the clone" in line and "'.[cuda]'" in line


def test_this_machine_has_a_backend() -> None:
    assert packages.mlx_backend_advice() is None


@pytest.mark.usefixtures("no_backend")
def test_a_build_from_source_in_one_piece_is_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    # stands for a Python that can import mlx.core
    altered = Altered(sys, platform="linux", executable="/bin/true")
    monkeypatch.setattr(packages, "sys", altered)
    assert packages.mlx_backend_advice() is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'trackio'", name="trackio"), "'.[trackio]'"),
        (
            ModuleNotFoundError("No module named 'google.protobuf'", name="google.protobuf"),
            "protobuf",
        ),
        (
            ImportError("libcuda.so.1: cannot open shared object file", name="mlx.core"),
            "'.[cpu]'",
        ),
        (ImportError("libmlx.so: cannot open shared object file"), "'.[cpu]'"),
    ],
    ids=["extra", "namespace", "driver", "library"],
)
def test_an_import_that_fails_late_is_one_line_too(
    error: ImportError,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)

    def run(args: object) -> int:
        raise error

    assert exit_code(run, None) == 2  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_an_import_that_is_our_fault_keeps_its_traceback() -> None:
    def run(args: object) -> int:
        from mlx_parallm.errors import NoSuchName  # type: ignore[attr-defined]  # noqa: F401

        return 0

    with pytest.raises(ImportError):
        exit_code(run, None)  # type: ignore[arg-type]
    assert "mlx_parallm" in sys.modules
