"""`python -m mlx_parallm.faces.primitives.environment`: an environment by hand, then many
episodes of it at once."""

from mlx_parallm.environments.episode_state import text_of
from mlx_parallm.environments.kinds.simple_text import SimpleTextEnvironment
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.inference.module import InferenceModule


def main() -> None:
    questions = ["Sum: 47+38", "Reverse: hfkdo", "Sort: dbca"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    with InferenceModule("builtin:tiny") as inference:
        environment = SimpleTextEnvironment(inference, prompts=prompts, max_steps=2)
        state = environment.reset()
        while not environment.is_terminal(state):
            print(f"asked {text_of(environment.build_prompt(state)).splitlines()[-1]!r}", end="")
            state = environment.step(state)
            print(f", it answered {state.response!r}")
        with RolloutManager(
            environment, RolloutConfig(num_parallel=12, group_size=4, max_tokens=16)
        ) as manager:
            for trajectory in manager.collect_rollouts(
                min_trajectories=12, max_steps_per_rollout=2
            ):
                answers = " | ".join(turn.response for turn in trajectory.history)
                tokens = trajectory.rollout.sampled_tokens
                print(f"{trajectory.group_id} {trajectory.prompt:14} → {answers} ({tokens} tokens)")
            statistics = manager.get_statistics()
    print(
        f"{statistics['total_trajectories']} trajectories,"
        f" {statistics['avg_trajectory_length']:.1f} steps each"
    )


if __name__ == "__main__":
    main()
