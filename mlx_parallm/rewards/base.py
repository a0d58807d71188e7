"""A reward is a function, plain or async, from the *whole group* of trajectories to scores, one
mapping for each.

Because the group is seen at once, absolute, relative and Pareto rewards have the same shape.
Environments make `Trajectory`s and call `score_group`; the number that is trained on is the score
named "reward". Beside it "turn_rewards" may say which part of it belongs to which turn, and "extra"
may hold columns for people to read.
"""

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.tool_results import UNANSWERED
from mlx_parallm.types import MAX_REWARD, UNSCORED, Rollout, Trajectory, has_score

Scores = Sequence[Mapping[str, Any]]
"""Numbers by name, the list "turn_rewards" if a reward scores single turns, and "extra": JSON
values by column."""
GroupReward = Callable[[Sequence[Trajectory]], Scores | Awaitable[Scores]]

TURN_REWARDS = "turn_rewards"
EXTRA = "extra"
LEFT_OUT = "left_out"


async def score_group(
    reward: GroupReward, trajectories: Sequence[Trajectory]
) -> tuple[Rollout, ...]:
    """Return the rollouts of the group with the scores of the reward, plain or async. Raises as
    `scored`."""
    result = reward(trajectories)
    return scored(trajectories, await result if inspect.isawaitable(result) else result)


def scored(trajectories: Sequence[Trajectory], scores_G: Scores) -> tuple[Rollout, ...]:
    """Return the rollouts of the group with their scores filled in.

    The rewards that the environment reported for single turns are added to "reward". If one
    rollout has rewards of its turns, all rollouts get them: 0 for turns without a score. A
    "reward" of None or NaN, or a score `UNSCORED`, marks a trajectory without a score: it
    counts nowhere. So is one with a tool call that got no answer: the column "left_out" of its
    "extra" says which.

    Raises RolloutRejectedError: the number of scores is not that of trajectories, there is no
    "reward", a score is beyond ±MAX_REWARD, or "turn_rewards" are not one for each turn.
    """
    if len(scores_G) != len(trajectories):
        raise RolloutRejectedError(
            f"the reward returned {len(scores_G)} scores for {len(trajectories)} trajectories"
        )
    for scores in scores_G:
        if not isinstance(scores, Mapping):
            raise RolloutRejectedError(
                f'the reward returned {scores!r} for a trajectory; expected {{"reward": number}}'
            )
        if "reward" not in scores:
            raise RolloutRejectedError(f'the scores {dict(scores)} have no "reward"')
    scores_G = list(map(_marked, trajectories, scores_G))
    for scores in scores_G:
        numbers = list(_numbers(scores).items())
        turns = [(TURN_REWARDS, value) for value in scores.get(TURN_REWARDS, ())]
        for name, value in numbers + turns:
            if not abs(value) <= MAX_REWARD:
                raise RolloutRejectedError(
                    f"score {name!r} is {value}, not a number of at most ±{MAX_REWARD:g}"
                )
    pairs = list(zip(trajectories, scores_G, strict=True))
    by_turn = any(
        trajectory.rollout.turn_rewards or TURN_REWARDS in scores for trajectory, scores in pairs
    )
    return tuple(_scored(trajectory.rollout, scores, by_turn) for trajectory, scores in pairs)


def _marked(trajectory: Trajectory, scores: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scores, marked as unscored if "reward" is None or NaN or a call got no answer."""
    reward, reason = scores["reward"], unanswered_call(trajectory)
    if UNSCORED not in scores and has_score(reward) and reason is None:
        return scores
    kept = {name: value for name, value in scores.items() if name != TURN_REWARDS}
    if reason is not None:
        kept[EXTRA] = {**_columns(scores), LEFT_OUT: reason}
    return {**kept, "reward": reward if has_score(reward) else 0.0, UNSCORED: 1.0}


def unanswered_call(trajectory: Trajectory) -> str | None:
    """Return the words of the first call of the episode to which its tool, or the tool's server,
    gave no answer; None: all were answered. The policy did not choose its action then."""
    for call in trajectory.metadata.get("tool_calls") or ():
        if isinstance(call, Mapping) and call.get("error") in UNANSWERED:
            return f"{call.get('name')}: {str(call.get('text'))[:200]}"
    return None


def _columns(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    columns = scores.get(EXTRA)
    return columns if isinstance(columns, Mapping) else {}


def _numbers(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores without columns and turn rewards; a number named "extra" is a score."""
    is_columns = isinstance(scores.get(EXTRA), Mapping)
    no_scores = {TURN_REWARDS, EXTRA} if is_columns else {TURN_REWARDS}
    return {name: value for name, value in scores.items() if name not in no_scores}


def _scored(rollout: Rollout, scores: Mapping[str, Any], by_turn: bool) -> Rollout:
    reported = rollout.turn_rewards
    values = {name: float(value) for name, value in _numbers(scores).items()}
    if UNSCORED not in scores:
        values["reward"] += math.fsum(reported)
    if not abs(values["reward"]) <= MAX_REWARD:
        raise RolloutRejectedError(f"the reward, turn rewards included, is {values['reward']:g}")
    turns = sum(len(segment.turns) for segment in rollout.segments)
    added = scores.get(TURN_REWARDS, (0.0,) * turns)
    if by_turn and not len(added) == turns == len(reported or added):
        raise RolloutRejectedError(
            f"{len(added)} turn_rewards for an episode of {turns} turns: one is needed for each"
            " entry of trajectory.history"
        )
    return dataclasses.replace(
        rollout,
        scores=values,
        zero_advantage=rollout.zero_advantage or UNSCORED in scores,
        turn_rewards=tuple(
            float(reward) + more
            for reward, more in zip(added, reported or (0.0,) * turns, strict=True)
        )
        if by_turn
        else (),
        extra={**rollout.extra, **_columns(scores)},
    )


def verifier(check: Callable[[str], float]) -> GroupReward:
    """Make a group reward from a function of one answer's text (usually 0 to 1)."""

    def reward(responses: Sequence[Trajectory]) -> list[dict[str, float]]:
        return [{"reward": float(check(response.text))} for response in responses]

    return reward


def exact_match(answer: str) -> GroupReward:
    """1 if the text is the answer except for surrounding white space, else 0."""
    return verifier(lambda text: float(text.strip() == answer.strip()))
