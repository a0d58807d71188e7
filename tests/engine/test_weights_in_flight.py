"""Adapters side by side in one batch, publishes while sequences run, and rows that go wrong
alone."""

import math
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_parallm.engine.cache.token_cache import TokenCache
from mlx_parallm.models.adapters.adapter import LoraPair
from tests.engine.helpers import (
    EOS,
    VOCAB,
    Served,
    collect,
    naive_greedy,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
)

HEAD = "lm_head"


def forcing_adapter(served: Served, token: int) -> dict[str, LoraPair]:
    """Raises one token's logit with the sign of a feature that the final norm makes positive or
    negative: by |x|."""
    in_features = served.layers[HEAD].weight.shape[1]
    # A reads nothing but the sum of what is there; two columns of opposite sign force the token
    # either way.
    a = mx.concatenate([mx.ones((in_features, 1)), -mx.ones((in_features, 1))], axis=1)
    b = mx.zeros((2, VOCAB))
    b[0, token] = 1000.0
    mx.eval(a, b)
    return {HEAD: LoraPair(a, b, 1.0)}


def constant_model():
    """A Qwen3 whose final hidden state sums to a positive number: `forcing_adapter` then always
    wins."""
    model = qwen3_model()
    for layer in model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 0.01
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.01
    model.model.embed_tokens.weight = mx.abs(model.model.embed_tokens.weight) + 0.5
    mx.eval(model.parameters())
    return model


def test_a_published_adapter_is_obeyed_by_the_next_token_under_the_next_version():
    served = serve(constant_model(), policy="policy")
    served.weights.publish_adapter(forcing_adapter(served, 65))
    served.engine.add(request("r", [1, 2, 3], adapter="policy", max_tokens=9))
    served.engine.add(request("base", [1, 2, 3], temperature=0.0, max_tokens=9, ignore_eos=True))
    for _ in range(4):
        served.engine.step()
    report = served.weights.publish_adapter(forcing_adapter(served, 66))
    outputs = collect(served.engine)
    completion = outputs["r"].completions[0]
    assert completion.token_ids == (65,) * 4 + (66,) * 5
    assert completion.policy_versions == (1,) * 4 + (2,) * 5
    assert report.version == 2
    base = outputs["base"].completions[0]
    assert list(base.token_ids) == naive_greedy(served.plain, [1, 2, 3], 9), "the base is untouched"


def test_a_replaced_adapter_of_the_same_name_shares_no_prefix():
    served = serve(qwen3_model())
    served.weights.add_adapter("a", random_adapter(served, 1))
    prompt = ragged_prompts(1, shortest=30, longest=30)[0]
    served.engine.add(request("old", prompt, adapter="a", max_tokens=8, ignore_eos=True))
    served.engine.step()
    served.weights.add_adapter("a", random_adapter(served, 2))
    run(served.engine, [request("new", prompt, adapter="a", max_tokens=2)])
    assert served.engine.counters.prefill_tokens == 60


