"""Rows as a tree of tokens: each distinct token once, with the scores and gradients of the rows."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts import tree_rows
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.layouts.tree_rows import TreeAttention, merge_rows
from tests.models.recurrent.test_layout import model_of as recurrent_model
from tests.models.test_layout import (
    GPT2,
    SHARING,
    check_as_rows,
    model_of,
    plain,
)
from tests.rl_training.step.test_blockwise import with_4_bit_base, with_full_weights, with_lora
from tests.rl_training.tiny_models import make_model


def turns(*, episodes: int = 3, count: int = 3, seed: int = 0) -> TokenBatch:
    """Episodes with one instruction whose template drops the thoughts of earlier turns: a row for
    each turn. One row stands twice, and one is the beginning of another."""
    rng = np.random.default_rng(seed)

    def words(size: int) -> list[int]:
        return rng.integers(0, 40, size).tolist()

    instruction, rows = words(7), list[tuple[list[int], list[int]]]()
    for _ in range(episodes):
        history = [*instruction]
        for _ in range(count):
            thought, answer = words(int(rng.integers(1, 6))), words(int(rng.integers(1, 4)))
            rows.append((history, [*thought, *answer]))
            history = [*history, *answer, *words(2)]
    rows += [rows[1], (rows[2][0], rows[2][1][:1])]
    width = max(len(history) + len(sampled) for history, sampled in rows)
    tokens = np.zeros((len(rows), width + 1), np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, (history, sampled) in enumerate(rows):
        whole = [*history, *sampled]
        tokens[i, : len(whole)] = whole
        mask[i, len(history) - 1 : len(whole) - 1] = True
    positions = np.flatnonzero(mask).astype(np.int32)
    inputs = np.ascontiguousarray(tokens[:, :-1])
    return TokenBatch(
        mx.array(inputs),
        mx.array(positions),
        mx.array(tokens[:, 1:].reshape(-1)[positions]),
        mx.array(rng.uniform(0.5, 2.0, len(positions)).astype(np.float32)),
        merge_rows(inputs, positions),
    )


def check(parts: BlockwiseModel, tokens: TokenBatch) -> None:
    assert parts.merges_rows, parts.unmerged
    check_as_rows(parts, tokens)


def test_a_worked_tree() -> None:
    """Rows [7 8 1 2], [7 8 3] and [9]: what the second has beside the first is one token."""
    inputs = np.array([[7, 8, 1, 2], [7, 8, 3, 0], [9, 0, 0, 0]], np.int32)
    tree = merge_rows(inputs, np.array([1, 2, 3, 5, 6, 8], np.int32))
    assert tree.inputs.tolist() == [7, 8, 1, 2, 3, 9]
    assert tree.depths.tolist() == [0, 1, 2, 3, 2, 0]
    assert tree.ends.tolist() == [5, 5, 4, 4, 5, 6]
    assert tree.positions.tolist() == [1, 2, 3, 1, 4, 5]


@pytest.mark.parametrize("seed", range(5))
def test_every_distinct_token_is_there_once_behind_what_was_before_it(seed: int) -> None:
    """Letters of three make many common beginnings. The path of each scored token, read from
    depths and ends, is its row up to there."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, 3, (30, 9)).astype(np.int32)
    lengths = rng.integers(1, 10, 30)
    positions = np.array([row * 9 + c for row, n in enumerate(lengths) for c in range(n)], np.int32)
    tree = merge_rows(inputs, positions)
    beginnings = {
        tuple(inputs[row, : column + 1].tolist())
        for row, column in (divmod(position, 9) for position in positions.tolist())
    }
    assert len(tree.inputs) == len(beginnings)
    for place, position in zip(tree.positions, positions, strict=True):
        row, column = divmod(int(position), 9)
        path = [u for u in range(place + 1) if tree.ends[u] > place]
        assert tree.inputs[path].tolist() == inputs[row, : column + 1].tolist()
        assert tree.depths[path].tolist() == list(range(column + 1))


@pytest.mark.parametrize("architecture", SHARING)
def test_scores_and_gradients_are_those_of_the_rows(architecture: str) -> None:
    check(BlockwiseModel(with_lora(model_of(architecture)), blocks_per_eval=1), turns())


@pytest.mark.parametrize("block", [1, 3, 8])
def test_paths_across_blocks_of_attention(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of many blocks: a path reaches over several, and branches begin within them."""
    monkeypatch.setattr(tree_rows, "BLOCK", block)
    monkeypatch.setattr(tree_rows, "PATH_STEP", 2)
    check(BlockwiseModel(with_full_weights(make_model()), blocks_per_eval=1), turns(seed=block))


@pytest.mark.parametrize("prepare", [with_full_weights, with_4_bit_base])
@pytest.mark.parametrize("blocks", [0, 2])
def test_of_all_weights_and_over_a_quantised_base(
    prepare: Callable[[nn.Module], nn.Module], blocks: int
) -> None:
    check(BlockwiseModel(prepare(make_model()), blocks_per_eval=blocks), turns())


def test_a_single_row_and_a_single_token() -> None:
    parts = BlockwiseModel(with_lora(make_model()), blocks_per_eval=1)
    for inputs, scored in (([[5, 6, 7]], [1, 2]), ([[5]], [0])):
        rows, positions = np.array(inputs, np.int32), np.array(scored, np.int32)
        tokens = TokenBatch(mx.array(rows), mx.array(positions), mx.array(positions))
        check(parts, replace(tokens, compact=merge_rows(rows, positions)))


WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3_text": {},  # windows of 4 tokens
    "olmo3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {  # with sinks
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
}


@pytest.mark.parametrize("architecture", WINDOWS)
@pytest.mark.parametrize("block", [3, 128])
def test_layers_with_windows(
    architecture: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are longer than windows, and branches leave them at any depth."""
    monkeypatch.setattr(tree_rows, "BLOCK", block)
    monkeypatch.setattr(tree_rows, "PATH_STEP", min(block, 128))
    model = make_model(architecture, **WINDOWS[architecture])
    for name, array in tree_flatten(model.parameters()):
        if name.endswith("sinks"):
            model.update(tree_unflatten([(name, mx.random.normal(array.shape))]))
    check(BlockwiseModel(with_lora(model), blocks_per_eval=1), turns(count=4))


def test_a_window_ends_where_it_should() -> None:
    """A path of five tokens with a window of 3: the last one sees itself and two above it."""
    attention = TreeAttention(np.full(5, 5, np.int32), np.arange(5, dtype=np.int32), 3)
    places = mx.arange(5, dtype=mx.float32).reshape(5, 1, 1, 1)
    queries = keys = mx.zeros((5, 1, 1, 1))
    seen = attention.attend(queries, keys, places, 1.0, None).reshape(-1)
    np.testing.assert_allclose(seen, [0, 0.5, 1, 2, 3], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: recurrent_model("baichuan_m1"), "does not go over trees"),
        (lambda: make_model("gpt2", **GPT2), "depends on the position"),
    ],
)
def test_what_cannot_be_a_tree_says_why_and_goes_row_by_row(
    make: Callable[[], nn.Module], reason: str
) -> None:
    parts = BlockwiseModel(with_lora(make()), blocks_per_eval=1)
    assert re.search(reason, parts.unmerged), parts.unmerged
    tokens = turns()
    np.testing.assert_array_equal(parts.score(tokens)[0], parts.score(plain(tokens))[0])
