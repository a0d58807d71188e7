"""The CPU's own exp, SwiGLU, RoPE and quantised products against float64 and MLX, forward and
backward."""

import copy
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models.cpu import kernels, unpacking
from mlx_parallm.models.cpu.layers import FastMLP, use_fast_rope, use_fast_swiglu
from mlx_parallm.models.lora import linear_layers
from mlx_parallm.models.mlx_lm_api import QuantizedSwitchLinear
from mlx_parallm.system.device import traits
from tests.active_memory import active_memory
from tests.rl_training.making import make_config, make_policy
from tests.tiny_models import QWEN3, make_model

needs_cpu = pytest.mark.skipif(not traits.on_cpu(), reason="MLX computes on a GPU")
needs_compiler = pytest.mark.skipif(
    not kernels.available(), reason="needs MLX on the CPU and a C++ compiler"
)


@pytest.mark.parametrize(
    ("power", "exact", "lowest", "fused", "error"),
    [
        pytest.param(kernels.exp_minus, np.exp, -87.0, True, 1.3e-7, marks=needs_compiler, id="e"),
        pytest.param(
            kernels.exp2_minus, np.exp2, -100.0, True, 1.3e-7, marks=needs_compiler, id="2"
        ),
        pytest.param(kernels.exp_minus, np.exp, -87.0, False, 5e-6, id="e, MLX's own"),
        pytest.param(kernels.exp2_minus, np.exp2, -100.0, False, 6e-6, id="2, MLX's own"),
    ],
)
def test_powers_are_as_right_as_their_docstrings_say(
    monkeypatch: pytest.MonkeyPatch,
    power: Callable[..., mx.array],
    exact: Callable[..., Any],
    lowest: float,
    fused: bool,
    error: float,
) -> None:
    monkeypatch.setattr(kernels, "available", lambda: fused)
    whole = -np.arange(0.0, -lowest)  # and what lies beside them, where another power of two begins
    edges = np.concatenate(
        [whole, whole * np.log(2), np.nextafter(whole, 1), np.nextafter(whole * np.log(2), -200)]
    )
    x = mx.array(
        np.concatenate([np.linspace(lowest, 0, 50_001), edges.clip(lowest, 0)]).astype(np.float32)
    )
    found = np.array(power(x[None], mx.array([[0.0]])))[0].astype(np.float64)
    assert np.abs(found / exact(np.array(x, np.float64)) - 1).max() < error
    few = power(
        mx.array([[7.0, 3.0, -200.0, -1e30, -float("inf"), float("nan")]]), mx.array([[7.0]])
    )[0].tolist()
    assert (
        few[:2] == [1.0, pytest.approx(exact(-4.0), rel=error)]
        and max(few[2:5]) < 1e-37
        and np.isnan(few[5])
    )
    assert np.isnan(power(mx.array([[1.0, 2.0]]), mx.array([[float("nan")]]))).all(), (
        "of a row with NaN all are"
    )


@needs_compiler
@pytest.mark.parametrize("name", ["_power", "_exp_of_rest", "_times_power", "_exp2", "_gated"])
def test_each_is_one_loop(name: str, tmp_path: Path) -> None:
    """MLX cuts what is more than 11 operations deep, and each cut costs a pass over the array."""
    count = {"_exp_of_rest": 2, "_times_power": 3, "_gated": 3}.get(name, 1)
    arrays = [mx.zeros((64,)) for _ in range(count)]
    if name == "_times_power":
        arrays[2] = mx.zeros((64,), mx.int32)
    found = kernels._fused(getattr(kernels, name), 64)(*arrays)
    mx.export_to_dot(str(tmp_path / "graph.dot"), *(found if isinstance(found, tuple) else [found]))
    labels = re.findall(r'label ?= ?"([^"]+)"', (tmp_path / "graph.dot").read_text())
    assert len([label for label in labels if "Compiled" in label]) == 1, labels


