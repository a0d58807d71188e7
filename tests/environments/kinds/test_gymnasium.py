"""Text policies in gymnasium's environments."""

import asyncio
import json
import math
import string
import threading

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments import runner as runner_module
from mlx_parallm.environments.kinds.gymnasium import (
    GymnasiumEnvironment,
    episode_return,
    turn_rewards,
)
from mlx_parallm.environments.registry import create_environment
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.state import StateSource
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.types import Rollout, Trajectory, has_score
from tests.altered import Altered
from tests.environments.scripted_client import ScriptedClient
from tests.environments.speaking import Says, play

gymnasium = pytest.importorskip("gymnasium")

LAKE = {
    "id": "FrozenLake-v1",
    "make": {"is_slippery": False},
    "action_names": ["left", "down", "right", "up"],
}
TO_THE_GOAL = ["go down", "Down!", "right", "right", "down", "I move right."]


class Echo(gymnasium.Env):
    """Ends when it hears its secret, which its seed decides."""

    observation_space = action_space = gymnasium.spaces.Text(20, charset=string.printable)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = str(self.np_random.integers(10**6))
        return f"say {self.secret}", {}

    def step(self, action):
        done = action == self.secret
        return "yes" if done else "no", float(done), done, False, {}


class Pairs(Echo):
    def __init__(self, kind):
        one = gymnasium.spaces.Discrete(2)
        self.action_space = (
            gymnasium.spaces.Dict(a=one) if kind == "Dict" else gymnasium.spaces.Tuple([one, one])
        )
        self.steps = 0

    def step(self, action):
        self.steps += 1
        return f"{action} {self.steps}", 1.0, False, False, {}


class Counted(Echo):
    """Counts those that are open; `step` waits to be let go, or raises."""

    opened, closed = [], []
    stepping, release = threading.Semaphore(0), threading.Event()

    def __init__(self, way):
        self.way = way
        self.opened.append(self)

    def close(self):
        assert self not in self.closed
        self.closed.append(self)

    def reset(self, *, seed=None, options=None):
        if self.way == "no reset":
            raise RuntimeError("no reset")
        return super().reset(seed=seed)

    def step(self, action):
        if self.way == "raises":
            raise RuntimeError("broken")
        self.stepping.release()
        if self.way == "waits":
            self.release.wait()
        return super().step(action)


for name, kind in (("Echo-v0", Echo), ("Pairs-v0", Pairs), ("Counted-v0", Counted)):
    gymnasium.register(name, entry_point=kind)


def test_an_episode_to_the_goal():
    environment = GymnasiumEnvironment(Says(*TO_THE_GOAL), **LAKE)
    state = play(environment)
    assert (
        state.prompt[0]["content"]
        == "Actions: left, down, right, up. Answer with one of them.\n\n0"
    )
    assert [m["content"] for m in state.prompt if m["role"] == "user"][1:] == [
        "4",
        "8",
        "9",
        "10",
        "14",
    ]
    assert state.metadata["actions"] == [1, 1, 2, 2, 1, 2]
    assert (
        state.metadata["return"],
        state.metadata["terminated"],
        state.metadata["truncated"],
    ) == (1.0, True, False)
    assert state.live is None  # closed
    rollout = Rollout((1, 2), (0, 1), (0.0, -0.5), (0, 0), 1.0, {})
    assert episode_return([Trajectory("right", rollout, metadata=state.metadata)]) == [1.0]
    assert environment.inference.prompts[-1] == state.prompt[:-1]


@pytest.mark.parametrize("answer", ["sideways", "left or right", ""])
def test_an_answer_that_is_no_action_does_nothing_and_takes_a_turn(answer):
    environment = GymnasiumEnvironment(Says(answer, "down"), max_steps=2, **LAKE)
    state = play(environment)
    assert state.metadata["invalid_actions"] == 1
    assert state.metadata["actions"] == [1]
    assert state.prompt[2]["content"].startswith("That is no action. Actions: left")
    assert state.step_count == 2


