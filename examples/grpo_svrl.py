"""GRPO on self-verification: answers may be checked with a real calculator, which costs money.

    python examples/grpo_svrl.py [--quick] [--model ID]

The tiny model does not know the syntax, and only shows that everything runs. With a model that
follows instructions the reward says when a check is worth its price.
"""

import argparse

import mlx.optimizers as optim

from mlx_parallm.primitives import (
    AlgorithmConfig,
    BackpropConfig,
    BackpropModule,
    GRPOAlgorithm,
    InferenceModule,
    RolloutConfig,
    RolloutManager,
    SVRLEnvironment,
    SVRLRewardComputer,
)


def quality(trajectory):
    """1 for the right final answer; else up to 0.1 for writing numbers at all, so that there is
    a way to begin."""
    noted, text = trajectory.metadata, trajectory.text
    if noted["final_answer"] == noted["answer"]:
        return 1.0
    return 0.1 * sum(character.isdigit() for character in text) / max(len(text), 1)


def main(model: str, iterations: int) -> None:
    with InferenceModule(model) as inference:
        env = SVRLEnvironment(inference, tools=["verify_calculation"], budget=3.0, max_steps=2)
        manager = RolloutManager(env, RolloutConfig(num_parallel=16, max_tokens=24))
        computer = SVRLRewardComputer(task_evaluator=quality, verification_weight=0.1)
        backprop = BackpropModule(
            inference, optim.AdamW(learning_rate=1e-3), config=BackpropConfig(kl_coef=0.01)
        )

        def tell(algorithm, metrics):
            print(
                f"{metrics.iteration}: reward {metrics.reward_mean:.3f} ± {metrics.reward_std:.3f}"
            )

        config = AlgorithmConfig(batch_size=16, group_size=8, ppo_epochs=1)
        algorithm = GRPOAlgorithm(env, manager, computer, backprop, config, callbacks=[tell])
        algorithm.train(num_iterations=iterations, progress_bar=False)

        [trajectory] = manager.collect_rollouts(1, group_size=1)
        noted = trajectory.metadata
        print(f"{trajectory.prompt!r} → {trajectory.text!r}")
        print(f"spent {noted['spent']:g} of {noted['budget']:g}, {len(noted['tool_calls'])} calls")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    main(args.model, iterations=1 if args.quick else 10)
