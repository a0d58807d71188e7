"""One episode: routing, expert loops over live calls, views, limits, and what goes wrong."""

import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.systems.experts import ExpertConfig, ExpertRegistry, GRUExpert
from mlx_parallm.systems.experts.registry import physics_controller
from mlx_parallm.systems.experts.vector_tasks import ProjectileTask, flight, shot_of
from mlx_parallm.systems.orchestrator import (
    HybridEnv,
    ObservationBuilder,
    Orchestrator,
    OrchestratorConfig,
    RewardConfig,
    VectorizedHybridEnv,
)
from mlx_parallm.systems.orchestrator.control import ProjectileLoop
from mlx_parallm.systems.orchestrator.reward import HybridTask
from mlx_parallm.systems.orchestrator.task_pools import routing_task
from mlx_parallm.systems.orchestrator.tool_server import math_solve, physics_simulate

AIM = {
    "prompt": "Hit 100 m.",
    "goal": {"target": 100.0, "wind": 2.0, "tolerance": 1.0},
    "type": "physics",
}
SUM = {"prompt": "What is 6 * 7?", "goal": {"expected_answer": 42}, "type": "math"}


@pytest.fixture
def tools() -> Iterator[ToolClient]:
    with ToolClient(functions=[math_solve, physics_simulate]) as client:
        yield client


def registry(seed: int = 0) -> ExpertRegistry:
    mx.random.seed(seed)
    experts = ExpertRegistry()
    experts.register(physics_controller("aim"))
    return experts


def test_a_call_then_the_answer(tools: ToolClient) -> None:
    orchestrator = Orchestrator(None, registry(), tools)
    assert orchestrator.reset(SUM).startswith("What is 6 * 7?")
    result = orchestrator.step(
        "THINK: a tool knows\nTOOL: math_solve(expression=6 * 7)\nANSWER: 41"
    )
    # The answer of the same turn was written before the result was there.
    assert (
        result.tool_result is not None
        and result.tool_result.text == "42"
        and result.info["left_out"] == 1
    )
    assert (result.done, result.text) == (False, "math_solve -> 42")
    assert (
        "- math_solve -> 42" in result.observation
        and "- TOOL: math_solve(expression=6 * 7)" in result.observation
    )
    end = orchestrator.step("ANSWER: 42")
    assert end.done and orchestrator.solved and end.text == ""
    assert result.reward == pytest.approx(-0.01) and end.reward == pytest.approx(
        -0.01 + 1 + 0.5 + 0.5 + 0.2
    )
    assert orchestrator.total_reward == pytest.approx(2.18)
    with pytest.raises(RuntimeError):
        orchestrator.step("ANSWER: 42")


def test_what_goes_wrong_is_a_result(tools: ToolClient) -> None:
    orchestrator = Orchestrator(OrchestratorConfig(max_steps=6), registry(), tools)
    orchestrator.reset(AIM)
    turns = {
        "TOOL: nothing()": ("unknown_tool", -0.11),
        "DELEGATE: nobody()": ("unknown_expert", -0.11),
        "TOOL: math_solve(expression=(1": ("malformed", -0.11),
        "DELEGATE: aim(target=far)": ("arguments", -0.11),
        'TOOL: math_solve(expression="six")': ("tool", -0.21),
    }
    for turn, (error, reward) in turns.items():
        result = orchestrator.step(turn)
        assert (result.info["error"], result.done) == (error, False), turn
        assert result.reward == pytest.approx(reward)
    last = orchestrator.step("just thinking")
    assert last.done and last.info["timed_out"] and not orchestrator.solved
    # time-out, a miss (no shot), nothing for the thought
    assert last.reward == pytest.approx(-0.01 - 2.0 - 0.5)


def test_a_slow_tool_is_a_time_out() -> None:
    release = threading.Event()

    def wait() -> str:
        """Wait."""
        release.wait(30)
        return "late"

    with ToolClient(functions=[wait]) as client:
        orchestrator = Orchestrator(
            OrchestratorConfig(tool_call_timeout=0.05), ExpertRegistry(), client
        )
        orchestrator.reset(SUM)
        result = orchestrator.step("TOOL: wait()")
        release.set()
    assert result.info["error"] == "timeout" and "0.05 s" in result.text