@needs_compiler
def test_threads_that_share_sizes_get_the_functions_that_they_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX finds a trace by an address: one that outlived its function would be taken for that of
    another."""
    monkeypatch.setattr(kernels, "TRACES", 4)
    monkeypatch.setattr(kernels, "_traces", kernels._Traces())
    turns, wrong = [threading.Semaphore(1), threading.Semaphore(0)], list[str]()

    def compute(own: int) -> None:
        for call in range(600):
            turns[own].acquire()
            x = mx.array(
                -np.random.default_rng(call // 2).random(1 + call * 7 % 11).astype(np.float32) * 20
            )
            power, exact = [(kernels.exp_minus, np.exp), (kernels.exp2_minus, np.exp2)][
                call // 3 % 2
            ]
            # Every fourth is a part of something larger that is compiled, as in a training step.
            called = (
                mx.compile(lambda x, power=power: power(x, mx.array([0.0])))
                if call // 2 % 4 == 3
                else power
            )
            found = called(x) if called is not power else power(x, mx.array([0.0]))
            if np.abs(np.array(found) / exact(np.array(x, np.float64)) - 1).max() > 1e-6:
                wrong.append(f"{power.__name__} of {x.size}, call {call} of thread {own}")
            turns[1 - own].release()

    threads = [threading.Thread(target=compute, args=(own,)) for own in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
@needs_compiler
def test_a_compiler_that_fails_is_as_none(tmp_path: Path) -> None:
    """In its own process, with a directory for temporary files that has no loops yet."""
    (tmp_path / "g++").write_text('#!/bin/sh\ntest "$1" = --version\n')
    (tmp_path / "g++").chmod(0o755)
    program = (
        "import mlx.core as mx; from mlx_parallm.models.cpu import kernels as c; assert not"
        " c.available();"
    )
    program += "print(c.exp_minus(mx.array([0.0]), mx.array([0.0])).item())"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("1.0\n"), done.stderr
    assert "MLX cannot compile" in done.stdout + done.stderr


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 30_001), (1, 70_000), (70_000, 1)])
def test_row_maxima(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = mx.random.normal(shape, key=mx.random.key(1))
    mx.export_to_dot(str(tmp_path / "graph.dot"), kernels.row_maxima(x))
    by_halves = "Maximum" in (tmp_path / "graph.dot").read_text()
    assert by_halves == (traits.on_cpu() and shape[-1] > 5), (
        "few numbers, or short rows, are one reduction"
    )
    x[..., 0, -1] = -float("inf")
    assert mx.array_equal(kernels.row_maxima(x), x.max(axis=-1, keepdims=True))
    x[..., 0, shape[-1] // 2] = float("nan")
    assert mx.isnan(kernels.row_maxima(x)).sum().item() == (shape[0] if len(shape) == 3 else 1)


def test_swiglu_and_its_gradient_are_right_to_1e_6() -> None:
    """d/dx σ(x) x u = u σ (1 + x (1 - σ)), d/du = σ x, in float64."""
    gate, up, slope = (
        mx.linspace(-30.0, 30.0, 60_001),
        mx.full((60_001,), 1.5),
        mx.full((60_001,), -0.5),
    )
    x = np.array(gate, dtype=np.float64)
    share = 1 / (1 + np.exp(-x))
    (value,), (by_gate, by_up) = mx.vjp(kernels.swiglu_with_gradient, [gate, up], [slope])
    assert mx.array_equal(value, kernels.swiglu(gate, up))
    for found, exact in (
        (value, 1.5 * x * share),
        (by_gate, -0.5 * 1.5 * share * (1 + x * (1 - share))),
        (by_up, -0.5 * share * x),
    ):
        assert (
            np.abs(np.array(found, dtype=np.float64) - exact) / np.maximum(np.abs(x), 1)
        ).max() < 1e-6
    assert np.isnan(kernels.swiglu(mx.array([float("nan")]), mx.array([1.0])).item())


def test_the_gradient_of_swiglu_does_not_keep_the_steps_of_the_sigmoid() -> None:
    gate = mx.random.normal((256, 1024), key=mx.random.key(0))
    mx.eval(gate)
    before = active_memory()
    _, slopes = mx.vjp(kernels.swiglu_with_gradient, [gate, gate], [gate])
    mx.reset_peak_memory()
    mx.eval(slopes)
    assert mx.get_peak_memory() - before < 16 * gate.nbytes  # 43 where MLX differentiates it


@needs_compiler
def test_a_swiglu_model_is_served_by_the_fast_one() -> None:
    plain = make_model(QWEN3)
    model = copy.deepcopy(plain)
    tokens, projection = mx.arange(24)[None], model.layers[0].mlp.up_proj
    assert use_fast_swiglu(model) == QWEN3["num_hidden_layers"]
    assert set(linear_layers(model)) == set(linear_layers(plain))
    # the arrays stay shared with whoever holds them
    assert model.layers[0].mlp.up_proj is projection
    assert type(plain.layers[0].mlp) is not FastMLP
    assert mx.abs(model(tokens) - plain(tokens)).max() < 1e-5


@needs_compiler
def test_only_the_trainers_swiglu_prepares_a_gradient() -> None:
    """What a gradient needs costs a decode step as much as the product itself."""
    served = make_model(QWEN3)
    use_fast_swiglu(served)
    trained = make_policy(make_config()).model
    for model, kept in ((served, 0), (trained, 1)):
        text = StringIO()
        mx.export_to_dot(text, model.layers[0].mlp(mx.ones((1, 1, model.args.hidden_size))))
        assert text.getvalue().count('"CustomTransforms"') == kept


@needs_compiler
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fast_rope_turns_each_row_at_its_position_as_mlx_does(scale: float) -> None:
    block = Block(nn.RoPE(32, base=1e6, scale=scale))
    assert use_fast_rope(block) == 1
    fast, plain = block.mlp, nn.RoPE(32, base=1e6, scale=scale)
    offsets = mx.array([0, 7, 4000], dtype=mx.int32)
    for heads in (2, 4):  # the second asks for the angles of the first
        x = mx.random.normal((3, heads, 1, 32), key=mx.random.key(heads))
        angles = np.array([0, 7, 4000])[:, None] * scale * 1e6 ** (-np.arange(16) / 16)
        cos, sin = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
        a, b = np.array(x)[..., :16], np.array(x)[..., 16:]
        np.testing.assert_allclose(
            fast(x, offset=offsets),
            np.concatenate([a * cos - b * sin, b * cos + a * sin], -1),
            atol=2e-3,
        )
        np.testing.assert_allclose(fast(x, offset=offsets), plain(x, offset=offsets), atol=1e-6)
    moved = offsets + 1
    np.testing.assert_allclose(fast(x, offset=moved), plain(x, offset=moved), atol=1e-6)
    prompt = mx.random.normal((1, 2, 9, 32), key=mx.random.key(9))
    np.testing.assert_array_equal(fast(prompt, offset=3), plain(prompt, offset=3))


@needs_compiler
def test_rope_of_pairs_or_of_a_part_is_mlx_own() -> None:
    assert use_fast_rope(Block(nn.RoPE(32, traditional=True))) == 0
    block = Block(nn.RoPE(16))
    use_fast_rope(block)
    x, offsets = (
        mx.random.normal((2, 2, 1, 32), key=mx.random.key(0)),
        mx.array([3, 5], dtype=mx.int32),
    )
    np.testing.assert_array_equal(block.mlp(x, offset=offsets), nn.RoPE(16)(x, offset=offsets))


class OtherMLP(nn.Module):
    """Three projections of the same names, another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(8, 16),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
        )

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu(self.gate_proj(x)) * self.up_proj(x))


