"""An answer without a score (None, NaN, a judge that failed) is nothing: the numbers of the others
are those of a group without it, for every advantage and in every face."""

import math
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlx_parallm.config.environment import Method
from mlx_parallm.faces.atropos.wire import from_scored_data
from mlx_parallm.faces.library.algorithms import TrainingMetrics
from mlx_parallm.losses.advantages import (
    KINDS,
    PLAIN,
    best_and_worst,
    by_sign,
    group_advantages,
    pair_advantages,
    raw_rewards,
    token_advantages,
)
from mlx_parallm.rewards.base import score_group
from mlx_parallm.rewards.computers import ParetoRewardComputer, WeightedRewardComputer
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.rewards.methods import METHODS, average_ranks, pareto_rewards, standardize
from mlx_parallm.rl_training.step.batch import StatisticsCollector
from mlx_parallm.types import UNSCORED, Rollout, RolloutGroup, Trajectory

CASES = int(os.environ.get("PROPERTY_CASES", "60"))
NOTHING = (None, math.nan, "unscored")


def advantages_of(rewards: Any, kind: Any) -> Any:
    """ "maxrl" has no rewards below 0."""
    up = abs if kind == "maxrl" else float
    return group_advantages([reward if reward is None else up(reward) for reward in rewards], kind)


ESTIMATORS: dict[str, Callable[[Any], Any]] = {
    **{kind: lambda rewards, kind=kind: advantages_of(rewards, kind) for kind in KINDS},
    "raw": raw_rewards,
    "sign": by_sign,
}


def rollout(reward: float | str | None, **more: Any) -> Rollout:
    missing = reward is None or isinstance(reward, str)
    scores = {"reward": 77.0, UNSCORED: 1.0} if missing else {"reward": reward}
    return Rollout((1, 2, 3), (0, 1, 1), (0.0, -1.0, -1.0), (0, 0, 0), 1.0, scores, **more)


def trajectory(text: str) -> Trajectory:
    return Trajectory(text, Rollout((1, 2), (0, 1), (0.0, -1.0), (0, 0), 1.0, {}), group_id="g")


def group(rewards: list[Any], *, turns: bool = False) -> RolloutGroup:
    def turn_rewards(reward: Any) -> dict[str, Any]:
        is_number = not (reward is None or isinstance(reward, str) or math.isnan(reward))
        return {"turn_rewards": (reward,)} if turns and is_number else {}

    return RolloutGroup("g", "e", tuple(rollout(r, **turn_rewards(r)) for r in rewards))


def a_case(rng: random.Random) -> tuple[list[Any], list[int]]:
    """Rewards with holes, and the places that have a number."""
    size = rng.randint(1, 7)
    rewards: list[Any] = [rng.choice((0.0, 1.0, -2.0, rng.gauss(0, 3))) for _ in range(size)]
    for _ in range(rng.randint(1, 3)):
        rewards.insert(rng.randint(0, len(rewards)), rng.choice(NOTHING))
    return rewards, [n for n, r in enumerate(rewards) if isinstance(r, float) and not math.isnan(r)]


def test_every_advantage_is_that_of_a_group_without_it() -> None:
    rng = random.Random(0)
    for _ in range(CASES):
        rewards, places = a_case(rng)
        present = [rewards[place] for place in places]
        for name, estimate in ESTIMATORS.items():
            for turns in (False, True):
                shaping = PLAIN if not turns else _by_turn()
                rows = token_advantages(group(rewards, turns=turns), estimate, shaping)
                alone = token_advantages(group(present, turns=turns), estimate, shaping)
                assert (rows is None) == (alone is None), (name, rewards)
                if rows is not None and alone is not None:
                    assert [rows[place] for place in places] == list(alone), (name, rewards)
                    others = [row for n, row in enumerate(rows) if n not in places]
                    assert not any(any(row) for row in others), (name, rewards)
        pair = pair_advantages(group(rewards), best_and_worst)
        alone = pair_advantages(group(present), best_and_worst)
        assert (pair and [pair[place] for place in places]) == (alone and list(alone))
        for kind in KINDS:
            numbers = [None if isinstance(reward, str) else reward for reward in rewards]
            values, expected = advantages_of(numbers, kind), advantages_of(present, kind)
            assert (values and tuple(values[place] for place in places)) == expected


def _by_turn() -> Any:
    from dataclasses import replace

    return replace(PLAIN, turn_gamma=1.0)


