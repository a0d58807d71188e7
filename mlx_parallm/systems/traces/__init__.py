"""Traces of agents: follow an agent in this process, read its checkpoints, or the logs of other
programs.

from mlx_parallm.systems.traces import TraceCollector, hook_into_agent
"""

from typing import TYPE_CHECKING

from mlx_parallm.system.moved_names import lazy_names

if TYPE_CHECKING:
    from mlx_parallm.systems.traces.checkpoints import CheckpointLoader
    from mlx_parallm.systems.traces.collector import TraceCollector, hook_into_agent
    from mlx_parallm.systems.traces.reading import read_traces, write_traces
    from mlx_parallm.systems.traces.schema import Label
    from mlx_parallm.systems.traces.trace import ExecutionTrace, ReasoningStep, ToolCallTrace, Trace

__all__ = [
    "CheckpointLoader",
    "ExecutionTrace",
    "Label",
    "ReasoningStep",
    "ToolCallTrace",
    "Trace",
    "TraceCollector",
    "hook_into_agent",
    "read_traces",
    "write_traces",
]

__getattr__, __dir__ = lazy_names(  # so that `mlx_parallm traces --help` stays quick
    __name__,
    {
        "systems.traces.checkpoints": "CheckpointLoader",
        "systems.traces.collector": "TraceCollector hook_into_agent",
        "systems.traces.reading": "read_traces write_traces",
        "systems.traces.schema": "Label",
        "systems.traces.trace": "ExecutionTrace ReasoningStep ToolCallTrace Trace",
    },
)
