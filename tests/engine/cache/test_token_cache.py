"""Keys and values by tokens: attention in parts, segments that rows share, size classes; held to
the rectangle."""

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.engine.cache import token_cache
from mlx_parallm.engine.cache.batch import (
    BatchCache,
    _step_over_segments,
    choose_cache,
    why_not_by_tokens,
)
from mlx_parallm.engine.cache.kv_format import AS_COMPUTED, Packed
from mlx_parallm.engine.cache.prefix import PrefixChunk, Segment
from mlx_parallm.engine.cache.sharing import (
    CLASS_STEP,
    FIRST_ANSWER,
    PromptRows,
    referenced,
    size_class,
    worth_a_segment,
)
from mlx_parallm.engine.cache.size_classes import Pool
from mlx_parallm.engine.cache.token_cache import TokenCache
from mlx_parallm.errors import ModelError
from mlx_parallm.models.attention_parts import LOG2_E, attend_partly, finish, merge
from mlx_parallm.models.cpu import attention, kernels
from mlx_parallm.system.device import traits
from tests.active_memory import active_memory
from tests.engine.helpers import (
    VOCAB,
    naive_greedy,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
)
from tests.engine.test_architectures import model_of
from tests.tiny_models import QWEN3, make_model


def test_parts_are_added_with_the_right_weights():
    """Three positions with scores 0, ln 2 and ln 5, in parts of two and one: weights 1/8, 2/8
    and 5/8."""
    queries = mx.array([[LOG2_E]])
    keys, values = mx.array([[0.0], [np.log(2)], [np.log(5)]]), mx.array([[8.0], [80.0], [800.0]])
    first = attend_partly(queries, keys[:2].T, values[:2], None)
    # 8 / 2 + 80, log₂ 2, 1 / 2 + 1
    assert [round(array.item(), 4) for array in first] == [84.0, 1.0, 1.5]
    seen = mx.array([[False, False, True]])
    rest = attend_partly(queries, keys.T, values, seen)
    assert finish(merge(first, rest)).item() == pytest.approx(1 + 20 + 500)


@pytest.mark.parametrize("repeats", [1, 3])
def test_large_scores_and_long_parts_are_exact(repeats):
    shapes = [(2, repeats, 8), (2, 900, 8), (2, 900, 4)]
    queries, keys, values = (
        mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)
    )
    queries = 20 * queries
    halves = [slice(0, 650), slice(650, 900)]
    parts = [
        attend_partly(LOG2_E * queries, keys[:, half].swapaxes(-1, -2), values[:, half], None)
        for half in halves
    ]
    wanted = mx.softmax(queries @ keys.swapaxes(-1, -2), axis=-1) @ values
    np.testing.assert_allclose(np.array(finish(merge(*parts))), np.array(wanted), atol=2e-5)


@pytest.mark.not_gpu_like(reason="MLX's own exp is that of its CPU")
def test_powers_of_two():
    x = mx.linspace(-40, 0, 4001)[None]
    found, wanted = kernels.exp2_minus(x, mx.array([[0.0]])), np.exp2(np.array(x, np.float64))
    np.testing.assert_allclose(np.array(found), wanted, rtol=3e-7)
    edges = kernels.exp2_minus(mx.array([[float("nan"), -1e30, -3.0, 0.0]]), mx.array([[0.0]]))[0]
    assert (
        np.isnan(edges[0].item()) and edges[1].item() < 1e-30 and edges[2:].tolist() == [0.125, 1.0]
    )


def test_size_classes_waste_a_quarter_at_most():
    assert [size_class(n) for n in (1, 128, 129, 500, 600, 700, 4000)] == [
        128,
        128,
        256,
        512,
        640,
        800,
        4480,
    ]
    assert all(n <= size_class(n) <= max(1.25 * n, n + 128) for n in range(1, 20000, 7))
    assert not worth_a_segment(255, 16) and worth_a_segment(256, 2) and not worth_a_segment(1023, 1)


def test_long_chunks_are_read_where_they_lie_and_many_short_ones_are_copied():
    chunks = tuple(PrefixChunk(Segment(None, 0, ()), stop) for stop in (100, 1300, 1350, 1400))
    assert referenced(chunks) == chunks[:2]
    assert referenced(chunks[:1]) == ()


