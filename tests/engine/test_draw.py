"""Drawing in two stages, by blocks: the distribution and the normaliser of the whole vocabulary."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.engine.draw import BLOCK, Masses


def keys(rows: int) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(0, 2**32, (rows, 2), dtype=np.uint64).astype(np.uint32))


@pytest.mark.parametrize("vocab", [5, BLOCK, 300, 4 * BLOCK])
def test_normaliser_is_logsumexp(vocab: int) -> None:
    logits = mx.random.normal((3, vocab), key=mx.random.key(1)) * 5
    assert mx.abs(Masses.of(logits).logsumexp - mx.logsumexp(logits, axis=-1)).max() < 2e-6


def test_tokens_come_as_often_as_the_softmax_says() -> None:
    rows, vocab = 40_000, 300
    logits = mx.random.normal((1, vocab), key=mx.random.key(2)) * 2
    tokens = np.array(Masses.of(mx.broadcast_to(logits, (rows, vocab))).draw(keys(rows)))
    found = np.bincount(tokens, minlength=vocab) / rows
    expected = np.array(mx.softmax(logits, axis=-1))[0]
    deviation = np.sqrt(expected * (1 - expected) / rows)
    assert np.all(np.abs(found - expected) < 5 * deviation + 1e-4)
    blocks = [found[start : start + BLOCK].sum() - expected[start : start + BLOCK].sum() for start in (0, 128, 256)]
    assert np.abs(blocks).max() < 0.01


def test_a_forbidden_token_is_never_drawn() -> None:
    rows, vocab = 2000, 300
    allowed = np.array([130, 131, 299])  # one block without any, one in the padded block
    logits = np.full((rows, vocab), -np.inf, np.float32)
    logits[:, allowed] = [0.0, -3.0, 1.0]
    tokens = np.array(Masses.of(mx.array(logits)).draw(keys(rows)))
    assert set(tokens.tolist()) == set(allowed.tolist())


def test_a_row_alone_draws_what_it_draws_among_others() -> None:
    logits, own = mx.random.normal((8, 300), key=mx.random.key(3)), keys(8)
    together = np.array(Masses.of(logits).draw(own))
    alone = [int(Masses.of(logits[row : row + 1]).draw(own[row : row + 1]).item()) for row in range(8)]
    assert together.tolist() == alone


def test_a_broken_row_shows_and_stays_in_range() -> None:
    logits = mx.array([[1.0, float("nan"), 0.0], [1.0, 2.0, 3.0]])
    masses = Masses.of(logits)
    assert np.isnan(np.array(masses.logsumexp)).tolist() == [True, False]
    assert np.array(masses.draw(keys(2))).max() < BLOCK
