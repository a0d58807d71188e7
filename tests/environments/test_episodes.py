import asyncio
import dataclasses
import re

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments import turn_policy
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.state import BaseEnvironment, State, StateSource
from mlx_parallm.environments.trajectory import SequenceRecorder
from mlx_parallm.environments.turn_policy import EpisodePolicy, TurnRequest
from mlx_parallm.errors import DeviceFaultError, EngineUnavailableError, RolloutRejectedError
from mlx_parallm.execution.thinking import thinking_after
from mlx_parallm.rewards.base import exact_match
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.types import Structure
from tests.environments.scripted_client import ScriptedClient, finished
from tests.environments.templates import QWEN3, with_template
from tests.server.scripted_answers import HERMES_TEMPLATE, tokenizer_with
from tests.soak.faulty_evaluations import TEXTS, raise_as_mlx


class Echo(EnvironmentSource):
    """Task i asks for the number i."""

    def task(self, index, split="train"):
        messages = self.open_with(({"role": "user", "content": f"Say {index}"},))
        return Task(f"say/{index}", messages, exact_match(str(index)), str(index))


class Persistent(BaseEnvironment):
    """Asks again, once, when the answer is wrong."""

    def reset(self, index=0):
        return State([{"role": "user", "content": f"Say {index}"}], metadata={"answer": str(index)})

    def update_state(self, state, response):
        state = super().update_state(state, response)
        state.done = state.step_count == 2 or response == "3"
        answered = {"role": "assistant", "content": response}
        state.prompt = [*state.prompt, answered, {"role": "user", "content": "Again."}]
        return state


def two_turns():
    config = EnvironmentConfig(kind="echo", name="echo", rewards=("builtin:answer_match",))
    rewards = RewardFunctions.from_config(config, columns=None)
    return StateSource(config, Persistent, seed=0, rewards=rewards)


def source(kind=Echo, **fields):
    return kind(EnvironmentConfig(kind="echo", name="echo", **fields), seed=0)


def plan(built, task=3, size=2):
    return GroupPlan(f"echo-0-{task}", built, task, size, seed=11, index=task)


def runner(tokenizer, client, **options):
    return EpisodeRunner(
        EpisodePolicy(client, tokenizer, **{"temperature": 1.0, "max_token_length": 256, **options})
    )


async def test_a_group_is_one_request_of_n_and_keeps_every_token(tokenizer):
    client = ScriptedClient(tokenizer, lambda request, choice: ["3", "4"][choice])
    client.version = 6
    built = source(max_tokens=9, stop=("\n",), system_prompt="Be brief.")
    [result] = await runner(tokenizer, client, adapter="policy", temperature=0.8).run([plan(built)])
    [request] = client.requests
    assert (request.params.n, request.params.seed, request.params.max_tokens) == (2, 11, 9)
    assert (request.params.stop, request.params.temperature, request.adapter) == (
        ("\n",),
        0.8,
        "policy",
    )
    assert not request.params.reshapes_distribution
    prompt = tuple(tokenizer.render_chat(built.task(3).messages))
    assert request.prompt_token_ids == prompt
    assert result.failure is None
    assert tuple(each.text for each in result.trajectories) == ("3", "4")
    group = result.group
    assert (group.group_id, group.environment, group.index) == ("echo-0-3", "echo", 3)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    for rollout in group.rollouts:
        sampled = len(rollout.tokens) - len(prompt)
        assert rollout.tokens[: len(prompt)] == prompt
        assert rollout.tokens[-1] in tokenizer.eos_token_ids
        assert rollout.mask == (0,) * len(prompt) + (1,) * sampled
        assert rollout.logprobs[: len(prompt)] == (0.0,) * len(prompt)
        assert all(logprob < 0 for logprob in rollout.logprobs[len(prompt) :])
        assert rollout.policy_versions[len(prompt) :] == (6,) * sampled
        assert (rollout.temperature, rollout.stop_reason) == (0.8, "stop")
    assert group.sampled_versions == (6,) * sum(
        rollout.sampled_tokens for rollout in group.rollouts
    )


