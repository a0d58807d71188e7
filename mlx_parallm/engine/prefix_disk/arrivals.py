"""Let a request wait until the prefix of its prompt that lies on disk is in the prefix cache, and
give to the disk what the cache takes in. Engine thread only.

    Engine.add   → `begin`   sequences wait here, and not in the scheduler's queue
    Engine.step  → `arrived` parts that were read become segments; whoever has all goes to the queue
                 → `keep`    what a step has stored, once it is evaluated
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.engine.cache.prefix import Key, PrefixCache, common_beginning
from mlx_parallm.engine.prefix_disk.disk import (
    Clearing,
    PrefixDisk,
    PrefixReading,
    Raw,
    States,
    StoredPiece,
)
from mlx_parallm.engine.prefix_disk.files import BLOCK, hashed
from mlx_parallm.engine.scheduling.prefills import PrefixSave
from mlx_parallm.engine.sequence import Sequence as Choice
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.weights import SharedWeights

WITHOUT = {mx.bfloat16: mx.uint16}  # what numpy lacks → what has its width
TYPES = {  # of keys, values and states, quantised ones too
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "uint32": mx.uint32,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass(slots=True, eq=False)
class Arrival:
    """The choices of one request, and the prefix that they wait for; None: the first `common`
    tokens of their text are read for `behind`."""

    choices: list[Choice]
    text: tuple[int, ...]  # the whole blocks that may be read
    reading: PrefixReading | None = None
    behind: "Arrival | None" = None
    common: int = 0
    taken: int = 0  # tokens of its text that the cache has taken
    over: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where prefixes of some weights and a salt lie: on disk, and in the cache."""

    root: str
    key: Key


