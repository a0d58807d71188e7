"""What `rewards`, `reward_method` and `reward_options` of a configuration make of a group."""

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.load import load_config, parse_config
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards import functions as functions_module
from mlx_parallm.rewards.base import UNSCORED, score_group
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from tests.rewards.trajectories import trajectory

CODE = """
from mlx_parallm.rewards.computers import ParetoRewardComputer

def size(completions):
    return [float(len(c)) for c in completions]

def near(completions, target=0, **columns):
    return [-abs(len(c) - target) for c in completions]

def letters(completions, wanted, **columns):
    return [float(c.count(w)) for c, w in zip(completions, wanted)]

def steps(trajectories):
    return [float(t.step_count) for t in trajectories]

def picky(completions):
    return ["unscored" if c == "?" else float(len(c)) for c in completions]

def paid(completions, spent, price, calls):
    return [s * p + c for s, p, c in zip(spent, price, calls)]

class Longest:
    asked = []

    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def compute_rewards(self, trajectories, method="absolute"):
        self.asked.append(method)
        longest = max(len(t.response) for t in trajectories)
        return [self.bonus + (len(t.response) == longest) for t in trajectories]

class TwoGoals(ParetoRewardComputer):
    def __init__(self):
        super().__init__([lambda t: len(t.text), lambda t: t.text.count("a")], ["size", "vowels"])

instance = Longest(7.0)
not_one = 5
"""


@pytest.fixture
def made(tmp_path):
    file = tmp_path / "score.py"
    file.write_text(CODE)

    def make(*names, columns=("prompt",), **more):
        named = [name if name.startswith("builtin:") else f"python:{file}:{name}" for name in names]
        entry = EnvironmentConfig(kind="svrl", name="svrl", rewards=named, **more)
        return RewardFunctions.from_config(entry, columns=columns)

    return make


async def scores(functions, *texts, row=None, **more):
    row = {"prompt": "2+2?"} if row is None else row
    group = [trajectory(text, **more) for text in texts]
    rollouts = await score_group(functions.for_row("2+2?", row, TrainingProgress), group)
    return [dict(rollout.scores) for rollout in rollouts]


async def test_relative_ranks_the_weighted_sums_of_a_group(made):
    functions = made("size", "steps", reward_weights=[1.0, 0.5], reward_method="relative")
    got = await scores(functions, "abc", "a", "", steps=3)
    assert [score["reward"] for score in got] == pytest.approx([1.5**0.5, 0.0, -(1.5**0.5)])
    assert [score["rewards/size"] for score in got] == [3.0, 1.0, 0.0]
    assert {score["rewards/steps"] for score in got} == {3.0}


async def test_pareto_has_each_reward_as_an_objective(made):
    functions = made("size", "letters", columns=("prompt", "wanted"), reward_method="pareto")
    got = await scores(functions, "xyzw", "aa", "xy", row={"wanted": "a"})
    assert [score["reward"] for score in got] == [1.0, 1.0, 0.5]


async def test_options_are_keyword_arguments_and_come_before_columns(made):
    functions = made("near", "near", reward_options={"near": {"target": 3}, "near#2": {"target": 5}})
    [got] = await scores(functions, "abc", row={"target": 100})
    assert got == {"rewards/near": 0.0, "rewards/near#2": -2.0, "reward": -2.0}


async def test_a_built_in_part_is_made_from_its_options(made, monkeypatch):
    def starts_with(letter="a"):
        return lambda completions: [float(c.startswith(letter)) for c in completions]

    monkeypatch.setattr(functions_module, "BUILT_IN", {"starts_with": starts_with})
    monkeypatch.setattr(functions_module, "WEIGHTS", {"starts_with": 2.0})
    functions = made("builtin:starts_with", "size", reward_options={"starts_with": {"letter": "b"}})
    got = await scores(functions, "b", "ab")
    assert got == [
        {"rewards/starts_with": 1.0, "rewards/size": 1.0, "reward": 3.0},
        {"rewards/starts_with": 0.0, "rewards/size": 2.0, "reward": 2.0},
    ]


async def test_a_computer_that_stands_alone_is_asked_for_the_method(made):
    functions = made("Longest", reward_method="relative", reward_options={"Longest": {"bonus": 0.5}})
    got = await scores(functions, "abc", "a")
    assert [score["reward"] for score in got] == [1.5, 0.5]  # as it said: nothing is ranked again
    [function] = functions._functions
    assert function.worker is not made("size")._functions[0].worker
    both = made("instance", "size", reward_method="absolute")
    assert [score["reward"] for score in await scores(both, "abc", "a")] == [11.0, 8.0]


async def test_parts_of_a_computer_are_metrics(made):
    functions = made("TwoGoals", reward_method="pareto")
    got = await scores(functions, "aa", "xyz", "a")
    assert [score["reward"] for score in got] == [1.0, 1.0, 0.5]
    assert got[0]["metrics/TwoGoals/size"] == 2.0
    assert got[0]["metrics/TwoGoals/vowels"] == 1.0


