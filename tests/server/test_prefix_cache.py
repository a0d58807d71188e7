"""What clients see of the prefix cache and of the queue: cached_tokens, cache_salt, priority,
the counters."""

import re

import pytest
from openai import BadRequestError


def counters(server) -> dict[str, float]:
    with server.http() as http:
        text = http.get("/metrics").text
    return {
        name: float(value)
        for name, value in re.findall(r"^mlx_parallm_(\w+) ([\d.e+]+)$", text, re.M)
    }


def prompt(first: int) -> list[int]:
    """40 tokens that no other test sends."""
    return [first, *range(20, 59)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_second_time_a_prompt_is_found(client, server, stream):
    def usage(**more):
        body = {
            "model": "default",
            "prompt": prompt(3 + stream),
            "max_tokens": 20,
            "seed": 1,
            "extra_body": more,
        }
        if not stream:
            return client.completions.create(**body).usage.prompt_tokens_details.cached_tokens
        *_, last = client.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
        return last.usage.prompt_tokens_details.cached_tokens

    with server.http() as http:  # another test may have sent the first token
        assert http.post("/reset_prefix_cache").json() == {"success": True}
    before = counters(server)
    assert [
        usage(),
        usage(),
        usage(cache_salt="mine"),
        usage(cache_salt="mine"),
        usage(priority=-3),
    ] == [
        0,
        39,
        0,
        39,
        39,
    ]
    after = counters(server)
    assert (
        after["prefix_cache_hit_tokens_total"] - before["prefix_cache_hit_tokens_total"] == 3 * 39
    )
    assert (
        after["prefix_cache_query_tokens_total"] - before["prefix_cache_query_tokens_total"]
        == 5 * 40
    )


def test_a_conversation_computes_only_what_is_new(client, server):
    messages = [
        {"role": "user", "content": "12 + 7 = and then some words that make the first turn long"}
    ]
    prefilled = []
    for turn in range(3):
        before = counters(server)["prefill_tokens_total"]
        answer = client.chat.completions.create(
            model="default",
            messages=messages,
            max_tokens=8,
            seed=turn,
            extra_body={"cache_salt": "conversation"},
        )
        prefilled.append(counters(server)["prefill_tokens_total"] - before)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"and {turn}?"},
        ]
    assert answer.usage.prompt_tokens > 2 * prefilled[-1]
    assert (
        answer.usage.prompt_tokens_details.cached_tokens
        >= answer.usage.prompt_tokens - prefilled[-1]
    )


@pytest.mark.parametrize(
    ("field", "value"), [("priority", "high"), ("priority", 2**31), ("cache_salt", "")]
)
def test_values_that_make_no_sense_are_refused(client, field, value):
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="default", prompt="a", extra_body={field: value})
    assert caught.value.param == field
