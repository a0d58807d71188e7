"""AdamW against numpy, clipping, schedules, state."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import CheckpointError
from mlx_parallm.rl_training.step import optimizer as optimizer_module
from mlx_parallm.rl_training.step.optimizer import PolicyOptimizer
from mlx_parallm.rl_training.step.trainer import learning_rate_at
from tests.rl_training.making import make_config, make_policy


def random_gradients(policy: object, rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.normal(size=array.shape).astype(np.float32) * 0.1 for array in policy.slots.read()]


def numpy_adamw(
    parameters: list[np.ndarray], steps: list[list[np.ndarray]], rates: list[float], *, decay: float, clip: float
) -> list[np.ndarray]:
    """Loshchilov & Hutter 2019 with bias correction, beta (0.9, 0.95), eps 1e-8, in float64."""
    values = [p.astype(np.float64) for p in parameters]
    m, v = [np.zeros_like(p) for p in values], [np.zeros_like(p) for p in values]
    for t, (gradients, rate) in enumerate(zip(steps, rates, strict=True), 1):
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))
        factor = min(1.0, clip / norm)
        for i, gradient in enumerate(gradients):
            g = gradient * factor
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            step = (m[i] / (1 - 0.9**t)) / (np.sqrt(v[i] / (1 - 0.95**t)) + 1e-8)
            values[i] = values[i] * (1 - rate * decay) - rate * step
    return values


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("bundle", [1, 1 << 20])
def test_adamw_equals_numpys(lora: bool, bundle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "BUNDLE_ELEMENTS", bundle)
    policy = make_policy(make_config(lora=lora))
    before = [np.array(array) for array in policy.slots.read()]
    config = make_config(lora=lora, weight_decay=0.1, max_grad_norm=2.0)
    optimizer = PolicyOptimizer(policy.slots, config)
    rng = np.random.default_rng(0)
    steps, rates = [random_gradients(policy, rng) for _ in range(5)], [1e-2, 1e-2, 5e-3, 1e-3, 1e-3]
    for gradients, rate in zip(steps, rates, strict=True):
        update = optimizer.update([mx.array(g) for g in gradients], rate)
        assert update.grad_norm == pytest.approx(math.sqrt(sum((g**2).sum() for g in gradients)), rel=1e-4)
    assert update.grad_norm > 2.0
    assert optimizer.updates == 5
    expected = numpy_adamw(before, steps, rates, decay=0.1, clip=2.0)
    for array, value in zip(policy.slots.read(), expected, strict=True):
        np.testing.assert_allclose(array, value, atol=1e-5)


def test_an_update_binds_new_arrays_and_leaves_the_old_ones_alone() -> None:
    """The serving tree may hold the old ones."""
    policy = make_policy(make_config(lora=False))
    optimizer = PolicyOptimizer(policy.slots, make_config(lora=False))
    before = policy.slots.read()
    copies = [np.array(array) for array in before]
    optimizer.update([mx.ones(array.shape) for array in before], 0.1)
    for old, copy, new in zip(before, copies, policy.slots.read(), strict=True):
        np.testing.assert_array_equal(old, copy)
        assert not np.array_equal(np.array(new), copy)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    policy = make_policy(make_config())
    optimizer = PolicyOptimizer(policy.slots, make_config())
    gradients = [mx.ones(array.shape) for array in policy.slots.read()]
    optimizer.update(gradients, 0.1)
    before = [np.array(array) for array in policy.slots.read()]
    gradients[1] = mx.full(gradients[1].shape, math.inf)
    assert not optimizer.update(gradients, 0.1).applied
    assert optimizer.updates == 1
    for array, copy in zip(policy.slots.read(), before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_state_goes_on_where_it_was(dtype: mx.Dtype, tmp_path) -> None:
    config = make_config(lora=False)
    rng = np.random.default_rng(0)
    first_policy = make_policy(config, dtype=dtype)
    first = PolicyOptimizer(first_policy.slots, config)
    steps = [[mx.array(g) for g in random_gradients(first_policy, rng)] for _ in range(4)]
    for gradients in steps[:2]:
        first.update(gradients, 1e-3)
    mx.save_safetensors(str(tmp_path / "o.safetensors"), first.state())
    second_policy = make_policy(config, dtype=dtype)
    second_policy.slots.write(first_policy.slots.read())
    second = PolicyOptimizer(second_policy.slots, config)
    second.restore(mx.load(str(tmp_path / "o.safetensors")))
    for gradients in steps[2:]:
        first.update(gradients, 1e-3)
        second.update(gradients, 1e-3)
    assert second.updates == 4
    for a, b in zip(first.state().items(), second.state().items(), strict=True):
        assert a[0] == b[0]
        np.testing.assert_array_equal(np.array(a[1]), np.array(b[1]))
    for a, b in zip(first_policy.slots.read(), second_policy.slots.read(), strict=True):
        assert mx.array_equal(a, b).item()


def test_state_of_another_shape_is_refused() -> None:
    other = PolicyOptimizer(make_policy(make_config(rank=2)).slots, make_config(rank=2))
    optimizer = PolicyOptimizer(make_policy(make_config()).slots, make_config())
    with pytest.raises(CheckpointError, match=r"lora_a\.m: expected"):
        optimizer.restore(other.state())


def rates(**values: object) -> list[float]:
    config = make_config(learning_rate=1.0, total_steps=9, **values)
    return [round(learning_rate_at(step, config), 6) for step in range(1, 10)]


def test_schedules_count_steps() -> None:
    assert rates() == [1.0] * 9
    assert rates(warmup_steps=4) == [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1]
    assert rates(lr_schedule="linear", lr_final=0.1) == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    cosine = rates(lr_schedule="cosine", warmup_steps=5)
    assert cosine == [0.166667, 0.333333, 0.5, 0.666667, 0.833333, 1, 0.853553, 0.5, 0.146447]
