"""Advantages of single turns, against numbers worked by hand."""

import math
from dataclasses import replace

import pytest

from mlx_parallm.losses.advantages import (
    PLAIN,
    by_segment,
    group_advantages,
    raw_rewards,
    token_advantages,
    turn_advantages,
    turn_returns,
)
from mlx_parallm.types import UNSCORED, Rollout, RolloutGroup

BY_TURN = replace(PLAIN, turn_gamma=1.0)


def above_the_mean(rewards):
    return group_advantages(rewards, "mean")


def episode(
    mask: str, *turn_rewards: float, reward: float | None = None, **others: object
) -> Rollout:
    """`mask` as text; the whole reward is that of the turns unless it is set."""
    marks = tuple(map(int, mask))
    return Rollout(
        tokens=tuple(range(1, len(marks) + 1)),
        mask=marks,
        logprobs=(0.0,) * len(marks),
        policy_versions=(0,) * len(marks),
        temperature=1.0,
        scores={"reward": math.fsum(turn_rewards) if reward is None else reward},
        turn_rewards=turn_rewards,
        **others,
    )


def group(*rollouts: Rollout, advantages=None) -> RolloutGroup:
    return RolloutGroup("g", "test", rollouts, advantages=advantages)


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [(1.0, (6, 3, 4, 6)), (0.5, (2.75, -0.5, 1, 6)), (0.0, (3, -1, -2, 6))],
)
def test_rewards_to_go(gamma: float, expected: tuple[float, ...]) -> None:
    """gamma 0.5, from the end: 6, -2 + 3 = 1, -1 + 0.5 = -0.5, 3 - 0.25 = 2.75."""
    assert turn_returns([3, -1, -2, 6], gamma) == expected


def test_each_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    """Rewards [0, 1] and [1, 0] have the same sum, and to go [1, 1] and [1, 0]: the first turns
    are equal, of the second ones 1 and 0 have mean and deviation 1/2."""
    same_sum = group(episode("010011", 0, 1), episode("01001", 1, 0))
    assert token_advantages(same_sum, group_advantages) is None
    rows = token_advantages(same_sum, group_advantages, BY_TURN)
    # what was asked before a turn has the turn's number; nobody trains on it
    assert rows[0] == pytest.approx((0, 0, 1, 1, 1, 1))
    assert rows[1] == pytest.approx((0, 0, -1, -1, -1))


def test_ragged_numbers_of_turns() -> None:
    """To go: a [6, 5, 3], b [2, 1], c [1].

    Turn 1: 6, 2, 1 with mean 3 → 3, -1, -2. Turn 2: 5, 1 → 2, -2. Turn 3 stands alone: against the
    mean of all six, 18 / 6 = 3 → 0; with 9 in its place: to go [12, 11, 9], of all (12 + 11 + 9 + 2
    + 1 + 1) / 6 = 6 → 3.
    """
    a, b, c = episode("0101011", 1, 2, 3), episode("01011", 1, 1), episode("011", 1)
    rows = token_advantages(group(a, b, c), above_the_mean, BY_TURN)
    assert rows[0] == pytest.approx((3, 3, 2, 2, 0, 0, 0))
    assert rows[1] == pytest.approx((-1, -1, -2, -2, -2))
    assert rows[2] == pytest.approx((-2, -2, -2))
    longer = episode("0101011", 1, 2, 9)
    assert token_advantages(group(longer, b, c), above_the_mean, BY_TURN)[0][-1] == pytest.approx(3)


def test_a_lonely_turn_is_normalised_among_all_turns() -> None:
    """To go [5, 5, 4], [1, 1]: third turn 4 of 5, 5, 4, 1, 1, mean 3.2, population variance (2 ·
    1.8² + 0.8² + 2 · 2.2²) / 5 = 3.36."""
    advantages = turn_advantages([(5, 5, 4), (1, 1)], group_advantages)
    assert advantages[0] == pytest.approx((1, 1, 0.8 / math.sqrt(3.36)))
    assert advantages[1] == pytest.approx((-1, -1))


def test_the_rest_of_the_reward_belongs_to_the_last_turn() -> None:
    """Turns [0.5, 0] of a whole 2.5: the episode's own 2 comes last. gamma 0.5: [0.5 + 1, 2];
    the other has [0, 0] of 0 → [0, 0]. Above the means: 0.75 and 1."""
    discounted = replace(PLAIN, turn_gamma=0.5)
    rows = token_advantages(
        group(episode("0101", 0.5, 0, reward=2.5), episode("0101", 0, 0)),
        above_the_mean,
        discounted,
    )
    assert rows == (
        pytest.approx((0.75, 0.75, 1, 1)),
        pytest.approx((-0.75, -0.75, -1, -1)),
    )