def test_the_time_limit_of_a_call_is_the_orchestrators_where_it_has_one() -> None:
    """Longer than the client's own is obeyed too; without one the client's holds."""

    released = threading.Event()

    def slow() -> str:
        """Wait."""
        released.wait(30)
        return "late"

    with ToolClient(functions=[slow], function_timeout_s=0.05) as client:
        threading.Timer(0.2, released.set).start()
        for seconds, text in ((30.0, "late"), (None, "slow: no answer within 0.05 s")):
            orchestrator = Orchestrator(
                OrchestratorConfig(tool_call_timeout=seconds), ExpertRegistry(), client
            )
            orchestrator.reset(SUM)
            assert orchestrator.step("TOOL: slow()").tool_result.text == text
            released.clear()
        released.set()


def test_an_expert_acts_as_in_its_training_environment(tools: ToolClient) -> None:
    """The same observations, shots, rewards and end as `ProjectileTask`, call by call."""
    experts = registry()
    orchestrator = Orchestrator(None, experts, tools, explore=True, seed=7)
    orchestrator.reset(AIM)
    result = orchestrator.step("DELEGATE: aim(target=100, wind=2)").expert_result
    assert result is not None and result.steps == len(result.trajectory) > 0
    [kept] = orchestrator.expert_steps
    task = ProjectileTask(1)
    seen = task.reset(0)
    task._target[:], task._wind[:] = 100.0, 2.0
    seen = task._observe()
    for number, step in enumerate(result.trajectory):
        np.testing.assert_allclose(kept.observations[number], seen[0], atol=1e-6)
        action = np.tanh(np.array(kept.raw_actions[number]))
        taken = task.step(action[None])
        angle, velocity = shot_of(action)
        assert (
            step["arguments"]["angle"] == pytest.approx(angle, abs=1e-4)
            and 0 <= step["arguments"]["angle"] <= 90
        )
        assert step["arguments"]["velocity"] == pytest.approx(velocity, abs=1e-4)
        assert step["result"]["distance"] == pytest.approx(flight(angle, velocity, 2.0), abs=1e-3)
        assert kept.rewards[number] == pytest.approx(taken.rewards[0], abs=1e-5)
        seen = taken.last_observations
    assert bool(taken.terminated[0]) and kept.last_value == 0.0
    assert result.reward == pytest.approx(sum(kept.rewards))
    assert all(call.expert == "aim" for call in orchestrator.calls)


def test_kept_steps_replay_to_ratio_one(tools: ToolClient) -> None:
    """Log-probabilities and values of the loop are those that recurrent PPO computes over the
    whole row."""
    experts = registry()
    experts.get("aim").value_head.weight = mx.random.normal((1, 64))  # it begins at zero
    orchestrator = Orchestrator(
        OrchestratorConfig(max_expert_steps=4), experts, tools, explore=True
    )
    orchestrator.reset(AIM | {"goal": AIM["goal"] | {"tolerance": 1e-6}})
    orchestrator.step("DELEGATE: aim(target=100, wind=2)")
    [kept] = orchestrator.expert_steps
    expert = experts.get("aim")
    rows = lambda values: mx.array(np.array(values, np.float32))[None]  # noqa: E731
    scores = expert.scores(rows(kept.observations), rows(kept.raw_actions), None)
    np.testing.assert_allclose(np.array(scores[0])[0], kept.log_probs, atol=1e-5)
    np.testing.assert_allclose(np.array(scores[2])[0], kept.values, atol=1e-5)
    # cut after four steps: the next state still counts
    assert len(kept.rewards) == 4 and kept.last_value != 0.0


