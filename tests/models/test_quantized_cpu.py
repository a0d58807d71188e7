"""Unpacked products = MLX's own, forward and backward, in every width; few rows stay MLX's; memory stays small."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models import cpu_kernels
from mlx_parallm.models.cpu_kernels import FEWEST_ROWS, on_cpu, use_unpacking
from mlx_parallm.models.lora import linear_layers

pytestmark = pytest.mark.skipif(not on_cpu(), reason="a CPU's business")
FORMATS = [(2, 64), (3, 64), (4, 32), (4, 64), (4, 128), (6, 64), (8, 64)]


def layers(bits: int = 4, group_size: int = 64, *, bias: bool = False, dtype: mx.Dtype = mx.float32) -> tuple:
    """MLX's layer and ours over the same arrays, and the weights that they stand for, in float64."""
    mx.random.seed(bits)
    linear = nn.Linear(256, 96, bias=bias)
    linear.set_dtype(dtype)
    theirs = nn.QuantizedLinear.from_linear(linear, group_size, bits)
    ours = copy.deepcopy(theirs)
    assert use_unpacking(nn.Sequential(ours)) == 1
    scales, biases = theirs.scales.astype(mx.float32), theirs.biases.astype(mx.float32)
    weights = mx.dequantize(theirs.weight, scales, biases, group_size, bits)
    return theirs, ours, np.array(weights, np.float64)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("shape", [(40, 256), (5, 8, 256)])
def test_products_and_gradients_are_those_of_the_weights(bits: int, group_size: int, shape: tuple[int, ...]) -> None:
    _, ours, weights = layers(bits, group_size)
    x, slope = mx.random.normal(shape), mx.random.normal((*shape[:-1], 96))
    (y,), (gradient,) = mx.vjp(ours, [x], [slope])
    np.testing.assert_allclose(y, np.array(x, np.float64) @ weights.T, atol=2e-5)
    np.testing.assert_allclose(gradient, np.array(slope, np.float64) @ weights, atol=2e-5)


def test_like_mlx_with_a_bias_and_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, _ = layers(bias=True)
    x = mx.random.normal((40, 256))
    np.testing.assert_allclose(ours(x), theirs(x), atol=1e-5)
    monkeypatch.setattr(cpu_kernels, "UNPACKED", 256 * 40)  # 96 outputs in three slices
    (y,), (gradient,) = mx.vjp(ours, [x], [mx.ones((40, 96))])
    (expected,), (slope,) = mx.vjp(theirs, [x], [mx.ones((40, 96))])
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-5)


def test_few_rows_are_mlx_own_to_the_bit() -> None:
    theirs, ours, _ = layers()
    x = mx.random.normal((1, FEWEST_ROWS - 1, 256))
    assert mx.array_equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_computed_in_float32(dtype: mx.Dtype) -> None:
    _, ours, weights = layers(dtype=dtype)
    x = mx.random.normal((40, 256)).astype(dtype)
    y = ours(x)
    assert y.dtype == dtype
    exact = np.array(x.astype(mx.float32), np.float64) @ weights.T
    np.testing.assert_allclose(np.array(y.astype(mx.float32)), exact, rtol=1e-2, atol=1e-2)


def test_a_tied_head() -> None:
    embedding = nn.QuantizedEmbedding(96, 256)
    ours = copy.deepcopy(embedding)
    assert use_unpacking(nn.Sequential(ours)) == 1
    x = mx.random.normal((40, 256))
    np.testing.assert_allclose(ours.as_linear(x), embedding.as_linear(x), atol=1e-4)
    tokens = mx.array([[3, 95]])
    assert mx.array_equal(ours(tokens), embedding(tokens))


def test_other_formats_stay_and_names_and_checks_hold() -> None:
    four_bits = nn.QuantizedLinear(64, 64, mode="mxfp4")
    assert use_unpacking(nn.Sequential(four_bits)) == 0
    model = nn.Sequential(nn.QuantizedLinear(64, 64), nn.Linear(64, 64))
    names = [name for name, _ in nn.utils.tree_flatten(model.parameters())]
    assert use_unpacking(model) == 1 and use_unpacking(model) == 0
    assert [name for name, _ in nn.utils.tree_flatten(model.parameters())] == names
    assert len(linear_layers(model)) == 2 and isinstance(model.layers[0], nn.QuantizedLinear)
    assert "lora" not in names and not nn.utils.tree_flatten(copy.deepcopy(model).layers[0].trainable_parameters())


def test_no_unpacked_weights_wait_for_the_backward_pass() -> None:
    """24 layers of 512 × 512: 1 MiB each when unpacked. Plainly differentiated all of them are there at once."""
    model = nn.Sequential(*[nn.QuantizedLinear(512, 512, bias=False) for _ in range(24)])
    use_unpacking(model)
    x = mx.random.normal((16, 512))
    mx.eval(model.parameters(), x)

    def peak(forward: object) -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda v: forward(v).sum())(x))
        return mx.get_peak_memory() - before

    def plainly(v: mx.array) -> mx.array:
        for layer in model.layers:
            weights = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
            v = v @ weights.T
        return v

    assert peak(plainly) > 24 * 2**20
    assert peak(model) < 10 * 2**20
