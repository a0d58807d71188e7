"""Recurrences and convolutions over a forest of tokens against loops that hand each token the state
of its parent, in float64; which layers know forests."""

import importlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.recurrent import layers as recurrent_layers
from mlx_parallm.models.recurrent.chunks import gated_delta
from mlx_parallm.models.recurrent.tree import (
    TokenTree,
    convolve,
    over,
    parents_of,
    segments_of,
    tree_gated_delta,
    tree_selective_scan,
    tree_ssd,
)
from scripts.generate_model_table import small_model
from tests.models.recurrent.test_chunks import check, decays, gated_delta_loop, selective_loop, unit
from tests.models.recurrent.test_layout import model_of
from tests.models.test_tree_rows import check as check_rows
from tests.models.test_tree_rows import turns
from tests.rl_training.step.test_blockwise import with_full_weights, with_lora

DEPTHS = np.array([0, 1, 2, 3, 2, 1, 0, 1], np.int32)
"""Two trees: [0 [1 [2 3] [4]] [5]] and [6 7]."""


def forest(seed: int, count: int = 150) -> np.ndarray:
    """Depths of a random forest, with segments of one token and of some dozens."""
    numbers, depths = np.random.default_rng(seed), [0]
    while len(depths) < count:
        branches = numbers.random() < 0.06
        depths.append(int(numbers.integers(0, depths[-1] + 1)) if branches else depths[-1] + 1)
    return np.array(depths, np.int32)


def test_a_worked_forest() -> None:
    parents = parents_of(DEPTHS)
    assert parents.tolist() == [-1, 0, 1, 2, 1, 0, -1, 6]
    # 0 and 1 have two children each
    assert segments_of(parents).tolist() == [0, 1, 2, 4, 5, 6]
    tree = TokenTree(DEPTHS, 9)
    parent, grandparent = (array.tolist() for array in tree.ancestors(2))
    assert parent == [9, 0, 1, 2, 1, 0, 9, 6, 9]
    assert grandparent == [9, 9, 0, 1, 0, 9, 9, 9, 9]
    chunks = tree.chunks((2,))
    # roots, those with children first; then what is behind token 0; then what is behind token 1
    assert chunks.tokens.tolist() == [[0, 9], [6, 7], [1, 9], [5, 9], [2, 3], [4, 9]]
    assert [(level.count, level.with_children) for level in chunks.levels] == [
        (2, 1),
        (2, 1),
        (2, 0),
    ]
    roots, *below = chunks.levels
    assert roots.parents is None
    assert [np.array(level.parents).tolist() for level in below] == [[0, 0], [0, 0]]
    assert chunks.places[:8].tolist() == [0, 4, 8, 9, 10, 6, 2, 3]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [1, 4, 16])
def test_a_chunk_goes_on_where_its_parent_ends(seed: int, length: int) -> None:
    depths = forest(seed)
    parents, chunks = parents_of(depths), TokenTree(depths, 160).chunks((length,))
    tokens, places = np.array(chunks.tokens), np.array(chunks.places)
    assert tokens.reshape(-1)[places[:150]].tolist() == list(range(150))
    first, above = 0, np.zeros(0, int)
    for level in chunks.levels:
        rows = tokens[first : first + level.count]
        lasts = np.array([row[row < 160][-1] for row in rows])
        chosen = np.arange(len(above)) if level.parents is None else np.array(level.parents)
        expected = above[chosen] if first else np.full(level.count, -1)
        assert parents[rows[:, 0]].tolist() == expected.tolist()
        for row in rows:
            inside = row[row < 160]
            assert np.array_equal(parents[inside[1:]], inside[:-1])
        first, above = first + level.count, lasts[: level.with_children]
    assert first == len(tokens)


def by_parent(
    loop: Callable[..., Any], depths: np.ndarray, arrays: list[mx.array], state: Any
) -> Any:
    """Outputs [1, W, …] of a loop over one token at a time, from the state of its parent."""
    states, outputs = list[mx.array](), []
    for token, parent in enumerate(parents_of(depths).tolist()):
        here = [array[:, token : token + 1] for array in arrays]
        out, after = loop(*here, states[parent] if parent >= 0 else state)
        states.append(after)
        outputs.append(out)
    return mx.concatenate(outputs, axis=1)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_gated_delta_over_a_forest_is_the_loop(channels: bool, rows: bool) -> None:
    """With two heads a key; all tokens in one row, and each in its own."""
    depths, numbers = forest(3), np.random.default_rng(0)
    keys, values = (1, 150, 1, 8), (1, 150, 2, 4)
    inputs = [
        unit(numbers.normal(size=keys)),
        unit(numbers.normal(size=keys)),
        numbers.normal(size=values),
        decays(numbers, (1, 150, 2, 8) if channels else (1, 150, 2), 5.0),
        2 * numbers.random((1, 150, 2)),
    ]
    tree = TokenTree(depths, 150)

    def chunked(*arrays: mx.array) -> tuple[mx.array]:
        if not rows:
            return (tree_gated_delta(tree, *arrays),)
        return (tree_gated_delta(tree, *(array.swapaxes(0, 1) for array in arrays)).swapaxes(0, 1),)

    def loop(*arrays: mx.array) -> tuple[mx.array]:
        state = mx.zeros((1, 2, 4, 8), arrays[0].dtype)
        return (by_parent(gated_delta_loop, depths, list(arrays), state),)

    check(chunked, loop, inputs)


