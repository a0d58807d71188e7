"""Losses on pairs, labelled completions and examples: printed reference values, a float64
oracle, invariances."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.aot import sorted_margins
from mlx_parallm.losses.preference import (
    cpo_loss,
    dft_loss,
    dpo_loss,
    kto_loss,
    nll_loss,
    orpo_loss,
    simpo_loss,
)
from mlx_parallm.losses.types import LossInputs, LossOutputs

LENGTHS = (4, 6, 5, 3, 7, 2, 1, 8)  # of completions: four pairs, or eight labelled rows
WIDTH = 11
LABELS = np.array([1.0, -1, 1, -1, -1, 1, 1, -1])
SIDES = LABELS * np.where(LABELS > 0, 1.5, 0.8)
COLLISION = np.random.default_rng(9).uniform(0.1, 2, (len(LENGTHS), WIDTH))


@dataclass(frozen=True)
class Rows:
    """float64, [B, T]: log-probabilities, the reference's, and which are a completion's."""

    logprobs: np.ndarray
    reference: np.ndarray
    mask: np.ndarray


def make_rows(seed: int = 0) -> Rows:
    """A prompt of any length before each completion, padding behind it."""
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), WIDTH)
    logprobs = -rng.uniform(0.1, 2.5, shape)
    mask = np.zeros(shape, bool)
    for row, length in enumerate(LENGTHS):
        start = int(rng.integers(0, WIDTH - length + 1))
        mask[row, start : start + length] = True
    return Rows(logprobs, logprobs + rng.normal(0, 0.6, shape), mask)


def inputs(
    rows: Rows, part: slice = slice(None), logprobs: np.ndarray | None = None, **others: Any
) -> LossInputs:
    values = rows.logprobs if logprobs is None else logprobs
    kinds = ["aot", "aot_unpaired"]
    margins = sorted_margins(kinds, in_rows(values, rows), in_rows(rows.reference, rows))
    advantages = np.repeat(SIDES[:, None], WIDTH, 1)

    def array(numbers: np.ndarray) -> mx.array:
        return mx.array(numbers[part].astype(np.float32))

    fields: dict[str, Any] = {
        "logprobs": array(values),
        "rollout_logprobs": mx.zeros((len(range(*part.indices(len(LENGTHS)))), WIDTH)),
        "ref_logprobs": array(rows.reference),
        "advantages": array(advantages),
        "mask": mx.array(rows.mask[part]),
        "token_normalizer": float(rows.mask.sum()),
        "sequence_normalizer": float(len(LENGTHS)),
        "collision_entropy": array(COLLISION),
        "constants": {
            **{"kl": 0.3, "desirable": 4.0, "undesirable": 4.0},
        },
        "row_constants": {kind: mx.array(numbers[part]) for kind, numbers in margins.items()},
    }
    return LossInputs(**fields | others)


def in_rows(values: np.ndarray, rows: Rows) -> list[np.ndarray]:
    return [row[chosen] for row, chosen in zip(values, rows.mask, strict=True)]


# ---------------------------------------------------------------------- the oracle: numpy, float64


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -x)


def sums(logprobs: np.ndarray, rows: Rows) -> np.ndarray:
    return np.where(rows.mask, logprobs, 0).sum(1)


def means(logprobs: np.ndarray, rows: Rows) -> np.ndarray:
    return sums(logprobs, rows) / rows.mask.sum(1)


def margins(logprobs: np.ndarray, rows: Rows, of: Callable[..., np.ndarray] = sums) -> np.ndarray:
    ratios = of(logprobs, rows) - of(rows.reference, rows)
    return ratios[0::2] - ratios[1::2]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def oracle_dpo(
    logprobs: np.ndarray,
    rows: Rows,
    *,
    beta: float,
    loss_type: str | Sequence[str],
    label_smoothing: float = 0,
    loss_weights: Sequence[float] = (),
    discopop_tau: float = 0,
    ld_alpha: float | None = None,
    wpo: bool = False,
) -> float:
    """TRL 1.16's formulas (trl/trainer/dpo_trainer.py), τ = 0.05; WPO's weights are not
    differentiated, so they are the fixtures'."""
    if ld_alpha is not None:
        lengths = rows.mask.sum(1).reshape(-1, 2).min(1).repeat(2)[:, None]
        weights = np.where(rows.mask.cumsum(1) <= lengths, 1.0, ld_alpha)
        rows = Rows(rows.logprobs, weights * rows.reference, rows.mask)
        logprobs = weights * logprobs
    h, e = beta * margins(logprobs, rows), label_smoothing
    ratios = beta * (sums(logprobs, rows) - sums(rows.reference, rows))
    c, r = ratios[0::2], ratios[1::2]
    total, then = sums(logprobs, rows), sums(rows.reference, rows)

    def smoothed(margin: np.ndarray) -> np.ndarray:
        return -(1 - e) * log_sigmoid(beta * margin) - e * log_sigmoid(-beta * margin)

    values = {
        "sigmoid": lambda: -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h),
        "robust": lambda: (-(1 - e) * log_sigmoid(h) + e * log_sigmoid(-h)) / (1 - 2 * e),
        "hinge": lambda: np.maximum(0, 1 - h),
        "ipo": lambda: (margins(logprobs, rows, means) - 1 / (2 * beta)) ** 2,
        "ipo_sum": lambda: (margins(logprobs, rows) - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: -log_sigmoid(beta * margins(logprobs, rows, means)),
        "exo_pair": lambda: (
            sigmoid(h) * (log_sigmoid(h) - np.log(1 - e))
            + sigmoid(-h) * (log_sigmoid(-h) - np.log(e))
        ),
        "nca_pair": lambda: -log_sigmoid(c) - 0.5 * log_sigmoid(-c) - 0.5 * log_sigmoid(-r),
        "bco_pair": lambda: -log_sigmoid(c) - log_sigmoid(-r),
        "sppo_hard": lambda: (c / beta - 0.5 / beta) ** 2 + (r / beta + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - sigmoid(c) + sigmoid(r),
        "apo_down": lambda: sigmoid(c) + 1 - sigmoid(h),
        "discopop": lambda: (
            -log_sigmoid(h) * (1 - sigmoid(h / 0.05)) + np.exp(-h) * sigmoid(h / 0.05)
        ),
        "sft": lambda: -sums(logprobs, rows)[0::2] * SIDES[0::2],
        "aot": lambda: smoothed(
            np.sort(total[0::2] - total[1::2]) - np.sort(then[0::2] - then[1::2])
        ),
        "aot_unpaired": lambda: smoothed(np.sort(c) / beta - np.sort(r) / beta),
    }
    kinds = [loss_type] if isinstance(loss_type, str) else loss_type
    weights = loss_weights or [1.0] * len(kinds)
    held = np.exp(means(make_rows().logprobs + COLLISION, rows)) if wpo else np.ones(len(LENGTHS))
    pairs = held[0::2] * held[1::2]
    return float(
        sum(
            weight * (values[kind]() * pairs).mean()
            for kind, weight in zip(kinds, weights, strict=True)
        )
    )


def oracle_orpo(logprobs: np.ndarray, rows: Rows, *, beta: float) -> float:
    average = means(logprobs, rows)
    odds = average - np.log1p(-np.exp(average))
    return float((-average[0::2] - beta * log_sigmoid(odds[0::2] - odds[1::2])).mean())


def oracle_simpo(logprobs: np.ndarray, rows: Rows, *, beta: float, gamma: float) -> float:
    average = means(logprobs, rows)
    return float(-log_sigmoid(beta * (average[0::2] - average[1::2]) - gamma).mean())


def oracle_cpo(logprobs: np.ndarray, rows: Rows, *, beta: float, nll_weight: float) -> float:
    total = sums(logprobs, rows)
    nll = -means(logprobs, rows)[0::2]
    return float((-log_sigmoid(beta * (total[0::2] - total[1::2])) + nll_weight * nll).mean())


def oracle_kto(logprobs: np.ndarray, rows: Rows, *, beta: float) -> float:
    ratios = sums(logprobs, rows) - sums(rows.reference, rows)
    desirable = 1.5 * (1 - 1 / (1 + np.exp(-beta * (ratios - 0.3))))
    undesirable = 0.8 * (1 - 1 / (1 + np.exp(-beta * (0.3 - ratios))))
    return float(np.where(LABELS > 0, desirable, undesirable).mean())


def oracle_nll(logprobs: np.ndarray, rows: Rows) -> float:
    return float(-logprobs[rows.mask].mean())


def oracle_dft(logprobs: np.ndarray, rows: Rows) -> float:
    """The probability is not differentiated: it is the fixtures'."""
    held = np.exp(make_rows().logprobs[rows.mask])
    return float(-(held * logprobs[rows.mask]).mean())


PLAIN = {"label_smoothing": 0.0}
CASES: dict[str, tuple[Callable[..., LossOutputs], Callable[..., float], dict[str, Any]]] = {
    "dpo": (dpo_loss, oracle_dpo, PLAIN | {"beta": 0.1, "loss_type": "sigmoid"}),
    "cdpo": (dpo_loss, oracle_dpo, {"beta": 0.5, "loss_type": "sigmoid", "label_smoothing": 0.1}),
    "robust": (dpo_loss, oracle_dpo, {"beta": 0.5, "loss_type": "robust", "label_smoothing": 0.1}),
    "hinge": (dpo_loss, oracle_dpo, PLAIN | {"beta": 0.2, "loss_type": "hinge"}),
    "ipo": (dpo_loss, oracle_dpo, PLAIN | {"beta": 0.3, "loss_type": "ipo"}),
    "ipo_sum": (dpo_loss, oracle_dpo, PLAIN | {"beta": 0.3, "loss_type": "ipo_sum"}),
    **{
        kind: (dpo_loss, oracle_dpo, PLAIN | {"beta": 0.3, "loss_type": kind, "discopop_tau": 0.05})
        for kind in (
            "sigmoid_norm",
            "nca_pair",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "discopop",
            "sft",
        )
    },
    "exo_pair": (
        dpo_loss,
        oracle_dpo,
        {"beta": 0.5, "loss_type": "exo_pair", "label_smoothing": 0.1},
    ),
    "mpo": (
        *(dpo_loss, oracle_dpo),
        PLAIN
        | {
            "beta": 0.3,
            "loss_type": ("sigmoid", "bco_pair", "sft"),
            "loss_weights": (0.8, 0.2, 1.0),
        },
    ),
    **{
        name: (dpo_loss, oracle_dpo, PLAIN | {"beta": 0.3, "loss_type": "sigmoid"} | more)
        for name, more in {
            "aot": {"loss_type": "aot", "label_smoothing": 0.2},
            "aot_unpaired": {"loss_type": "aot_unpaired"},
            "both kinds of aot": {
                "loss_type": ("aot", "sigmoid", "aot_unpaired"),
                "loss_weights": (1.0, 0.3, 0.5),
            },
            "ld_alpha": {"ld_alpha": 0.3},
            "ld_alpha of means": {"ld_alpha": 0.0, "loss_type": ("ipo", "apo_zero")},
            "wpo": {"wpo": True},
            "wpo of two": {"wpo": True, "ld_alpha": 0.7, "loss_type": ("hinge", "bco_pair")},
        }.items()
    },
    "orpo": (orpo_loss, oracle_orpo, {"beta": 0.4}),
    "simpo": (simpo_loss, oracle_simpo, {"beta": 2.0, "gamma": 1.0}),
    "cpo": (cpo_loss, oracle_cpo, {"beta": 0.1, "nll_weight": 0.7}),
    "kto": (kto_loss, oracle_kto, {"beta": 0.3}),
    "nll": (nll_loss, oracle_nll, {}),
    "dft": (dft_loss, oracle_dft, {}),
}
PAIRED = [name for name in CASES if name not in ("kto", "nll", "dft")]
every_loss = pytest.mark.parametrize("name", CASES)


def loss_and_gradient(
    name: str, given: LossInputs
) -> tuple[float, np.ndarray, Mapping[str, float]]:
    loss, _, options = CASES[name]
    told: dict[str, mx.array] = {}

    def objective(logprobs: mx.array) -> mx.array:
        fields = {key: getattr(given, key) for key in given.__dataclass_fields__} | {
            "logprobs": logprobs
        }
        outputs = loss(LossInputs(**fields), **options)
        told.update(outputs.metrics)
        return outputs.loss

    objective(given.logprobs)
    metrics = {key: value.item() for key, value in told.items()}
    value, gradient = mx.value_and_grad(objective)(given.logprobs)
    return value.item(), np.array(gradient), metrics


# ---------------------------------------------------------------------- reference values


def printed(logps: list[list[float]], reference: list[list[float]], **others: Any) -> LossInputs:
    """Sums -4 over 8 tokens and -6.5 over 10 against the reference's -4.6 and -6."""
    lengths = [len(row) for row in logps]
    width = max(lengths)

    def padded(values: list[list[float]]) -> mx.array:
        return mx.array([row + [0.0] * (width - len(row)) for row in values])

    fields: dict[str, Any] = {
        "logprobs": padded(logps),
        "rollout_logprobs": mx.zeros((len(logps), width)),
        "ref_logprobs": padded(reference),
        "advantages": mx.ones((len(logps), width)),
        "mask": mx.arange(width)[None] < mx.array(lengths)[:, None],
        "token_normalizer": float(sum(lengths)),
        "sequence_normalizer": float(len(logps)),
    }
    return LossInputs(**fields | others)


CHOSEN, REJECTED = [[-0.5] * 8, [-0.575] * 8], [[-0.65] * 10, [-0.6] * 10]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (partial(dpo_loss, beta=0.1, loss_type="sigmoid", **PLAIN), 0.639659),
        (partial(dpo_loss, beta=0.1, loss_type="hinge", **PLAIN), 0.89),
        (partial(dpo_loss, beta=0.1, loss_type="ipo", **PLAIN), 23.765625),
        (partial(dpo_loss, beta=0.1, loss_type="ipo_sum", **PLAIN), 15.21),
        *(
            (partial(dpo_loss, beta=0.1, loss_type=kind, discopop_tau=0.05, **PLAIN), expected)
            for kind, expected in (
                *(
                    ("apo_zero", 0.972507),
                    ("apo_down", 0.987523),
                    ("bco_pair", 1.332057),
                    ("nca_pair", 1.359625),
                ),
                *(
                    ("sppo_hard", 39.61),
                    ("sigmoid_norm", 0.686917),
                    ("discopop", 0.870281),
                    ("sft", 0.5),
                ),
            )
        ),
        (partial(dpo_loss, beta=0.1, loss_type="exo_pair", label_smoothing=0.1), 0.451973),
        *(  # TRL 1.16's f_divergence_type
            (
                partial(
                    dpo_loss,
                    beta=0.1,
                    loss_type=kind,
                    f_divergence=divergence,
                    f_alpha=0.5,
                    **PLAIN,
                ),
                expected,
            )
            for divergence, kind, expected in (
                ("forward_kl", "sigmoid", 0.639663),
                ("forward_kl", "ipo", 23.802),
                ("js_divergence", "sigmoid", 0.666678),
                ("js_divergence", "ipo", 24.403101),
                ("alpha_divergence", "sigmoid", 0.640301),
                ("alpha_divergence", "ipo", 23.79878),
            )
        ),
        (
            partial(
                *(dpo_loss,),
                **PLAIN
                | {
                    "beta": 0.1,
                    "loss_type": ["sigmoid", "bco_pair", "sft"],
                    "loss_weights": [0.8, 0.2, 1.0],
                },
            ),
            1.278138,
        ),
        (partial(orpo_loss, beta=0.1), 0.553565),
        (partial(simpo_loss, beta=2.0, gamma=1.0), 1.103186),
        (partial(cpo_loss, beta=0.1, nll_weight=1.0), 1.075939),
    ],
)
def test_other_trainers_numbers(loss: Callable[[LossInputs], LossOutputs], expected: float) -> None:
    pair = printed(
        [CHOSEN[0], REJECTED[0]], [CHOSEN[1], REJECTED[1]], advantages=mx.full((2, 10), 1 / 8)
    )
    assert loss(pair).loss.item() == pytest.approx(expected, abs=1e-6 * max(1, expected))


