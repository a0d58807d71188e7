"""The fenced blocks of README.md and docs/**/*.md, and what can be said of one without running it.

`pages()` → `blocks(page)` → `problems(block)`. `test_docs_code.py` runs what can be run;
`docs_commands.py` is what the commands of a block meet there. A block in an HTML comment is one
like the others: what a page takes for granted (a configuration, a run) can stand there.

The blocks of a page are one session; a comment `<!-- session: NAME -->` begins another one.

A block's kind is its language. Further words of the fence (```jsonl rows.jsonl) or a first comment
line (`# score.py`) save it under that name in the page's directory; the word `check` marks code
that is looked at and not run.
"""

import ast
import configparser
import contextlib
import functools
import io
import json
import plistlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.parsers.expat import ExpatError

import tomli
import yaml

from mlx_parallm.cli import table
from tests.docs import docs_commands

ROOT = Path(__file__).resolve().parents[2]
SHELLS = {"bash", "sh"}
RUN = SHELLS | {"python"}
PARSED = {"toml", "json", "jsonl", "yaml", "ini", "xml", "dockerfile"}
TEXT = {"text"}  # said to be nothing that a machine reads
ELSEWHERE = {"typescript"}  # clients/typescript compiles them in its own tests
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS = {command.name: command for command in table.COMMANDS}
SCRIPTS = {command.script: command.name for command in table.COMMANDS if command.script}
SEPARATORS = re.compile(r"[|;&]|\$\(")

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
SESSION = re.compile(r"<!-- session: (\w+) -->$")
NAME_COMMENT = re.compile(r"#\s*(?P<name>[\w./-]+\.(?:py|toml|ini|yaml|yml|sh|conf|service))\s*$")
FILE_NAME = re.compile(r"[\w./-]+\.\w+")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the opening fence, 1-based
    info: tuple[str, ...]
    text: str
    session: str = ""  # a page's first one has the page's name

    @property
    def language(self) -> str:
        return self.info[0].lower() if self.info else ""

    @property
    def saved_as(self) -> str | None:
        """The name under which a reader is told to save it."""
        if given := next((word for word in self.info[1:] if FILE_NAME.fullmatch(word)), None):
            return given
        first = self.text.lstrip().partition("\n")[0]
        found = NAME_COMMENT.match(first) if self.language not in SHELLS else None
        return found["name"] if found else None

    @property
    def is_run(self) -> bool:
        return self.language in RUN and "check" not in self.info

    def __str__(self) -> str:
        programs = {program for line in shell_lines(self.text) for program, _ in commands(line)}
        is_stubbed = (
            self.language in SHELLS and bool(programs) and programs <= {*docs_commands.NOT_RUN}
        )
        how = (
            "text"
            if self.language in TEXT
            else "run"
            if self.is_run and not is_stubbed
            else "checked"
        )
        return f"{self.page.relative_to(ROOT)}:{self.line}-{self.language or 'no language'}-{how}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Every fenced block of a page, in order. Raises AssertionError: a fence that does not end."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    found: list[Block] = []
    opened, start, session = None, 0, page.stem
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if opened is None and (begun := SESSION.match(line)):
            session = begun[1]
        if opened is None:
            opened, start = fence, number
        elif fence and fence["ticks"].startswith(opened["ticks"]) and not fence["info"].strip():
            indent = len(opened["indent"])
            body = "\n".join(
                row[min(indent, len(row) - len(row.lstrip(" "))) :]
                for row in lines[start + 1 : number]
            )
            info = tuple(opened["info"].split())
            found.append(Block(page, start + 1, info, body + "\n", session))
            opened = None
    assert opened is None, f"{page}:{start + 1}: this fence does not end"
    return found


def problems(block: Block) -> Iterator[str]:
    """What is wrong with a block, found without running it. TOML is looked at where its page's
    files are."""
    match block.language:
        case "bash" | "sh":
            result = subprocess.run(
                ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
            )
            yield from result.stderr.splitlines()
            for line in shell_lines(block.text):
                yield from command_problems(line)
        case "python":
            try:
                ast.parse(block.text)
            except SyntaxError as error:
                yield f"line {error.lineno}: {error.msg}"
        case language if language in TEXT | ELSEWHERE:
            pass
        case language if language in PARSED:
            yield from _parse_problems(language, block.text)
        case language:
            yield f"a block of {language or 'no language'}: one of {sorted(RUN | PARSED | TEXT | ELSEWHERE)} is known"


def _parse_problems(language: str, text: str) -> Iterator[str]:
    try:
        if language == "toml":
            tomli.loads(text)
        elif language == "json":
            json.loads(text)
        elif language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in text.splitlines()), (
                "a row is not an object"
            )
        elif language == "yaml":
            yield from _compose_problems(yaml.safe_load(text))
        elif language == "ini":
            yield from _unit_problems(text)
        elif language == "xml":
            yield from _plist_problems(plistlib.loads(text.encode()))
        elif language == "dockerfile":
            yield from _dockerfile_problems(text)
    except (ValueError, AssertionError, yaml.YAMLError, configparser.Error, ExpatError) as error:
        yield f"{language}: {error}"


