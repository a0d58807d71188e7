"""Unrelated sequences in one row: same scores, same gradients, and none sees another."""

import re
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
from mlx_parallm.models.layout import pack_rows
from tests.models.test_packing import SHARING, count_tokens, model_of, objective, plain
from tests.rl_training.step.test_blockwise import with_4_bit_base, with_full_weights, with_lora
from tests.rl_training.tiny_models import make_model

LENGTHS = (9, 1, 5, 12, 2, 3, 16)  # of what goes into the model
ROWS = (3, 2, 1, 1)  # 15, 14, 3 and 16 tokens


def batch(lengths: Sequence[int] = LENGTHS, counts: Sequence[int] = ROWS, *, seed: int = 0) -> TokenBatch:
    """Tokens 0 … 39. The last position of a sequence is scored, and about half of the others."""
    rng = np.random.default_rng(seed)
    tokens, mask = np.zeros((len(lengths), 20), np.int32), np.zeros((len(lengths), 20), bool)
    for i, length in enumerate(lengths):
        tokens[i, : length + 1] = rng.integers(0, 40, length + 1)
        mask[i, :length] = rng.random(length) < 0.5
        mask[i, length - 1] = True
    positions = np.flatnonzero(mask).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1).reshape(-1)[positions]
    return TokenBatch(
        mx.array(tokens), mx.array(positions), mx.array(targets), 0.8, pack_rows(tokens, positions, counts)
    )


def test_sequences_lie_end_to_end_up_to_their_last_scored_token() -> None:
    tokens = np.array([[1, 2, 3, 0], [4, 5, 9, 9], [6, 7, 8, 0]], np.int32)
    packed = pack_rows(tokens, np.array([1, 2, 5, 8, 10], np.int32), [2, 1])
    assert packed.inputs.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 0, 0, 0, 0, 0]]
    assert packed.owner.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [2, 2, 2, -1, -1, -1, -1, -1]]
    assert packed.positions.tolist() == [1, 2, 4, 8, 10]
    assert packed.tokens == 16


@pytest.mark.parametrize("architecture", SHARING)
def test_scores_and_gradients_are_those_of_the_rows(architecture: str) -> None:
    check(with_lora(model_of(architecture)), batch())


@pytest.mark.parametrize(("prepare", "blocks"), [(with_full_weights, 0), (with_full_weights, 2), (with_4_bit_base, 1)])
def test_of_all_weights_and_over_a_quantised_base(prepare: Callable[[nn.Module], nn.Module], blocks: int) -> None:
    check(prepare(make_model()), batch(), blocks)


@pytest.mark.parametrize(("lengths", "counts"), [((1, 1, 1), (3,)), ((8, 8), (2,)), ((15, 1), (2,)), ((4,), (1,))])
def test_boundaries(lengths: tuple[int, ...], counts: tuple[int, ...]) -> None:
    check(with_lora(make_model()), batch(lengths, counts))


def check(model: nn.Module, tokens: TokenBatch, blocks: int = 1) -> None:
    parts = BlockwiseModel(model, blocks_per_eval=blocks)
    assert parts.packs_rows, parts.unpacked
    for a, b in zip(parts.score(tokens), parts.score(plain(tokens)), strict=True):
        np.testing.assert_allclose(a, b, atol=4e-6)
    value, _, gradients = parts.loss_and_gradients(tokens, objective)
    expected, _, rows = parts.loss_and_gradients(plain(tokens), objective)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    whole, other = (np.concatenate([np.array(g, np.float64).ravel() for g in found]) for found in (rows, gradients))
    assert np.linalg.norm(whole) > 0
    assert np.linalg.norm(other - whole) <= 1e-6 * np.linalg.norm(whole)


def test_fewer_tokens_go_through_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, tokens = BlockwiseModel(with_lora(make_model())), batch()
    seen = count_tokens(monkeypatch)
    parts.score(tokens)
    assert tokens.compact is not None and sum(seen) == 3 * tokens.compact.tokens == 3 * 4 * 16


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_no_token_sees_another_sequence(changed: int) -> None:
    """Bit for bit, before and behind the one that changes."""
    parts = BlockwiseModel(with_lora(make_model()))
    lengths, counts = (6, 7, 5), (3,)
    before, after = batch(lengths, counts), batch(lengths, counts)
    tokens = np.array(after.inputs)
    tokens[changed, : lengths[changed]] = 39 - tokens[changed, : lengths[changed]]
    after = TokenBatch(
        mx.array(tokens), after.positions, after.targets, 0.8, pack_rows(tokens, np.array(after.positions), counts)
    )
    owner = np.array(before.positions) // tokens.shape[1]
    [one, other] = [np.array(parts.score(found)[0]) for found in (before, after)]
    for sequence in range(3):
        assert np.array_equal(one[owner == sequence], other[owner == sequence]) == (sequence != changed)


def test_no_gradient_reaches_another_sequence() -> None:
    """The rows of an untied embedding that only other sequences have."""
    parts = BlockwiseModel(with_full_weights(make_model("llama")))
    tokens = np.array([[1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]], np.int32)
    positions = np.array([3, 7, 11], np.int32)
    packed = TokenBatch(
        mx.array(tokens), mx.array(positions), mx.array([5, 6, 7], mx.int32), 1.0, pack_rows(tokens, positions, [3])
    )
    _, _, gradients = parts.loss_and_gradients(packed, lambda logprobs, _: (logprobs[1], ()))
    embedding = np.abs(np.array(gradients[parts.slots.names.index("model.embed_tokens.weight")])).sum(axis=1)
    assert set(np.flatnonzero(embedding)) == {11, 12, 13, 14}


@pytest.mark.parametrize(
    ("architecture", "extra", "reason"),
    [
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_ctx": 64}, "depends on the position"),
        ("gemma3_text", {}, "RotatingKVCache"),
        ("gemma2", {}, "off by|do not take"),  # its mask would have to fit keys of five axes
    ],
)
def test_what_cannot_be_packed_says_why_and_goes_on(architecture: str, extra: dict, reason: str) -> None:
    extra = {"layer_norm_epsilon": 1e-5, "num_key_value_heads": 2} | extra
    parts = BlockwiseModel(with_lora(make_model(architecture, **extra)))
    assert not parts.fallback and re.search(reason, parts.unpacked)
    tokens = batch()
    np.testing.assert_array_equal(parts.score(tokens)[0], parts.score(plain(tokens))[0])