class Twins:
    """The same requests through an engine by tokens and one with the rectangle."""

    def __init__(self, **options):
        self.new, self.old = (
            serve(qwen3_model(), **options),
            serve(qwen3_model(), by_tokens=False, **options),
        )
        assert (type(self.new.engine.cache), type(self.old.engine.cache)) == (
            TokenCache,
            BatchCache,
        )
        self.both = (self.new, self.old)
        self.seen = set()

    def run(self, requests, between=None, abort=()):
        """Step by step; returns the outputs of the engine by tokens, equal to the other's."""
        outputs = []
        for served in self.both:
            found = {}
            for item in requests:
                served.engine.add(item)
            step = 0
            while served.engine.has_work:
                step += 1
                found |= {event.request_id: event.output for event in served.engine.step()}
                served.engine.check_integrity()
                if served is self.new:
                    self._look(served.engine.cache)
                if step == 4:
                    for name in abort:
                        served.engine.abort(name)
                    if between is not None:
                        between(served)
            outputs.append(found)
        assert outputs[0].keys() == outputs[1].keys()
        for name, output in outputs[0].items():
            for mine, other in zip(output.completions, outputs[1][name].completions, strict=True):
                assert mine.token_ids == other.token_ids, name
                assert (
                    mine.policy_versions == other.policy_versions
                    and mine.cached_tokens == other.cached_tokens
                )
                np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
        return outputs[0]

    def _look(self, cache):
        for number, level in enumerate(cache.levels):
            self.seen |= {f"level {number}", "all rows" if level.complete else "some rows"}
            self.seen |= {"out of order"} if level.places is not None else set()
            for part in level.parts:
                self.seen |= {"shared" if part.count > 1 else "alone"}
                self.seen |= {"of different lengths"} if part.mask is not None else set()
                self.seen |= {"scattered"} if isinstance(part.rows, mx.array) else set()
        self.seen |= {"compiled"} if any(pool.compiled for pool in cache.step_pools) else set()
        self.seen |= (
            {"some classes"} if len({pool.size for pool in cache.step_pools}) > 2 else set()
        )


@pytest.mark.parametrize("fewest", [attention.FEWEST_POSITIONS, 1], ids=["MLX's", "compiled"])
def test_a_mix_of_groups_turns_and_lengths_equals_the_rectangle(small, fewest, monkeypatch):
    """Groups, prompts that part from each other in the middle, turns that continue, aborts, and a
    publish under way."""
    monkeypatch.setattr(attention, "FEWEST_POSITIONS", fewest)
    calls = count_calls(monkeypatch)
    twins = Twins(max_rows=24, prefill_chunk=48)
    generator = random.Random(1)
    system = [generator.randrange(VOCAB - 1) for _ in range(40)]
    turns = [
        [*system[: 40 - 9 * i], *(generator.randrange(VOCAB - 1) for _ in range(5 + 11 * i))]
        for i in range(4)
    ]
    for turn in range(4):
        requests = [
            request(
                f"g{i}",
                text,
                n=1 + 2 * (i % 3),
                seed=10 * turn + i,
                max_tokens=4 + 7 * i,
                ignore_eos=True,
            )
            for i, text in enumerate(turns)
        ]
        others = ragged_prompts(5, seed=turn, longest=50)
        requests += [
            request(f"s{i}", p, temperature=0.0, max_tokens=3 + 9 * i) for i, p in enumerate(others)
        ]
        other = dict(tree_flatten(qwen3_model(seed=1 + turn).parameters()))
        between = (
            (lambda served, other=other: served.weights.publish_parameters(other))
            if turn == 2
            else None
        )
        outputs = twins.run(requests, between, abort=["g3", "s4"][: turn % 3])
        for i in range(len(turns)):
            turns[i] = [*turns[i], *outputs[f"g{i}"].completions[-1].token_ids, *range(3)]
    ways = {
        "level 0",
        "level 1",
        "all rows",
        "some rows",
        "shared",
        "alone",
        "out of order",
        "scattered",
    }
    assert twins.seen >= ways | {"some classes", "of different lengths"}
    assert (
        bool(calls) == ("compiled" in twins.seen) == (fewest == 1 and attention.has_fast_products())
    )


