"""Code in answers against tests, in the real sandbox."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.sandbox.sandbox import PROTECTIONS, Sandbox
from mlx_parallm.rewards.code import HARNESS, fenced
from mlx_parallm.rewards.parts import PARTS


def answer(block, language="python"):
    return f"Here it is:\n```{language}\n{block}\n```\nDone."


def made(**options):
    try:
        return PARTS["code"](**options)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def code():
    return made(timeout_s=5.0)


RIGHT = answer("def double(n):\n    return 2 * n")
TESTS = [
    "assert double(2) == 4",
    "assert double(0) == 0",
    "assert double(3) == 7",
    "assert double(-1) == -2",
]


def test_blocks_are_found():
    text = (
        "```python\na\n```\ntext ```no``` block\n   ```JSON x=1\n{}\n "
        " ```\n```\nb\n```\n```python\nopen"
    )
    assert fenced(text) == [("python", "a\n"), ("json", "{}\n"), ("", "b\n")]


OLD_FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)


@given(
    st.lists(
        st.sampled_from(
            ["```", " ```\t", "```py", "``` Py x```", "a", "", " ", "\r", "``", "```\r"]
        ),
        max_size=9,
    )
)
def test_blocks_are_those_of_the_expression_that_says_what_one_is(lines):
    text = "\n".join(lines)
    assert fenced(text) == [(name.lower(), block) for name, block in OLD_FENCE.findall(text)]


def test_the_work_of_finding_blocks_grows_with_the_text():
    """The expression took 4 s for 30 kB, in which no other thread ran: every opening was
    followed to the end."""
    looked_at = 0

    class Line(str):
        def split(self, separator):
            nonlocal looked_at
            lines = super().split(separator)
            looked_at += len(lines)
            return lines

    assert fenced(Line("```python\n" * 300_000)) == []
    assert looked_at == 300_001


async def test_the_last_line_of_an_answer_does_not_change_the_tests(code):
    """A decorator took the tests' first function away; a string swallowed what followed."""
    tests = "def check(double):\n    assert double(2) == 4\ncheck(double)"
    endings = ["@(lambda f: lambda *a: None)", "x = (", "if False:", "x = 1 + \\", '"""']
    texts = [answer(f"def double(n):\n    return n\n{ending}") for ending in endings]
    assert await code(completions=texts, tests=[[tests]] * len(texts)) == [0] * len(texts)
    assert await code(completions=[RIGHT], tests=[[tests]]) == [1]


async def test_a_failed_test_is_shown_with_its_line():
    run = Sandbox(timeout_s=20).run(HARNESS % ("x = 1\n", "\nassert x == 2\n"), stdin=f"{WORD}\n")
    assert (
        run.returncode == 1 and 'answer.py", line 4' in run.stderr and "assert x == 2" in run.stderr
    )


async def test_the_share_of_tests_that_pass(code):
    texts = [RIGHT, answer("double = abs"), answer("def double(:"), "def double(n): return 2 * n"]
    assert await code(completions=texts, tests=[TESTS] * 4) == [0.75, 0.25, 0, 0]


async def test_one_program_of_tests(code):
    checks = ["\n".join(TESTS[:2]), "\n".join(TESTS)]
    assert await code(completions=[RIGHT, RIGHT], tests=checks) == [1, 0]


async def test_the_last_block_counts(code):
    text = answer("def double(n):\n    return n") + RIGHT
    assert await code(completions=[text], tests=[TESTS[:1]]) == [1]


async def test_to_leave_early_passes_nothing(code):
    early = [
        answer(f"import os, sys\n{way}")
        for way in ("sys.exit(0)", "os._exit(0)", "print = exit = None")
    ]
    assert await code(completions=early, tests=[["assert False"]] * 3) == [0, 0, 0]


