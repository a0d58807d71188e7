"""The parts of reinforcement learning, to import from one place: `from mlx_parallm.primitives import PPOAlgorithm`.

Each name is loaded when it is first asked for (PEP 562), MLX with those that compute. docs/library.md has them all.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_parallm.algorithms import (
        GRPOAlgorithm,
        PPOAlgorithm,
        REINFORCEAlgorithm,
        create_algorithm,
        load_algorithm_from_checkpoint,
    )
    from mlx_parallm.backprop import BackpropModule
    from mlx_parallm.config_lora import LoraConfig
    from mlx_parallm.config_primitives import AlgorithmConfig, BackpropConfig
    from mlx_parallm.environments.conversation import ConversationEnvironment
    from mlx_parallm.environments.gymnasium_env import GymnasiumEnvironment
    from mlx_parallm.environments.registry import create_environment
    from mlx_parallm.environments.rollout_config import RolloutConfig
    from mlx_parallm.environments.rollouts import RolloutManager
    from mlx_parallm.environments.simple_text import SimpleTextEnvironment
    from mlx_parallm.environments.state import BaseEnvironment, State
    from mlx_parallm.environments.svrl import SVRLEnvironment
    from mlx_parallm.inference import InferenceModule
    from mlx_parallm.inference_types import GenerationResult
    from mlx_parallm.rewards.base import Trajectory
    from mlx_parallm.rewards.computers import RewardComputer, SVRLRewardComputer
    from mlx_parallm.rewards.weighted import ParetoRewardComputer, WeightedRewardComputer, create_reward_computer
    from mlx_parallm.tool_calls import ToolCall
    from mlx_parallm.training_metrics import TrainingMetrics

__all__ = [
    "AlgorithmConfig",
    "BackpropConfig",
    "BackpropModule",
    "BaseEnvironment",
    "ConversationEnvironment",
    "GRPOAlgorithm",
    "GenerationResult",
    "GymnasiumEnvironment",
    "InferenceModule",
    "LoraConfig",
    "PPOAlgorithm",
    "ParetoRewardComputer",
    "REINFORCEAlgorithm",
    "RewardComputer",
    "RolloutConfig",
    "RolloutManager",
    "SVRLEnvironment",
    "SVRLRewardComputer",
    "SimpleTextEnvironment",
    "State",
    "ToolCall",
    "TrainingMetrics",
    "Trajectory",
    "WeightedRewardComputer",
    "create_algorithm",
    "create_environment",
    "create_reward_computer",
    "load_algorithm_from_checkpoint",
]

_HOMES = {
    "algorithms": "GRPOAlgorithm PPOAlgorithm REINFORCEAlgorithm create_algorithm load_algorithm_from_checkpoint",
    "backprop": "BackpropModule",
    "config_lora": "LoraConfig",
    "config_primitives": "AlgorithmConfig BackpropConfig",
    "environments.conversation": "ConversationEnvironment",
    "environments.gymnasium_env": "GymnasiumEnvironment",
    "environments.registry": "create_environment",
    "environments.rollout_config": "RolloutConfig",
    "environments.rollouts": "RolloutManager",
    "environments.simple_text": "SimpleTextEnvironment",
    "environments.state": "BaseEnvironment State",
    "environments.svrl": "SVRLEnvironment",
    "inference": "InferenceModule",
    "inference_types": "GenerationResult",
    "rewards.base": "Trajectory",
    "rewards.computers": "RewardComputer SVRLRewardComputer",
    "rewards.weighted": "ParetoRewardComputer WeightedRewardComputer create_reward_computer",
    "tool_calls": "ToolCall",
    "training_metrics": "TrainingMetrics",
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"mlx_parallm.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
