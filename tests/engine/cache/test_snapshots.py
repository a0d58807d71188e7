"""Recurrent states in the prefix cache: a text continues from a snapshot, and answers are those
without one."""

import random

import pytest

from mlx_parallm.engine.cache.prefix import PrefixCache, common_beginning
from mlx_parallm.engine.scheduling.room import SNAPSHOT_EVERY
from mlx_parallm.models.recurrent.layers import use_chunks
from scripts.generate_model_table import small_model
from tests.engine.helpers import naive_greedy, random_adapter, request, run, serve
from tests.engine.test_architectures import BATCHED, VOCAB, model_of
from tests.tiny_models import QWEN3, make_model

GREEDY = {"temperature": 0.0, "ignore_eos": True}
STATES_ALONE, BESIDE_ATTENTION = "mamba2", "falcon_h1"
OTHERS = (
    "qwen3_5",
    "qwen3_next",
    "kimi_linear",
    "olmo_hybrid",
    "jamba",
    "mamba",
    "lfm2",
    "nemotron_h",
    "plamo2",
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS[1:]]


def recurrent(name: str):
    model = small_model(name) if name in OTHERS else model_of(name)
    use_chunks(model)
    return model


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(60) for _ in range(length)]  # small vocabularies have it


def key(text: str = "base") -> tuple[str, None]:
    return text, None


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", [STATES_ALONE, BESIDE_ATTENTION, OTHERS[0], *SLOW])
def test_each_turn_computes_only_what_is_new(name, ahead):
    """Turn 1 has 40 tokens, each later one the whole history and 3 more: the answer's last token
    and those are new.

    `ahead`: a step that was started before the answer's end was read has fed the last token as
    well.
    """
    served = serve(recurrent(name), prefill_chunk=32, async_scheduling=ahead)
    text = prompt_of(40)
    computed = []
    for turn in range(4):
        before = served.engine.counters.prefill_tokens
        answer = run(served.engine, [request(f"t{turn}", text, max_tokens=8, **GREEDY)])[
            f"t{turn}"
        ].completions[0]
        computed.append(served.engine.counters.prefill_tokens - before)
        assert list(answer.token_ids) == naive_greedy(served.plain, text, 8, eos=None)
        text = [*text, *answer.token_ids, *prompt_of(3, seed=turn)]
    assert computed == [40, 4, 4, 4]


def test_an_answer_that_a_stop_id_ended_while_the_next_step_ran():
    """The step that ran ahead has fed the stop id, so the snapshot lies behind it and not in
    front of it."""
    served = serve(recurrent(STATES_ALONE), async_scheduling=True)
    prompt = prompt_of(40)
    free = naive_greedy(served.plain, prompt, 12, eos=None)
    stop = next(i for i in range(4, 12) if free[i] not in free[:i])
    first = run(
        served.engine,
        [request("a", prompt, max_tokens=30, stop_token_ids=(free[stop],), temperature=0.0)],
    )["a"]
    assert list(first.completions[0].token_ids) == free[: stop + 1]
    turn = [*prompt, *free[: stop + 1], 5, 6, 7]
    before = served.engine.counters.prefill_tokens
    second = run(served.engine, [request("b", turn, max_tokens=8, **GREEDY)])["b"].completions[0]
    assert list(second.token_ids) == naive_greedy(served.plain, turn, 8, eos=None)
    assert served.engine.counters.prefill_tokens - before == 3


@pytest.mark.parametrize("name", [STATES_ALONE, BESIDE_ATTENTION])
def test_a_group_and_the_same_prompt_again_are_computed_once(name):
    served = serve(recurrent(name), prefill_chunk=128)
    prompt = prompt_of(100)
    outputs = run(served.engine, [request("group", prompt, n=16, max_tokens=4, **GREEDY)])
    again = run(served.engine, [request("again", prompt, max_tokens=4, **GREEDY)])
    assert served.engine.counters.prefill_tokens == 100
    wanted = naive_greedy(served.plain, prompt, 4, eos=None)
    for choice in (*outputs["group"].completions, *again["again"].completions):
        assert list(choice.token_ids) == wanted


