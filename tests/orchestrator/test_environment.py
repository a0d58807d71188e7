"""kind = "hybrid" against a scripted planner: groups, masks, metadata for the learner, limits,
wrong options."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult
from mlx_parallm.environments.state import StateSource
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.execution.tool_client import ToolClient, ToolResult
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.monitor.health import find
from mlx_parallm.systems.experts import save_expert
from mlx_parallm.systems.experts.registry import physics_controller
from mlx_parallm.systems.orchestrator.environment import HybridEnvironment
from mlx_parallm.systems.orchestrator.learning import STEPS
from mlx_parallm.systems.orchestrator.tool_server import math_solve, physics_simulate
from mlx_parallm.types import Request
from tests.environments.scripted_client import ScriptedClient

TASKS = [
    {"prompt": "What is 6 * 7?", "goal": {"expected_answer": 42}, "type": "math"},
    {
        "prompt": "Hit 100 m.",
        "goal": {"target": 100, "wind": 2, "tolerance": 1.0},
        "type": "physics",
    },
]
MATH, AIM = 0, 1
SHOOT = "DELEGATE: aim(target=100, wind=2)"


def one_of_two(index: int) -> dict[str, Any]:
    return TASKS[index % 2]


@pytest.fixture
def expert(tmp_path: Path) -> str:
    mx.random.seed(3)
    save_expert(tmp_path / "aim.npz", physics_controller("aim"))
    return str(tmp_path / "aim.npz")


@pytest.fixture(scope="module")
def tools() -> Iterator[EpisodeTools]:
    with ToolClient(functions=[math_solve, physics_simulate]) as client:
        yield EpisodeTools.of(client)


def source(
    expert: str,
    tools: EpisodeTools | None = None,
    allowed: tuple[str, ...] | None = None,
    **options: Any,
) -> StateSource:
    config = EnvironmentConfig(
        kind="hybrid",
        group_size=2,
        max_tokens=64,
        tools=allowed,
        options={"tasks": one_of_two, "experts": {"aim": expert}, "max_steps": 4} | options,
    )
    [made] = build_sources([config], seed=0, tools=tools)
    assert isinstance(made, StateSource)
    return made


def play(
    made: StateSource, tokenizer: Tokenizer, *turns: str, longest: int = 1024, **plan: Any
) -> GroupResult:
    """One group; every rollout writes `turns` one after the other, the last one again and again."""

    def answer(request: Request, choice: int) -> str:
        name, _, turn = request.request_id.rpartition("/")
        number = int(turn) if name.count("/") else 0
        return turns[min(number, len(turns) - 1)]

    policy = EpisodePolicy(ScriptedClient(tokenizer, answer), tokenizer, 1.0, longest)
    group = GroupPlan("g", made, plan.pop("task_index", 0), 2, seed=5, **plan)
    [result] = asyncio.run(EpisodeRunner(policy).run([group]))
    return result


def test_a_product(expert: str, tools: EpisodeTools, tiny_tokenizer: Tokenizer) -> None:
    made = source(expert, tools)
    result = play(made, tiny_tokenizer, "TOOL: math_solve(6 * 7)", "ANSWER: 42", task_index=MATH)
    assert result.failure is None
    [first, _] = result.trajectories
    metadata = first.metadata
    assert (metadata["solved"], metadata["answer_text"], metadata["routes"]) == (
        True,
        "42",
        ["tool math_solve", "answer"],
    )
    assert metadata["tool_calls"][0]["text"] == "42" and STEPS not in result.group.metadata
    # -0.01 a step, correct 1, exact 0.5, fast 0.5, efficient 0.2
    assert first.rollout.reward == metadata["reward"] == pytest.approx(2.18)
    opening = first.history[0].prompt
    assert (
        "TOOL: NAME" in opening
        and "math_solve(expression)" in opening
        and "- aim: Aim at a target" in opening
    )
    # One sequence of tokens; what the tool said is masked.
    assert not first.rollout.earlier
    sampled = list(itertools.compress(first.rollout.tokens, first.rollout.mask))
    shown = "".join(map(tiny_tokenizer.token_text, sampled))
    assert "math_solve" in shown and "->" not in shown


@pytest.mark.parametrize("allowed", [(), ("math_solve",)])
def test_the_tools_of_the_planner_alone_are_limited(
    expert: str, tools: EpisodeTools, tiny_tokenizer: Tokenizer, allowed: tuple[str, ...]
) -> None:
    made = source(expert, tools, allowed)
    shot = "TOOL: physics_simulate(angle=45, velocity=30)"
    [first, _] = play(
        made, tiny_tokenizer, shot, SHOOT, "ANSWER: done", task_index=AIM
    ).trajectories
    refused, *shots = first.metadata["tool_calls"]
    assert refused["error"] == "unknown_tool" and refused["text"].endswith(
        f"there are: {', '.join(allowed) or 'none'}"
    )
    assert len(shots) == 10 and all(
        call["error"] is None and call["expert"] == "aim" for call in shots
    )
    opening = first.history[0].prompt
    assert "- physics_simulate(" not in opening and ("math_solve" in opening) == bool(allowed)


def test_an_environment_with_tools_of_its_own(
    expert: str, tools: EpisodeTools, tiny_tokenizer: Tokenizer
) -> None:
    made = source(expert)
    made.template = HybridEnvironment(tasks=one_of_two, tools=tools)  # type: ignore[arg-type]
    made.take_tools(None)
    [first, _] = play(
        made, tiny_tokenizer, "TOOL: math_solve(6 * 7)", "ANSWER: 42", task_index=MATH
    ).trajectories
    assert first.metadata["solved"]


def test_the_experts_steps_go_with_the_group(
    expert: str, tools: EpisodeTools, tiny_tokenizer: Tokenizer
) -> None:
    made = source(expert, tools, learn="both")
    aim = AIM
    result = play(made, tiny_tokenizer, SHOOT, "ANSWER: done", task_index=aim)
    first, second = result.group.metadata[STEPS]
    # each rollout has its own noise
    assert [episode["expert"] for episode in first] == ["aim"] and first != second
    again = play(
        source(expert, tools, learn="both"), tiny_tokenizer, SHOOT, "ANSWER: done", task_index=aim
    )
    assert again.group.metadata[STEPS] == [first, second]  # the same episodes, bit for bit
    heldout = play(made, tiny_tokenizer, SHOOT, "ANSWER: done", task_index=aim, split="train")
    assert STEPS in heldout.group.metadata
    planner = play(
        source(expert, tools, learn="planner"),
        tiny_tokenizer,
        SHOOT,
        "ANSWER: done",
        task_index=aim,
    )
    assert STEPS not in planner.group.metadata  # the most likely actions; nothing to learn from


def test_a_summary_in_the_place_of_the_conversation(
    expert: str, tools: EpisodeTools, tiny_tokenizer: Tokenizer
) -> None:
    made = source(expert, tools, history="summary", instructions="")
    calls = ["TOOL: math_solve(1 + 1)", "TOOL: math_solve(2 + 2)", "ANSWER: 4"]
    [first, _] = play(made, tiny_tokenizer, *calls, task_index=MATH).trajectories
    last = first.history[-1].prompt
    assert (
        last.startswith("What is 6 * 7?")
        and "- math_solve -> 2" in last
        and "- math_solve -> 4" in last
    )
    assert len(first.rollout.earlier) == 2  # each turn is its own sequence


def broken_simulator(angle: float, velocity: float, wind: float = 0.0) -> str:
    """Answer in words where the loop reads a number."""
    return "it flew far"


@pytest.mark.parametrize(
    ("text", "structured", "value"),
    [
        ('{"distance": 118.3}', None, {"distance": 118.3}),
        ("", {"distance": 118.3}, {"distance": 118.3}),
        ("", {"result": '{"distance": 118.3}'}, {"distance": 118.3}),
        ("", {"result": {"distance": 118.3}}, {"distance": 118.3}),
        ("it flew far", None, None),
        ("", {"result": "it flew far"}, "it flew far"),
        ("A", {"result": "A"}, "A"),  # one object: Python has each character once
        ('```json\n{"distance": 1}\n```', None, {"distance": 1}),
        ('{"result": {"distance": 1}}', None, {"distance": 1}),
        ('"{\\"distance\\": 1}"', None, {"distance": 1}),
        (' \n```\n {"distance": 1}\n\n ```\n', None, {"distance": 1}),
        ("```json\n1\n```\nand more", None, None),
        ("[" * 200_000, None, None),
        ("```\n" + "\n" * 100_000 + "```?", None, None),  # a pattern took days
    ],
)
def test_json_that_a_tool_answers_as_text_is_its_result(
    text: str, structured: Any, value: Any
) -> None:
    """Each delegation to a server without an output schema failed with "returned no distance"."""
    assert ToolResult(text, structured).value == value


def test_delegations_that_fail_are_counted_and_health_says_so(
    expert: str, tools: EpisodeTools, tiny_tokenizer: Tokenizer
) -> None:
    broken_simulator.__name__ = "physics_simulate"
    shares = {}
    with ToolClient(functions=[broken_simulator]) as client:
        for name, given in (("well", tools), ("broken", EpisodeTools.of(client))):
            result = play(source(expert, given), tiny_tokenizer, SHOOT, "ANSWER: x", task_index=AIM)
            [shares[name]] = {
                rollout.scores["metrics/failed_delegations"] for rollout in result.group.rollouts
            }
    assert shares == {"well": 0.0, "broken": 1.0}
    line = {"step": 1, "groups": 16, "metrics/failed_delegations/mean": shares["broken"]}
    [found] = find([line] * 5)
    assert found.name == "delegations-fail" and "100%" in found.sentence


def test_limits(expert: str, tiny_tokenizer: Tokenizer) -> None:
    made = source(expert, max_steps=2)
    aim = AIM
    [first, _] = play(made, tiny_tokenizer, "THINK: hm", task_index=aim).trajectories
    assert first.metadata["timed_out"] and first.rollout.reward == pytest.approx(-0.02 - 2.0 - 0.5)
    # No room for a second turn: an episode without an answer.
    made = source(expert, instructions="")
    [first, _] = play(
        made, tiny_tokenizer, "THINK: " + "long " * 15, task_index=aim, longest=100
    ).trajectories
    assert first.out_of_room and first.metadata["answer_text"] is None
    assert first.rollout.reward == pytest.approx(-0.01 - 1.0 - 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learn": "all"}, "learn: one of"),
        ({"history": "none"}, "history"),
        ({"rewards": {"corect_answer_reward": 1}}, "correct_answer_reward"),
        ({"rewards": {"step_penalty": "much"}}, "has to be a number"),
        ({"learn": "both", "ppo": {"gama": 1}}, "gamma"),
        ({"ppo": {"gamma": 0.9}}, 'ppo has no effect with learn = "planner"'),
        ({"min_steps": 5}, "min_steps has no effect"),
        (
            {"learn": "both", "alternate_every": 5},
            'alternate_every has no effect .*: set learn = "alternate"',
        ),
        ({"learn": "both", "experts": {}}, "there is no expert"),
        (
            {"learn": "both", "ppo": {"horizon": 5}},
            r"ppo\.horizon has no effect here: .* set min_steps",
        ),
        ({"learn": "both", "ppo": {"recurrent": False}}, r"ppo\.recurrent has no effect"),
        ({"controls": {"aim": "projectil"}}, "projectile"),
        ({"controls": {"nobody": "projectile"}}, "nobody"),
        ({"tasks": "builtin:rooting"}, "routing"),
        ({"mcp": [{"command": ["x"]}]}, "mcp"),
        ({"max_expert_steps": 0}, "max_expert_steps"),
    ],
)
def test_wrong_options(expert: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source(expert, **options)


def test_an_expert_that_is_not_there() -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        HybridEnvironment(experts={"aim": "nowhere.npz"})
