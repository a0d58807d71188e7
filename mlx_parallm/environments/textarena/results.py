"""Rewards of TextArena's games: the result of each player, by player.

rewards = ["python:mlx_parallm.environments.textarena.results:result"]     (the default)
reward_options = { result = { baseline = "role" } }
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.types import UNSCORED, Trajectory

Baseline = Literal["group", "role"]


def result(
    trajectories: Sequence[Trajectory],
    log_metric: Callable[[str, float], None],
    baseline: Baseline = "group",
) -> list[float | str]:
    """Return TextArena's reward of each player; one that never had a turn is not scored.

    `baseline` "role" takes the mean of the group's players in the same seat off each reward, so
    that who begins, or is dealt the better role, is not what is learned from (role-conditioned
    advantage estimation of SPIRAL, arXiv:2506.24119). Metrics: `player_N/reward`, `player_N/won`,
    `player_N/invalid_move`.
    """
    if baseline not in ("group", "role"):
        raise RolloutRejectedError(f'baseline: "group" or "role", not {baseline!r}')
    by_seat: defaultdict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        facts = trajectory.metadata
        seat, reward = facts["player"], facts["reward"]
        log_metric(f"player_{seat}/reward", reward)
        log_metric(f"player_{seat}/won", float(reward > 0))
        log_metric(f"player_{seat}/invalid_move", float(facts["invalid_move"]))
        if facts["played"]:
            by_seat[seat].append(reward)
    mean = {seat: sum(values) / len(values) for seat, values in by_seat.items()}
    return [
        t.metadata["reward"] - (mean[t.metadata["player"]] if baseline == "role" else 0.0)
        if t.metadata["played"]
        else UNSCORED
        for t in trajectories
    ]