def test_a_group_of_a_hybrid_holds_its_prompt_once():
    """16 answers of 8 tokens to a prompt of 700. In segments lie its first 699 positions (kept
    at 512 and 699, and read there by all rows); each row has room for 64 of its own. In a
    rectangle it would be 16 × 708 and more."""
    served = serve(recurrent(OTHERS[0]), prefill_chunk=1024)
    cache, prompt = served.engine.cache, prompt_of(700)
    assert cache.layout == "tokens" and not cache.rewindable
    served.engine.add(request("group", prompt, n=16, max_tokens=8, **GREEDY))
    while len(served.engine.scheduler.rows) < 16:
        served.engine.step()
    served.engine.step()
    segments = {
        id(chunk.segment): chunk.segment for row in cache._rows for chunk in row.chunks
    }.values()
    assert sum(len(segment.tokens) for segment in segments) == 699
    known = served.engine.scheduler.room.prefix_cache.held(
        (served.engine._present.of(request("any", [1])), None), prompt
    )
    assert {id(segment) for segment in segments} <= {id(chunk.segment) for chunk in known}, (
        "the prefix cache's own"
    )
    own = sum(pool.capacity * pool.size for pool in cache._pools.values())
    assert own <= 16 * 128
    assert cache.nbytes <= (699 + own) * cache.token_bytes() + 16 * cache.snapshot_bytes()
    served.engine.check_integrity()
    outputs = run(served.engine, [request("later", [*prompt, 5, 6], max_tokens=4, **GREEDY)])
    assert list(outputs["later"].completions[0].token_ids) == naive_greedy(
        served.plain, [*prompt, 5, 6], 4, eos=None
    )
    wanted = naive_greedy(served.plain, prompt, 8, eos=None)
    for choice in outputs["group"].completions:
        assert list(choice.token_ids) == wanted
    assert served.engine.counters.prefill_tokens == 700 + 3, (
        "the prompt once, and the later one's last tokens"
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_mixed_lengths_keep_their_own_states(ahead):
    """Short rows and a group beside a long one, over few rows: rows change pools, numbers and
    places in the batch."""
    served = serve(recurrent(OTHERS[0]), max_rows=6, prefill_chunk=1024, async_scheduling=ahead)
    texts = [prompt_of(length, seed=length) for length in (600, 3, 120, 1, 300, 127, 9, 1, 640, 40)]
    requests = [
        request(f"r{i}", t, max_tokens=6 + i % 5, n=1 + i % 3, **GREEDY)
        for i, t in enumerate(texts)
    ]
    for item in requests:
        served.engine.add(item)
    for _ in range(3):  # none ends as early
        served.engine.step()
        served.engine.check_integrity()
    outputs = run(served.engine, [])
    for i, text in enumerate(texts):
        for choice in outputs[f"r{i}"].completions:
            assert list(choice.token_ids) == naive_greedy(
                served.plain, text, 6 + i % 5, eos=None
            ), f"prompt {i}"


def test_a_measured_prompt_is_not_kept():
    """`prompt_logprobs`: neither where its prefill stops nor where its answer ends; the same
    prompt after it is."""
    served = serve(recurrent(STATES_ALONE))
    cache, prompt = served.engine.scheduler.room.prefix_cache, prompt_of(100)
    run(served.engine, [request("measured", prompt, prompt_logprobs=0, max_tokens=2, **GREEDY)])
    assert cache.tokens == 0
    run(served.engine, [request("asked", prompt, max_tokens=2, **GREEDY)])
    weights = served.engine._present.of(request("any", [1]))
    assert [chunk.stop for chunk in cache.find((weights, None), tuple(prompt))] == [99]


@pytest.mark.parametrize("name", [STATES_ALONE, BESIDE_ATTENTION])
def test_a_prompt_that_waits_for_its_turn_is_counted_once(name):
    """32 prompts, of which a step computes about one: each is looked up again as long as it
    waits."""
    served = serve(recurrent(name), prefill_chunk=64)
    prompts = [[*prompt_of(40), i, *prompt_of(9, seed=i)] for i in range(32)]
    outputs = run(
        served.engine, [request(f"r{i}", p, max_tokens=2, **GREEDY) for i, p in enumerate(prompts)]
    )
    cache = served.engine.scheduler.room.prefix_cache
    assert cache.query_tokens == 32 * 50
    reused = [output.completions[0].cached_tokens for output in outputs.values()]
    assert cache.hit_tokens == sum(reused) == 31 * 40


@pytest.mark.parametrize("rows", [4, 64])
def test_one_instruction_before_many_questions_is_computed_once(rows):
    """All at once, before any of them was computed: the first stops where the others part from
    it."""
    served = serve(recurrent(BESIDE_ATTENTION), max_rows=rows, prefill_chunk=256)
    instruction = prompt_of(200)
    prompts = [[*instruction, i % 60, *prompt_of(4 + i % 3, seed=i)] for i in range(64)]
    outputs = run(
        served.engine, [request(f"r{i}", p, max_tokens=3, **GREEDY) for i, p in enumerate(prompts)]
    )
    questions = sum(len(prompt) - 200 for prompt in prompts)
    assert served.engine.counters.prefill_tokens <= 200 + questions
    cache = served.engine.scheduler.room.prefix_cache
    assert cache.query_tokens == sum(map(len, prompts)), (
        "a prompt that waits for its turn is counted once"
    )
    assert cache.hit_tokens >= 63 * 200
    for i in range(0, 64, 7):
        wanted = naive_greedy(served.plain, prompts[i], 3, eos=None)
        assert list(outputs[f"r{i}"].completions[0].token_ids) == wanted


def test_long_prompts_have_snapshots_on_the_way():
    """A prompt that parts from a known one after 700 tokens: from the snapshot at 512 first,
    then from 700."""
    served = serve(recurrent(STATES_ALONE), prefill_chunk=300)
    text = prompt_of(1300)
    computed = []
    for i in range(3):
        prompt = [*text[: 700 if i else 1300], *prompt_of(20, seed=i)]
        before = served.engine.counters.prefill_tokens
        output = run(served.engine, [request(f"r{i}", prompt, max_tokens=3, **GREEDY)])[
            f"r{i}"
        ].completions[0]
        assert list(output.token_ids) == naive_greedy(served.plain, prompt, 3, eos=None)
        computed.append(served.engine.counters.prefill_tokens - before)
    assert computed == [1320, 720 - SNAPSHOT_EVERY, 20]


def test_a_snapshot_belongs_to_the_weights_that_made_it():
    served = serve(recurrent(STATES_ALONE))
    served.weights.add_adapter("one", random_adapter(served, 1))
    prompt = prompt_of(40)
    plain = run(served.engine, [request("a", prompt, max_tokens=6, **GREEDY)])["a"].completions[0]
    other = run(served.engine, [request("b", prompt, adapter="one", max_tokens=6, **GREEDY)])[
        "b"
    ].completions[0]
    again = run(served.engine, [request("c", prompt, max_tokens=6, **GREEDY)])["c"].completions[0]
    assert other.token_ids != plain.token_ids == again.token_ids
    assert served.engine.counters.prefill_tokens == 80


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "name", [STATES_ALONE, pytest.param(BESIDE_ATTENTION, marks=pytest.mark.slow)]
)
def test_any_order_of_texts_and_little_room(name, ahead):
    """Beginnings of one another, aborts, groups, and a cache that drops what is old: answers are
    the twin's."""
    served = serve(recurrent(name), max_rows=4, prefill_chunk=24, async_scheduling=ahead)
    cache = served.engine.scheduler.room.prefix_cache
    cache.max_tokens = 3 * cache.snapshot_tokens + 200
    generator = random.Random(5)
    texts = [prompt_of(30, seed=9)]
    for turn in range(12):
        asked = {}
        for i in range(generator.randint(1, 5)):
            begin = generator.choice(texts)
            text = [
                *begin[: generator.randint(1, len(begin))],
                *prompt_of(generator.randint(0, 20), seed=100 * turn + i),
            ]
            asked[f"{turn}.{i}"] = text
            served.engine.add(
                request(f"{turn}.{i}", text, n=generator.choice((1, 1, 3)), max_tokens=5, **GREEDY)
            )
        for _ in range(generator.randint(0, 3)):
            served.engine.step()
        victim = generator.choice(list(asked))
        served.engine.abort(victim)
        outputs = run(served.engine, [])
        for name_, text in asked.items():
            for choice in (
                outputs[name_].completions if name_ in outputs and name_ != victim else ()
            ):
                assert list(choice.token_ids) == naive_greedy(served.plain, text, 5, eos=None)
                texts.append([*text, *choice.token_ids])
    assert cache.hit_tokens > 0.2 * cache.query_tokens
    served.engine.check_integrity()