def test_a_copy_goes_on_in_a_simulation_of_its_own():
    """CliffWalking keeps its position: moving in one copy must not move the other."""
    environment = GymnasiumEnvironment(Says("0", "0", "1", "0"), id="CliffWalking-v1")
    state = environment.step(environment.reset(index=0))
    copy = state.copy()
    for _ in range(2):
        state = environment.step(state)
    copy = environment.step(copy)
    assert state.metadata["actions"] == [0, 0, 1]
    assert copy.metadata["actions"] == [0, 0]
    assert state.prompt[-1]["content"] == "13"
    assert copy.prompt[-1]["content"] == "12"


def test_seeds_decide_an_episode_and_splits_have_their_own():
    environment = GymnasiumEnvironment(id="Echo-v0")
    opening = {
        split: [environment.reset(index=n, split=split).prompt[0]["content"] for n in range(5)]
        for split in ("train", "heldout")
    }
    assert len(set(opening["train"] + opening["heldout"])) == 10
    again = GymnasiumEnvironment(id="Echo-v0")
    assert [again.reset(index=n).prompt[0]["content"] for n in range(5)] == opening["train"]
    other = GymnasiumEnvironment(id="Echo-v0", seed=1)
    assert other.reset(index=0).prompt[0]["content"] != opening["train"][0]
    assert other.reset(index=0, split="heldout").prompt[0]["content"] == opening["heldout"][0]


def test_text_in_and_text_out():
    environment = GymnasiumEnvironment(Says(), id="Echo-v0")
    state = environment.reset(index=0)
    secret = state.prompt[0]["content"].removeprefix("say ")
    environment.inference.answers += ["what?", f" {secret}\n"]
    state = play(environment, state)
    assert [m["content"] for m in state.prompt if m["role"] == "user"] == [f"say {secret}", "no"]
    assert state.metadata["return"] == 1.0


def test_numbers_of_a_continuous_environment_are_json():
    environment = GymnasiumEnvironment(
        Says("[0.5]", "five", "[1.0]"), id="Pendulum-v1", max_steps=3
    )
    state = play(environment)
    assert state.metadata["actions"] == [[0.5], [1.0]]
    assert state.metadata["invalid_actions"] == 1
    assert state.metadata["return"] < 0
    assert state.prompt[0]["content"].startswith("[")


def test_observation_and_action_may_be_functions_of_the_users(tmp_path):
    (tmp_path / "lake.py").write_text(
        "def where(observation):\n    return f'row {observation // 4}, column {observation % 4}'\n"
        "def first_letter(text):\n    return {'d': 1, 'r': 2}.get(text[:1])\n"
    )
    options = {
        "observation_text": f"python:{tmp_path}/lake.py:where",
        "action_of": f"python:{tmp_path}/lake.py:first_letter",
    }
    environment = create_environment(
        "gymnasium", **LAKE, **options, max_steps=2, instructions="Reach the goal."
    )
    environment.inference = Says("d", "r")
    state = play(environment)
    assert state.prompt[0]["content"] == "Reach the goal.\n\nrow 0, column 0"
    assert state.prompt[2]["content"] == "row 1, column 0"


def test_a_template_shows_the_observation_and_the_picture():
    environment = GymnasiumEnvironment(
        Says("right"),
        **LAKE | {"make": {"is_slippery": False, "render_mode": "ansi"}},
        observation_text="{render!s}field {observation}",
        max_steps=2,
    )
    state = environment.step(environment.reset(index=0))
    lines = "FFF\nFHFH\nFFFH\nHFFG\nfield 0"
    assert state.prompt[0]["content"].endswith(f"\x1b[41mS\x1b[0m{lines}")
    assert "(Right)\nS\x1b[41mF\x1b[0mFF\n" in state.prompt[2]["content"]
    assert state.prompt[2]["content"].endswith("field 1")