def count_calls(monkeypatch):
    calls, function = [], token_cache.attention_of_rows

    def counting(*arguments):
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(token_cache, "attention_of_rows", counting)
    return calls


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_many_rows_of_float32_are_computed_by_what_is_compiled(dtype, monkeypatch):
    """Where MLX computes on a CPU; exp by bits is of float32 only."""
    calls = count_calls(monkeypatch)
    cache = TokenCache(qwen3_model(), 16, 2048)
    cache.place([PromptRows(0, 16, 140, ())], 0)
    seen = []
    for step in range(2):
        cache.begin_step([140 + step] * 16)
        seen.append(cache.step_pools[0].compiled)
        arrays = [mx.random.normal((16, heads, 1, 16)).astype(dtype) for heads in (2, 2, 4)]
        cache.layers[0].update_and_fetch(*arrays[:2])
        assert cache.layers[0].attend(arrays[2], 0.25).dtype == dtype
    wanted = dtype == mx.float32 and attention.has_fast_products()
    # before the first write the type is not known
    assert seen == [False, wanted] and len(calls) == wanted


def test_adapters_of_a_group_and_beside_it_equal_the_rectangle(small):
    twins = Twins(max_rows=16)
    for served in twins.both:
        served.weights.add_adapter("a", random_adapter(served, 1))
    prompt = ragged_prompts(1, shortest=30, longest=30)[0]
    with_adapter = request("with", prompt, adapter="a", n=4, seed=3, max_tokens=12)
    twins.run([with_adapter, request("without", prompt, n=3, seed=4, max_tokens=9)])
    assert "shared" in twins.seen


def test_evicted_and_forgotten_segments_stay_alive_for_their_rows(small):
    """A prefix cache of one prompt: each new prompt drops the one before, whose rows still read
    it."""
    served = serve(qwen3_model(), prefix_cache_bytes=60 * 512, max_rows=8)
    prompts = ragged_prompts(4, shortest=40, longest=50)
    for i, prompt in enumerate(prompts):
        served.engine.add(
            request(f"r{i}", prompt, n=2, temperature=0.0, max_tokens=30, ignore_eos=True)
        )
        served.engine.step()
        served.engine.step()
        served.engine.check_integrity()
    served.engine.reset_prefix_cache()
    outputs = run(served.engine, [])
    for i, prompt in enumerate(prompts):
        for choice in outputs[f"r{i}"].completions:
            assert list(choice.token_ids) == naive_greedy(served.plain, prompt, 30, eos=None)
    served.engine.release_memory()
    assert served.engine.cache.nbytes == 0


def test_a_group_holds_its_prompt_once_and_a_second_group_takes_it_from_the_prefix_cache():
    served = serve(qwen3_model(), max_rows=32, prefill_chunk=600)
    token = served.engine.cache.token_bytes()
    prompt = ragged_prompts(1, shortest=1201, longest=1201)[0]
    held, arrays = {}, set()
    for n in (1, 8):
        served.engine.add(request(f"n{n}", prompt, n=n, max_tokens=20, ignore_eos=True))
        while len(served.engine.scheduler.rows) < n:
            served.engine.step()
        served.engine.step()
        held[n] = served.engine.cache.nbytes / token
        counters = served.engine.counters
        assert (
            counters.kv_bytes == held[n] * token
            and counters.kv_bytes_shared == (n - 1) * 1200 * token
        )
        assert counters.kv_tokens == n * 1202
        [part] = served.engine.cache.levels[0].parts
        assert part.count == n
        [segment] = served.engine.cache._segments()
        arrays.add(id(segment.arrays[0]))
        run(served.engine, [])
    assert held == {1: 1200 + 64, 8: 1200 + 8 * 64}
    assert len(arrays) == 1, "nothing was copied"
    assert served.engine.counters.prefill_tokens == 1201
    served.engine.release_memory()
    assert served.engine.counters.kv_bytes == served.engine.counters.kv_bytes_shared == 0
    seconds = served.engine.counters.step_seconds
    assert seconds["score"] < min(
        seconds[part] for part in ("schedule", "build", "compute", "read")
    )


