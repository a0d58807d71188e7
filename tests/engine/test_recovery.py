"""One request on which the model raises: it fails, alone; the others' answers are what they
would have been."""

import asyncio
import re
from collections.abc import Iterator

import httpx
import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from tests.engine.helpers import (
    Served,
    naive_greedy,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    serve,
    until,
)
from tests.server.serving import running_server

POISON = 295  # none of the good answers has it
GOOD = [[token % 250 for token in prompt] for prompt in ragged_prompts(7, seed=4)]


class PoisonedEmbedding(nn.Module):
    """Stands in the module tree; raises when the token `poison` is in the batch, or always once
    it is `broken`."""

    def __init__(self, inner: nn.Module, poison: int = POISON) -> None:
        super().__init__()
        self.inner = inner
        self.poison = poison
        self.broken = False

    def __call__(self, tokens: mx.array) -> mx.array:
        if self.broken or self.poison in mx.flatten(tokens).tolist():
            raise RuntimeError("the model broke")
        return self.inner(tokens)

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self.inner.as_linear(hidden)


@pytest.fixture
def served() -> Served:
    """The tree that serves is poisoned; `plain`, the twin's, is not."""
    model = qwen3_model()
    served = serve(model, max_rows=16, prefill_chunk=32)
    model.model.embed_tokens = PoisonedEmbedding(model.model.embed_tokens)
    return served


@pytest.fixture
def thread(served: Served) -> Iterator[EngineThread]:
    models = ServedModels("org/base", adapter_versions=dict, version=lambda: 0)
    thread = EngineThread(lambda: served.engine, models)
    thread.start()
    yield thread
    thread.stop()


def good_requests(**params):
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | params
    return [request(f"good{i}", prompt, **params) for i, prompt in enumerate(GOOD)]


POISONED = {
    "in a prompt that is read": [1, 2, POISON, 3],
    "at a prompt's end": [1, 2, POISON],
    "alone": [POISON],
}


@pytest.mark.parametrize("prompt", POISONED.values(), ids=POISONED.keys())
async def test_the_others_answers_are_unharmed(served, thread, prompt):
    bad = request("bad", prompt, max_tokens=9)
    *outputs, failed = await thread.client.generate_many([*good_requests(), bad])
    assert (
        failed.completions[0].finish_reason == "error"
        and "the model broke" in failed.completions[0].error
    )
    for output in outputs:
        expected = naive_greedy(served.plain, list(output.prompt_token_ids), 40, eos=None)
        assert list(output.completions[0].token_ids) == expected and len(set(expected)) > 1
    assert len({token for output in outputs for token in output.completions[0].token_ids}) >= 20
    stats = thread.stats()
    assert stats.alive and (stats.requests_failed, stats.requests_finished) == (1, len(GOOD))
    thread.client.call(lambda engine: engine.check_integrity()).result(10)
    again = await thread.client.generate_many(good_requests())
    assert [output.completions[0].token_ids for output in again] == [
        o.completions[0].token_ids for o in outputs
    ]


async def test_a_failure_in_mid_stream_repeats_and_skips_nothing(served, thread):
    """The bad one samples its poison after some steps, beside streams and under an adapter of
    its own."""
    served.weights.add_adapter("a", random_adapter(served, 1))

    async def streamed(item):
        deltas = [delta async for delta in thread.client.stream(item)]
        return [token for delta in deltas for token in delta.token_ids], deltas[-1]

    # A stronger bias for the first twelve tokens, each taken once under the penalty: then comes the
    # poison.
    bias = {POISON: 100.0} | {200 + i: 101.9 for i in range(12)}
    params = {"logit_bias": bias, "frequency_penalty": 2.0, "max_tokens": 30, "temperature": 0.0}
    tasks = [asyncio.create_task(streamed(item)) for item in good_requests()]
    tasks.append(asyncio.create_task(streamed(request("bad", [5, 6], adapter="a", **params))))
    *results, (bad_tokens, last) = [await task for task in tasks]
    assert len(bad_tokens) > 5 and bad_tokens.index(POISON) == len(bad_tokens) - 1
    assert last.finish_reason == "error" and "the model broke" in last.error
    for prompt, (tokens, final) in zip(GOOD, results, strict=True):
        assert (
            tokens == naive_greedy(served.plain, prompt, 40, eos=None)
            and final.finish_reason == "length"
        )


async def test_any_number_of_bad_requests_does_not_end_the_engine(served, thread):
    steady = asyncio.create_task(thread.client.generate(good_requests(max_tokens=150)[0]))
    for number in range(6):
        output = await thread.client.generate(
            request(f"bad{number}", [POISON, number], max_tokens=3)
        )
        assert output.completions[0].finish_reason == "error"
    expected = naive_greedy(served.plain, GOOD[0], 150, eos=None)
    assert list((await steady).completions[0].token_ids) == expected
    for number in range(4):  # and with nothing else to do
        await thread.client.generate(request(f"lone{number}", [POISON, number], max_tokens=3))
    assert thread.stats().alive


async def test_a_text_that_cannot_be_scored_fails_alone(served, thread):
    running = asyncio.create_task(thread.client.generate(good_requests()[0]))
    scored = await thread.client.generate(
        request("s", (1, POISON, 2, 3), prompt_logprobs=0, max_tokens=0)
    )
    assert scored.completions[0].finish_reason == "error"
    assert re.match(r"the text cannot be scored: .*the model broke", scored.completions[0].error)
    output = await running
    assert list(output.completions[0].token_ids) == naive_greedy(
        served.plain, GOOD[0], 40, eos=None
    )
    assert thread.stats().alive


async def test_over_http_the_bad_one_is_a_500_the_others_end_and_health_is_honest(
    served, thread, tiny_tokenizer
):
    def body(prompt):
        return {
            "model": "default",
            "prompt": prompt,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    with running_server(thread.client, tiny_tokenizer) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            prompts = [*GOOD, [1, 2, POISON]]
            *answers, failed = await asyncio.gather(
                *[http.post("/v1/completions", json=body(p)) for p in prompts]
            )
            health = await http.get("/health")
            assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
            assert "the model broke" in failed.json()["error"]["message"]
            for prompt, answer in zip(GOOD, answers, strict=True):
                ids = answer.json()["choices"][0]["token_ids"]
                assert answer.status_code == 200 and ids == naive_greedy(
                    served.plain, prompt, 40, eos=None
                )
            assert (health.status_code, health.json()["status"]) == (200, "ok")
            broken = served.engine._runner.forward.model.model.embed_tokens
            thread.client.call(lambda engine: setattr(broken, "broken", True)).result(9)
            assert (await http.post("/v1/completions", json=body([1, 2]))).status_code in (500, 503)
            await until(lambda: not thread.stats().alive)
            assert "the model broke" in thread.stats().error
            health = await http.get("/health")
            assert health.status_code == 503 and "the model broke" in health.json()["reason"]
