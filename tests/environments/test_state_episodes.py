"""Episodes of a BaseEnvironment, played by the runner against a scripted policy."""

import asyncio
import re
import threading

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.episode import CURRENT, EpisodeOver
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.state import BaseEnvironment, State, StateSource
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from tests.environments.scripted_client import ScriptedClient, finished


class InEpisode:
    """What InferenceModule does inside its own episode policy."""

    def generate(self, prompts, **params):
        return [CURRENT.get().generate(prompt, params).text for prompt in prompts]

    async def agenerate(self, prompts, **params):
        return [(await CURRENT.get().agenerate(prompt, params)).text for prompt in prompts]


class Counting(BaseEnvironment):
    """Task i takes i turns. Goes on with its own text."""

    def reset(self, index=0):
        return State(prompt=f"Say {index}:", metadata={"turns": index, "answer": str(index)})

    def build_prompt(self, state):
        return state.prompt + "".join(f"{turn['response']}\n" for turn in state.history)

    def is_terminal(self, state):
        return state.step_count >= state.metadata["turns"]


class CountingItself(Counting):
    """The same, by its own step."""

    def __init__(self, inference=None):
        super().__init__(inference or InEpisode())

    def step(self, state):
        state.add_turn("", self.inference.generate([self.build_prompt(state)])[0])
        return state


class CountingAsync(CountingItself):
    async def step(self, state):
        state.add_turn("", (await self.inference.agenerate([self.build_prompt(state)]))[0])
        return state


class Careless(CountingItself):
    """Swallows what its policy raises."""

    def step(self, state):
        try:
            return super().step(state)
        except Exception:  # noqa: BLE001
            return state


ALL = [Counting, CountingItself, CountingAsync]


def raising(error):
    def update_state(self, state, response):
        raise error

    return update_state


def source(environment, rewards=None, **fields):
    config = EnvironmentConfig(kind="own", name="own", **{"prompt_format": "text", **fields})
    return StateSource(config, lambda: environment, seed=0, rewards=rewards)


async def played(tokenizer, client, built, *, task=3, size=2, **options):
    settings = {"max_token_length": 256, "temperature": 1.0, **options.pop("runner", {})}
    plan = GroupPlan("own-0-3", built, task, size, seed=11, index=task, **options)
    [result] = await EpisodeRunner(EpisodePolicy(client, tokenizer, **settings)).run([plan])
    return result


@pytest.mark.parametrize("kind", ALL)
async def test_turns_go_on_from_the_sampled_tokens(tokenizer, kind):
    said = iter("abcdef")
    client = ScriptedClient(tokenizer, lambda *_: next(said))
    client.version = 7
    result = await played(tokenizer, client, source(kind()), size=2)
    assert result.failure is None
    assert len(result.trajectories) == 2
    assert {
        word for each in result.trajectories for turn in each.history for word in turn.response
    } == set("abcdef")
    for number, trajectory in enumerate(result.trajectories):
        rollout, words = trajectory.rollout, [turn.response for turn in trajectory.history]
        assert rollout.earlier == ()
        assert (trajectory.step_count, trajectory.response, trajectory.truncated) == (
            3,
            words[-1],
            False,
        )
        assert trajectory.prompt == "Say 3:"
        assert trajectory.metadata["answer"] == "3"
        assert trajectory.group_id == "own-0-3"
        # Each of its requests is the beginning of the final sequence: the engine saw these tokens
        # and no others.
        asked = [r for r in client.requests if r.request_id.startswith(f"own-0-3/{number}/")]
        assert len(asked) == (2 if kind is Counting else 3)
        for request in asked:
            assert request.prompt_token_ids == rollout.tokens[: len(request.prompt_token_ids)]
        whole = tokenizer.decode(rollout.tokens, skip_special_tokens=False)
        assert whole == f"Say 3:{words[0]}<|im_end|>\n{words[1]}<|im_end|>\n{words[2]}<|im_end|>"
        sampled = [token for token, bit in zip(rollout.tokens, rollout.mask, strict=True) if bit]
        shown = tokenizer.decode(sampled, skip_special_tokens=False)
        assert shown == "".join(f"{word}<|im_end|>" for word in words)
        versions = {v for v, bit in zip(rollout.policy_versions, rollout.mask, strict=True) if bit}
        assert versions == {7}


