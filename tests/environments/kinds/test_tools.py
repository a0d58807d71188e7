"""kind = "tools": calls are made, their results come back masked, the episode ends with an answer."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.kinds.tools import ToolsEnvironment
from mlx_parallm.environments.registry import build_sources, create_environment
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_calls import ParsedCalls, parse_tool_calls
from mlx_parallm.primitives import InferenceModule, RolloutConfig, RolloutManager
from tests.environments.speaking import play

PROGRAM = str(Path(__file__).parents[2] / "execution" / "mcp_server.py")
TASKS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]


class SaysWithTools:
    """An inference that says what it is told to; it reads the calls as `InferenceModule` does."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts = list(answers), list[Any]()

    def batch_generate_with_tools(
        self, prompts: list[Any], tools: list[Any], formats: Any
    ) -> tuple[list[str], list[ParsedCalls]]:
        self.prompts += prompts
        text = self.answers.pop(0)
        return [text], [parse_tool_calls(text, tools, formats)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call(name: str, **arguments: Any) -> str:
    return "```json\n" + json.dumps({"tool": name, "arguments": arguments}) + "\n```"


def test_calls_are_made_until_there_is_an_answer() -> None:
    says = SaysWithTools(call("add", a=1, b=2) + call("nothing"), '```json\n{"tool": \n```', "It is 3.")
    environment = ToolsEnvironment(says, TASKS, functions=[add])
    state = environment.reset(index=0)
    question = state.prompt[0]["content"]
    state = play(environment, state)
    added, unknown, malformed = state.metadata["tool_calls"]
    assert (added["name"], added["arguments"], added["text"], added["error"]) == ("add", {"a": 1, "b": 2}, "3", None)
    assert unknown["error"] == "unknown_tool" and malformed["error"] == "malformed"
    assert state.metadata["answer_text"] == "It is 3." and state.step_count == 3
    assert says.prompts[1][0]["content"] == question
    assert [message["role"] for message in says.prompts[1]] == ["user", "assistant", "tool", "tool"]
    assert says.prompts[1][2]["content"] == "3"
    assert state.metadata["answer"] == str(int(question.split()[2]) + 1)


def test_the_last_turn_is_the_end() -> None:
    state = play(ToolsEnvironment(SaysWithTools(*[call("add", a=1, b=1)] * 3), TASKS, functions=[add], max_turns=2))
    assert state.step_count == 2 and state.metadata["answer_text"] is None and len(state.metadata["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "there are none"),
        ({"functions": [add], "max_turns": 0}, "max_turns"),
        ({"functions": ["python:nowhere.py:add"]}, "nowhere.py"),
        ({"mcp": [{"comand": ["x"]}]}, "unknown key 'comand'; did you mean 'command'"),
        ({"mcp": [{"command": ["/nowhere/server"]}]}, "cannot be started"),
        ({"mcp": ["uvx"]}, "no table"),
    ],
)
def test_what_cannot_work(options: dict[str, Any], words: str) -> None:
    if words == "cannot be started":
        pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=words):
        create_environment("tools", tasks=TASKS, **options)


def test_a_servers_tools_in_a_configuration() -> None:
    """As a TOML has it: the server's process answers, and ends with the environment."""
    pytest.importorskip("mcp")
    options = {"tasks": TASKS, "mcp": [{"command": [sys.executable, PROGRAM], "tools": ["add"]}]}
    rewards = {"rewards": ("builtin:length",), "reward_options": {"length": {"target": 10}}}
    (source,) = build_sources([EnvironmentConfig(kind="tools", name="tools", options=options, **rewards)], seed=0)
    environment = source.template  # type: ignore[attr-defined]
    environment.inference = SaysWithTools(call("add", a=20, b=22), "42")
    state = play(environment)
    assert state.metadata["tool_calls"][0]["text"] == "42"
    environment.client.close()


def test_with_an_engine_what_tools_say_is_not_trained_on() -> None:
    """The tiny model's template takes no tools: they stand in the first message, results in a user's."""
    with InferenceModule("builtin:tiny") as inference:
        environment = ToolsEnvironment(inference, TASKS, functions=[add], formats="function", max_turns=2)
        with RolloutManager(environment, RolloutConfig(num_parallel=4, group_size=2, max_tokens=8)) as manager:
            trajectories = manager.collect_rollouts(min_trajectories=4, max_steps_per_rollout=2)
    for trajectory in trajectories:
        assert trajectory.history and trajectory.metadata["answer_text"] is not None
