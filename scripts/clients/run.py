"""Runs other people's clients against this server, each as its users install it, and writes the
table of what works.

    .venv/bin/python -m scripts.clients.run                          # all of scripts/clients/programs
    .venv/bin/python -m scripts.clients.run openai_python ai_sdk     # these
    .venv/bin/python -m scripts.clients.run --table docs/clients.md  # and the table, from all that ran until now

Each program names its packages, with their versions, in its header. They are installed once, from
PyPI or npm, into an environment of the program's own in --environments; a changed header makes a
new one. Two servers answer: one of builtin:tiny, and one of a scripted model that calls a tool
where tools are offered, and then answers with JSON.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.clients.coding_task import CLIENTS, serve
from scripts.clients.scripted_model import TINY, make_scripted_model, tool_call

PROGRAMS = Path(__file__).with_name("programs")
RESULTS = Path(__file__).with_name("results.json")
MARKS = ("<!-- made by scripts/clients/run.py -->", "<!-- end of scripts/clients/run.py -->")
COMMON = (
    "chat",
    "stream",
    "tool loop",
    "schema",
    "tools + schema",
    "responses",
    "embeddings",
    "cancel",
)
ANSWER = '{"city": "Paris", "sunny": true}'
SECONDS = 600  # of one program


class InstallError(Exception):
    """pip or npm has failed."""


@dataclass(frozen=True)
class Program:
    path: Path

    @property
    def header(self) -> str:
        """Its docstring, or its first comments."""
        return self.path.read_text(encoding="utf-8").split("import ", 1)[0]

    @property
    def packages(self) -> list[str]:
        """The packages as pip or npm takes them: "openai==3.51.0"."""
        match = re.search(r"packages: (.+?)(?:\"\"\"|\n|$)", self.header)
        if match is None:
            raise SystemExit(f"{self.path} has no line 'packages: NAME==VERSION …' in its header")
        return match[1].split()

    @property
    def title(self) -> str:
        return self.header.lstrip('"/ ').split(". ")[0].split(".\n")[0]

    def environment(self, root: Path) -> Path:
        """Its environment, made if need be. Raises InstallError."""
        directory = root / self.path.stem
        made = directory / "packages.json"
        if made.is_file() and json.loads(made.read_text()) == self.packages:
            return directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        if self.path.suffix == ".py":
            self._install([sys.executable, "-m", "venv", "--without-pip", str(directory)])
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(directory),
                "install",
                "-q",
                "--no-compile",
            ]
            self._install([*pip, *self.packages])
        else:
            (directory / "package.json").write_text('{"type": "module"}')
            self._install(
                [
                    "npm",
                    "install",
                    "--no-fund",
                    "--no-audit",
                    "--prefix",
                    str(directory),
                    *self.packages,
                ]
            )
        made.write_text(json.dumps(self.packages))
        return directory

    def _install(self, command: list[str]) -> None:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise InstallError(f"not installed: {' '.join(run.stderr[-300:].split())}")

    def run(self, directory: Path, variables: dict[str, str]) -> dict[str, str | None]:
        """Run the program. Return for each cell None, or why it failed."""
        if self.path.suffix == ".py":
            command = [str(directory / "bin" / "python"), str(self.path)]
        else:
            for file in (self.path, PROGRAMS / "cells.mjs"):
                shutil.copy(file, directory)
            command = ["node", str(directory / self.path.name)]
        with tempfile.TemporaryDirectory() as home:
            environment = os.environ | variables | {"HOME": home, "PYTHONPATH": ""}
            try:
                run = subprocess.run(
                    command,
                    cwd=home,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                return {"program": f"it did not end in {error.timeout:.0f} s"}
        lines = [line for line in run.stdout.splitlines() if line.startswith('{"cell"')]
        reasons: dict[str, str | None] = {
            each["cell"]: each["why"] for each in map(json.loads, lines)
        }
        if run.returncode or not reasons:
            reasons["program"] = " ".join((run.stdout + run.stderr)[-400:].split())
        return reasons


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Both servers; the variables that the programs read."""
    with tempfile.TemporaryDirectory(prefix="clients_") as name, contextlib.ExitStack() as stack:
        call = tool_call("get_weather", city="Paris")
        model = make_scripted_model(Path(name) / "model", [call, ANSWER], aside=ANSWER)
        tiny = stack.enter_context(serve("builtin:tiny", Path(name, "tiny.log")))
        scripted = stack.enter_context(serve(str(model), Path(name, "scripted.log")))
        yield {
            "MODEL": "default",
            "TINY_URL": tiny,
            "SCRIPTED_URL": scripted,
            "TOKENIZER": str(TINY),
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_API_KEY": "none",
            "DO_NOT_TRACK": "1",
            "CREWAI_DISABLE_TELEMETRY": "true",
            "CREWAI_TRACING_ENABLED": "false",
            "AGNO_TELEMETRY": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }


def ran_before(there: Mapping[str, Program]) -> dict[str, dict]:
    """Results of earlier runs, but for programs that are gone."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return {name: result for name, result in results.items() if name in there}


def table(results: dict[str, dict]) -> str:
    """Rows of clients, columns of what most of them do; beneath it, a sentence for each cell
    that failed."""
    rows = [f"| client | {' | '.join(COMMON)} | more |", "|---|" + "---|" * (len(COMMON) + 1)]
    failures = []
    for _, result in sorted(results.items()):
        cells: dict[str, str | None] = result["cells"]
        marks = {cell: "✗" if why else "✓" for cell, why in cells.items()}
        more = ", ".join(f"{cell} {mark}" for cell, mark in marks.items() if cell not in COMMON)
        first = f"{result['title']}: `{' '.join(result['packages'])}`"
        rows.append(f"| {first} | {' | '.join(marks.get(cell, '') for cell in COMMON)} | {more} |")
        for cell, why in cells.items():
            if why:
                failures.append(f"* {result['title']}, {cell}: `{why.replace('`', chr(39))}`")
    return "\n".join([*rows, *([""] if failures else []), *failures])


def write_table(page: Path, results: dict[str, dict]) -> None:
    begin, end = MARKS
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(
        f"{before}{begin}\n\n{table(results)}\n\n{end}{rest.split(end)[1]}", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs other people's clients against this server.")
    parser.add_argument(
        "names", nargs="*", help="programs of scripts/clients/programs; default: all"
    )
    parser.add_argument(
        "--environments", type=Path, default=CLIENTS, help="where they are installed (.clients)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="installations at once")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="PAGE",
        help="write the table between the marks of this page",
    )
    arguments = parser.parse_args()
    there = {
        path.stem: Program(path)
        for path in sorted(PROGRAMS.iterdir())
        if path.stem != "cells" and path.is_file()
    }
    if unknown := set(arguments.names) - set(there):
        parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    programs = [there[name] for name in arguments.names or there]
    root = arguments.environments.resolve()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool, servers() as variables:
        made = {pool.submit(program.environment, root): program for program in programs}
        for future in concurrent.futures.as_completed(made):
            program = made[future]
            try:
                cells = program.run(future.result(), variables)
            except InstallError as error:
                print(f"{program.path.stem:24} {error}", flush=True)
                continue
            results = ran_before(there)  # read again: another runner may have written
            results[program.path.stem] = {
                "title": program.title,
                "packages": program.packages,
                "cells": cells,
            }
            for cell, why in cells.items():
                print(f"{program.path.stem:24} {cell:24} {why or '✓'}", flush=True)
            RESULTS.write_text(
                json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
            )
    if arguments.table:
        write_table(arguments.table, ran_before(there))


if __name__ == "__main__":
    main()