def test_margins_of_sorted_pairs_worked() -> None:
    """The numbers of `sorted_margins`; sorted one by one they are the pairs' own Δ, 1 and -2."""
    rows, reference = (
        [np.array([each]) for each in sums]
        for sums in ((-4.0, -6.0, -5.0, -6.0), (-4.5, -5.5, -4.0, -7.0))
    )
    found = sorted_margins(["aot", "aot_unpaired"], rows, reference)
    assert found["aot"].tolist() == [-1, -1, 0, 0]
    assert found["aot_unpaired"].tolist() == [-0.5, -0.5, -0.5, -0.5]
    alone = sorted_margins(["aot", "aot_unpaired"], rows, reference, together=1)
    assert [each.tolist() for each in alone.values()] == [[1, 1, -2, -2]] * 2
    pair = [np.array([-1.0, -2.0]), np.array([-1.0, -1.0, -4.0, -2.0])]
    half = sorted_margins(["aot"], pair, [0 * row for row in pair], ld_alpha=0.5)
    assert half["aot"].tolist() == [2, 2]  # -3 - (-2 - 6 / 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"loss_type": "aot"}, "row_constants"), ({"wpo": True}, "collision_entropy")],
)
def test_losses_of_pairs_name_what_they_lack(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dpo_loss(printed(CHOSEN, CHOSEN), **PLAIN | {"beta": 0.1, "loss_type": "ipo"} | options)


def test_dft_worked() -> None:
    """(e^-1 + 2 e^-2 + 6 e^-6) / 3 = 0.217808, and the slope by the first is -e^-1 / 3 =
    -0.122626."""
    given = printed([[-1.0, -2.0], [-6.0]], [[0.0, 0.0], [0.0]])
    assert dft_loss(given).loss.item() == pytest.approx(0.217808, abs=1e-6)
    slope = mx.grad(lambda logprobs: dft_loss(replace(given, logprobs=logprobs)).loss)(
        given.logprobs
    )
    assert slope[0, 0].item() == pytest.approx(-0.122626, abs=1e-6)


def test_apo_zero_of_single_rows_worked() -> None:
    """KTO with kl = 0: σ(-0.06) = 0.485004 for the ratio 0.6 as a desirable row, σ(-0.05) =
    0.487503 for -0.5 as an undesirable one; the mean is 0.486254. TRL's apo_zero_unpaired."""
    given = printed(
        [CHOSEN[0], REJECTED[0]],
        [CHOSEN[1], REJECTED[1]],
        constants={"kl": 0.0, "desirable": 1.0, "undesirable": 1.0},
    )
    labels = mx.array([[1.0], [-1.0]]) * given.advantages
    assert kto_loss(replace(given, advantages=labels), beta=0.1).loss.item() == pytest.approx(
        0.486254, abs=1e-6
    )


def test_other_trainers_log_odds() -> None:
    pair = printed([CHOSEN[0], REJECTED[0]], [CHOSEN[1], REJECTED[1]])
    assert orpo_loss(pair, beta=0.1).metrics["log_odds"].item() == pytest.approx(0.344512, abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "sign", "expected"), [(CHOSEN, 1.0, 0.492501), (REJECTED, -1.0, 0.480011)]
)
def test_other_trainers_kto(rows: list[list[float]], sign: float, expected: float) -> None:
    constants = {"kl": 0.3, "desirable": 1.0, "undesirable": 1.0}
    row = printed(rows[:1], rows[1:], constants=constants)
    signed = LossInputs(**{**row.__dict__, "advantages": sign * row.advantages})
    assert kto_loss(signed, beta=0.1).loss.item() == pytest.approx(expected, abs=1e-6)


