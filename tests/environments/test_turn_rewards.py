"""Rewards of single turns, from an environment and from reward functions to the rollouts."""

import re

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.rollout_store.checks import check_group
from tests.environments.scripted_client import ScriptedClient
from tests.environments.templates import QWEN3, with_template
from tests.environments.test_state_episodes import InEpisode, played, source


class Digits(BaseEnvironment):
    """Three turns of conversation. A turn is worth the digit that it says; "-" reports nothing."""

    turns = 3

    def reset(self, index=0):
        return State(prompt=[{"role": "user", "content": "Say."}])

    def update_state(self, state, response):
        state = super().update_state(state, response)
        digit = response.removeprefix("<think>.</think>")
        if digit != "-":
            state.turn_reward = float(digit)
        state.done = state.step_count == self.turns
        state.prompt = [
            *state.prompt,
            {"role": "assistant", "content": response},
            {"role": "user", "content": "Say."},
        ]
        return state


class RewardsTurns(Digits):
    rewards_turns = True


class Touching(Digits):
    """Nothing is asked between two turns."""

    def build_prompt(self, state):
        return "Say:" + "".join(turn["response"] for turn in state.history)


class Twice(Digits):
    """A step that asks twice is two turns; its reward belongs to the second."""

    turns = 2

    def step(self, state):
        first = self.inference.generate(["Say:"])[0]
        second = self.inference.generate([f"Say:{first}\n"])[0]
        return self.advance(state, "Say:", second)


class Unasked(Digits):
    def step(self, state):
        state.turn_reward = 1.0
        return state


def of_turns(body: str, tmp_path, *names: str, weights=(), method="absolute") -> RewardFunctions:
    file = tmp_path / f"rewards{len(list(tmp_path.iterdir()))}.py"
    file.write_text(body)
    references = [f"python:{file}:{name}" for name in names]
    return RewardFunctions(references, weights, columns=None, key="rewards", method=method)


def saying(tokenizer, *texts):
    answers = iter(texts)
    return ScriptedClient(tokenizer, lambda *_: next(answers))


def checked(result):
    assert result.failure is None
    check_group(result.group, vocab_size=10**6, max_token_length=256)
    return result.group.rollouts


async def test_a_state_reports_the_reward_of_its_turn(tokenizer):
    """The opening turns of both come first, then two turns each; one never reports: zeros."""
    answers = {"": ("1", "-"), "0": iter("25"), "1": iter("--")}

    def answer(request, choice):
        _, _, rest = request.request_id.partition("/")
        return answers[""][choice] if not rest else next(answers[rest[0]])

    client = ScriptedClient(tokenizer, answer)
    result = await played(
        tokenizer, client, source(Digits(), RewardFunctions.none(), prompt_format="chat")
    )
    first, second = checked(result)
    assert (first.turn_rewards, first.reward) == ((1, 2, 5), 8)
    assert (second.turn_rewards, second.reward) == ((0, 0, 0), 0)
    assert first.turns == (2, 2, 2) and first.turn_lengths == ()  # a digit and the EOS


async def test_without_reports_nothing_is_there(tokenizer):
    client = saying(tokenizer, *"------")
    built = source(Digits(), RewardFunctions.none(), prompt_format="chat")
    for rollout in checked(await played(tokenizer, client, built)):
        assert rollout.turn_rewards == () and rollout.scores == {"reward": 0.0}


async def test_turns_that_touch_have_lengths(tokenizer):
    client = saying(tokenizer, "1", "2", "3")
    [rollout] = checked(
        await played(tokenizer, client, source(Touching(), RewardFunctions.none()), size=1)
    )
    assert rollout.turn_rewards == (1, 2, 3)
    assert rollout.turns == (2, 2, 2)


async def test_segments_of_a_template_that_rewrites_history(tokenizer):
    tokenizer = with_template(QWEN3)
    client = saying(tokenizer, *(f"<think>.</think>{digit}" for digit in "123"))
    built = source(Digits(), RewardFunctions.none(), prompt_format="chat")
    [rollout] = checked(await played(tokenizer, client, built, size=1))
    assert len(rollout.segments) == 3
    assert rollout.turn_rewards == (1, 2, 3)
    assert [segment.turn_rewards for segment in rollout.earlier] == [(), ()]
    assert [len(segment.turns) for segment in rollout.segments] == [1, 1, 1]


async def test_a_step_that_asks_twice(tokenizer):
    client = saying(tokenizer, "7", "1", "7", "2")
    built = source(Twice(InEpisode()), RewardFunctions.none())
    [rollout] = checked(await played(tokenizer, client, built, size=1))
    assert rollout.turn_rewards == (0, 1, 0, 2)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (Digits, "nan", r"State.turn_reward is nan, not a number of at most ±1e\+09"),
        (Digits, "1e10", r"State.turn_reward is 10000000000.0, not a number"),
        (Unasked, "1", "State.turn_reward is set, but the policy was not asked anything yet"),
    ],
)
async def test_what_is_no_reward_of_a_turn(tokenizer, kind, text, reason):
    client = ScriptedClient(tokenizer, lambda *_: text)
    built = source(kind(InEpisode()), RewardFunctions.none(), prompt_format="chat")
    result = await played(tokenizer, client, built, size=1)
    assert result.failure is not None
    assert re.search(reason, result.failure)


async def test_a_function_scores_each_turn(tokenizer, tmp_path):
    """Weights 2 and 1: turns 2 · [0, 1, 0] and the environment's [1, 2, 5]; whole 2 + 8 + 10."""
    rewards = of_turns(
        "def second(trajectories, **columns):\n"
        "    return [[float(turn is t.history[1]) for turn in t.history] for t in trajectories]\n"
        "def whole(completions, **columns):\n"
        "    return [10.0] * len(completions)\n",
        tmp_path,
        "second",
        "whole",
        weights=(2.0, 1.0),
    )
    client = saying(tokenizer, "1", "2", "5")
    built = source(Digits(), rewards, prompt_format="chat")
    [rollout] = checked(await played(tokenizer, client, built, size=1))
    assert rollout.turn_rewards == (1, 4, 5)
    assert rollout.scores == {"rewards/second": 1.0, "rewards/whole": 10.0, "reward": 20.0}


@pytest.mark.parametrize(
    ("body", "method", "reason"),
    [
        ("[[1.0, 2.0]]", "absolute", "2 turn_rewards for an episode of 3 turns"),
        ("[[]]", "absolute", "0 turn_rewards for an episode of 3 turns"),
        ("[[1.0, None, 1.0]]", "absolute", "f, completion 0, turn 1: None is not a finite number"),
        (
            "[[1.0, 2.0, 3.0]]",
            "relative",
            'f scored single turns, which reward_method = "relative"',
        ),
    ],
)
async def test_what_no_function_may_return(tokenizer, tmp_path, body, method, reason):
    rewards = of_turns(f"def f(completions):\n    return {body}\n", tmp_path, "f", method=method)
    client = saying(tokenizer, *"---")
    result = await played(
        tokenizer, client, source(Digits(), rewards, prompt_format="chat"), size=1
    )
    assert result.failure is not None and reason in result.failure


def test_an_environment_whose_turns_are_the_whole_reward_needs_no_functions():
    reference = f"python:{__name__}:"
    [built] = build_sources([EnvironmentConfig(kind=f"{reference}RewardsTurns", name="t")], seed=0)
    assert built.rewards.names == []
    with pytest.raises(ConfigError, match="needs rewards"):
        build_sources([EnvironmentConfig(kind=f"{reference}Digits", name="t")], seed=0)
