"""What a reward is: a function, plain or async, from the *whole group* of responses to scores, one mapping for each
response.

Because the group is seen at once, absolute, relative and Pareto rewards have the same shape. Environments make
`Response`s and call `score_group`; the number that is trained on is the score named "reward".
"""

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.types import Rollout


@dataclass(frozen=True, slots=True)
class Response:
    """One finished episode as a reward sees it."""

    text: str  # the policy's last answer, without the EOS or stop string that ended it
    rollout: Rollout  # tokens, mask, log-probabilities, stop reason; its scores are still empty


Scores = Sequence[Mapping[str, float]]
GroupReward = Callable[[Sequence[Response]], Scores | Awaitable[Scores]]

UNSCORED = "unscored"
"""A score of this name marks a response that nothing could score: it gets no advantage. Its "reward" should be the mean
of the others, so that the group's mean stays what they make it."""


async def score_group(reward: GroupReward, responses: Sequence[Response]) -> tuple[Rollout, ...]:
    """The rollouts of the group with their scores filled in.

    Raises RolloutRejectedError: another number of scores than of responses, no "reward", a score that is not finite.
    """
    result = reward(responses)
    scores_G = await result if inspect.isawaitable(result) else result
    if len(scores_G) != len(responses):
        raise RolloutRejectedError(f"the reward returned {len(scores_G)} scores for {len(responses)} responses")
    for scores in scores_G:
        if not isinstance(scores, Mapping):
            raise RolloutRejectedError(f'the reward returned {scores!r} for a response; expected {{"reward": number}}')
        if "reward" not in scores:
            raise RolloutRejectedError(f'the scores {dict(scores)} have no "reward"')
        for name, value in scores.items():
            if not math.isfinite(value):
                raise RolloutRejectedError(f"score {name!r} is {value}")
    return tuple(
        dataclasses.replace(
            response.rollout,
            scores={name: float(value) for name, value in scores.items()},
            zero_advantage=response.rollout.zero_advantage or UNSCORED in scores,
        )
        for response, scores in zip(responses, scores_G, strict=True)
    )
