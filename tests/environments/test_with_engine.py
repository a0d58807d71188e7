"""The environments against the real engine thread and the shipped tiny model."""

import asyncio
import threading
import time

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.evaluation import EvaluationConfig
from mlx_parallm.environments.base import Environment
from mlx_parallm.environments.episode import EpisodePolicy
from mlx_parallm.environments.evaluate import draw_problems, evaluate
from mlx_parallm.environments.kinds.tasks import TasksSource
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.types import Request, SamplingParams

WAIT_S = 60.0
LENGTH = 128


class OneMoreTry(Environment):
    """Answers the first turn whatever it is, and ends after the second."""

    def __init__(self):
        self.turns = 0

    async def step(self, text):
        self.turns += 1
        return ({"role": "user", "content": "Add 1 and 10."},) if self.turns == 1 else None


class TwoTurns(TasksSource):
    def environment(self, task):
        return OneMoreTry()


def collect(client, tokenizer, sources, count, **options):
    groups, failures, enough = [], [], threading.Event()

    def sink(group):
        groups.append(group)
        if len(groups) == count:
            enough.set()

    num_parallel = options.pop("num_parallel", 64)
    config = RolloutConfig(seed=3, max_token_length=LENGTH, num_parallel=num_parallel)
    manager = RolloutManager(
        sources,
        config,
        client=client,
        tokenizer=tokenizer,
        sink=sink,
        on_failure=lambda group, reason: failures.append(reason),
        **options,
    )
    manager.start()
    manager.request_groups(count)
    arrived = enough.wait(WAIT_S)
    manager.stop()
    assert arrived, (failures, manager.health())
    assert failures == []
    return groups


def sources(*names, kind=None, **fields):
    fields = {"group_size": 4, "max_tokens": 16} | fields
    configs = [EnvironmentConfig(kind="tasks", name=name, **fields) for name in names]
    return [kind(config, seed=3) for config in configs] if kind else build_sources(configs, seed=3)


def agrees(client, tokenizer, group):
    """The engine's own scores of the sequence are the log-probabilities that travelled with the rollout."""
    for number, rollout in enumerate(group.rollouts):
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        asked = Request(f"score-{group.group_id}-{number}", tuple(rollout.tokens), params)
        scored = asyncio.run(client.generate(asked)).prompt_logprobs
        for position, sampled in enumerate(rollout.mask):
            if sampled:
                assert rollout.logprobs[position] == pytest.approx(scored.logprobs[position], abs=1e-4)


def test_rollouts_are_token_exact(tiny_engine, tiny_tokenizer):
    before = tiny_engine.client.stats()
    groups = collect(tiny_engine.client, tiny_tokenizer, sources("sum", "sort"), 4)
    after = tiny_engine.client.stats()
    prompts = [next(i for i, bit in enumerate(group.rollouts[0].mask) if bit) for group in groups]
    assert after.prefill_tokens - before.prefill_tokens <= sum(prompts)  # once for each group of four
    assert {group.environment for group in groups} == {"sum", "sort"}
    for group in groups:
        assert len(group.rollouts) == 4
        assert all(rollout.stop_reason in ("stop", "length") for rollout in group.rollouts)
        agrees(tiny_engine.client, tiny_tokenizer, group)


def test_an_episode_of_two_turns_is_token_exact(tiny_engine, tiny_tokenizer):
    [group] = collect(tiny_engine.client, tiny_tokenizer, sources("sum", kind=TwoTurns), 1)
    spans = ["".join(map(str, rollout.mask)).strip("0").split("0") for rollout in group.rollouts]
    assert any(len([span for span in parts if span]) == 2 for parts in spans)
    agrees(tiny_engine.client, tiny_tokenizer, group)


def test_the_same_seed_samples_the_same_groups_in_any_mode(tiny_engine, tiny_tokenizer):
    def tokens(**options):
        groups = collect(tiny_engine.client, tiny_tokenizer, sources("sum", "reverse"), 6, **options)
        return [(group.group_id, [rollout.tokens for rollout in group.rollouts]) for group in groups]

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
    """It half-knows its tasks (docs/tiny_model.md): some answers right, some wrong, and the same ones again."""

    def run():
        problems = draw_problems(sources("sum", "count"), 24)
        policy = EpisodePolicy(tiny_engine.client, tiny_tokenizer, temperature=0.0, max_token_length=LENGTH)
        return asyncio.run(evaluate(policy, problems, EvaluationConfig()))

    first = run()
    answers = [problem.greedy for evaluation in first for problem in evaluation.problems]
    assert len(answers) == 48
    assert 0.1 < sum(answer.reward for answer in answers) / 48 < 0.95
    assert all(answer.error is None for answer in answers)
    assert first == run()
