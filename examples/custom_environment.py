"""An environment of your own: a sum, which is asked again after a wrong answer. Trained from a
configuration,

    mlx_parallm train --config examples/custom_environment.toml

or played in Python, as below: python examples/custom_environment.py
"""

import random

from mlx_parallm.primitives import (
    BaseEnvironment,
    InferenceModule,
    RolloutConfig,
    RolloutManager,
    State,
)


class Retry(BaseEnvironment):
    def __init__(self, inference=None, highest=99, tries=3):
        super().__init__(inference)
        self.highest, self.tries = highest, tries

    def reset(self, seed=0, split="train"):
        """The beginning of an episode. Every rollout of a group starts from a deep copy of this
        state."""
        rng, heldout = random.Random(seed), None
        while heldout != (split == "heldout"):  # a tenth of the sums is never trained on
            a, b = rng.randint(0, self.highest), rng.randint(0, self.highest)
            heldout = (a + 3 * b) % 10 == 0
        return State(
            prompt=[{"role": "user", "content": f"Sum: {a}+{b}"}], metadata={"answer": str(a + b)}
        )

    def update_state(self, state, response):
        """Take what the policy answered to `state.prompt`."""
        question = state.prompt[0]
        # notes the turn: response, history, step_count
        state = super().update_state(state, response)
        state.metadata["solved"] = response.strip() == state.metadata["answer"]
        state.done = state.metadata["solved"] or state.step_count == self.tries
        state.prompt = [*state.prompt, {"role": "assistant", "content": response}, question]
        return state


def solved(trajectories, **kwargs):
    """1 for the right answer at once, 1/2 at the second try, … A reward sees the whole group."""
    return [t.metadata["solved"] / t.step_count for t in trajectories]


def main():
    with InferenceModule("builtin:tiny") as inference:
        with RolloutManager(
            Retry(inference), RolloutConfig(num_parallel=32, group_size=4, max_tokens=8)
        ) as manager:
            trajectories = manager.collect_rollouts(min_trajectories=32)
        for trajectory, score in list(zip(trajectories, solved(trajectories), strict=True))[:8]:
            responses = ", ".join(turn.response for turn in trajectory.history)
            print(f"{trajectory.prompt:12} {responses:20} {score:.2f}")
        print(f"{manager.get_statistics()['avg_trajectory_length']:.2f} turns on average")


if __name__ == "__main__":
    main()
