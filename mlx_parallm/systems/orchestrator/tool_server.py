"""The tools `math_solve` and `physics_simulate`: functions of the process, and a server of them
over MCP. No MLX.

python -m mlx_parallm.systems.orchestrator.tool_server               stdio
python -m mlx_parallm.systems.orchestrator.tool_server --port 9000   streamable HTTP: http://127.0.0.1:9000/mcp
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from mlx_parallm.environments.kinds.svrl import calculate
from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.server.thread import serve_until_signal
from mlx_parallm.system.packages import require
from mlx_parallm.system.signals import Shutdown, StopRequested

DRAIN_S = 5.0
GRAVITY = 9.81  # m/s²
MAX_VELOCITY, MAX_WIND = 1000.0, 1000.0  # m/s, so that every result is a finite number


def math_solve(expression: str) -> str:
    """Compute an expression of numbers, + - * / // % ** and parentheses, or say whether an
    equation holds."""
    return calculate(expression)


def physics_simulate(angle: float, velocity: float, wind: float = 0.0) -> dict[str, float]:
    """Fire a projectile from the ground: angle in degrees (0 to 90), velocity and tail wind in
    m/s. Returns where it lands (distance, m) and the time of flight (time, s)."""
    numbers = {"angle": angle, "velocity": velocity, "wind": wind}
    for name, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ToolFailedError(f"{name} has to be a number, not {value!r}")
    if not 0 <= angle <= 90:
        raise ToolFailedError(f"angle is in degrees from 0 to 90, not {angle}")
    if not (0 <= velocity <= MAX_VELOCITY and abs(wind) <= MAX_WIND):
        raise ToolFailedError(
            f"velocity is from 0 to {MAX_VELOCITY:g} m/s and wind at most {MAX_WIND:g} m/s"
        )
    theta = math.radians(angle)
    seconds = 2 * velocity * math.sin(theta) / GRAVITY
    # The wind adds half of its speed over the flight: docs/systems.md#hybrid; the same as
    # experts.tasks.flight.
    distance = velocity * math.cos(theta) * seconds + 0.5 * wind * seconds
    return {"distance": distance, "time": seconds}


TOOLS: tuple[Callable[..., Any], ...] = (math_solve, physics_simulate)


def make_server() -> Any:
    """Return the server of the SDK. Raises ConfigError: the SDK is not installed."""
    require("the tool server", "mcp.server.mcpserver", "mcp_types")
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    server = MCPServer("mlx_parallm tools")
    pure = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)

    def served(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except ToolFailedError as error:
                raise ToolError(str(error)) from error

        return call

    for function in TOOLS:
        server.add_tool(served(function), annotations=pure)
    return server


def _announce(url: str) -> None:
    sys.stderr.write(f"{url}/mcp: Uvicorn running on {url}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="of streamable HTTP (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, help="serve streamable HTTP there; without it stdio")
    options = parser.parse_args(arguments)
    try:
        if options.port is None:
            # a thread of the SDK waits for standard input until the limit
            with Shutdown() as shutdown, shutdown.interrupts(0.0):
                make_server().run("stdio")
        else:
            serve_until_signal(
                lambda: make_server().streamable_http_app(host=options.host),
                options.host,
                options.port,
                _announce,
                drain_s=DRAIN_S,
                lifespan="on",
            )
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except StopRequested:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
