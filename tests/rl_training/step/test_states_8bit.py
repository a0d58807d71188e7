"""Optimizer states in 8 bits against numpy in float64: codes, updates, 2,000 steps, bytes, states
that resume to the bit."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import CheckpointError
from mlx_parallm.rl_training.step import optimizer as optimizer_module
from mlx_parallm.rl_training.step import states_8bit
from mlx_parallm.rl_training.step.optimizer import AdamWSettings, PolicyOptimizer
from mlx_parallm.rl_training.step.states_8bit import BLOCK, MAPS, dequantised, quantised
from tests.rl_training.making import make_config, make_optimizer, make_policy

SHAPES = {  # one is small, one fills no whole blocks, one lies in several pieces
    "model.layers.0.norm.weight": (64,),
    "model.layers.0.a.weight": (67, 64),
    "model.layers.0.b.weight": (64, 128),
    "model.layers.1.b.weight": (100, 100),
}


class Slots:
    """`ParameterSlots` without a model."""

    layer_norms: frozenset[str] = frozenset()

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        rng = np.random.default_rng(1)
        self.names = tuple(shapes)
        self.arrays = [
            mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes.values()
        ]

    def read(self, indices: Sequence[int] | None = None) -> list[mx.array]:
        return list(self.arrays)

    def write(self, arrays: Sequence[mx.array]) -> None:
        self.arrays = list(arrays)


def dynamic_map(*, signed: bool) -> np.ndarray:
    """The formula of bitsandbytes' `create_dynamic_map` for 8 bits and 7 exponents, ascending."""
    values = [0.0, 1.0]
    for i in range(7):
        count = 2 ** (i + 7 - 7) if signed else 2 ** (i + 7 - 7 + 1)
        for j in range(count):
            mean = 0.1 + 0.9 * (j + 0.5) / count
            values += [mean * 10.0 ** (i - 6)] + [-mean * 10.0 ** (i - 6)] * signed
    return np.sort(np.array(values))


def rounded(x: np.ndarray, *, signed: bool) -> np.ndarray:
    """x as its codes say it, block by block, float64."""
    flat = np.append(x.reshape(-1), np.zeros(-x.size % BLOCK)).reshape(-1, BLOCK)
    values, result = dynamic_map(signed=signed), np.zeros_like(flat)
    for row, out in zip(flat, result, strict=True):
        if absmax := np.abs(row).max():
            distances = np.abs(row[:, None] / absmax - values)
            if not signed:
                distances[:, 0] = np.where(row > 0, np.inf, 0.0)
            out[:] = values[distances.argmin(axis=1)] * absmax
    return result.reshape(-1)[: x.size].reshape(x.shape)


class AdamW8bitTwin:
    """beta (0.9, 0.95); the update reads the moments before they are rounded."""

    def __init__(self, value: np.ndarray) -> None:
        self.m, self.v, self.t = np.zeros_like(value), np.zeros_like(value), 0
        self.small = value.size < 4096

    def step(self, w: np.ndarray, g: np.ndarray, rate: float, decay: float) -> np.ndarray:
        self.t += 1
        m, v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g * g
        change = m / (1 - 0.9**self.t) / (np.sqrt(v / (1 - 0.95**self.t)) + 1e-8)
        self.m, self.v = (
            (m, v) if self.small else (rounded(m, signed=True), rounded(v, signed=False))
        )
        return w * (1 - rate * decay) - rate * change


class Lion8bitTwin:
    """beta (0.9, 0.99)."""

    def __init__(self, value: np.ndarray) -> None:
        self.m, self.small = np.zeros_like(value), value.size < 4096

    def step(self, w: np.ndarray, g: np.ndarray, rate: float, decay: float) -> np.ndarray:
        sign, m = np.sign(0.9 * self.m + 0.1 * g), 0.99 * self.m + 0.01 * g
        self.m = m if self.small else rounded(m, signed=True)
        return w - rate * (sign + decay * w)


def gradients(slots: Slots, count: int, seed: int = 0) -> list[list[np.ndarray]]:
    """Of many sizes, as those of a model."""
    rng = np.random.default_rng(seed)
    return [
        [
            (rng.normal(size=a.shape) * 10.0 ** rng.uniform(-3, 0, size=a.shape)).astype(np.float32)
            for a in slots.read()
        ]
        for _ in range(count)
    ]


