"""`mlx_parallm.faces.primitives`: every name that the specification prints, and its first
example as it is printed."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import mlx_parallm
from mlx_parallm.faces import primitives

PRINTED = (
    *(
        "InferenceModule",
        "SimpleTextEnvironment",
        "SVRLEnvironment",
        "ConversationEnvironment",
        "BaseEnvironment",
    ),
    *(
        "State",
        "RolloutManager",
        "RolloutConfig",
        "BackpropModule",
        "BackpropConfig",
        "PPOAlgorithm",
        "GRPOAlgorithm",
    ),
    *("REINFORCEAlgorithm", "AlgorithmConfig", "SVRLRewardComputer", "ParetoRewardComputer"),
)

BASIC_USAGE = """
from mlx_parallm.faces.primitives import (
    InferenceModule,
    SimpleTextEnvironment,
    RolloutManager,
    BackpropModule,
    PPOAlgorithm,
    AlgorithmConfig,
)
from mlx_lm import load
import mlx.optimizers as optim

# 1. Setup inference
model, tokenizer = load(MODEL)
inference = InferenceModule(model=model, tokenizer=tokenizer)

# 2. Create environment
env = SimpleTextEnvironment(
    inference=inference,
    prompts=["Explain AI:", "What is ML?"],
    max_steps=1
)

# 3. Setup training components
rollout_manager = RolloutManager(env, num_parallel=16)
backprop = BackpropModule(model=model, optimizer=optim.Adam(learning_rate=1e-3))

# 4. Define rewards
class MyRewardComputer:
    def compute_rewards(self, trajectories, method="absolute"):
        return [len(t.response.split()) / 50.0 for t in trajectories]

# 5. Create algorithm and train
algo = PPOAlgorithm(
    env=env,
    rollout_manager=rollout_manager,
    reward_computer=MyRewardComputer(),
    backprop=backprop,
    config=AlgorithmConfig(batch_size=32)
)

metrics = algo.train(num_iterations=ITERATIONS, progress_bar=True)
"""
"""The specification's, but for the import path, how the model and its optimizer are made, and
how long it trains."""


def test_every_printed_name_is_there() -> None:
    assert set(PRINTED) <= set(primitives.__all__)
    assert all(getattr(primitives, name).__name__ == name for name in primitives.__all__)
    with pytest.raises(AttributeError, match="'VLLMBackend'"):
        _ = primitives.VLLMBackend


def test_the_three_lists_of_names_agree() -> None:
    assert set(primitives.__all__) <= set(dir(primitives)), "every name has a home"
    source = inspect.getsource(primitives).partition("__all__ =")[0]
    typed = (
        source.partition("if TYPE_CHECKING:")[2]
        .replace("(", " ")
        .replace(")", " ")
        .replace(",", " ")
        .split()
    )
    assert set(primitives.__all__) <= set(typed)


@pytest.mark.long
@pytest.mark.slow
def test_the_first_example_of_the_specification_runs_as_it_is_printed() -> None:
    model = str(Path(mlx_parallm.__file__).parent / "models" / "tiny")
    names: dict[str, Any] = {"MODEL": model, "ITERATIONS": 1}
    exec(compile(BASIC_USAGE, "basic_usage", "exec"), names)
    [metrics] = names["metrics"]
    assert metrics.num_trajectories == 32 and metrics.line["optimizer_updates"] == 4
    inference, backprop = names["inference"], names["backprop"]
    assert inference.adapter == "policy", "the model was given to both: they know each other"
    [text] = inference.generate(["Explain AI:"], max_new_tokens=5)
    assert isinstance(text, str) and backprop.inference is inference
    inference.close()
