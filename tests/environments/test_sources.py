import importlib.util
import sys

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.kinds.tasks import TASKS, split_of
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.types import Rollout, Trajectory

needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed (it builds C code): pip install '.[reasoning-gym]'",
)


def source(kind="tasks", name="sum", seed=0, **fields):
    [built] = build_sources([EnvironmentConfig(kind=kind, name=name, **fields)], seed=seed)
    return built


def gym(name, seed=0, **options):
    return source("reasoning_gym", name, seed, options=options)


def reward(task, text):
    [scores] = task.reward([Trajectory(text, Rollout((), (), (), (), 1.0, {}))])
    return scores["reward"]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_built_in_tasks_are_scored_by_their_answer(name):
    task = source(name=name).task(3)
    assert reward(task, f" {task.answer}\n") == 1.0
    assert reward(task, f"{task.answer}x") == 0.0
    assert task.messages[-1]["role"] == "user"


def test_heldout_tasks_are_distinct_shared_by_all_seeds_and_never_trained_on():
    heldout = [task.key for task in source(seed=1).heldout(100)]
    assert len(set(heldout)) == 100
    assert heldout == [task.key for task in source(seed=2).heldout(100)]
    assert not set(heldout) & {source(seed=1).task(index).key for index in range(2000)}


def test_the_system_prompt_comes_first():
    task = source(system_prompt="Answer with the number only.").task(0)
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert task.messages[0]["content"] == "Answer with the number only."


def test_entries_of_one_name_get_names_of_their_own():
    configs = [EnvironmentConfig(kind="tasks", name=name) for name in ("sum", "sort", "sum")]
    assert [built.name for built in build_sources(configs, seed=0)] == ["sum", "sort", "sum#2"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "Dataset"}, "unknown kind 'Dataset'; did you mean 'dataset'"),
        (
            {"kind": "mine.py:Game"},
            "unknown kind 'mine.py:Game'; a class of yours is \"python:mine.py:Game\"",
        ),
        (
            {"kind": "task", "name": "sum"},
            "unknown kind 'task'; did you mean 'tasks'.*reasoning_gym",
        ),
        ({"kind": "tasks", "name": "summ"}, "no built-in task 'summ'; did you mean 'sum'"),
        ({"kind": "tasks", "name": "xyz"}, r"no built-in task 'xyz'\. There are: sum"),
        ({"kind": "tasks", "name": "sum", "options": {"digits": 3}}, "takes no options.*digits"),
    ],
)
def test_bad_entries_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        build_sources([EnvironmentConfig(**config)], seed=0)


def test_without_the_package_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"'\.\[reasoning-gym\]'"):
        gym("chain_sum")


@pytest.mark.slow
@needs_reasoning_gym
@pytest.mark.parametrize("name", ["spell_backward", "letter_counting", "chain_sum"])
def test_reasoning_gym_scores_its_own_answers(name):
    built = gym(name)
    for index in range(5):
        task = built.task(index)
        assert reward(task, f"\n {task.answer} ") == 1.0
        assert reward(task, "no idea at all") < 1.0


@needs_reasoning_gym
def test_reasoning_gym_splits_share_no_question():
    # one or two digits give few distinct sums: without the split by text the two would overlap
    built = gym("chain_sum", max_terms=2, max_digits=1)
    train = {built.task(index).key for index in range(800)}
    heldout = {task.key for task in built.heldout(20)}
    assert len(heldout) >= 15
    assert len(train) > 150
    assert not train & heldout
    assert all(split_of(key) == "train" for key in train)


@needs_reasoning_gym
def test_reasoning_gym_follows_the_seed_and_its_heldout_set_does_not():
    first, again, other = gym("chain_sum"), gym("chain_sum"), gym("chain_sum", seed=1)
    assert [first.task(index).key for index in range(9)] == [
        again.task(index).key for index in range(9)
    ]
    assert [first.task(index).key for index in range(9)] != [
        other.task(index).key for index in range(9)
    ]
    assert [task.key for task in first.heldout(9)] == [task.key for task in other.heldout(9)]


@needs_reasoning_gym
def test_reasoning_gym_options_reach_the_data_set():
    assert len(gym("spell_backward", min_word_len=9, max_word_len=9).task(0).answer) == 9


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "no data set 'chain_sums'; did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 2}, "no option 'max_term'; did you mean 'max_terms'"),
        (
            "chain_sum",
            {"min_terms": 5, "max_terms": 2},
            "refuses its options: max_terms must be >= min_terms",
        ),
    ],
)
def test_reasoning_gym_mistakes_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        gym(name, **options)


@needs_reasoning_gym
def test_a_data_set_with_nothing_to_hold_out_is_an_error():
    built = gym("chain_sum", size=1)
    split = "heldout" if split_of(built.task(0).key) == "train" else "train"
    built._datasets[split] = built._datasets["train"]
    with pytest.raises(ConfigError, match="distinct"):
        built.task(0, split)


@needs_reasoning_gym
def test_a_score_that_is_not_finite_is_refused(monkeypatch):
    built = gym("chain_sum")
    monkeypatch.setattr(type(built._datasets["train"]), "score_answer", lambda *_: float("nan"))
    with pytest.raises(RolloutRejectedError, match="nan"):
        reward(built.task(0), "1")
