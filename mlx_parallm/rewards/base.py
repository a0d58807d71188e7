"""A reward is a function, plain or async, from the *whole group* of trajectories to scores, one
mapping for each.

Because the group is seen at once, absolute, relative and Pareto rewards have the same shape.
Environments make `Trajectory`s and call `score_group`; the number that is trained on is the score
named "reward".
"""

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.types import MAX_REWARD, Rollout, Trajectory

Scores = Sequence[Mapping[str, float]]
GroupReward = Callable[[Sequence[Trajectory]], Scores | Awaitable[Scores]]

UNSCORED = "unscored"
"""A score of this name marks a trajectory that nothing could score: it gets no advantage. Its
"reward" should be the mean of the others, so that the group's mean stays what they make it."""


async def score_group(
    reward: GroupReward, trajectories: Sequence[Trajectory]
) -> tuple[Rollout, ...]:
    """Return the rollouts of the group with the scores of the reward, plain or async. Raises as
    `scored`."""
    result = reward(trajectories)
    return scored(trajectories, await result if inspect.isawaitable(result) else result)


def scored(trajectories: Sequence[Trajectory], scores_G: Scores) -> tuple[Rollout, ...]:
    """Return the rollouts of the group with their scores filled in.

    Raises RolloutRejectedError: the number of scores is not that of trajectories, there is no
    "reward", or a score is beyond ±MAX_REWARD.
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
        for name, value in scores.items():
            if not abs(value) <= MAX_REWARD:
                raise RolloutRejectedError(
                    f"score {name!r} is {value}, not a number of at most ±{MAX_REWARD:g}"
                )
    return tuple(
        dataclasses.replace(
            trajectory.rollout,
            scores={name: float(value) for name, value in scores.items()},
            zero_advantage=trajectory.rollout.zero_advantage or UNSCORED in scores,
        )
        for trajectory, scores in zip(trajectories, scores_G, strict=True)
    )


def verifier(check: Callable[[str], float]) -> GroupReward:
    """Make a group reward from a function of one answer's text (usually 0 to 1)."""

    def reward(responses: Sequence[Trajectory]) -> list[dict[str, float]]:
        return [{"reward": float(check(response.text))} for response in responses]

    return reward


def exact_match(answer: str) -> GroupReward:
    """1 where the text is the answer except for surrounding white space, else 0."""
    return verifier(lambda text: float(text.strip() == answer.strip()))
