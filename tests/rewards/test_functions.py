"""Rewards: functions as TRL calls them, what `rewards`, `reward_method` and `reward_options` of
a configuration make of a group, and what is said of those that cannot be used."""

import asyncio
import itertools
import threading

import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.load import load_config, parse_config
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards import functions as functions_module
from mlx_parallm.rewards.base import UNSCORED, exact_match, score_group, verifier
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress, TurnScores
from tests.rewards.trajectories import ROLLOUT, trajectory

ROW = {"prompt": "2+2?", "answer": "4", "level": 3, "completion": "never passed on"}
PLAIN = "2+2?"
CHAT = [{"role": "user", "content": "2+2?"}]
NUMBERS = itertools.count()


@pytest.fixture
def functions(tmp_path):
    def build(text, *names, weights=(), columns=tuple(ROW), **others):
        file = tmp_path / f"score{next(NUMBERS)}.py"
        file.write_text(text)
        references = [f"python:{file}:{name}" for name in names or ("f",)]
        return RewardFunctions(references, weights, columns=columns, key="rewards", **others)

    return build


async def scores(functions, *texts, prompt=PLAIN, row=ROW, progress=TrainingProgress, **noted):
    group = [trajectory(text, **noted) for text in texts]
    return [
        dict(rollout.scores)
        for rollout in await score_group(functions.for_row(prompt, row, progress), group)
    ]


SEES = (
    "seen = []\ndef f(**given):\n    seen.append(given)\n    return [1.0] *"
    " len(given['completions'])\n"
)


def seen(functions):
    [function] = functions._functions
    return function.call.__globals__["seen"][-1]


async def test_what_a_function_sees_of_a_plain_prompt_and_of_a_conversation(functions):
    made = functions(SEES)
    await scores(made, "4", "5", progress=lambda: TrainingProgress(7, 100))
    given = seen(made)
    assert given["prompts"] == ["2+2?", "2+2?"]
    assert given["completions"] == ["4", "5"]
    assert given["completion_ids"] == [[3, 9], [3, 9]]
    assert (given["answer"], given["level"]) == (["4", "4"], [3, 3])
    assert (given["trainer_state"].global_step, given["trainer_state"].max_steps) == (7, 100)
    assert not {"prompt", "completion"} & given.keys()
    await scores(made, "4", prompt=CHAT)
    assert seen(made)["prompts"] == [CHAT]
    assert seen(made)["completions"] == [[{"role": "assistant", "content": "4"}]]
    await scores(made, "4", row={"prompts": "of the data"})
    assert seen(made)["prompts"] == ["2+2?"], "a column of this name does not hide the prompt"


async def test_only_parameters_that_a_function_has_are_passed(functions):
    made = functions(
        "def f(completions, answer):\n    return [float(c == a) for c,"
        " a in zip(completions, answer)]"
    )
    assert await scores(made, "4", "5") == [
        {"rewards/f": 1.0, "reward": 1.0},
        {"rewards/f": 0.0, "reward": 0.0},
    ]


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
    got = await scores(
        functions(TWO, "right", "short", "judge", weights=(2.0, 1.0, -1.0)), "4", "55", "?"
    )
    assert got == [
        {"rewards/right": 1.0, "rewards/short": 1.0, "rewards/Judge": 0.5, "reward": 2.5},
        {"rewards/right": 0.0, "rewards/short": 0.5, "rewards/Judge": 0.5, "reward": 0.0},
        {"rewards/right": 0.0, "rewards/Judge": 0.5, "reward": -0.5},  # None is left out of the sum
    ]


