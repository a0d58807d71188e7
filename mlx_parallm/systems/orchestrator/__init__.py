"""The hybrid system: a language model plans, small recurrent experts act, tools tell the truth.
docs/systems.md#hybrid.

orchestrator.py   `Orchestrator`: one episode; an action in, a `StepResult` out
reward.py         `RewardConfig`, the values of a step and an end
observation.py    `ObservationBuilder`: the text that the model reads, the numbers that experts read
control.py        an expert's loop over tool calls
environment.py    kind = "hybrid": an environment of a training run
learning.py       recurrent PPO on the experts' steps of those episodes, and the schedule of joint
                  training
routes.py         /v1/hybrid/chat/completions: answers with the tools and experts of a run
hybrid_env.py     `HybridEnv`, `VectorizedHybridEnv`: a gym-like environment of texts
task_pools.py     task pools, generators, and the tasks that come along
trainer.py        `GRPOTrainer`: GRPO of a planner on single answers, in Python
tool_server.py    the tools `math_solve` and `physics_simulate`, and a server of them
"""

from typing import TYPE_CHECKING

from mlx_parallm.system.moved_names import lazy_names

if TYPE_CHECKING:
    from mlx_parallm.execution.tool_client import MCPToolClient
    from mlx_parallm.systems.orchestrator.hybrid_env import HybridEnv, VectorizedHybridEnv
    from mlx_parallm.systems.orchestrator.observation import ObservationBuilder
    from mlx_parallm.systems.orchestrator.orchestrator import (
        Orchestrator,
        OrchestratorConfig,
        StepResult,
    )
    from mlx_parallm.systems.orchestrator.reward import RewardConfig
    from mlx_parallm.systems.orchestrator.trainer import GRPOTrainer, GRPOTrainerConfig

__all__ = [
    "GRPOTrainer",
    "GRPOTrainerConfig",
    "HybridEnv",
    "MCPToolClient",
    "ObservationBuilder",
    "Orchestrator",
    "OrchestratorConfig",
    "RewardConfig",
    "StepResult",
    "VectorizedHybridEnv",
]

__getattr__, __dir__ = lazy_names(  # the tool server starts without MLX
    __name__,
    {
        "execution.tool_client": "MCPToolClient",
        "systems.orchestrator.hybrid_env": "HybridEnv VectorizedHybridEnv",
        "systems.orchestrator.observation": "ObservationBuilder",
        "systems.orchestrator.orchestrator": "Orchestrator OrchestratorConfig StepResult",
        "systems.orchestrator.reward": "RewardConfig",
        "systems.orchestrator.trainer": "GRPOTrainer GRPOTrainerConfig",
    },
)