async def test_the_first_turn_of_a_group_is_one_request(tokenizer):
    client = ScriptedClient(tokenizer, lambda request, choice: f"{choice}")
    result = await played(tokenizer, client, source(Counting()), task=1, size=4)
    assert [request.params.n for request in client.requests] == [4]
    assert tuple(each.text for each in result.trajectories) == ("0", "1", "2", "3")
    client = ScriptedClient(tokenizer, lambda request, choice: "x")
    await played(tokenizer, client, source(CountingItself()), task=1, size=4)
    assert [request.params.n for request in client.requests] == [1] * 4
    assert len({request.params.seed for request in client.requests}) == 4


async def test_members_of_a_group_share_no_state(tokenizer):
    class Noting(Counting):
        def reset(self, index=0):
            return State(prompt="Go", metadata={"turns": 2, "said": []})

        def update_state(self, state, response):
            state.metadata["said"].append(response)
            return super().update_state(state, response)

    result = await played(
        tokenizer,
        ScriptedClient(tokenizer, lambda request, choice: f"{choice}"),
        source(Noting()),
        size=3,
    )
    assert [t.metadata["said"][0] for t in result.trajectories] == ["0", "1", "2"]
    assert all(len(t.metadata["said"]) == 2 for t in result.trajectories)


async def test_another_text_opens_another_segment(tokenizer):
    class Anew(Counting):
        def build_prompt(self, state):
            return f"Turn {state.step_count}:"

    client = ScriptedClient(tokenizer, lambda *_: "4")
    [trajectory] = (await played(tokenizer, client, source(Anew()), task=3, size=1)).trajectories
    rollout = trajectory.rollout
    shown = [
        tokenizer.decode(segment.tokens, skip_special_tokens=False) for segment in rollout.segments
    ]
    assert shown == [f"Turn {number}:4<|im_end|>" for number in range(3)]
    assert [sum(segment.mask) for segment in rollout.segments] == [2, 2, 2]
    assert trajectory.history[1].prompt == "Turn 1:"


class Chatting(BaseEnvironment):
    """Two questions; the conversation grows as messages."""

    def reset(self, index=0):
        return State(prompt=[{"role": "user", "content": "Say 3"}])

    def update_state(self, state, response):
        state = super().update_state(state, response)
        state.done = state.step_count == 2
        state.prompt += [
            {"role": "assistant", "content": response},
            {"role": "user", "content": "Again."},
        ]
        return state


async def test_a_conversation_goes_on_from_its_tokens(tokenizer):
    answer = lambda request, _: "3" if "/" in request.request_id else "<think>Hm.</think>4"  # noqa: E731
    [kept] = (
        await played(tokenizer, ScriptedClient(tokenizer, answer), source(Chatting()), size=1)
    ).trajectories
    assert kept.rollout.earlier == ()
    assert [turn.prompt for turn in kept.history] == ["Say 3", "Again."]
    assert [message["content"] for message in kept.messages] == [
        "Say 3",
        "<think>Hm.</think>4",
        "Again.",
        "3",
    ]


