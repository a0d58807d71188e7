"""The environments against the real engine thread and the shipped tiny model."""

import asyncio
import random
import re
import time

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.evaluation import EvaluationConfig
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rl_training.evaluation.evaluate import draw_problems, evaluate
from mlx_parallm.types import Request, RolloutGroup, SamplingParams

WAIT_S = 60.0
LENGTH = 128


def collect(managed, client, sources, count, **options):
    manager, inbox = managed(client, sources=sources, seed=3, **options)
    manager.request_groups(count)
    groups = inbox.wait(groups=count)[:count]
    manager.stop()
    assert inbox.failures == []
    return groups


def sources(*names, **fields):
    fields = {"group_size": 4, "max_tokens": 16} | fields
    return build_sources(
        [EnvironmentConfig(kind="tasks", name=name, **fields) for name in names], seed=3
    )


def agrees(client, tokenizer, group):
    """The engine's own scores of the sequence are the log-probabilities that travelled with the
    rollout."""
    for number, rollout in enumerate(group.rollouts):
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        asked = Request(f"score-{group.group_id}-{number}", tuple(rollout.tokens), params)
        scored = asyncio.run(client.generate(asked)).prompt_logprobs
        for position, sampled in enumerate(rollout.mask):
            if sampled:
                assert rollout.logprobs[position] == pytest.approx(
                    scored.logprobs[position], abs=1e-4
                )


def test_rollouts_are_token_exact(tiny_engine, tiny_tokenizer, managed):
    before = tiny_engine.client.stats()
    groups = collect(managed, tiny_engine.client, sources("sum", "sort"), 4)
    after = tiny_engine.client.stats()
    prompts = [next(i for i, bit in enumerate(group.rollouts[0].mask) if bit) for group in groups]
    # once for each group of four
    assert after.prefill_tokens - before.prefill_tokens <= sum(prompts)
    assert {group.environment for group in groups} == {"sum", "sort"}
    for group in groups:
        assert len(group.rollouts) == 4
        assert all(rollout.stop_reason in ("stop", "length") for rollout in group.rollouts)
        agrees(tiny_engine.client, tiny_tokenizer, group)


def test_the_same_seed_samples_the_same_groups_in_any_mode(tiny_engine, managed):
    def tokens(**options):
        groups = collect(managed, tiny_engine.client, sources("sum", "reverse"), 6, **options)
        return [
            (group.group_id, [rollout.tokens for rollout in group.rollouts]) for group in groups
        ]

    fixed = tokens(fixed_order=True)
    assert fixed == tokens(fixed_order=True)
    assert sorted(fixed) == sorted(tokens(num_parallel=8))  # the order is each environment's
    assert any(len(set(rollouts)) > 1 for _, rollouts in fixed)  # sampled, not greedy


def test_stop_frees_the_engine(tiny_engine, tiny_tokenizer):
    client = tiny_engine.client
    aborted = client.stats().requests_aborted
    manager = RolloutManager(
        sources("sum", max_tokens=120, stop=("never said",)),
        RolloutConfig(
            seed=3, temperature=50.0, max_token_length=200
        ),  # far from any EOS: every answer runs to its length
        client=client,
        tokenizer=tiny_tokenizer,
        sink=lambda group: None,
    )
    manager.start()
    manager.request_groups(8)
    deadline = time.monotonic() + WAIT_S
    while client.stats().running == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    manager.stop()
    assert client.wait_idle(WAIT_S)
    stats = client.stats()
    assert stats.requests_aborted > aborted
    assert (stats.running, stats.waiting) == (0, 0)


def test_heldout_accuracy_of_the_shipped_model(tiny_engine, tiny_tokenizer):
    """It half-knows its tasks (docs/models.md#the-tiny-model): some answers right, some wrong, and the same
    ones again."""

    def run():
        problems = draw_problems(sources("sum", "count"), 24)
        policy = EpisodePolicy(
            tiny_engine.client, tiny_tokenizer, temperature=0.0, max_token_length=LENGTH
        )
        return asyncio.run(evaluate(policy, problems, EvaluationConfig()))

    first = run()
    answers = [problem.greedy for evaluation in first for problem in evaluation.problems]
    assert len(answers) == 48
    assert 0.1 < sum(answer.reward for answer in answers) / 48 < 0.95
    assert all(answer.error is None for answer in answers)
    assert first == run()


