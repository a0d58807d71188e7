"""Code in answers: run against tests in the sandbox, or only parsed."""

import asyncio
import json
import re
import secrets
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.sandbox.sandbox import PROTECTIONS, Language, Sandbox
from mlx_parallm.rewards.part_tools import Completions, Scores, texts_of, to_binary, with_column

FENCE = re.compile(r"[ \t]*```[ \t]*([\w+-]*)")
LANGUAGES: Mapping[str, Language] = {
    **dict.fromkeys(("", "python", "py", "python3"), "python"),
    **dict.fromkeys(("bash", "sh", "shell"), "bash"),
}


HARNESS = """
def _word():
    import os
    word, (empty, end) = os.read(0, 99), os.pipe()
    os.dup2(empty, 0), os.close(empty), os.close(end)
    return word

def _run(answer, tests):
    import sys
    with open("answer.py", "wb") as file:
        file.write((answer + "\\n" + tests).encode(errors="replace"))
    # Two trees, so that no last line of the answer changes the tests. One program, because the
    # answer could replace `exec`.
    only_tree, lines = 0x400, "\\n" * (answer.count("\\n") + 1)
    program = compile(answer, file.name, "exec", only_tree, True)
    program.body += compile(lines + tests, file.name, "exec", only_tree, True).body
    exec(compile(program, file.name, "exec", 0, True), globals())
    for stream in (sys.stdout, sys.__stdout__):
        if not getattr(stream, "closed", True):
            stream.flush()
    return b""

__import__("os").write(1, b"\\n" + _word() + _run(%r, %r))
"""
"""Runs an answer and its tests, then prints the word from stdin. Meanwhile the word is in no file,
variable or frame's
locals: only on the interpreter's stack. Both are in a file as well, so `inspect.getsource` and
tracebacks show their lines."""


def fenced(text: str) -> list[tuple[str, str]]:
    """Return (language after the backquotes, in lower case; code) of every code block in a
    Markdown text."""
    blocks: list[tuple[str, str]] = []
    name, began = "", None
    lines = text.split("\n")
    # one pass: a policy that has collapsed writes thousands of openings
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence is None:
            continue
        if began is None:
            name, began = fence[1].lower(), number + 1
        elif line.strip(" \t") == "```":
            blocks.append((name, "".join(f"{part}\n" for part in lines[began:number])))
            began = None
    return blocks


def code(
    *,
    column: str = "tests",
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    require: Collection[str] = PROTECTIONS,
    threshold: float | None = None,
) -> Callable[..., Any]:
    """The share of tests that the last block of Python in an answer passes; 0 without a block.

    A row's tests: a program that runs after the block and must not fail (assert statements),
    {"input", "output"} for the block's stdin and stdout (except white space at the ends of lines),
    or a list of these. Without tests the score is the share of all blocks, Python and bash, that
    end without an error; None without a block.

    Raises ConfigError: the sandbox lacks a protection of `require`.
    """
    sandbox = Sandbox(timeout_s=timeout_s, memory_mb=memory_mb, require=require)

    async def part(**arguments: Any) -> Scores:
        texts = texts_of(arguments["completions"])
        rows = arguments.get(column) or [None] * len(texts)
        jobs = (
            _share_passed(sandbox, text, tests, column)
            for text, tests in zip(texts, rows, strict=True)
        )
        return to_binary(await asyncio.gather(*jobs), threshold)

    return with_column(part, column, optional=True)


async def _share_passed(sandbox: Sandbox, text: str, tests: Any, column: str) -> float | None:
    blocks = [(LANGUAGES[name], block) for name, block in fenced(text) if name in LANGUAGES]
    if tests is None:
        runs = await asyncio.gather(
            *(sandbox.arun(block, language=language) for language, block in blocks)
        )
        return sum(run.ok for run in runs) / len(runs) if runs else None
    cases = [tests] if isinstance(tests, str | Mapping) else tests
    for case in cases if isinstance(cases, Sequence) and cases else [cases]:
        if not isinstance(case, str) and not (
            isinstance(case, Mapping) and {"input", "output"} <= set(case)
        ):
            raise RolloutRejectedError(
                f'column {column!r}: {case!r} is neither a test nor {{"input", "output"}}'
            )
    python = [block for language, block in blocks if language == "python"]
    if not python:
        return 0.0
    passed = await asyncio.gather(*(_passes(sandbox, python[-1], case) for case in cases))
    return sum(passed) / len(passed)


async def _passes(sandbox: Sandbox, block: str, case: str | Mapping[str, Any]) -> bool:
    if not isinstance(case, str):
        run = await sandbox.arun(block, stdin=str(case["input"]))
        return run.ok and _lines(run.stdout) == _lines(str(case["output"]))
    word = secrets.token_hex(16)  # shows that the end was reached: exit(0) passes nothing
    run = await sandbox.arun(HARNESS % (block, f"{case}\n"), stdin=f"{word}\n")
    return run.ok and run.stdout.endswith(f"\n{word}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def syntax(*, threshold: float | None = None) -> Callable[..., Any]:
    """The share of an answer's blocks of Python and JSON that can be parsed; None without one."""

    def part(completions: Completions) -> Scores:
        return to_binary([_share_valid(text) for text in texts_of(completions)], threshold)

    return part


def _share_valid(text: str) -> float | None:
    parsers: Mapping[str, Callable[[str], Any]] = {
        "json": json.loads,
        **{name: _compile for name, language in LANGUAGES.items() if name and language == "python"},
    }
    valid = [_parses(parsers[name], block) for name, block in fenced(text) if name in parsers]
    return sum(valid) / len(valid) if valid else None


def _compile(block: str) -> None:
    # ast.parse can crash on deep nesting
    compile(block, "<answer>", "exec", dont_inherit=True)


def _parses(parse: Callable[[str], Any], block: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in other people's code
            parse(block)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested too deep
        return False
    return True