def test_the_seed_decides_what_an_expert_samples(tools: ToolClient) -> None:
    experts = registry()

    def actions(seed: int, explore: bool) -> Any:
        orchestrator = Orchestrator(None, experts, tools, explore=explore, seed=seed)
        orchestrator.reset(AIM)
        result = orchestrator.step("DELEGATE: aim(target=100, wind=2)").expert_result
        assert result is not None
        return [step["arguments"] for step in result.trajectory], orchestrator.expert_steps

    assert actions(1, True) == actions(1, True)
    assert actions(1, True)[0] != actions(2, True)[0]
    assert actions(1, False) == actions(2, False) and actions(1, False)[1] == []


def test_a_tool_that_fails_ends_the_loop() -> None:
    calls = 0

    def physics_simulate(angle: float, velocity: float, wind: float) -> dict[str, Any]:
        """Fail at the third call."""
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ToolFailedError("no more")
        return {"distance": 1.0} if calls < 5 else {"height": 2.0}

    with ToolClient(functions=[physics_simulate]) as client:
        orchestrator = Orchestrator(None, registry(), client, explore=True)
        orchestrator.reset(AIM)
        result = orchestrator.step("DELEGATE: aim(target=100, wind=2)")
        assert result.info["error"] == "tool" and "no more" in result.text
        assert result.expert_result is not None and result.expert_result.steps == 2
        assert len(orchestrator.expert_steps[0].rewards) == 2  # the failed call is not learned from
        calls = 10
        result = orchestrator.step("DELEGATE: aim(target=100, wind=2)")
        assert result.info["error"] == "tool" and "no distance" in result.text
        assert len(orchestrator.expert_steps) == 1


WRONG = [
    {},
    {"target": "x"},
    {"target": 49},
    {"target": 90, "wind": 6},
    {"target": 90, "speed": 1},
    {"target": True},
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_of_a_delegation(arguments: Any) -> None:
    with pytest.raises(ToolFailedError):
        ProjectileLoop(HybridTask("x"), arguments)


def test_an_expert_without_a_loop_is_refused(tools: ToolClient) -> None:
    experts = registry()
    experts.register(
        GRUExpert(ExpertConfig("pole", obs_dim=4, discrete_actions=True, num_actions=2))
    )
    with pytest.raises(ConfigError, match="pole"):
        Orchestrator(None, experts, tools)
    with pytest.raises(ConfigError, match="nobody"):
        Orchestrator(None, registry(), tools, controls={"nobody": ProjectileLoop})
    assert (
        Orchestrator(None, experts, tools, controls={"pole": ProjectileLoop}).controls["pole"]
        is ProjectileLoop
    )


def test_views() -> None:
    builder = ObservationBuilder()
    results, actions = [f"r{n}" for n in range(7)], [f"a{n}" for n in range(7)]
    text = builder.text("T", step=3, max_steps=9, results=results, actions=actions)
    assert text.splitlines()[2] == "Step 4 of at most 9."
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        *(f"- r{n}" for n in range(2, 7)),
        *(f"- a{n}" for n in range(4, 7)),
    ]
    seen = builder.physics(target=100.0, error=20.0, distance=120.0, wind=5.0, attempts=3)
    np.testing.assert_allclose(seen, [0.5, 0.1, 0.6, 0.5, 0.3, 0, 0, 0, 0, 0], atol=1e-6)


def test_hybrid_env(tools: ToolClient) -> None:
    orchestrator = Orchestrator(None, registry(), tools)
    env = HybridEnv(orchestrator, task_pool=[SUM, AIM], step_penalty=-0.02, max_episode_length=3)
    seen = env.reset()
    assert "6 * 7" in seen
    seen, reward, done, info = env.step_from_text("TOOL: math_solve(expression=6 * 7)")
    assert (reward, done, info["kind"]) == (pytest.approx(-0.02), False, "tool")
    _, reward, done, info = env.step_from_text("ANSWER: 42")
    assert done and info["solved"] and reward == pytest.approx(2.18)
    assert "100 m" in env.reset()  # the next of the pool
    for _ in range(3):
        *_, done, info = env.step_from_text("hm")
    assert done and info["timed_out"]
    with pytest.raises(ConfigError, match="task_pool"):
        HybridEnv(Orchestrator(None, registry(), tools))