def _unit_problems(text: str) -> Iterator[str]:
    """A systemd unit: its commands are commands of ours with flags that they have."""
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    if "Unit" not in unit and "Service" not in unit:
        return
    if not unit.has_option("Service", "ExecStart"):
        yield "a [Service] without ExecStart"
        return
    yield from command_problems(
        unit["Service"]["ExecStart"].replace("\\\n", " "), must_be_ours=True
    )


def _plist_problems(plist: dict[str, object]) -> Iterator[str]:
    arguments = plist.get("ProgramArguments")
    if not isinstance(plist.get("Label"), str) or not isinstance(arguments, list):
        yield "a launchd job needs Label and ProgramArguments"
        return
    yield from command_problems(shlex.join(map(str, arguments)), must_be_ours=True)


def _compose_problems(data: object) -> Iterator[str]:
    services = data.get("services", {}) if isinstance(data, dict) else {}
    for name, service in services.items():
        if not {"image", "build"} & set(service):
            yield f"service {name} has neither image nor build"
        command = service.get("command", "")
        yield from command_problems(
            shlex.join(command) if isinstance(command, list) else str(command)
        )


def _dockerfile_problems(text: str) -> Iterator[str]:
    lines = [line for line in shell_lines(text) if line]
    if not any(line.startswith("FROM ") for line in lines):
        yield "a Dockerfile without FROM"
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction in ("CMD", "ENTRYPOINT") and rest.startswith("["):
            yield from command_problems(shlex.join(json.loads(rest)))
        elif instruction in ("RUN", "CMD", "ENTRYPOINT"):
            yield from command_problems(rest)


def shell_lines(text: str) -> list[str]:
    """Lines with their continuations, without here-documents' bodies."""
    body = re.sub(
        r"<<-?\s*['\"]?(\w+)['\"]?(.*)\n(?:.*\n)*?\s*\1\s*$", r"\2", text, flags=re.MULTILINE
    )
    return [line.strip() for line in body.replace("\\\n", " ").splitlines()]


def commands(line: str) -> Iterator[tuple[str, list[str]]]:
    """(program, all words) of each simple command of a line."""
    for part in SEPARATORS.split(line):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            # a quoted string that goes over a line or holds a separator; running it is the test
            continue
        while words and re.fullmatch(r"\w+=.*|sudo|env|exec|nohup|caffeinate|-[a-z]+", words[0]):
            words = words[1:]
        if words:
            yield Path(words[0]).name, words


def command_problems(line: str, *, must_be_ours: bool = False) -> Iterator[str]:
    """Commands of ours are given flags that they have; `make` targets and `pip` extras that
    exist."""
    ours = False
    if inner := re.search(r"\b(?:ba)?sh -l?c ([\"'])(.*)\1", line):
        yield from command_problems(inner[2], must_be_ours=must_be_ours)
        return
    for program, words in commands(line):
        if program == "mlx_parallm" and words[1:]:
            ours = True
            yield from flag_problems(words[1], words[2:])
        elif program.startswith("mlx_parallm"):
            ours = True
            yield from flag_problems(SCRIPTS.get(program, program), words[1:])
        elif program == "make":
            yield from _make_problems(
                [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            )
        elif "pip" in words[:3] and "install" in words:
            yield from _extra_problems(words)
    if must_be_ours and not ours:
        yield f"{line!r} starts no command of this package"


def flag_problems(command: str, words: list[str]) -> Iterator[str]:
    """Words that the parser of `mlx_parallm COMMAND` refuses."""
    if command not in COMMANDS:
        yield f"there is no command {command}"
        return
    if {"--help", "--version"} & set(words):
        return
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            COMMANDS[command].parser(command)[0].parse_args(words)
        except SystemExit:
            yield stderr.getvalue().strip()


@functools.cache
def flags_of(command: str) -> set[str]:
    parser, _ = COMMANDS[command].parser(command)
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", parser.format_help()))


def _make_problems(targets: list[str]) -> Iterator[str]:
    result = subprocess.run(
        ["make", "-n", "-C", ROOT, *targets], capture_output=True, text=True, check=False
    )
    if result.returncode:
        yield result.stderr.strip()


def _extra_problems(words: list[str]) -> Iterator[str]:
    for word in words:
        asked = re.fullmatch(r"(?:\.|mlx[-_]parallm|.*\.whl)\[([\w,-]+)\]", word)
        for extra in asked[1].split(",") if asked else ():
            if extra not in PROJECT["optional-dependencies"]:
                yield f"pyproject.toml has no extra {extra!r}"