WORD = "0123456789abcdef" * 2
HOSTILE = """
import gc, glob, os, re, sys, threading
seen = []

def see(read, *given):
    try:
        seen.append(read(*given))
    except Exception as error:
        seen.append(repr(error))

for path in {*glob.glob("*"), *glob.glob("/proc/*/fd/*"), *glob.glob("/proc/*/cmdline")}:
    see(lambda: open(path, "rb").read(1 << 20))
see(os.lseek, 0, 0, 0)
see(os.read, 0, 1 << 20)
see(sys.stdin.read)
for name in ("_word", "input"):
    see(lambda: eval(name)())
frame = sys._getframe()
while frame is not None:
    seen += [frame, frame.f_locals, frame.f_globals, frame.f_code]
    frame = frame.f_back
waiting, known, words = [seen, gc.get_objects(), sys._current_frames(), sys.argv], set(), set()
while waiting:
    for thing in gc.get_referents(*waiting.pop() if isinstance(waiting[-1], list) else [waiting.pop()]):
        if isinstance(thing, (str, bytes)):
            text = thing if isinstance(thing, str) else thing.decode("latin-1")
            words.update(re.findall(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", text))
        elif id(thing) not in known:
            known.add(id(thing))
            waiting.append([thing])
sys.stdout.write("".join(f"\\n{word}\\n" for word in words))
sys.stdout.flush()
os._exit(0)
"""
LAST_LINE_AGAIN = """
import os
_run = lambda answer, tests: b""
exec(open("main.py").read().splitlines()[-1])
os._exit(0)
"""


@pytest.mark.parametrize("block", [HOSTILE, LAST_LINE_AGAIN], ids=["search", "last line again"])
async def test_code_does_not_find_the_word_that_the_end_says(code, block):
    assert await code(completions=[answer(block)], tests=[["assert False"]]) == [0]
    run = Sandbox(timeout_s=20).run(HARNESS % (block, ""), stdin=f"{WORD}\n")
    assert (run.outcome, run.returncode, run.stdout.strip()) == ("ended", 0, ""), run.stderr


async def test_code_would_find_a_word_that_is_kept(code):
    """The positive control of the search."""
    end = '__import__("os").write(1, b"\\n" + _word() + _run(%r, %r))'
    assert end in HARNESS
    kept = HARNESS.replace(
        end, '_kept = _word()\n__import__("os").write(1, b"\\n" + _kept + _run(%r, %r))'
    )
    run = Sandbox(timeout_s=20).run(kept % (HOSTILE, ""), stdin=f"{WORD}\n")
    assert (run.outcome, run.returncode) == ("ended", 0), run.stderr
    assert f"\n{WORD}\n" in run.stdout


async def test_what_a_test_may_expect_of_its_place(code):
    block = "from __future__ import annotations\nimport sys\ndef name(): return __name__"
    tests = [
        "assert name() == '__main__' and sys.modules['__main__'].name is name",
        "assert sys.stdin.read() == ''",
    ]
    assert await code(completions=[answer(block)], tests=[tests]) == [1]
    assert await code(completions=[answer("print('no end', end='')")], tests=[["assert True"]]) == [
        1
    ]


@pytest.mark.parametrize(
    "block",
    [
        "import sys\nsys.stdout = open(1, 'w', closefd=False)\nprint('mine')",
        "import io, sys\nsys.stdout = io.StringIO()\nprint('nowhere')\nsys.stdout.close()",
        "import sys\nsys.stdout = None",
        (
            "import inspect\ndef own(n):\n    return n\nassert"
            " inspect.getsource(own).endswith('return n\\n')"
        ),
    ],
    ids=["another stream", "closed", "none", "source"],
)
async def test_what_an_answer_may_do_and_reach_its_end(code, block):
    assert await code(completions=[answer(block)], tests=[["assert True"]]) == [1]


async def test_input_and_output(code):
    cases = [{"input": "3\n4\n", "output": "7"}, {"input": "1\n1\n", "output": "3"}]
    texts = [
        answer("print(int(input()) + int(input()), ' ')"),
        answer("print(7)\nraise SystemExit(1)"),
    ]
    assert await code(completions=texts, tests=[cases, cases]) == [0.5, 0]


async def test_without_tests_it_has_to_run(code):
    texts = [
        answer("print(1)") + answer("exit 1", "bash"),
        answer("true", "sh"),
        "no code",
        answer("{}", "json"),
    ]
    assert await code(completions=texts) == [0.5, 1, None, None]
    assert await code(completions=texts[:1], tests=[None]) == [0.5]


async def test_a_conversation_and_a_threshold():
    code = made(threshold=0.6, require=[])
    completions = [
        [{"role": "assistant", "content": text}] for text in (RIGHT, answer("double = abs"))
    ]
    assert await code(completions=completions, tests=[TESTS] * 2) == [1, 0]


@pytest.mark.parametrize("tests", [[], [3], [{"input": "x"}], 7])
async def test_tests_that_are_none(code, tests):
    with pytest.raises(RolloutRejectedError, match="column 'tests'"):
        await code(completions=[RIGHT], tests=[tests])


def test_a_protection_that_nobody_knows():
    with pytest.raises(ConfigError, match="there is no 'everything'"):
        PARTS["code"](require=[*PROTECTIONS, "everything"])
