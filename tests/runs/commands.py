"""A command called in the test's own process: a start of Python with MLX costs seconds.
tests/cli starts each one."""

import contextlib
import io
from collections.abc import Callable
from subprocess import CompletedProcess


def call(command: Callable[..., int], *arguments: object) -> CompletedProcess[str]:
    """The exit code and what was printed, as `subprocess.run` returns them."""
    words = [*map(str, arguments)]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = command(words)
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())
