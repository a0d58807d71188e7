"""`PlannerTrainer`: GRPO of a planner on single answers in Python, under the name `GRPOTrainer` of
the original plan.

    trainer = GRPOTrainer(policy_model=model, reference_model=None, tokenizer=tokenizer,
    reward_fn=right) trainer.train(["What is 17 * 23?", "What is 8 * 9?"], num_iterations=100)
    trainer.close()

With tools and experts in the episodes it is `kind = "hybrid"` that trains (docs/systems.md#hybrid).
"""

from collections.abc import Callable, Iterable
from typing import Any

from mlx_parallm.config.library import AlgorithmConfig, BackpropConfig
from mlx_parallm.environments.kinds.simple_text import SimpleTextEnvironment
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.library.algorithms import GRPOAlgorithm, TrainingMetrics
from mlx_parallm.faces.library.backprop import BackpropModule
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rewards.computers import WeightedRewardComputer


class PlannerTrainer:
    """Train a model on prompts by GRPO: each answer against the others to its prompt.

    Args:
        policy_model: of `mlx_lm.load`, with its `tokenizer`; or a path, a hub id, "builtin:tiny".
            It is trained.
        reference_model: of the KL; None: the policy before training.
        reward_fn: a function with TRL's signature, or of one trajectory; it may call tools.
        config: of the iterations; `backprop`: of the updates; `rollouts`: of the answers.

    Raises ConfigError.
    """

    def __init__(
        self,
        policy_model: Any,
        reference_model: Any = None,
        tokenizer: Any = None,
        reward_fn: Callable[..., Any] | str | None = None,
        *,
        config: AlgorithmConfig | None = None,
        backprop: BackpropConfig | None = None,
        rollouts: RolloutConfig | None = None,
    ) -> None:
        if reward_fn is None:
            raise ConfigError(
                "GRPOTrainer: reward_fn is missing: f(completions,"
                " **columns) returns a number for each"
            )
        self._reward = WeightedRewardComputer([reward_fn])  # it is checked before a model is loaded
        self.inference = InferenceModule(policy_model, tokenizer=tokenizer)
        self._backprop = BackpropModule(
            self.inference, ref_model=reference_model, config=backprop, value_head=False
        )
        self._config, self._rollouts = config, rollouts or RolloutConfig(prompt_format="chat")
        self.algorithm: GRPOAlgorithm | None = None

    def train(
        self,
        prompt_source: Iterable[str] | Callable[[], Iterable[str]] | None = None,
        num_iterations: int | None = None,
    ) -> list[TrainingMetrics]:
        """Train on prompts, in their order and again; a second call continues.

        Args:
            prompt_source: the prompts, or a function that returns them; in a second call nothing.
            num_iterations: default: those of `config`.

        Raises ConfigError: no prompts, or others in a second call.
        """
        if (self.algorithm is None) == (prompt_source is None):
            raise ConfigError(
                "GRPOTrainer: train(prompts) the first time, then train()"
                " continues with the same prompts"
            )
        if self.algorithm is None and prompt_source is not None:
            prompts = list(prompt_source() if callable(prompt_source) else prompt_source)
            environment = SimpleTextEnvironment(self.inference, prompts=prompts)
            manager = RolloutManager(environment, self._rollouts)
            self.algorithm = GRPOAlgorithm(
                environment, manager, self._reward, self._backprop, self._config
            )
        assert self.algorithm is not None
        return self.algorithm.train(num_iterations, progress_bar=False)

    def close(self) -> None:
        """End the rollouts, the run and the engine."""
        if self.algorithm is not None:
            self.algorithm.rollout_manager.close()
            self.algorithm.close()
        self.inference.close()


GRPOTrainer, GRPOTrainerConfig = PlannerTrainer, AlgorithmConfig
