"""Write prefixes to disk behind the engine's back, and read them ahead of a prefill: three threads
that touch no MLX, shared by the engines of a process. One finds out whether there is anything to
read: a prompt that is not there does not wait until a long one is read.

    engine thread  `PrefixArrivals` → PrefixDisk.read, .write  → BlockFiles, in the three threads

Arrays are numpy's: views of evaluated MLX arrays on their way out, and copies on their way in. The
recurrent layers' states after a block are a file of their own, beside the block's.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

import numpy as np

from mlx_parallm.engine.prefix_disk.files import BLOCK, BlockFiles, block_names
from mlx_parallm.system.log import get_logger

PART = 16  # blocks that are read and handed over at once
MOST_WAITING = 256 << 20
"""Bytes of arrays that wait to be written behind others; what comes beyond is not kept. One text
may have any length."""
USES_FROM = 0.8  # of the bound
MOST_LACKING = 4096  # texts of which is known that blocks are not there
MOST_PARTS = 4  # of a reading that the engine has not taken yet; then it waits
TAKEN_S = 0.005  # so long at a time
PATIENCE_S = 5.0  # with a disk that gives no part of a reading; then prompts are computed
END_S = 2.0  # for what the disk does, at the end of the process
STATE = ".state"
NONE = np.zeros(0, np.uint8)

Clearing = Future[str]
"""What is left of files that were to be removed, and why; "": nothing."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Raw:
    """An array whose type numpy may lack: `dtype` is MLX's name, `values` have its width."""

    dtype: str
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Positions [start, stop) of a text: arrays [1, H, stop - start, ·] by kind (a layer's keys,
    a layer's values, …)."""

    start: int
    stop: int
    arrays: Sequence[Raw]


@dataclass(frozen=True, slots=True)
class States:
    """The recurrent layers' states after `position` tokens; None: a layer has none yet."""

    position: int
    arrays: Sequence[Raw | None]


@dataclass(slots=True)
class PrefixReading:
    """A prefix that is being read; `parts` come in the text's order until `ended`, the states
    last.

    Attributes:
        start: what stands before it is in the engine's cache.
        seconds: that it took.
    """

    root: str
    tokens: tuple[int, ...]
    start: int
    parts: SimpleQueue[StoredPiece | States] = field(default_factory=SimpleQueue)
    ended: Event = field(default_factory=Event)
    given_up: bool = False
    seconds: float = 0.0

    def take(self) -> StoredPiece | States | None:
        """Return the next part; None: there is none now."""
        try:
            return self.parts.get_nowait()
        except Empty:
            return None


class DiskThread:
    """A thread that does one thing after the other. The process does not wait for its end: a disk
    may hang."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def settle(self) -> None:
        """Wait until all that was given is done."""
        done = Event()
        self.do(done.set)
        done.wait()

    def end(self) -> None:
        """End behind what was given."""
        self._work.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the end."""
        self._thread.join(seconds)

    def _main(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # boundary: who waits for the thread waits for what comes next, too
                log.exception("prefix_disk_failed")
            del work  # it holds arrays


class PrefixDisk:
    """
    Args:
        files: where they lie.
        model: stands for the base's weights, and how its keys and values are held.
        recurrent: the model has states: a text continues only where these are stored.

    Raises OSError: the folder cannot be made or read. One that gives no answer for PATIENCE_S does
    not keep the start.
    """

    def __init__(self, files: BlockFiles, model: str, *, recurrent: bool) -> None:
        self.files, self.model, self.recurrent = files, model, recurrent
        self.dropped_bytes = 0  # not kept: too many waited to be written
        self.late = 0  # readings that were given up, or failed as a whole
        self._waiting, self._lock = 0, Lock()  # bytes
        self._lacking: dict[tuple[str, int], None] = {}  # texts by root and hash, oldest first
        self._uses = False  # whether one waits to be noted
        self._closed = Event()
        self._cleared = self._emptied = 0  # how often that was asked for, and done
        self._busy_since: float | None = time.monotonic()  # of the part that is being read
        self._finds_since: float | None = None
        self._reader, self._writer = DiskThread("prefix-reader"), DiskThread("prefix-writer")
        self._finder = DiskThread("prefix-finder")
        opened: Future[None] = Future()
        self._reader.do(lambda: self._open(opened))
        wait([opened], PATIENCE_S)
        if not opened.done():
            reason = f"it has given no answer for {PATIENCE_S:.0f} s; prompts are computed"
            log.warning("server.prefix_disk is late", folder=str(files.folder), reason=reason)
            opened.add_done_callback(self._note_late)
        elif error := opened.exception():
            self.close()
            raise error
        self._writer.do(files.count)

    @property
    def hangs(self) -> bool:
        """Whether the disk has given nothing for PATIENCE_S: nobody waits for it then."""
        now = time.monotonic()
        began = (self._busy_since, self._finds_since)
        return any(since is not None and now - since > PATIENCE_S for since in began)

    def lacks(self, root: str, tokens: tuple[int, ...]) -> bool:
        """Whether a text of whole blocks was given of which some are not there. Who asks gives
        them again."""
        with self._lock:
            if (key := (root, hash(tokens))) not in self._lacking:
                return False
            del self._lacking[key]
            return True

    def _note_lacking(self, root: str, tokens: tuple[int, ...]) -> None:
        key = root, hash(tokens[: len(tokens) // BLOCK * BLOCK])
        with self._lock:
            self._lacking[key] = None
            if len(self._lacking) > MOST_LACKING:
                del self._lacking[next(iter(self._lacking))]

    def give_up(self, reading: PrefixReading) -> None:
        """Count a reading that the disk keeps waiting, which is said once."""
        reading.given_up = True
        self.late += 1
        if self.late == 1:
            reason = f"the disk has given nothing for {PATIENCE_S:.0f} s"
            log.warning("prefixes_not_read", reason=reason, folder=str(self.files.folder))

    def read(self, root: str, tokens: tuple[int, ...], start: int) -> PrefixReading:
        """Begin to read the longest prefix of `tokens` that is there, from `start` on."""
        reading = PrefixReading(root, tokens, start)
        self._finder.do(lambda: self._find(reading))
        return reading

    def write(
        self,
        root: str,
        tokens: tuple[int, ...],
        pieces: Sequence[StoredPiece],
        states: States | None,
    ) -> None:
        """Keep the whole blocks that lie in `pieces`, and `states` if they end a block."""
        held = [raw for piece in pieces for raw in piece.arrays]
        held += [] if states is None else _whole(states.arrays)
        size = sum(raw.values.nbytes for raw in held)
        with self._lock:
            drops = self._waiting > 0 and self._waiting + size > MOST_WAITING
            first = not self.dropped_bytes
            if drops:
                self.dropped_bytes += size
            else:
                self._waiting += size
        if drops and first:
            reason = f"more than {MOST_WAITING >> 20} MiB wait to be written"
            log.warning("prefixes_not_kept", reason=reason)
        if drops:
            self._note_lacking(root, tokens)
            return
        cleared = self._cleared
        self._writer.do(lambda: self._write(root, tokens, pieces, states, size, cleared))

    def use(self, root: str, tokens: tuple[int, ...]) -> None:
        """Note a use of blocks that memory holds, near the bound, where the oldest are removed."""
        if self._uses or self.files.bytes < USES_FROM * self.files.max_bytes:
            return  # one at a time
        self._uses = True
        self._writer.do(lambda: self._use(root, tokens))

    def clear(self) -> Clearing:
        """Remove every file, before anything else is read; what waits to be written is not kept.
        Returns at once."""
        self._cleared += 1
        done = Clearing()
        self._reader.do(lambda: done.set_result(self._clear()))
        return done

    def settle(self) -> None:
        """Wait until all that was given is written, or removed."""
        for worker in (self._finder, self._reader, self._writer):
            worker.settle()

    def close(self) -> None:
        """End the threads, and wait for that END_S at most; what waits to be written is lost."""
        if self._closed.is_set():
            return  # by another engine
        self._closed.set()
        workers, until = (self._finder, self._reader, self._writer), time.monotonic() + END_S
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))

    def _open(self, opened: "Future[None]") -> None:
        try:
            self.files.open()
            opened.set_result(None)
        except OSError as error:
            opened.set_exception(error)
        finally:
            self._busy_since = None

    def _note_late(self, opened: "Future[None]") -> None:
        if (error := opened.exception()) is not None:
            folder, reason = str(self.files.folder), str(error)
            log.warning("server.prefix_disk cannot be used", folder=folder, reason=reason)

    def _clear(self) -> str:
        serial = self._cleared
        self._busy_since = time.monotonic()  # who waits for the reader waits for this
        try:
            self.files.clear()
        except OSError as error:
            return f"{self.files.folder} cannot be listed: {error.strerror or error}"
        finally:
            self._busy_since = None
        self._emptied = serial
        if stuck := self.files.stuck:
            return f"{stuck} files or folders in {self.files.folder} cannot be removed"
        return ""

    def _use(self, root: str, tokens: tuple[int, ...]) -> None:
        try:
            self.files.touch(reversed(block_names(root, tokens)))
        finally:
            self._uses = False

    def _find(self, reading: PrefixReading) -> None:
        """Have a reading read if its first block is there; else end it."""
        self._finds_since = time.monotonic()
        ends = True
        try:
            names, first = block_names(reading.root, reading.tokens), reading.start // BLOCK
            if self._emptied != self._cleared or self.files.has(names[first]):
                self._reader.do(lambda: self._read(reading, names))
                ends = False
        finally:
            self._finds_since = None
            if ends:
                reading.ended.set()
        if ends:
            self.files.touch(reversed(names[:first]))

    def _read(self, reading: PrefixReading, names: Sequence[str]) -> None:
        began = time.monotonic()
        try:
            if reading.given_up or self._closed.is_set():
                return
            if self._emptied != self._cleared:  # it has failed: nothing of before is read
                self._clear()
            if self._emptied != self._cleared:
                self.late += 1
                return
            self._busy_since = time.monotonic()
            self._read_blocks(reading, names)
            self._writer.do(self.files.count_if_due)
        except Exception:  # boundary: a prefix that cannot be read is computed
            self.late += 1
            log.exception("prefix_not_read")
        finally:
            self._busy_since = None
            reading.seconds = time.monotonic() - began
            reading.ended.set()

    def _read_blocks(self, reading: PrefixReading, names: Sequence[str]) -> None:
        begin = reading.start // BLOCK
        count = next((i for i, name in enumerate(names) if not self.files.has(name)), len(names))
        states = None
        while self.recurrent and count > begin and states is None:
            states = self.files.read(names[count - 1] + STATE)
            count -= states is None
        for first in range(begin, count, PART):
            group = [self.files.read(name) for name in names[first : min(first + PART, count)]]
            sound = [
                _whole(_raws(each)) for each in group[: _first_none(group)] if each is not None
            ]
            if sound:
                reading.parts.put(_joined(first * BLOCK, sound))
            self._busy_since = None
            while reading.parts.qsize() >= MOST_PARTS and not reading.given_up:
                if self._closed.wait(TAKEN_S):
                    return
            self._busy_since = time.monotonic()
            if len(sound) < len(group) or reading.given_up:
                return
        if states is not None and count > begin:
            reading.parts.put(States(count * BLOCK, _raws(states)))
        used = names[:count]
        self.files.touch([*([] if states is None else [used[-1] + STATE]), *reversed(used)])

    def _write(
        self,
        root: str,
        tokens: tuple[int, ...],
        pieces: Sequence[StoredPiece],
        states: States | None,
        size: int,
        cleared: int,
    ) -> None:
        def still() -> bool:
            return cleared == self._cleared and not self._closed.is_set()

        try:
            names = block_names(root, tokens)
            # behind a block that is not there no other is found
            if pieces and not self._write_blocks(names, pieces, still):
                self._note_lacking(root, tokens)
            ends = {index * BLOCK: name for index, name in enumerate(names, 1)}
            if states is None or states.position not in ends or not still():
                return
            block = ends[states.position]
            if self.files.has(block) and self.files.takes(block + STATE):
                used_ns, arrays = self.files.used_ns(block), _arrays(states.arrays)
                self.files.write(block + STATE, arrays, used_ns=used_ns, still=still)
        except Exception:  # boundary: the engine does not depend on it
            log.exception("prefix_not_written")
        finally:
            with self._lock:
                self._waiting -= size

    def _write_blocks(
        self, names: Sequence[str], pieces: Sequence[StoredPiece], still: Callable[[], bool]
    ) -> bool:
        """Return whether the blocks in `pieces` are there, and those before them."""
        first, last = -(-pieces[0].start // BLOCK), min(len(names), pieces[-1].stop // BLOCK)
        # an end is of no use without its beginning: it is not kept, or older, and goes before that
        if first and not (self.files.has(names[0]) and self.files.has(names[first - 1])):
            return False
        used_ns = self.files.used_ns(names[first - 1]) if first else time.time_ns()
        for index in range(first, last):
            name, start, age = names[index], index * BLOCK, index - first + 1
            if self.files.has(name):
                continue
            if not still() or not self.files.takes(name):
                return False
            arrays = _arrays(_cut(pieces, start, start + BLOCK))
            if not self.files.write(name, arrays, used_ns=used_ns - age, still=still):
                return False
        return True


def _whole(raws: Sequence[Raw | None]) -> list[Raw]:
    return [raw for raw in raws if raw is not None]


def _first_none(group: Sequence[object]) -> int:
    return next((i for i, each in enumerate(group) if each is None), len(group))


def _cut(pieces: Sequence[StoredPiece], start: int, stop: int) -> list[Raw]:
    """Return positions [start, stop) of pieces that follow each other, by kind."""
    parts = [
        [
            raw.values[:, :, max(start - piece.start, 0) : min(stop, piece.stop) - piece.start]
            for raw in piece.arrays
        ]
        for piece in pieces
        if piece.start < stop and piece.stop > start
    ]
    names = [raw.dtype for raw in pieces[0].arrays]
    columns = zip(*parts, strict=True)
    return [
        Raw(name, column[0] if len(column) == 1 else np.concatenate(column, axis=2))
        for name, column in zip(names, columns, strict=True)
    ]


def _joined(start: int, blocks: Sequence[Sequence[Raw]]) -> StoredPiece:
    """Return consecutive blocks as one piece."""
    columns = zip(*blocks, strict=True)
    arrays = [
        Raw(column[0].dtype, np.concatenate([raw.values for raw in column], axis=2))
        for column in columns
    ]
    return StoredPiece(start, start + len(blocks) * BLOCK, arrays)


def _arrays(raws: Sequence[Raw | None]) -> dict[str, np.ndarray]:
    """Return raw arrays by their places and type, as `_raws` reads them. Those of one shape and
    type are one: a file of few arrays is written and read with less of Python."""
    alike = defaultdict[tuple[str, tuple[int, ...]], dict[int, np.ndarray]](dict)
    for place, raw in enumerate(raws):
        name, values = ("none", NONE) if raw is None else (raw.dtype, raw.values)
        alike[name, values.shape][place] = values
    return {
        f"{','.join(map(str, columns))}.{name}": _stacked([*columns.values()])
        for (name, _), columns in alike.items()
    }


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    whole = np.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)  # stack has its own order
    return np.stack(arrays, out=whole)


def _raws(arrays: Mapping[str, np.ndarray]) -> list[Raw | None]:
    by_place: dict[int, Raw | None] = {}
    for key, stacked in arrays.items():
        places, dtype = key.split(".")
        for index, place in enumerate(map(int, places.split(","))):
            by_place[place] = None if dtype == "none" else Raw(dtype, stacked[index])
    return [by_place[place] for place in sorted(by_place)]
