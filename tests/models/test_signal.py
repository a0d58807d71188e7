"""Zeros where there cannot be any."""

import mlx.core as mx
import pytest

from mlx_parallm.errors import DeviceFaultError
from mlx_parallm.models.sums import evaluated, has_signal
from mlx_parallm.weights import WeightsProof


def test_an_array_of_zeros_has_no_signal() -> None:
    arrays = [mx.zeros((3, 4)), mx.array([0.0, 1e-30]), mx.zeros((0, 2)), mx.array([0, 7])]
    assert has_signal(arrays).tolist() == [False, True, True, True]
    assert has_signal([]).tolist() == []


def test_zeros_that_come_once_are_a_fault_and_those_that_stay_are_not() -> None:
    given = iter([mx.zeros(3), mx.ones(3)])
    with pytest.raises(DeviceFaultError, match="a copy is zeros alone"):
        evaluated(lambda: [next(given)], "a copy")
    assert evaluated(lambda: [mx.zeros(3)], "a copy")[0].tolist() == [0, 0, 0]


def test_weights_may_not_become_zeros_but_may_begin_as_them() -> None:
    proof = WeightsProof()
    a, b = mx.random.normal((64, 64), key=mx.random.key(1)), mx.zeros((64, 8))
    proof.note(proof.check({"a": a, "b": b}, {}))
    few = mx.where(mx.arange(64 * 64).reshape(64, 64) < 16, 0.0, a)
    assert proof.check({"a": few, "b": b + 1}, {"a": a, "b": b}) == {"a": 16, "b": 0}
    half = mx.where(mx.arange(64)[:, None] < 32, 0.0, a)
    for wrong in (mx.zeros_like(a), half):
        with pytest.raises(DeviceFaultError, match="a has"):
            proof.check({"a": wrong, "b": b}, {"a": a, "b": b})
    with pytest.raises(DeviceFaultError, match="a has"):
        WeightsProof().check({"a": half}, {"a": a})
