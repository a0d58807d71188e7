"""Absolute rewards: each answer is checked on its own."""

from collections.abc import Callable, Sequence

from mlx_parallm.rewards.base import GroupReward
from mlx_parallm.types import Trajectory


def verifier(check: Callable[[str], float]) -> GroupReward:
    """A group reward from a function of one answer's text (usually 0 to 1)."""

    def reward(responses: Sequence[Trajectory]) -> list[dict[str, float]]:
        return [{"reward": float(check(response.text))} for response in responses]

    return reward


def exact_match(answer: str) -> GroupReward:
    """1 where the text is the answer but for surrounding white space, else 0."""
    return verifier(lambda text: float(text.strip() == answer.strip()))
