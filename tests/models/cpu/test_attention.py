"""Attention in blocks against float64, and its gradient against MLX's; which calls it takes."""

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models import attention as routing
from mlx_parallm.models.attention import route_attention
from mlx_parallm.models.attention_parts import NOTHING, attend_partly
from mlx_parallm.models.cpu import attention, kernels
from mlx_parallm.models.mlx_lm_api import make_prompt_cache, mlx_lm_attention
from mlx_parallm.system.blas import BlasStatus
from tests.active_memory import active_memory
from tests.rl_training.making import make_config, make_trainer
from tests.tiny_models import QWEN3, make_model

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason="needs MLX on the CPU and a C++ compiler"
)

CASES = {  # B, heads, H, L, T, mask
    "causal": (2, 4, 2, 130, 130, "causal"),
    "causal, a prefix before it": (1, 4, 4, 40, 700, "causal"),
    "causal, blocks that see a long and an own part": (2, 4, 1, 400, 400, "causal"),
    "one query more than a block": (1, 2, 2, 65, 65, "causal"),
    "by rows": (3, 4, 2, 70, 90, "rows"),
    "of all rows": (2, 4, 2, 70, 90, "all"),
    "none": (2, 6, 2, 50, 60, None),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[list[mx.array], mx.array | str | None]:
    batch, heads, kv_heads, count, positions, mask = CASES[request.param]
    mx.random.seed(1)
    queries, keys = (
        mx.random.normal((batch, heads, count, 16)),
        mx.random.normal((batch, kv_heads, positions, 16)),
    )
    arrays = [3 * queries, keys, mx.random.normal((batch, kv_heads, positions, 24))]
    if mask in ("rows", "all"):
        shape = (batch, 1, count, positions) if mask == "rows" else (count, positions)
        return arrays, (mx.random.uniform(shape=shape) > 0.5) | (mx.arange(positions) == 7)
    return arrays, mask


def in_float64(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
) -> np.ndarray:
    q, k, v = (np.array(x, dtype=np.float64) for x in (queries, keys, values))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = 0.3 * np.einsum("bhld,bhtd->bhlt", q, k)
    if isinstance(mask, str):
        scores[..., ~np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)] = -np.inf
    elif mask is not None:
        scores = np.where(np.array(mask), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhlt,bhtd->bhld", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("block", [attention.BLOCK, 1 << 14, 1], ids=["large", "small", "least"])
def test_it_is_softmax_attention(
    case: tuple[list[mx.array], mx.array | str | None], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    arrays, mask = case
    found = np.array(attention.attention(*arrays, 0.3, mask))
    np.testing.assert_allclose(found, in_float64(*arrays, mask), atol=5e-6)


@pytest.mark.parametrize("of", ["each row", "all rows", None])
def test_a_query_a_row_is_softmax_attention(of: str | None) -> None:
    mx.random.seed(2)
    queries, keys = 9 * mx.random.normal((5, 6, 1, 16)), mx.random.normal((5, 2, 90, 16))
    values = mx.random.normal((5, 2, 90, 24))
    shape = {"each row": (5, 1, 1, 90), "all rows": (1, 1, 1, 90), None: (0,)}[of]
    seen = None if of is None else (mx.random.uniform(shape=shape) > 0.5) | (mx.arange(90) == 7)
    bias = None if seen is None else mx.where(seen, 0.0, NOTHING)
    found = np.array(attention.attention_of_rows(queries, keys, values, 0.3, bias))
    np.testing.assert_allclose(found, in_float64(queries, keys, values, seen), atol=5e-6)


@pytest.mark.parametrize("block", [attention.BLOCK, 1 << 14], ids=["large", "small"])
def test_its_gradient_is_that_of_mlx(
    case: tuple[list[mx.array], mx.array | str | None], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    arrays, mask = case

    def mlx_own(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)

    def slopes(function: Callable[..., mx.array]) -> list[mx.array]:
        slope = mx.random.normal(mlx_own(*arrays).shape, key=mx.random.key(2))
        return mx.vjp(function, arrays, [slope])[1]

    in_blocks = slopes(lambda q, k, v: attention.attention(q, k, v, 0.3, mask))
    for found, expected in zip(in_blocks, slopes(mlx_own), strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-6 * float(mx.abs(expected).max()))


def test_neither_way_holds_the_scores_of_all_heads() -> None:
    arrays = [mx.random.normal((1, 8, 1024, 16)) for _ in range(3)]
    mx.eval(arrays)
    scores = 8 * 1024 * 1024 * 4
    before = active_memory()
    mx.reset_peak_memory()
    mx.eval(attention.attention(*arrays, 0.3, "causal"))
    forward = mx.get_peak_memory() - before
    _, slopes = mx.vjp(
        lambda q, k, v: attention.attention(q, k, v, 0.3, "causal"), arrays, [arrays[0]]
    )
    mx.reset_peak_memory()
    mx.eval(slopes)
    assert forward < scores / 2
    assert mx.get_peak_memory() - before < scores / 1.5  # MLX's own need more than 1 and 3 of these


def test_it_takes_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    many, one, few = (mx.zeros((1, 4, count, 8)) for count in (70, 1, 4))
    seen = mx.ones((1, 1, 70, 70), mx.bool_)
    for mask in (None, "causal", seen, seen[0, 0]):
        assert attention.takes(many, many, many, mask)
    assert not attention.takes(many, many, many, seen.astype(mx.float32))  # added to scores
    assert not attention.takes(many, many, many, mx.ones((1, 4, 70, 70), mx.bool_))  # by heads
    for queries in (one, few, many.astype(mx.bfloat16)):
        assert not attention.takes(queries, many, many, None)
    assert attention.takes_rows(32, 100) and attention.takes_rows(1, 4000)
    assert not attention.takes_rows(2, 100)
    monkeypatch.setattr(attention, "blas_status", lambda: BlasStatus("late"))
    assert not attention.takes(many, many, many, None) and not attention.takes_rows(32, 100)


def test_what_is_not_seen_weighs_nothing_and_a_query_that_sees_nothing_gets_zeros() -> None:
    arrays = [mx.random.normal((1, 2, 80, 8)) for _ in range(3)]
    seen = mx.tri(80, 80, -1, dtype=mx.bool_)  # the first query sees nothing
    # which nobody sees
    arrays[2] = mx.concatenate([arrays[2][:, :, :-1], mx.full((1, 2, 1, 8), 1e35)], axis=2)
    found = attention.attention(*arrays, 0.3, seen)
    _, slopes = mx.vjp(
        lambda q, k, v: attention.attention(q, k, v, 0.3, seen),
        arrays,
        [mx.ones((1, 2, 80, 8))],
    )
    assert mx.abs(found).max().item() < 10 and mx.abs(found[:, :, 0]).max().item() == 0
    assert (
        all(mx.isfinite(slope).all().item() for slope in slopes)
        and mx.abs(slopes[0][:, :, 0]).max().item() == 0
    )
    assert mx.abs(slopes[2][:, :, -1]).max().item() == 0


def test_a_models_prefill_goes_there_and_its_decode_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = make_model(QWEN3), mx.arange(80)[None] % 32
    assert route_attention(model)
    caches = make_prompt_cache(model)
    counts = []

    def counting(*arguments: object) -> mx.array:
        counts.append(1)
        return attention.attention(*arguments)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(routing, "attention", counting)
    found = [model(tokens, cache=caches), model(tokens[:, :1], cache=caches)]
    assert len(counts) == QWEN3["num_hidden_layers"]
    monkeypatch.setattr(routing, "takes", lambda *_: False)
    caches = make_prompt_cache(model)
    for ours, plain in zip(
        found, [model(tokens, cache=caches), model(tokens[:, :1], cache=caches)], strict=True
    ):
        np.testing.assert_allclose(ours, plain, atol=5e-5)


def test_a_trainers_model_goes_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(QWEN3)
    module = sys.modules[type(model.layers[0].self_attn).__module__]
    # as mlx-lm has it
    monkeypatch.setattr(module, "scaled_dot_product_attention", mlx_lm_attention)
    make_trainer(make_config())
    assert module.scaled_dot_product_attention is not mlx_lm_attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_heads_one_after_the_other_are_all_heads_at_once(
    heads: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five heads, of which so many stay in the cache."""
    rows, positions = 6, 70
    shapes = [(5, rows, 8), (5, 8, positions), (5, positions, 4)]
    arrays = [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]
    mask = mx.arange(positions) < mx.array([70, 3, 1, 69, 0, 12])[:, None] if masked else None
    wanted = attend_partly(*arrays, mask, 0.5)
    monkeypatch.setattr(attention, "BLOCK", heads * rows * positions)
    tiles: list[int] = []

    def counting(queries: mx.array, *others: Any) -> Any:
        tiles.append(len(queries))
        return attend_partly(queries, *others)

    monkeypatch.setattr(attention, "attend_partly", counting)
    found = attention.attend_by_heads(*arrays, mask, 0.5)
    assert tiles == {1: [1] * 5, 2: [2, 2, 1], 5: [5]}[heads]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
