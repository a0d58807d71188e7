"""An engine's side of the prefixes on disk. Without a disk it does nothing. Engine thread only."""

from collections.abc import Iterator

from mlx_parallm.engine.prefix_disk.arrivals import PrefixArrivals
from mlx_parallm.engine.prefix_disk.disk import Clearing, PrefixDisk
from mlx_parallm.engine.prefix_disk.files import BLOCK
from mlx_parallm.engine.scheduling.prefills import PrefixSave
from mlx_parallm.engine.scheduling.room import CacheRoom
from mlx_parallm.engine.scheduling.scheduler import SchedulerOutput
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.weights import SharedWeights

WAIT_S = 0.005  # for a reading, where the engine has nothing else to do


class DiskPrefixes:
    """
    Args:
        disk: shared by the engines of a process; None: prefixes are in memory only.
        room: of this engine's cache.
    """

    def __init__(self, disk: PrefixDisk | None, room: CacheRoom, weights: SharedWeights) -> None:
        self.arrivals = None
        if disk is not None:
            self.arrivals = PrefixArrivals(disk, room.prefix_cache, weights)
            room.block = BLOCK
        self._saves: list[PrefixSave] = []  # of the step under way
        self._tokens, self._seconds = 0, 0.0  # of the steps that have computed prompts

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the unfinished choices that wait for a reading."""
        for arrival in self.arrivals.waiting if self.arrivals is not None else ():
            yield from (choice for choice in arrival.choices if not choice.finished)

    def __bool__(self) -> bool:
        """Whether a request waits for a reading."""
        return bool(self.arrivals)

    def begin(self, choices: list[Sequence]) -> bool:
        """Return whether the choices of a request wait for a reading now."""
        return self.arrivals is not None and self.arrivals.begin(choices)

    def arrived(self, *, idle: bool) -> list[Sequence]:
        """Return the choices that wait no longer. `idle`: there is nothing else to do."""
        if not self.arrivals:
            return []
        if idle:
            self.arrivals.wait(WAIT_S)
        return self.arrivals.arrived()

    def note(self, plan: SchedulerOutput) -> None:
        """Note what a step puts into the cache."""
        if self.arrivals is not None:
            self._saves = [*plan.saves, *(each.save for each in plan.prefill if each.save)]

    def keep(self, prompt_tokens: int, seconds: float) -> None:
        """Write what the step has put there, once it is evaluated; it has computed so many tokens
        of prompts."""
        if prompt_tokens:
            self._tokens += prompt_tokens
            self._seconds += seconds
        if self.arrivals is not None and self._saves:
            self.arrivals.keep(self._saves)
            self._saves = []

    def forget(self) -> None:
        """Forget the step under way."""
        self._saves = []

    def clear(self) -> Clearing:
        """Forget the step under way, and empty the disk (`PrefixDisk.clear`)."""
        self.forget()
        if self.arrivals is not None:
            return self.arrivals.clear()
        nothing = Clearing()
        nothing.set_result("")
        return nothing

    def close(self) -> None:
        if self.arrivals is not None:
            self.arrivals.disk.close()

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts that were read from disk."""
        return 0 if self.arrivals is None else self.arrivals.hit_tokens

    @property
    def seconds_saved(self) -> float:
        """The seconds that computing them would have taken, by the prompts computed so far, less
        those of reading."""
        if self.arrivals is None or not self._tokens:
            return 0.0
        return self.hit_tokens * self._seconds / self._tokens - self.arrivals.read_seconds

    @property
    def used_bytes(self) -> int:
        return 0 if self.arrivals is None else self.arrivals.disk.files.bytes

    @property
    def corrupt_files(self) -> int:
        return 0 if self.arrivals is None else self.arrivals.disk.files.corrupt

    @property
    def stuck_files(self) -> int:
        return 0 if self.arrivals is None else self.arrivals.disk.files.stuck

    @property
    def refused_files(self) -> int:
        return 0 if self.arrivals is None else self.arrivals.disk.files.refused

    @property
    def dropped_bytes(self) -> int:
        return 0 if self.arrivals is None else self.arrivals.disk.dropped_bytes

    @property
    def failed_reads(self) -> int:
        """Files that cannot be read, and readings that the disk keeps waiting."""
        if self.arrivals is None:
            return 0
        return self.arrivals.disk.late + self.arrivals.disk.files.unread
