"""Recurrent layers beside keys and values by tokens, and alone: a publish in mid-answer, little
memory, a step that raises, and the trainer's log-probabilities of what the engine sampled."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.config.training import LoraConfig
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts.layout import TokenBatch, share_prompts
from mlx_parallm.models.lora import adapter_layers, inject_lora, trainer_lora_layers
from scripts.generate_model_table import small_model
from tests.engine.cache.test_snapshots import GREEDY, prompt_of
from tests.engine.helpers import collect, naive_greedy, request, run, serve, short_segments
from tests.engine.test_recovery import PoisonedEmbedding

HYBRID = "qwen3_5"
BOTH = [HYBRID, "mamba"]
AGREEING = ["qwen3_5", "kimi_linear", "jamba", "mamba", "lfm2", "nemotron_h", "granitemoehybrid"]


def perturbed(model: nn.Module) -> nn.Module:
    """A copy with other weights."""
    other, keys = copy.deepcopy(model), iter(mx.random.split(mx.random.key(5), 500))
    changed = [
        (n, a + 0.1 * mx.random.normal(a.shape, key=next(keys)))
        for n, a in tree_flatten(other.parameters())
    ]
    other.load_weights(changed)
    return other


@pytest.mark.parametrize("name", BOTH)
def test_a_publish_in_mid_answer_of_a_group(name):
    """Three tokens by the old weights, the rest by the new ones over the old states; the next
    request continues from nothing that the old weights left."""
    with short_segments():
        served, prompt = serve(small_model(name)), prompt_of(30)
        other = perturbed(served.plain)
        served.engine.add(request("group", prompt, n=4, max_tokens=10, **GREEDY))
        for _ in range(3):
            served.engine.step()
        served.weights.publish_parameters(dict(tree_flatten(other.parameters())))
        choices = collect(served.engine)["group"].completions
        old = len([version for version in choices[0].policy_versions if version == 0])
        assert 0 < old < 10
        cache, inputs, wanted = make_prompt_cache(served.plain), prompt, []
        for model in [served.plain] * old + [other] * (10 - old):
            wanted.append(int(mx.argmax(model(mx.array([inputs]), cache=cache)[0, -1]).item()))
            inputs = wanted[-1:]
        assert wanted != naive_greedy(served.plain, prompt, 10, eos=None), (
            "the new weights answer otherwise"
        )
        for choice in choices:
            assert list(choice.token_ids) == wanted
            assert choice.policy_versions == (0,) * old + (1,) * (10 - old)
        before = served.engine.counters.prefill_tokens
        again = run(served.engine, [request("again", prompt, max_tokens=10, **GREEDY)])[
            "again"
        ].completions[0]
        assert served.engine.counters.prefill_tokens - before == 30
        assert list(again.token_ids) == naive_greedy(other, prompt, 10, eos=None)


@pytest.mark.parametrize("ahead", [False, True])
def test_little_memory_makes_requests_wait_and_changes_no_answer(ahead):
    """Room for about three of eight rows: the others wait, and continue where memory is given back."""
    with short_segments():
        probe = serve(small_model(HYBRID)).engine
        options = {"kv_cache_bytes": 120 * probe.cache.token_bytes(), "prefix_cache_bytes": 1 << 16}
        served = serve(
            small_model(HYBRID), max_rows=16, prefill_chunk=24, async_scheduling=ahead, **options
        )
        texts = [prompt_of(length, seed=length) for length in (25, 3, 30, 1, 17, 25, 9)]
        texts[5] = [*texts[0][:20], *texts[5][:5]]  # begins as the first one does
        for i, text in enumerate(texts):
            served.engine.add(
                request(f"r{i}", text, n=1 + (i == 4), max_tokens=8 + i % 3, **GREEDY)
            )
        outputs, waited, together = {}, 0, 0
        while served.engine.has_work:
            for event in served.engine.step():
                if (output := getattr(event, "output", None)) is not None:
                    outputs[event.request_id] = output
            waited = max(waited, len(served.engine.scheduler.waiting))
            together = max(together, len(served.engine.scheduler.rows))
            assert served.engine.scheduler.reserved <= 120
            served.engine.check_integrity()
        assert waited >= 4 and 2 <= together < 8
        for i, text in enumerate(texts):
            for choice in outputs[f"r{i}"].completions:
                assert list(choice.token_ids) == naive_greedy(
                    served.plain, text, 8 + i % 3, eos=None
                ), f"prompt {i}"


@pytest.mark.parametrize("name", BOTH)
async def test_rows_are_built_again_after_a_step_that_raised(name):
    """The answers of the others, among them a group's, are what they would have been."""
    model = small_model(name)
    served = serve(model, vocab_size=128, max_rows=16, prefill_chunk=32)
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 40)]
    wanted = [naive_greedy(served.plain, prompt, 24, eos=None) for prompt in prompts]
    poison = max(set(range(60, 128)) - {token for tokens in wanted for token in tokens})
    path, embedding = next((p, m) for p, m in model.named_modules() if type(m) is nn.Embedding)
    model.update_modules(nested(path, PoisonedEmbedding(embedding, poison)))
    thread = EngineThread(
        lambda: served.engine, ServedModels("org/base", adapter_versions=dict, version=lambda: 0)
    )
    thread.start()
    try:
        good = [
            request(f"r{i}", p, n=1 + i, max_tokens=24, **GREEDY) for i, p in enumerate(prompts)
        ]
        # three prefills, while the others answer
        bad = request("bad", [*prompt_of(90), poison, 4], max_tokens=9)
        *outputs, failed = await thread.client.generate_many([*good, bad])
        thread.client.call(lambda engine: engine.check_integrity()).result(10)
    finally:
        thread.stop()
    assert (
        failed.completions[0].finish_reason == "error"
        and "the model broke" in failed.completions[0].error
    )
    for output, tokens in zip(outputs, wanted, strict=True):
        for choice in output.completions:
            assert list(choice.token_ids) == tokens


