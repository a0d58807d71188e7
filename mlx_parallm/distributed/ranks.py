"""Ranks over `mx.distributed`: the processes of one launch, perhaps on several machines, train one
run.

    gradients    MLX's collectives: ring, MPI, JACCL or NCCL, as `mlx.launch` or `mpirun` has set up
    the rest     a TCP connection of every rank to rank 0: batches, numbers, stop requests, and
                 which ranks are left

Rank 0 announces a training step (`JoinedRanks.announce_step`), the other ranks follow it
(`follower.py`): the same `train_step` on the same batch and state. When rank 0 publishes, every
rank publishes its own weights. The state of a follower is never assumed: at the start of every
step, and for a publish, the ranks compare fingerprints of the arrays, or of a part of each. Where
they differ (a resume, a rollback, other hardware), rank 0's arrays are copied.

A collective in which a rank is missing may never end, and nothing can interrupt it: MLX 0.32.4's
ring raises when a neighbour's process has died, but not when its machine has vanished. So
collectives run in their own thread, and the thread that waits for one watches the connections,
and the clock (`rl_training.rank_timeout_s`): a ring has stalled although all ranks were there.
These are authenticated with a key that rank 0 hands out by the first collective. A process that is
stopped keeps its connections; its heartbeat shows it (heartbeat.py), and then the others end them.
"""

import atexit
import concurrent.futures
import contextlib
import faulthandler
import json
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import psutil

from mlx_parallm import __version__
from mlx_parallm.config.data import DATA_ALGORITHMS
from mlx_parallm.config.load import Config
from mlx_parallm.distributed.balance import BalancedClient
from mlx_parallm.distributed.fingerprint import model_fingerprint
from mlx_parallm.distributed.heartbeat import LOOK_S, SILENT_LOOKS, RankHeartbeat
from mlx_parallm.distributed.players import RankPlayer, hang_up
from mlx_parallm.engine.client import EngineClient
from mlx_parallm.environments.runner import MakePlayer, OnError, OnResults
from mlx_parallm.errors import EXIT_AGAIN, ConfigError, RankLostError, RanksStandStillError
from mlx_parallm.models.loading import resolve_model_path
from mlx_parallm.models.threads import MLXThread
from mlx_parallm.rl_training.step.ranks import ALONE, HasArrays, Ranks, RankTask
from mlx_parallm.system.hardware import launched_rank, launched_with_jaccl, prefix_cache_bytes
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.signals import SHUTDOWN_SIGNALS

# 64 MiB of float32: numbers of one collective, unless one array alone is larger
BUNDLE_ELEMENTS = 1 << 24
OFFER_BYTES = 4096
PURPOSES = 4  # connections of each rank to rank 0
CONNECT_S = 5.0  # to one address of rank 0, and for the handshake
ACCEPT_S = 0.05  # between two looks whether all ranks are there
JOIN_S = 120.0  # for all ranks to be connected
WATCH_S = 0.2  # between two looks at the connections while a collective runs
TIMEOUT_S = 600.0  # limit of a sum, until rl_training.rank_timeout_s is read
GRACE_S = 5.0  # for a collective to end after a rank has gone: the data may have come before that
# a dead machine: 25 s
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
EXIT_LOST = 2
STOP_REQUEST = "stop"  # from a rank to rank 0, between two steps
DIGEST_PIECE = 1 << 22
PARTS, SMALLEST_CUT = 8, 1 << 12  # arrays of so many elements are compared by an eighth at a time
# comparisons that read everything: of the weights at the first publish, of all arrays before the
# first step
WHOLE = 2
VERSIONS = f"mlx-parallm {__version__} and mlx {version('mlx')}"
PLACES = 1640531527  # 2³² times the golden ratio squared: Knuth's multiplicative hashing

T = TypeVar("T")
log = get_logger("ranks")


@dataclass(frozen=True)
class BeginRun:
    """The run that every rank begins. `config`: rank 0's; `fingerprint`: of its model."""

    config: Config
    fingerprint: str


@dataclass(frozen=True)
class Publish:
    """Serve the weights that rank 0 trains as this version."""

    version: int


def samples(algorithm: str) -> bool:
    """Whether every rank samples, with its own engine."""
    return algorithm not in DATA_ALGORITHMS


