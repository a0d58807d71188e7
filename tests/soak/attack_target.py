"""Parts that the attacks of `tests.soak.attack` share: the table that they enter, and the
processes that they attack.

@attack("what is tried", got_through=True)        # True: before it was mended; False: never
def name(target: Target) -> str:            # returns what was measured, in a few words
    assert …                                # AssertionError: it got through
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.soak.training_daemon import TrainingDaemon

MB = 1 << 20
START_S = 120.0
PORT = "PORT"  # in a command: the port that was found
SERVE = ("mlx_parallm_serve", "--model-path", "builtin:tiny", "--port", PORT)
Run = Callable[["Target"], str]


@dataclass(frozen=True)
class Attack:
    name: str
    got_through: bool
    run: Run


ATTACKS: list[Attack] = []


def attack(name: str, *, got_through: bool) -> Callable[[Run], Run]:
    """Enter the function into the table."""

    def enter(run: Run) -> Run:
        ATTACKS.append(Attack(name, got_through, run))
        return run

    return enter


class Server:
    """`mlx_parallm_serve` with the shipped tiny model, in its own process."""

    def __init__(self, directory: Path, *settings: str, command: tuple[str, ...] = SERVE) -> None:
        self.output, self.roots = directory / "server.txt", directory / "adapters"
        self.roots.mkdir(exist_ok=True, parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        chosen = [f"server.adapter_roots=['{self.roots}']", *settings]
        sets = [part for setting in chosen for part in ("--set", setting)]
        words = [word.replace(PORT, str(self.port)) for word in command[1:]]
        program = [str(Path(sys.executable).parent / command[0]), *words]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*program, *sets], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        deadline = time.monotonic() + START_S
        while not self.answers():
            assert self.process.poll() is None, (
                f"the server ended: {self.output.read_text()[-2000:]}"
            )
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)

    def answers(self, timeout_s: float = 5.0) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=timeout_s).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        """Return the first number of /metrics whose name begins so."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = next(line for line in lines if line.startswith(f"mlx_parallm_{name}"))
        return float(found.split()[-1])

    def post(
        self, path: str, body: Any = None, *, timeout_s: float = 120.0, **options: Any
    ) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return httpx.post(f"{self.url}{path}", timeout=timeout_s, **options)

    def connect(self, sent: bytes = b"") -> socket.socket:
        """An open connection that has sent this much."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        if sent:
            connection.sendall(sent)
        return connection

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Target:
    """Starts what is attacked. The server and the training are shared by the attacks while they
    live; a `daemon` is one attack's own."""

    directory: Path
    _server: Server | None = field(default=None, init=False)
    _training: TrainingDaemon | None = field(default=None, init=False)

    def server(self) -> Server:
        if (
            self._server is None
            or self._server.process.poll() is not None
            or not self._server.answers()
        ):
            self.close()
            self._server = Server(self.directory)
        return self._server

    def training(self) -> TrainingDaemon:
        """A training daemon with the Atropos queue and /v1/rewards, ready."""
        if self._training is None or self._training.process.poll() is not None:
            directory = self.directory / f"training{time.monotonic_ns()}"
            directory.mkdir()
            self._training = TrainingDaemon(directory)
            self._training.wait_until_ready()
        return self._training

    @contextmanager
    def daemon(self, name: str, *settings: str) -> Iterator[TrainingDaemon]:
        """The same, fresh."""
        directory = self.directory / name
        directory.mkdir()
        daemon = TrainingDaemon(directory, *settings)
        try:
            daemon.wait_until_ready()
            yield daemon
        finally:
            if daemon.process.poll() is None:
                daemon.kill()

    @contextmanager
    def own_server(
        self, name: str, *settings: str, command: tuple[str, ...] = SERVE
    ) -> Iterator[Server]:
        """One attack's own server."""
        directory = self.directory / name
        directory.mkdir()
        server = Server(directory, *settings, command=command)
        try:
            yield server
        finally:
            server.end()

    def close(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None
        if self._training is not None and self._training.process.poll() is None:
            self._training.kill()


class Watch:
    """While an attack runs: the longest time that /health took, and the most memory that the
    process held."""

    def __init__(self, attacked: Server | TrainingDaemon) -> None:
        self._url, self._process, self._done = (
            attacked.url,
            psutil.Process(attacked.process.pid),
            threading.Event(),
        )
        self.silence_s, self.peak_mb = 0.0, self._held_mb()
        self.before_mb, self._before_s = self.peak_mb, self._used_s()
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._ask, self._weigh)
        ]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    @property
    def cpu_s(self) -> float:
        """The CPU seconds that the process has used. Wall time says little: the machine may be
        busy with something else."""
        return self._used_s() - self._before_s

    @property
    def grown_mb(self) -> int:
        return self.peak_mb - self.before_mb

    def __str__(self) -> str:
        return (
            f"CPU {self.cpu_s:.1f} s, /health at most {self.silence_s:.1f} s, +{self.grown_mb} MB"
        )

    def _ask(self) -> None:
        while not self._done.is_set():
            started = time.monotonic()
            with suppress(httpx.TransportError):
                httpx.get(f"{self._url}/health", timeout=120)
            self.silence_s = max(self.silence_s, time.monotonic() - started)
            self._done.wait(0.05)

    def _weigh(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it has ended
            while not self._done.wait(0.02):
                self.peak_mb = max(self.peak_mb, self._held_mb())

    def _used_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _held_mb(self) -> int:
        return int(self._process.memory_info().rss // MB)


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
