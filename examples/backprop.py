"""BackpropModule by hand: losses, gradients and updates without an algorithm around them.

python examples/backprop.py [--quick]
"""

import sys

import mlx.optimizers as optim

from mlx_parallm.primitives import (
    BackpropConfig,
    BackpropModule,
    InferenceModule,
    RolloutConfig,
    RolloutManager,
    SimpleTextEnvironment,
)


def main(iterations: int) -> None:
    with InferenceModule("builtin:tiny") as inference:
        env = SimpleTextEnvironment(inference, prompts=["Sort: dbca", "Reverse: hfkdo"])
        manager = RolloutManager(env, RolloutConfig(max_tokens=8))
        config = BackpropConfig(kl_coef=0.01, gamma=1.0, ema_alpha=0.9)
        backprop = BackpropModule(
            inference, optimizer=optim.AdamW(learning_rate=2e-3), config=config
        )

        for iteration in range(1, iterations + 1):
            trajectories = manager.collect_rollouts(16)
            rewards = [t.response.count("a") / max(len(t.response), 1) for t in trajectories]
            values = backprop.compute_values(trajectories)  # of every sampled token
            advantages = backprop.compute_advantages(rewards, values)

            policy = backprop.compute_ppo_loss(trajectories, advantages)
            value = backprop.compute_value_loss(trajectories, rewards)
            # a function of the weights: nothing is computed yet
            loss = policy + config.value_loss_coef * value
            for _ in range(2):  # PPO's epochs: the ratio stays against what was sampled
                # differentiates, updates, and serves the new weights
                metrics = backprop.update(loss)
            print(
                f"{iteration}: reward {sum(rewards) / len(rewards):.3f}  loss"
                f" {metrics['loss']:+.4f}"
                f"  KL {metrics['kl']:.4f}  clipped {metrics['clip_fraction']:.0%}"
            )
            backprop.update_ref_model(method="ema")

        print("KL to the reference now:", backprop.compute_kl(trajectories).item())
        print("entropy now:", backprop.compute_entropy(trajectories).item(), "nats a token")
        print(backprop.get_statistics())


if __name__ == "__main__":
    main(iterations=2 if "--quick" in sys.argv else 15)
