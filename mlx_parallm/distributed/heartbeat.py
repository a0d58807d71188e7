"""Detect a rank that no longer runs although its process exists (SIGSTOP, a debugger, a hung
machine).

The kernel of such a machine keeps its connections open and answers for it, so only messages of the
process itself show that it runs. The sending thread needs neither the engine nor the main thread: a
rank that computes for long is not silent.

After a loss, `JoinedRanks` (ranks.py) ends the training, `RankEngine` (requests.py) gives the
requests to others, and the parent (cli/rank_launcher.py) stops the others or starts them again.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from mlx_parallm.distributed.players import hang_up, received

LOOK_S = 1.0
# looks, not seconds of a clock: while this process is stopped itself, it counts one at most
SILENT_LOOKS = 60


class HeartbeatReader:
    """Reads a connection on which a message comes more often than every LOOK_S. `silent`: how many
    LOOK_S have passed without one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.silent = 0

    @property
    def gives_up(self) -> bool:
        return self.silent >= SILENT_LOOKS

    def next(self) -> Any:
        """Return the next message; None: the other end is gone, or `gives_up`."""
        try:
            while not self._connection.poll(LOOK_S):
                self.silent += 1
                if self.gives_up:
                    return None
        except (EOFError, OSError):
            return None
        self.silent = 0
        return received(self._connection)


class RankHeartbeat:
    """Tells the other end every LOOK_S that this process runs, and calls `on_silent` when the other
    process no longer runs."""

    def __init__(self, connection: Connection, on_silent: Callable[[], None]) -> None:
        self._connection, self._on_silent = connection, on_silent
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._listen, name="heartbeat of a rank", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        hang_up(self._connection)

    def _beat(self) -> None:
        with suppress(OSError):  # the connection is closed: `_listen` ends too
            while not self._ended.wait(LOOK_S):
                self._connection.send(True)

    def _listen(self) -> None:
        reader = HeartbeatReader(self._connection)
        with self._connection:
            while reader.next() is not None:
                pass
        if reader.gives_up and not self._ended.is_set():
            self._on_silent()