def test_memory_and_reading_follow_the_tokens_held():
    """Requests of 5 to 2,000 tokens come, alone and in groups, and end at random. At each step
    at most 1.3 times the tokens held are allocated and 1.5 times are read, and a class step a
    row; the smallest classes keep a few rows."""
    slots = TokenCache(qwen3_model(), 64, 4096)
    generator, token = random.Random(0), slots.token_bytes()
    spare = 8 * (2 * CLASS_STEP + FIRST_ANSWER)  # with segments and without; FIRST_ANSWER
    cached: list[int] = []
    widest, shared = 0, 0
    for step in range(150):
        for _ in range(generator.choice([0, 0, 1, 3])):
            prompt, count = round(5 * 400 ** generator.random()), generator.choice([1, 1, 1, 2, 8])
            if len(cached) + count <= 64:
                _admit(slots, cached, prompt, count)
        gone = generator.sample(
            range(len(cached)), min(len(cached), generator.choice([0, 0, 1, 4]))
        )
        if step % 50 == 48:  # many of one length
            _end(slots, cached, list(range(len(cached))))
            for _ in range(60):
                _admit(slots, cached, (20, 600, 200)[step // 50], 1)
            gone = []
        elif step % 50 == 49:  # and two of three end
            gone = list(range(20, len(cached)))
        _end(slots, cached, gone)
        if not cached:
            continue
        slots.begin_step(cached)
        for layer in slots.layers:
            layer.update_and_fetch(*[mx.zeros((len(cached), 2, 1, 16))] * 2)
        cached = [count + 1 for count in cached]
        slots.check_integrity(cached)
        segments = sum(len(segment.tokens) for segment in slots._segments())
        held = (
            sum(count - row.offset for count, row in zip(cached, slots._rows, strict=True))
            + segments
        )
        assert slots.nbytes <= (1.3 * held + CLASS_STEP * len(cached) + spare) * token
        read = sum(len(pool.rows) * pool.span for pool in slots.step_pools)
        read += sum(part.factors[0][1].shape[1] for level in slots.levels for part in level.parts)
        assert read <= 1.5 * held + CLASS_STEP * len(cached)
        widest, shared = max(widest, len(slots.step_pools)), max(shared, slots.saved_positions)
    assert widest >= 8 and shared > 3000
    _end(slots, cached, list(range(len(cached))))
    _admit(slots, cached, 5, 1)
    slots.begin_step(cached)  # which gives back what those before it left
    assert slots.nbytes <= spare * token


def test_rows_take_the_room_that_others_left_since_the_last_step():
    slots, cached = TokenCache(qwen3_model(), 64, 4096), []
    for _ in range(2):
        _admit(slots, cached, 20, 40)
        slots.begin_step(cached)
        arrays = [id(array) for pool in slots.step_pools for array in pool.state]
        _end(slots, cached, list(range(len(cached))))
    _admit(slots, cached, 20, 40)
    assert [id(array) for pool in slots._pools.values() for array in pool.state] == arrays


def test_what_nobody_takes_goes_back_before_the_step_and_does_not_grow(monkeypatch):
    """Not in `begin_step`, which runs under the weights' lock and after prompts were written."""
    slots, cached, sizes, resize = TokenCache(qwen3_model(), 64, 4096), [], [], Pool.resize

    def noting(pool, capacity, size):
        sizes.append((capacity, size))
        resize(pool, capacity, size)

    _admit(slots, cached, 255, 40)
    slots.begin_step(cached)
    _end(slots, cached, list(range(1, 40)))
    cached = [256]  # the last one needs a larger class, too
    monkeypatch.setattr(Pool, "resize", noting)
    slots.reserve(cached)
    assert sizes and all(capacity == 1 for capacity, _ in sizes)
    resized = [size for size in sizes if size[1] > 256]
    assert resized
    before = [id(array) for pool in slots._pools.values() for array in pool.state]
    slots.begin_step(cached)
    assert [id(array) for pool in slots._pools.values() for array in pool.state] == before


@pytest.mark.parametrize("beside", ["a prompt", "a text to score", "a text that is being scored"])
def test_room_of_rows_that_left_is_not_held_beside(beside):
    served = serve(qwen3_model(), max_rows=32, prefill_chunk=16)
    text = ragged_prompts(1, shortest=200, longest=200)[0]
    options = {"max_tokens": 2} if beside == "a prompt" else {"prompt_logprobs": 0, "max_tokens": 0}
    served.engine.add(request("many", [1, 2, 3], n=30, max_tokens=3, ignore_eos=True))
    if beside.endswith("scored"):
        served.engine.add(request("long", text, **options))
    held = 0
    while served.engine.scheduler.has_work:
        served.engine.step()
        held = max(held, served.engine.cache.nbytes)
    if not beside.endswith("scored"):
        served.engine.add(request("long", text, **options))
    served.engine.step()
    served.engine.step()
    assert held and served.engine.has_work and served.engine.cache.nbytes == 0


def test_arrays_of_rows_that_left_are_not_kept_alive():
    slots, cached = TokenCache(qwen3_model(), 8, 4096), []
    before = active_memory()
    for _ in range(4):
        _admit(slots, cached, 200, 1)
    slots.begin_step(cached)
    mx.eval([pool.state for pool in slots.step_pools])
    assert active_memory() > before + 800 * slots.token_bytes()
    slots.truncate(0)
    slots.shrink_to([])
    assert active_memory() <= before + 4096


def test_where_memory_is_bounded_the_old_goes_before_the_new_comes(monkeypatch):
    slots, cached, rooms = TokenCache(qwen3_model(), 64, 4096), [], []
    _admit(slots, cached, 20, 1)
    for _ in range(40):
        _admit(slots, cached, 200, 1)
    slots.begin_step(cached)
    _end(slots, cached, list(range(1, 40)))
    slots.place([PromptRows(0, 30, 30, ())], 2)
    before = slots._room
    monkeypatch.setattr(
        Pool,
        "resize",
        lambda pool, *size, was=Pool.resize: (was(pool, *size), rooms.append(slots._room)),
    )
    slots.reserve([*cached, *[30] * 30], 40 * 256)
    assert rooms and max(rooms) <= before


def _admit(slots, cached, length, count):
    segment = PrefixChunk(Segment(None, 0, tuple(range(length))), length)
    prompt = PromptRows(0, count, length, (segment,) if worth_a_segment(length, count) else ())
    first = len(cached)
    cached += [length] * count
    slots.place([prompt], first)
    slots.reserve(cached)
    caches = slots.new_prefill(length)
    for cache in caches:
        cache.update_and_fetch(*[mx.zeros((1, 2, length, 16))] * 2)
    slots.write_prefixes(caches, [prompt], first)


def _end(slots, cached, rows):
    """As the scheduler does: the last rows take the places of those that end."""
    left = len(cached) - len(rows)
    sources = [row for row in range(left, len(cached)) if row not in rows]
    targets = sorted(row for row in rows if row < left)
    if targets:
        slots.move_rows(sources, targets, 0)
    for source, target in zip(sources, targets, strict=True):
        cached[target] = cached[source]
    del cached[left:]
    slots.truncate(left)


def float64(array):
    return np.array(array.astype(mx.float32), np.float64)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_merged_attention_is_exact_within_its_type(dtype):
    """Six rows with own keys and a segment, of scores up to 60: an output is wrong by its own
    rounding and that of the weights, which are rounded as values are. float64 of the rounded
    inputs is the truth."""
    slots = TokenCache(qwen3_model(), 8, 2048)
    slots.place(
        [PromptRows(0, 6, 900, (chunk := PrefixChunk(Segment(None, 0, tuple(range(900))), 900),))],
        0,
    )
    numbers = iter(range(100))

    def made(*shape, scale=1.0):
        return (scale * mx.random.normal(shape, key=mx.random.key(next(numbers)))).astype(dtype)

    chunk.segment.arrays = [made(1, 2, 900, 16) for _ in slots.layers for _ in range(2)]
    layer, own = slots.layers[0], []
    for step in range(3):
        slots.begin_step([900 + step] * 6)
        own.append((made(6, 2, 1, 16), made(6, 2, 1, 16)))
        layer.update_and_fetch(*own[-1])
    queries = made(6, 4, 1, 16, scale=12.0)
    found = layer.attend(queries, 0.25)
    assert found.dtype == dtype
    exact = [float64(array) for array in (queries, *chunk.segment.arrays[:2])]
    steps = [(float64(keys), float64(values)) for keys, values in own]
    for row in range(6):
        for head in range(4):
            of = (row, head // 2)
            keys = np.concatenate([exact[1][0, head // 2], *(keys[of] for keys, _ in steps)])
            values = np.concatenate([exact[2][0, head // 2], *(values[of] for _, values in steps)])
            scores = 0.25 * keys @ exact[0][row, head, 0]
            weights = np.exp(scores - scores.max())
            wanted = weights @ values / weights.sum()
            bound = 4 * {mx.float32: 2.0**-19, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
            np.testing.assert_allclose(float64(found)[row, head, 0], wanted, atol=bound)


def test_bounds_count_a_shared_prompt_once():
    """5,000 positions: 16 choices of one 3,000-token prompt run together; of 16 prompts only one
    does."""
    model = qwen3_model()
    token = serve(model).engine.cache.token_bytes()
    for shared, rows in ((True, 16), (False, 1)):
        served = serve(
            qwen3_model(), max_model_len=8192, prefill_chunk=4096, kv_cache_bytes=9000 * token
        )
        prompts = ragged_prompts(1 if shared else 16, shortest=3000, longest=3000)
        for i, prompt in enumerate(prompts):
            served.engine.add(
                request(f"r{i}", prompt, n=16 if shared else 1, max_tokens=40, ignore_eos=True)
            )
        for _ in range(3):
            served.engine.step()
            assert served.engine.cache.nbytes <= 9000 * token
        assert len(served.engine.scheduler.rows) >= rows and (
            shared or len(served.engine.scheduler.rows) <= 2
        )


@pytest.mark.parametrize("name", ["gemma3_text", "mamba2", "deepseek_v3", "gpt_bigcode"])
def test_an_architecture_without_such_a_path_keeps_the_one_it_has(name):
    layout = "rows" if name == "gpt_bigcode" else "rectangle"
    assert serve(model_of(name)).engine.cache.layout == layout


def test_a_layer_that_looks_into_its_keys_has_the_rectangle():
    class Casting(type(qwen3_model().layers[0].self_attn)):
        """Raises where keys are not array."""

        def __call__(self, x, mask=None, cache=None):
            if isinstance(cache, token_cache.TokenLayer):
                raise AttributeError("'TokenLayer' object has no attribute 'astype'")
            return super().__call__(x, mask, cache)

    model = make_model(QWEN3 | {"vocab_size": VOCAB})
    for layer in model.layers:
        layer.self_attn.__class__ = Casting
    assert type(choose_cache(model, "casting", 2, 64)) is BatchCache
    assert why_not_by_tokens(model) == "'TokenLayer' object has no attribute 'astype'"


def test_the_check_at_load_reads_a_segment_and_quantised_keys(monkeypatch):
    def fail(*_):
        raise ValueError("shapes")

    with monkeypatch.context() as patch:
        patch.setattr(token_cache.TokenLayer, "_over", fail)
        assert type(choose_cache(qwen3_model(), "qwen3", 2, 64)) is BatchCache
    product = Packed.product
    monkeypatch.setattr(Packed, "product", fail)
    assert type(choose_cache(qwen3_model(), "qwen3", 2, 64)) is TokenCache
    with pytest.raises(ModelError, match=r"server\.kv_bits.*'qwen3'"):
        choose_cache(qwen3_model(head_dim=32), "qwen3", 2, 64, kv_bits=8)
    monkeypatch.setattr(Packed, "product", lambda self, x: product(self, x) * mx.nan)
    with pytest.raises(ModelError, match="not finite"):
        choose_cache(qwen3_model(head_dim=64), "qwen3", 2, 64, kv_bits=8)


@pytest.mark.skipif(not traits.on_cpu(), reason="on a GPU all heads are one product")
def test_a_shared_prompts_heads_go_by_what_stays_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, heads = qwen3_model(), list[int]()
    whole = _step_over_segments(model, AS_COMPUTED)
    attend = attention.attend_partly
    monkeypatch.setattr(attention, "BLOCK", 1)
    monkeypatch.setattr(
        attention, "attend_partly", lambda x, *rest: (heads.append(len(x)), attend(x, *rest))[1]
    )
    np.testing.assert_allclose(_step_over_segments(model, AS_COMPUTED), whole, atol=1e-5)
    assert set(heads) == {1}
