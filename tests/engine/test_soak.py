"""Everything at once, at random: whatever is asked, rows fit, nothing is lost, and greedy
answers stay right."""

import random

import pytest

from mlx_parallm.engine.live_requests import Finished
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.types import Request
from tests.engine.helpers import (
    Served,
    naive_greedy,
    qwen3_model,
    random_adapter,
    request,
    serve,
    short_segments,
)


def random_request(generator: random.Random, name: str) -> Request:
    prompt = [generator.randrange(90) for _ in range(generator.choice([1, 2, 5, 17, 60]))]
    choices = {
        "plain": {"temperature": 0.0, "max_tokens": generator.randint(1, 20)},
        "group": {"n": generator.randint(2, 6), "seed": generator.randrange(99), "max_tokens": 9},
        "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "max_tokens": 12, "logprobs": 3},
        "penalties": {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "min_tokens": 3,
            "max_tokens": 15,
        },
        "stops": {"stop": ("a", "\x00"), "stop_token_ids": (7, 8), "max_tokens": 30},
        "scored": {"prompt_logprobs": 1, "max_tokens": 3},
        "nan": {"adapter": "nan", "max_tokens": 5},
        "policy": {"adapter": "policy", "max_tokens": 25, "ignore_eos": True},
    }
    kind = generator.choice(list(choices))
    return request(f"{name}.{kind}", prompt, stream=generator.random() < 0.3, **choices[kind])


def soak(
    served: Served, generator: random.Random, steps: int
) -> tuple[dict[str, Request], dict[str, Finished]]:
    asked: dict[str, Request] = {}
    ended: dict[str, Finished] = {}
    step = 0
    while step < steps or served.engine.has_work:
        if step < steps and generator.random() < 0.4:
            new = random_request(generator, str(step))
            for repeat in range(generator.choice([1, 1, 3])):
                copy = Request(
                    f"{new.request_id}.{repeat}",
                    new.prompt_token_ids,
                    new.params,
                    new.adapter,
                    new.stream,
                )
                asked[copy.request_id] = copy
                served.engine.add(copy)
        if asked and generator.random() < 0.1:
            served.engine.abort(generator.choice(list(asked)))
        if step % 40 == 39:
            served.weights.publish_adapter(random_adapter(served, step))
        events = served.engine.fail_active("the weather") if step % 50 == 49 else []
        for event in events + served.engine.step():
            if isinstance(event, Finished):
                assert event.request_id not in ended, "a request ends once"
                ended[event.request_id] = event
        served.engine.check_integrity()
        step += 1
        assert step < 20 * steps
    return asked, ended


@pytest.mark.parametrize(
    ("by_tokens", "ahead"), [(True, True), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_soak(by_tokens, ahead):
    with short_segments():
        hold_to_the_naive_twin(by_tokens, ahead)


def hold_to_the_naive_twin(by_tokens, ahead):
    options = {
        "max_rows": 6,
        "prefill_chunk": 32,
        "by_tokens": by_tokens,
        "async_scheduling": ahead,
    }
    served = serve(qwen3_model(), policy="policy", **options)
    served.weights.publish_adapter(random_adapter(served, 0))
    poison = {
        path: LoraPair(pair.a, pair.b * float("nan"), 1.0)
        for path, pair in random_adapter(served, 1).items()
    }
    served.weights.add_adapter("nan", poison)
    asked, ended = soak(served, random.Random(11), steps=160)
    assert asked.keys() == ended.keys() and len(asked) > 60
    assert any(event.output.completions[0].error == "the weather" for event in ended.values())
    checked = 0
    for name, event in ended.items():
        completion, params = event.output.completions[0], asked[name].params
        assert len(event.output.completions) == params.n
        assert (
            len(completion.token_ids) == len(completion.logprobs) == len(completion.policy_versions)
        )
        if ".nan." in name:
            assert completion.finish_reason in ("error", "abort")
        if ".plain." in name and completion.finish_reason in ("stop", "length"):
            expected = naive_greedy(
                served.plain, list(asked[name].prompt_token_ids), params.max_tokens or 0
            )
            assert list(completion.token_ids) == expected
            checked += 1
    assert checked >= 8
