"""A task folder, read: Harbor's layout or Terminal-Bench's. What needs a container is refused by
name. No MLX.

    Harbor          task.toml  instruction.md  environment/  tests/test.sh (or verifier.py)
    Terminal-Bench  task.yaml (instruction)    Dockerfile    tests/test_*.py  run-tests.sh

No image is built: the sandbox has this machine's bash and python, the standard library, and no
network. A Dockerfile may say FROM a plain python, ubuntu or debian image, WORKDIR, COPY of files
beside it, ENV and LABEL; then its files are laid out as it says. Anything else needs a container.
"""

import ast
import errno
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile
from math import inf
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.python_text import parsed_module
from mlx_parallm.system.files import inside, read_bounded
from mlx_parallm.system.packages import require

LARGEST = 4 << 20
"""Bytes of all files of a task together."""
LARGEST_SETTINGS = 64 << 10
"""Bytes of task.toml or task.yaml: Python reads 4 MB of `a.a.a …` as TOML for hours."""
MOST_FILES = 10_000
WORKDIR = "/app"
PLAIN_IMAGE = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?:python|ubuntu|debian)(?::[\w.-]+)?"
    r"|ghcr\.io/laude-institute/t-bench/(?:python-3-\d+|ubuntu-\d+-\d+)(?::[\w.-]+)?"
)
NETWORK = re.compile(r"\b(apt-get|apt|curl|wget|uv|uvx|pip3?|npm|git clone|conda)\b")
# test.sh that only fetches pytest and runs it: its tests may be plain functions
PYTEST = re.compile(r"\bpytest\b")
CANARY = re.compile(r"^\s*(?:<!--|#).*canary.*$", re.IGNORECASE)

Verifier = Literal["script", "function", "tests"]


@dataclass(frozen=True)
class TaskFolder:
    """A task that runs without a container.

    Attributes:
        workdir: the absolute path at which the instruction and the tests expect the files.
        files: path below `workdir` → content, at the beginning.
        tests: path below /tests → content; unseen by the policy.
        verifier: how it is scored: test.sh, verifier.py's `verify`, or the functions of test_*.py.
        verifier_s: longest time of the tests.
        environment: environment variables.
        metadata: the task's own description.
    """

    name: str
    instruction: str
    workdir: str
    files: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    verifier: Verifier
    verifier_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


class NeedsContainerError(Exception):
    """A task that cannot run here. `str`: why."""


def task_paths(root: Path) -> list[Path]:
    """Return the task folders below a directory, or the one that it is, by name. Hidden ones and
    links are left out. Raises ConfigError: not found."""
    if not root.is_dir():
        raise ConfigError(f"task_folders: {root} is not a directory")
    files = [file for name in ("task.toml", "task.yaml") for file in root.rglob(name)]
    folders = {
        file.parent
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(root).parts)
        and not file.parent.is_symlink()
    }
    if not folders:
        raise ConfigError(f"task_folders: no task.toml and no task.yaml below {root}")
    return sorted(folders)


