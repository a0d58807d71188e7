"""Group advantages against hand-worked numbers and the values of other trainers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.advantages import (
    PLAIN,
    AdvantageKind,
    LengthPenalty,
    OverBatch,
    group_advantages,
    length_penalties,
    over_batch,
    overlong_penalty,
    raw_rewards,
    to_go,
    token_advantages,
    whiten,
)
from mlx_parallm.rewards.methods import combine
from mlx_parallm.types import Rollout, RolloutGroup
from tests.rl_training.rollouts import make_group, make_rollout


def test_population_std() -> None:
    assert group_advantages([1, 0, 0]) == pytest.approx([1.414214, -0.707107, -0.707107], abs=1e-6)
    assert group_advantages([0.001, 0.002]) == pytest.approx([-1, 1], abs=1e-4), (
        "a small real difference counts"
    )
    expected = np.array([0.5, 0.25, 1]) - 7 / 12
    assert group_advantages([0.5, 0.25, 1]) == pytest.approx(expected / expected.std(), abs=1e-6)


@pytest.mark.parametrize(
    "rewards",
    [[0.5] * 4, [0.1 + 0.2, 0.3, 0.3], [1e9 + 1e-6, 1e9], [0.7]],
    ids=["equal", "rounding", "large", "one"],
)
def test_equal_rewards_have_no_variance(rewards: list[float]) -> None:
    """0.1 + 0.2 is not 0.3: divided by its own std that difference would be an advantage of 1.4."""
    assert group_advantages(rewards) is None
    assert group_advantages(rewards, "mean") is None


def test_a_kind_that_there_is_not() -> None:
    for rewards in ([1.0, 0.0], [1.0, 1.0]):
        with pytest.raises(ValueError, match=r"'grpo'.*std_sample"):
            group_advantages(rewards, "grpo")  # type: ignore[arg-type]


def test_rewards_below_0_have_no_mean_to_be_a_share_of() -> None:
    with pytest.raises(ConfigError, match="maxrl"):
        group_advantages([1.0, -0.5], "maxrl")


GROUPS = ([1, 0, 0], [0.5, 0.25, 1])


@pytest.mark.parametrize(
    ("kind", "epsilon", "expected"),
    [
        # verl
        ("std_sample", 1e-6, [1.154699, -0.577349, -0.577349, -0.218217, -0.872869, 1.091087]),
        ("std_sample", 1e-4, [1.154501, -0.57725, -0.57725, -0.218161, -0.872643, 1.090804]),  # TRL
        # mlx-lm-lora
        ("std", 1e-4, [1.413914, -0.706957, -0.706957, -0.267176, -1.068702, 1.335878]),
        ("mean", 0.0, [0.666667, -0.333333, -0.333333, -0.083333, -0.333333, 0.416667]),
        ("rloo", 0.0, [1, -0.5, -0.5, -0.125, -0.5, 0.625]),
        ("maxrl", 0.0, [1.999994, -0.999997, -0.999997, -0.142857, -0.571428, 0.714285]),
        ("none", 0.0, [1, 0, 0, 0.5, 0.25, 1]),
        # before `over_batch`
        ("std_batch", 0.0, [0.666667, -0.333333, -0.333333, -0.083333, -0.333333, 0.416667]),
        ("batch", 0.0, [1, 0, 0, 0.5, 0.25, 1]),
    ],
)
def test_other_trainers_numbers(kind: AdvantageKind, epsilon: float, expected: list[float]) -> None:
    found = [
        value
        for rewards in GROUPS
        for value in group_advantages(rewards, kind, epsilon=epsilon) or ()
    ]
    assert found == pytest.approx(expected, abs=1e-6)


def test_rloo_is_each_against_the_mean_of_the_others() -> None:
    rewards = [0.3, 1.7, -2.0, 0.4]
    expected = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert group_advantages(rewards, "rloo") == pytest.approx(expected)


def test_raw_rewards_are_never_without_a_word() -> None:
    assert group_advantages([0, 0], "none") is None
    assert group_advantages([2, 2], "none") == (2, 2)
    assert raw_rewards([0, 0]) == (0, 0)
    zeros = make_group("g", [0, 0])
    assert token_advantages(zeros, raw_rewards) == ((0.0,) * 5, (0.0,) * 5)


def test_whitening() -> None:
    assert whiten(np.array([1, 0, 0.5])) == pytest.approx([1, -1, 0], abs=1e-6)
    values = np.random.default_rng(0).normal(3, 7, 1000).astype(np.float32)
    assert (whiten(values).mean(), whiten(values).std(ddof=1)) == (
        pytest.approx(0, abs=1e-12),
        pytest.approx(1),
    )
    assert whiten(np.array([4.0])).tolist() == [0]
    noise = np.full(100, 0.3) + 1e-12 * np.arange(100)
    assert np.abs(whiten(noise)).max() < 1e-6  # rounding noise stays noise


def test_to_go() -> None:
    assert to_go(np.array([1, 2, 3, 4]), [3, 1]).tolist() == [6, 5, 3, 4]
    assert to_go(np.array([1, 2, 3, 4]), [2, 0, 2]).tolist() == [3, 2, 7, 4]


def test_overlong_penalty() -> None:
    """DAPO's R_length with its sign turned: (L_max - L_cache - L) / L_cache between the two
    lengths."""
    found = [
        overlong_penalty(length, max_length=20, buffer=4) for length in (0, 16, 17, 19, 20, 25)
    ]
    assert found == [0, 0, 0.25, 0.75, 1, 1]


def test_advantages_go_to_every_token() -> None:
    group = make_group("g", [1, 0])
    assert token_advantages(group, group_advantages) == (
        (pytest.approx(1.0),) * 5,
        (pytest.approx(-1.0),) * 5,
    )
    assert token_advantages(make_group("g", [1, 1]), group_advantages) is None


def test_an_environments_own_advantages_win() -> None:
    rollouts = (make_rollout(reward=1), make_rollout(reward=1))
    per_rollout = RolloutGroup("g", "test", rollouts, advantages=(0.3, 0.0))
    assert token_advantages(per_rollout, group_advantages) == ((0.3,) * 5, (0.0,) * 5)
    per_token = RolloutGroup(
        "g", "test", rollouts, advantages=((0, 0, 0, 1.0, 2.0), (0, 0, 0, 0, 0))
    )
    assert token_advantages(per_token, group_advantages) == ((0, 0, 0, 1.0, 2.0), (0, 0, 0, 0, 0))
    assert (
        token_advantages(
            RolloutGroup("g", "test", rollouts, advantages=(0.0, 0.0)), group_advantages
        )
        is None
    )


def test_a_zeroed_rollout_counts_in_the_mean_and_learns_nothing() -> None:
    """Rewards 3, 0, 0 → mean 1 → 2, -1, -1; the last one is zeroed, also where the environment
    gave it an advantage."""
    one, zeroed = make_rollout(reward=3.0), make_rollout(zero_advantage=True)

    def rows(*rollouts: Rollout, advantages: tuple[float, ...] | None = None) -> object:
        group = RolloutGroup("g", "test", rollouts, advantages=advantages)
        return token_advantages(group, lambda rewards: group_advantages(rewards, "mean"))

    assert rows(one, make_rollout(), zeroed) == ((2.0,) * 5, (-1.0,) * 5, (0.0,) * 5)
    assert rows(one, zeroed, advantages=(0.5, 0.5)) == ((0.5,) * 5, (0.0,) * 5)
    assert rows(replace(one, zero_advantage=True), zeroed) is None


@pytest.mark.parametrize("kind", ["std", "std_sample", "mean", "rloo", "none"])
@pytest.mark.parametrize("size", [1e154, 1e200, 1e308])
def test_no_size_of_reward_overflows(kind: AdvantageKind, size: float) -> None:
    """math.fsum and a square of a float raise OverflowError; the advantages are those of [1, -1,
    0] times the size."""
    got = group_advantages([size, -size, 0.0], kind)
    expected = group_advantages([1.0, -1.0, 0.0], kind)
    scale = 1.0 if kind.startswith("std") else size
    assert got == pytest.approx([value * scale for value in expected])


NAN = float("nan")
CONFLICT = [[1, 0], [0, 0], [0, 1]], [[0.5, 1], [0.25, 0], [1, 0]]  # two rewards, weights 1 and 2


def of_step(kind: OverBatch, groups: Sequence[RolloutGroup]) -> list[float]:
    """The advantages of a step, one for each of its rollouts, each the same at all its tokens."""
    shaping = replace(PLAIN, over_batch=kind)
    rows = [token_advantages(group, partial(group_advantages, kind=kind)) for group in groups]
    found = [row for each in over_batch(groups, rows, shaping) for row in each or ()]
    assert all(len(set(row)) == 1 for row in found)
    return [row[0] for row in found]


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        # TRL 1.16, scale_rewards="batch"
        ("std_batch", GROUPS, [1.453028, -0.726514, -0.726514, -0.181629, -0.726514, 0.908143]),
        # the same with a completion that no function scored
        (
            "std_batch",
            ([1, 0, NAN], GROUPS[1]),
            [1.117784, -1.117784, 0, -0.186297, -0.745189, 0.931487],
        ),
        # and multi_objective_aggregation="normalize_then_sum"
        (
            "batch",
            [
                combine("gdpo", [{"a": a, "b": b} for a, b in each], {"a": 1, "b": 2})
                for each in CONFLICT
            ],
            [0, -1.017459, 1.017459, 1.228436, -1.191012, -0.037424],
        ),
        ("batch", ([1, 0], [4, 1]), [-0.288658, -0.865976, 1.443292, -0.288658]),  # by hand
        ("batch", ([1, 1], [1, 1]), [0, 0, 0, 0]),
        ("batch", ([1], [NAN]), [0]),
    ],
)
def test_advantages_over_a_step_are_trls(
    kind: OverBatch, rewards: Sequence[Sequence[float]], expected: list[float]
) -> None:
    found = of_step(kind, [make_group(str(i), each) for i, each in enumerate(rewards)])
    assert found == pytest.approx(expected, abs=2e-6)


def test_what_is_left_out_of_a_step_and_what_brings_its_own_advantages() -> None:
    """The own advantages stay, and their rewards are in no mean; a marked rollout is in the mean
    and learns nothing."""
    own = replace(make_group("own", [100.0, -100.0]), advantages=(0.5, -0.5))
    marked = make_group("m", [4, 1])
    silent = replace(marked.rollouts[0], zero_advantage=True)
    marked = replace(marked, rollouts=(silent, marked.rollouts[1]))
    found = of_step("batch", [make_group("a", [1, 0]), own, marked])
    assert found == pytest.approx([-0.288658, -0.865976, 0.5, -0.5, 0, -0.288658], abs=1e-5)
    assert of_step("std_batch", [make_group("a", [1e300, -1e300])]) == pytest.approx(
        [0.5**0.5, -(0.5**0.5)], abs=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "rewards", "lengths", "expected"),
    [
        ("linear", [1, 1, 0], [10, 20, 40], [1 / 6, 1 / 3, 2 / 3]),
        ("linear", [0, 0], [10, 20], [0, 0]),
        ("linear", [-1, 0], [10, 20], [0, 0]),
        ("linear", [1], [0], [0]),
        ("kimi", [1, 1, 0], [10, 20, 40], [-1 / 2, -1 / 6, 1 / 2]),
        ("kimi", [0, 1, 1], [10, 20, 40], [0, -1 / 6, 1 / 2]),
        ("kimi", [1, 0], [7, 7], [0, 0]),
    ],
)
def test_what_is_lost_for_length_is_relative_to_the_group(
    kind: LengthPenalty, rewards: list[float], lengths: list[int], expected: list[float]
) -> None:
    assert length_penalties(rewards, lengths, kind) == pytest.approx(expected)
    rollouts = [
        make_rollout([9] * length, reward=reward)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    shaping = replace(PLAIN, length_penalty=(kind, 0.5))
    shaped = [reward - lost / 2 for reward, lost in zip(rewards, expected, strict=True)]
    assert shaping.rewards(rollouts) == pytest.approx(shaped)
    both = replace(shaping, overlong_length=20, overlong_buffer=10)
    over = [min(max((length - 10) / 10, 0), 1) for length in lengths]
    assert both.rewards(rollouts) == pytest.approx(
        [s - o for s, o in zip(shaped, over, strict=True)]
    )
