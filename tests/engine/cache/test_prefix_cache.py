"""The prefix cache: the index alone, and an engine with it against the same engine without."""

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.engine.cache.prefix import PrefixCache
from mlx_parallm.errors import RequestError
from tests.engine.helpers import (
    VOCAB,
    Served,
    full_logits,
    naive_greedy,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
)

KEY = ("weights", None)


def store(cache: PrefixCache, tokens: tuple[int, ...], key=KEY) -> int:
    """Stores as the engine does; returns the positions that were new. The arrays are the tokens
    themselves."""
    segment = cache.store(key, tokens)
    if segment is None:
        return 0
    segment.arrays = list(segment.tokens)
    return len(segment.tokens)


def found(cache: PrefixCache, prompt: tuple[int, ...], key=KEY) -> tuple[int, ...]:
    return tuple(
        token for p in cache.find(key, prompt) for token in p.segment.arrays[: p.stop - p.start]
    )


def test_the_longest_prefix_is_found_and_nothing_is_held_twice():
    cache = PrefixCache(1000)
    assert store(cache, (1, 2, 3, 4, 5)) == 5
    assert store(cache, (1, 2, 3, 4, 5)) == 0
    assert store(cache, (1, 2, 3, 9, 9)) == 2, "parts in the middle of a segment"
    assert store(cache, (1, 2, 3, 9, 9, 6)) == 1
    assert store(cache, (1, 2)) == 0
    assert found(cache, (1, 2, 3, 9, 9, 6, 7, 0)) == (1, 2, 3, 9, 9, 6)
    assert found(cache, (1, 2, 3, 4, 9)) == (1, 2, 3, 4), (
        "the last token of a prompt is never taken from here"
    )
    assert found(cache, (1, 2, 3, 4)) == (1, 2, 3)
    assert found(cache, (2, 2)) == found(cache, (1,)) == ()
    assert (
        found(cache, (1, 2, 3, 4), ("others", None))
        == found(cache, (1, 2, 3), ("weights", "salt"))
        == ()
    )
    assert cache.tokens == 8
    cache.check_integrity()


def test_against_a_list_of_all_texts():
    generator = random.Random(0)
    cache, texts = PrefixCache(10**6), []
    for _ in range(300):
        base = generator.choice(texts)[: generator.randrange(20)] if texts else ()
        text = (*base, *(generator.randrange(3) for _ in range(generator.randint(1, 12))))
        expected = max((_common(text[:-1], other) for other in texts), default=0)
        assert found(cache, text) == text[:expected]
        store(cache, text)
        texts.append(text)
        cache.check_integrity()
    assert cache.tokens == len({text[: i + 1] for text in texts for i in range(len(text))}), (
        "one position a prefix"
    )


def _common(a, b) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_the_least_recently_used_goes_first_and_ancestors_stay():
    cache = PrefixCache(12)
    store(cache, (1, 2, 3, 4))
    store(cache, (1, 2, 3, 4, 5, 6))
    store(cache, (7, 7, 7, 7))
    assert found(cache, (1, 2, 3, 4, 5, 0)) == (1, 2, 3, 4, 5)
    assert store(cache, (8, 8, 8, 8)) == 4
    assert found(cache, (7, 7, 7, 0)) == (), "was used least recently"
    assert found(cache, (1, 2, 3, 4, 5, 6, 0)) == (1, 2, 3, 4, 5, 6)
    assert store(cache, tuple(range(20, 33))) == 0, "longer than all there is"
    assert store(cache, tuple(range(20, 32))) == 12 and cache.tokens == 12
    assert store(cache, (*range(20, 32), 1)) == 0, (
        "what it would hang from is not thrown out for it"
    )
    cache.check_integrity()