def read_folder(path: Path) -> TaskFolder:
    """Read a task folder. Raises NeedsContainerError: it cannot run in the sandbox."""
    try:
        task = _Reader(path)
        return _harbor(task) if (path / "task.toml").is_file() else _terminal_bench(task)
    # a time-out of words, an open quote, brackets in brackets, …
    except (OSError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NeedsContainerError(f"it cannot be read: {error}") from error


class _Reader:
    """Reads the files of one task folder: inside of it alone, and no more than LARGEST bytes and
    MOST_FILES files together. Sizes are looked at first. Raises NeedsContainerError, OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bytes, self._files = LARGEST, MOST_FILES

    def text(self, path: Path) -> str:
        return self.content(path).decode()

    def settings(self, name: str) -> str:
        content = self.content(self.root / name)
        if len(content) > LARGEST_SETTINGS:
            raise NeedsContainerError(
                f"{name} has {len(content)} bytes: more than {LARGEST_SETTINGS} are not read"
            )
        return content.decode()

    def content(self, path: Path) -> bytes:
        if self._files == 0:
            raise NeedsContainerError(f"it has more than {MOST_FILES} files")
        real, shown = inside(self.root, path.relative_to(self.root)), path.relative_to(self.root)
        try:
            content = read_bounded(real, self._bytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise NeedsContainerError(
                    f"{shown}: with it the task's files hold more than {LARGEST} bytes"
                ) from error
            raise
        self._bytes -= len(content)
        self._files -= 1
        return content

    def below(self, directory: Path) -> dict[str, bytes]:
        """Return the files below a directory. A link counts as its target."""
        inside(self.root, directory.relative_to(self.root))
        files: dict[str, bytes] = {}
        for number, file in enumerate(directory.rglob("*")):
            if number >= MOST_FILES:
                raise NeedsContainerError(f"{directory.name}/ has more than {MOST_FILES} entries")
            if file.is_symlink() and file.is_dir():
                shown = file.relative_to(self.root)
                raise NeedsContainerError(f"{shown} is a link to a directory: put the files there")
            if not file.is_dir():
                files[file.relative_to(directory).as_posix()] = self.content(file)
        return dict(sorted(files.items()))


def _harbor(task: _Reader) -> TaskFolder:
    path = task.root
    try:
        settings = tomllib.loads(task.settings("task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise NeedsContainerError(f"task.toml: {error}") from error
    environment, verifier = _table(settings, "environment"), _table(settings, "verifier")
    image, dockerfile = environment.get("docker_image"), path / "environment" / "Dockerfile"
    # an image that was built of the Dockerfile beside it is what that says
    if image and not dockerfile.is_file() and not PLAIN_IMAGE.fullmatch(str(image)):
        raise NeedsContainerError(f"task.toml: docker_image = {image!r} needs a container")
    if (path / "steps").is_dir() or settings.get("steps"):
        raise NeedsContainerError("it has several steps, which are not played here")
    if environment.get("gpus"):
        raise NeedsContainerError("task.toml: gpus: the sandbox has none")
    if environment.get("mcp_servers"):
        raise NeedsContainerError("task.toml: mcp_servers: give the servers to [[tools.mcp]]")
    if str(verifier.get("environment_mode", "shared")) != "shared" or verifier.get("environment"):
        raise NeedsContainerError("its verifier wants its own environment")
    if (path / "environment" / "docker-compose.yaml").exists():
        raise NeedsContainerError("environment/docker-compose.yaml needs containers")
    workdir, files, variables = _layout(task, path / "environment")
    tests = task.below(path / "tests") if (path / "tests").is_dir() else {}
    return TaskFolder(
        path.name,
        _instruction(task.text(path / "instruction.md")),
        workdir,
        files,
        tests,
        _verifier(tests),
        _seconds(verifier.get("timeout_sec", 600.0), "task.toml: timeout_sec"),
        {
            **variables,
            **{
                key: str(value)
                for part in (environment, verifier)
                for key, value in _table(part, "env").items()
            },
        },
        _table(settings, "metadata"),
    )


def _read_yaml(text: str) -> Any:
    """Read YAML without aliases, by which 300 bytes stand for any number of values. Raises
    NeedsContainerError."""
    require("task_folders: a task.yaml", "yaml")
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                line = self.peek_event().start_mark.line + 1
                raise NeedsContainerError(f"task.yaml, line {line}: aliases (*name) are not read")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise NeedsContainerError(f"task.yaml: {' '.join(str(error).split())}") from error


def _terminal_bench(task: _Reader) -> TaskFolder:
    path = task.root
    settings = _read_yaml(task.settings("task.yaml"))
    if not isinstance(settings, Mapping) or not isinstance(settings.get("instruction"), str):
        raise NeedsContainerError("task.yaml has no instruction")
    if settings.get("parser_name", "pytest") != "pytest":
        raise NeedsContainerError(
            f"task.yaml: parser_name = {settings['parser_name']!r}: only pytest's tests are read"
        )
    compose = next(path.glob("docker-compose.y*ml"), None)
    if compose is not None:
        services = re.findall(r"^  (\w[\w-]*):", task.text(compose), re.MULTILINE)
        if len(services) > 1:
            raise NeedsContainerError(f"{compose.name} has {len(services)} services")
    workdir, files, variables = _layout(task, path)
    tests = task.below(path / "tests") if (path / "tests").is_dir() else {}
    seconds = _seconds(
        settings.get("max_test_timeout_sec", 60.0), "task.yaml: max_test_timeout_sec"
    )
    tests = {name: content for name, content in tests.items() if name != "test.sh"}
    skipped = ("instruction", "parser_name", "max_test_timeout_sec")
    metadata = {key: value for key, value in settings.items() if key not in skipped}
    instruction = _instruction(settings["instruction"])
    return TaskFolder(
        path.name,
        instruction,
        workdir,
        files,
        tests,
        _verifier(tests),
        seconds,
        variables,
        metadata,
    )


def _instruction(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(dropwhile(lambda line: not line.strip() or CANARY.match(line), lines)).strip()


def _seconds(value: Any, where: str) -> float:
    """Raises NeedsContainerError: it is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise NeedsContainerError(f"{where} = {str(value)[:40]}: expected seconds above 0")
    return float(value)


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, Mapping):
        raise NeedsContainerError(f"task.toml: {name} is not a table")
    return dict(table)


