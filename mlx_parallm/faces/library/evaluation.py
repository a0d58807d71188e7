"""evaluate: answers to held-out problems of an environment in Python, by the daemon's own
evaluator.

environment, reward → StateSource (its held-out tasks) → rl_training.evaluation.evaluate →
Evaluation.numbers()
"""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from mlx_parallm.config.evaluation import EvaluationConfig
from mlx_parallm.environments.manager import RolloutConfig
from mlx_parallm.environments.state import BaseEnvironment, StateSource
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, EnvironmentFailedError
from mlx_parallm.execution.user_code import name_of, reference_to
from mlx_parallm.faces.library.algorithms import ComputesRewards
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.rl_training.evaluation.evaluate import Evaluation, draw_problems
from mlx_parallm.rl_training.evaluation.evaluate import evaluate as evaluate_problems
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.system.pydantic_faults import faults

SETTINGS = ("greedy", "samples", "temperature", "top_p")


def evaluate(
    environment: BaseEnvironment,
    reward: ComputesRewards | Callable[..., Any],
    *,
    problems: int,
    inference: InferenceModule | None = None,
    rollouts: RolloutConfig | None = None,
    **settings: Any,
) -> Evaluation:
    """Answer held-out problems with the weights as they are now, and score each answer on its own.

    Problems are the tasks that `reset` gives for the split "heldout" (the index begins at 2²⁰ where
    it takes no split); they are the same each time, and so are the seeds of sampled answers.

    Args:
        reward: an object with `compute_rewards`, or a function with TRL's signature. A reward of 1
            counts as right.
        problems: how many, at most.
        inference: who answers; default: the environment's. It needs an engine in this process.
        rollouts: the settings of episodes; its temperature is not used.
        settings: `greedy` (one greedy answer to each: accuracy, reward; True), `samples` (sampled
            answers to each: pass@1, pass@2, …; 0), their `temperature` and `top_p` (1).

    Returns an `Evaluation`: `numbers()` has each metric with the ends of its 95% interval
    ("accuracy", "accuracy_low", "accuracy_high", …), `problems` has every answer.

    Raises ConfigError: wrong settings, no engine, no held-out problems. EnvironmentFailedError:
    every answer failed.
    """
    wanted = _settings(problems, settings)
    inference = inference if inference is not None else _inference_of(environment)
    client, tokenizer = inference.client, inference.tokenizer
    if client is None or tokenizer is None:
        raise ConfigError(
            "evaluate: an InferenceModule over another server is evaluated by `mlx_parallm eval`"
        )
    config, name = rollouts or RolloutConfig(), type(environment).__name__
    entry = config.environment_config(name)
    functions = RewardFunctions(
        [reference_to(reward, name_of(reward))], (), columns=None, key="evaluate: reward"
    )
    source = StateSource(entry, lambda: environment, seed=config.seed, name=name, rewards=functions)
    source.attach(inference)
    drawn = draw_problems([source], problems, [source])
    if not drawn:
        raise ConfigError(f"evaluate: {name} has no held-out problems")
    policy = EpisodePolicy(
        client,
        tokenizer,
        temperature=0.0,
        max_token_length=config.max_token_length or client.max_model_len,
        adapter=inference.adapter,
    )
    loop = LoopThread("evaluation")  # this thread may have a running loop, as a notebook's has
    try:
        [evaluation] = loop.run(
            evaluate_problems(policy, drawn, wanted, max_in_flight=config.num_parallel)
        )
    finally:
        loop.stop()
    if evaluation.failed:
        raise EnvironmentFailedError(f"every answer failed: {evaluation.first_error}")
    return evaluation


def _inference_of(environment: BaseEnvironment) -> InferenceModule:
    if not isinstance(environment.inference, InferenceModule):
        raise ConfigError("evaluate: the environment has no InferenceModule: pass inference=")
    return environment.inference


def _settings(problems: int, settings: dict[str, Any]) -> EvaluationConfig:
    if unknown := sorted(set(settings) - set(SETTINGS)):
        raise ConfigError(
            f"evaluate: there is no setting {unknown[0]!r}: choose of {', '.join(SETTINGS)}"
        )
    if problems < 1:
        raise ConfigError(f"evaluate: problems = {problems}: expected at least 1")
    try:
        return EvaluationConfig(problems=problems, **settings)
    except ValidationError as error:
        raise ConfigError(f"evaluate: {faults(error)}") from error
