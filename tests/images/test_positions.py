"""Positions of images: worked numbers, and a rope that is turned by them."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.errors import ModelError
from mlx_parallm.models.images.positions import (
    admit_positions,
    chunked_axes,
    image_positions,
    interleaved_axes,
)


class Holder(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.rope = nn.RoPE(12, base=100.0, **options)


def test_an_image_takes_as_many_positions_as_its_longest_side() -> None:
    positions, shift = image_positions(9, [(2, (1, 2, 3))])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert shift == -3
    # times are rows' fellows: two frames of one token, then an image of 1 × 1 × 2
    positions, shift = image_positions(6, [(1, (2, 1, 1)), (3, (1, 1, 2))], begin=1)
    assert positions.tolist() == [[1, 2, 3, 3, 5], [1, 1, 3, 3, 5], [1, 1, 3, 4, 5]]
    assert shift == 0
    assert image_positions(3, [])[0].tolist() == [[0, 1, 2]] * 3


def test_which_position_turns_which_frequency() -> None:
    assert chunked_axes((2, 1, 3)).tolist() == [0, 0, 1, 2, 2, 2]
    assert interleaved_axes((3, 2, 2)).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert interleaved_axes((4, 1, 1)).tolist() == [0, 1, 2, 0, 0, 0]


def test_a_rope_turns_by_three_positions_and_by_a_shift() -> None:
    model, plain = Holder(), nn.RoPE(12, base=100.0)
    positions = admit_positions(model, chunked_axes((2, 1, 3)))
    x = mx.random.normal((2, 3, 4, 16), key=mx.random.key(0))  # four numbers more than it turns
    assert mx.array_equal(model.rope(x, offset=5), plain(x, offset=5)).item()
    places = np.array([[[4, 4, 6, 7], [0, 1, 2, 3]], [[4, 5, 6, 7]] * 2, [[9, 5, 6, 1]] * 2])
    positions.use(mx.array(places))
    turned = np.array(model.rope(x, offset=99))
    values = np.array(x).astype(np.float64)
    axes, frequencies = [0, 0, 1, 2, 2, 2], 100.0 ** (-np.arange(6) / 6)
    for row in range(2):
        for token in range(4):
            angles = np.array([places[axis, row, token] for axis in axes]) * frequencies
            first, second = values[row, :, token, :6], values[row, :, token, 6:12]
            expected = np.concatenate(
                [
                    first * np.cos(angles) - second * np.sin(angles),
                    second * np.cos(angles) + first * np.sin(angles),
                    values[row, :, token, 12:],
                ],
                axis=-1,
            )
            assert np.abs(turned[row, :, token] - expected).max() < 1e-5
    positions.use(None, mx.array([-3, 0]))
    offset = mx.array([8, 5])
    shifted = model.rope(x, offset=offset)
    assert mx.abs(shifted - plain(x, offset=mx.array([5, 5]))).max().item() < 1e-6
    positions.use(None)
    assert mx.array_equal(model.rope(x, offset=5), plain(x, offset=5)).item()


def test_other_ropes_are_refused() -> None:
    with pytest.raises(ModelError, match="rope of 8"):
        admit_positions(Holder(), chunked_axes((1, 1, 2)))
    with pytest.raises(ModelError, match="is not a rope of"):
        admit_positions(Holder(traditional=True), chunked_axes((2, 2, 2)))
    with pytest.raises(ModelError, match="has no rope"):
        admit_positions(nn.Linear(2, 2), chunked_axes((2, 2, 2)))