async def test_a_reward_counts_only_where_its_condition_holds(functions):
    """As 0 otherwise, in every method; what is reported is the score as it was made."""
    made = functions(TWO, "right", "short", conditions={"short": "right >= 1"})
    got = await scores(made, "4", "55", "?")
    assert [each["reward"] for each in got] == [2.0, 0.0, 0.0]
    assert [each.get("rewards/short") for each in got] == [1.0, 0.5, None]
    turns = "def turns(completions): return [[3.0] for _ in completions]\n"
    made = functions(TWO + turns, "right", "turns", conditions={"turns": "right > 0"})
    got = await scores(made, "4", "5")
    assert [each["reward"] for each in got] == [4.0, 0.0]
    void = made._counted({"right": 0.0, "turns": TurnScores([1.0, 2.0])})
    assert made._turn_rewards(void) == [0.0, 0.0], "turns keep their number"
    made = functions(TWO, "right", "short", conditions={"right": "short >= 0"}, method="gdpo")
    got = await scores(made, "4", "?")  # `short` does not apply to the second one
    assert [each["reward"] > 0 for each in got] == [True, False]


@pytest.mark.parametrize("score", ["-0.5", "[0.5, -0.5]"])
async def test_a_penalty_with_a_condition_is_refused(functions, score):
    """Who misses the condition would be spared it."""
    source = TWO + f"def fine(completions): return [{score} for _ in completions]\n"
    made = functions(source, "right", "fine", conditions={"fine": "right >= 1"})
    with pytest.raises(RolloutRejectedError, match=r"fine = -0.5 .*right >= 1.*let it score 0"):
        await scores(made, "4", "5")
    with pytest.raises(ConfigError, match=r"short has the weight -1.*weight above 0"):
        functions(*(TWO, "right", "short"), weights=(1.0, -1.0), conditions={"short": "right >= 1"})


@pytest.mark.parametrize(
    ("name", "options"),
    [("overlong", {"length": 9, "buffer": 3}), ("svrl", {}), ("reward_model", {"url": "http://a"})],
)
def test_a_built_in_penalty_has_no_condition(name, options):
    def made(conditions, **more):
        return RewardFunctions(
            ["builtin:syntax", f"builtin:{name}"],
            (),
            columns=None,
            key="rewards",
            options={name: options | more},
            conditions=conditions,
        )

    words = f"builtin:{name} may score below 0: where its condition does not hold"
    with pytest.raises(ConfigError, match=words):
        made({name: "syntax >= 1"})
    made({"syntax": f"{name} >= 0"})
    if name == "reward_model":
        made({name: "syntax >= 1"}, threshold=0.0)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"short": "rigth >= 1"}, "no reward 'rigth'.*did you mean 'right'"),
        ({"long": "right >= 1"}, "no reward 'long'"),
        ({"short": "short >= 1"}, "short is its own condition"),
    ],
)
def test_conditions_name_two_rewards(functions, conditions, message):
    with pytest.raises(ConfigError, match=message):
        functions(TWO, "right", "short", conditions=conditions)


async def test_what_no_function_scores_learns_nothing_and_moves_no_mean(functions):
    made = functions(
        "def f(completions):\n    return [None if c == '?' else float(len(c)) for c in completions]"
    )
    rollouts = await score_group(
        made.for_row(PLAIN, ROW, TrainingProgress), [trajectory(text) for text in ("a", "?", "abc")]
    )
    assert [rollout.reward for rollout in rollouts] == [1.0, 2.0, 3.0]
    assert [rollout.zero_advantage for rollout in rollouts] == [False, True, False]
    assert "rewards/f" not in rollouts[1].scores


async def test_none_for_a_whole_group_is_a_reward_of_0_that_teaches_nothing(functions):
    """The advantage is 0 as in TRL ("unscorable"): the group counts, and the run continues. A
    group that was left UNSCORED (the judge is away) is another thing: it is dropped with the
    reason."""
    made = functions("def f(completions):\n    return [None] * len(completions)")
    group = await score_group(
        made.for_row(PLAIN, ROW, TrainingProgress), [trajectory("a"), trajectory("b")]
    )
    assert [(rollout.reward, rollout.zero_advantage) for rollout in group] == [
        (0.0, True),
        (0.0, True),
    ]
    two = functions(
        "def f(completions):\n    return [None] * len(completions)\n"
        "def g(completions):\n    return ['unscored'] * len(completions)",
        *("f", "g"),
    )
    with pytest.raises(RolloutRejectedError, match=r"f, g .*unscored"):
        await scores(two, "a", "b")


