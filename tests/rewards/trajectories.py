"""Finished episodes for tests of rewards."""

from typing import Any

from mlx_parallm.types import Rollout, Trajectory

ROLLOUT = Rollout((1, 2, 3, 9), (0, 0, 1, 1), (0.0, 0.0, -0.5, -0.1), (0, 0, 3, 3), 1.0, {})


def trajectory(text: str = "", *, steps: int = 1, group: str = "", **metadata: Any) -> Trajectory:
    return Trajectory(
        text, ROLLOUT, prompt="2+2?", step_count=steps, metadata=metadata, group_id=group
    )