def test_a_snapshot_counts_and_goes_with_its_segment():
    """Room for 30 tokens, a snapshot takes 10: two texts of 8 with one each do not fit beside
    each other."""
    cache = PrefixCache(30, snapshot_tokens=10)
    first, second = tuple(range(8)), tuple(range(20, 28))
    cache.store(key(), first)
    segment, position = cache.snapshot(key(), first)
    segment.snapshots[position] = ["states"]
    assert (cache.tokens, position) == (18, 8)
    assert cache.snapshot(key(), first) is None, "it is there"
    assert [chunk.stop for chunk in cache.find(key(), (*first, 1, 2))] == [8]
    assert cache.find(key(), first) == (), (
        "the last token is fed by the decode step, and no snapshot lies before it"
    )
    cache.store(key(), second)
    segment, position = cache.snapshot(key(), second)
    segment.snapshots[position] = ["states"]
    assert cache.find(key(), (*first, 1, 2)) == ()
    assert cache.tokens == 18


def test_a_text_goes_on_from_the_last_snapshot_on_its_way():
    cache = PrefixCache(1000, snapshot_tokens=1)
    text = tuple(range(100))
    cache.store(key(), text)
    for stop in (30, 60, 100):
        segment, position = cache.snapshot(key(), text[:stop])
        segment.snapshots[position] = ["states"]
    found = {part: cache.find(key(), (*text[:part], 500, 501)) for part in (20, 30, 59, 99, 100)}
    assert {part: chunks[-1].stop if chunks else 0 for part, chunks in found.items()} == {
        20: 0,
        30: 30,
        59: 30,
        99: 60,
        100: 100,
    }
    assert cache.parting(key(), (*text[:59], 500)) == 59


