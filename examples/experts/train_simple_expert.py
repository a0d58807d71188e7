"""Train the smallest expert: it learns to answer 0.5.

python examples/experts/train_simple_expert.py --timesteps 50000
"""

from dataclasses import replace

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
from mlx_parallm.systems.experts.vector_tasks import ConstantTask

ENOUGH = 9.9  # out of 10
EXCELLENT = 0.1


def mean_error(expert: RNNExpertBase) -> float:
    """Return the mean of |answer - 0.5| over an episode; the most likely actions."""
    played = evaluate(expert, ConstantTask(1), 1, seed=0)
    return 1 - played[0]["return"] / ConstantTask.length


def main() -> None:
    ppo = RecurrentPPOConfig(horizon=20, batch_size=320)
    arguments = parser_of(
        __doc__ or "", timesteps=50_000, learning_rate=ppo.learning_rate, name="simple_expert"
    ).parse_args()
    config = ExpertConfig(
        "simple", obs_dim=ConstantTask.obs_dim, action_dim=1, hidden_dim=32, num_layers=1
    )
    train_expert(
        arguments,
        config,
        ConstantTask(32),
        replace(ppo, learning_rate=arguments.lr),
        score=lambda expert: -mean_error(expert),
        enough=ENOUGH,
    )
    error = mean_error(load_expert(arguments.checkpoint_dir / BEST))
    words = "excellent" if error < EXCELLENT else "not learned yet: more --timesteps"
    show(f"mean |answer - 0.5| = {error:.3f} ({words}); {arguments.checkpoint_dir / BEST}")


if __name__ == "__main__":
    exit_in_words(main)