def update(optimizer: PolicyOptimizer, steps: list[list[np.ndarray]]) -> None:
    for step in steps:
        assert optimizer.update([mx.array(g) for g in step], 1e-2).applied


@pytest.mark.parametrize("state", ["m", "v"])
def test_numbers_become_the_nearest_code(state: str) -> None:
    """Over fourteen decades: a code of bitsandbytes' map, and no other one nearer."""
    signed, rng = state == "m", np.random.default_rng(0)
    np.testing.assert_allclose(
        np.sort(MAPS[state].codes), dynamic_map(signed=signed), rtol=1e-6, atol=0
    )
    x = rng.normal(size=64 * BLOCK) * 10.0 ** rng.uniform(-7, 7, size=64 * BLOCK)
    x[:BLOCK] = 0.0
    x[BLOCK : 2 * BLOCK] = np.linspace(0, 1, BLOCK) ** 9 * (1, -1)[signed]
    x = (x if signed else np.abs(x)).astype(np.float32)
    codes, absmax = quantised(mx.array(x), MAPS[state])
    assert codes.dtype == mx.uint8 and codes.shape == x.shape and absmax.shape == (64,)
    result = np.array(dequantised(codes, absmax, MAPS[state]))
    expected = rounded(x.astype(np.float64), signed=signed)
    largest = np.repeat(np.abs(x).reshape(-1, BLOCK).max(axis=1), BLOCK)
    assert (np.abs(result - expected) <= 1e-6 * largest).all()
    assert (np.sign(result) == np.sign(expected)).all() and (result[:BLOCK] == 0).all()
    if not signed:
        assert ((result > 0) == (x > 0)).all(), "a second moment above 0 is divided by"


@pytest.mark.parametrize(
    ("kind", "twin"), [("adamw_8bit", AdamW8bitTwin), ("lion_8bit", Lion8bitTwin)]
)
def test_each_equals_its_twin(kind: str, twin: Any) -> None:
    config = make_config(optimizer=kind, weight_decay=0.1, max_grad_norm=0.0)
    slots, steps = Slots(), gradients(Slots(), 5)
    start = [np.array(a) for a in slots.read()]
    update(make_optimizer(slots, config), steps)  # type: ignore[arg-type]
    for i, (name, array) in enumerate(zip(slots.names, slots.read(), strict=True)):
        value, twins = start[i].astype(np.float64), twin(start[i].astype(np.float64))
        for step in steps:
            value = twins.step(value, step[i].astype(np.float64), 1e-2, 0.1 * (value.ndim > 1))
        moved = np.abs(value - start[i]).max()
        off = np.abs(np.array(array) - value)
        # float32 may round to the neighbouring code, and take the other sign where it is all but 0
        assert moved > 1e-2 and (off <= 1e-3 * moved).mean() > 0.999, name


@pytest.mark.parametrize("kind", ["adamw_8bit", "lion_8bit"])
def test_pieces_and_bundles_change_no_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, steps = make_config(optimizer=kind, max_grad_norm=0.0), gradients(Slots(), 3)
    slots, cut = Slots(), Slots()
    whole = make_optimizer(slots, config)  # type: ignore[arg-type]
    update(whole, steps)
    monkeypatch.setattr(states_8bit, "PIECE", 16 * BLOCK)
    monkeypatch.setattr(optimizer_module, "BUNDLE_ELEMENTS", 6000)
    other = make_optimizer(cut, config)  # type: ignore[arg-type]
    update(other, steps)
    for name, array in whole.state().items():
        assert mx.array_equal(array, other.state()[name]).item(), name
    for a, b in zip(slots.read(), cut.read(), strict=True):
        assert mx.array_equal(a, b).item()


def test_two_thousand_steps_end_where_float32_ends() -> None:
    """Least squares with one scale for each input, from batches: the loss falls a thousand times,
    and both end in the same noise."""
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-1, 0, size=64)
    target = mx.array(rng.normal(size=(64, 64)).astype(np.float32))
    batches = [mx.array((rng.normal(size=(32, 64)) * scales).astype(np.float32)) for _ in range(50)]
    noise = [mx.array((0.1 * rng.normal(size=(32, 64))).astype(np.float32)) for _ in range(50)]
    losses, ends = {}, {}
    for kind in ("adamw", "adamw_8bit"):
        slots = Slots({"model.layers.0.weight": (64, 64)})
        optimizer = make_optimizer(slots, make_config(optimizer=kind))  # type: ignore[arg-type]
        for step in range(2000):
            x, e = batches[step % 50], noise[step % 50]
            error = x @ (slots.arrays[0] - target) + e
            optimizer.update([x.T @ error / 32], 2e-2 * (1 - step / 2000))
        ends[kind] = np.array(slots.arrays[0])
        losses[kind] = np.mean(
            [
                float(mx.square(x @ (slots.arrays[0] - target) + e).mean().item())
                for x, e in zip(batches, noise, strict=True)
            ]
        )
    start = np.mean([float(mx.square(x @ target).mean().item()) for x in batches])
    assert losses["adamw"] < start / 100
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.01)
    distance = np.linalg.norm(ends["adamw_8bit"] - ends["adamw"])
    assert distance < 0.05 * np.linalg.norm(np.array(target))