async def test_a_text_is_a_message_of_the_users_in_chat_format(tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "1")
    built = source(Counting(), prompt_format="chat", system_prompt="Be brief.")
    await played(tokenizer, client, built, task=1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 1:"}]
    assert list(client.requests[0].prompt_token_ids) == tokenizer.render_chat(messages)
    with pytest.raises(ConfigError, match="has no system prompt"):
        source(Counting(), system_prompt="Be brief.")


@pytest.mark.parametrize("method", ["step", "update_state"])
async def test_code_that_may_block_runs_on_one_thread_of_its_episode(tokenizer, method):
    threads = {}

    class Own(CountingItself if method == "step" else Counting):
        blocking = True

    def where(self, state, *given):
        threads.setdefault(state.trajectory_id, set()).add(threading.current_thread())
        return getattr(super(Own, self), method)(state, *given)

    setattr(Own, method, where)
    result = await played(
        tokenizer, ScriptedClient(tokenizer, lambda *_: "x"), source(Own()), size=3
    )
    assert [t.step_count for t in result.trajectories] == [3, 3, 3]
    assert sorted(threads) == ["own-0-3/0", "own-0-3/1", "own-0-3/2"]
    assert all(len(own) == 1 for own in threads.values())
    assert len(set.union(*threads.values()) | {threading.current_thread()}) == 4


async def test_hundreds_of_blocking_episodes_play_at_once(tokenizer):
    meeting = threading.Barrier(300)

    class Meets(CountingItself):
        def step(self, state):
            meeting.wait(30)  # nobody continues before all are here
            return super().step(state)

    client = ScriptedClient(tokenizer, lambda *_: "x")
    result = await played(tokenizer, client, source(Meets()), task=2, size=300)
    assert result.failure is None
    assert {trajectory.step_count for trajectory in result.trajectories} == {2}


async def test_a_thread_that_blocks_is_left_behind_and_ends_at_its_next_turn(tokenizer):
    release, ended = threading.Event(), []

    class Blocks(CountingItself):
        def step(self, state):
            release.wait(30)
            try:
                return super().step(state)
            except Exception:
                ended.append("swallowed")
                raise
            except EpisodeOver as over:
                ended.append(over)
                raise

    built = source(Blocks(), timeout_s=0.05)
    client = ScriptedClient(tokenizer, lambda *_: "x")
    result = await played(tokenizer, client, built, size=2)
    assert "timeout_s = 0.05" in result.failure
    assert built.left_behind == 2
    blocked = [thread for thread in threading.enumerate() if thread.name.startswith("own-0-3/")]
    assert len(blocked) == 2
    release.set()
    for thread in blocked:
        await asyncio.to_thread(thread.join, 20)
    assert built.left_behind == 0
    assert [type(each) for each in ended] == [EpisodeOver, EpisodeOver]
    assert client.requests == []


async def test_a_timeout_frees_the_engine_from_a_step_that_waits_for_it(tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "x", gate=lambda request: None)
    built = source(CountingItself(), timeout_s=0.05)
    result = await played(tokenizer, client, built, size=2)
    assert "timeout_s = 0.05" in result.failure
    assert sorted(client.aborted) == ["own-0-3/0/0", "own-0-3/1/0"]
    while built.left_behind:  # noqa: ASYNC110  their generate() has raised: they are on their way out
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ALL)
async def test_the_step_limit_truncates(tokenizer, kind):
    client = ScriptedClient(tokenizer, lambda *_: "x")
    result = await played(tokenizer, client, source(kind()), task=9, max_steps=4)
    assert result.failure is None
    assert [(t.step_count, t.truncated, t.rollout.stop_reason) for t in result.trajectories] == [
        (4, True, "length")
    ] * 2
    exact = await played(tokenizer, client, source(kind()), task=4, max_steps=4)
    assert [(t.step_count, t.truncated) for t in exact.trajectories] == [(4, False)] * 2


@pytest.mark.parametrize("kind", [Counting, Careless, CountingAsync])
async def test_no_room_for_another_turn_truncates(tokenizer, kind):
    client = ScriptedClient(tokenizer, lambda *_: "xyxyxy")
    length = len(tokenizer.encode("Say 9:")) + 20
    result = await played(
        tokenizer, client, source(kind()), task=9, runner={"max_token_length": length}
    )
    assert (result.failure, result.group.metadata["out_of_room"]) == (None, 2)
    for trajectory in result.trajectories:
        assert trajectory.truncated and trajectory.out_of_room
        assert 1 <= trajectory.step_count < 9
    assert all(len(r.prompt_token_ids) + r.params.max_tokens <= length for r in client.requests)


class Endless(Counting):
    """Its `done` is forgotten."""

    def is_terminal(self, state: State) -> bool:
        return state.done


async def test_an_environment_that_never_ends_an_episode_is_named_once(tokenizer, warned):
    """The answers were said to lack their end token, the environment to be stalled."""
    endless, client = source(Endless()), ScriptedClient(tokenizer, lambda *_: "xyxyxy")
    for _ in range(2):
        result = await played(tokenizer, client, endless, task=9, runner={"max_token_length": 60})
        turns = [trajectory.step_count for trajectory in result.trajectories]
        counts = {name: result.group.metadata[name] for name in ("never_done", "never_done_turns")}
        assert counts == {"never_done": 2, "never_done_turns": sum(turns)} and min(turns) > 1
    what = (
        "nothing set state.done: Endless.update_state has to set it when the"
        " episode is over, or is_terminal"
    )
    assert endless.endless == f"{turns[0]} turns and {what} has to return True"
    warnings = [entry for entry in warned if entry["event"] == "an episode does not end"]
    assert [entry["reason"] for entry in warnings] == [endless.endless]
    cut = await played(tokenizer, client, source(Endless()), task=9, max_steps=3)
    assert cut.group.metadata["never_done"] == 0, "whoever set the limit knows that it ends them"


async def test_a_long_episode_is_told_of_while_it_goes_on_and_an_end_takes_it_back(
    tokenizer, warned
):
    long, client = source(Counting()), ScriptedClient(tokenizer, lambda *_: "x")
    result = await played(tokenizer, client, long, task=70)
    assert result.failure is None and result.group.metadata["never_done"] == 0
    [warning] = [entry for entry in warned if entry["event"] == "an episode does not end"]
    assert warning["reason"].startswith("64 turns ") and "Counting." in warning["reason"]
    assert long.endless is None


