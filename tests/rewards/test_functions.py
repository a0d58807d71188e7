"""Reward functions as TRL calls them, and what is said of those that cannot be used."""

import asyncio
import itertools
import sys
import threading

import pytest

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.base import score_group
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.types import Rollout, Trajectory

ROW = {"prompt": "2+2?", "answer": "4", "level": 3, "completion": "never passed on"}
PLAIN = "2+2?"
CHAT = [{"role": "user", "content": "2+2?"}]
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def search_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def functions(tmp_path):
    def build(text, *names, weights=(), columns=tuple(ROW)):
        file = tmp_path / f"score{next(NUMBERS)}.py"
        file.write_text(text)
        references = [f"python:{file}:{name}" for name in names or ("f",)]
        return RewardFunctions(references, weights, columns=columns, key="rewards")

    return build


def responses(*texts):
    rollout = Rollout((1, 2, 3, 9), (0, 0, 1, 1), (0.0, 0.0, -0.5, -0.1), (0, 0, 3, 3), 1.0, {})
    return [Trajectory(text, rollout) for text in texts]


async def scores(functions, *texts, prompt=PLAIN, row=ROW, progress=TrainingProgress):
    rollouts = await score_group(functions.for_row(prompt, row, progress), responses(*texts))
    return [dict(rollout.scores) for rollout in rollouts]


SEES = "seen = []\ndef f(**given):\n    seen.append(given)\n    return [1.0] * len(given['completions'])\n"


def seen(functions):
    [function] = functions._functions
    return function.call.__globals__["seen"][-1]


async def test_a_plain_prompt_is_given_as_strings(functions):
    made = functions(SEES)
    await scores(made, "4", "5", progress=lambda: TrainingProgress(7, 100))
    given = seen(made)
    assert given["prompts"] == ["2+2?", "2+2?"]
    assert given["completions"] == ["4", "5"]
    assert given["completion_ids"] == [[3, 9], [3, 9]]
    assert (given["answer"], given["level"]) == (["4", "4"], [3, 3])
    assert (given["trainer_state"].global_step, given["trainer_state"].max_steps) == (7, 100)
    assert "prompt" not in given
    assert "completion" not in given


async def test_a_conversation_is_given_as_messages(functions):
    made = functions(SEES)
    await scores(made, "4", prompt=CHAT)
    given = seen(made)
    assert given["prompts"] == [CHAT]
    assert given["completions"] == [[{"role": "assistant", "content": "4"}]]


async def test_only_parameters_that_a_function_has_are_passed(functions):
    made = functions("def f(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]")
    assert await scores(made, "4", "5") == [{"rewards/f": 1.0, "reward": 1.0}, {"rewards/f": 0.0, "reward": 0.0}]


TWO = """
import asyncio
def right(completions, answer, **kw):
    return [c == a for c, a in zip(completions, answer)]
async def short(completions, **kw):
    await asyncio.sleep(0)
    return [None if c == "?" else 1 / len(c) for c in completions]
class Judge:
    async def __call__(self, completions, **kw):
        return [0.5] * len(completions)
judge = Judge()
"""


async def test_several_functions_are_added_up_by_their_weights(functions):
    got = await scores(functions(TWO, "right", "short", "judge", weights=(2.0, 1.0, -1.0)), "4", "55", "?")
    assert got == [
        {"rewards/right": 1.0, "rewards/short": 1.0, "rewards/Judge": 0.5, "reward": 2.5},
        {"rewards/right": 0.0, "rewards/short": 0.5, "rewards/Judge": 0.5, "reward": 0.0},
        {"rewards/right": 0.0, "rewards/Judge": 0.5, "reward": -0.5},  # None is left out of the sum
    ]


async def test_what_no_function_scores_learns_nothing_and_moves_no_mean(functions):
    made = functions("def f(completions):\n    return [None if c == '?' else float(len(c)) for c in completions]")
    rollouts = await score_group(made.for_row(PLAIN, ROW, TrainingProgress), responses("a", "?", "abc"))
    assert [rollout.reward for rollout in rollouts] == [1.0, 2.0, 3.0]
    assert [rollout.zero_advantage for rollout in rollouts] == [False, True, False]
    assert "rewards/f" not in rollouts[1].scores
    with pytest.raises(RolloutRejectedError, match="f returned None for every completion"):
        await scores(made, "?", "?")


async def test_functions_of_one_name_keep_their_scores_apart(functions):
    [got] = await scores(functions(TWO, "right", "right"), "4")
    assert got == {"rewards/right": 1.0, "rewards/right#2": 1.0, "reward": 2.0}