def test_hybrid_env_obeys_its_orchestrators_settings(tools: ToolClient) -> None:
    """Every number that both have, in the orchestrator's configuration alone, and replaced by
    HybridEnv's own."""
    rewards = RewardConfig(
        step_penalty=-0.3,
        valid_tool_call_reward=0.2,
        expert_delegation_reward=0.1,
        expert_success_bonus=0.0,
    )
    config = OrchestratorConfig(max_steps=2, rewards=rewards, max_expert_steps=1)
    call, aim = "TOOL: math_solve(expression=6 * 7)", "DELEGATE: aim(target=100, wind=2)"

    def play(turns: tuple[str, ...], **changes: Any) -> tuple[list[float], list[bool]]:
        env = HybridEnv(Orchestrator(config, registry(), tools), task_pool=[SUM], **changes)
        env.reset()
        steps = [env.step_from_text(turn) for turn in turns]
        assert f"at most {env.orchestrator.config.max_steps}" in steps[0][0]
        return [round(step[1], 6) for step in steps], [step[2] for step in steps]

    assert play(("THINK: so", "THINK: and so")) == ([-0.3, -0.3 - 2.0], [False, True])
    assert play((call, aim))[0] == [-0.1, pytest.approx(-0.2 - 2.0)]
    own = {
        "step_penalty": -0.5,
        "tool_call_reward": 0.0,
        "expert_use_reward": 0.4,
        "max_episode_length": 3,
    }
    assert play((call, aim, "THINK: so"), **own) == ([-0.5, -0.1, -2.5], [False, False, True])
    assert play(("THINK: so",), step_penalty=0.0)[0] == [0.0], (
        "0 is a value, not the absence of one"
    )
    for length in (0, -1):
        with pytest.raises(ConfigError, match="max_steps"):
            HybridEnv(
                Orchestrator(config, registry(), tools), task_pool=[SUM], max_episode_length=length
            )


def test_a_type_that_is_nearly_one_is_refused(tools: ToolClient) -> None:
    orchestrator = Orchestrator(None, registry(), tools)
    with pytest.raises(ConfigError, match=r"'phisics'.*'physics'"):
        orchestrator.reset({**SUM, "type": "phisics"})
    orchestrator.reset({**SUM, "type": "geography"})  # of the data's own


def test_environments_side_by_side(tools: ToolClient) -> None:
    def make(number: int) -> HybridEnv:
        orchestrator = Orchestrator(None, registry(), tools, seed=number)
        return HybridEnv(
            orchestrator, task_generator=lambda index: routing_task(index, seed=number)
        )

    with VectorizedHybridEnv([make(0), make(1)]) as envs:
        first = envs.reset()
        assert len(first) == 2 and first[0] != first[1]
        seen, rewards, dones, infos = envs.step(["ANSWER: nothing", "DELEGATE: aim(target=90)"])
        assert (
            dones == [True, False]
            and infos[0]["final_observation"] != seen[0]
            and len(rewards) == 2
        )
        assert "final_observation" not in infos[1] and "Step 2" in seen[1] and "Step 1" in seen[0]
        assert infos[1]["expert_result"].steps > 0
        with pytest.raises(ValueError, match="2 actions"):
            envs.step(["hm"])


def test_the_reward_of_the_specification() -> None:
    config = RewardConfig()
    assert {name: value for name, value in vars(config).items() if name != "task_rewards"} == {
        "correct_answer_reward": 1.0,
        "partial_answer_reward": None,
        "wrong_answer_penalty": -0.5,
        "no_answer_penalty": -1.0,
        "unverified_answer_reward": 0.1,
        "step_penalty": -0.01,
        "timeout_penalty": -2.0,
        "valid_tool_call_reward": 0.0,
        "invalid_tool_call_penalty": -0.1,
        "tool_error_penalty": -0.2,
        "expert_delegation_reward": 0.0,
        "expert_success_bonus": 0.2,
        "fast_completion_bonus": 0.5,
        "efficient_tool_use_bonus": 0.2,
        "constraint_violation_penalty": -0.5,
        "answer_tolerance": 0.01,
        "partial_within": 0.1,
        "fast_steps": 5,
        "efficient_calls": 3,
    }
