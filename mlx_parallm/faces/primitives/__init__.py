"""The parts of reinforcement learning, to import from one place: `from mlx_parallm.primitives
import PPOAlgorithm`.

Each name is loaded at its first use (PEP 562), so that settings and environments need no MLX.
docs/library.md lists them all.
"""

from typing import TYPE_CHECKING

from mlx_parallm.system.moved_names import lazy_names

if TYPE_CHECKING:
    from mlx_parallm.config.library import AlgorithmConfig, BackpropConfig
    from mlx_parallm.config.training import LoraConfig
    from mlx_parallm.environments.kinds.conversation import ConversationEnvironment
    from mlx_parallm.environments.kinds.gymnasium import GymnasiumEnvironment
    from mlx_parallm.environments.kinds.simple_text import SimpleTextEnvironment
    from mlx_parallm.environments.kinds.svrl import SVRLEnvironment
    from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
    from mlx_parallm.environments.registry import create_environment
    from mlx_parallm.environments.state import BaseEnvironment, State
    from mlx_parallm.execution.tool_calls import ToolCall
    from mlx_parallm.faces.library.algorithms import (
        GRPOAlgorithm,
        PPOAlgorithm,
        REINFORCEAlgorithm,
        TrainingMetrics,
        create_algorithm,
        load_algorithm_from_checkpoint,
    )
    from mlx_parallm.faces.library.backprop import BackpropModule
    from mlx_parallm.faces.library.evaluation import evaluate
    from mlx_parallm.inference.module import InferenceModule
    from mlx_parallm.inference.types import GenerationResult
    from mlx_parallm.rewards.computers import (
        ParetoRewardComputer,
        WeightedRewardComputer,
        create_reward_computer,
    )
    from mlx_parallm.rewards.methods import RewardComputer
    from mlx_parallm.rewards.parts import SVRLRewardComputer
    from mlx_parallm.types import Trajectory

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
    "evaluate",
    "load_algorithm_from_checkpoint",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "faces.library.algorithms": "GRPOAlgorithm PPOAlgorithm REINFORCEAlgorithm TrainingMetrics"
        " create_algorithm"
        " load_algorithm_from_checkpoint",
        "faces.library.backprop": "BackpropModule",
        "faces.library.evaluation": "evaluate",
        "config.training": "LoraConfig",
        "config.library": "AlgorithmConfig BackpropConfig",
        "environments.kinds.conversation": "ConversationEnvironment",
        "environments.kinds.gymnasium": "GymnasiumEnvironment",
        "environments.registry": "create_environment",
        "environments.manager": "RolloutConfig RolloutManager",
        "environments.kinds.simple_text": "SimpleTextEnvironment",
        "environments.state": "BaseEnvironment State",
        "environments.kinds.svrl": "SVRLEnvironment",
        "inference.module": "InferenceModule",
        "inference.types": "GenerationResult",
        "types": "Trajectory",
        "rewards.computers": "ParetoRewardComputer WeightedRewardComputer create_reward_computer",
        "rewards.methods": "RewardComputer",
        "rewards.parts": "SVRLRewardComputer",
        "execution.tool_calls": "ToolCall",
    },
)