class ClampedMLP(OtherMLP):
    """SwiGLU that is cut off beyond 7, as Step 3.5's."""

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.minimum(nn.silu(self.gate_proj(x)), 7.0), mx.clip(self.up_proj(x), -7.0, 7.0)
        return self.down_proj(gate * up)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


@pytest.mark.parametrize("formula", [OtherMLP, ClampedMLP])
def test_another_formula_is_left_alone(formula: type[OtherMLP]) -> None:
    block = Block(formula())
    assert use_fast_swiglu(block) == 0
    assert type(block.mlp) is formula


def test_without_a_compiler_mlx_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert use_fast_swiglu(make_model(QWEN3)) == 0
    assert use_fast_rope(make_model(QWEN3)) == 0
    assert kernels.exp_minus(mx.array([0.5]), mx.array([1.0])).item() == pytest.approx(
        np.exp(-0.5), rel=1e-6
    )


FORMATS = [(2, 64), (3, 64), (4, 32), (4, 64), (4, 128), (6, 64), (8, 64)]


def layers(
    bits: int = 4, group_size: int = 64, *, bias: bool = False, dtype: mx.Dtype = mx.float32
) -> tuple:
    """MLX's layer and ours over the same arrays, and the weights that they stand for, in
    float64."""
    mx.random.seed(bits)
    linear = nn.Linear(256, 96, bias=bias)
    linear.set_dtype(dtype)
    theirs = nn.QuantizedLinear.from_linear(linear, group_size, bits)
    ours = copy.deepcopy(theirs)
    assert unpacking.use_unpacking(nn.Sequential(ours)) == 1
    scales, biases = theirs.scales.astype(mx.float32), theirs.biases.astype(mx.float32)
    weights = mx.dequantize(theirs.weight, scales, biases, group_size, bits)
    return theirs, ours, np.array(weights, np.float64)