async def test_log_metric_is_kept_beside_the_scores(functions):
    text = (
        "def f(completions, log_metric, log_extra):\n    log_metric('size', 1)\n   "
        " log_metric('size', 4)\n"
    )
    [got] = await scores(functions(text + "    return [1]"), "a")
    assert got == {"rewards/f": 1.0, "reward": 1.0, "metrics/size": 2.5}


async def test_log_extra_is_kept_with_each_completion(functions):
    text = (
        "import numpy as np\ndef f(completions, log_extra):\n"
        "    log_extra('parsed', [c.upper() for c in completions])\n"
        "    log_extra('odd', [np.float32(0.5), {'ends': {1, 2}.__class__}])\n"
        "    return [1, 0]\n"
        "async def g(completions, log_extra):\n"
        "    log_extra('by g', (n for n, _ in enumerate(completions)))\n"
        "    return [None, None]\n"
    )
    group = await score_group(
        functions(text, "f", "g").for_row(PLAIN, ROW, TrainingProgress),
        [trajectory("a"), trajectory("b")],
    )
    assert [rollout.extra for rollout in group] == [
        {"parsed": "A", "odd": 0.5, "by g": 0},
        {"parsed": "B", "odd": {"ends": "<class 'set'>"}, "by g": 1},
    ]
    assert [rollout.scores for rollout in group] == [
        {"rewards/f": 1.0, "reward": 1.0},
        {"rewards/f": 0.0, "reward": 0.0},
    ]


async def test_numbers_and_lists_without_a_text_stop_no_run(functions):
    text = (
        "def nested(levels):\n    return [nested(levels - 1)] if levels else 1\n"
        "def endless():\n    top = inner = []\n    for _ in range(99999):\n"
        "        inner.append([])\n        inner = inner[0]\n    return top\n"
        "def f(completions, log_extra):\n"
        "    log_extra('numbers', [[float('nan'), float('-inf'), 1.5]])\n"
        "    log_extra('huge', [10**5000])\n"
        "    log_extra('nested', [nested(32)])\n"
        "    log_extra('deep', [nested(33)])\n"
        "    log_extra('endless', [endless()])\n"
        "    return [1]\n"
    )
    made = functions(text).for_row(PLAIN, ROW, TrainingProgress)
    [rollout] = await score_group(made, [trajectory("a")])
    assert rollout.extra["numbers"] == ["NaN", "-Infinity", 1.5]
    assert rollout.extra["huge"] == "<int without a text: ValueError>"
    assert isinstance(rollout.extra["nested"], list)
    assert rollout.extra["deep"] == "[" * 33 + "1" + "]" * 33
    assert rollout.extra["endless"] == "<list without a text: RecursionError>"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('two\\nlines')", r"^f: .*score\d+\.py, line 2: ValueError: two lines$"),
        ("return [1.0]", "^f returned 1 scores for 2 completions$"),
        ("return [1.0, float('-inf')]", "^f, completion 1: -inf is not a finite number$"),
        ("return [1.0, 'good']", "^f, completion 1: 'good' is not a finite number$"),
        ("return [1.0, [2]]", r"^f, completion 1: \[2\] is not a finite number$"),
        ("return [1.0, -1e155]", r"^f, completion 1: -1e\+155 is beyond ±1e\+09$"),
        ("return [1.0, 10**400]", "^f, completion 1: 1000.* is not a finite number$"),
        ("return 1.0", "^f returned float, not a list of numbers$"),
        ("return None", "^f returned NoneType, not a list of numbers$"),
        ("return 'ab'", "^f returned str, not a list of numbers$"),
        ("log_metric('x', 'y'); return [1, 1]", r"^log_metric\('x'\): 'y' is not a finite number$"),
        ("return trainer_state.epoch", "AttributeError: .*epoch"),
        ("log_extra('x', [1]); return [1, 1]", r"log_extra\('x'\): 1 values for 2 completions$"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_what_cannot_be_trained_on_is_refused_by_name(functions, kind, body, message):
    with pytest.raises(RolloutRejectedError, match=message):
        await scores(
            functions(f"{kind} f(completions, log_metric, log_extra, trainer_state):\n    {body}"),
            "a",
            "b",
        )


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        (
            "def f(completions, solution): ...",
            ROW,
            r"'solution' is not a column.*did you mean .*answer, .*level",
        ),
        ("def f(prompts, answer): ...", ROW, "sees no completions"),
        ("def f(completions, /, **kw): ...", ROW, "called by keyword"),
        ("def f(completions, completion): ...", ROW, "'completion' is not a column"),
        ("class f: ...", ROW, "is a class, not a function"),
        (
            SEES,
            ("prompt", "completions"),
            r"^rewards: the data has a column 'completions'.*rename the column",
        ),
    ],
)
def test_a_signature_that_cannot_work_is_refused_at_once(functions, text, columns, message):
    with pytest.raises(ConfigError, match=message):
        functions(text, columns=tuple(columns))


