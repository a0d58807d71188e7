"""Several objectives at once: trajectories are ranked by Pareto fronts, with no weights between the
objectives.

python examples/pareto.py [--quick]
"""

import sys

import mlx.optimizers as optim

from mlx_parallm.primitives import (
    AlgorithmConfig,
    BackpropConfig,
    BackpropModule,
    GRPOAlgorithm,
    InferenceModule,
    ParetoRewardComputer,
    RolloutConfig,
    RolloutManager,
    SimpleTextEnvironment,
)


def letters(trajectory):
    """The more letters the better …"""
    return sum(character.isalpha() for character in trajectory.text) / max(len(trajectory.text), 1)


def brevity(trajectory):
    """… and the shorter the better."""
    return -len(trajectory.text)


def main(iterations: int) -> None:
    with InferenceModule("builtin:tiny") as inference:
        env = SimpleTextEnvironment(inference, prompts=["Sort: dbca", "Reverse: hfkdo"])
        manager = RolloutManager(env, RolloutConfig(max_tokens=12))
        computer = ParetoRewardComputer([letters, brevity], objective_names=["letters", "brevity"])

        trajectories = manager.collect_rollouts(16)
        front = computer.get_pareto_frontier_indices(trajectories)
        print("not dominated:", [trajectories[index].text for index in front])
        print("before:", computer.compute_objective_statistics(trajectories))

        config = BackpropConfig(kl_coef=0.01)
        backprop = BackpropModule(inference, optim.AdamW(learning_rate=2e-3), config=config)
        settings = AlgorithmConfig(batch_size=32, reward_method="pareto", ppo_epochs=1)
        GRPOAlgorithm(env, manager, computer, backprop, settings).train(iterations)
        print("after: ", computer.compute_objective_statistics(manager.collect_rollouts(32)))


if __name__ == "__main__":
    main(iterations=2 if "--quick" in sys.argv else 20)