def _layout(task: _Reader, context: Path) -> tuple[str, dict[str, bytes], dict[str, str]]:
    """Return working directory, files and environment variables as the Dockerfile says; without
    one the files lie as they are."""
    dockerfile = context / "Dockerfile"
    if not dockerfile.is_file():
        is_harbors = context.name == "environment" and context.is_dir()
        return WORKDIR, task.below(context) if is_harbors else {}, {}
    workdir, files, variables = WORKDIR, dict[str, bytes](), dict[str, str]()
    stages = 0
    for number, instruction, rest in _instructions(task.text(dockerfile)):
        where = f"{dockerfile.name}, line {number}: {instruction} {rest}"[:160]
        if instruction == "FROM":
            stages += 1
            if stages > 1 or not PLAIN_IMAGE.fullmatch(rest.split(" ")[0]):
                raise NeedsContainerError(f"{where}: not a plain python, ubuntu or debian image")
        elif instruction == "WORKDIR" and not files:
            workdir = rest.rstrip("/") or "/"
            place = PurePosixPath(workdir)
            if not place.is_absolute() or workdir == "/" or ".." in place.parts:
                raise NeedsContainerError(f"{where}: no directory of its own")
        elif instruction == "COPY" and not rest.startswith("-"):
            files |= _copied(task, context, rest, workdir, where)
        elif instruction == "ENV" and "=" in rest:
            variables |= dict(word.split("=", 1) for word in shlex.split(rest) if "=" in word)
        elif instruction not in ("LABEL", "MAINTAINER"):
            raise NeedsContainerError(f"{where}: needs a container")
    return workdir, files, variables


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, instruction, its words) of a Dockerfile, continued lines joined."""
    joined, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not joined:
            began = number
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        joined += line.strip().removesuffix("\\") + " "
        if line.rstrip().endswith("\\"):
            continue
        instruction, _, rest = joined.strip().partition(" ")
        joined = ""
        yield began, instruction.upper(), rest.strip()


def _copied(task: _Reader, context: Path, rest: str, workdir: str, where: str) -> dict[str, bytes]:
    """Return the files that a COPY puts below the working directory. Raises NeedsContainerError."""
    *sources, target = shlex.split(rest)
    place = PurePosixPath(workdir) / target
    if not sources or not place.is_relative_to(workdir) or ".." in place.parts:
        raise NeedsContainerError(f"{where}: outside of {workdir}")
    base = place.relative_to(workdir)
    files: dict[str, bytes] = {}
    for source in sources:
        path = context / source
        real = path.resolve()
        if not real.is_relative_to(context.resolve()) or not path.exists():
            raise NeedsContainerError(f"{where}: there is no {source!r} beside the Dockerfile")
        path = context / real.relative_to(context.resolve())
        if path.is_dir():
            files |= {(base / name).as_posix(): data for name, data in task.below(path).items()}
        else:
            into_directory = target.endswith(("/", ".")) or len(sources) > 1
            files[(base / path.name if into_directory else base).as_posix()] = task.content(path)
    return files


def _verifier(tests: Mapping[str, bytes]) -> Verifier:
    """Return how the task is scored. Raises NeedsContainerError: not here, and why."""
    script = tests.get("test.sh")
    if (
        script is not None
        and not NETWORK.search(text := script.decode())
        and not (PYTEST.search(text))
    ):
        return "script"
    if script is None and "verifier.py" in tests:
        return "function"
    modules = {
        name: data.decode() for name, data in tests.items() if re.fullmatch(r"test_\w+\.py", name)
    }
    if script is not None and not PYTEST.search(script.decode()):
        fault = NETWORK.search(script.decode())
        assert fault is not None
        raise NeedsContainerError(f"tests/test.sh calls {fault[1]}: the sandbox has no network")
    if not modules:
        raise NeedsContainerError("it has no tests/test.sh, verifier.py or test_*.py")
    for name, source in modules.items():
        _check_plain(name, source)
    return "tests"


def _check_plain(name: str, source: str) -> None:
    """Raises NeedsContainerError: a module of tests needs pytest or packages."""
    try:
        tree = parsed_module(source)
    except ValueError as error:
        raise NeedsContainerError(f"tests/{name}: {error}") from error
    for node in ast.walk(tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for module in names:
            if (top := module.partition(".")[0]) not in sys.stdlib_module_names:
                raise NeedsContainerError(f"tests/{name} imports {top}: the sandbox has none")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [node for node in functions if node.name.startswith("test")]
    if not tests or any(isinstance(node, ast.ClassDef) for node in tree.body):
        raise NeedsContainerError(f"tests/{name}: only plain functions test_… are run here")
    for test in tests:
        if test.args.args or test.decorator_list:
            raise NeedsContainerError(f"tests/{name}: {test.name} needs pytest's fixtures or marks")