@pytest.mark.parametrize(
    ("options", "answers", "rewards", "shown"),
    [
        (LAKE, TO_THE_GOAL, [0, 0, 0, 0, 0, 1], "14"),
        ({"id": "CliffWalking-v1"}, ["0", *"1" * 11, "2"], [-1] * 13, "35"),
        (
            {"id": "Blackjack-v1", "action_names": ["stick", "hit"]},
            ["I hit", "hit", "hit", "hit", "hit"],
            [0, -1],  # 13, then more than 21
            "[13, 6, 0]",
        ),
        (
            {
                "id": "Taxi-v4",
                "action_names": ["south", "north", "east", "west", "pick up", "drop off"],
            },
            ["drop off", "south"],
            [-10, -1],  # nobody is in it
            None,
        ),
    ],
    ids=lambda value: value.get("id") if isinstance(value, dict) else None,
)
def test_games_of_toy_text_are_played_with_options_alone(options, answers, rewards, shown):
    environment = GymnasiumEnvironment(Says(*answers), **options, max_steps=len(answers), seed=1)
    state = play(environment)
    assert state.metadata["rewards"] == rewards
    assert state.metadata["return"] == sum(rewards)
    assert state.metadata["invalid_actions"] == 0
    assert shown in (None, state.prompt[-2]["content"])


async def test_answers_are_held_to_the_actions_from_the_first_one_on(tokenizer):
    config = EnvironmentConfig(kind="own", name="own")
    for options, choice in (
        (LAKE, LAKE["action_names"]),
        ({"id": "CliffWalking-v1"}, ["0", "1", "2", "3"]),
    ):
        options = {**options, "constrained": True, "max_steps": 2}
        source = StateSource(config, lambda o=options: GymnasiumEnvironment(**o), seed=0)
        client = ScriptedClient(tokenizer, lambda *_, answer=choice[1]: answer)
        policy = EpisodePolicy(client, tokenizer, temperature=1, max_token_length=256)
        [result] = await EpisodeRunner(policy).run([GroupPlan("g", source, 0, 2, seed=0)])
        assert result.failure is None, result.failure
        [structure] = {request.params.structure for request in client.requests}
        assert (structure.kind, json.loads(structure.source)) == ("choice", choice)
        assert [request.params.n for request in client.requests] == [2, 1, 1]  # opened together


@pytest.mark.parametrize(("kind", "action"), [("Dict", {"a": 1}), ("Tuple", (1, 0))])
def test_actions_of_any_space_are_played_where_it_is_said_what_an_answer_means(kind, action):
    environment = GymnasiumEnvironment(
        Says("go", "go", "go"), id="Pairs-v0", make={"kind": kind}, action_of=lambda text: action
    )
    state = environment.step(environment.reset(index=0))
    copy = environment.step(state.copy())  # goes through the actions again
    assert copy.prompt[-1]["content"] == f"{action} 2"
    assert copy.metadata["actions"] == [{"a": 1} if kind == "Dict" else [1, 0]] * 2
    assert environment.step(state).prompt[-1]["content"] == f"{action} 2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"id": ""}, "id is missing"),
        ({**LAKE, "action_names": ["left"]}, "1 action_names do not fit"),
        ({**LAKE, "make": {"colour": "blue"}}, "colour"),
        ({**LAKE, "max_steps": 0}, "at least 1"),
        ({"id": "Pendulum-v1", "constrained": True}, "actions that can be listed"),
        ({**LAKE, "observation_text": "on {field}"}, r"neither a template with \{observation\}"),
        ({**LAKE, "observation_text": "lake.py:where"}, "nor a reference"),
        ({**LAKE, "observation_text": "on {"}, "stand for braces"),
        ({**LAKE, "observation_text": "{render}"}, 'needs make = { render_mode = "ansi" }'),
        (
            {"id": "Pairs-v0", "make": {"kind": "Dict"}},
            r"Pairs-v0 has the actions Dict\(.*action_of.*wrap it",
        ),
        (
            {"id": "Pairs-v0", "make": {"kind": "Tuple"}},
            r"Pairs-v0 has the actions Tuple\(.*action_of.*wrap it",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        create_environment("gymnasium", **options)


@pytest.mark.parametrize("way", ["limit", "raises", "waits", "cancelled"])
async def test_every_simulation_is_closed(tokenizer, way, monkeypatch):
    Counted.opened.clear(), Counted.closed.clear(), Counted.release.clear()
    Counted.stepping = threading.Semaphore(0)
    limits = []

    def timeout_at(when):
        limits.append(asyncio.timeout_at(when))
        return limits[-1]

    monkeypatch.setattr(runner_module, "asyncio", Altered(asyncio, timeout_at=timeout_at))
    held = "waits" if way == "cancelled" else way
    environment = GymnasiumEnvironment(id="Counted-v0", make={"way": held})
    config = EnvironmentConfig(kind="own", name="own", timeout_s=60)
    source = StateSource(config, lambda: environment, seed=0)
    client = ScriptedClient(tokenizer, lambda *_: "what?")
    runner = EpisodeRunner(EpisodePolicy(client, tokenizer, temperature=1, max_token_length=256))
    task = asyncio.create_task(runner.run([GroupPlan("g", source, 0, 2, seed=0, max_steps=2)]))
    if held == "waits":
        for _ in range(2):
            assert await asyncio.to_thread(Counted.stepping.acquire, timeout=20)
    if way == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        if way == "waits":  # time is up
            for limit in limits[-2:]:
                limit.reschedule(0)
        [result] = await task
        reasons = {"limit": "None", "raises": "broken", "waits": "not finished within"}
        assert reasons[way] in str(result.failure)
    Counted.release.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("g/")]:
        await asyncio.to_thread(thread.join, 20)
    assert len(Counted.opened) == 4  # the constructor's, reset's, and the episodes'
    assert set(Counted.closed) == set(Counted.opened)