def test_every_number_that_is_reported_is_that_of_a_group_without_it() -> None:
    rng = random.Random(1)
    for _ in range(CASES):
        rewards, places = a_case(rng)
        present = [rewards[place] for place in places]
        one, other = StatisticsCollector(), StatisticsCollector()
        one.add_trained(group(rewards), 0)
        other.add_trained(group(present), 0)
        got, expected = one.result().to_json(), other.result().to_json()
        assert got["unscored_fraction"] == pytest.approx(1 - len(present) / len(rewards))
        for name in got:
            if "reward" in name or name.startswith("groups_all"):
                assert got[name] == expected[name], (name, rewards)
        assert "unscored" not in got["parts"]
        line = dict.fromkeys(("step", "loss", "kl", "entropy", "grad_norm", "learning_rate"), 0)
        line |= {"time_rollout_s": 1, "time_train_s": 1, "time_publish_s": 1}
        seen = TrainingMetrics.of(line, group(rewards).rollouts)
        assert (seen.reward_mean, seen.reward_std) == pytest.approx(
            (np.mean(present), np.std(present))
        )
        values = [math.nan if isinstance(r, str) or r is None else r for r in rewards]
        for function in (average_ranks, standardize):
            result = function(values)
            np.testing.assert_array_equal([result[n] for n in places], function(present))
        points = [(value, -value) for value in values]
        np.testing.assert_array_equal(
            [pareto_rewards(points)[n] for n in places], pareto_rewards([(r, -r) for r in present])
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("normalize", [False, True])
def test_computers_compare_it_with_nobody(method: Method, normalize: bool) -> None:
    rng = random.Random(2)
    for _ in range(CASES // 4):
        rewards, places = a_case(rng)
        table = {str(n): None if isinstance(r, str) else r for n, r in enumerate(rewards)}
        played = [trajectory(str(n)) for n in range(len(rewards))]
        for kind in (WeightedRewardComputer, ParetoRewardComputer):
            computer = kind(
                [_looked_up(table, 1.0), _looked_up(table, -1.0)],
                ["a", "b"],
                [1.0, 0.5],
                normalize=normalize,
            )
            got = computer.compute_rewards(played, method)
            alone = computer.compute_rewards([played[n] for n in places], method)
            assert [got[n] for n in places] == alone
            assert {got[n] for n in range(len(got)) if n not in places} == {None}


def _looked_up(table: dict[str, float | None], sign: float) -> Callable[[Trajectory], float | None]:
    def objective(played: Trajectory) -> float | None:
        value = table[played.text]
        return None if value is None else sign * value

    return objective


async def test_reward_functions_of_every_kind_may_leave_an_answer_without_a_score() -> None:
    """What a function returns for it: None, NaN of Python and numpy, UNSCORED; and a reward of the
    library's kind."""
    for nothing in (None, math.nan, np.float32("nan"), np.array(math.nan), UNSCORED):

        def f(completions: list[str], nothing: Any = nothing, **_: Any) -> list[Any]:
            return [nothing if text == "?" else float(text) for text in completions]

        functions = RewardFunctions([_named(f)], (), columns=None, key="rewards")
        reward = functions.for_row("q", {}, TrainingProgress)
        rollouts = await score_group(reward, [trajectory(text) for text in ("1", "?", "4", "2")])
        assert [each.is_scored for each in rollouts] == [True, False, True, True]
        rows = token_advantages(RolloutGroup("g", "e", rollouts), group_advantages)
        expected = group_advantages([1.0, 4.0, 2.0])
        assert rows is not None and expected is not None
        assert [row[0] for row in rows] == [expected[0], 0.0, *expected[1:]]
    for nothing in (None, math.nan):
        scores = [{"reward": 1.0}, {"reward": nothing, "turn_rewards": [1.0]}]
        rollouts = await score_group(lambda _, s=scores: s, [trajectory("1"), trajectory("?")])
        assert [each.is_scored for each in rollouts] == [True, False]


def _named(function: Callable[..., Any]) -> str:
    from mlx_parallm.execution.user_code import reference_to

    return reference_to(function, "f")


def test_a_group_of_the_wire_keeps_its_place_without_a_score() -> None:
    data = {
        "tokens": [[1, 2], [1, 3], [1, 4]],
        "masks": [[-100, 2], [-100, 3], [-100, 4]],
        "scores": [1.0, None, 0.0],
        "inference_logprobs": [[1.0, -1.0]] * 3,
    }
    made = from_scored_data(data, policy_version=0, environment="e")
    rows = token_advantages(made, group_advantages)
    assert rows is not None
    assert [row[1] for row in rows] == pytest.approx([1.0, 0.0, -1.0])
