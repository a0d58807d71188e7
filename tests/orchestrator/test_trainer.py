"""`GRPOTrainer` of the original plan: policy, reference, tokenizer, a reward that calls a tool."""

from collections.abc import Iterator
from typing import Any

import mlx_lm
import pytest

from mlx_parallm.environments.manager import RolloutConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.models.checkpoint_files import directory_of
from mlx_parallm.systems.orchestrator import GRPOTrainer, GRPOTrainerConfig
from mlx_parallm.systems.orchestrator.tool_server import math_solve


@pytest.fixture
def trainer() -> Iterator[GRPOTrainer]:
    with ToolClient(functions=[math_solve]) as tools:

        def right(completions: list[str], prompts: list[str]) -> list[float]:
            wanted = [
                tools.call("math_solve", {"expression": prompt.removeprefix("Sum: ")}).text
                for prompt in map(str, prompts)
            ]
            return [
                float(text == answer) + len(text) / 100
                for text, answer in zip(completions, wanted, strict=True)
            ]

        path = str(directory_of("builtin:tiny"))
        model, tokenizer = mlx_lm.load(path)
        made = GRPOTrainer(
            policy_model=model,
            reference_model=mlx_lm.load(path)[0],
            tokenizer=tokenizer,
            reward_fn=right,
            config=GRPOTrainerConfig(batch_size=8, group_size=4, ppo_epochs=1),
            rollouts=RolloutConfig(max_tokens=6, prompt_format="chat"),
        )
        yield made
        made.close()


@pytest.mark.slow
def test_it_trains_with_the_constructor_of_the_plan(trainer: GRPOTrainer) -> None:
    [first] = trainer.train(["Sum: 1+2", "Sum: 30+4"], 1)
    assert first.num_trajectories >= 8 and first.kl is not None
    [second] = trainer.train(num_iterations=1)
    assert second.iteration == 2 and second.reward_max > 0
    with pytest.raises(ConfigError, match="same prompts"):
        trainer.train(["Sum: 5+5"])


def test_a_trainer_needs_a_reward() -> None:
    with pytest.raises(ConfigError, match="reward_fn is missing"):
        GRPOTrainer("builtin:tiny")


@pytest.mark.parametrize("reward", [lambda prompt, response: 1.0, lambda: 1.0, "right", 3])
def test_a_reward_of_another_signature_is_refused_before_a_model_is_loaded(reward: Any) -> None:
    """It failed after the first rollouts, in 25 lines."""
    with pytest.raises(ConfigError) as raised:
        GRPOTrainer("no/such/model", reward_fn=reward)
    assert "WeightedRewardComputer: " in str(raised.value) and "\n" not in str(raised.value)
