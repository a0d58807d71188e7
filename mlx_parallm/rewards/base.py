"""What a reward is: a function, plain or async, from the *whole group* of trajectories to scores, one mapping for each.

Because the group is seen at once, absolute, relative and Pareto rewards have the same shape. Environments make
`Trajectory`s and call `score_group`; the number that is trained on is the score named "reward".
"""

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.types import Rollout, Trajectory

Scores = Sequence[Mapping[str, float]]
GroupReward = Callable[[Sequence[Trajectory]], Scores | Awaitable[Scores]]

UNSCORED = "unscored"
"""A score of this name marks a trajectory that nothing could score: it gets no advantage. Its "reward" should be the
mean of the others, so that the group's mean stays what they make it."""


async def score_group(reward: GroupReward, trajectories: Sequence[Trajectory]) -> tuple[Rollout, ...]:
    """`scored` with what the reward, plain or async, says of the group."""
    result = reward(trajectories)
    return scored(trajectories, await result if inspect.isawaitable(result) else result)


def scored(trajectories: Sequence[Trajectory], scores_G: Scores) -> tuple[Rollout, ...]:
    """The rollouts of the group with their scores filled in.

    Raises RolloutRejectedError: another number of scores than of trajectories, no "reward", a score that is not finite.
    """
    if len(scores_G) != len(trajectories):
        raise RolloutRejectedError(f"the reward returned {len(scores_G)} scores for {len(trajectories)} trajectories")
    for scores in scores_G:
        if not isinstance(scores, Mapping):
            raise RolloutRejectedError(
                f'the reward returned {scores!r} for a trajectory; expected {{"reward": number}}'
            )
        if "reward" not in scores:
            raise RolloutRejectedError(f'the scores {dict(scores)} have no "reward"')
        for name, value in scores.items():
            if not math.isfinite(value):
                raise RolloutRejectedError(f"score {name!r} is {value}")
    return tuple(
        dataclasses.replace(
            trajectory.rollout,
            scores={name: float(value) for name, value in scores.items()},
            zero_advantage=trajectory.rollout.zero_advantage or UNSCORED in scores,
        )
        for trajectory, scores in zip(trajectories, scores_G, strict=True)
    )