@needs_cpu
@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("shape", [(40, 256), (5, 8, 256)])
def test_products_and_gradients_are_those_of_the_weights(
    bits: int, group_size: int, shape: tuple[int, ...]
) -> None:
    _, ours, weights = layers(bits, group_size)
    x, slope = mx.random.normal(shape), mx.random.normal((*shape[:-1], 96))
    (y,), (gradient,) = mx.vjp(ours, [x], [slope])
    np.testing.assert_allclose(y, np.array(x, np.float64) @ weights.T, atol=2e-5)
    np.testing.assert_allclose(gradient, np.array(slope, np.float64) @ weights, atol=2e-5)


@needs_cpu
def test_like_mlx_with_a_bias_and_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, _ = layers(bias=True)
    x = mx.random.normal((40, 256))
    np.testing.assert_allclose(ours(x), theirs(x), atol=1e-5)
    monkeypatch.setattr(unpacking, "UNPACKED", 256 * 40)  # 96 outputs in three slices
    (y,), (gradient,) = mx.vjp(ours, [x], [mx.ones((40, 96))])
    (expected,), (slope,) = mx.vjp(theirs, [x], [mx.ones((40, 96))])
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-5)


@needs_cpu
def test_few_rows_are_mlx_own_to_the_bit() -> None:
    theirs, ours, _ = layers()
    x = mx.random.normal((1, unpacking.FEWEST_ROWS - 1, 256))
    assert mx.array_equal(ours(x), theirs(x))


@needs_cpu
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_computed_in_float32(dtype: mx.Dtype) -> None:
    _, ours, weights = layers(dtype=dtype)
    x = mx.random.normal((40, 256)).astype(dtype)
    y = ours(x)
    assert y.dtype == dtype
    exact = np.array(x.astype(mx.float32), np.float64) @ weights.T
    np.testing.assert_allclose(np.array(y.astype(mx.float32)), exact, rtol=1e-2, atol=1e-2)


@needs_cpu
@pytest.mark.parametrize(("bits", "bias"), [(4, True), (8, False), (3, True)])
@pytest.mark.parametrize("ordered", [False, True])
def test_experts_and_their_gradients_are_those_of_the_weights(
    bits: int, bias: bool, ordered: bool
) -> None:
    mx.random.seed(bits)
    theirs = QuantizedSwitchLinear(128, 24, 6, bias=bias, bits=bits)
    ours = copy.deepcopy(theirs)
    assert unpacking.use_unpacking(nn.Sequential(ours)) == 1
    assert type(ours) is unpacking.UnpackingSwitchLinear and unpacking.unpacks(ours)
    indices = mx.random.randint(0, 6, (5, 4, 2))
    x = mx.random.normal((5, 4, 1, 1, 128))  # every token has two experts
    if ordered:
        indices = mx.sort(indices.flatten())
        x = mx.random.normal((40, 1, 128))
    slope = mx.random.normal((*indices.shape, 1, 24))
    (y,), (gradient,) = mx.vjp(lambda x: ours(x, indices, ordered), [x], [slope])
    weights = np.array(
        mx.dequantize(theirs.weight, theirs.scales, theirs.biases, 64, bits), np.float64
    )[np.array(indices)]  # [..., out, in]
    exact = np.array(x, np.float64) @ np.swapaxes(weights, -1, -2)
    if bias:
        exact = exact + np.array(theirs.bias)[np.array(indices)][..., None, :]
    np.testing.assert_allclose(y, exact, atol=2e-5)
    towards = np.array(slope, np.float64) @ weights
    if not ordered:
        towards = towards.sum(axis=2, keepdims=True)  # of the token's experts
    np.testing.assert_allclose(gradient, towards, atol=2e-5)