async def test_svrl_is_built_in(made):
    functions = made("builtin:svrl", reward_options={"svrl": {"verification_weight": 1.0}})
    noted = {"answer": "4", "final_answer": "4", "budget": 2.0, "spent": 1.0, "max_steps": 1}
    [got] = await scores(functions, "FINAL ANSWER: 4", **noted)
    assert got["reward"] == 0.5
    assert got["metrics/svrl/cost"] == 0.5


async def test_one_function_may_say_that_nothing_can_score_an_answer(made):
    functions = made("picky", "size")
    got = await scores(functions, "ab", "?", "abcd")
    assert [score["reward"] for score in got] == [4.0, 6.0, 8.0]
    assert [UNSCORED in score for score in got] == [False, True, False]
    with pytest.raises(RolloutRejectedError, match="left every completion unscored"):
        await scores(functions, "?", "?")


async def test_a_column_that_a_task_lacks_is_named(made):
    functions = made("letters", columns=None)
    with pytest.raises(
        RolloutRejectedError, match=r"^letters needs 'wanted', which the task does not have; available: .*completions"
    ):
        await scores(functions, "a")


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (("size",), {"reward_options": {"sise": {}}}, "'sise', which is none of the rewards; did you mean 'size'"),
        (("near",), {"reward_options": {"near": {"completions": 1}}}, "every call of the function passes itself"),
        (("steps",), {"reward_options": {"steps": {"most": 1}}}, "has no option 'most'"),
        (("Longest",), {"reward_options": {"Longest": {"boonus": 1}}}, "boonus"),
        (("instance",), {"reward_options": {"instance": {"bonus": 1}}}, "is an object already"),
        (("builtin:svlr",), {}, "no built-in reward of this name; did you mean 'svrl'"),
        (("builtin:svrl",), {"reward_options": {"svrl": {"budget": 1}}}, "budget"),
        (("not_one",), {}, "not a function"),
    ],
)
def test_what_is_no_reward_is_refused_at_once(made, names, more, message):
    with pytest.raises(ConfigError, match=message):
        made(*names, **more)


def test_weights_have_to_fit():
    with pytest.raises(ConfigError, match="2 reward_weights for the rewards builtin:svrl"):
        RewardFunctions.from_config(
            EnvironmentConfig(kind="svrl", name="svrl", reward_weights=(1, 2)), columns=None, default=["builtin:svrl"]
        )
    with pytest.raises(ConfigError, match="needs rewards"):
        RewardFunctions.from_config(EnvironmentConfig(kind="simple_text", name="t"), columns=None)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "tasks", "name": "sum", "reward_method": "pareto"}, "reward_method belongs"),
        ({"kind": "svrl", "rewards": ["builtin:svrl"], "reward_weights": [1, 2]}, "2 reward_weights for 1 rewards"),
        ({"kind": "svrl", "reward_method": "best"}, "reward_method"),
        ({"kind": "svrl", "data": "rows.jsonl"}, "data belongs"),
    ],
)
def test_keys_that_do_not_belong_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"environments": [entry]})


def test_files_in_options_are_looked_for_beside_the_configuration(tmp_path):
    for name in ("rows.jsonl", "key", "score.py", "What.json is that"):
        (tmp_path / name).touch()
    (tmp_path / "run.toml").write_text(
        '[[environments]]\nkind = "svrl"\n'
        'options = { tasks = "rows.jsonl", tools = ["python:score.py:f"], facts = "nowhere.json", note = "key" }\n'
        'reward_options = { svrl = { key_file = "key" } }\n'
    )
    [entry] = load_config(tmp_path / "run.toml").environments
    assert entry.options == {
        "tasks": str(tmp_path / "rows.jsonl"),
        "tools": [f"python:{tmp_path / 'score.py'}:f"],
        "facts": "nowhere.json",
        "note": "key",
    }
    assert entry.reward_options == {"svrl": {"key_file": str(tmp_path / "key")}}


async def test_columns_are_what_the_episode_noted_in_the_end(made):
    """Not what its State began with: a cost read from there would always be 0."""
    functions = made("paid", columns=None)
    got = await scores(functions, "a", row={"spent": 0.0, "price": 2.0}, spent=3.0, calls=4)
    assert got[0]["reward"] == 10.0


def test_files_of_options_are_found_beside_the_configuration_and_by_a_resume(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    for name in ("rows.jsonl", "a reward", "answer.schema", "key"):
        (here / name).write_text("{}")
    (here / "run.toml").write_text(
        '[[environments]]\nkind = "dataset"\ndata = "rows.jsonl"\n'
        'rewards = ["builtin:learned", "builtin:json", "builtin:judge"]\n[environments.reward_options]\n'
        'learned = { path = "a reward" }\njson = { schema = "answer.schema" }\n'
        'judge = { judge = "http://x/v1", model = "key", api_key_file = "key" }\n'
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(here / "run.toml")
    options = config.environments[0].reward_options
    assert options["learned"] == {"path": str(here / "a reward")}
    assert options["json"] == {"schema": str(here / "answer.schema")}
    assert options["judge"] == {"judge": "http://x/v1", "model": "key", "api_key_file": str(here / "key")}
    (elsewhere / "config.toml").write_text(config.to_toml())
    monkeypatch.chdir(tmp_path)
    assert load_config(elsewhere / "config.toml", saved=True).environments[0].reward_options == options