def test_a_prefix_is_not_shared_across_a_publish():
    served = serve(qwen3_model(), policy="policy")
    served.weights.publish_adapter(random_adapter(served, 1))
    prompt = ragged_prompts(1, shortest=30, longest=30)[0]
    params = {"adapter": "policy", "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    served.engine.add(request("old", prompt, **params))
    served.engine.step()
    served.weights.publish_adapter(random_adapter(served, 2))
    outputs = run(served.engine, [request("new", prompt, **params)])
    assert served.engine.counters.prefill_tokens == 60
    alone = run(served.engine, [request("alone", prompt, **params)])["alone"]
    assert outputs["new"].completions[0].token_ids == alone.completions[0].token_ids
    assert outputs["old"].completions[0].token_ids != alone.completions[0].token_ids


@pytest.mark.parametrize("by_tokens", [True, False])
def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind(by_tokens):
    served = serve(qwen3_model(), max_rows=4, by_tokens=by_tokens)
    poison = {
        path: LoraPair(pair.a, pair.b * mx.nan, pair.scale)
        for path, pair in random_adapter(served, 1).items()
    }
    served.weights.add_adapter("nan", poison)
    prompts = ragged_prompts(12, shortest=5, longest=40)

    def make(i: int):
        return request(
            f"r{i}",
            prompts[i],
            adapter="nan" if i % 3 == 1 else None,
            temperature=0.0,
            max_tokens=9,
        )

    outputs = run(served.engine, [make(i) for i in range(12)])
    for i in range(12):
        completion = outputs[f"r{i}"].completions[0]
        if i % 3 == 1:
            assert completion.finish_reason == "error" and "not finite" in completion.error
        else:
            assert list(completion.token_ids) == naive_greedy(served.plain, prompts[i], 9)
    assert served.engine.counters.requests_failed == 4
    arrays = arrays_of_rows(served.engine.cache)
    assert arrays and not any(mx.isnan(array).any().item() for array in arrays)


def arrays_of_rows(cache):
    parts = cache._pools.values() if isinstance(cache, TokenCache) else [cache]
    return [array for part in parts for array in part.state]


@pytest.mark.parametrize("by_tokens", [True, False])
def test_a_failed_step_fails_who_took_part_and_the_engine_goes_on(by_tokens):
    served = serve(qwen3_model(), max_rows=1, by_tokens=by_tokens)
    served.engine.add(request("hit", [1, 2, 3], max_tokens=50))
    served.engine.add(request("queued", [4, 5, 6], temperature=0.0, max_tokens=7))
    served.engine.step()
    served.engine.step()
    assert served.engine.scheduler.room.prefix_cache.tokens > 0
    cache = served.engine.cache
    if by_tokens:
        [pool] = cache.step_pools
        pool.layers[0][0] = pool.layers[0][0][:, :, :, :3]  # the next write does not fit
    else:
        cache.layers[0].keys = cache.layers[0].keys[:, :, :, :3]
    with pytest.raises(ValueError, match=r".*"):
        for _ in range(3):
            served.engine.step()
    events = served.engine.fail_active("out of luck")
    assert [(e.request_id, e.output.completions[0].error) for e in events] == [
        ("hit", "out of luck")
    ]
    assert served.engine.scheduler.room.prefix_cache.tokens == 0
    outputs = collect(served.engine)
    assert list(outputs["queued"].completions[0].token_ids) == naive_greedy(
        served.plain, [4, 5, 6], 7
    )
    served.engine.check_integrity()


def test_scores_equal_the_generated_logprobs_under_the_adapter():
    served = serve(qwen3_model(), prefill_chunk=16)
    served.weights.add_adapter("a", random_adapter(served, 1))
    prompt = ragged_prompts(1, shortest=40, longest=40)[0]
    completion = run(
        served.engine, [request("r", prompt, adapter="a", max_tokens=20, seed=2, ignore_eos=True)]
    )["r"]
    text = (*prompt, *completion.completions[0].token_ids)
    asked = request("s", text, adapter="a", prompt_logprobs=3, max_tokens=0)
    longer = request("longer", text, adapter="a", prompt_logprobs=3, max_tokens=2)
    others = [
        request(name, ids, prompt_logprobs=0, max_tokens=1)
        for name, ids in (("base", text), ("one", [EOS]))
    ]
    outputs = run(served.engine, [asked, longer, *others])
    result, base = outputs["s"].prompt_logprobs, outputs["base"].prompt_logprobs
    assert (
        len(result.logprobs) == 60 and result.logprobs[0] is None and result.top_logprobs[0] is None
    )
    assert result.logprobs[40:] == pytest.approx(completion.completions[0].logprobs, abs=1e-4)
    assert base.logprobs[40:] != pytest.approx(completion.completions[0].logprobs, abs=1e-1)
    assert all(
        len(top) == 3 and top[0].logprob >= top[2].logprob for top in result.top_logprobs[1:]
    )
    assert outputs["longer"].prompt_logprobs == result and outputs[
        "one"
    ].prompt_logprobs.logprobs == (None,)


def test_a_prompt_whose_scores_do_not_come_is_no_success():
    """Aborted, or with NaN: the choices have ended before, and the answer must not pass for a
    whole one."""
    served = serve(qwen3_model(), prefill_chunk=16)
    asked = request("r", list(range(40)), prompt_logprobs=1, max_tokens=0)
    served.engine.add(asked)
    served.engine.abort("r")
    [event] = served.engine.take_events()
    assert (
        event.output.completions[0].finish_reason == "abort"
        and event.output.prompt_logprobs is None
    )
    broken = {
        path: LoraPair(pair.a * math.nan, pair.b, 1.0)
        for path, pair in random_adapter(served, 1).items()
    }
    served.weights.add_adapter("nan", broken)
    output = run(served.engine, [replace(asked, adapter="nan")])["r"]
    assert (
        output.completions[0].finish_reason == "error" and "finite" in output.completions[0].error
    )
    assert served.engine.counters.requests_failed == 1