async def test_a_plain_function_blocks_neither_the_loop_nor_an_async_one(functions):
    text = (
        "import threading\nentered, leave, threads = threading.Event(), threading.Event(), set()\n"
        "def f(completions):\n    threads.add(threading.current_thread().name)\n    entered.set()\n"
        "    assert leave.wait(30)\n    return [1.0]\nasync def g(completions):\n    return [2.0]"
    )
    both, other = (
        functions(text, "f", "g"),
        functions("async def g(completions):\n    return [4.0]", "g"),
    )
    state = both._functions[0].call.__globals__
    waiting = asyncio.create_task(scores(both, "a"))
    await asyncio.to_thread(state["entered"].wait, 30)
    assert [got["reward"] for got in await scores(other, "a")] == [4.0]
    state["leave"].set()
    assert [got["reward"] for got in await waiting] == [3.0]
    assert threading.current_thread().name not in state["threads"]


async def test_a_plain_function_may_run_a_loop_of_its_own(functions):
    text = (
        "import asyncio\nasync def ask():\n    return 0.25\ndef f(completions):\n    return"
        " [asyncio.run(ask())]"
    )
    [got] = await scores(functions(text), "a")
    assert got["reward"] == 0.25


async def test_a_function_cannot_spoil_the_row(functions):
    made = functions(
        "def f(completions, choices):\n    return [choices.pop().pop() for _ in completions]",
        columns=["choices"],
    )
    row = {"choices": [1.0, 2.0]}
    for _ in range(2):
        assert [got["reward"] for got in await scores(made, "a", "b", row=row)] == [2.0, 2.0]


@pytest.mark.parametrize("error", ["asyncio.CancelledError", "KeyboardInterrupt"])
async def test_no_error_ends_the_thread_of_plain_functions(functions, error):
    with pytest.raises(RolloutRejectedError, match=f"^f: {error.rpartition('.')[2]}$"):
        await scores(functions(f"import asyncio\ndef f(completions):\n    raise {error}"), "4")
    async with asyncio.timeout(10):
        assert await scores(functions("def f(completions): return [1.0]"), "4") == [
            {"reward": 1.0, "rewards/f": 1.0}
        ]


async def test_scores_made_one_by_one_are_the_functions_too(functions):
    made = functions("def f(completions):\n    yield 1.0\n    raise KeyError('k')\n")
    with pytest.raises(RolloutRejectedError, match=r"KeyError.*'k'"):
        await scores(made, "4", "5")