async def test_log_metric_is_kept_beside_the_scores(functions):
    text = "def f(completions, log_metric, log_extra):\n    log_metric('size', 1)\n    log_metric('size', 4)\n"
    [got] = await scores(functions(text + "    log_extra('x', completions)\n    return [1]"), "a")
    assert got == {"rewards/f": 1.0, "reward": 1.0, "metrics/size": 2.5}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('two\\nlines')", r"^f: .*score\d+\.py, line 2: ValueError: two lines$"),
        ("return [1.0]", "^f returned 1 scores for 2 completions$"),
        ("return [1.0, float('nan')]", "^f, completion 1: nan is not a finite number$"),
        ("return [1.0, 'good']", "^f, completion 1: 'good' is not a finite number$"),
        ("return [1.0, [2]]", r"^f, completion 1: \[2\] is not a finite number$"),
        ("return 1.0", "^f returned float, not a list of numbers$"),
        ("return None", "^f returned NoneType, not a list of numbers$"),
        ("return 'ab'", "^f returned str, not a list of numbers$"),
        ("log_metric('x', 'y'); return [1, 1]", r"^log_metric\('x'\): 'y' is not a finite number$"),
        ("return trainer_state.epoch", "AttributeError: .*epoch"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_what_cannot_be_trained_on_is_refused_by_name(functions, kind, body, message):
    with pytest.raises(RolloutRejectedError, match=message):
        await scores(functions(f"{kind} f(completions, log_metric, trainer_state):\n    {body}"), "a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(completions, solution): ...", r"'solution' is not a column.*did you mean .*answer, .*level"),
        ("def f(prompts, answer): ...", "sees no completions"),
        ("def f(completions, /, **kw): ...", "called by keyword"),
        ("def f(completions, completion): ...", "'completion' is not a column"),
        ("class f: ...", "is a class, not a function"),
    ],
)
def test_a_signature_that_cannot_work_is_refused_at_once(functions, text, message):
    with pytest.raises(ConfigError, match=message):
        functions(text)


async def test_a_plain_function_blocks_neither_the_loop_nor_an_async_one(functions):
    text = (
        "import threading\nentered, leave, threads = threading.Event(), threading.Event(), set()\n"
        "def f(completions):\n    threads.add(threading.current_thread().name)\n    entered.set()\n"
        "    assert leave.wait(30)\n    return [1.0]\nasync def g(completions):\n    return [2.0]"
    )
    both, other = functions(text, "f", "g"), functions("async def g(completions):\n    return [4.0]", "g")
    state = both._functions[0].call.__globals__
    waiting = asyncio.create_task(scores(both, "a"))
    await asyncio.to_thread(state["entered"].wait, 30)
    assert [got["reward"] for got in await scores(other, "a")] == [4.0]
    state["leave"].set()
    assert [got["reward"] for got in await waiting] == [3.0]
    assert threading.current_thread().name not in state["threads"]


async def test_a_plain_function_may_run_a_loop_of_its_own(functions):
    text = "import asyncio\nasync def ask():\n    return 0.25\ndef f(completions):\n    return [asyncio.run(ask())]"
    [got] = await scores(functions(text), "a")
    assert got["reward"] == 0.25


async def test_a_function_cannot_spoil_the_row(functions):
    made = functions(
        "def f(completions, choices):\n    return [choices.pop().pop() for _ in completions]", columns=["choices"]
    )
    row = {"choices": [1.0, 2.0]}
    for _ in range(2):
        assert [got["reward"] for got in await scores(made, "a", "b", row=row)] == [2.0, 2.0]


def test_a_column_cannot_take_the_place_of_what_was_sampled(functions):
    with pytest.raises(ConfigError, match=r"^rewards: the data has a column 'completions'.*rename the column"):
        functions(SEES, columns=("prompt", "completions"))


async def test_a_column_called_prompts_does_not_hide_the_prompt(functions):
    made = functions(SEES)
    await scores(made, "4", row={"prompts": "of the data"})
    assert seen(made)["prompts"] == ["2+2?"]


@pytest.mark.parametrize("error", ["asyncio.CancelledError", "KeyboardInterrupt"])
async def test_no_error_ends_the_thread_of_plain_functions(functions, error):
    with pytest.raises(RolloutRejectedError, match=f"^f: {error.rpartition('.')[2]}$"):
        await scores(functions(f"import asyncio\ndef f(completions):\n    raise {error}"), "4")
    async with asyncio.timeout(10):
        assert await scores(functions("def f(completions): return [1.0]"), "4") == [{"reward": 1.0, "rewards/f": 1.0}]


async def test_scores_made_one_by_one_are_the_functions_too(functions):
    made = functions("def f(completions):\n    yield 1.0\n    raise KeyError('k')\n")
    with pytest.raises(RolloutRejectedError, match=r"^f: .*line 3: KeyError: 'k'$"):
        await scores(made, "4", "5")


async def test_a_plain_function_that_never_ends_holds_up_no_other_call(functions):
    text = "import threading\nstarted, let_go = threading.Event(), threading.Event()\n"
    hanging = functions(text + "def f(completions):\n    started.set()\n    let_go.wait()\n    return [0.0]\n")
    names = hanging._functions[0].call.__globals__
    other = functions("def f(completions): return [1.0]")
    first = asyncio.create_task(scores(hanging, "4"))
    await asyncio.to_thread(names["started"].wait)
    waiting = asyncio.create_task(scores(other, "4"))
    await asyncio.sleep(0)
    first.cancel()
    try:
        async with asyncio.timeout(10):
            assert await waiting == await scores(other, "4") == [{"reward": 1.0, "rewards/f": 1.0}]
    finally:
        names["let_go"].set()
