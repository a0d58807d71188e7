"""The Bradley–Terry loss of a reward model: a worked number, and a twin in float64 numpy."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.preference import reward_model_loss
from mlx_parallm.losses.types import LossInputs

LOSS = reward_model_loss
ENDS = (3, 5, 0, 2, 4, 1, 5, 5)  # the last token of each row
WIDTH = 6
MARGINS = (0.0, 0.7, -0.4, 2.5)


def inputs(scores: np.ndarray, margins: np.ndarray, *, poison: float = 0.0) -> LossInputs:
    """Scores [2P] at the rows' last tokens, anything elsewhere."""
    rows = len(scores)
    mask = np.arange(WIDTH)[None] == np.array(ENDS[:rows])[:, None]
    values = np.where(mask, scores[:, None], poison)
    return LossInputs(
        logprobs=mx.full((rows, WIDTH), poison),
        rollout_logprobs=mx.zeros((rows, WIDTH)),
        advantages=mx.array(np.repeat(np.repeat(margins, 2)[:, None], WIDTH, 1), mx.float32),
        mask=mx.array(mask),
        token_normalizer=float(rows),
        sequence_normalizer=float(rows),
        values=mx.array(values, mx.float32),
    )


def twin(scores: np.ndarray, margins: np.ndarray, centering: float) -> tuple[float, np.ndarray]:
    """TRL's RewardTrainer.compute_loss in float64, and its slopes by hand."""
    chosen, rejected = scores[0::2].astype(np.float64), scores[1::2].astype(np.float64)
    apart, pairs = chosen - rejected - margins, len(chosen)
    loss = np.log1p(np.exp(-apart)).mean() + centering * ((chosen + rejected) ** 2).mean()
    pull, both = -1 / (1 + np.exp(apart)), 2 * centering * (chosen + rejected)
    slopes = np.empty(len(scores))
    slopes[0::2], slopes[1::2] = (pull + both) / pairs, (-pull + both) / pairs
    return float(loss), slopes


def test_the_worked_number() -> None:
    pair = inputs(np.array([1.2, 0.7]), np.array([0.1]))
    outputs = reward_model_loss(pair, centering=0.01)
    assert outputs.loss.item() == pytest.approx(0.549115, abs=1e-6)

    def loss(values: mx.array) -> mx.array:
        return reward_model_loss(replace(pair, values=values), centering=0.01).loss

    slopes = mx.grad(loss)(pair.values).sum(axis=-1).tolist()
    assert slopes == pytest.approx([-0.363312, 0.439312], abs=1e-6)
    numbers = {name: value.item() for name, value in outputs.metrics.items()}
    assert numbers == pytest.approx(
        {
            "rewards/chosen": 1.2,
            "rewards/rejected": 0.7,
            "rewards/margins": 0.5,
            "rewards/accuracies": 1.0,
        }
    )


@pytest.mark.parametrize("centering", [0.0, 0.05])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_loss_and_gradient_are_those_of_float64(centering: float, size: float) -> None:
    scores = np.random.default_rng(0).normal(0, size, 2 * len(MARGINS))
    margins = np.array(MARGINS)
    rows = inputs(scores, margins)
    expected, slopes = twin(scores, margins, centering)

    def loss(values: mx.array) -> mx.array:
        return reward_model_loss(replace(rows, values=values), centering=centering).loss

    value, gradient = mx.value_and_grad(loss)(rows.values)
    assert value.item() == pytest.approx(expected, rel=3e-6)
    of_ends = np.array(gradient)[np.arange(len(scores)), ENDS]
    np.testing.assert_allclose(of_ends, slopes, rtol=3e-6, atol=3e-6 * np.abs(slopes).max())
    assert np.count_nonzero(np.array(gradient)) == np.count_nonzero(of_ends)


def test_only_the_last_token_counts() -> None:
    scores, margins = np.linspace(-1, 1, 8), np.array(MARGINS)
    plain = reward_model_loss(inputs(scores, margins)).loss.item()
    for poison in (9.0, np.inf, np.nan):
        assert reward_model_loss(inputs(scores, margins, poison=poison)).loss.item() == plain


def test_how_a_mini_batch_is_cut_changes_nothing() -> None:
    scores, margins = np.random.default_rng(1).normal(size=8), np.array(MARGINS)
    rows = inputs(scores, margins)
    whole = reward_model_loss(rows, centering=0.1)
    parts = [
        reward_model_loss(
            replace(
                rows,
                **{
                    name: getattr(rows, name)[part]
                    for name in ("values", "advantages", "mask", "logprobs")
                },
            ),
            centering=0.1,
        )
        for part in (slice(0, 2), slice(2, 8))
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), abs=1e-6)
    for name, number in whole.metrics.items():
        total = sum(part.metrics[name].item() for part in parts)
        assert total == pytest.approx(number.item(), abs=1e-6)


def test_equal_scores_are_half_right_whatever_the_margin() -> None:
    outputs = reward_model_loss(inputs(np.array([0.3, 0.3]), np.array([1.0])))
    assert outputs.metrics["rewards/accuracies"].item() == 0.5
    assert outputs.loss.item() == pytest.approx(np.log1p(np.e), abs=1e-6)


def test_a_trainer_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="needs values"):
        reward_model_loss(replace(inputs(np.zeros(2), np.zeros(1)), values=None))
