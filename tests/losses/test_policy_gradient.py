"""Policy losses against other trainers' printed numbers, a float64 oracle, hand-worked cases,
and invariances."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.algorithm import bounds_of, keys_of
from mlx_parallm.losses.kl import KL_ESTIMATORS, k3, token_kl
from mlx_parallm.losses.policy_gradient import LOSSES, Terms, policy_loss
from mlx_parallm.losses.selection import Selection, covariances, high_entropy
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from tests.losses import fixtures, oracle

Loss = Callable[[LossInputs], LossOutputs]

# tests/test_documented.py: all have to be
COVERED = [loss for loss in LOSSES if loss in oracle.FORMULAS]
COMBINATIONS = [
    (loss, level)
    for loss in COVERED
    for level in (
        ("token", "sequence", "sequence_token")
        if "ratio_level" in keys_of("grpo", loss)
        else ("token",)
    )
]


def value_and_grad(loss: Loss, inputs: LossInputs) -> tuple[float, np.ndarray]:
    value, gradient = mx.value_and_grad(lambda x: loss(replace(inputs, logprobs=x)).loss)(
        inputs.logprobs
    )
    return value.item(), np.array(gradient)


def made(loss: str, **options: Any) -> Loss:
    return lambda inputs: policy_loss(inputs, fixtures.options(loss, **options))


def full(loss: str, level: str = "token", aggregation: str = "token") -> Loss:
    """With every term that there is; the inputs of `full_inputs`."""
    settings = {"entropy_weight": 0.05, "entropy_aggregation": aggregation, **oracle.SETTINGS[loss]}
    return made(loss, ratio_level=level, aggregation=aggregation, **settings)


def full_inputs(**more: Any) -> LossInputs:
    return fixtures.inputs(0.6, **{"weights": fixtures.WEIGHTS, "kl_beta": 0.3} | more)


DAPO = {"clip_ratio": 0.2, "clip_ratio_high": 0.28}
PRINTED: list[tuple[str, dict[str, Any], float, tuple[float, float], tuple[float, float]]] = [
    # loss, options, divisor of the printed numbers, (value, gradient norm) in set A, in set B
    ("dual_clip", DAPO, 1, (0.051254, 0.158295), (0.251462, 0.100155)),  # verl ppo token-mean
    (
        "dual_clip",
        DAPO | {"aggregation": "sequence"},
        1,
        (-0.015323, 0.154209),
        (0.143163, 0.071620),
    ),
    (
        "dual_clip",
        DAPO | {"aggregation": "sequence_sum"},
        1,
        (0.170847, 0.527649),
        (0.838206, 0.333850),
    ),
    (
        # verl gspo, TRL
        *("clip", DAPO | {"ratio_level": "sequence", "aggregation": "sequence"}, 1),
        *((-0.016057, 0.152533), (-0.007851, 0.115421)),
    ),
    (
        *("clip", DAPO | {"ratio_level": "sequence_token", "aggregation": "sequence"}, 1),
        *((-0.016057, 0.152533), (-0.007851, 0.115421)),
    ),
    ("sapo", {"aggregation": "sequence"}, 1, (-0.042269, 0.152869), (-0.137485, 0.139641)),  # verl
    ("cispo", DAPO, 1, (-0.087392, 0.158295), (-0.083350, 0.162631)),  # verl
    # TRL
    (
        "cispo",
        {"clip_ratio": 1.0, "clip_ratio_high": 0.15},
        1,
        (-0.084871, 0.155271),
        (-0.063885, 0.139074),
    ),
    # TRL grpo
    ("clip", DAPO | {"aggregation": "sequence"}, 1, (-0.015323, 0.154209), (0.166193, 0.156272)),
    ("clip", DAPO, 1, (0.051254, 0.158295), (0.278672, 0.193167)),  # TRL dapo
    # TRL dr_grpo, L = 8
    ("clip", DAPO | {"aggregation": "constant"}, 1, (0.021356, 0.065956), (0.116113, 0.080486)),
    (
        # TRL grpo, delta
        *("two_sided", DAPO | {"ratio_delta": 1.1, "aggregation": "sequence"}, 1),
        *((-0.000901, 0.100332), (0.036769, 0.057635)),
    ),
    ("vespo", {}, 1, (-0.087472, 0.153237), (-0.060933, 0.147894)),  # TRL 1.16
    # TRL 1.16, experimental; GMPO's mean is over sequences
    ("gmpo", {"aggregation": "sequence"}, 1, (-0.016057, 0.152533), (0.060277, 0.092123)),
    # TRL's off_policy_mask_threshold
    ("clip", DAPO | {"off_policy_mask": 0.1}, 1, (0.051254, 0.158295), (0.130669, 0.172623)),
    ("dppo", {}, 1, (0.051276, 0.158292), (0.336246, 0.193382)),  # prime-rl
    ("dppo", {"dppo_low": 0.05, "dppo_high": 0.05}, 1, (0.082188, 0.136114), (0.336246, 0.193382)),
    # Tinker: the sum of 20 tokens
    ("importance_sampling", {}, 20, (1.025081, 3.165893), (0.837132, 5.702854)),
    # Tinker ppo 0.8 / 1.2
    ("clip", {"clip_ratio": 0.2}, 20, (1.057185, 2.856238), (5.789437, 3.863333)),
    ("reinforce", {"aggregation": "sequence_sum"}, 1, (-0.293000, 0.514512), (-0.293000, 0.514512)),
]


@pytest.mark.parametrize(("loss", "options", "divisor", "set_a", "set_b"), PRINTED)
def test_other_trainers_numbers(
    loss: str,
    options: dict[str, Any],
    divisor: int,
    set_a: tuple[float, float],
    set_b: tuple[float, float],
) -> None:
    for scale, (value, norm) in ((0.1, set_a), (0.6, set_b)):
        got, gradient = value_and_grad(made(loss, **options), fixtures.inputs(scale))
        assert got == pytest.approx(value / divisor, abs=1e-6)
        assert np.linalg.norm(gradient) == pytest.approx(norm / divisor, abs=1e-6)


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
@pytest.mark.parametrize(("loss", "level"), COMBINATIONS)
def test_value_and_gradient_equal_the_float64_oracle(
    loss: str, level: str, aggregation: str
) -> None:
    def in_float64(new: np.ndarray) -> float:
        return oracle.loss_of(
            new,
            **{
                "loss": loss,
                "scale": 0.6,
                "level": level,
                "aggregation": aggregation,
                "settings": oracle.SETTINGS[loss],
            },
            **{"weights": fixtures.WEIGHTS, "kl_beta": 0.3, "entropy_weight": 0.05},
            entropy_aggregation=aggregation,
        )

    value, slope = value_and_grad(full(loss, level, aggregation), full_inputs())
    expected = oracle.gradient(in_float64)
    assert value == pytest.approx(in_float64(fixtures.NEW), rel=1e-5)
    assert np.linalg.norm(slope - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("entropy_aggregation", oracle.AGGREGATIONS)
@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
def test_the_entropy_has_an_aggregation_of_its_own(
    aggregation: str, entropy_aggregation: str
) -> None:
    """TRL's bonus is the mean over tokens whatever its loss_type divides by: with weight 0.05
    and 20 tokens the slope by each token's entropy is -0.05 / 20 = -0.0025. The six rows have 5,
    3, 4, 2, 5 and 1 tokens, so "sequence" gives -0.05 / (6 · length), "sequence_sum" -0.05 / 6,
    "constant" -0.05 / (6 · 8)."""
    loss = made(
        "clip",
        aggregation=aggregation,
        entropy_weight=0.05,
        entropy_aggregation=entropy_aggregation,
    )
    inputs = fixtures.inputs(0.6)
    slope = np.array(
        mx.grad(lambda entropy: loss(replace(inputs, entropy=entropy)).loss)(inputs.entropy)
    )
    lengths = np.array(fixtures.LENGTHS)[:, None]
    divisors = {"token": 20.0, "sequence": 6 * lengths, "sequence_sum": 6.0, "constant": 6 * 8.0}
    wanted = np.where(fixtures.MASK, -0.05 / divisors[entropy_aggregation], 0.0)
    np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-9)
    assert loss(inputs).loss.item() == pytest.approx(
        oracle.loss_of(
            *(fixtures.NEW,),
            **{
                "loss": "clip",
                "scale": 0.6,
                "aggregation": aggregation,
                "settings": {"clip_ratio": 0.2},
            },
            **{"entropy_weight": 0.05, "entropy_aggregation": entropy_aggregation},
        ),
        rel=1e-5,
    )


@pytest.mark.parametrize("aggregation", oracle.AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("estimator", oracle.KL)
def test_every_kl_in_the_loss_equals_the_oracle(
    estimator: str, level: str, aggregation: str
) -> None:
    """With every level of the ratio and every aggregation: "k3_ratio" is k3 times the ratio that
    the loss has."""

    def in_float64(new: np.ndarray) -> float:
        return oracle.loss_of(
            new,
            **{"loss": "clip", "scale": 0.6, "settings": oracle.SETTINGS["clip"], "level": level},
            **{
                "aggregation": aggregation,
                "kl_beta": 0.7,
                "kl_estimator": estimator,
                "frozen": shifted,
            },
        )

    # |ref - new| is 0 somewhere in the fixture, where "abs" has no slope
    shifted = fixtures.NEW + 0.013
    inputs = fixtures.inputs(0.6, new=shifted, kl_beta=0.7)
    options = {"ratio_level": level, "aggregation": aggregation, **oracle.SETTINGS["clip"]}
    value, slope = value_and_grad(made("clip", kl_estimator=estimator, **options), inputs)
    expected = oracle.gradient(in_float64, shifted)
    # some are sums of 0.003 of float32 numbers
    assert value == pytest.approx(in_float64(shifted), rel=1e-5, abs=1e-7)
    assert np.linalg.norm(slope - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss", COVERED)
def test_on_policy_every_loss_learns_and_knows_good_from_bad(loss: str, level: str) -> None:
    """At ratio 1 the gradient of each is that of -A · logprobs, up to a constant."""
    inputs = replace(
        fixtures.inputs(0.6),
        rollout_logprobs=mx.array(fixtures.NEW, mx.float32),
        selected=None,
    )
    _, gradient = value_and_grad(
        made(loss, **({"ratio_level": level} if "ratio_level" in keys_of("grpo", loss) else {})),
        inputs,
    )
    wanted = -fixtures.ADVANTAGES * fixtures.MASK / 20
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("loss", "level", "aggregation"),
    [(*which, "sequence") for which in COMBINATIONS]
    + [("clip", "token", name) for name in oracle.AGGREGATIONS],
)
def test_cutting_padding_and_order_change_nothing(loss: str, level: str, aggregation: str) -> None:
    function = full(loss, level, aggregation)
    whole, gradient = value_and_grad(function, full_inputs())
    cuts = [([4, 0], 3), ([2], 0), ([5, 3, 1], 7)]
    parts = [full_inputs(rows=rows, pad=pad) for rows, pad in cuts]
    found = [value_and_grad(function, part) for part in parts]
    assert sum(value for value, _ in found) == pytest.approx(whole, abs=1e-6)
    for (rows, _), (_, slope) in zip(cuts, found, strict=True):
        np.testing.assert_allclose(slope[:, :5], gradient[rows], atol=1e-7)
    for name, total in function(full_inputs()).metrics.items():
        assert sum(function(part).metrics[name].item() for part in parts) == pytest.approx(
            total.item(), abs=1e-6
        )


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("loss", "level"), COMBINATIONS)
def test_what_the_mask_hides_may_be_anything(loss: str, level: str, poison: float) -> None:
    clean = full_inputs(old_logprobs=fixtures.rollout_logprobs(0.5))
    names = (
        "logprobs",
        "rollout_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "advantages",
        "entropy",
        "weights",
    )
    dirty = replace(
        clean, **{name: mx.where(clean.mask, getattr(clean, name), poison) for name in names}
    )
    value, gradient = value_and_grad(full(loss, level), dirty)
    expected, expected_gradient = value_and_grad(full(loss, level), clean)
    assert value == pytest.approx(expected, abs=1e-7)
    np.testing.assert_array_equal(gradient, expected_gradient)


def one_token(ratio: float, advantage: float, logprob: float = 0.0) -> LossInputs:
    return LossInputs(
        logprobs=mx.array([[logprob]], mx.float32),
        rollout_logprobs=mx.array([[logprob - np.log(ratio)]], mx.float32),
        advantages=mx.array([[advantage]]),
        mask=mx.array([[True]]),
        token_normalizer=1.0,
        sequence_normalizer=1.0,
    )


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "value", "gradient", "clipped"),
    [
        ("clip", 1.5, 1.0, -1.28, 0.0, 1),
        ("clip", 0.5, 1.0, -0.5, -0.5, 0),
        # a bad token already made rarer: the pessimistic branch is the clipped one
        ("clip", 0.5, -1.0, 0.8, 0.0, 1),
        ("clip", 2.0, -1.0, 2.0, 2.0, 0),  # a bad token made likelier: the gradient has to stay
        ("clip", 1.0, 0.7, -0.7, -0.7, 0),
        ("dual_clip", 5.0, -1.0, 3.0, 0.0, 1),
        ("dual_clip", 2.0, -1.0, 2.0, 2.0, 0),
        ("dual_clip", 5.0, 1.0, -1.28, 0.0, 1),
        ("two_sided", 5.0, -1.0, 4.0, 0.0, 1),
        ("two_sided", 2.0, -1.0, 2.0, 2.0, 0),
        ("two_sided", 5.0, 1.0, -1.28, 0.0, 1),
        ("sapo", 1.0, 1.0, -2.0, -1.0, None),
        ("sapo", 3.0, 1.0, -3.523188, -1.259923, None),  # 4 σ'(2) · 3 = 4 · 0.104994 · 3
        ("importance_sampling", 2.0, 1.0, -2.0, -2.0, None),
    ],
)
def test_worked_tokens(
    loss: str, ratio: float, advantage: float, value: float, gradient: float, clipped: int | None
) -> None:
    settings = DAPO if "clip_ratio" in bounds_of(loss) else {}
    inputs = one_token(ratio, advantage)
    got, slope = value_and_grad(made(loss, **settings), inputs)
    assert got == pytest.approx(value, abs=2e-6)
    assert slope.item() == pytest.approx(gradient, abs=2e-6)
    metrics = made(loss, **settings)(inputs).metrics
    assert ("clip_fraction" in metrics) == (clipped is not None)
    assert clipped is None or metrics["clip_fraction"].item() == clipped


def test_worked_tokens_that_depend_on_their_probability() -> None:
    got, slope = value_and_grad(made("cispo"), one_token(8.0, 1.0, logprob=-0.5))
    assert (got, slope.item()) == (pytest.approx(2.5), pytest.approx(-5.0))
    got, slope = value_and_grad(made("reinforce"), one_token(1.0, 2.0, logprob=-0.5))
    assert (got, slope.item()) == (pytest.approx(1.0), pytest.approx(-2.0))
    far, near = (one_token(p / 0.3, 1.0, logprob=float(np.log(p))) for p in (0.6, 0.4))
    dropped = value_and_grad(made("dppo", dppo_kl=0.0), far)
    assert (dropped[0], dropped[1].item()) == (0.0, 0.0)
    assert value_and_grad(made("dppo", dppo_kl=0.0), near)[0] == pytest.approx(-4 / 3, abs=1e-6)
    assert made("dppo")(far).metrics["clip_fraction"].item() == 1
    assert made("dppo")(near).metrics["clip_fraction"].item() == 0


def two_tokens(log_ratios: list[float], advantage: float, logprob: float = -0.5) -> LossInputs:
    """One sequence of two tokens."""
    row = mx.array([[True, True]])
    new = mx.full((1, 2), logprob)
    old = new - mx.array([log_ratios])
    return LossInputs(new, old, mx.full((1, 2), advantage), row, 2.0, 1.0)


def test_worked_sequences() -> None:
    """Each token has the number of its sequence, and the aggregation divides by two tokens."""
    for advantage, value, slope in ((1.0, -1.105171, [0, -0.552585]), (-1.0, 1.491825, None)):
        got, gradient = value_and_grad(made("gmpo"), two_tokens([1.0, -0.2], advantage))
        assert got == pytest.approx(value, abs=1e-6)
        expected = [value / 2] * 2 if slope is None else slope
        np.testing.assert_allclose(gradient[0], expected, atol=1e-6)
    assert made("gmpo")(two_tokens([1.0, -0.2], 1.0)).metrics["clip_fraction"].item() == 0.5
    got, gradient = value_and_grad(made("vespo"), two_tokens([float(np.log(2)), 0.0], 1.0))
    assert got == pytest.approx(0.099574, abs=1e-6)
    np.testing.assert_allclose(gradient[0], [-0.099574] * 2, atol=1e-6)
    far = two_tokens([60.0, 60.0], 1.0), two_tokens([-60.0, -60.0], -1.0)
    assert all(abs(made("vespo")(inputs).loss.item()) < 1e-20 for inputs in far), "its weight fades"
    steep = made("vespo", vespo_k_positive=6.0, vespo_lambda_positive=0.0)
    assert steep(far[0]).loss.item() == 0, "TRL's least decay"


def test_gmpo_gives_each_token_the_slope_of_its_own_advantage() -> None:
    """Advantages 1 and -1 of two turns in one sequence, all ratios 1: by the mean of both nothing
    would be learned."""
    inputs = replace(two_tokens([0.0, 0.0], 1.0), advantages=mx.array([[1.0, -1.0]]))
    gradient = value_and_grad(made("gmpo"), inputs)[1]
    np.testing.assert_allclose(gradient[0], [-0.5, 0.5], atol=1e-6)


def test_answers_that_the_policy_has_left_are_masked() -> None:
    """log(sampler / policy) = [1, 0.2] has the mean 0.6."""
    left = two_tokens([-1.0, -0.2], -1.0)
    kept = two_tokens([-1.0, -0.2], 1.0)
    masked = made("importance_sampling", off_policy_mask=0.5)
    plain = made("importance_sampling")
    assert masked(left).loss.item() == 0
    assert masked(left).metrics["off_policy_masked"].item() == 1
    for inputs, loss in ((kept, masked), (left, made("importance_sampling", off_policy_mask=0.7))):
        assert loss(inputs).loss.item() == plain(inputs).loss.item() != 0
        assert loss(inputs).metrics["off_policy_masked"].item() == 0
    # against the sampler, whatever the ratio is against
    near = replace(left, old_logprobs=left.logprobs)
    assert masked(near).metrics["off_policy_masked"].item() == 1


def test_clip_fraction_and_ratio_count_the_tokens_of_set_b() -> None:
    metrics = made("clip", **DAPO)(fixtures.inputs(0.6)).metrics
    ratio = np.exp(fixtures.NEW - fixtures.rollout_logprobs(0.6))
    binds = np.where(fixtures.ADVANTAGES > 0, ratio > 1.28, ratio < 0.8) & fixtures.MASK
    assert 0 < binds.sum() < 20
    assert metrics["clip_fraction"].item() == pytest.approx(binds.sum() / 20, abs=1e-6)
    assert metrics["ratio_mean"].item() == pytest.approx(ratio[fixtures.MASK].mean(), abs=1e-5)


def test_ratio_levels_worked() -> None:
    row = mx.array([[True, True, False]])
    inputs = LossInputs(
        mx.log(mx.array([[0.4, 0.1, 0.3]])), mx.log(mx.array([[0.2, 0.2, 0.9]])), row, row, 2.0, 1.0
    )
    for level, wanted in (
        ("token", [2.0, 0.5]),
        ("sequence", [1.0, 1.0]),
        ("sequence_token", [1.0, 1.0]),
    ):
        ratio = Terms(inputs, level).ratio
        assert ratio.tolist()[0][:2] == pytest.approx(wanted)


def test_the_ratio_is_against_the_old_policy_where_there_is_one_and_the_weights_stay_constant() -> (
    None
):
    both = fixtures.inputs(0.6, old_logprobs=fixtures.rollout_logprobs(0.1))
    assert (
        value_and_grad(made("clip"), both)[0]
        == value_and_grad(made("clip"), fixtures.inputs(0.1))[0]
    )
    halved = replace(both, weights=mx.full((6, 5), 0.5))
    value, gradient = value_and_grad(made("clip"), halved)
    expected, expected_gradient = value_and_grad(made("clip"), both)
    assert value == pytest.approx(expected / 2, rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient / 2, rtol=1e-6)


def test_weights_do_not_touch_kl_entropy_or_penalty() -> None:
    nothing = fixtures.inputs(0.6, weights=np.zeros((6, 5)), kl_beta=0.3)
    kl = made("clip")(nothing).metrics["kl"].item()
    assert made("clip")(nothing).loss.item() == pytest.approx(0.3 * kl, rel=1e-6)
    difference = (fixtures.NEW - fixtures.rollout_logprobs(0.6))[fixtures.MASK]
    assert made("dppo")(replace(nothing, kl_beta=0.0)).loss.item() == pytest.approx(
        1e-3 * np.mean(difference**2), rel=1e-5
    )


@pytest.mark.parametrize("loss", [loss for loss in COVERED if loss != "reinforce"])
def test_a_ratio_against_nobody_is_refused(loss: str) -> None:
    """It would be 1 whatever happens, and no clip would ever act."""
    with pytest.raises(ValueError, match="rollout_logprobs or old_logprobs"):
        made(loss)(replace(fixtures.inputs(0.6), rollout_logprobs=None))


def test_reinforce_needs_no_sampler() -> None:
    bare = replace(fixtures.inputs(0.6), rollout_logprobs=None)
    outputs = made("reinforce")(bare)
    assert outputs.loss.item() == made("reinforce")(fixtures.inputs(0.6)).loss.item()
    assert "ratio_mean" not in outputs.metrics


@pytest.mark.parametrize(
    ("level", "limit"), [("token", 20.0), ("sequence", 10.0), ("sequence_token", 10.0)]
)
def test_an_absurd_ratio_stays_finite(level: str, limit: float) -> None:
    value, gradient = value_and_grad(
        made("importance_sampling", ratio_level=level), one_token(np.exp(80.0), -1.0)
    )
    assert value == pytest.approx(np.exp(limit), rel=1e-5)
    assert np.isfinite(gradient).all()


def test_weighted_terms_need_their_inputs() -> None:
    bare = one_token(1.0, 1.0)
    with pytest.raises(ValueError, match="ref_logprobs"):
        made("clip")(replace(bare, kl_beta=0.1))
    with pytest.raises(ValueError, match="entropy"):
        made("clip", entropy_weight=0.1)(bare)
    with pytest.raises(ValueError, match="max_length"):
        made("clip", aggregation="constant")(bare)
    assert set(made("clip")(bare).metrics) == {"policy_loss", "ratio_mean", "clip_fraction"}


def test_aggregations_worked() -> None:
    inputs = replace(
        one_token(1.0, 1.0), mask=mx.array([[True, True], [True, False]]), max_length=4.0
    )
    inputs = replace(inputs, token_normalizer=3.0, sequence_normalizer=2.0)
    values = mx.array([[1.0, 2.0], [6.0, np.nan]])
    wanted = {"token": 3.0, "sequence": 3.75, "sequence_sum": 4.5, "constant": 1.125}
    assert {name: aggregate(values, inputs, name).item() for name in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "value", "norm"),
    [("k1", 0.0075, 0.223607), ("k2", 0.002688, 0.016394), ("k3", 0.002680, 0.016350)],
)
def test_kl_of_other_trainers(name: str, value: float, norm: float) -> None:
    inputs = fixtures.inputs(0.1)

    def mean(logprobs: mx.array) -> mx.array:
        return token_kl(replace(inputs, logprobs=logprobs), name).sum() / 20

    got, gradient = mx.value_and_grad(mean)(inputs.logprobs)
    assert got.item() == pytest.approx(value, abs=1e-6)
    assert np.linalg.norm(np.array(gradient)) == pytest.approx(norm, abs=1e-6)


def test_kl_worked() -> None:
    """The numbers in the docstring of losses/kl.py."""
    values = {name: kl_of_token(name, -1.0, -1.2, -1.5)[0] for name in KL_ESTIMATORS}
    wanted = {"k1": 0.2, "abs": 0.2, "k2": 0.02, "k3": 0.018731, "k3_ratio": 0.030882}
    assert values == pytest.approx(wanted, abs=1e-6)
    assert kl_of_token("k3_ratio", -1.0, -1.2, -1.5)[1] == pytest.approx(0.329744, abs=1e-6)


def test_k3_by_the_ratio_of_a_sequence_worked() -> None:
    """Two tokens with ratios 2 and 0.5, log-probability -1 and d = ref - new = 0.3 and -0.4: k3
    = e^0.3 - 1.3 = 0.049859 and e^-0.4 - 0.6 = 0.070320. By token (2 · 0.049859 + 0.5 ·
    0.070320) / 2 = 0.067439. The sequence's ratio is exp((ln 2 - ln 2) / 2) = 1: (0.049859 +
    0.070320) / 2 = 0.060089, TRL's with importance_sampling_level "sequence". Its slope by the
    first token: (k3' + the ratio's share) / 2 with k3' = 1 - e^0.3 = -0.349859 and a share of
    (0.049859 + 0.070320) / 2 = 0.060089: -0.144885."""
    d, moved = np.array([[0.3, -0.4]]), np.log([[2.0, 0.5]])
    new = mx.full((1, 2), -1.0)
    row = lambda values: mx.array(values.astype(np.float32))  # noqa: E731
    inputs = LossInputs(
        new, row(-1.0 - moved), mx.zeros((1, 2)), mx.ones((1, 2), mx.bool_), 2.0, 1.0
    )
    inputs = replace(inputs, ref_logprobs=row(-1.0 + d), kl_beta=1.0)
    by_token, _ = value_and_grad(made("clip", kl_estimator="k3_ratio"), inputs)
    assert by_token == pytest.approx(0.067439, abs=1e-6)
    value, slope = value_and_grad(
        made("clip", kl_estimator="k3_ratio", ratio_level="sequence"), inputs
    )
    assert value == pytest.approx(0.060089, abs=1e-6)
    assert slope[0, 0] == pytest.approx(-0.144885, abs=1e-6)


def kl_of_token(name: str, new: float, ref: float, old: float) -> tuple[float, float]:
    """The estimate, and its slope by `new`."""
    inputs = replace(
        one_token(1.0, 1.0), rollout_logprobs=mx.array([[old]]), ref_logprobs=mx.array([[ref]])
    )
    estimate = lambda x: token_kl(replace(inputs, logprobs=x), name).sum()  # noqa: E731
    value, slope = mx.value_and_grad(estimate)(mx.array([[new]]))
    return value.item(), slope.item()


@pytest.mark.parametrize("stale", [False, True])
def test_which_estimator_is_unbiased(stale: bool) -> None:
    """Σ old(x) · estimate over all four tokens, and its gradient by the logits, against KL(π ||
    ref) in float64. On the policy's own tokens k2 and k3_ratio have its gradient, on an older
    policy's k3_ratio alone."""
    logits, ref = np.array([0.3, -1.1, 0.8, 0.1]), np.array([-0.4, 0.2, 0.5, -0.9])
    old = np.array([1.0, -0.2, -0.5, 0.4])
    log = lambda z: z - np.log(np.exp(z).sum())  # noqa: E731
    sampled_by = log(old if stale else logits)
    kl = lambda z: float((np.exp(log(z)) * (log(z) - log(ref))).sum())  # noqa: E731
    true_slope = oracle.gradient(kl, logits)

    def mean(name: str, z: mx.array) -> mx.array:
        row = (z - mx.logsumexp(z))[None]
        inputs = LossInputs(
            row, mx.array(sampled_by[None], mx.float32), row, mx.ones((1, 4), mx.bool_), 4, 1
        )
        inputs = replace(inputs, ref_logprobs=mx.array(log(ref)[None], mx.float32))
        return (mx.array(np.exp(sampled_by), mx.float32) * token_kl(inputs, name)[0]).sum()

    values, right = {}, set()
    for name in KL_ESTIMATORS:
        value, slope = mx.value_and_grad(partial(mean, name))(mx.array(logits, mx.float32))
        values[name] = value.item() == pytest.approx(kl(logits), rel=1e-5)
        right |= {name} if np.allclose(np.array(slope), true_slope, atol=1e-6) else set()
    assert {name for name, exact in values.items() if exact} == (
        {"k3_ratio"} if stale else {"k1", "k3", "k3_ratio"}
    )
    assert right == ({"k3_ratio"} if stale else {"k2", "k3_ratio"})


