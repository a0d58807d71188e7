"""NEFTune's noise: its size, which layer gets it, and which passes."""

import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.errors import ModelError
from mlx_parallm.models.embedding_noise import EmbeddingNoise, input_embedding
from mlx_parallm.models.layouts.layout import TokenBatch, pack_rows
from tests.rl_training.data.test_data_training import make_config, make_trainer, source_of
from tests.rl_training.tiny_models import make_model

ALPHA, WIDTH = 5.0, 32


def batch_of(inputs: np.ndarray, counts: list[int] | None = None) -> TokenBatch:
    positions = np.flatnonzero(inputs).astype(np.int32)
    compact = None if counts is None else pack_rows(inputs, positions, counts)
    return TokenBatch(
        mx.array(inputs), mx.array(positions), mx.zeros(len(positions), mx.int32), compact=compact
    )


@pytest.mark.parametrize("architecture", ["qwen3", "gptj", "gemma2"])
def test_the_input_embedding_gets_it_and_nothing_else(architecture: str) -> None:
    """Uniform within ±alpha / sqrt(L · D) of the sequence's own length, whatever it lies beside."""
    model = make_model(architecture)
    plain = input_embedding(model)
    inputs = np.array([[5, 6, 7, 0], [8, 9, 10, 11]], np.int32)
    before = np.array(plain(mx.array(inputs)))
    logits = np.array(model(mx.array(inputs)))
    noise = EmbeddingNoise(model, ALPHA)
    with noise.drawn_from([1, 2], batch_of(inputs), [0, 1], [3, 5]):
        drawn = np.array(plain(mx.array(inputs))) - before
        assert not np.allclose(np.array(model(mx.array(inputs))), logits, atol=1e-4)
        head = np.array(plain(mx.array(inputs[:, :2])))
    assert np.array_equal(head, before[:, :2])
    assert np.array_equal(np.array(model(mx.array(inputs))), logits)
    assert not drawn[0, 3].any()
    for row, length in ((drawn[0, :3], 3), (drawn[1], 5)):
        bound = ALPHA / math.sqrt(length * WIDTH)
        assert 0.9 * bound < np.abs(row).max() <= bound * (1 + 1e-4)
        assert abs(row.mean()) < 0.2 * bound
    with noise.drawn_from([1, 2], batch_of(inputs[1:]), [1], [5]):
        alone = np.array(plain(mx.array(inputs[1:]))) - before[1:]
    assert np.allclose(alone[0], drawn[1], atol=1e-6)
    packed = batch_of(inputs, [2])
    assert packed.compact is not None
    rows = mx.array(packed.compact.inputs)
    of_packed = np.array(plain(rows))
    with noise.drawn_from([1, 2], packed, [0, 1], [3, 5]):
        moved = (np.array(plain(rows)) - of_packed)[0]
    assert np.allclose(moved[:7], np.concatenate([drawn[0, :3], drawn[1]]), atol=1e-6)
    with (
        pytest.raises(ModelError, match="was not added"),
        noise.drawn_from([1], batch_of(inputs), [0, 1], [3, 5]),
    ):
        pass


def test_a_model_without_an_embedding_is_refused() -> None:
    class Bare(nn.Module):
        def __call__(self, ids: mx.array) -> mx.array:
            return ids

    with pytest.raises(ModelError, match="no embedding"):
        EmbeddingNoise(Bare(), ALPHA)


def test_sft_has_it_in_training_alone_and_the_same_again(tmp_path: Path) -> None:
    """The same from another cut into micro-batches and from a trainer that begins anew; held-out
    losses have none."""
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(f'{{"prompt": "q", "completion": "{"abcdef"[: 1 + n % 5]}"}}' for n in range(8))
    )

    def losses(alpha: float, budget: int = 10_000) -> tuple[float, float]:
        config: Config = make_config(
            "sft", tmp_path, token_budget=budget, preference={"neftune_alpha": alpha}
        )
        trainer = make_trainer(config)
        batch = source_of(config).batches(trainer).collect(1)
        heldout = trainer.evaluate(batch, {})[0]
        return trainer.train_step(batch).metrics["loss"] or 0.0, heldout

    noisy, heldout = losses(15.0)
    plain, same = losses(0.0)
    assert heldout == pytest.approx(same, abs=1e-6) == plain
    assert abs(noisy - plain) > 1e-4
    assert losses(15.0, budget=16)[0] == pytest.approx(noisy, abs=1e-5)
    assert losses(15.0)[0] == noisy
