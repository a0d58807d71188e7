"""The probes of MLX's own operations: they pass here, and name what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.cli import contracts, probes


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command tries them, at fewer numbers of rows."""
    assert {1, 2, 8, 16, 32, 64} == set(probes.ROWS)
    assert all(probe.rows == probes.ROWS or probe.gpu_only for probe in probes.PROBES)
    few = tuple(replace(probe, rows=(1, 8)) for probe in probes.PROBES)
    monkeypatch.setattr(probes, "PROBES", few)


def test_this_machine_computes_what_it_should() -> None:
    [result] = contracts.operations()
    assert result.passed is True and "12 operations" in result.measured


Operation = Callable[..., mx.array]


def zeros(of: Operation) -> Operation:
    return lambda *args, **kwargs: of(*args, **kwargs) * 0


def first_row_right(of: Operation) -> Operation:
    def wrong(*args: Any, **kwargs: Any) -> mx.array:
        found = of(*args, **kwargs)
        return mx.where(mx.arange(found.shape[0]).reshape(-1, *[1] * (found.ndim - 1)), 0, found)

    return wrong


def right_without_gradient(of: Operation) -> Operation:
    return lambda *args, **kwargs: mx.stop_gradient(of(*args, **kwargs))


def not_transposed(of: Operation) -> Operation:
    def wrong(*args: Any, **kwargs: Any) -> mx.array:
        return of(*args, **kwargs) * (1.0 if kwargs["transpose"] else 0.5)

    return wrong


def raises(of: Operation) -> Operation:
    def wrong(*args: Any, **kwargs: Any) -> mx.array:
        raise RuntimeError("Unable to load kernel steel_gather_mm")

    return wrong


@pytest.mark.parametrize(
    ("place", "name", "wrong", "named", "where"),
    [
        (mx, "matmul", zeros, "matmul", "8 rows, float32: off by 1"),
        (mx, "quantized_matmul", not_transposed, "transpose=False", "8 rows, float16: off"),
        (mx, "quantized_matmul", right_without_gradient, "quantized", "gradient of the input"),
        (mx.fast, "scaled_dot_product_attention", right_without_gradient, "scaled", "the keys"),
        (mx.fast, "rope", first_row_right, "rope at offsets", "8 rows, bfloat16"),
        (mx, "gather_mm", raises, "gather_mm", "1 rows, float32: Unable to load kernel"),
        (mx, "gather_qmm", not_transposed, "gather_qmm(transpose=False)", "8 rows"),
        (mx, "argmax", zeros, "argmax over 262,144", "8 rows, float32"),
        (mx.fast, "layer_norm", right_without_gradient, "layer_norm", "gradient of the bias"),
        (mx, "conv1d", zeros, "conv2d, conv1d", "8 rows"),
    ],
)
def test_a_wrong_operation_is_named(
    place: Any,
    name: str,
    wrong: Callable[[Operation], Operation],
    named: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    affected = tuple(probe for probe in probes.PROBES if named in probe.name)
    monkeypatch.setattr(probes, "PROBES", affected)
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    found = contracts.operations()
    assert found and all(result.passed is False for result in found)
    assert named in found[0].contract
    assert any(where in failure for r in probes.results() for failure in r.failures)
    if wrong is first_row_right:
        assert not any("1 rows" in failure for r in probes.results() for failure in r.failures)