@pytest.mark.parametrize("d", [-1000.0, 5.0, 1000.0])
def test_k3_ratio_of_an_absurd_token_pulls_the_right_way(d: float) -> None:
    """A cap on the value must not turn the slope, ratio · (new - ref), whose logarithm is kept
    within ±20."""
    value, slope = kl_of_token("k3_ratio", -1.0, -1.0 + d, -1.0)
    assert value == pytest.approx(10.0)
    assert slope == pytest.approx(-max(min(d, 20.0), -20.0))


def test_k3_ratio_needs_the_log_probabilities_of_the_sampler() -> None:
    bare = replace(
        one_token(1.0, 1.0), rollout_logprobs=None, ref_logprobs=mx.zeros((1, 1)), kl_beta=0.1
    )
    with pytest.raises(ValueError, match="rollout_logprobs"):
        made("reinforce", kl_estimator="k3_ratio")(bare)


def test_k3_of_a_tiny_difference_is_not_rounding_noise() -> None:
    d = 2.0**-12  # exact in float32, so only k3's own arithmetic is tested
    assert k3(mx.array([0.0]), mx.array([d])).item() == pytest.approx(d * d / 2, rel=2e-3)


@pytest.mark.parametrize("d", [-1000.0, 1000.0])
def test_k3_of_an_absurd_difference_is_finite(d: float) -> None:
    value, gradient = mx.value_and_grad(lambda x: k3(x, mx.array([d])).sum())(mx.array([0.0]))
    assert value.item() == pytest.approx(10.0)
    assert np.isfinite(gradient.item())