@every_loss
def test_the_oracles_loss_and_gradient(name: str) -> None:
    rows = make_rows()
    value, gradient, _ = loss_and_gradient(name, inputs(rows))
    _, oracle, options = CASES[name]
    assert value == pytest.approx(oracle(rows.logprobs, rows, **options), rel=1e-5)
    expected = np.zeros_like(rows.logprobs)
    for at in np.ndindex(*rows.logprobs.shape):  # central differences in float64
        sides = []
        for step in (1e-6, -1e-6):
            moved = rows.logprobs.copy()
            moved[at] += step
            sides.append(oracle(moved, rows, **options))
        expected[at] = (sides[0] - sides[1]) / 2e-6
    assert np.linalg.norm(expected) > 1e-3
    assert np.linalg.norm(gradient - expected) < 1e-5 * np.linalg.norm(expected)


# ---------------------------------------------------------------------- invariances


@every_loss
def test_only_the_completions_tokens_count(name: str) -> None:
    """Prompt and padding may hold anything, and get no gradient."""
    rows = make_rows()
    before = loss_and_gradient(name, inputs(rows))
    for poison in (-7.0, -np.inf, np.nan):
        spoilt = np.where(rows.mask, rows.logprobs, poison)
        reference = np.where(rows.mask, rows.reference, poison)
        after = loss_and_gradient(name, inputs(Rows(spoilt, reference, rows.mask)))
        assert after[0] == before[0]
        np.testing.assert_array_equal(after[1], before[1])
        assert after[2] == before[2]
    assert not before[1][~rows.mask].any()


