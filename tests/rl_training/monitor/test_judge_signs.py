"""Signs of a judge of groups, at their edges; the numbers are those that `builtin:group_judge` logs."""

import pytest

from mlx_parallm.rl_training.monitor.health import find

SOUND = {"score_spread": 0.2, "length_correlation": 0.3, "order_agreement": 0.9}


def named(reward=0.5, lines=5, judge="group_judge", **numbers):
    keys = {f"metrics/{judge}/{key}/mean": value for key, value in (SOUND | numbers).items()}
    line = {"reward_mean": reward, "reward_std": 0.3, "groups": 16} | keys
    return [d for d in find([line] * lines, [line]) if d.name.startswith("judge")]


def test_a_judge_that_tells_answers_apart_is_not_named() -> None:
    assert named() == []
    assert named(score_spread=0.01, length_correlation=-0.7, order_agreement=0.7) == []


@pytest.mark.parametrize(
    ("numbers", "name", "words"),
    [
        ({"score_spread": 0.0}, "judge-constant", "the same score in 5 steps"),
        ({"length_correlation": 0.9}, "judge-follows-length", "the longer answer higher"),
        ({"length_correlation": -0.9}, "judge-follows-length", "the shorter answer higher"),
        ({"order_agreement": 0.5}, "judge-disagrees", "50% of the pairs"),
    ],
)
def test_each_is_named(numbers: dict[str, float], name: str, words: str) -> None:
    [found] = named(**numbers)
    assert found.name == name and words in found.sentence and found.setting
    [other] = named(judge="tone", **numbers)
    assert "tone" in other.sentence, "a judge under another name"
    assert named(lines=2, **numbers) == [], "two steps are chance"


def test_a_judge_that_disagrees_is_not_named_where_the_policy_learns() -> None:
    line = {"reward_mean": 0.2, "reward_std": 0.3, "groups": 16}
    line |= {"metrics/group_judge/order_agreement/mean": 0.5}
    later = [line | {"reward_mean": 0.8}] * 5
    assert not [d for d in find(later, [line]) if d.name.startswith("judge")]
    assert [d.name for d in find([line] * 5, [line]) if d.name.startswith("judge")]


def test_equal_scores_of_perfect_answers_are_right_if_they_differed_before() -> None:
    """A judge that gives everything full marks from the first step on was talked into it, or knows
    nothing. What else is rewarded hides neither."""

    def judged(spread: float, score: float, reward: float = 1.0) -> dict[str, float]:
        return {
            "reward_mean": reward,
            "reward_std": 0.3,
            "groups": 16,
            "rewards/group_judge/mean": score,
            "metrics/group_judge/score_spread/mean": spread,
        }

    def names(first: dict[str, float], last: dict[str, float]) -> list[str]:
        found = [sign.name for sign in find([last] * 5, [first])]
        return [name for name in found if name.startswith("judge")]

    assert names(judged(0.2, 0.5), judged(0.0, 1.0)) == []
    assert names(judged(0.2, 0.5), judged(0.0, 1.0, reward=0.0)) == [], "of gdpo, say"
    assert names(judged(0.0, 1.0), judged(0.0, 1.0)) == ["judge-constant"]
    assert names(judged(0.2, 0.5), judged(0.0, 0.5, reward=2.0)) == ["judge-constant"]
