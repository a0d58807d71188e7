"""Self-verification under a budget: what is asked, what is called, and that the money is really
spent."""

import json
import time

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.kinds.svrl import (
    SVRLEnvironment,
    VerificationTool,
    arithmetic_task,
    calculate,
    code_runner,
    fact_table,
)
from mlx_parallm.environments.registry import build_sources, create_environment
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.rewards.base import score_group
from mlx_parallm.rewards.parts import SVRLRewardComputer
from mlx_parallm.types import Rollout, Trajectory
from tests.environments.speaking import Says, play

TASK = [{"prompt": "What is 6 * 7?", "answer": "42"}]
CALCULATOR = ["verify_calculation"]


def svrl(*answers, tools=CALCULATOR, budget=10.0, tasks=TASK, **options):
    return SVRLEnvironment(Says(*answers), tools, budget, tasks=tasks, **options)


def trajectory(state):
    rollout = Rollout((1, 2), (0, 1), (0.0, -0.5), (0, 0), 1.0, {})
    return Trajectory(state.response, rollout, step_count=state.step_count, metadata=state.metadata)


def test_an_episode_of_a_call_and_an_answer():
    environment = svrl(
        "I check: USE_TOOL[verify_calculation](6 * 7)", "so it is.\nFINAL ANSWER: 42\nor so"
    )
    state = play(environment)
    first, second = environment.inference.prompts
    assert first.startswith("What is 6 * 7?\n")
    assert "verify_calculation, cost 1: " in first
    assert "Budget left: 10 of 10." in first
    assert "Budget left: 9 of 10.\nUSE_TOOL[verify_calculation](6 * 7) -> 42\n" in second
    assert state.metadata["final_answer"] == "42"
    assert state.metadata["spent"] == 1.0
    call = {
        "name": "verify_calculation",
        "arguments": "6 * 7",
        "ok": True,
        "cost": 1.0,
        "skipped": False,
    }
    assert state.metadata["tool_calls"] == [{**call, "result": "42"}]
    assert state.step_count == 2
    assert [turn["response"] for turn in state.history] == [
        state.history[0]["response"],
        state.response,
    ]


def test_tools_may_be_a_table_of_names():
    """Functions, a built-in tool and a VerificationTool under names of the user's; costs go by
    these names."""
    table = {
        "calculator": lambda text: str(eval(text)),
        "check": "verify_calculation",
        "shout": VerificationTool("other", str.upper, 2.0),
    }
    turns = (
        "USE_TOOL[calculator](6*7) USE_TOOL[check](6*7=42) USE_TOOL[shout](ok)",
        "FINAL ANSWER: 42",
    )
    state = play(svrl(*turns, tools=table, costs={"calculator": 0.5}))
    calls = {call["name"]: (call["result"], call["cost"]) for call in state.metadata["tool_calls"]}
    assert calls == {"calculator": ("42", 0.5), "check": ("true", 1.0), "shout": ("OK", 2.0)}
    for wrong, words in (
        ({"calculator": 3}, "expected a name, a function"),
        ("calculator", "is a list or a table"),
    ):
        with pytest.raises(ConfigError, match=words):
            svrl(tools=wrong)


def test_the_reward_reads_what_was_spent():
    """1 - 0.1 · 1/10 + 0.05 · 48/50 against 1 + 0.05 · 49/50: the published implementation
    charged nothing."""
    checked = play(svrl("USE_TOOL[verify_calculation](6*7)", "FINAL ANSWER: 42"))
    guessed = play(svrl("FINAL ANSWER: 42"))
    rewards = SVRLRewardComputer().compute_rewards([trajectory(checked), trajectory(guessed)])
    assert rewards == pytest.approx([1 - 0.01 + 0.048, 1.049])


def test_a_call_beyond_the_budget_is_not_made_and_that_is_said():
    made = []
    tool = VerificationTool("ask", lambda text: made.append(text) or "yes", cost=2.0)
    environment = svrl(
        "USE_TOOL[ask](a) USE_TOOL[ask](b)", "FINAL ANSWER: x", tools=[tool], budget=3.0
    )
    state = play(environment)
    assert made == ["a"]
    assert [call["skipped"] for call in state.metadata["tool_calls"]] == [False, True]
    assert state.metadata["spent"] == 2.0
    assert "USE_TOOL[ask](b) -> not made: it costs 2, 1 is left" in environment.inference.prompts[1]


