"""The CPU's own exp and SwiGLU against float64, and whom they replace."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models import fast_math
from mlx_parallm.models.lora import linear_layers
from tests.tiny_models import QWEN3, make_model

needs_compiler = pytest.mark.skipif(not fast_math.available(), reason="needs MLX on the CPU and a C++ compiler")


@pytest.mark.parametrize(("fused", "error"), [(True, 2e-7), (False, 5e-6)], ids=["polynomial", "MLX's own"])
def test_exp_is_as_right_as_its_docstring_says(monkeypatch: pytest.MonkeyPatch, fused: bool, error: float) -> None:
    if fused and not fast_math.available():
        pytest.skip("needs MLX on the CPU and a C++ compiler")
    monkeypatch.setattr(fast_math, "available", lambda: fused)
    x = mx.concatenate([mx.linspace(-86.9, 0.0, 50_001), mx.array([-88.0, -1e30, -float("inf"), float("nan")])])
    found = np.array(fast_math.exp_minus(x[None] + 3.0, mx.array([[3.0]])))[0].astype(np.float64)
    exact = np.exp(np.array(x + 3.0 - 3.0, dtype=np.float64))
    assert np.abs(found[:-4] / exact[:-4] - 1).max() < error
    assert found[-4:-1].max() < 1e-37 and np.isnan(found[-1])


def test_swiglu_is_right_to_1e_6() -> None:
    gate, up = mx.linspace(-30.0, 30.0, 60_001), mx.full((60_001,), 1.5)
    x = np.array(gate, dtype=np.float64)
    error = np.array(fast_math.swiglu(gate, up), dtype=np.float64) - 1.5 * x / (1 + np.exp(-x))
    assert (np.abs(error) / np.maximum(np.abs(x), 1)).max() < 1e-6
    assert np.isnan(fast_math.swiglu(mx.array([float("nan")]), mx.array([1.0])).item())


@needs_compiler
def test_a_swiglu_model_is_served_by_the_fast_one() -> None:
    plain = make_model(QWEN3)
    model = copy.deepcopy(plain)
    tokens, projection = mx.arange(24)[None], model.layers[0].mlp.up_proj
    assert fast_math.use_fast_swiglu(model) == QWEN3["num_hidden_layers"]
    assert set(linear_layers(model)) == set(linear_layers(plain))
    assert model.layers[0].mlp.up_proj is projection  # the arrays stay shared with whoever holds them
    assert type(plain.layers[0].mlp) is not fast_math.FastMLP
    assert mx.abs(model(tokens) - plain(tokens)).max() < 1e-5


class OtherMLP(nn.Module):
    """Three projections of the same names, another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

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
    assert fast_math.use_fast_swiglu(block) == 0
    assert type(block.mlp) is formula


def test_without_a_compiler_mlx_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_math, "available", lambda: False)
    assert fast_math.use_fast_swiglu(make_model(QWEN3)) == 0
    assert fast_math.exp_minus(mx.array([0.5]), mx.array([1.0])).item() == pytest.approx(np.exp(-0.5), rel=1e-6)
