"""Lengths of arrays that are computed with: few of them, so that compiled graphs and freed memory
are used again."""


def padded_length(length: int) -> int:
    """The next bucket: multiples of 8 up to 64, of 16 up to 256, of 64 beyond. Few shapes,
    little padding."""
    step = 8 if length <= 64 else 16 if length <= 256 else 64
    return -(-length // step) * step