@pytest.mark.parametrize(
    ("loss", "scale", "settings", "chosen", "value", "norm"),
    [
        # verl's compute_policy_loss_kl_cov, ppo_kl_coef 1
        ("kl_cov", 0.1, {"cov_share": 0.2}, [0, 3, 7, 23], 0.076254, 0.168172),
        ("kl_cov", 0.6, {"cov_share": 0.3}, [0, 3, 7, 10, 20, 23], 0.281857, 0.273251),
        ("kl_cov", 0.6, {"cov_share": 0.01}, [0], 0.101857, 0.259241),
        # verl's compute_policy_loss_clip_cov, which draws all that there are
        ("clip_cov", 0.0, {"cov_share": 1.0, "cov_low": 0.1, "cov_high": 5.0}, 9, 0.035, 0.114782),
        (
            "clip_cov",
            0.1,
            {"cov_share": 1.0, "cov_low": 0.2, "cov_high": 5.0},
            6,
            0.043502,
            0.128426,
        ),
        (
            "clip_cov",
            0.1,
            {"cov_share": 1.0, "cov_low": 0.05, "cov_high": 0.2},
            4,
            0.022227,
            0.146987,
        ),
    ],
)
def test_tokens_chosen_by_covariance_are_verls(
    loss: str,
    scale: float,
    settings: dict[str, float],
    chosen: list[int] | int,
    value: float,
    norm: float,
) -> None:
    mask = fixtures.MASK
    found = Selection(loss, settings).covariant(fixtures.ADVANTAGES[mask], fixtures.NEW[mask], 1)
    places = np.flatnonzero(mask)[found].tolist()
    assert (places if isinstance(chosen, list) else len(places)) == chosen
    selected = np.zeros(mask.shape)
    selected[mask] = found
    inputs = fixtures.inputs(scale, selected=selected)
    got, gradient = value_and_grad(made(loss), inputs)
    assert got == pytest.approx(value, abs=2e-6)
    assert np.linalg.norm(gradient) == pytest.approx(norm, abs=2e-6)


