"""Each loss and its slope against formulas that were worked out by hand, in float64."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import RequestError
from mlx_parallm.faces.tinker.losses import LOSSES, DatumLoss, find_loss, loss_settings
from mlx_parallm.models.cpu import kernels
from mlx_parallm.rl_training.step.collate import MicroBatch

LP = np.array([-0.5, -1.0, -2.0, -0.1, -3.0, -0.7])
Q = np.array([-0.9, -1.0, -1.2, -0.6, -3.5, 0.0])
A = np.array([1.0, -2.0, 0.5, -1.0, 2.0, 0.0])
W = np.array([1.0, 0.0, -0.5, 2.0, 0.25, 1.0])
MASK = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
DATUM = np.array([0, 0, 0, 1, 1, 1])
R = np.exp(LP - Q)  # 1.4918, 1, 0.4493, 1.6487, 1.6487, 0.4966
Expected = tuple[float, np.ndarray]


def cross_entropy() -> Expected:
    return -float((LP * W).sum()), -W


def importance_sampling() -> Expected:
    return -float((R * A).sum()), -R * A


def ppo(low: float = 0.8, high: float = 1.2, ratio: np.ndarray = R) -> Expected:
    """The slope is that of the smaller term: 0 where the clipped one is smaller."""
    value = sum(min(r * a, min(max(r, low), high) * a) for r, a in zip(ratio, A, strict=True))
    slope = [
        r * a if r * a <= min(max(r, low), high) * a or low <= r <= high else 0.0
        for r, a in zip(ratio, A, strict=True)
    ]
    return -value, -np.array(slope)


def cispo(low: float = 0.0, high: float = 4.0) -> Expected:
    weight = np.clip(R, low, high)
    return -float((weight * LP * A).sum()), -weight * A


def dro(beta: float = 0.05) -> Expected:
    return -float((LP * A - beta / 2 * (LP - Q) ** 2).sum()), -(A - beta * (LP - Q))


def gspo() -> Expected:
    """Sequence ratios: exp((0.4 + 0) / 2) = 1.2214 over tokens 0 and 1, exp((0.5 + 0.5) / 2) =
    1.6487 over 3 and 4."""
    ratio = np.array([math.exp(0.2)] * 3 + [math.exp(0.5)] * 3)
    return ppo(0.9, 1.3, ratio)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("cross_entropy", {}, cross_entropy),
        ("importance_sampling", {}, importance_sampling),
        ("ppo", {}, ppo),
        ("ppo", {"clip_low_threshold": 0.4, "clip_high_threshold": 1.6}, lambda: ppo(0.4, 1.6)),
        ("cispo", {}, cispo),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, lambda: cispo(0.8, 1.2)),
        ("dro", {}, dro),
        ("dro", {"beta": 0.5}, lambda: dro(0.5)),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}, gspo),
    ],
)
def test_a_loss_is_its_formula_summed(
    name: str, config: dict[str, float], expected: Callable[[], Expected]
) -> None:
    arrays = {"weights": W, "logprobs": Q, "advantages": A, "sequence_ratio_mask": MASK}
    columns = {key: mx.array(value.astype(np.float32)) for key, value in arrays.items()}
    columns["datum"] = mx.array(DATUM.astype(np.int32))
    settings = loss_settings(name, config)
    function = LOSSES[name].function
    value, slope = mx.value_and_grad(lambda lp: function(lp, columns, settings))(
        mx.array(LP.astype(np.float32))
    )
    wanted, wanted_slope = expected()
    assert value.item() == pytest.approx(wanted, abs=2e-6)
    np.testing.assert_allclose(np.array(slope), wanted_slope, atol=2e-6)


def test_ppo_by_hand() -> None:
    """Ratio 1.5: with A = 2 the clipped 2.4 is smaller than 3, with A = -2 the plain -3 is:
    -(2.4 - 3) = 0.6."""
    columns = {"logprobs": mx.zeros((2,)), "advantages": mx.array([2.0, -2.0])}
    lp = mx.full((2,), math.log(1.5))
    assert LOSSES["ppo"].function(lp, columns, loss_settings("ppo", {})).item() == pytest.approx(
        0.6, abs=1e-6
    )


def test_a_far_token_without_an_advantage_changes_nothing() -> None:
    columns = {"logprobs": mx.array([-200.0, -1.0]), "advantages": mx.array([0.0, 1.0])}
    value = LOSSES["importance_sampling"].function(mx.array([0.0, -1.0]), columns, {})
    assert value.item() == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("sft", {}, "there are cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
        ("stable_reinforce", {}, "loss_fn=importance_sampling"),
        ("cross_entropy", {"beta": 1.0}, "it reads no configuration"),
        ("ppo", {"clip_ratio": 0.2}, "it reads clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": math.nan}, "is not a finite number"),
        ("ppo", {"clip_low_threshold": 2.0}, "is above clip_high_threshold"),
        ("dro", {"beta": "large"}, "is not a finite number"),
        ("gspo", {}, "needs clip_low_threshold and clip_high_threshold"),
    ],
)
def test_what_is_not_offered_is_named(name: str, config: dict[str, float | str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        find_loss(name)
        loss_settings(name, config)


@pytest.mark.slow  # g++ makes the loops
@pytest.mark.long
@pytest.mark.skipif(
    not kernels.available(),
    reason="without MLX on the CPU and a C++ compiler nothing is fused",
)
@pytest.mark.parametrize("name", LOSSES)
def test_other_numbers_take_the_same_loops(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token: MLX takes an array of one number for a constant."""
    kind = LOSSES[name]
    part = cast(MicroBatch, SimpleNamespace(columns=slice(0, 1)))
    for turn in (1, 2, 3):
        values = {
            column: np.array([0.1 * turn], np.float32) for column in (*kind.inputs, *kind.optional)
        }
        settings = dict.fromkeys(kind.settings or {}, 0.5 + 0.1 * turn)
        loss = DatumLoss(kind, settings, values, np.arange(1))
        assert loss.fuse
        step = mx.compile(mx.value_and_grad(loss.objective(part)))
        mx.eval(step(mx.full((1,), -0.1 * turn), mx.zeros((1,))))
        assert not list(tmp_path.rglob("*.so"))
        # where MLX puts a loop that it has not loaded yet
        monkeypatch.setenv("TMPDIR", str(tmp_path))