@pytest.mark.parametrize("budget", [0.5, 1.0, 2.5, 10.0])
def test_no_episode_spends_more_than_its_budget_and_ends_when_it_is_spent(budget):
    answers = ["USE_TOOL[verify_calculation](1+1) " * 4] * 10
    state = play(svrl(*answers, budget=budget, max_steps=10))
    assert state.metadata["spent"] == pytest.approx(budget // 1.0)
    assert (state.step_count, state.metadata["final_answer"]) == (
        {0.5: 10, 1.0: 1, 2.5: 10, 10.0: 3}[budget],
        None,
    )


def test_only_calls_before_the_final_answer_are_made():
    state = play(
        svrl("USE_TOOL[verify_calculation](1)\nfinal answer: 42\nUSE_TOOL[verify_calculation](2)")
    )
    assert [call["arguments"] for call in state.metadata["tool_calls"]] == ["1"]
    assert state.metadata["final_answer"] == "42"


def test_what_goes_wrong_in_a_call_is_told_to_the_policy():
    def breaks(text):
        raise ValueError("no luck")

    answers = [
        "USE_TOOL[breaks](x) USE_TOOL[guess](x) USE_TOOL[verify_calculation](6 *",
        "FINAL ANSWER: 1",
    ]
    environment = svrl(*answers, tools=["verify_calculation", breaks], costs={"breaks": 0.5})
    state = play(environment)
    broken, unknown, unclosed = state.metadata["tool_calls"]
    assert broken["result"].endswith("ValueError: no luck")
    assert (broken["ok"], broken["cost"]) == (False, 0.5)
    assert unknown["result"] == "there is no such tool, only verify_calculation, breaks"
    assert unclosed["result"].startswith("malformed: ")
    assert state.metadata["spent"] == 0.5
    for call in (broken, unknown, unclosed):
        assert call["result"] in environment.inference.prompts[1]


def test_the_prompt_shows_the_last_three_verifications():
    answers = [f"USE_TOOL[verify_calculation]({number}+0)" for number in range(5)]
    environment = svrl(*answers, "FINAL ANSWER: 1")
    play(environment)
    shown = [
        f"({number}+0) -> {number}" in environment.inference.prompts[-1] for number in range(5)
    ]
    assert shown == [False, False, True, True, True]


def test_the_default_tools_are_real():
    try:
        environment = SVRLEnvironment(facts={"capital of Peru": "Lima"}, tasks=TASK)
    except ConfigError as error:
        pytest.skip(str(error))  # no sandbox here
    assert {tool.name: tool.cost for tool in environment.tools.values()} == {
        "verify_calculation": 1.0,
        "check_facts": 2.0,
        "run_code": 1.5,
    }
    assert environment.blocking  # run_code takes its time
    calls = (
        'USE_TOOL[verify_calculation](6*7 = 42) USE_TOOL[check_facts]("Capital of Peru")'
        " USE_TOOL[run_code](print(len('ab'), 6*7))"
    )
    environment.inference = Says(calls, "FINAL ANSWER: 42")
    state = play(environment)
    assert [call["result"] for call in state.metadata["tool_calls"]] == ["true", "Lima", "2 42"]
    assert state.metadata["spent"] == 4.5


def test_tasks_are_a_pure_function_of_index_and_split():
    environment = SVRLEnvironment(tools=CALCULATOR)
    assert environment.reset(index=3) == environment.reset(index=3)
    assert environment.reset(index=3).prompt != environment.reset(index=4).prompt
    assert environment.reset().prompt == environment.reset(index=0).prompt
    questions = {
        split: {arithmetic_task(n, split)["prompt"] for n in range(300)}
        for split in ("train", "heldout")
    }
    assert not questions["train"] & questions["heldout"]
    for index in range(20):
        task = arithmetic_task(index)
        assert (
            calculate(task["prompt"].removeprefix("What is ").removesuffix("?")) == task["answer"]
        )


class Hinted(BaseEnvironment):
    """Knows nothing of SVRL."""

    def reset(self):
        state = super().reset()
        state.metadata["objectives"] = ["accuracy", "length"]
        return state

    def update_state(self, state, response):
        state = super().update_state(state, response)
        state.metadata["length"] = len(response)
        return state


class OwnTask(BaseEnvironment):
    def reset(self):
        return State(
            prompt=[{"role": "user", "content": "What is 6 * 7?"}], metadata={"answer": "42"}
        )


class Combined(Hinted, OwnTask, SVRLEnvironment):
    pass


def test_environments_combine_by_multiple_inheritance():
    """One that records more, one with tasks of its own in messages, and the budget."""
    environment = Combined(
        Says("USE_TOOL[verify_calculation](6*7)", "FINAL ANSWER: 42"), CALCULATOR
    )
    state = play(environment)
    assert (state.metadata["spent"], state.metadata["budget"]) == (1.0, 10.0)
    assert state.metadata["objectives"] == ["accuracy", "length"]
    assert state.metadata["length"] == len("FINAL ANSWER: 42")
    assert len(state.history) == state.step_count == 2
    [message] = environment.inference.prompts[1]
    assert message["content"].startswith("What is 6 * 7?\n")
    assert "-> 42" in message["content"]


async def test_in_a_configuration_it_is_scored_by_its_own_reward(tmp_path):
    rows = tmp_path / "tasks.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"What is {n} * 2?", "answer": 2 * n}) + "\n" for n in range(40)
        )
    )
    entry = EnvironmentConfig(
        kind="svrl", name="svrl", options={"tools": CALCULATOR, "tasks": str(rows), "budget": 2.0}
    )
    [source] = build_sources([entry], seed=5)
    tasks = [source.task(index) for index in range(40)]
    trained, heldout = {task.key for task in tasks}, {task.key for task in source.heldout(40)}
    assert heldout
    assert not trained & heldout
    assert len(trained | heldout) == 40
    state = tasks[0].state.copy()
    state = source.template.update_state(state, f"FINAL ANSWER: {tasks[0].answer}")
    [rollout] = await score_group(tasks[0].reward, [trajectory(state)])
    assert rollout.scores["reward"] == pytest.approx(1.049)
    assert rollout.scores["metrics/svrl/task"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ["verify"]}, "no 'verify'; did you mean"),
        ({"tools": ["check_facts"]}, "it needs facts"),
        ({"tools": CALCULATOR * 2}, "two tools are called 'verify_calculation'"),
        ({"tools": CALCULATOR, "costs": {"run_code": 1}}, "costs has 'run_code'"),
        ({"tools": CALCULATOR, "costs": {"verify_calculation": -1}}, "at least 0"),
        ({"tools": CALCULATOR, "budget": 0}, "budget has to be above 0"),
        ({"tools": CALCULATOR, "max_steps": 0}, "max_steps at least 1"),
        ({"tools": CALCULATOR, "tasks": [{"question": "?"}]}, "task 0 has no 'prompt'"),
        ({"tools": CALCULATOR, "tasks": []}, "no tasks"),
        ({"tools": CALCULATOR, "limit": 3}, "limit"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        create_environment("svrl", **options)


# --- the tools


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("12*7", "84"),
        (" 2 * (3 + 4) - -1 ", "15"),
        ("7/2", "3.5"),
        ("7//2 + 7%4", "6"),
        ("2**10", "1024"),
        ("1/3", "0.333333333333"),
        ("12*7 = 84", "true"),
        ("12*7 == 84.0", "true"),
        ("12*7 = 81", "false: it is 84"),
        ("0.1 + 0.2 = 0.3", "true"),
    ],
)
def test_the_calculator_evaluates_and_verifies(text, found):
    assert calculate(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "12*",
            "four",
            "__import__('os')",
            "(1).__class__",
            "'a'*3",
            "1/0",
            "1 = 1 = 1",
            "True",
            "[1]",
        ),
        *(
            "1 if 1 else 2",
            "9**9**9",
            "(9**999)**999",
            "(-8)**0.5",
            "1e308*10",
            "+".join(["1"] * 200),
            "(" * 150,
        ),
        *("2**4000*2**4000", "1<<9"),
    ],
)
def test_what_the_calculator_cannot_do_is_said_at_once(text):
    started = time.thread_time()
    with pytest.raises(ToolFailedError):
        calculate(text)
    assert time.thread_time() - started < 1


