"""What a reward is: a function, plain or async, from the *whole group* of trajectories to scores, one mapping for each.

Because the group is seen at once, absolute, relative and Pareto rewards have the same shape. Environments make
`Trajectory`s and call `score_group`; the number that is trained on is the score named "reward".
"""

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.types import Rollout

BETWEEN = "⟦{}⟧"
"""Around what an environment said between two answers, where people read both."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode, as text."""

    prompt: str  # what the policy was asked: text, or the rendered conversation
    response: str  # what it said, without the EOS or stop string that ended it


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode as a reward sees it, and as `RolloutManager.collect_rollouts` returns it."""

    text: str  # the policy's last answer, without the EOS or stop string that ended it
    rollout: Rollout  # tokens, mask, log-probabilities, stop reason; its scores are empty until it is scored
    prompt: str = ""  # text of the opening
    history: tuple[Turn, ...] = ()  # every turn, the last one included
    step_count: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what the environment noted: tool calls, budget, spent …
    group_id: str = ""  # the same for all trajectories of one prompt
    out_of_room: bool = False  # truncated, and by the limit of the whole sequence (max_token_length)

    @property
    def response(self) -> str:
        return self.text

    @property
    def conversation(self) -> str:
        """Every answer, and in ⟦ ⟧ what the policy was asked between two of them. For people."""
        later = "".join(f"\n{BETWEEN.format(turn.prompt)}\n{turn.response}" for turn in self.history[1:])
        return (self.history[0].response if self.history else self.text) + later

    @property
    def truncated(self) -> bool:
        """Ended by a limit (of tokens or of steps), not by the environment or the policy."""
        return self.rollout.stop_reason == "length"

    @property
    def error(self) -> str | None:
        """Why the episode failed; None: it did not."""
        return self.rollout.error


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