async def test_an_engine_failure_is_not_swallowed(tokenizer):
    broken = finished(0, "", [7], reason="error", error="NaN in the logits")
    result = await played(
        tokenizer, ScriptedClient(tokenizer, lambda *_: broken), source(Careless()), size=1
    )
    assert result.failure == "NaN in the logits"


@pytest.mark.parametrize(
    ("params", "failure"),
    [
        (
            {"temperature": 0.5},
            r"generate\(temperature=…\) inside an episode: it samples as the run does",
        ),
        (
            {"seed": 1, "top_p": 0.5},
            r"generate\(seed=…, top_p=…\) inside an episode.*only max_tokens, stop, tools$",
        ),
    ],
)
async def test_an_episode_samples_as_the_run_does(tokenizer, params, failure):
    class Own(CountingItself):
        def step(self, state):
            self.inference.generate([state.prompt], **params)

    client = ScriptedClient(tokenizer, lambda *_: "x")
    result = await played(tokenizer, client, source(Own()), size=1)
    with pytest.raises(RolloutRejectedError, match=failure):
        raise RolloutRejectedError(result.failure)
    assert client.requests == []


async def test_a_constructor_that_calls_no_super_plays_too(tokenizer):
    plain = type("Plain", (Counting,), {"__init__": lambda self, inference=None: None})
    built = source(plain())
    built.attach(InEpisode())
    result = await played(tokenizer, ScriptedClient(tokenizer, lambda *_: "x"), built)
    assert (result.failure, built.template.inference is None) == (None, False)


async def test_length_and_stop_strings_may_be_a_turns_own(tokenizer):
    class Own(CountingItself):
        def step(self, state):
            self.inference.generate([state.prompt], max_tokens=3, stop=["."])
            state.add_turn("", self.inference.generate([state.prompt], max_tokens=999)[0])
            state.done = True
            return state

    client = ScriptedClient(tokenizer, lambda *_: "x")
    await played(tokenizer, client, source(Own(), max_tokens=20, stop=("\n",)), size=1)
    assert [(r.params.max_tokens, r.params.stop) for r in client.requests] == [
        (3, (".",)),
        (20, ("\n",)),
    ]


@pytest.mark.parametrize(
    ("attributes", "failure"),
    [
        ({"step": lambda self, state: None}, "Bad.step returned None, not a State"),
        ({"build_prompt": lambda self, state: 3}, "Bad asks 3: expected text or messages"),
        ({"reset": lambda self: "no"}, "Bad.reset returned 'no', not a State"),
        (
            {"is_terminal": lambda self, state: True},
            "the episode ended before the policy was asked anything",
        ),
        (
            {"update_state": lambda self, state, response: {}[1]},
            "Bad.update_state: FILE: KeyError: 1",
        ),
        (
            {"step": lambda self, state: next(iter([]))},
            "Bad.step: FILE: RuntimeError: StopIteration:",
        ),
        # not ours: it would end the thread of the environments unheard
        ({"update_state": raising(asyncio.CancelledError())}, "CancelledError"),
        ({"update_state": raising(SystemExit(3))}, "Bad.update_state: FILE: SystemExit: 3"),
    ],
)
async def test_what_goes_wrong_is_a_recorded_result(tokenizer, warned, attributes, failure):
    bad = type("Bad", (Counting,), attributes)
    result = await played(
        tokenizer, ScriptedClient(tokenizer, lambda *_: "x"), source(bad()), size=2
    )
    assert re.sub(rf"{__file__}, line \d+", "FILE", result.failure) == failure
    assert len([line for line in warned if "exc_info" in line]) == ("FILE" in failure), (
        "one traceback for all"
    )


async def test_a_blocking_generate_on_the_loop_is_refused(tokenizer):
    class Wrong(CountingItself):
        async def step(self, state):
            self.inference.generate([state.prompt])

    result = await played(
        tokenizer, ScriptedClient(tokenizer, lambda *_: "x"), source(Wrong()), size=1
    )
    assert "await agenerate()" in result.failure


async def test_an_opening_that_is_not_the_groups_is_asked_for_again(tokenizer):
    class Random(Counting):
        numbers = iter(range(99))

        def build_prompt(self, state):
            return f"Number {next(self.numbers)}:"

    client = ScriptedClient(
        tokenizer, lambda request, _: "own" if "/" in request.request_id else "group"
    )
    result = await played(tokenizer, client, source(Random()), task=1, size=2)
    assert tuple(each.text for each in result.trajectories) == ("own", "own")
    assert "Number 0:" not in {t.prompt for t in result.trajectories}