class Watched:
    """The engine's client; keeps what the engine was asked and what it answered."""

    def __init__(self, client):
        self._client, self.seen = client, {}

    @property
    def max_model_len(self):
        return self._client.max_model_len

    async def generate(self, request):
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests):
        outputs = await self._client.generate_many(requests)
        self.seen |= {
            request.request_id: (request, output)
            for request, output in zip(requests, outputs, strict=True)
        }
        return outputs


class Calculator(BaseEnvironment):
    """The model writes; every turn of it is answered by a tool, in text, until it has had enough
    turns."""

    def reset(self, seed=0):
        rng = random.Random(seed)
        return State(
            prompt=f"Sum: {rng.randrange(90)}+{rng.randrange(9)}\n",
            metadata={"turns": rng.randrange(1, 6)},
        )

    def build_prompt(self, state):
        return state.prompt + "".join(
            f"{turn['response']}\nTool: {len(turn['response'])}\n" for turn in state.history
        )

    def is_terminal(self, state):
        return state.step_count >= state.metadata["turns"]


class CalculatorItself(Calculator):
    """The same in its own step, which asks another model in between."""

    def __init__(self, inference, other):
        super().__init__(inference)
        self.other = other

    def step(self, state):
        said = self.inference.generate([self.build_prompt(state)], max_new_tokens=6)[0]
        assert isinstance(self.other.generate(["Sort: dcba"], max_new_tokens=4)[0], str)
        state.add_turn("", said)
        return state


@pytest.fixture
def engines(tiny_engine, tiny_tokenizer):
    """What is trained, watched, and another module over the same engine."""
    watched = Watched(tiny_engine.client)
    modules = [
        InferenceModule.over(client, tiny_tokenizer) for client in (watched, tiny_engine.client)
    ]
    yield watched, *modules
    for module in modules:
        module.close()


@pytest.mark.parametrize("kind", [Calculator, CalculatorItself])
def test_the_sequence_is_what_the_engine_saw_and_the_mask_what_it_sampled(
    tiny_engine, tiny_tokenizer, engines, kind
):
    watched, inference, other = engines
    environment = kind(inference) if kind is Calculator else kind(inference, other)
    config = RolloutConfig(
        num_parallel=32, group_size=2, max_tokens=6, temperature=1.0, max_token_length=256
    )
    with RolloutManager(environment, config) as manager:
        trajectories = manager.collect_rollouts(12)
    assert [t.error for t in trajectories] == [None] * 12
    assert len({t.step_count for t in trajectories}) > 2
    for number, trajectory in enumerate(trajectories):
        rollout, member = trajectory.rollout, number % 2
        assert rollout.earlier == ()
        position, given = 0, []
        for turn in range(trajectory.step_count):
            together = kind is Calculator and turn == 0
            name = trajectory.group_id if together else f"{trajectory.group_id}/{member}/{turn}"
            request, output = watched.seen[name]
            completion = output.completions[member if together else 0]
            asked, sampled = request.prompt_token_ids, completion.token_ids
            assert asked == rollout.tokens[: len(asked)]
            given += [0] * (len(asked) - position) + [1] * len(sampled)
            position = len(asked) + len(sampled)
            assert sampled == rollout.tokens[len(asked) : position]
            assert completion.logprobs == rollout.logprobs[len(asked) : position]
            assert trajectory.history[turn].response == completion.text
        assert (list(rollout.mask), position) == (given, len(rollout.tokens))
        text = tiny_tokenizer.decode(rollout.tokens, skip_special_tokens=False)
        assert len(re.findall(r"Tool: \d+\n", text)) >= trajectory.step_count - 1
    agrees(
        tiny_engine.client,
        tiny_tokenizer,
        RolloutGroup("g", "e", tuple(t.rollout for t in trajectories[:4])),
    )


def test_the_demonstration_and_the_example_run(capsys):
    from examples import custom_environment
    from mlx_parallm.faces.primitives import environment

    environment.main()
    shown = capsys.readouterr().out
    assert "'Sum: 47+38'" in shown and "12 trajectories, 2.0 steps" in shown
    custom_environment.main()
    assert "turns on average" in capsys.readouterr().out
    reset = custom_environment.Retry(highest=9).reset
    train, heldout = (
        {str(reset(seed, split)) for seed in range(200)} for split in ("train", "heldout")
    )
    assert train.isdisjoint(heldout) and heldout
