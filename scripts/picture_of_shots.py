"""Draw the shots of a physics expert, and of one that has not learned: docs/experts.png.

    .venv/bin/python -m scripts.picture_of_shots [--expert checkpoints/physics_expert/best.safetensors]

Each panel is one unseen task. The first shots are pale, the last one is dark; an episode ends with
a hit.
"""

import argparse
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401 - the fast BLAS comes before MLX

# isort: split
import matplotlib
import mlx.core as mx
import numpy as np

from examples.experts.train_physics_expert import UNSEEN
from mlx_parallm.systems.experts import RNNExpertBase, load_expert
from mlx_parallm.systems.experts.registry import physics_controller
from mlx_parallm.systems.experts.vector_tasks import (
    ATTEMPTS,
    GRAVITY,
    HIT_M,
    ProjectileTask,
    flight,
    shot_of,
)

TASKS = 4


def shots_of(expert: RNNExpertBase) -> list[dict[str, Any]]:
    """Return target, wind, and the shots (angle, velocity) of the first episode of each task."""
    task = ProjectileTask(TASKS)
    observations = task.reset(UNSEEN)
    episodes = [
        {"target": 200 * row[0], "wind": 10 * row[3], "shots": [], "hit": False}
        for row in observations
    ]
    state = expert.initial_state(TASKS)
    for _ in range(ATTEMPTS):
        output = expert.step(mx.array(observations), state, deterministic=True)
        state, angles, velocities = output.hidden, *shot_of(np.array(output.action))
        for episode, angle, velocity in zip(episodes, angles, velocities, strict=True):
            if not episode["hit"]:
                episode["shots"].append((angle, velocity))
                episode["hit"] = (
                    abs(flight(angle, velocity, episode["wind"]) - episode["target"]) < HIT_M
                )
        observations = task.step(np.array(output.action)).observations
    return episodes


def draw(axis: Any, episode: dict[str, Any]) -> None:
    for number, (angle, velocity) in enumerate(episode["shots"], start=1):
        radians = np.radians(angle)
        seconds = np.linspace(0, 2 * velocity * np.sin(radians) / GRAVITY, 60)
        across = velocity * np.cos(radians) * seconds + 0.5 * episode["wind"] * seconds
        height = velocity * np.sin(radians) * seconds - 0.5 * GRAVITY * seconds**2
        shade = number / len(episode["shots"])
        axis.plot(
            across, height, color=(0.12, 0.25, 0.6, 0.15 + 0.85 * shade**2), linewidth=0.8 + shade
        )
    axis.plot([episode["target"]], [0], "v", color="crimson", markersize=9, clip_on=False)
    count = len(episode["shots"])
    ends = f"hit with shot {count}" if episode["hit"] else f"{count} misses"
    axis.set_title(
        f"{episode['target']:.0f} m, wind {episode['wind']:+.1f} m/s: {ends}", fontsize=9
    )
    axis.set_ylim(bottom=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--expert", type=Path, default=Path("checkpoints/physics_expert/best.safetensors")
    )
    parser.add_argument("--output", type=Path, default=Path("docs/experts.png"))
    args = parser.parse_args()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mx.random.seed(0)
    rows = {"before": physics_controller(), "after 100,000 steps": load_expert(args.expert)}
    figure, axes = plt.subplots(len(rows), TASKS, figsize=(13, 5), layout="constrained")
    for line, (name, expert) in zip(axes, rows.items(), strict=True):
        for axis, episode in zip(line, shots_of(expert), strict=True):
            draw(axis, episode)
        line[0].set_ylabel(f"{name}\nheight, m")
    for axis in axes[-1]:
        axis.set_xlabel("m")
    figure.savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
