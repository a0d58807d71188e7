"""Tokens and log-probabilities of the batched engine against the naive twin and a full
recompute."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_parallm.engine.engine as engine_module
from mlx_parallm.errors import ContextLengthError, RequestError
from mlx_parallm.models.logprobs import token_logprobs
from tests.engine.helpers import (
    EOS,
    Greedy,
    collect,
    full_logits,
    naive_greedy,
    qwen3_model,
    ragged_prompts,
    request,
    run,
    serve,
)
from tests.tiny_models import LLAMA3_ROPE, make_model


@pytest.mark.parametrize("architecture", ["qwen3", "llama3"])
def test_greedy_in_a_batch_equals_alone(architecture):
    model = (
        qwen3_model() if architecture == "qwen3" else make_model(LLAMA3_ROPE | {"vocab_size": 300})
    )
    # rows finish, move and are admitted all the time
    served = serve(model, max_rows=16, prefill_chunk=96)
    prompts = ragged_prompts(64, longest=90)
    lengths = [4 + 7 * (i % 6) for i in range(64)]
    requests = [
        request(f"r{i}", p, temperature=0.0, max_tokens=lengths[i]) for i, p in enumerate(prompts)
    ]
    outputs = run(served.engine, requests)
    distinct = set()
    for i, prompt in enumerate(prompts):
        alone = naive_greedy(served.plain, prompt, lengths[i])
        assert list(outputs[f"r{i}"].completions[0].token_ids) == alone
        distinct |= set(alone)
    assert len(distinct) >= 20


def test_sequences_behind_finished_ones_survive_when_memory_is_given_back(monkeypatch):
    """The cache was once cut to the number of running rows before the last of them had moved
    forward."""
    monkeypatch.setattr(engine_module, "SHRINK_STEPS", 1)
    served = serve(qwen3_model(), max_rows=32, prefill_chunk=4096, by_tokens=False)
    prompts = ragged_prompts(32, longest=20)
    lengths = [3] * 29 + [40] * 3
    requests = [
        request(f"r{i}", p, temperature=0.0, max_tokens=n, ignore_eos=True)
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    outputs = run(served.engine, requests)
    assert served.engine.cache.row_capacity < 32, "memory was given back"
    for i in range(29, 32):
        expected = naive_greedy(served.plain, prompts[i], 40)
        assert list(outputs[f"r{i}"].completions[0].token_ids)[: len(expected)] == expected


def test_seeded_in_a_batch_equals_alone():
    served = serve(qwen3_model())
    prompts = ragged_prompts(64)
    filters = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 1.3}]

    def make(i: int):
        return request(
            f"r{i}", prompts[i], seed=1000 + i, max_tokens=12, ignore_eos=True, **filters[i % 4]
        )

    together = run(served.engine, [make(i) for i in range(64)])
    alone: dict = {}
    for i in range(64):
        alone |= run(served.engine, [make(i)])
    for name, output in alone.items():
        assert output.completions[0].token_ids == together[name].completions[0].token_ids
        np.testing.assert_allclose(
            output.completions[0].logprobs, together[name].completions[0].logprobs, atol=1e-5
        )
    assert (
        len({token for output in alone.values() for token in output.completions[0].token_ids}) >= 20
    )


def test_choices_differ_and_repeat_with_their_seed():
    served = serve(qwen3_model())
    first = run(served.engine, [request("a", [5, 6, 7], n=4, seed=3, max_tokens=12)])["a"]
    again = run(served.engine, [request("b", [5, 6, 7], n=4, seed=3, max_tokens=12)])["b"]
    other = run(served.engine, [request("c", [5, 6, 7], n=4, seed=4, max_tokens=12)])["c"]
    tokens = [c.token_ids for c in first.completions]
    assert [c.index for c in first.completions] == [0, 1, 2, 3]
    assert len(set(tokens)) == 4
    assert tokens == [c.token_ids for c in again.completions]
    assert tokens != [c.token_ids for c in other.completions]


def test_unseeded_requests_follow_the_engine_seed():
    def tokens(seed: int) -> list[tuple[int, ...]]:
        served = serve(qwen3_model(), seed=seed)
        outputs = run(served.engine, [request(f"r{i}", [1, 2, 3], max_tokens=10) for i in range(3)])
        return [outputs[f"r{i}"].completions[0].token_ids for i in range(3)]

    one = tokens(1)
    assert one == tokens(1) != tokens(2)
    assert len(set(one)) == 3


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_equal_a_full_recompute(temperature):
    served = serve(qwen3_model(), prefill_chunk=64)
    prompts = ragged_prompts(64, longest=80)
    requests = [
        request(f"r{i}", p, temperature=temperature, seed=i, max_tokens=24)
        for i, p in enumerate(prompts)
    ]
    outputs = run(served.engine, requests)
    worst = 0.0
    for i, prompt in enumerate(prompts):
        completion = outputs[f"r{i}"].completions[0]
        tokens = list(completion.token_ids)
        logits = full_logits(served.plain, prompt + tokens)[len(prompt) - 1 : -1]
        expected = np.array(token_logprobs(logits, mx.array(tokens), temperature or 1.0))
        worst = max(worst, float(np.abs(expected - np.array(completion.logprobs)).max()))
        assert completion.processed_logprobs is None
    assert worst <= 1e-4


def test_one_prefill_for_n_and_for_identical_requests():
    served = serve(qwen3_model(), prefill_chunk=128)
    prompt = ragged_prompts(1, seed=5, shortest=400, longest=400)[0]
    served.engine.add(request("n", prompt, n=16, max_tokens=4, seed=1))
    for i in range(8):
        served.engine.add(request(f"same{i}", prompt, max_tokens=4, temperature=0.0))
    outputs = collect(served.engine)
    assert served.engine.counters.prefill_tokens == 400
    assert served.engine.counters.prompt_tokens == 9 * 400
    alone = naive_greedy(served.plain, prompt, 4)
    assert all(list(outputs[f"same{i}"].completions[0].token_ids) == alone for i in range(8))


@pytest.mark.parametrize("chunk", [16, 33, 1024])
def test_chunked_prefill_equals_unchunked(chunk):
    served = serve(qwen3_model(), prefill_chunk=chunk)
    prompts = ragged_prompts(6, seed=8, shortest=70, longest=200)
    outputs = run(
        served.engine,
        [request(f"r{i}", p, temperature=0.0, max_tokens=12) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        assert list(outputs[f"r{i}"].completions[0].token_ids) == naive_greedy(
            served.plain, prompt, 12
        )


def test_context_end_and_its_errors():
    served = serve(qwen3_model(), max_model_len=32)
    output = run(served.engine, [request("r", [1] * 20, ignore_eos=True)])["r"]
    assert (len(output.completions[0].token_ids), output.completions[0].finish_reason) == (
        12,
        "length",
    )
    with pytest.raises(ContextLengthError, match="length is 32"):
        served.engine.add(request("x", [1] * 20, max_tokens=13))
    with pytest.raises(ContextLengthError):
        served.engine.add(request("x", [1] * 32))
    with pytest.raises(RequestError, match="in use"):
        served.engine.add(request("y", [1], max_tokens=2))
        served.engine.add(request("y", [1], max_tokens=2))


def test_no_tokens_asked():
    served = serve(qwen3_model())
    output = run(served.engine, [request("r", [1, 2], max_tokens=0, n=2)])["r"]
    assert [(c.token_ids, c.finish_reason) for c in output.completions] == [((), "length")] * 2


def test_abort_frees_the_rows():
    served = serve(qwen3_model(), max_rows=2)
    served.engine.add(request("a", [1, 2, 3], n=2, max_tokens=500, ignore_eos=True))
    served.engine.add(request("b", [4, 5, 6], temperature=0.0, max_tokens=8))
    for _ in range(3):
        served.engine.step()
    assert served.engine.counters.running == 2 and len(served.engine.scheduler.waiting) == 1
    served.engine.abort("a")
    outputs = collect(served.engine)
    assert [c.finish_reason for c in outputs["a"].completions] == ["abort", "abort"]
    assert len(outputs["a"].completions[0].token_ids) == 3
    assert list(outputs["b"].completions[0].token_ids) == naive_greedy(served.plain, [4, 5, 6], 8)
    assert served.engine.counters.requests_aborted == 1
    served.engine.check_integrity()


def test_abort_while_waiting_and_while_prefilling():
    served = serve(qwen3_model(), max_rows=1, prefill_chunk=16)
    served.engine.add(request("long", [7] * 100, max_tokens=5))
    served.engine.add(request("queued", [1, 2], max_tokens=5))
    served.engine.step()
    served.engine.abort("queued")
    served.engine.abort("long")
    served.engine.abort("unknown")
    outputs = collect(served.engine)
    assert {o.completions[0].finish_reason for o in outputs.values()} == {"abort"}
    assert not served.engine.has_work
    served.engine.check_integrity()
    assert served.engine.counters.prefill_tokens == 0


def test_top_logprobs_are_the_likeliest_of_the_plain_distribution():
    served = serve(qwen3_model())
    prompts = ragged_prompts(3)
    requests = [
        request(
            "a",
            prompts[0],
            logprobs=5,
            temperature=0.5,
            top_k=3,
            seed=1,
            max_tokens=6,
            ignore_eos=True,
        ),
        request("b", prompts[1], logprobs=2, seed=1, max_tokens=6, ignore_eos=True),
        request("c", prompts[2], seed=1, max_tokens=6, ignore_eos=True),
    ]
    outputs = run(served.engine, requests)
    assert outputs["c"].completions[0].top_logprobs is None
    for name, prompt, count, temperature in (("a", prompts[0], 5, 0.5), ("b", prompts[1], 2, 1.0)):
        completion = outputs[name].completions[0]
        logits = (
            full_logits(served.plain, prompt + list(completion.token_ids))[len(prompt) - 1 : -1]
            / temperature
        )
        expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        for row, alternatives in zip(expected, completion.top_logprobs, strict=True):
            assert [a.token_id for a in alternatives] == np.argsort(-row)[:count].tolist()
            np.testing.assert_allclose(
                [a.logprob for a in alternatives], np.sort(row)[::-1][:count], atol=1e-4
            )


def test_eos_is_kept_with_its_logprob_not_shown_and_waits_for_min_tokens():
    served = serve(qwen3_model())
    force = {EOS: 100.0}
    output = run(served.engine, [request("r", [1, 2, 3], logit_bias=force, max_tokens=10)])[
        "r"
    ].completions[0]
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == (
        (EOS,),
        "",
        "stop",
        None,
    )
    expected = token_logprobs(full_logits(served.plain, [1, 2, 3])[-1:], mx.array([EOS]))
    assert output.logprobs[0] == pytest.approx(expected.item(), abs=1e-4)
    assert output.processed_logprobs[0] == pytest.approx(0.0, abs=1e-4)
    ignoring = request("i", [1, 2, 3], logit_bias=force, max_tokens=4, ignore_eos=True)
    assert run(served.engine, [ignoring])["i"].completions[0].token_ids == (EOS,) * 4
    params = {
        "logit_bias": force | {65: 90.0},
        "stop_token_ids": (65,),
        "min_tokens": 5,
        "max_tokens": 10,
    }
    completion = run(served.engine, [request("r", [1, 2, 3], **params)])["r"].completions[0]
    assert completion.token_ids[5:] == (EOS,)
    assert not {EOS, 65} & set(completion.token_ids[:5])


@pytest.mark.parametrize(
    "params", [{"max_tokens": 2}, {"prompt_logprobs": 0, "max_tokens": 0}], ids=["prompt", "score"]
)
def test_decoding_goes_on_between_chunks_of_a_long_prompt_and_of_a_score(params):
    served = serve(qwen3_model(), prefill_chunk=32)
    served.engine.add(request("short", [1, 2, 3], max_tokens=40, ignore_eos=True))
    served.engine.step()
    served.engine.add(request("long", ragged_prompts(1, shortest=321, longest=321)[0], **params))
    before = served.engine.counters.generation_tokens
    for _ in range(9):
        assert not any(event.request_id == "long" for event in served.engine.step())
    # one each step, all of the short request
    assert served.engine.counters.generation_tokens - before == 9
    assert any(event.request_id == "long" for event in served.engine.step()) == (
        "prompt_logprobs" in params
    )
    collect(served.engine)


def test_ids_are_compared_up_to_a_tie():
    """Ids 0 and 1 tie at the second place: either is right there. Without a tie each id counts,
    and the length."""
    greedy = Greedy([7, 1, 5], {1: {0, 1}})
    right, wrong = (
        ([7, 1, 5], [7, 0, 3, 3]),
        ([7, 2, 5], [7, 1, 4], [6, 1, 5], [7, 1], [7, 1, 5, 5]),
    )
    assert all(ids == greedy for ids in right) and all(ids != greedy for ids in wrong)
    assert not any(ids != greedy for ids in right) and not any(ids == greedy for ids in wrong)
    assert greedy.start(2) == [7, 0]


def test_the_twin_knows_its_ties():
    """Two rows of the head are the same but for 1e-6: wherever one of them is best, the other is
    as well."""
    model = qwen3_model()
    model.lm_head.weight[8] = model.lm_head.weight[7] * (1 + 1e-7)
    mx.eval(model.parameters())
    greedy = [naive_greedy(model, prompt, 20) for prompt in ragged_prompts(40)]
    assert any({7, 8} <= tied for ids in greedy for tied in ids.ties.values())
    assert sum(len(ids.ties) for ids in greedy) < 0.1 * sum(map(len, greedy)), (
        "few positions are ties"
    )
