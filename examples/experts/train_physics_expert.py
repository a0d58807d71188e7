"""Train the physics expert to hit a target in wind.

    python examples/experts/train_physics_expert.py --timesteps 100000

Writes CHECKPOINT_DIR/best.safetensors, the expert, and CHECKPOINT_DIR/latest, from which `--resume`
continues.
"""

from dataclasses import replace

import numpy as np

from mlx_parallm.systems.experts.expert import RNNExpertBase
from mlx_parallm.systems.experts.recurrent_ppo import RecurrentPPOConfig, evaluate
from mlx_parallm.systems.experts.registry import physics_controller
from mlx_parallm.systems.experts.running import (
    BEST,
    exit_in_words,
    parser_of,
    show,
    train_expert,
)
from mlx_parallm.systems.experts.saving import load_expert
from mlx_parallm.systems.experts.vector_tasks import HIT_M, ProjectileTask

EPISODES = 500  # tasks to judge by
# seeds of the tasks that choose the best expert, and of those that judge it
CHOSEN_BY, UNSEEN = 10**6, 7 * 10**6
SIDE_BY_SIDE = 125  # 10 steps of each are an update, 80 of them 100,000 steps
PHYSICS_PPO = RecurrentPPOConfig(
    horizon=10, batch_size=625, learning_rate=3e-3, gamma=0.9, target_kl=None, reward_scale=1.0
)


def hit_rates(
    expert: RNNExpertBase, *, seed: int = UNSEEN, recurrent: bool = True
) -> tuple[float, float]:
    """Return the share of 500 tasks with a shot within 1 m, and within 5 m; the most likely
    actions."""
    played = evaluate(expert, ProjectileTask(EPISODES), EPISODES, seed=seed, recurrent=recurrent)
    nearest = np.array([episode["nearest"] for episode in played])
    return float((nearest < HIT_M).mean()), float((nearest < 5.0).mean())


def main() -> None:
    parser = parser_of(
        __doc__ or "",
        timesteps=100_000,
        learning_rate=PHYSICS_PPO.learning_rate,
        name="physics_expert",
    )
    parser.add_argument("--no-memory", action="store_true", help="forget between shots, to compare")
    arguments = parser.parse_args()
    recurrent = not arguments.no_memory
    ppo = replace(PHYSICS_PPO, learning_rate=arguments.lr, recurrent=recurrent)
    train_expert(
        arguments,
        physics_controller().config,
        ProjectileTask(SIDE_BY_SIDE),
        ppo,
        score=lambda expert: sum(hit_rates(expert, seed=CHOSEN_BY, recurrent=recurrent)),
    )
    best = load_expert(arguments.checkpoint_dir / BEST)
    hits, near = hit_rates(best, recurrent=recurrent)
    show(
        f"{EPISODES} unseen tasks: {hits:.3f} within 1 m, {near:.3f} within 5 m;"
        f" {arguments.checkpoint_dir / BEST}"
    )


if __name__ == "__main__":
    exit_in_words(main)
