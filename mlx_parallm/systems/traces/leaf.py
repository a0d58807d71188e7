"""Traces of agents, plugged in: recorded sessions as routes and as a source of rollouts, and a
command."""

from mlx_parallm.config.leaves import Command, Leaf

LEAF = Leaf(
    "traces",
    section="mlx_parallm.systems.traces.config:TracesConfig",
    source="mlx_parallm.systems.traces.source:session_rewards",
    routes="mlx_parallm.systems.traces.source:session_routes",
    commands=(
        Command(
            "traces",
            "data",
            "Record what agents do, import their logs, and make data sets of them.",
            "mlx_parallm.systems.traces.command:Traces",
            "mlx_parallm_traces",
            ends_in_order=True,
        ),
    ),
)
