"""How much room a row takes, and what of its text is held once for several rows. No tensor in
sight.

A row's own positions lie in an array of its size class (`size_classes.py`). Before them it may read
segments that it does not own: parts of its prompt that the prefix cache holds, and the prompt that
it has in common with the other choices of its request. Each segment costs a step some operations a
layer, so short ones are copied into the row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from mlx_parallm.engine.cache.prefix import PrefixChunk

CLASS_STEP = 128  # the smallest class, and the least between two
FIRST_ANSWER = 64  # the smallest class of rows whose prompt is in segments: all of them begin empty
# a prompt of this length is a segment also for one row: no copy, no large class
PRIVATE_FROM = 1024
SHARED_FROM = 256  # … and of this length for several rows
# mean length from which chunks of a known prefix are read in place
REFERENCE_FROM = 512


@dataclass(frozen=True, slots=True)
class PromptRows:
    """`count` new rows that begin with the prompt which row `source` of a prefill has computed:
    `length` positions.

    The first positions of it are read in `chunks`; the last chunk's segment may be new, and is
    filled then. The rest is copied into each row.
    """

    source: int
    count: int
    length: int
    chunks: tuple[PrefixChunk, ...] = ()


@cache
def size_class(positions: int) -> int:
    """The positions of a row's array: at most a quarter more than it needs, and CLASS_STEP.

    Example: 1 → 128, 500 → 512, 600 → 640, 700 → 800.
    """
    size = CLASS_STEP
    while size < positions:
        size += max(CLASS_STEP, size // 128 * 32)
    return size


def rows_of(prompts: Iterable[PromptRows]) -> list[int]:
    """Return, for each new row, the row of the prefill that has its prompt."""
    return [prompt.source for prompt in prompts for _ in range(prompt.count)]


def worth_a_segment(positions: int, rows: int) -> bool:
    """Return whether `rows` rows share one copy of this part of the prompt."""
    return positions >= PRIVATE_FROM or (rows > 1 and positions >= SHARED_FROM)


def referenced(chunks: tuple[PrefixChunk, ...]) -> tuple[PrefixChunk, ...]:
    """The beginning of a known prefix that is read in place: as many chunks as are long
    enough in the mean."""
    enough = [
        count for count, chunk in enumerate(chunks, 1) if chunk.stop >= REFERENCE_FROM * count
    ]
    return chunks[: enough[-1]] if enough else ()


def shared_positions(chunks: Iterable[PrefixChunk]) -> int:
    """Positions of all the segments of these chunks, each once, whole: a part keeps all of it
    alive."""
    return sum({id(chunk.segment.arrays): len(chunk.segment.tokens) for chunk in chunks}.values())


def end_of(chunks: tuple[PrefixChunk, ...]) -> int:
    """The first position that lies in the row itself."""
    return chunks[-1].stop if chunks else 0
