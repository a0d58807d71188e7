"""The built-in tasks: right answers, repeatable, and two splits that never meet."""

import random
import re
import subprocess
import sys

import pytest

from mlx_parallm.environments.kinds.tasks import TASKS, make_problem, split_of

MANY = 400


def question(problem):
    return problem.messages[-1]["content"]


def right_answer(task, text):
    """The answer worked out from the words of the question alone."""
    payload = text.split(": ")[-1]
    if task == "sum":
        a, b = map(int, re.findall(r"\d+", text))
        return str(a + b)
    if task == "sort":
        return "".join(sorted(payload))
    if task == "reverse":
        return "".join(reversed(payload))
    if task == "count":
        wanted = text.removeprefix("Count ")[0]
        return str(sum(letter == wanted for letter in payload))
    assert task == "largest"
    return max(re.findall(r"\d+", text), key=int)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_answer_follows_from_the_question(task, split):
    for index in range(MANY):
        problem = make_problem(task, index, seed=3, split=split)
        assert problem.answer == right_answer(task, question(problem))
        assert split_of(problem.key) == split
        assert problem.task == task


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_question_is_ever_trained_on(task):
    trained = {
        question(make_problem(task, n, seed=seed, split="train"))
        for seed in (0, 1)
        for n in range(MANY)
    }
    heldout = {
        question(make_problem(task, n, seed=seed, split="heldout"))
        for seed in (0, 1)
        for n in range(MANY)
    }
    assert not trained & heldout
    assert len(heldout) > MANY / 2, "too few different held-out problems to measure on"


def test_a_sum_and_its_mirror_are_one_problem():
    by_numbers = {}
    for index in range(3000):
        problem = make_problem("sum", index, seed=0, split="train" if index % 2 else "heldout")
        numbers = tuple(sorted(re.findall(r"\d+", question(problem))))
        assert by_numbers.setdefault(numbers, problem.key) == problem.key


def test_a_problem_depends_on_its_arguments_and_nothing_else():
    first = [make_problem(task, 17, seed=5, split="heldout") for task in TASKS]
    random.seed(99)
    assert [make_problem(task, 17, seed=5, split="heldout") for task in TASKS] == first
    assert [make_problem(task, 18, seed=5, split="heldout") for task in TASKS] != first
    assert [make_problem(task, 17, seed=6, split="heldout") for task in TASKS] != first


@pytest.mark.slow
def test_problems_are_the_same_in_another_process():
    code = (
        "from mlx_parallm.environments.kinds.tasks import TASKS, make_problem\n"
        "print([make_problem(t, 4, seed=1, split='train').key for t in TASKS])"
    )
    here = str([make_problem(task, 4, seed=1, split="train").key for task in TASKS])
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed},
        )
        assert done.stdout.strip() == here


def test_about_a_tenth_is_held_out():
    share = sum(split_of(f"sort:{n}") == "heldout" for n in range(5000)) / 5000
    assert 0.08 < share < 0.12