def test_a_simulation_that_does_not_begin_is_closed():
    Counted.opened.clear(), Counted.closed.clear()
    with pytest.raises(RolloutRejectedError, match="no reset"):
        GymnasiumEnvironment(id="Counted-v0", make={"way": "no reset"}).reset(index=0)
    assert Counted.closed == Counted.opened and len(Counted.opened) == 2


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ({"mission": "hämta 球", "at": (1, 2)}, '{"mission": "hämta 球", "at": [1, 2]}'),
        ("hämta", "hämta"),
        (b"ok", "holds bytes (b'ok')"),
        ({"seen": {1}}, "holds set ({1})"),
    ],
)
def test_an_observation_is_shown_as_it_is_or_refused_in_one_line(shown, text) -> None:
    class Shown(Echo):
        def reset(self, *, seed=None, options=None):
            return shown, {}

    if "Shown-v0" in gymnasium.registry:
        del gymnasium.registry["Shown-v0"]
    gymnasium.register("Shown-v0", entry_point=Shown, disable_env_checker=True)
    environment = GymnasiumEnvironment(None, "Shown-v0", observation_text="{observation}")
    if text.startswith("holds"):
        with pytest.raises(ConfigError, match="observation_text") as refused:
            environment.reset(index=0)
        assert text in str(refused.value)
    else:
        assert text in environment.reset(index=0).prompt[-1]["content"]


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_a_step_without_a_reward_leaves_the_episode_without_a_score(nothing) -> None:
    class Silent(Echo):
        def step(self, action):
            return "no", nothing, True, False, {}

    if "Silent-v0" in gymnasium.registry:
        del gymnasium.registry["Silent-v0"]
    gymnasium.register("Silent-v0", entry_point=Silent, disable_env_checker=True)
    environment = GymnasiumEnvironment(None, "Silent-v0", observation_text="{observation}")
    state = environment.update_state(environment.reset(index=0), "hm")
    rollout = Rollout((1, 2), (0, 1), (0.0, -0.5), (0, 0), 1.0, {})
    trajectory = Trajectory("hm", rollout, metadata=state.metadata)
    [score] = episode_return([trajectory])
    assert not has_score(score)
    scored = Trajectory("hm", rollout, metadata={"rewards": [0.5, 0.0]})
    assert turn_rewards([trajectory, scored]) == [None, [0.5, 0.0]], "the group is not lost"
