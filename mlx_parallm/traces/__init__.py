"""Traces of agents: follow an agent in this process, read its checkpoints, or the logs of other programs.

from mlx_parallm.traces import TraceCollector, hook_into_agent
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_parallm.traces.checkpoints import CheckpointLoader
    from mlx_parallm.traces.collector import TraceCollector, hook_into_agent
    from mlx_parallm.traces.execution import ExecutionTrace, ReasoningStep, ToolCallTrace
    from mlx_parallm.traces.reading import read_traces, write_traces
    from mlx_parallm.traces.schema import Label, Trace

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

_HOMES = {
    "checkpoints": "CheckpointLoader",
    "collector": "TraceCollector hook_into_agent",
    "execution": "ExecutionTrace ReasoningStep ToolCallTrace",
    "reading": "read_traces write_traces",
    "schema": "Label Trace",
}


def __getattr__(name: str) -> Any:
    """Load a name at its first use (PEP 562), so that `mlx_parallm traces --help` stays quick."""
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