@pytest.mark.parametrize("ordered", [False, True])
def test_mlx_has_the_gradient_of_quantised_experts(ordered: bool) -> None:
    """`gather_qmm`, which computes on a GPU: on whatever device the tests run on."""
    mx.random.seed(0)
    layer = QuantizedSwitchLinear(128, 24, 6, bias=False, bits=4)
    indices = mx.random.randint(0, 6, (40,))
    indices = mx.sort(indices) if ordered else indices
    x, slope = mx.random.normal((40, 1, 128)), mx.random.normal((40, 1, 24))
    (y,), (gradient,) = mx.vjp(lambda x: layer(x, indices, sorted_indices=ordered), [x], [slope])
    whole = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 4)
    weights = np.array(whole, np.float64)[np.array(indices)]
    np.testing.assert_allclose(
        y, np.array(x, np.float64) @ np.swapaxes(weights, -1, -2), rtol=1e-2, atol=1e-3
    )
    np.testing.assert_allclose(
        gradient, np.array(slope, np.float64) @ weights, rtol=1e-2, atol=1e-3
    )


@needs_cpu
def test_few_products_of_experts_and_large_ones_are_mlx_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = QuantizedSwitchLinear(128, 24, 6, bias=False)
    ours = copy.deepcopy(theirs)
    unpacking.use_unpacking(nn.Sequential(ours))
    x, few, many = mx.random.normal((5, 1, 128)), mx.arange(5), mx.repeat(mx.arange(5), 8)
    assert mx.array_equal(ours(x, few), theirs(x, few))
    rows = mx.repeat(x, 8, axis=0)
    assert ours(rows.astype(mx.bfloat16), many).dtype == mx.bfloat16
    monkeypatch.setattr(unpacking, "UNPACKED_EXPERTS", 6 * 24 * 128 - 1)
    assert mx.array_equal(ours(rows, many), theirs(rows, many))


@needs_cpu
def test_a_tied_head() -> None:
    embedding = nn.QuantizedEmbedding(96, 256)
    ours = copy.deepcopy(embedding)
    assert unpacking.use_unpacking(nn.Sequential(ours)) == 1
    x = mx.random.normal((40, 256))
    np.testing.assert_allclose(ours.as_linear(x), embedding.as_linear(x), atol=1e-4)
    tokens = mx.array([[3, 95]])
    assert mx.array_equal(ours(tokens), embedding(tokens))


@needs_cpu
def test_other_formats_stay_and_names_and_checks_hold() -> None:
    four_bits = nn.QuantizedLinear(64, 64, mode="mxfp4")
    assert unpacking.use_unpacking(nn.Sequential(four_bits)) == 0
    model = nn.Sequential(nn.QuantizedLinear(64, 64), nn.Linear(64, 64))
    names = [name for name, _ in nn.utils.tree_flatten(model.parameters())]
    assert unpacking.use_unpacking(model) == 1 and unpacking.use_unpacking(model) == 0
    assert [name for name, _ in nn.utils.tree_flatten(model.parameters())] == names
    assert len(linear_layers(model)) == 2 and isinstance(model.layers[0], nn.QuantizedLinear)
    assert "lora" not in names and not nn.utils.tree_flatten(
        copy.deepcopy(model).layers[0].trainable_parameters()
    )


@needs_cpu
def test_no_unpacked_weights_wait_for_the_backward_pass() -> None:
    """24 layers of 512 × 512: 1 MiB each when unpacked. Plainly differentiated all of them are
    there at once."""
    model = nn.Sequential(*[nn.QuantizedLinear(512, 512, bias=False) for _ in range(24)])
    unpacking.use_unpacking(model)
    x = mx.random.normal((16, 512))
    mx.eval(model.parameters(), x)

    def peak(forward: object) -> int:
        mx.synchronize()
        before = active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda v: forward(v).sum())(x))
        return mx.get_peak_memory() - before

    def plainly(v: mx.array) -> mx.array:
        for layer in model.layers:
            weights = mx.dequantize(
                layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits
            )
            v = v @ weights.T
        return v

    peaks = [peak(plainly) for _ in range(3)]
    assert max(peaks) > 24 * 2**20  # what threads of other tests free meanwhile makes one smaller
    assert peak(model) < 10 * 2**20
