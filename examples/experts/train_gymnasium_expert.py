"""Train an expert on an environment of gymnasium (`pip install '.[gymnasium]'` in the clone).

    python examples/experts/train_gymnasium_expert.py --env CartPole-v1

Writes CHECKPOINT_DIR/best.safetensors and CHECKPOINT_DIR/latest, from which `--resume` continues.
docs/systems.md#experts has the settings for CartPole-v1 and Pendulum-v1.
"""

from dataclasses import fields

import numpy as np

from mlx_parallm.systems.experts.expert import ExpertConfig, RNNExpertBase
from mlx_parallm.systems.experts.recurrent_ppo import RecurrentPPOConfig, evaluate
from mlx_parallm.systems.experts.running import (
    BEST,
    exit_in_words,
    parser_of,
    show,
    train_expert,
)
from mlx_parallm.systems.experts.saving import load_expert
from mlx_parallm.systems.experts.vector_tasks import GymnasiumTask

EPISODES = 20  # to choose the best expert by, and other ones to judge it by
CHOSEN_BY, UNSEEN = 10**6, 8 * 10**6


def mean_return(expert: RNNExpertBase, id: str, seed: int) -> float:
    """Return the mean return of 20 episodes; the most likely actions."""
    task = GymnasiumTask(id, EPISODES)
    try:
        return float(
            np.mean([episode["return"] for episode in evaluate(expert, task, EPISODES, seed=seed)])
        )
    finally:
        task.close()


def main() -> None:
    usual = RecurrentPPOConfig()
    parser = parser_of(
        __doc__ or "",
        timesteps=100_000,
        learning_rate=usual.learning_rate,
        name="gymnasium_expert",
    )
    parser.add_argument(
        "--env", required=True, help="the environment's id, for example CartPole-v1"
    )
    parser.add_argument("--envs", type=int, default=16, help="episodes side by side (default 16)")
    parser.add_argument("--hidden-dim", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=1)
    numbers = {
        field.name: field.default for field in fields(usual) if type(field.default) in (int, float)
    }
    del numbers["learning_rate"]  # --lr
    parser.add_argument(
        "--reward-scale", type=float, help="of what is learned from (default: measured)"
    )
    for name, value in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            default=value,
            help=f"(default {value})",
        )
    arguments = parser.parse_args()
    task = GymnasiumTask(arguments.env, arguments.envs)
    config = ExpertConfig(
        arguments.env,
        obs_dim=task.obs_dim,
        action_dim=task.action_dim,
        hidden_dim=arguments.hidden_dim,
        num_layers=arguments.num_layers,
        discrete_actions=task.num_actions > 0,
        num_actions=task.num_actions,
        action_low=task.action_low,
        action_high=task.action_high,
    )
    ppo = RecurrentPPOConfig(
        learning_rate=arguments.lr,
        reward_scale=arguments.reward_scale,
        **{name: vars(arguments)[name] for name in numbers},
    )
    train_expert(
        arguments,
        config,
        task,
        ppo,
        score=lambda expert: mean_return(expert, arguments.env, seed=CHOSEN_BY),
    )
    best = load_expert(arguments.checkpoint_dir / BEST)
    reached = mean_return(best, arguments.env, seed=UNSEEN)
    show(
        f"{arguments.env}: mean return {reached:.1f} over {EPISODES} episodes;"
        f" {arguments.checkpoint_dir / BEST}"
    )


if __name__ == "__main__":
    exit_in_words(main)