def test_facts_are_looked_up_in_the_table_that_was_given(tmp_path):
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"Capital of  Peru": "Lima", "moons of Mars": 2}))
    for facts in (str(file), {"Capital of  Peru": "Lima", "moons of Mars": "2"}):
        tool = fact_table(facts)
        assert (tool.name, tool.cost) == ("check_facts", 2.0)
        assert tool.call(" capital of PERU ") == "Lima"
        assert tool.call("moons of Mars") == "2"
        with pytest.raises(ToolFailedError, match="not in the table"):
            tool.call("capital of Chile")


@pytest.mark.parametrize("text", [None, "[1]", "{"])
def test_what_is_no_table_of_facts_is_refused(tmp_path, text):
    file = tmp_path / "facts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"^facts: .*facts.json"):
        fact_table(file)


def test_code_runs_in_the_sandbox():
    try:
        tool, hasty = code_runner(), code_runner(timeout_s=0.3)
    except ConfigError as error:
        pytest.skip(str(error))
    assert (tool.name, tool.cost, tool.blocking) == ("run_code", 1.5, True)
    assert tool.call("print(sum(range(10)))") == "45"
    with pytest.raises(ToolFailedError, match="ZeroDivisionError"):
        tool.call("1/0")
    with pytest.raises(ToolFailedError):
        tool.call("open('/etc/passwd', 'w')")
    with pytest.raises(ToolFailedError, match="timeout"):
        hasty.call("while True: pass")
