"""Commands in forks of one process in which the package is loaded: a start costs a third.

A fork ends as a command does. That a command starts by itself, other tests show: each of
tests/integration.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.signals_reset import default_signals

ROOT = Path(__file__).parents[1]
LOADED = (
    *("mlx_parallm.daemon", "mlx_parallm.cli", "mlx_parallm.rl_training.run.start"),
    *("mlx_parallm.engine.starting", "mlx_parallm.server.thread"),
)
Run = Callable[[Sequence[str], Path], tuple[int, str]]


@contextmanager
def preloaded() -> Iterator[Run]:
    """Yields a function of the words after `mlx_parallm` and a directory, which returns the exit
    code and what was printed."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.preloaded"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, replies = process.stdin, process.stdout

        def run(words: Sequence[str], directory: Path) -> tuple[int, str]:
            print(json.dumps([*words]), directory, file=requests, sep="\n", flush=True)
            code = int(replies.readline())
            return code, (directory / "output").read_text()

        yield run
        requests.close()


def main() -> None:
    """Fork for each request; the fork goes on as the command."""
    for name in LOADED:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        directory = sys.stdin.readline().strip()
        if (pid := os.fork()) == 0:
            break
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    else:
        return
    os.chdir(directory)
    output = os.open("output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    sys.argv = ["mlx_parallm", *json.loads(line)]
    sys.exit(importlib.import_module("mlx_parallm.cli").main())


if __name__ == "__main__":
    main()