def test_states_take_at_most_27_percent_and_small_arrays_keep_float32() -> None:
    slots = Slots({"model.layers.0.w.weight": (512, 300), "model.layers.0.norm.weight": (4095,)})
    sizes = {}
    for kind in ("adamw", "adamw_8bit", "lion", "lion_8bit"):
        state = make_optimizer(slots, make_config(optimizer=kind)).state()  # type: ignore[arg-type]
        sizes[kind] = sum(a.nbytes for n, a in state.items() if n.startswith("model.layers.0.w."))
        norm = {n: a.dtype for n, a in state.items() if ".norm." in n}
        assert norm and set(norm.values()) == {mx.float32}
    assert sizes["adamw_8bit"] <= 0.27 * sizes["adamw"]
    assert sizes["lion_8bit"] <= 0.27 * sizes["lion"]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("lora", [{"enabled": False}, {"rank": 4, "loraplus_ratio": 4.0}], ids=str)
@pytest.mark.parametrize("kind", ["adamw_8bit", "lion_8bit"])
def test_a_resumed_run_is_the_uninterrupted_one(
    kind: str,
    lora: dict[str, Any],
    dtype: mx.Dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(states_8bit, "SMALLEST", 100)
    config = make_config(optimizer=kind, lora=lora, weight_decay=0.01)
    policies = [make_policy(config, dtype=dtype) for _ in range(3)]
    whole, half, resumed = policies
    rng = np.random.default_rng(0)
    steps = [[rng.normal(size=a.shape) for a in whole.slots.read()] for _ in range(4)]
    optimizers = [make_optimizer(policy.slots, config) for policy in policies]
    update(optimizers[0], steps)
    update(optimizers[1], steps[:2])
    mx.save_safetensors(str(tmp_path / "o.safetensors"), optimizers[1].state())
    resumed.slots.write(half.slots.read())
    optimizers[2].restore(mx.load(str(tmp_path / "o.safetensors")))
    update(optimizers[2], steps[2:])
    expected, found = optimizers[0].state(), optimizers[2].state()
    assert {name.rsplit(".")[-1] for name in expected} >= {"m_codes", "m_absmax"}
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert array.dtype == found[name].dtype
        np.testing.assert_array_equal(np.array(array), np.array(found[name]), err_msg=name)
    for a, b in zip(whole.slots.read(), resumed.slots.read(), strict=True):
        assert mx.array_equal(a, b).item()


@pytest.mark.parametrize("kinds", [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")], ids=str)
def test_a_state_of_another_width_is_refused(kinds: tuple[str, str]) -> None:
    saved, loading = (
        make_optimizer(Slots(), make_config(optimizer=kind))  # type: ignore[arg-type]
        for kind in kinds
    )
    with pytest.raises(CheckpointError, match=r"weight\.m.*found"):
        loading.restore(saved.state())


def test_what_fills_up_a_block_is_not_measured_and_settings_apply() -> None:
    slots = Slots({"model.layers.0.a.weight": (4097,)})
    optimizer = make_optimizer(slots, make_config(optimizer="adamw_8bit"))  # type: ignore[arg-type]
    before = np.array(slots.arrays[0], np.float64)
    optimizer.use_adamw(AdamWSettings(0.5, 0.9, 1e-8, 0.0, 0.0))
    moved = optimizer.update([mx.ones((4097,))], 1e-2).moved
    assert moved is not None
    assert moved.weights_moved == 1.0
    assert moved.update_norm == pytest.approx(1e-2 * math.sqrt(4097), rel=1e-4)
    assert moved.weight_norm == pytest.approx(float(np.linalg.norm(before)), rel=1e-4)