@pytest.mark.parametrize("thinks", [True, False])
async def test_stop_strings_count_behind_the_reasoning_as_in_serving(tmp_path, thinks):
    tokens = {"<think>": False, "</think>": False}
    tokenizer = tokenizer_with(tmp_path, tokens, chat_template=HERMES_TEMPLATE)
    assert tokenizer.think_markers == ("<think>", "</think>")
    client = ScriptedClient(tokenizer, lambda *_: "3")
    options = {"template_kwargs": {"enable_thinking": thinks}}
    await runner(tokenizer, client, **options).run([plan(source(stop=("Question:",)))])
    start = "" if thinks else "<think>"  # the prompt has opened it, or may not
    assert client.requests[0].params.reasoning == (start, "</think>")
    await runner(tokenizer, client, **options).run([plan(source())])
    assert client.requests[1].params.reasoning is None  # nothing to look for
    await runner(tokenizer, client, **options).run([plan(source(thinking_token_budget=5))])
    assert client.requests[2].params.thinking_token_budget == 5


async def test_the_tokenizer_is_asked_for_reasoning_by_one_thread_at_a_time(tmp_path, monkeypatch):
    tokens = {"<think>": False, "</think>": False}
    tokenizer = tokenizer_with(tmp_path, tokens, chat_template=HERMES_TEMPLATE)
    policy = EpisodePolicy(ScriptedClient(tokenizer, lambda *_: "3"), tokenizer, 1.0, 256)
    asked = []

    def noted(*arguments):
        asked.append(policy.tokenizer_lock.locked())
        return thinking_after(*arguments)

    monkeypatch.setattr(turn_policy, "thinking_after", noted)
    await EpisodeRunner(policy).run([plan(source(stop=("Question:",)))])
    assert asked and all(asked)


async def test_the_answer_never_makes_the_sequence_longer_than_allowed(tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "3")
    built = source(max_tokens=100)
    prompt = len(tokenizer.render_chat(built.task(3).messages))
    await runner(tokenizer, client, max_token_length=prompt + 4).run([plan(built)])
    assert client.requests[0].params.max_tokens == 4
    [result] = await runner(tokenizer, client, max_token_length=prompt).run([plan(built)])
    assert result.failure == f"the prompt has {prompt} tokens, at most {prompt} are allowed"
    assert len(client.requests) == 1
    client.max_model_len = prompt + 2
    await runner(tokenizer, client).run([plan(built)])
    assert client.requests[1].params.max_tokens == 2


class Counting:
    """A tokenizer that says how many characters it was asked to look at."""

    def __init__(self, tokenizer):
        self._tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **options):
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)

    def render_chat(self, messages, **options):
        self.characters += sum(len(message["content"]) for message in messages)
        return self._tokenizer.render_chat(messages, **options)


@pytest.mark.parametrize(
    ("prompt", "failure"),
    [
        ("a " * 10**6, "the prompt has 2000000 characters, and at most 128 tokens are allowed"),
        ([{"role": "user", "content": "a " * 10**6}], "has 2000000 characters"),
        ([{"role": "user", "content": ""}] * 3000, "has 3000 messages"),
    ],
)
async def test_a_prompt_that_cannot_fit_is_not_tokenised(tokenizer, prompt, failure):
    """20 million tokens were made, and 6.5 GB taken, to find that out."""
    counting = Counting(tokenizer)
    policy = EpisodePolicy(
        ScriptedClient(tokenizer, lambda *_: "3"), counting, 1.0, max_token_length=128
    )
    turn = TurnRequest("a", prompt, source().config, 0, {}, {})
    for ask in (lambda: policy.open_group(turn, 2), lambda: policy.ids(prompt, turn.config, {})):
        with pytest.raises(RolloutRejectedError, match=failure):
            ask()
    with pytest.raises(RolloutRejectedError, match=failure):
        await policy.sample(turn, [], None)
    assert await policy.sample(turn, [SequenceRecorder((1,))], None) is None, (
        "in a later turn there is no room left"
    )
    assert counting.characters == 0


async def test_several_turns_are_token_exact(tokenizer):
    def answer(request, choice):
        return "3" if "/" in request.request_id or choice == 1 else "4"

    client = ScriptedClient(tokenizer, answer)
    [result] = await runner(tokenizer, client).run([plan(two_turns())])
    long, short = result.group.rollouts
    assert (long.reward, short.reward) == (1.0, 1.0)
    first, second = client.requests
    assert second.params.n == 1
    assert second.prompt_token_ids == long.tokens[: len(second.prompt_token_ids)]
    assert second.params.seed not in (None, first.params.seed)
    text = tokenizer.render_chat_text(
        [
            {"role": "user", "content": "Say 3"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "Again."},
        ]
    )
    assert tokenizer.decode(second.prompt_token_ids, skip_special_tokens=False) == text
    spans = "".join(map(str, long.mask)).strip("0").split("0")
    assert [len(span) for span in spans if span] == [2, 2]  # "4" EOS, then "3" EOS
    assert short.sampled_tokens == 2