def nested(path: str, module: nn.Module) -> dict:
    *parts, last = path.split(".")
    tree = {last: module}
    for part in reversed(parts):
        tree = {part: tree}
    return tree


@pytest.mark.parametrize("name", AGREEING)
def test_the_trainers_log_probabilities_of_what_the_engine_sampled(name):
    """Under a strong adapter: a group of three answers, two ragged prompts, and a second turn
    that continues from a snapshot. The trainer computes the group's prompt once where it can."""
    with short_segments():
        model = small_model(name)
        policy = copy.deepcopy(model)
        policy.freeze()
        inject_lora(policy, LoraConfig(rank=4, alpha=8.0))
        mx.random.seed(3)
        for layer in trainer_lora_layers(policy).values():
            layer.lora_b = 0.1 * mx.random.normal(layer.lora_b.shape)
        mx.eval(policy.parameters())
        served = serve(model, policy="policy", vocab_size=128, prefill_chunk=16)
        served.weights.add_adapter("policy", adapter_layers(policy))
        params = {
            "temperature": 4.0,
            "max_tokens": 12,
            "ignore_eos": True,
            "seed": 1,
            "adapter": "policy",
        }
        prompts = [prompt_of(20), prompt_of(33, seed=1), prompt_of(5, seed=2)]
        requests = [
            request(f"r{i}", p, n=3 if i == 0 else 1, **params) for i, p in enumerate(prompts)
        ]
        outputs = run(served.engine, requests)
        texts = [(p, c) for i, p in enumerate(prompts) for c in outputs[f"r{i}"].completions]
        turn = [*prompts[1], *texts[3][1].token_ids, 7, 8]
        before = served.engine.counters.prefill_tokens
        texts.append(
            (turn, run(served.engine, [request("turn", turn, **params)])["turn"].completions[0])
        )
        assert served.engine.counters.prefill_tokens - before == 3, "it continued from the snapshot"
    width = max(len(prompt) + 12 for prompt, _ in texts)
    rows = np.zeros((len(texts), width), np.int32)
    scored = np.zeros(rows.shape, bool)
    for row, (prompt, choice) in enumerate(texts):
        rows[row, : len(prompt) + 12] = [*prompt, *choice.token_ids]
        scored[row, len(prompt) - 1 : len(prompt) + 11] = True
    positions = np.flatnonzero(scored).astype(np.int32)
    targets = np.roll(rows, -1, axis=1).reshape(-1)[positions]
    tokens = [mx.array(array) for array in (rows, positions, targets)]
    parts = BlockwiseModel(policy.train(), blocks_per_eval=1)
    assert parts.shares_prompts
    logprobs, _ = parts.score(TokenBatch(*tokens, 4.0, share_prompts(rows, positions)))
    sampled = np.array([logprob for _, choice in texts for logprob in choice.logprobs])
    assert np.abs(np.array(logprobs) - sampled).max() <= 1e-4
    assert len(set(targets.tolist())) > 15 and sampled.std() > 0.1