@every_loss
@pytest.mark.parametrize("cuts", [(0, 2, 8), (0, 4, 6, 8)])
def test_how_a_mini_batch_is_cut_changes_nothing(name: str, cuts: tuple[int, ...]) -> None:
    rows = make_rows(1)
    whole = loss_and_gradient(name, inputs(rows))
    parts = [
        loss_and_gradient(name, inputs(rows, slice(a, b))) for a, b in itertools.pairwise(cuts)
    ]
    assert sum(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-6)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), whole[1], atol=1e-6)
    for key, value in whole[2].items():
        assert sum(part[2][key] for part in parts) == pytest.approx(value, abs=1e-5), key


@pytest.mark.parametrize("name", PAIRED)
def test_the_order_of_pairs_changes_nothing_that_of_a_pair_does(name: str) -> None:
    rows = make_rows(2)
    turned = [4, 5, 0, 1, 6, 7, 2, 3]
    value = loss_and_gradient(name, inputs(rows))[0]
    other = Rows(rows.logprobs[turned], rows.reference[turned], rows.mask[turned])
    columns = (np.repeat(SIDES[:, None], WIDTH, 1), COLLISION)
    sides, entropies = (mx.array(each[turned].astype(np.float32)) for each in columns)
    given = inputs(other, advantages=sides, collision_entropy=entropies)
    turned_value = loss_and_gradient(name, given)[0]
    assert turned_value == pytest.approx(value, abs=1e-6)
    swapped = [1, 0, 3, 2, 5, 4, 7, 6]
    other = Rows(rows.logprobs[swapped], rows.reference[swapped], rows.mask[swapped])
    assert abs(loss_and_gradient(name, inputs(other))[0] - value) > 1e-3


