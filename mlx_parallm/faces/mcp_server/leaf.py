"""The MCP server, plugged in: the command `mlx_parallm mcp`."""

from mlx_parallm.config.leaves import Command, Leaf

LEAF = Leaf(
    "mcp_server",
    commands=(
        Command(
            "mcp",
            "start",
            "Serve the tools with which an agent runs trainings, over MCP.",
            "mlx_parallm.faces.mcp_server.server:MCP",
            "mlx_parallm_mcp",
            "Trainings continue when it ends, and are found again."
            " docs/tools.md#an-agent-that-runs-trainings.",
            ends_in_order=True,
        ),
    ),
)