def join() -> Ranks:
    """The ranks of this launch; `ALONE` if nothing was launched. Waits for all of them.

    Raises ConfigError: MLX finds no backend, or the ranks have other versions (on rank 0; the
    others exit with EXIT_LOST). RankLostError: the ranks do not find each other.
    """
    rank = launched_rank()
    if rank is None:
        return ALONE
    collectives = MLXThread("collectives")
    if launched_with_jaccl():
        log.warning(
            "JACCL is experimental: it has crashed at its start and in sums"
            " (docs/operations.md#a-mac)"
        )
    try:
        with _nothing_else_runs():
            log.info("waiting for the other ranks", rank=rank, gives_up_after_s=JOIN_S)
            group = collectives.submit(mx.distributed.init).result()
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"rank {rank} cannot join the others: {error}") from error
    if group.size() == 1:
        if rank:
            raise ConfigError(
                f"launched as rank {rank}, but MLX finds no backend (mlx.launch --backend …)"
            )
        return ALONE
    return JoinedRanks(group, collectives)


@contextlib.contextmanager
def _nothing_else_runs() -> Iterator[None]:
    """Let signals, and a limit of JOIN_S, end the process while MLX connects. MLX holds Python's
    lock until all ranks are there, so no signal handler would run, and no other thread could end
    the wait for a rank that never comes. Main thread only."""
    handlers = {
        number: signal.signal(number, signal.SIG_DFL)
        for number in SHUTDOWN_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN  # under nohup
    }
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUTDOWN_SIGNALS)
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(JOIN_S, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number, handler in handlers.items():
                signal.signal(number, handler)


class JoinedRanks(Ranks):
    """The ranks of a launch. Used by one thread. Raises RankLostError: the ranks cannot be
    connected."""

    def __init__(self, group: Any, collectives: MLXThread) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._collectives = group, collectives
        self._players: list[RankPlayer] = []
        self._clients: EngineClient | None = None
        self._samples = self._keeps_prompts = False
        self._comparisons = 0
        self._then = "then start all ranks again with --resume auto"
        # Rank 0: to ranks 1, 2, …; others: to rank 0. For steps, for groups (players.py), for
        # requests (requests.py).
        self._connections, self.rollouts, self.requests, heartbeats = self._connect()
        self._watched = [_watched(connection) for connection in self._connections]
        self._silent: list[int] = []
        self._sum_s, self._stands_still = TIMEOUT_S, False
        self._heartbeats = [
            RankHeartbeat(connection, partial(self._give_up, place))
            for place, connection in enumerate(heartbeats)
        ]
        log.info("ranks joined", rank=self.rank, size=self.size)

    # ------------------------------------------------------------------ a run

    def begin(self, config: Config) -> None:
        path = resolve_model_path(
            config.model.base_path, config.model.revision, dtype=config.model.dtype
        )
        # The other ranks have no HTTP server, so they need no key.
        server = config.server.model_copy(update={"api_key": None, "api_key_file": None})
        run = BeginRun(config.model_copy(update={"server": server}), model_fingerprint(path))
        self.follow_settings(run)
        self.tell(run)
        errors = self.exchange("")
        self.check()
        for rank, error in enumerate(errors or ()):
            if error:
                raise ConfigError(f"rank {rank}: {error}")

    def follow_settings(self, run: BeginRun) -> None:
        """Take what rank 0's configuration says about the ranks."""
        config, training = run.config, run.config.rl_training
        self._samples = samples(training.algorithm)
        deterministic, self._sum_s = training.deterministic, training.rank_timeout_s
        self._keeps_prompts = (
            prefix_cache_bytes(config.server.prefix_cache_bytes, deterministic=deterministic) > 0
        )
        if training.on_rank_lost == "continue":
            self._then = "if it was killed, the others are started again (rl_training.on_rank_lost)"

    def publish(self, version: int, trainer: HasArrays) -> None:
        if self.rank == 0 and self._samples:
            self.tell(Publish(version))
            agree(self, trainer, compared="weights.", part=self.next_part())
            self.exchange("")  # they have published

    def players(self) -> list[MakePlayer]:
        return [self._player_of(rank) for rank in range(1, self.size)] if self._samples else []

    def _player_of(self, rank: int) -> MakePlayer:
        def make(on_results: OnResults, on_error: OnError) -> RankPlayer:
            player = RankPlayer(self.rollouts[rank - 1], rank, on_results, on_error)
            self._players.append(player)
            return player

        return make

    def clients_engine(self, engine: EngineClient) -> EngineClient:
        if self.rank or not self._samples:
            return engine
        if self._clients is None:
            self._clients = BalancedClient(engine, self.requests, keeps_prompts=self._keeps_prompts)
        return self._clients

    def served_tokens(self) -> int:
        if self._clients is None:
            return 0
        return sum(
            stats.generation_tokens for rank, stats in self._clients.rank_stats().items() if rank
        )

    # ------------------------------------------------------------------ a step

    def next_part(self) -> int | None:
        """Return which part of the arrays the next comparison reads; the same on every rank, since
        all take part in each comparison."""
        self._comparisons += 1
        return None if self._comparisons <= WHOLE else self._comparisons % PARTS

    def announce_step(self, task: RankTask, trainer: HasArrays) -> None:
        if self.rank == 0:
            self.tell(task)
            agree(self, trainer, part=self.next_part())

    def exchange(self, value: T, *, stop: bool = False) -> list[T] | None:
        return self._exchange(value, stop=stop)

    def _exchange(
        self, value: T, *, stop: bool = False, until: float | None = None
    ) -> list[T] | None:
        """`until`: time.monotonic() at which to give up; None: the others may compute for long."""
        if self.lost:
            return None
        try:
            if self.rank:
                self._connections[0].send((stop, value))
                _wait_for(self._connections[0], until)
                everyone = self._connections[0].recv()
            else:
                everyone = [
                    (stop, value),
                    *(_value(connection, until) for connection in self._connections),
                ]
                self._send_all(everyone)
        except TimeoutError:
            self._give_up_sum("not all ranks have come to a sum")
            return None
        except (EOFError, OSError) as error:
            self._lose(error)
            return None
        if everyone is None:
            self._lose("rank 0 has ended the run")
            return None
        stopping = [rank for rank, (stops, _) in enumerate(everyone) if stops]
        if stopping and self.rank == 0 and not stop:
            log.info("stopping: another rank was asked to", ranks=stopping)
        return None if stopping else [value for _, value in everyone]

    def sum(self, arrays: list[mx.array]) -> list[mx.array] | None:
        if self.lost:
            return None
        mx.eval(arrays)
        # While MLX's ring waits for the other ranks it takes a core from them, so it begins when
        # all are ready.
        until = time.monotonic() + self._sum_s
        if self._exchange(None, until=until) is None:
            return None
        running, gone_at = self._collectives.submit(lambda: _sums(arrays, self._group)), None
        while True:
            try:
                return running.result(timeout=WATCH_S)
            except concurrent.futures.TimeoutError:
                if gone_at is None and self._gone():
                    gone_at = time.monotonic()
                if gone_at is None and time.monotonic() > until:
                    self._give_up_sum("a sum over the ranks has stalled, although all are there")
                    return None
                if gone_at is not None and time.monotonic() - gone_at > GRACE_S:
                    # the end of a backend may wait for its collectives, as MPI_Finalize does
                    atexit.register(_leave, EXIT_LOST)
                    self._lose("the others wait for it in a collective")
                    return None
            except RuntimeError as error:  # raised by a backend that notices the lost rank
                self._lose(error)
                return None

    def tell(self, message: Any) -> None:
        """Send a message from rank 0 to all others."""
        if self.lost:
            return
        try:
            self._send_all(message)
        except OSError as error:
            self._lose(error)

    def next_task(
        self, stop: threading.Event | None = None, check: Callable[[], None] = lambda: None
    ) -> Any:
        """Return rank 0's next message, on another rank; None when rank 0 has ended the run.

        Once `stop` is set, this rank requests the end from rank 0. `check` is called every WATCH_S;
        its exceptions pass. Raises RankLostError: rank 0 is gone.
        """
        [connection], requested = self._connections, False
        try:
            while not connection.poll(WATCH_S):
                check()
                if stop is not None and stop.is_set() and not requested:
                    connection.send(STOP_REQUEST)
                    requested = True
            return connection.recv()
        except (EOFError, OSError) as error:
            self._lose(error)
            raise RankLostError(self.lost) from error

    def check(self, stop: threading.Event | None = None) -> None:
        if not self.lost and self._gone():
            self._lose("its connection is closed")
        if self.lost:
            raise (RanksStandStillError if self._stands_still else RankLostError)(self.lost)
        if stop is not None and not stop.is_set() and self._stop_requested():
            log.info("stopping: another rank was asked to")
            stop.set()

    def close(self) -> None:
        if self.rank == 0:
            self.tell(None)
            self._drain()
        for watched, connection in zip(self._watched, self._connections, strict=True):
            watched.close()
            connection.close()
        for heartbeat in self._heartbeats:
            heartbeat.close()
        for connection in (*self.rollouts, *self.requests):
            hang_up(connection)
        self._collectives.close(GRACE_S)

    # ------------------------------------------------------------------ which ranks are left

    def _give_up(self, place: int) -> None:
        """Ends the connections to a rank that is silent: a rank that waits for it continues. On
        another thread."""
        self._silent.append(place + 1 if self.rank == 0 else 0)
        for connections in (self._connections, self.rollouts, self.requests):
            hang_up(connections[place])

    def _gone(self) -> list[int]:
        """Ranks whose connection is closed."""
        others = range(1, self.size) if self.rank == 0 else (0,)
        return [
            other
            for other, watched in zip(others, self._watched, strict=True)
            if _is_closed(watched)
        ]

    def _give_up_sum(self, what: str) -> None:
        """End this rank's part in the run: a sum takes longer than it may."""
        self._stands_still = True
        atexit.register(_leave, EXIT_AGAIN)  # the backend's threads may wait for ever
        self.lost = (
            f"{what}: not done within {self._sum_s:g} s (rl_training.rank_timeout_s): {self._then}"
        )
        log.error("the ranks have stalled", rank=self.rank, why=what)

    def _lose(self, why: object) -> None:
        gone = self._gone()
        who = " and ".join(f"rank {other}" for other in gone) or "a rank"
        reason = str(why) or "its connection is closed"
        if self._silent:
            reason = (
                f"it has been silent for {SILENT_LOOKS * LOOK_S:.0f} s, as a stopped process is"
            )
        self.lost = f"{who} of {self.size} is gone ({reason}): read its last messages, {self._then}"
        log.error("a rank is lost", rank=self.rank, gone=gone, why=reason)

    def _stop_requested(self) -> bool:
        try:
            return any(
                connection.poll() and connection.recv() == STOP_REQUEST
                for connection in self._connections
            )
        except (EOFError, OSError):  # the next `check` says so
            return False

    def _drain(self) -> None:
        """Read until the others have closed: a connection that is closed over unread data is
        reset, and the last message would be lost."""
        for connection in [] if self.lost else self._connections:
            with contextlib.suppress(EOFError, OSError):
                while connection.poll(GRACE_S):
                    connection.recv()

    def _send_all(self, message: Any) -> None:
        for connection in self._connections:
            connection.send(message)

    # ------------------------------------------------------------------ connecting

    def _connect(self) -> list[list[Connection]]:
        here = {"machine": f"{socket.gethostname()} {uuid.getnode()}", "versions": VERSIONS}
        everyone = [json.loads(text) for text in self._all_texts(json.dumps(here))]
        for rank, other in enumerate(everyone):
            if other["versions"] != everyone[0]["versions"]:
                if self.rank:
                    sys.exit(EXIT_LOST)  # rank 0 says why
                raise ConfigError(
                    f"rank {rank} has {other['versions']}, rank 0 {everyone[0]['versions']}:"
                    " install the same on all"
                )
        self.here = sum(other["machine"] == here["machine"] for other in everyone)
        one_machine = self.here == self.size
        if self.rank:
            offer = json.loads(self._all_texts("")[0])
            connecting = self._collectives.submit(lambda: [_reach(offer, self.rank)])
        else:
            key = secrets.token_bytes(32)
            listener = socket.create_server(("127.0.0.1" if one_machine else "0.0.0.0", 0))
            addresses = ["127.0.0.1"] if one_machine else _own_addresses()
            self._all_texts(
                json.dumps(
                    {"addresses": addresses, "port": listener.getsockname()[1], "key": key.hex()}
                )
            )
            connecting = self._collectives.submit(lambda: _accept(listener, key, self.size - 1))
        try:
            return [
                list(purpose) for purpose in zip(*connecting.result(timeout=JOIN_S), strict=True)
            ]
        except concurrent.futures.TimeoutError:
            atexit.register(_leave, EXIT_LOST)
            raise RankLostError(
                f"not all of {self.size} ranks have reached rank 0 within {JOIN_S:.0f} s"
            ) from None

    def _all_texts(self, text: str) -> list[str]:
        """Every rank's text, by a collective."""
        table = np.zeros((self.size, OFFER_BYTES), np.int32)
        table[self.rank] = np.frombuffer(text.encode().ljust(OFFER_BYTES, b"\0"), np.uint8)
        [summed] = self._collectives.submit(lambda: _sums([mx.array(table)], self._group)).result()
        return [bytes(row.astype(np.uint8)).rstrip(b"\0").decode() for row in np.array(summed)]


def agree(ranks: Ranks, trainer: HasArrays, *, compared: str = "", part: int | None = None) -> None:
    """Give every rank the weights, optimizer state and reference of rank 0, if one of the arrays
    whose names begin with `compared` differs. Raises RankLostError: another model.

    Args:
        part: of each array that is compared, see `_digest`. Ranks that have drifted apart, or one
            of which has gone back to other weights, differ in every part. All ranks name the same
            one.
    """
    arrays = trainer.arrays()
    shapes = [(name, tuple(array.shape), str(array.dtype)) for name, array in arrays.items()]
    digest = _digest([a for name, a in arrays.items() if name.startswith(compared)], part)
    everyone = ranks.exchange((shapes, digest))
    if everyone is None or all(other == everyone[0] for other in everyone):
        return
    if any(shapes != everyone[0][0] for shapes, _ in everyone):
        raise RankLostError(
            "the ranks train different models: model.base_path must name the same one everywhere"
        )
    log.info(
        "training state taken from rank 0"
        if ranks.rank
        else "training state given to the other ranks"
    )
    sent = [
        _bits(array) if ranks.rank == 0 else mx.zeros_like(_bits(array))
        for array in arrays.values()
    ]
    mx.eval(sent)
    summed = ranks.sum(sent)
    if summed is None or ranks.rank == 0:
        return
    copied = [
        mx.view(bits, a.dtype).reshape(a.shape)
        for bits, a in zip(summed, arrays.values(), strict=True)
    ]
    mx.eval(copied)
    trainer.restore_arrays(dict(zip(arrays, copied, strict=True)))


def _digest(arrays: Sequence[mx.array], part: int | None) -> int:
    """Sum modulo 2⁶⁴ of each element times an odd number that its place gives: one bit more or
    less, or two elements in each other's places, make another sum. NumPy's, which reads small
    arrays sooner than MLX starts an operation.

    Args:
        part: of PARTS that each array is cut into: only this one is read. None: all of them.
    """
    total, place, waiting = 0, 0, list[mx.array]()
    for piece in (*_pieces(arrays, part), None):
        waiting += [piece] if piece is not None else []
        if piece is None or sum(each.size for each in waiting) >= DIGEST_PIECE:
            mx.eval(waiting)
            for each in waiting:
                places = (
                    np.arange(each.size, dtype=np.uint32) + np.uint32(place % (1 << 32))
                ) * np.uint32(PLACES) | 1
                total += int((np.array(each, copy=False) * places).sum(dtype=np.uint64))
                place += each.size
            waiting.clear()
    return total % (1 << 64)


def _pieces(arrays: Sequence[mx.array], part: int | None) -> Iterator[mx.array]:
    """The words of the arrays, or of a part of each, at most DIGEST_PIECE at a time. Small
    arrays are not cut."""
    for array in arrays:
        words = _bits(array)
        words = mx.view(words, mx.uint32) if words.dtype == mx.uint64 else words
        begin, end = 0, words.size
        if part is not None and end >= SMALLEST_CUT:
            begin, end = part * end // PARTS, (part + 1) * end // PARTS
        for start in range(begin, end, DIGEST_PIECE):
            yield words[start : min(start + DIGEST_PIECE, end)]


def _bits(array: mx.array) -> mx.array:
    """Reinterpret as unsigned integers, flat, so that adding zeros is exact."""
    return mx.view(
        array.reshape(-1), {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    )


def _sums(arrays: Sequence[mx.array], group: Any) -> list[mx.array]:
    """Sums over all ranks, in few large collectives: all ranks add in the same order."""
    done: list[mx.array] = []
    while len(done) < len(arrays):
        bundle = [arrays[len(done)]]
        for array in arrays[len(done) + 1 :]:
            if (
                sum(a.size for a in bundle) + array.size > BUNDLE_ELEMENTS
                or array.dtype != bundle[0].dtype
            ):
                break
            bundle.append(array)
        flat = mx.concatenate([array.reshape(-1) for array in bundle])
        mx.eval(flat)
        total = mx.distributed.all_sum(flat, group=group)
        ends = np.cumsum([array.size for array in bundle])[:-1].tolist()
        parts = [
            part.reshape(a.shape) for part, a in zip(mx.split(total, ends), bundle, strict=True)
        ]
        mx.eval(parts)
        done += parts
    return done


def _accept(listener: socket.socket, key: bytes, count: int) -> list[list[Connection]]:
    """The connections of each rank, one for each purpose. A stranger that says nothing keeps
    nobody waiting."""
    connections: dict[tuple[int, int], Connection] = {}

    def greet(end: socket.socket) -> None:
        connection = Connection(end.detach())
        _limit_reading(connection, CONNECT_S)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            place = connection.recv()
        # a rank that tries an address, or a stranger
        except (AuthenticationError, EOFError, OSError) as error:
            log.debug("a connection that is not a rank's", error=repr(error))
            connection.close()
        else:
            _limit_reading(connection, 0.0)
            connections[place] = connection

    with listener:
        listener.settimeout(ACCEPT_S)
        while len(connections) < PURPOSES * count:
            with contextlib.suppress(OSError):  # no client has connected
                end, _ = listener.accept()
                threading.Thread(target=greet, args=(end,), name="handshake", daemon=True).start()
    return [
        [connections[rank, purpose] for purpose in range(PURPOSES)] for rank in range(1, count + 1)
    ]


def _limit_reading(connection: Connection, seconds: float) -> None:
    """0: reading may take as long as it takes."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def _reach(offer: dict[str, Any], rank: int) -> list[Connection]:
    for address in offer["addresses"]:
        place = (address, offer["port"])
        try:
            socket.create_connection(place, timeout=CONNECT_S).close()
            connections = []
            for purpose in range(PURPOSES):
                connections.append(Client(place, authkey=bytes.fromhex(offer["key"])))
                connections[-1].send((rank, purpose))
        except (AuthenticationError, EOFError, OSError) as error:
            log.debug("rank 0 is not there", address=address, error=repr(error))
        else:
            return connections
    tried = ", ".join(offer["addresses"])
    raise RankLostError(
        f"rank {rank} cannot reach rank 0 at port {offer['port']} of"
        f" {tried}: is a firewall between?"
    )


def _own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, the loopback last."""
    addresses = {
        a.address
        for entries in psutil.net_if_addrs().values()
        for a in entries
        if a.family == socket.AF_INET
    }
    return sorted(addresses, key=lambda address: (address.startswith("127."), address))


def _watched(connection: Connection) -> socket.socket:
    """The connection's socket, to be looked at without reading. The kernel notices when a
    machine has vanished."""
    watched = socket.socket(fileno=os.dup(connection.fileno()))
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return watched


def _value(connection: Connection, until: float | None) -> Any:
    """The value that a rank exchanges. A stop request before it is repeated in it. Raises
    TimeoutError."""
    _wait_for(connection, until)
    while (message := connection.recv()) == STOP_REQUEST:
        _wait_for(connection, until)
    return message


def _wait_for(connection: Connection, until: float | None) -> None:
    """Raises TimeoutError: there is no message until then."""
    if until is not None and not connection.poll(max(0.0, until - time.monotonic())):
        raise TimeoutError


def _is_closed(watched: socket.socket) -> bool:
    try:
        return watched.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
