"""What the repository ships to be run, tried as a new user would: from an empty directory, by the
command that the file itself names."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
from hatchling.builders.wheel import WheelBuilder

from mlx_parallm.config.load import load_config
from tests.docs.docs_blocks import ROOT, pages
from tests.docs.docs_commands import GROUP_SIZE, MAX_TOKENS, SMALL
from tests.preloaded import Run, preloaded

CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
FIRST_LINE = re.compile(r"# mlx_parallm (train --config (train_configs/[\w.]+\.toml)( --dry-run)?)")
DOCKERFILE = (ROOT / "Dockerfile.dev").read_text(encoding="utf-8")
SET_UP = "RUN make .venv/.ready-dev"


def command(config: Path) -> list[str]:
    """The command of a configuration's first line."""
    found = FIRST_LINE.match(config.read_text(encoding="utf-8"))
    assert found is not None, f"{config.name}: its first line is not a command"
    assert found[2] == f"train_configs/{config.name}"
    return shlex.split(found[1])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_needs_nothing_that_is_not_shipped(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a model of the hub: rows, teachers and functions lie beside it."""
    monkeypatch.chdir(tmp_path)
    read = load_config(command(config)[2])
    paths = [read.data.path, *(environment.data for environment in read.environments)]
    paths += [
        teacher.path
        for teacher in read.rl_training.distillation.teachers
        if teacher.kind in ("model", "checkpoint")
    ]
    shipped = [Path(path) for path in paths if path]
    assert not [path for path in shipped if not path.exists()]
    assert all(path.is_relative_to(ROOT / "examples") for path in shipped)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with preloaded() as run:
        yield run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_runs_from_an_empty_directory(
    config: Path, tmp_path: Path, run: Run
) -> None:
    """Where a run reads what an earlier one may have left, twice, as people do. A model of the hub
    is the tiny one, and a run has one step of few tokens."""
    read = load_config(config)
    settings: dict[str, object] = {**SMALL, "server.port": 0, "rl_training.total_steps": 1}
    if not read.model.base_path.startswith("builtin:"):
        settings["model.base_path"] = "builtin:tiny"
    if read.data.path is not None:
        settings = {key: value for key, value in settings.items() if ".atropos." not in key}
    for number, environment in enumerate(read.environments):
        settings[f"environments.{number}.max_tokens"] = min(environment.max_tokens, MAX_TOKENS)
        settings[f"environments.{number}.group_size"] = min(environment.group_size, GROUP_SIZE)
    words = [word for word in command(config) if word != "--dry-run"]
    if not read.environments and read.data.path is None:
        words.append("--dry-run")  # its groups come from another program
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    left_behind = bool(read.rl_training.distillation.teachers) or read.model.lora_path is not None
    for _ in range(1 + left_behind):
        code, output = run(words, tmp_path)
        assert code == 0, output


def copied(until: str, directory: Path) -> None:
    """Carry out the COPY lines of Dockerfile.dev up to a line, into a directory, as docker would."""
    for line in DOCKERFILE.split(until)[0].splitlines():
        if not line.startswith("COPY "):
            continue
        *sources, target = line.split()[1:]
        for source in sources:
            file, place = ROOT / source, directory / target
            assert file.exists(), f"Dockerfile.dev copies {source}, which is not there"
            if file.is_dir():
                shutil.copytree(file, place, dirs_exist_ok=True)
                continue
            into = place / file.name if target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, into)


def test_the_image_can_install_what_it_has_copied(tmp_path: Path) -> None:
    """What its first layer installs is built of these files alone."""
    (source := tmp_path / "src").mkdir()
    copied(SET_UP, source)
    assert SET_UP in DOCKERFILE
    dry = subprocess.run(
        ["make", "-n", SET_UP.rpartition(" ")[2]], cwd=source, capture_output=True, check=False
    )
    assert dry.returncode == 0, dry.stderr
    [built] = WheelBuilder(str(source)).build(
        directory=str(tmp_path / "built"), versions=["standard"]
    )
    assert Path(built).exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_image_sets_itself_up(tmp_path: Path) -> None:
    """Its RUN lines after the packages of the system, in an empty directory."""
    copied(SET_UP, tmp_path)
    lines = re.findall(r"^RUN (?!apt-get)(.*)", DOCKERFILE, re.MULTILINE)
    for line in lines:
        done = subprocess.run(
            ["sh", "-ec", line],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


INSTALLS_BY_NAME = re.compile(r"pip install [^\n`]*\bmlx[-_]parallm(?![\w.-]*\.whl)\b(?!/)")


def test_nobody_is_told_to_install_it_by_name() -> None:
    """It is on no index: whoever registers the name would own these machines. `mlx-parallm` in a
    pip command is a mistake until then."""
    assert [
        name
        for name, text in shipped_texts()
        if INSTALLS_BY_NAME.search(text) or "mlx-parallm[" in text
    ] == []


def shipped_texts() -> Iterator[tuple[str, str]]:
    """Yield each text that a user may read, with its name."""
    files = [*pages(), *CONFIGS, *sorted((ROOT / "mlx_parallm").rglob("*.py"))]
    for folder in ("examples", "clients", "scripts"):
        files += [each for each in sorted((ROOT / folder).rglob("*")) if each.suffix in READ]
    files += [ROOT / "Makefile", ROOT / "Dockerfile.dev"]
    for file in files:
        yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


CUT_DOCSTRING = re.compile(r"__doc__[^\n]*?(?:splitlines|partition\(\"\\n\"|split\(\"\\n\")")


def test_no_help_ends_with_the_first_line_of_its_docstring() -> None:
    """A sentence may go on there: "Teach a model to call tools: DPO on preference"."""
    assert CUT_DOCSTRING.search('(call.__doc__ or "").strip().partition("\\n")[0]')
    assert [name for name, text in shipped_texts() if CUT_DOCSTRING.search(text)] == []


READ = (".py", ".toml", ".md", ".sh")
INSTALL = re.compile(r"\b(?:pip3? install|uv (?:add|pip|run|sync|tool))\b([^\n]*)")
NAMED = re.compile(r"\[([a-z][a-z,-]*)\]|--(?:extra|group)[ =]([a-z-]+)")
IN_WORDS = re.compile(r"\bextras? (`[a-z-]+`(?:(?:, | and | or )`[a-z-]+`)*)")


def extras_of(text: str) -> set[str]:
    """The extras that a text tells to install."""
    named: set[str] = set()
    for line in INSTALL.findall(text):
        for pair in NAMED.findall(re.sub(r"mlx\[cpu\]", "", line)):
            named |= {extra for group in pair for extra in group.split(",") if extra}
    for names in IN_WORDS.findall(text):
        named |= set(re.findall(r"`([a-z-]+)`", names))
    return named


def test_every_extra_that_is_named_is_one_of_the_project() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [(name, extra) for name, text in shipped_texts() for extra in extras_of(text)]
    assert [each for each in named if each[1] not in project["optional-dependencies"]] == []
    assert len({extra for _, extra in named}) > 12
    wrong = "`pip install '.[no-such]'  # or [other]`, the extras `third` and `fourth`, uv sync --extra fifth"
    assert extras_of(wrong) == {"no-such", "other", "third", "fourth", "fifth"}
