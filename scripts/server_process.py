"""A server in its own process, for benchmarks and clients: its address while a block runs."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

READY_S = 120


def command(name: str) -> str:
    """The path of a console script of this environment."""
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server_process(
    words: Callable[[int], Sequence[str | Path]],
    log: Path | None = None,
    *,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start `words` of a free port and wait until it is ready; SIGTERM at the end. `log`: where its
    output goes.

    Raises SystemExit: it ended, or was not ready in `READY_S`.
    """
    port = free_port()
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(
            [*map(str, words(port))], stdout=output, stderr=output, cwd=directory, env=environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        if not _becomes_ready(process, url):
            raise SystemExit(
                f"the server did not start:\n{log.read_text() if log else words(port)}"
            )
        yield url, process
    finally:
        process.terminate()
        process.wait()


def _becomes_ready(process: "subprocess.Popen[bytes]", url: str) -> bool:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return True
        # another process, which may be of another program: nothing says when it is ready
        time.sleep(0.1)
    return False