def test_selections_worked() -> None:
    assert high_entropy(np.array([1.0, 2, 3, 5]), 0.5).tolist() == [False, False, True, True]
    assert high_entropy(np.array([1.0, 1, 1]), 0.2).all(), "as torch.quantile and >= have it"
    # torch.quantile(x, 0.8) of [0.1, 0.5, 0.2, 0.9, 0.4] is 0.58
    assert high_entropy(np.array([0.1, 0.5, 0.2, 0.9, 0.4]), 0.2).tolist() == [0, 0, 0, 1, 0]
    assert covariances(np.array([1.0, -1]), np.array([-1.0, -3])).tolist() == [1, 1]
    some = Selection("clip_cov", {"cov_share": 0.5, "cov_low": 0.0, "cov_high": 9.0}, seed=3)
    advantages, logprobs = np.array([1.0, -1] * 4), np.array([-1.0, -3] * 4)
    drawn = [some.covariant(advantages, logprobs, step) for step in (1, 1, 2)]
    assert [each.sum() for each in drawn] == [4, 4, 4]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any(), "by seed and step"
    none = Selection("clip_cov", {"cov_share": 0.5, "cov_low": 5.0, "cov_high": 9.0})
    assert not none.covariant(advantages, logprobs, 1).any()
    unselected = replace(two_tokens([0.5, 0.0], 1.0), selected=None)
    for loss in ("clip_cov", "kl_cov"):
        assert made(loss)(unselected).loss.item() == made("importance_sampling")(unselected).loss
