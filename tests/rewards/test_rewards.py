import pytest

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rewards.base import UNSCORED, exact_match, score_group, verifier
from mlx_parallm.types import Rollout, Trajectory


def response(text: str) -> Trajectory:
    return Trajectory(text, Rollout((1, 2), (0, 1), (0.0, -0.5), (0, 3), 1.0, {}))


def test_exact_match_forgives_white_space_only():
    scores = exact_match("42")([response(text) for text in ("42", " 42\n", "4 2", "42.", "")])
    assert [score["reward"] for score in scores] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_verifier_scores_each_answer_on_its_own():
    scores = verifier(len)([response("ab"), response("abcd")])
    assert scores == [{"reward": 2.0}, {"reward": 4.0}]


async def test_a_reward_sees_the_whole_group():
    def rank(responses):
        longest = max(len(entry.text) for entry in responses)
        return [{"reward": float(len(entry.text) == longest), "length": len(entry.text)} for entry in responses]

    rollouts = await score_group(rank, [response("a"), response("abc"), response("ab")])
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 0.0]
    assert rollouts[2].scores["length"] == 2.0
    assert rollouts[0].tokens == (1, 2)
    assert rollouts[0].logprobs == (0.0, -0.5)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([{"reward": 1.0}], "1 scores for 2"),
        ([{"reward": 1.0}, {"score": 1.0}], 'no "reward"'),
        ([{"reward": 1.0}, {"reward": float("nan")}], "nan"),
        ([{"reward": 1.0}, {"reward": 1.0, "part": float("inf")}], "'part' is inf"),
    ],
)
async def test_scores_that_cannot_be_trained_on_are_refused(scores, message):
    with pytest.raises(RolloutRejectedError, match=message):
        await score_group(lambda _: scores, [response("a"), response("b")])


async def test_a_reward_may_be_async_and_leave_a_response_out():
    async def judge(responses):
        return [{"reward": 1.0}, {"reward": 1.0, UNSCORED: 1.0}]

    rollouts = await score_group(judge, [response("a"), response("b")])
    assert [rollout.zero_advantage for rollout in rollouts] == [False, True]