async def test_a_template_that_rewrites_history_opens_another_segment():
    """Qwen3's leaves out earlier thinking: turn two is asked for after another text than turn
    one was sampled in. Both are kept as they were sampled, and nothing of turn one is sampled
    twice."""
    tokenizer = with_template(QWEN3)
    client = ScriptedClient(
        tokenizer, lambda request, _: "3" if "/" in request.request_id else "<think>Hm.</think>4"
    )
    [result] = await runner(tokenizer, client).run([plan(two_turns(), size=1)])
    [rollout] = result.group.rollouts
    [first], second = rollout.earlier, rollout
    assert client.requests[0].prompt_token_ids == first.tokens[: first.mask.index(1)]
    assert client.requests[1].prompt_token_ids == second.tokens[: second.mask.index(1)]
    shown = [
        tokenizer.decode(segment.tokens, skip_special_tokens=False) for segment in rollout.segments
    ]
    ask = "<|im_start|>user\nSay 3<|im_end|>\n<|im_start|>assistant\n"
    assert shown == [
        f"{ask}<think>Hm.</think>4<|im_end|>",
        f"{ask}4<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n3<|im_end|>",
    ]
    sampled = [
        tokenizer.decode(
            [t for t, m in zip(s.tokens, s.mask, strict=True) if m], skip_special_tokens=False
        )
        for s in rollout.segments
    ]
    assert sampled == ["<think>Hm.</think>4<|im_end|>", "3<|im_end|>"]
    assert (first.scores, second.reward) == ({}, 1.0)
    assert rollout.sampled_tokens == first.sampled_tokens + 2
    check_group(result.group, vocab_size=tokenizer.vocab_size, max_token_length=256)


@pytest.mark.parametrize("rewrites", [False, True])
async def test_an_episode_of_many_turns_ends_at_the_length_limit(tokenizer, rewrites):
    """Also where the next turn would begin another sequence."""
    tokenizer, text = (with_template(QWEN3), "<think>.</think>4") if rewrites else (tokenizer, "4")
    client = ScriptedClient(tokenizer, lambda *_: text)
    turns = [{"role": "user", "content": "Say 3"}, {"role": "assistant", "content": "4"}]
    longest = len(tokenizer.render_chat([*turns, {"role": "user", "content": "Again."}]))
    [result] = await runner(tokenizer, client, max_token_length=longest).run([plan(two_turns())])
    assert (result.failure, len(client.requests)) == (None, 1)
    for rollout in result.group.rollouts:
        assert (rollout.stop_reason, rollout.earlier) == ("length", ())
    assert client.requests[0].params.max_tokens == longest - len(
        client.requests[0].prompt_token_ids
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineUnavailableError("the engine is draining"), "the engine is draining"),
        (KeyError("slot"), "KeyError: 'slot'"),
        (TimeoutError(), "TimeoutError"),  # somebody else's, not the episode's limit
    ],
)
async def test_a_request_that_raises_or_ends_in_an_error_is_a_recorded_result(
    tokenizer, error, reason
):
    client = ScriptedClient(tokenizer, lambda *_: error)
    [result] = await runner(tokenizer, client).run([plan(source())])
    assert result.failure == reason
    assert result.group.rollouts == ()
    assert result.group.metadata["key"] == "say/3"
    broken = finished(1, "", [7], reason="error", error="NaN in the logits")
    client = ScriptedClient(tokenizer, lambda request, choice: broken if choice else "3")
    [result] = await runner(tokenizer, client).run([plan(source())])
    assert result.failure == "NaN in the logits"
    whole, half = result.group.rollouts
    assert (whole.error, half.error, half.sampled_tokens) == (None, "NaN in the logits", 1)


