"""MLX's memory, measured in a process that runs other tests too."""

import gc

import mlx.core as mx


def active_memory() -> int:
    """Return the bytes of MLX's arrays in use, after what other tests left in cycles is freed:
    the collector would free it in the midst of a measurement."""
    gc.collect()
    mx.synchronize()
    return int(mx.get_active_memory())