async def test_a_plain_function_that_never_ends_holds_up_no_other_call(functions):
    text = "import threading\nstarted, let_go = threading.Event(), threading.Event()\n"
    hanging = functions(
        text + "def f(completions):\n    started.set()\n    let_go.wait()\n    return [0.0]\n"
    )
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


# ---------------------------------------------------------------------- named in a configuration


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
    functions = made(
        "near", "near", reward_options={"near": {"target": 3}, "near#2": {"target": 5}}
    )
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
    functions = made(
        "Longest", reward_method="relative", reward_options={"Longest": {"bonus": 0.5}}
    )
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
    with pytest.raises(RolloutRejectedError, match="unscored"):
        await scores(functions, "?", "?")


async def test_a_column_that_a_task_lacks_is_named(made):
    functions = made("letters", columns=None)
    with pytest.raises(
        RolloutRejectedError,
        match="'wanted'",
    ):
        await scores(functions, "a")


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (
            ("size",),
            {"reward_options": {"sise": {}}},
            "'sise', which is none of the rewards; did you mean 'size'",
        ),
        (
            ("near",),
            {"reward_options": {"near": {"completions": 1}}},
            "every call of the function passes itself",
        ),
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


def test_weights_and_keys_have_to_fit():
    two = EnvironmentConfig(kind="svrl", name="svrl", reward_weights=(1, 2))
    with pytest.raises(ConfigError, match="reward_weights"):
        RewardFunctions.from_config(two, columns=None, default=["builtin:svrl"])
    with pytest.raises(ConfigError, match="needs rewards"):
        RewardFunctions.from_config(EnvironmentConfig(kind="simple_text", name="t"), columns=None)
    for entry, message in (
        ({"kind": "tasks", "name": "sum", "reward_method": "pareto"}, "reward_method belongs"),
        (
            {"kind": "svrl", "rewards": ["builtin:svrl"], "reward_weights": [1, 2]},
            "2 reward_weights for 1 rewards",
        ),
        ({"kind": "svrl", "reward_method": "best"}, "reward_method"),
        ({"kind": "svrl", "reward_conditions": {"a": "b = 1"}}, "'b = 1' is no condition"),
        ({"kind": "svrl", "reward_conditions": {"a": "b > nan"}}, "is no condition"),
        ({"kind": "svrl", "data": "rows.jsonl"}, "data belongs"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config({"environments": [entry]})
    for method in ("absolute", "pareto", "relative", "gdpo"):
        data = {"environments": [{"kind": "svrl", "reward_method": method}]}
        data["rl_training"] = {"algorithm": "maxrl"}
        if method in ("absolute", "pareto"):
            parse_config(data)
            continue
        with pytest.raises(ConfigError, match="makes rewards below 0"):
            parse_config(data)


async def test_columns_are_what_the_episode_noted_in_the_end(made):
    """Not what its State began with: a cost read from there would always be 0."""
    functions = made("paid", columns=None)
    got = await scores(functions, "a", row={"spent": 0.0, "price": 2.0}, spent=3.0, calls=4)
    assert got[0]["reward"] == 10.0


def test_files_of_options_are_found_beside_the_configuration_and_by_a_resume(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    for name in ("rows.jsonl", "a reward", "answer.schema", "key", "score.py"):
        (here / name).write_text("{}")
    (here / "run.toml").write_text(
        '[[environments]]\nkind = "dataset"\ndata = "rows.jsonl"\n'
        'rewards = ["builtin:learned", "builtin:json",'
        ' "builtin:judge"]\n[environments.reward_options]\n'
        'learned = { path = "a reward" }\njson = { schema = "answer.schema" }\n'
        'judge = { judge = "http://x/v1", model = "key", api_key_file = "key" }\n'
        '[[environments]]\nkind = "svrl"\n'
        'options = { tasks = "rows.jsonl", tools = ["python:score.py:f"], facts = "nowhere.json",'
        ' note = "key" }\n'
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(here / "run.toml")
    options = config.environments[0].reward_options
    assert options["learned"] == {"path": str(here / "a reward")}
    assert options["json"] == {"schema": str(here / "answer.schema")}
    assert options["judge"] == {
        "judge": "http://x/v1",
        "model": "key",
        "api_key_file": str(here / "key"),
    }
    assert config.environments[1].options == {
        "tasks": str(here / "rows.jsonl"),
        "tools": [f"python:{here / 'score.py'}:f"],
        "facts": "nowhere.json",
        "note": "key",
    }
    (elsewhere / "config.toml").write_text(config.to_toml())
    monkeypatch.chdir(tmp_path)
    assert (
        load_config(elsewhere / "config.toml", saved=True).environments[0].reward_options == options
    )


# ---------------------------------------------------------------------- the group's reward


def test_exact_match_forgives_white_space_only_and_a_verifier_scores_each_answer_on_its_own():
    scores = exact_match("42")([trajectory(text) for text in ("42", " 42\n", "4 2", "42.", "")])
    assert [score["reward"] for score in scores] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert verifier(len)([trajectory("ab"), trajectory("abcd")]) == [
        {"reward": 2.0},
        {"reward": 4.0},
    ]


async def test_a_reward_sees_the_whole_group():
    def rank(responses):
        longest = max(len(entry.text) for entry in responses)
        return [
            {"reward": float(len(entry.text) == longest), "length": len(entry.text)}
            for entry in responses
        ]

    rollouts = await score_group(rank, [trajectory("a"), trajectory("abc"), trajectory("ab")])
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 0.0]
    assert rollouts[2].scores["length"] == 2.0
    assert rollouts[0].tokens == ROLLOUT.tokens
    assert rollouts[0].logprobs == ROLLOUT.logprobs


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([{"reward": 1.0}], "1 scores for 2"),
        ([{"reward": 1.0}, {"score": 1.0}], 'no "reward"'),
        ([{"reward": 1.0}, {"reward": float("-inf")}], "inf"),
        ([{"reward": 1.0}, {"reward": 1.0, "part": float("inf")}], "'part' is inf"),
        (
            [{"reward": 1.0}, {"reward": 1e308}],
            r"'reward' is 1e\+308, not a number of at most ±1e\+09",
        ),
    ],
)
async def test_scores_that_cannot_be_trained_on_are_refused(scores, message):
    with pytest.raises(RolloutRejectedError, match=message):
        await score_group(lambda _: scores, [trajectory("a"), trajectory("b")])


async def test_a_number_called_extra_is_a_score() -> None:
    rollouts = await score_group(
        lambda _: [{"reward": 1.0, "extra": 0.5}, {"reward": 0.0, "extra": {"read": "b"}}],
        [trajectory("a"), trajectory("b")],
    )
    assert [rollout.scores for rollout in rollouts] == [
        {"reward": 1.0, "extra": 0.5},
        {"reward": 0.0},
    ]
    assert [rollout.extra for rollout in rollouts] == [{}, {"read": "b"}]


async def test_a_reward_may_be_async_and_leave_a_response_out():
    async def judge(responses):
        return [{"reward": 1.0}, {"reward": 1.0, UNSCORED: 1.0}]

    rollouts = await score_group(judge, [trajectory("a"), trajectory("b")])
    assert [rollout.zero_advantage for rollout in rollouts] == [False, True]


async def test_answers_that_nothing_scores_are_warned_of_once(functions, informative_logs) -> None:
    made = functions("def f(completions, **_):\n    return [None] * len(completions)\n")
    with capture_logs() as warned:
        for _ in range(3):
            assert all(UNSCORED in each for each in await scores(made, "4", "5"))
    [line] = warned
    assert "no reward function scores" in line["event"] and line["functions"] == ["f"]
