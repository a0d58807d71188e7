"""Optimizer states in 4 bits against numpy in float64; test_states_8bit.py has what both share."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.rl_training.step.states_4bit import BLOCK, MAPS, dequantised, quantised
from tests.rl_training.making import make_config, make_optimizer
from tests.rl_training.step.test_states_8bit import Slots, gradients, update

SIGNED = [0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
"""torchao's create_dynamic_map(True, 3, 4) beside 1: the means of one, two and four intervals of a
decade, by hand. Its unsigned codes are 1/16, 2/16 … 1."""
CODES = {
    "m": np.array([*SIGNED, 1.0, *(-x for x in SIGNED[1:])]),
    "v": np.arange(1, 17) / 16,
}


def rounded(x: np.ndarray, state: str) -> np.ndarray:
    """x as its nearest codes say it, block by block, float64."""
    flat = np.append(x.reshape(-1), np.zeros(-x.size % BLOCK)).reshape(-1, BLOCK)
    result = np.zeros_like(flat)
    for row, out in zip(flat, result, strict=True):
        if absmax := np.abs(row).max():
            nearest = np.abs(row[:, None] / absmax - CODES[state]).argmin(axis=1)
            out[:] = CODES[state][nearest] * absmax
    return result.reshape(-1)[: x.size].reshape(x.shape)


@pytest.mark.parametrize("state", ["m", "v"])
def test_numbers_become_the_nearest_code_and_two_share_a_byte(state: str) -> None:
    rng = np.random.default_rng(0)
    np.testing.assert_allclose(np.sort(MAPS[state]), np.sort(CODES[state]), rtol=1e-6)
    x = rng.normal(size=32 * BLOCK) * 10.0 ** rng.uniform(-4, 4, size=32 * BLOCK)
    x[:BLOCK] = 0.0
    x = (np.abs(x) if state == "v" else x).astype(np.float32)
    packed, absmax = quantised(mx.array(x), state)
    assert packed.dtype == mx.uint8 and packed.shape == (x.size // 2,) and absmax.shape == (32,)
    result = np.array(dequantised(packed, absmax, state), np.float64)
    largest = np.repeat(np.abs(x).reshape(-1, BLOCK).max(axis=1), BLOCK)
    # as near as the nearest: float32 may take the other one of two that are equally near
    off, least = np.abs(result - x), np.abs(rounded(x.astype(np.float64), state) - x)
    assert (off <= least + 1e-6 * largest).all()
    assert (result[:BLOCK] == 0).all()
    if state == "v":
        assert (result[BLOCK:] > 0).all(), "an update divides by its root"


def test_an_update_equals_its_twin() -> None:
    """AdamW, beta (0.9, 0.95), with moments that are rounded between two updates."""
    config = make_config(optimizer="adamw_4bit", weight_decay=0.1, max_grad_norm=0.0)
    slots, steps = Slots(), gradients(Slots(), 5)
    start = [np.array(a) for a in slots.read()]
    update(make_optimizer(slots, config), steps)  # type: ignore[arg-type]
    for i, (name, array) in enumerate(zip(slots.names, slots.read(), strict=True)):
        value = start[i].astype(np.float64)
        m, v = np.zeros_like(value), np.zeros_like(value)
        for t, step in enumerate(steps, 1):
            g = step[i].astype(np.float64)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            change = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
            value = value * (1 - 1e-2 * 0.1 * (value.ndim > 1)) - 1e-2 * change
            if value.size >= 4096:
                m, v = rounded(m, "m"), rounded(v, "v")
        moved = np.abs(value - start[i]).max()
        off = np.abs(np.array(array) - value)
        assert moved > 1e-2 and (off <= 1e-3 * moved).mean() > 0.99, name
