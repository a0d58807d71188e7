"""The tool server as a process, over stdio and HTTP, against the functions in this process."""

import subprocess
import sys

import pytest

from mlx_parallm.execution.tool_client import MCPServer, ToolClient
from mlx_parallm.systems.experts.vector_tasks import flight
from mlx_parallm.systems.orchestrator.tool_server import math_solve, physics_simulate
from scripts.server_process import free_port

COMMAND = (sys.executable, "-m", "mlx_parallm.systems.orchestrator.tool_server")
CALLS = [
    ("math_solve", {"expression": "17 * 23 - 4"}),
    ("math_solve", {"expression": "2 ** 10 = 1024"}),
    ("math_solve", {"expression": "1 / 0"}),
    ("math_solve", {"expression": "__import__('os')"}),
    ("physics_simulate", {"angle": 31.25, "velocity": 47.3, "wind": -2.5}),
    ("physics_simulate", {"angle": 45, "velocity": 50}),
    ("physics_simulate", {"angle": 91, "velocity": 50}),
    ("physics_simulate", {"angle": 45, "velocity": 1e9}),
]


def test_the_simulation_is_the_experts() -> None:
    for angle, velocity, wind in (
        (45.0, 50.0, 0.0),
        (12.5, 88.0, -4.5),
        (90.0, 10.0, 5.0),
        (0.0, 10.0, 1.0),
    ):
        landed = physics_simulate(angle, velocity, wind)["distance"]
        assert landed == pytest.approx(float(flight(angle, velocity, wind)), rel=1e-12, abs=1e-12)
    # 45°, 50 m/s: t = 100 · 0.707107 / 9.81 = 7.208 s, d = 2500 / 9.81 = 254.84 m
    assert physics_simulate(45, 50) == pytest.approx(
        {"distance": 254.842, "time": 7.20802}, abs=1e-3
    )


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_server_process_answers_as_the_functions(transport: str) -> None:
    process = None
    if transport == "http":
        port = free_port()
        process = subprocess.Popen(
            [*COMMAND, "--port", str(port)], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:  # uvicorn's own words, when it listens
            if "Uvicorn running" in line:
                break
        server = MCPServer("tools", url=f"http://127.0.0.1:{port}/mcp")
    else:
        server = MCPServer("tools", command=COMMAND)
    try:
        with (
            ToolClient([server]) as served,
            ToolClient(functions=[math_solve, physics_simulate]) as own,
        ):
            assert {tool["name"] for tool in served.definitions()} == {
                "math_solve",
                "physics_simulate",
            }
            for name, arguments in CALLS:
                there, here = served.call(name, arguments), own.call(name, arguments)
                assert there.error == here.error, (name, arguments, there)
                if here.error is None:
                    assert (
                        there.text.split() == here.text.split()
                        or there.structured == here.structured
                    )
                if name == "physics_simulate":
                    assert there.structured == here.structured
            assert served.call(*CALLS[0]).cached and not served.call(*CALLS[0], cached=False).cached
    finally:
        if process is not None:
            process.terminate()
            process.communicate(timeout=30)


def test_the_server_loads_no_mlx() -> None:
    """It starts in the time of the SDK alone."""
    program = (
        "import sys; from mlx_parallm.systems.orchestrator.tool_server import make_server;"
        " make_server();"
        "sys.exit('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
