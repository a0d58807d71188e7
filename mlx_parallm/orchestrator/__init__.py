"""The hybrid system: a language model plans, small recurrent experts act, tools tell the truth. docs/hybrid.md.

orchestrator.py   `Orchestrator`: one episode; an action in, a `StepResult` out
reward.py         `RewardConfig`, what a step and an end are worth
observation.py    `ObservationBuilder`: the text that the model reads, the numbers that experts read
control.py        an expert's loop over tool calls
environment.py    kind = "hybrid": an environment of a training run
learning.py       recurrent PPO on the experts' steps of those episodes, and the schedule of joint training
routes.py         /v1/hybrid/chat/completions: answers with the tools and experts of a run
hybrid_env.py     `HybridEnv`, `VectorizedHybridEnv`: a gym-like environment of texts
tasks.py          task pools, generators, and the routing tasks
tool_server.py    the tools `math_solve` and `physics_simulate`, and a server of them
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_parallm.execution.tool_client import ToolClient as MCPToolClient
    from mlx_parallm.orchestrator.hybrid_env import HybridEnv, VectorizedHybridEnv
    from mlx_parallm.orchestrator.observation import ObservationBuilder
    from mlx_parallm.orchestrator.orchestrator import Orchestrator, OrchestratorConfig, StepResult
    from mlx_parallm.orchestrator.reward import RewardConfig

__all__ = [
    "HybridEnv",
    "MCPToolClient",
    "ObservationBuilder",
    "Orchestrator",
    "OrchestratorConfig",
    "RewardConfig",
    "StepResult",
    "VectorizedHybridEnv",
]

_HOMES = {
    "HybridEnv": "hybrid_env",
    "VectorizedHybridEnv": "hybrid_env",
    "ObservationBuilder": "observation",
    "Orchestrator": "orchestrator",
    "OrchestratorConfig": "orchestrator",
    "StepResult": "orchestrator",
    "RewardConfig": "reward",
}


def __getattr__(name: str) -> Any:
    """Load a name at its first use (PEP 562): the tool server starts without MLX."""
    if name == "MCPToolClient":
        from mlx_parallm.execution.tool_client import ToolClient

        return ToolClient
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
