"""Environments that are made with the real openenv-core, each in its own process. Only where
it is installed."""

import json
import sys

import pytest

from tests.environments.openenv.test_openenv import call, played, source

pytestmark = pytest.mark.long
PROGRAM = """
import sys
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class EchoAction(Action):
    message: str

class EchoObservation(Observation):
    echoed_message: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed=None, episode_id=None, **values):
        self._state = State(episode_id=episode_id, step_count=0)
        return EchoObservation(echoed_message="ready")

    def step(self, action):
        self._state.step_count += 1
        text = action.message
        over = self._state.step_count == 2
        return EchoObservation(echoed_message=text, reward=len(text) / 10, done=over)

    @property
    def state(self):
        return self._state

class Adds(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adds")

        @server.tool
        def add(a: int, b: int) -> int:
            "Add two numbers."
            return a + b

        super().__init__(server)
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed=None, episode_id=None, **values):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **values):
        raise ValueError("tools alone")

    @property
    def state(self):
        return self._state

kinds = {
    "Echo": (Echo, EchoAction, EchoObservation),
    "Adds": (Adds, CallToolAction, CallToolObservation),
}
app = create_app(*kinds[sys.argv[2]], env_name=sys.argv[2], max_concurrent_envs=2)
import uvicorn
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def started(tmp_path):
    pytest.importorskip("openenv")
    program, sources = tmp_path / "server.py", []
    program.write_text(PROGRAM)

    def start(kind, **options):
        command = [sys.executable, str(program), "{port}", kind]
        sources.append(source(command=command, **options))
        return sources[-1]

    yield start
    for built in sources:
        built.servers.close()


async def test_an_environment_of_openenv_core(tokenizer, started):
    built = started("Echo", keep_state=True)
    result, _ = await played(tokenizer, built, lambda text, turn: "hello", size=6)
    assert result.failure is None, result.failure  # two sessions at once, so four waited
    for trajectory, rollout in zip(result.trajectories, result.group.rollouts, strict=True):
        assert [turn.prompt for turn in trajectory.history] == ["ready", "hello"]
        assert rollout.turn_rewards == (0.5, 0.5)
        assert trajectory.metadata["state"]["step_count"] == 2


async def test_actions_of_openenv_core_are_refused_with_its_reason(tokenizer, started):
    built = started("Echo", action_of="json")
    answers = ["{}", json.dumps({"message": "x"}), json.dumps({"message": "y"})]
    result, _ = await played(tokenizer, built, lambda text, turn: answers[turn], size=1)
    [trajectory] = result.trajectories
    assert trajectory.history[1].prompt == "That is no action. message: Field required"


async def test_tools_of_openenv_core(tokenizer, started):
    built = started("Adds")
    answers = [call("add", a=2, b=3), call("add", a="x"), "It is 5."]
    result, _ = await played(tokenizer, built, lambda text, turn: answers[turn], size=1)
    assert result.failure is None, result.failure
    [first, second] = result.trajectories[0].metadata["tool_calls"]
    assert (first["text"], first["error"], second["error"]) == ("5", None, "arguments")