class PrefixArrivals:
    """
    Args:
        disk: shared by the engines of a process.
        cache: this engine's prefixes.
        weights: which note from now on what their adapters hold.
    """

    def __init__(self, disk: PrefixDisk, cache: PrefixCache, weights: SharedWeights) -> None:
        self.disk, self._cache, self._weights = disk, cache, weights
        self.waiting: list[Arrival] = []
        self.hit_tokens = 0  # that were read and taken into the cache
        self.read_seconds = 0.0
        weights.note_contents(content_of)

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def choices(self) -> int:
        """The number of choices that wait."""
        return sum(len(arrival.choices) for arrival in self.waiting)

    def begin(self, choices: list[Choice]) -> bool:
        """Begin to read for the choices of a request, which then come out of `arrived`. False:
        nothing can be there for them, or all of it is known."""
        prompt = choices[0].prompt
        arrival = Arrival(choices, prompt[: (len(prompt) - 1) // BLOCK * BLOCK])
        if self.disk.hangs or not arrival.text or not self._cache.max_tokens:
            return False
        if not self._read(arrival):
            return False
        self.waiting.append(arrival)
        return True

    def _read(self, arrival: Arrival, *, alone: bool = False) -> bool:
        """Begin to read what the cache lacks, unless the next block of it is being read: then it
        waits for that. `alone`: it does not wait. False: it lacks nothing."""
        first, text = arrival.choices[0], arrival.text
        place = self._place_of(first)
        if place is None:
            return False
        chunks = self._cache.find(place.key, first.prompt)
        start = chunks[-1].stop if chunks else 0
        if start >= len(text):
            self.disk.use(place.root, text)
            return False
        for other in () if alone else self.waiting:
            if other.over or other.reading is None or other.reading.root != place.root:
                continue
            common = common_beginning(text, other.text)
            if common >= start + BLOCK:  # states come last
                arrival.common = len(other.text) if self.disk.recurrent else common // BLOCK * BLOCK
                arrival.behind = other
                return True
        arrival.reading = self.disk.read(place.root, text, start)
        return True

    def wait(self, seconds: float) -> None:
        """Wait for the oldest reading, if there is nothing else to do."""
        readings = (each.reading for each in self.waiting if each.reading is not None)
        reading = next(readings, None)
        if reading is not None and reading.parts.empty():
            reading.ended.wait(seconds)

    def arrived(self) -> list[Choice]:
        """Take one part of each reading into the cache; return the choices whose reading has
        ended, or which wait for a disk that hangs."""
        hangs = self.disk.hangs
        ready: list[Choice] = []
        left: list[Arrival] = []
        for arrival in self.waiting:
            arrival.choices = choices = [c for c in arrival.choices if not c.finished]
            if (other := arrival.behind) is not None:
                if self._goes_on(arrival, other):
                    left.append(arrival)
                else:
                    ready += choices
                continue
            reading = arrival.reading
            assert reading is not None
            reading.given_up = reading.given_up or not choices
            if hangs and not reading.given_up:
                self.disk.give_up(reading)
            ended = reading.ended.is_set()  # before the last part is taken
            part = reading.take()
            if part is not None and not reading.given_up:
                reading.given_up = not self._put(choices[0], reading, part)
                arrival.taken = part.stop if isinstance(part, StoredPiece) else arrival.taken
            if reading.given_up or (ended and part is None):
                self.read_seconds += reading.seconds
                arrival.over = True
                ready += choices
            else:
                left.append(arrival)
        self.waiting = left
        return ready

    def _goes_on(self, arrival: Arrival, other: Arrival) -> bool:
        """Return whether an arrival waits on: behind another, or for what it begins to read."""
        if not arrival.choices:
            return False
        lacking = other.taken < arrival.common
        if lacking and not other.over:
            return True
        arrival.behind = None
        if self.disk.recurrent:  # the states of its own text may lie elsewhere
            return self._read(arrival, alone=True)
        # what the other's reading has not found is not there
        return not (lacking and other.choices) and self._read(arrival)

    def clear(self) -> Clearing:
        """Empty the disk. What is being read is of before: who waits for it computes its prompt."""
        for arrival in self.waiting:
            if arrival.reading is not None:
                arrival.reading.given_up = True
        return self.disk.clear()

    def keep(self, saves: Iterable[PrefixSave]) -> None:
        """Give what a step has put into the cache to the disk. Its arrays are evaluated."""
        for save in saves:
            place = self._place_of(save.owner)
            if place is None or place.key != save.key:
                continue  # the weights have changed since
            start = len(save.text) if save.segment is None else save.segment.start
            start = start // BLOCK * BLOCK
            if save.segment is not None and self.disk.lacks(place.root, save.text[:start]):
                start = 0  # behind a block that is not there no other is found
            pieces = self._pieces(save.key, save.text, start)
            states = None
            if save.of is not None and save.position % BLOCK == 0:
                held = save.of.snapshots.get(save.position)
                states = None if not held else _states(save.position, held)
            if pieces or states is not None:
                self.disk.write(place.root, save.text, pieces, states)

    def _pieces(self, key: Key, text: tuple[int, ...], start: int) -> list[StoredPiece]:
        """Return the arrays of text[start:], as far as the cache holds them; []: of no block."""
        chunks = self._cache.held(key, text)
        if not chunks or chunks[-1].stop < len(text) or start + BLOCK > len(text):
            return []
        return [
            StoredPiece(
                first := max(chunk.start, start),
                chunk.stop,
                [
                    _cut(raw, first - chunk.start, chunk.stop - chunk.start)
                    for raw in _raw(chunk.segment.arrays)
                ],
            )
            for chunk in chunks
            if chunk.stop > start
        ]

    def _put(self, choice: Choice, reading: PrefixReading, part: StoredPiece | States) -> bool:
        """Take a part into the cache. False: the weights have changed, or there is no room."""
        place = self._place_of(choice)
        if place is None or place.root != reading.root:
            return False
        key = place.key
        if isinstance(part, States):
            text = reading.tokens[: part.position]
            if (free := self._cache.snapshot(key, text)) is None:
                return False
            holder, position = free
            states = [None if raw is None else _array(raw) for raw in part.arrays]
            mx.eval([each for each in states if each is not None])
            holder.snapshots[position] = states
            return True
        text = reading.tokens[: part.stop]
        if self._cache.parting(key, text) < part.start:
            return False  # what stood before it has left the cache meanwhile
        segment = self._cache.store(key, text)
        if segment is None:
            return self._cache.parting(key, text) == part.stop
        segment.arrays = [_array(raw, segment.start - part.start) for raw in part.arrays]
        mx.eval(segment.arrays)
        self.hit_tokens += part.stop - segment.start
        return True

    def _place_of(self, choice: Choice) -> Place | None:
        """Return where the prefixes of a choice lie now; None: its weights are trained, so nobody
        will have them again."""
        with self._weights.read() as view:
            base, published = view.base_serial, view.policy_version
        slot, salt = choice.adapter, choice.cache_salt
        if base or (
            slot is not None
            and (slot.pinned or (slot.name == self._weights.policy and published > 0))
        ):
            return None
        serial, adapter = 0, ""
        if slot is not None:
            weights = slot.weights  # a publish rebinds it
            if weights.content is None:
                return None  # of a publish
            serial, adapter = weights.serial, weights.content
        root = hashed(self.disk.model.encode(), adapter.encode(), repr(salt).encode())
        return Place(root, ((serial, False, base), salt))


def content_of(layers: Mapping[str, LoraPair]) -> str:
    """Return a hash of an adapter's layers: paths, factors and arrays. In the thread that loads
    it."""
    parts = [
        part
        for path, pair in sorted(layers.items())
        for part in (f"{path} {pair.scale}", *pair.arrays)
    ]
    raws = _raw([part for part in parts if isinstance(part, mx.array)])
    shapes = [f"{raw.dtype} {raw.values.shape}" for raw in raws]
    texts = [part for part in parts if isinstance(part, str)]
    return hashed(repr((texts, shapes)).encode(), *(raw.values.tobytes() for raw in raws))


def _raw(arrays: Sequence[mx.array]) -> list[Raw]:
    """Return numpy's views of evaluated arrays."""
    shown = [  # on a GPU's stream a view would wait for the step that is under way
        array.view(WITHOUT[array.dtype], stream=mx.cpu) if array.dtype in WITHOUT else array
        for array in arrays
    ]
    mx.eval(shown)
    return [
        Raw(NAMES[array.dtype], np.asarray(view)) for array, view in zip(arrays, shown, strict=True)
    ]


def _states(position: int, arrays: Sequence[mx.array | None]) -> States:
    raws = iter(_raw([array for array in arrays if array is not None]))
    return States(position, [None if array is None else next(raws) for array in arrays])


def _cut(raw: Raw, start: int, stop: int) -> Raw:
    """Return positions [start, stop), as a view."""
    return Raw(raw.dtype, raw.values[:, :, start:stop])


def _array(raw: Raw, start: int = 0) -> mx.array:
    """Return a copy as MLX's array, from the position `start` on."""
    values = raw.values[:, :, start:] if start else raw.values
    array, dtype = mx.array(values), TYPES[raw.dtype]
    return array if array.dtype == dtype else array.view(dtype)
