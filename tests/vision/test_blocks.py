"""Gradients through a tower's blocks that hold the blocks' inputs alone."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.systems.vision.tower import hold_blocks_inputs_alone
from tests.active_memory import active_memory

WIDTH, INNER, ROWS, BLOCKS = 16, 512, 512, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, *, ends: mx.array, scale: float = 1.0
    ) -> Any:
        assert ends.tolist() == [ROWS], "read on the host, as Qwen's blocks do"
        hidden = mx.tanh(self.up(x)) * scale
        return x + self.down(hidden if mask is None else hidden * mask)


class Tower(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = [Block() for _ in range(blocks)]
        self.sizes = [1, 2]  # a list of no modules
        self.mixed = [nn.Linear(2, 2), nn.ReLU()]

    def __call__(self, x: mx.array) -> mx.array:
        for block in self.layers:
            x = block(x, mx.ones((1,)), ends=mx.array([ROWS]), scale=0.5)
        return x


def tower(blocks: int = BLOCKS) -> Tower:
    mx.random.seed(0)
    made = Tower(blocks)
    made.mixed[0].freeze()
    mx.eval(made.parameters())
    return made


def gradients(model: Tower) -> tuple[list[np.ndarray], int]:
    """Those of a loss, and the peak of the memory beside what was there."""
    x = mx.random.normal((ROWS, WIDTH), key=mx.random.key(1))
    step = nn.value_and_grad(model, lambda x: model(x).square().sum())
    mx.eval(x)
    mx.clear_cache()
    before = active_memory()
    mx.reset_peak_memory()
    _, slopes = step(x)
    mx.eval(slopes)
    peak = mx.get_peak_memory() - before
    return [np.array(block[name]["weight"]) for block in slopes["layers"] for name in block], peak


def test_they_are_the_plain_ones_and_take_the_memory_of_one_block() -> None:
    plain, again = tower(), tower()
    hold_blocks_inputs_alone([again])
    assert {type(block).__name__ for block in again.layers} == {"BlockComputedAgain"}
    assert type(again.mixed[0]) is nn.Linear
    expected, whole = gradients(plain)
    ours, less = gradients(again)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    inside = 4 * ROWS * INNER  # bytes of an array in a block, of which the plain one holds two
    few = tower(BLOCKS // 4)
    hold_blocks_inputs_alone([few])
    values, least = gradients(few)
    weights = sum(a.nbytes for a in ours) - sum(a.nbytes for a in values)
    more = BLOCKS - BLOCKS // 4
    assert less - least < weights + more * 4 * ROWS * WIDTH + more / 3 * inside
    assert whole > 2 * BLOCKS * inside and less < 0.6 * whole
    kept = again.layers[0].up.weight
    mx.eval(again(mx.ones((2, WIDTH))))
    assert again.layers[0].up.weight is kept
    again.freeze()
    np.testing.assert_allclose(again(mx.ones((2, WIDTH))), plain(mx.ones((2, WIDTH))), rtol=1e-5)
