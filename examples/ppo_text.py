"""PPO on plain text: the model learns to write one letter. From start to end in Python, without a
configuration file.

python examples/ppo_text.py [--quick]
"""

import sys

import mlx.optimizers as optim

from mlx_parallm.primitives import (
    AlgorithmConfig,
    BackpropConfig,
    BackpropModule,
    InferenceModule,
    PPOAlgorithm,
    RolloutConfig,
    RolloutManager,
    SimpleTextEnvironment,
)

LETTER = "a"


class ShareOfALetter:
    """A reward computer is anything with this method: one number for each trajectory."""

    def compute_rewards(self, trajectories, method="absolute"):
        return [t.response.count(LETTER) / max(len(t.response), 1) for t in trajectories]


def main(iterations: int) -> None:
    with InferenceModule("builtin:tiny") as inference:  # or any MLX model of the hub
        env = SimpleTextEnvironment(
            inference, prompts=["Sort: dbca", "Reverse: hfkdo", "Sort: xaz"]
        )
        manager = RolloutManager(env, RolloutConfig(num_parallel=32, max_tokens=12))
        config = BackpropConfig(kl_coef=0.0, entropy_coef=0.0, gamma=1.0, ppo_epochs=2)
        backprop = BackpropModule(
            inference, optimizer=optim.AdamW(learning_rate=3e-3), config=config
        )

        before = manager.collect_rollouts(8)
        print("before:", [t.response for t in before][:4])
        algorithm = PPOAlgorithm(
            env, manager, ShareOfALetter(), backprop, AlgorithmConfig(batch_size=32)
        )
        metrics = algorithm.train(num_iterations=iterations)
        print(f"reward {metrics[0].reward_mean:.2f} → {metrics[-1].reward_mean:.2f}")
        print("after: ", [t.response for t in manager.collect_rollouts(8)][:4])


if __name__ == "__main__":
    main(iterations=2 if "--quick" in sys.argv else 30)