def test_common_beginnings():
    generator = random.Random(0)
    for _ in range(300):
        a = tuple(generator.randrange(2) for _ in range(generator.randrange(9)))
        b = tuple(generator.randrange(2) for _ in range(generator.randrange(9)))
        expected = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        assert common_beginning(a, b) == expected


@pytest.mark.parametrize("bits", [8, 4])
def test_keys_and_values_of_a_hybrid_in_few_bits(bits):
    """A group, another prompt, and one that continues from a snapshot; the states stay in full
    precision. The model's best tokens are far enough apart for 4 bits."""
    config = QWEN3 | {
        "model_type": BESIDE_ATTENTION,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    model = make_model(config | BATCHED[BESIDE_ATTENTION] | {"head_dim": 32})
    use_chunks(model)
    served = serve(model, kv_bits=bits, prefill_chunk=64)
    prompt = prompt_of(100)
    later = [*prompt, 5, 6]
    outputs = run(served.engine, [request("group", prompt, n=4, max_tokens=8, **GREEDY)])
    outputs |= run(served.engine, [request("later", later, max_tokens=8, **GREEDY)])
    assert served.engine.cache.kv_format.bits == bits
    served.engine.check_integrity()
    for choice in outputs["group"].completions:
        assert list(choice.token_ids) == naive_greedy(served.plain, prompt, 8, eos=None)
    assert list(outputs["later"].completions[0].token_ids) == naive_greedy(
        served.plain, later, 8, eos=None
    )
    assert served.engine.counters.prefill_tokens == 100 + 3