def test_random_use_stays_within_the_bound():
    generator = random.Random(1)
    cache = PrefixCache(60)
    for step in range(2000):
        text = tuple(generator.randrange(2) for _ in range(generator.randint(1, 25)))
        key = (generator.randrange(3), None)
        assert found(cache, text, key) == text[: len(found(cache, text, key))]
        store(cache, text, key)
        if step % 100 == 99:
            cache.keep_only({0, step // 100 % 3})
        cache.check_integrity()
    cache.keep_only({"none"})
    assert cache.tokens == 0 and found(cache, (0, 0, 0)) == ()


def pair(**options) -> tuple[Served, Served]:
    """The same model with the cache and, as the naive twin, without."""
    return serve(qwen3_model(), **options), serve(qwen3_model(), prefix_cache_bytes=0, **options)


def conversation(
    served: Served, chats: int, turns: int, **params
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Chats side by side: each turn's prompt is the last one's, its answer, and something new."""
    generator, answers = random.Random(5), []
    prompts = [(*range(40), 50 + chat) for chat in range(chats)]
    for turn in range(turns):
        requests = [
            request(f"{turn}.{chat}", prompt, seed=chat, max_tokens=12, ignore_eos=True, **params)
            for chat, prompt in enumerate(prompts)
        ]
        outputs = run(served.engine, requests)
        for chat in range(chats):
            completion = outputs[f"{turn}.{chat}"].completions[0]
            answers.append((completion.token_ids, completion.logprobs))
            news = tuple(generator.randrange(VOCAB - 1) for _ in range(generator.randint(1, 9)))
            prompts[chat] = (*prompts[chat], *completion.token_ids, *news)
    return answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_conversations_are_answered_as_without_the_cache(temperature):
    cached, naive = pair(prefill_chunk=32)
    got, expected = (
        conversation(served, 6, 4, temperature=temperature) for served in (cached, naive)
    )
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert len({token for tokens, _ in got for token in tokens}) >= 20
    difference = max(
        np.abs(np.array(a) - np.array(b)).max()
        for (_, a), (_, b) in zip(got, expected, strict=True)
    )
    assert difference <= 1e-4
    counts, without = cached.engine.counters, naive.engine.counters
    assert without.prefill_tokens == without.prompt_tokens == counts.prompt_tokens
    # Of each later turn: the last token of the answer before it, and what is new (1 to 9 tokens).
    assert counts.prefill_tokens <= 6 * 41 + 18 * 10
    cache = cached.engine.scheduler.room.prefix_cache
    assert cache.query_tokens - cache.hit_tokens <= counts.prefill_tokens
    assert naive.engine.scheduler.room.prefix_cache.hit_tokens == 0


def test_adapters_salts_and_publishes_never_share():
    cached, naive = pair(policy="policy")
    prompt = ragged_prompts(1, shortest=60, longest=60)[0]
    answers = []
    for served in (cached, naive):
        served.weights.publish_adapter(random_adapter(served, 1))
        served.weights.add_adapter("other", random_adapter(served, 2))
        got = []
        for version in range(3):
            for turn in range(2):
                users = [
                    (None, None),
                    ("policy", None),
                    ("other", None),
                    ("policy", "a"),
                    ("policy", "b"),
                ]
                for number, (adapter, salt) in enumerate(users):
                    one = request(
                        f"{version}.{turn}.{number}",
                        prompt,
                        adapter=adapter,
                        temperature=0.0,
                        max_tokens=8,
                    )
                    got.append(
                        run(served.engine, [replace(one, cache_salt=salt)])[
                            one.request_id
                        ].completions[0]
                    )
            served.weights.publish_adapter(random_adapter(served, 10 + version))
        answers.append(got)
    for one, other in zip(*answers, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert len({token for one in answers[0] for token in one.token_ids}) >= 20
    # Computed: base and "other" once, the policy once for each salt and version; all else was
    # found.
    assert cached.engine.counters.prefill_tokens == 60 * (2 + 3 * 3)
    assert [one.cached_tokens for one in answers[0][:10]] == [0] * 5 + [59] * 5
    assert {one.cached_tokens for one in answers[1]} == {0}


def test_old_weights_entries_go_at_once():
    served = serve(qwen3_model(), policy="policy")
    served.weights.publish_adapter(random_adapter(served, 1))
    prompt = ragged_prompts(1, shortest=60, longest=60)[0]
    run(
        served.engine,
        [request("p", prompt, adapter="policy", max_tokens=2), request("b", prompt, max_tokens=2)],
    )
    held = served.engine.scheduler.room.prefix_cache.tokens
    served.weights.publish_adapter(random_adapter(served, 2))
    run(served.engine, [request("x", [1, 2], max_tokens=1)])
    assert served.engine.scheduler.room.prefix_cache.tokens < 0.6 * held, "only the base's are left"
    served.engine.reset_prefix_cache()
    assert served.engine.scheduler.room.prefix_cache.tokens == 0
    output = run(served.engine, [request("again", prompt, temperature=0.0, max_tokens=9)])["again"]
    assert list(output.completions[0].token_ids) == naive_greedy(served.plain, prompt, 9)


def test_what_has_just_finished_does_not_come_back_after_a_reset():
    served = serve(qwen3_model())
    prompt = ragged_prompts(1, shortest=60, longest=60)[0]
    # its row is given up at the next step only
    run(served.engine, [request("first", prompt, max_tokens=2)])
    served.engine.reset_prefix_cache()
    again = run(served.engine, [request("again", prompt, max_tokens=2)])["again"]
    assert again.completions[0].cached_tokens == 0
    found = run(served.engine, [request("found", prompt, max_tokens=2)])["found"]
    assert found.completions[0].cached_tokens == 59


def test_memory_stays_within_both_bounds():
    """Rows, prompts being computed and stored prefixes, counted as the arrays that they are,
    after each step."""
    served = serve(
        qwen3_model(),
        kv_cache_bytes=1 << 20,
        prefix_cache_bytes=1 << 18,
        prefill_chunk=64,
        max_rows=16,
    )
    engine = served.engine
    token = engine.cache.token_bytes()
    bound = engine.scheduler.room.max_tokens
    assert bound == (1 << 20) // token
    generator = random.Random(3)
    prompts = [
        [generator.randrange(VOCAB - 1) for _ in range(generator.choice([3, 40, 150]))]
        for _ in range(60)
    ]
    for number, prompt in enumerate(prompts):
        limit = generator.choice([5, 20, 90])
        engine.add(
            request(f"r{number}", prompt, temperature=0.0, max_tokens=limit, ignore_eos=True)
        )
    outputs, most, most_rows = {}, 0, 0
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] = event.output
        prefills = [
            array
            for p in engine.scheduler.prefills
            for cache in p.caches
            for array in (cache.keys, cache.values)
        ]
        used = engine.cache.nbytes + sum(array.nbytes for array in prefills)
        stored = [
            a for _, s in engine.scheduler.room.prefix_cache._by_age.values() for a in s.arrays
        ]
        assert used <= bound * token and sum(array.nbytes for array in stored) <= 1 << 18
        assert (
            sum(array.nbytes for array in stored)
            == engine.scheduler.room.prefix_cache.tokens * token
        )
        most, most_rows = max(most, used), max(most_rows, len(engine.scheduler.rows))
    assert len(outputs) == 60 and most > 0.5 * bound * token and most_rows >= 4
    for number in range(0, 60, 7):
        tokens = outputs[f"r{number}"].completions[0].token_ids
        assert list(tokens) == naive_greedy(served.plain, prompts[number], len(tokens), eos=None)


def test_a_stored_prefix_does_not_keep_the_cache_alive_and_survives_its_row():
    served = serve(qwen3_model(), max_rows=2)
    prompt = ragged_prompts(1, shortest=50, longest=50)[0]
    run(served.engine, [request("a", prompt, max_tokens=3)])
    run(
        served.engine,
        [request(f"x{i}", p, max_tokens=9) for i, p in enumerate(ragged_prompts(8, seed=4))],
    )
    served.engine.release_memory()
    before = served.engine.counters.prefill_tokens
    output = run(
        served.engine, [request("b", [*prompt, 5], max_tokens=20, seed=1, ignore_eos=True)]
    )["b"]
    assert (
        served.engine.counters.prefill_tokens - before == 0
        and output.completions[0].cached_tokens == 50
    )
    tokens = list(output.completions[0].token_ids)
    logits = full_logits(served.plain, [*prompt, 5, *tokens])[50:-1]
    expected = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[
        mx.arange(20), mx.array(tokens)
    ]
    np.testing.assert_allclose(np.array(expected), output.completions[0].logprobs, atol=1e-4)


def test_a_request_that_never_fits_is_refused_and_the_default_length_fits():
    served = serve(qwen3_model(), max_model_len=2048, kv_cache_bytes=1, default_max_tokens=30)
    token = served.engine.cache.token_bytes()
    served = serve(
        qwen3_model(), max_model_len=2048, kv_cache_bytes=100 * token, default_max_tokens=30
    )
    with pytest.raises(
        RequestError,
        match=r"100.*20",
    ):
        served.engine.add(request("x", [1] * 20, max_tokens=62))
    with pytest.raises(RequestError, match="at most 0 more"):
        served.engine.add(request("x", [1] * 60))
    prompts = {"short": [1] * 10, "long": [2] * 40, "most": [3] * 20}
    outputs = run(
        served.engine,
        [
            request(name, tokens, ignore_eos=True, max_tokens=61 if name == "most" else None)
            for name, tokens in prompts.items()
        ],
    )
    lengths = {name: len(output.completions[0].token_ids) for name, output in outputs.items()}
    assert lengths == {"short": 30, "long": 21, "most": 61}, (
        "the default, what there is room for, what was asked"
    )