# ---------------------------------------------------------------------- what is told


def test_the_first_step_of_dpo_is_log_2_and_a_tie() -> None:
    rows = make_rows()
    same = Rows(rows.logprobs, rows.logprobs, rows.mask)
    value, gradient, metrics = loss_and_gradient("dpo", inputs(same))
    assert value == pytest.approx(math.log(2), abs=1e-7)
    assert np.linalg.norm(gradient) > 0
    assert (metrics["rewards/accuracies"], metrics["rewards/margins"]) == (0.5, 0.0)


def test_what_dpo_tells() -> None:
    rows = make_rows()
    metrics = loss_and_gradient("dpo", inputs(rows))[2]
    ratios = sums(rows.logprobs, rows) - sums(rows.reference, rows)
    chosen, rejected = ratios[0::2], ratios[1::2]
    assert metrics["rewards/chosen"] == pytest.approx(0.1 * chosen.mean(), abs=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx(0.1 * rejected.mean(), abs=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(0.1 * (chosen - rejected).mean(), abs=1e-6)
    assert metrics["rewards/accuracies"] == pytest.approx((chosen > rejected).mean())
    assert metrics["logps/chosen"] == pytest.approx(
        sums(rows.logprobs, rows)[0::2].mean(), abs=1e-5
    )


def test_what_kto_tells() -> None:
    rows = make_rows()
    metrics = loss_and_gradient("kto", inputs(rows))[2]
    ratios = sums(rows.logprobs, rows) - sums(rows.reference, rows)
    assert metrics["rewards/chosen"] == pytest.approx(0.3 * ratios[LABELS > 0].mean(), abs=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx(0.3 * ratios[LABELS < 0].mean(), abs=1e-6)
    assert metrics["rewards/accuracies"] == pytest.approx((LABELS * (ratios - 0.3) > 0).mean())
    assert metrics["kto_kl"] == pytest.approx(0.3, abs=1e-6)


def test_orpo_of_a_certain_completion_is_finite() -> None:
    """At log-probability 0 the odds are infinite: value and gradient stay numbers."""
    rows = make_rows()
    certain = np.where(rows.mask, 0.0, rows.logprobs)
    value, gradient, _ = loss_and_gradient("orpo", inputs(Rows(certain, rows.reference, rows.mask)))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_missing_reference_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss_and_gradient(name, inputs(make_rows(), ref_logprobs=None))