def test_a_penalty_for_length_is_taken_from_the_last_turn() -> None:
    """2 of 2 sampled tokens cost the whole 1: [1, 0 - 1] → to go [0, -1]; the other [0, 0 - 1] → to
    go [-1, -1]."""
    shaping = replace(BY_TURN, overlong_length=2, overlong_buffer=1)
    rows = token_advantages(
        group(episode("0101", 1, 0), episode("0101", 0, 0)), above_the_mean, shaping
    )
    assert rows == (pytest.approx((0.5, 0.5, 0, 0)), pytest.approx((-0.5, -0.5, 0, 0)))


def test_segments_of_an_episode_whose_template_rewrites_history() -> None:
    """Two turns lie in the first segment, the third in the second. To go [6, 5, 3] and [0, 0, 0]:
    above the means 3, 2.5, 1.5."""
    first = replace(episode("010110"), scores={})
    whole = episode("00011", 1, 2, 3, earlier=(first,))
    other = episode("010101", 0, 0, 0)
    rows = token_advantages(group(whole, other), above_the_mean, BY_TURN)
    assert by_segment(rows[0], whole) == [
        pytest.approx((3, 3, 2.5, 2.5, 2.5, 2.5)),
        pytest.approx((1.5,) * 5),
    ]
    assert rows[1] == pytest.approx((-3, -3, -2.5, -2.5, -1.5, -1.5))
    episode_rows = token_advantages(group(whole, other), above_the_mean)
    assert by_segment(episode_rows[0], whole) == [(3,) * 6, (3,) * 5]


def test_turns_that_touch_are_told_apart_by_their_lengths() -> None:
    """To go [2, 1] and [0, 0]; the first turn has two tokens, the second three."""
    touching = episode("0011111", 1, 1, turn_lengths=(2, 3))
    assert touching.turns == (2, 3)
    rows = token_advantages(group(touching, episode("0101", 0, 0)), above_the_mean, BY_TURN)
    assert rows[0] == pytest.approx((1, 1, 1, 1, 0.5, 0.5, 0.5))


def test_one_turn_is_the_episode() -> None:
    rollouts = [episode("0011", reward) for reward in (1.0, 0.0, 0.25)]
    for estimate in (group_advantages, above_the_mean, raw_rewards):
        assert token_advantages(group(*rollouts), estimate, BY_TURN) == token_advantages(
            group(*rollouts), estimate
        )


def test_without_rewards_of_turns_the_credit_is_the_episodes() -> None:
    without = group(episode("0101", reward=1), episode("0101", reward=0))
    assert token_advantages(without, group_advantages, BY_TURN) == token_advantages(
        without, group_advantages
    )
    mixed = group(episode("0101", 1, 0), episode("0101", reward=0))
    assert token_advantages(mixed, group_advantages, BY_TURN) == token_advantages(
        mixed, group_advantages
    )
    brought = group(episode("01", 1), episode("01", 0), advantages=((0.0, 7.0), (0.0, 2.0)))
    assert token_advantages(brought, group_advantages, BY_TURN) == brought.advantages


def test_silent_rollouts() -> None:
    """A marked one counts in the means and gets nothing; what nothing could score counts nowhere."""
    marked = episode("0101", 3, 0, zero_advantage=True)
    rows = token_advantages(
        group(episode("0101", 1, 0), marked, episode("0101", 2, 0)), above_the_mean, BY_TURN
    )
    assert rows == (pytest.approx((-1, -1, 0, 0)), (0,) * 4, pytest.approx((0, 0, 0, 0)))
    unscored = replace(marked, scores={"reward": 1.5, UNSCORED: 1.0})
    rows = token_advantages(
        group(episode("0101", 1, 0), unscored, episode("0101", 2, 0)), above_the_mean, BY_TURN
    )
    assert rows == (pytest.approx((-0.5, -0.5, 0, 0)), (0,) * 4, pytest.approx((0.5, 0.5, 0, 0)))
    assert (
        token_advantages(group(episode("01", 1), episode("01", 1)), above_the_mean, BY_TURN) is None
    )