async def test_environment_and_reward_errors_are_recorded_results(tokenizer):
    def raises(error):
        def function(*_):
            raise error

        return function

    def rewarded(reward):
        return {
            "task": lambda self, index, split="train": dataclasses.replace(
                Echo.task(self, index), reward=reward
            )
        }

    client = ScriptedClient(tokenizer, lambda *_: "3")
    reasons = []
    for methods in (
        {"task": raises(RuntimeError("no more problems"))},
        {"task": lambda self, index, split="train": {"messages": []}},
        rewarded(raises(ZeroDivisionError("division by zero"))),
        rewarded(lambda responses: [1.0 for _ in responses]),
    ):
        [result] = await runner(tokenizer, client).run(
            [plan(source(type("BadTask", (Echo,), methods)))]
        )
        reasons.append((re.sub(r"line \d+", "line N", result.failure), len(result.group.rollouts)))
    assert reasons == [
        ("RuntimeError: no more problems", 0),
        ("BadTask.task returned {'messages': []}, not a Task", 0),
        ("reward: ZeroDivisionError: division by zero", 2),
        ('reward: the reward returned 1.0 for a trajectory; expected {"reward": number}', 2),
    ]


async def test_a_cancelled_run_ends_its_episodes(tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "3", gate=lambda request: None)
    task = asyncio.create_task(runner(tokenizer, client).run([plan(source())]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_aborts_the_request_and_is_a_recorded_result(tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "3", gate=lambda request: None)
    [result] = await runner(tokenizer, client).run([plan(source(timeout_s=0.02))])
    assert result.failure.endswith("timeout_s = 0.02 s")
    assert client.aborted == ["echo-0-3"]


async def test_a_slow_environment_times_out_on_its_own(tokenizer):
    class Slow(Echo):
        async def play(self, episode, task, max_steps):
            await super().play(episode, task, max_steps)
            await asyncio.Event().wait()

    client = ScriptedClient(tokenizer, lambda *_: "3")
    slow, quick = source(Slow, timeout_s=0.02), source()
    first, second = await runner(tokenizer, client).run([plan(slow), plan(quick, task=4)])
    assert first.failure.endswith("timeout_s = 0.02 s")
    assert second.failure is None


async def test_groups_are_submitted_atomically_in_order(tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "3")
    results = await runner(tokenizer, client).run([plan(source(), task=task) for task in (5, 3, 4)])
    assert client.calls == [["echo-0-5", "echo-0-3", "echo-0-4"]]
    assert [result.plan.task_index for result in results] == [5, 3, 4]


class Against(Echo):
    """Each episode asks an older policy and the base, then its own, for a number of two digits."""

    opens_together = False

    async def play(self, episode, task, max_steps):
        for name, adapter in (("older", ("policy@3",)), ("base", (None,)), ("same", ())):
            await episode.beside(name, *adapter).turn(task.opening)
        structure = Structure("regex", "[0-9]{2}")
        await episode.turn(task.opening, structure=structure)
        self.seats = {*getattr(self, "seats", ()), (episode.number, episode.group_size)}


async def test_other_players_of_a_game_are_asked_and_not_recorded(tokenizer):
    client = ScriptedClient(tokenizer, lambda request, choice: "3" if request.adapter else "base")
    built = source(Against)
    [result] = await runner(tokenizer, client, adapter="policy").run([plan(built)])
    assert result.failure is None and built.seats == {(0, 2), (1, 2)}
    asked = sorted((r.request_id, r.adapter, r.params.structure) for r in client.requests)
    pattern = Structure("regex", "[0-9]{2}")
    assert asked == [
        ("echo-0-3/0/0", "policy", pattern),
        ("echo-0-3/0/base/0/0", None, None),
        ("echo-0-3/0/older/0/0", "policy@3", None),
        ("echo-0-3/0/same/0/0", "policy", None),
        ("echo-0-3/1/0", "policy", pattern),
        ("echo-0-3/1/base/0/0", None, None),
        ("echo-0-3/1/older/0/0", "policy@3", None),
        ("echo-0-3/1/same/0/0", "policy", None),
    ]
    assert len({request.params.seed for request in client.requests}) == 8
    assert [[turn.response for turn in t.history] for t in result.trajectories] == [["3"], ["3"]]


async def test_a_fault_of_the_gpu_is_no_episodes_failure(tokenizer):
    """An expert that acts in an episode may meet it: all that the GPU computes may be wrong."""

    class Acts(Echo):
        async def play(self, episode, task, max_steps):
            raise_as_mlx(TEXTS[1])

    client = ScriptedClient(tokenizer, lambda *_: "3")
    with pytest.raises(DeviceFaultError):
        await runner(tokenizer, client).run([plan(source(Acts))])