def ssd_loop(x: mx.array, log_decay: mx.array, b: mx.array, c: mx.array, state: mx.array) -> Any:
    """h ← e^g h + x ⊗ B; y = h C of one token: x [1, 1, H, Dh], B and C [1, 1, G, S]."""
    b, c = (mx.repeat(array[:, 0], x.shape[2] // b.shape[2], axis=1) for array in (b, c))
    state = mx.exp(log_decay[:, 0, :, None, None]) * state + x[:, 0, ..., None] * b[:, :, None]
    return (state * c[:, :, None]).sum(axis=-1)[:, None], state


@pytest.mark.parametrize("strongest", [0.1, 30.0])
def test_ssd_over_a_forest_is_the_loop(strongest: float) -> None:
    depths, numbers = forest(4), np.random.default_rng(0)
    inputs = [
        numbers.normal(size=(1, 150, 4, 3)),
        np.log(decays(numbers, (1, 150, 4), strongest)),
        numbers.normal(size=(1, 150, 2, 5)),
        numbers.normal(size=(1, 150, 2, 5)),
    ]
    tree = TokenTree(depths, 150)

    def chunked(*arrays: mx.array) -> tuple[mx.array]:
        return (tree_ssd(tree, *(array[0] for array in arrays))[None],)

    def loop(*arrays: mx.array) -> tuple[mx.array]:
        state = mx.zeros((1, 4, 3, 5), arrays[0].dtype)
        return (by_parent(ssd_loop, depths, list(arrays), state),)

    check(chunked, loop, inputs)


def test_a_selective_scan_over_a_forest_is_the_loop() -> None:
    depths, numbers = forest(5), np.random.default_rng(0)
    inputs = [
        numbers.normal(size=(1, 150, 6)),
        numbers.random((1, 150, 6)),
        -np.tile(np.arange(1.0, 5.0), (6, 1)),
        numbers.normal(size=(1, 150, 4)),
        numbers.normal(size=(1, 150, 4)),
    ]
    tree = TokenTree(depths, 150)

    def loop(x: mx.array, delta: mx.array, a: mx.array, b: mx.array, c: mx.array) -> Any:
        def one(x: mx.array, delta: mx.array, b: mx.array, c: mx.array, state: mx.array) -> Any:
            return selective_loop(x, delta, a, b, c, state)

        return (by_parent(one, depths, [x, delta, b, c], mx.zeros((1, 6, 4), x.dtype)),)

    check(lambda *arrays: (tree_selective_scan(tree, *arrays),), loop, inputs)


def test_a_convolution_sees_a_tokens_ancestors() -> None:
    """Weights 4, 2 and 1 for a token, its parent and the one above: of 10^token, worked by hand."""
    tree = TokenTree(DEPTHS, 8)
    x = 10.0 ** mx.arange(8, dtype=mx.float32)[:, None]
    out = convolve(tree, x, mx.array([1.0, 2.0, 4.0])[None, :, None], mx.array([0.5]))
    expected = [4, 42, 421, 4210, 40021, 400002, 4000000, 42000000]
    np.testing.assert_allclose(out[:, 0], np.array(expected) + 0.5, rtol=1e-6)


ARCHITECTURES = [
    *("qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid", "mamba2", "lfm2", "jamba"),
    *("nemotron_h", "falcon_h1", "deepseek_v3", "bailing_moe_linear", "bailing_hybrid"),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_and_gradients_of_a_model_are_those_of_the_rows(architecture: str) -> None:
    check_rows(
        BlockwiseModel(with_full_weights(model_of(architecture)), blocks_per_eval=1), turns()
    )


@pytest.mark.parametrize("blocks", [0, 1])
def test_of_an_adapter_alone(blocks: int) -> None:
    model = model_of("qwen3_5")
    model.freeze()
    check_rows(BlockwiseModel(with_lora(model), blocks_per_eval=blocks), turns(count=5))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        # it convolves keys and values by itself; fresh weights hide that in the scores
        ("baichuan_m1", "a recurrence that does not go over trees"),
        ("recurrent_gemma", "a recurrence that does not go over trees"),
        ("rwkv7", "more than one hidden state"),
    ],
)
def test_what_does_not_know_forests_says_so(architecture: str, reason: str) -> None:
    parts = BlockwiseModel(small_model(architecture), blocks_per_eval=1)
    assert reason in parts.unmerged


def test_on_metal_the_kernel_is_called_for_rows_alone() -> None:
    """In evaluation mode mlx-lm calls its kernel, which knows no forest."""
    q = k = mx.random.normal((1, 8, 1, 4))
    beta, decay = mx.ones((1, 8, 1)), mx.full((1, 8, 1), 0.9)
    calls = []
    kernel = recurrent_layers._gated_delta_kernel(lambda *_: calls.append(1) or (q, None))
    rows = [kernel(q, k, q, decay, beta, mx.zeros((1, 1, 4, 4)))[0]]
    assert calls == [1] and rows[0] is q
    with over(TokenTree(np.arange(8, dtype=np.int32), 8)):
        out, _ = kernel(q, k, q, decay, beta, mx.zeros((1, 1, 4, 4)))
    assert calls == [1]
    np.testing.assert_allclose(out, gated_delta(q, k, q, decay, beta)[0], atol=1e-5)


def test_other_convolutions_are_refused_over_a_forest_and_left_alone_elsewhere() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 2))
    recurrent_layers.use_trees(model)
    x = mx.ones((1, 9, 4))
    assert model(x).shape == (1, 8, 4)
    with over(TokenTree(DEPTHS, 8)), pytest.raises(ValueError, match="mixes channels"):
        model(x)


def test_modules_of_this_version_are_replaced() -> None:
    """What mlx-lm binds at import is what its layers call."""
    BlockwiseModel(small_model("mamba2"), blocks_per_eval=1)
    assert hasattr(importlib.import_module("mlx_lm.models.ssm").ssm_attn, "by_token")
