"""Zeros where there cannot be any."""

import mlx.core as mx
import pytest

from mlx_parallm.errors import DeviceFaultError
from mlx_parallm.models.sums import evaluated, has_signal
from mlx_parallm.rl_training.step.optimizer import OptimizerOptions, make_groups
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from mlx_parallm.weights import WeightsProof


@pytest.fixture(autouse=True)
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, GPU_LIKE)


def test_an_array_of_zeros_has_no_signal() -> None:
    arrays = [mx.zeros((3, 4)), mx.array([0.0, 1e-30]), mx.zeros((0, 2)), mx.array([0, 7])]
    assert has_signal(arrays).tolist() == [False, True, True, True]
    assert has_signal([]).tolist() == []


def test_zeros_that_come_once_are_a_fault_and_those_that_stay_are_not() -> None:
    given = iter([mx.zeros(3), mx.ones(3)])
    with pytest.raises(DeviceFaultError, match="a copy is zeros alone"):
        evaluated(lambda: [next(given)], "a copy")
    assert evaluated(lambda: [mx.zeros(3)], "a copy")[0].tolist() == [0, 0, 0]


def test_nothing_is_computed_again_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE)
    given = iter([mx.zeros(3), mx.ones(3)])
    assert evaluated(lambda: [next(given)], "a copy")[0].tolist() == [0, 0, 0]
    assert next(given).tolist() == [1, 1, 1]


def test_weights_that_become_zeros_are_computed_again() -> None:
    proof = WeightsProof()
    a, b = mx.random.normal((64, 64), key=mx.random.key(1)), mx.zeros((64, 8))
    proof.note(proof.check({"a": a, "b": b}, {}, dict))
    few = mx.where(mx.arange(64 * 64).reshape(64, 64) < 16, 0.0, a)
    assert proof.check({"a": few, "b": b + 1}, {"a": a, "b": b}, dict) == {"a": 16, "b": 0}
    half = mx.where(mx.arange(64)[:, None] < 32, 0.0, a)
    for wrong in (mx.zeros_like(a), half):
        for each in (proof, WeightsProof()):
            with pytest.raises(DeviceFaultError, match="a has"):
                each.check({"a": wrong}, {"a": a}, lambda: {"a": a})
        assert proof.check({"a": wrong}, {"a": a}, lambda wrong=wrong: {"a": wrong})["a"] > 2000
        assert proof.check({"a": wrong}, {"a": a}, None)["a"] > 2000, "nothing to compare with"


@pytest.mark.parametrize("kind", ["lion", "lion_8bit"])
def test_steps_of_one_length_may_lead_back_to_zero(kind: str) -> None:
    options = OptimizerOptions(kind, 1e-5, (0.9, 0.99), 1e-8, 0, False, 0, 1, 1, None, 10)
    (group,) = make_groups(["layer.lora_b"], [mx.zeros((256, 64))], options)
    proof, zeros = WeightsProof(), list[int]()
    for step in range(3):
        before, gradient = group.arrays[0], mx.random.normal((256, 64), key=mx.random.key(step))
        group.apply(group.square_sum([gradient])[1], 1e-5, None)
        counts = proof.check({"b": group.arrays[0]}, {"b": before}, lambda: {"b": group.arrays[0]})
        proof.note(counts)
        zeros.append(counts["b"])
    assert zeros[0] < 100 < zeros[1]


def test_masters_that_lose_a_part_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = OptimizerOptions("adamw", 1e-5, (0.9, 0.99), 1e-8, 0, False, 0, 1, 1, None, 10)
    (group,) = make_groups(["layer.weight"], [mx.ones((64, 64))], options)
    real, seen = mx.eval, list[int]()

    def lossy(results: object) -> None:
        real(results)
        if isinstance(results, tuple) and not seen:
            seen.append(1)
            for array in results[0].values():
                array[:2048] = 0

    monkeypatch.setattr(mx, "eval", lossy)
    with pytest.raises(DeviceFaultError, match="bundle0 has new zeros"):
        group.apply(group.square_sum([mx.ones((64, 64))])[1], 1e-5, None)
    group.apply(group.square_sum([mx.ones((64, 64))])[1], 1e-5, None)
