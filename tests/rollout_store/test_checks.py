from typing import Any

import pytest
from hypothesis import given

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.types import RolloutGroup
from tests.rollout_store.groups import VOCAB_SIZE, groups, make_group, make_rollout

NAN, INF = float("nan"), float("inf")


def check(group: RolloutGroup) -> None:
    check_group(group, vocab_size=VOCAB_SIZE, max_token_length=16)


@given(groups())
def test_what_can_be_trained_on_passes(group: RolloutGroup) -> None:
    check_group(group, vocab_size=200_001, max_token_length=16)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (0.0, 0.0, 5e-4, -0.1, -0.2)},  # a hair above 0 is rounding
        {"policy_versions": (-1, -1, 0, 0, 0)},  # those of given tokens mean nothing
    ],
)
def test_what_means_nothing_passes(changes: dict[str, Any]) -> None:
    check(make_group(rollouts=(make_rollout(**changes),)))


def test_rollouts_without_logprobs_are_refused_unless_they_may_be_recomputed() -> None:
    group = make_group(rollouts=(make_rollout(), make_rollout(logprobs=None)))
    with pytest.raises(RolloutRejectedError, match=r"server_type.*missing_logprobs"):
        check(group)
    check_group(group, vocab_size=VOCAB_SIZE, max_token_length=16, missing_logprobs="recompute")
    half = make_group(rollouts=(make_rollout(logprobs=()),))
    with pytest.raises(RolloutRejectedError, match="0 logprobs for 5 tokens"):
        check_group(half, vocab_size=VOCAB_SIZE, max_token_length=16, missing_logprobs="recompute")


def test_every_segment_is_checked() -> None:
    faulty = make_rollout(earlier=(make_rollout(scores={}), make_rollout(scores={}, mask=(0,) * 5)))
    with pytest.raises(RolloutRejectedError, match=r"rollout 0: .*token"):
        check(make_group(rollouts=(faulty,)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": (0, 0, 1, 1)}, "4 mask values for 5 tokens"),
        ({"logprobs": (0.0,) * 6}, "6 logprobs for 5 tokens"),
        ({"policy_versions": ()}, "0 policy versions for 5 tokens"),
        ({"processed_logprobs": (0.0,)}, "1 processed logprobs for 5 tokens"),
        ({"turn_lengths": (1, 1)}, "turns of [1, 1] tokens for 3 sampled tokens"),
        ({"turn_lengths": (4, -1)}, "turns of [4, -1] tokens"),
        ({"turn_rewards": (1.0, 2.0)}, "2 turn_rewards for 1 turns"),
        ({"turn_rewards": (INF,)}, "the reward of turn 0 is inf, not a number of at most"),
        (
            {"tokens": (1, 2, 3, 4, VOCAB_SIZE)},
            f"token 4 has id {VOCAB_SIZE}, outside the vocabulary of {VOCAB_SIZE}",
        ),
        ({"tokens": (1, -1, 3, 4, 5)}, "token 1 has id -1"),
        ({"mask": (0, 0, 2, 1, 1)}, "values other than 0 and 1"),
        ({"mask": (0, 0, 0, 0, 0)}, "no token was sampled"),
        ({"mask": (1, 1, 1, 1, 1)}, "nothing precedes it"),
        ({"policy_versions": (0, 0, -1, 0, 0)}, "policy version -1 of a sampled token is negative"),
        ({"logprobs": (0.0, 0.0, NAN, -0.1, -0.1)}, "the logprob of token 2 is nan"),
        ({"logprobs": (0.0, 0.0, -0.1, -INF, -0.1)}, "the logprob of token 3 is -inf"),
        ({"logprobs": (0.0, 0.0, -0.1, -0.1, 0.01)}, "the logprob of token 4 is 0.01, more than 0"),
        ({"processed_logprobs": (0.0, 0.0, NAN, 0.0, 0.0)}, "processed logprob is not finite"),
        ({"temperature": NAN}, "temperature nan"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"scores": {"style": 1.0}}, "no score named 'reward'"),
        ({"scores": {"reward": NAN}}, "the score 'reward' is nan"),
        (
            {"scores": {"reward": 1e200}},
            "the score 'reward' is 1e+200, not a number of at most ±1e+09",
        ),
        ({"logprobs": (0.0, 0.0, -1e308, -0.1, -0.1)}, "the logprob of token 2 is -1e+308"),
        ({"scores": {"reward": 1.0, "style": INF}}, "the score 'style' is inf"),
    ],
)
def test_a_faulty_rollout_is_named_with_its_fault(changes: dict[str, Any], reason: str) -> None:
    group = make_group(rollouts=(make_rollout(), make_rollout(**changes)))
    with pytest.raises(RolloutRejectedError, match="rollout 1: ") as caught:
        check(group)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollouts": ()}, "no rollouts"),
        ({"group_id": ""}, "no id"),
        ({"group_id": "\ud800"}, r"'\ud800' holds half a character"),
        ({"environment": "\ud800"}, r"'\ud800' holds half a character"),
        ({"advantages": (1.0,)}, "1 advantages for 2 rollouts"),
        ({"advantages": (1.0, 1e200)}, "rollout 1: an advantage is not a number of at most ±1e+09"),
        ({"advantages": (1.0, NAN)}, "rollout 1: an advantage is not a number"),
        ({"advantages": ((1.0,) * 5, (1.0,) * 4)}, "rollout 1: 4 advantages for 5 tokens"),
        ({"advantages": ((1.0,) * 5, (INF,) * 5)}, "rollout 1: an advantage is not a number"),
    ],
)
def test_a_faulty_group_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RolloutRejectedError) as caught:
        check(make_group(**changes))
    assert reason in str(caught.value)


def test_the_longest_sequence_passes_and_one_more_token_does_not() -> None:
    check(make_group(rollouts=(make_rollout(prompt=6, sampled=10),)))
    with pytest.raises(RolloutRejectedError, match="max_token_length"):
        check(make_group(rollouts=(make_rollout(prompt=7, sampled=10),)))
