"""server.kv_bits: keys and values in 8 or 4 bits, held to attention in float64 and to mlx-lm's
quantised cache."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.engine.cache.kv_format import KVFormat
from mlx_parallm.engine.cache.prefix import PrefixChunk, Segment
from mlx_parallm.engine.cache.sharing import PromptRows
from mlx_parallm.engine.cache.token_cache import TokenCache
from mlx_parallm.engine.validation import RequestLimits
from mlx_parallm.errors import ModelError, RequestError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.attention_parts import LOG2_E, attend_partly, finish
from tests.engine.helpers import (
    EOS,
    VOCAB,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
)
from tests.engine.test_architectures import model_of

HEADS, REPEATS, WIDTH = 2, 3, 64


def model_of_width(width=WIDTH, **changes):
    return qwen3_model(head_dim=width, **changes)


def quantised(model, bits=8, **options):
    return serve(model, kv_bits=bits, **options)


def unpacked(arrays, bits):
    """q · scale + bias in float64: the first number of a row of words lies in the lowest bits of
    its first word."""
    words, scales, biases = (
        np.array(array.astype(mx.float32) if i else array) for i, array in enumerate(arrays)
    )
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (
        (words[..., None] >> shifts & np.uint32(2**bits - 1))
        .reshape(*scales.shape, -1)
        .astype(np.float64)
    )
    return (numbers * scales[..., None] + biases[..., None]).reshape(*words.shape[:-1], -1)


def rounded(x, kv_format):
    """What is left of x [..., D] after quantising, float64."""
    return unpacked(mx.quantize(x, kv_format.group_size, kv_format.bits), kv_format.bits)


def attention(queries, keys, values, scale):
    """queries [heads, D], keys and values [H, T, D]; float64."""
    grouped = np.array(queries.astype(mx.float32), np.float64).reshape(
        len(keys), -1, keys.shape[-1]
    )
    scores = scale * grouped @ keys.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ values).reshape(queries.shape)


class Texts:
    """Keys and values of some texts by a TokenCache of one layer, and the same ones in float64,
    a list for each row."""

    def __init__(self, kv_format, dtype, width):
        model = qwen3_model(head_dim=width, num_hidden_layers=1, num_key_value_heads=HEADS)
        self.cache, self.format, self.dtype, self.width = (
            TokenCache(model, 32, 2048, kv_format),
            kv_format,
            dtype,
            width,
        )
        self.rows, self._serial = [], 0

    def random(self, *shape):
        self._serial += 1
        x = mx.random.normal((*shape, self.width), key=mx.random.key(self._serial))
        return (x * (1 + mx.arange(self.width) % 7)).astype(self.dtype)

    def add(self, lengths, count=1, shared=0):
        """`count` rows for each prompt; its first `shared` positions are one segment."""
        prefill = SimpleNamespace(
            keys=self.random(len(lengths), HEADS, 64), values=self.random(len(lengths), HEADS, 64)
        )
        chunks = (PrefixChunk(Segment(None, 0, tuple(range(shared))), shared),) if shared else ()
        prompts = [
            PromptRows(source, count, length, chunks) for source, length in enumerate(lengths)
        ]
        first = len(self.rows)
        self.cache.place(prompts, first)
        self.rows += [
            [
                rounded(array[source, :, :length], self.format)
                for array in (prefill.keys, prefill.values)
            ]
            for source, length in enumerate(lengths)
            for _ in range(count)
        ]
        self.cache.reserve(self.lengths)
        self.cache.write_prefixes([prefill], prompts, first)

    @property
    def lengths(self):
        return [keys.shape[1] for keys, _ in self.rows]

    def step(self):
        """Every row takes one more token; returns the largest error over the largest number of
        the attention."""
        cache, count = self.cache, len(self.rows)
        cache.begin_step(self.lengths)
        keys, values = self.random(count, HEADS, 1), self.random(count, HEADS, 1)
        queries = self.random(count, HEADS * REPEATS, 1) / 8
        held, _ = cache.layers[0].update_and_fetch(keys, values)
        found = held.attend(queries, 0.125)
        assert found.dtype == self.dtype
        errors, sizes = [], []
        for place, row in enumerate(cache.order):
            new = [rounded(array[place], self.format) for array in (keys, values)]
            self.rows[row] = [
                np.concatenate(pair, axis=1) for pair in zip(self.rows[row], new, strict=True)
            ]
            wanted = attention(queries[place, :, 0], *self.rows[row], 0.125)
            errors.append(np.abs(np.array(found[place, :, 0].astype(mx.float32)) - wanted).max())
            sizes.append(np.abs(wanted).max())
        cache.check_integrity(self.lengths)
        return max(errors) / max(sizes)

    def move(self, source, target):
        self.cache.move_rows([source], [target], self.lengths[source])
        self.rows[target] = self.rows.pop()
        self.cache.truncate(len(self.rows))


@pytest.mark.parametrize(
    ("bits", "group", "width", "dtype", "error"),
    [
        (8, 64, 64, mx.float32, 1e-5),
        (4, 32, 32, mx.float32, 1e-5),
        (4, 64, 128, mx.bfloat16, 2e-2),
        (8, 32, 96, mx.float16, 2e-3),
    ],
)
def test_attention_equals_float64_over_the_unpacked_bits(small, bits, group, width, dtype, error):
    """Rows of their own, of several lengths and of one (a scatter and a slice), a shared segment
    with and without a rest, rows that grow into the next class, and rows that take others'
    places."""
    texts = Texts(KVFormat(bits, group), dtype, width)
    texts.add([5, 5])
    assert texts.step() < error and texts.cache.step_pools[0].same == 5
    texts.add([30, 12, 3])
    texts.add([40], count=3, shared=33)
    texts.add([20], count=2, shared=20)
    for _ in range(5):
        assert texts.step() < error
    texts.move(len(texts.rows) - 1, 1)
    texts.move(len(texts.rows) - 1, 3)
    for _ in range(8):
        assert texts.step() < error
    assert len(texts.cache.step_pools) > 2 and texts.cache.levels
    # The held bits are those of the tokens, each by itself.
    for row, held in enumerate(texts.rows):
        arrays = texts.cache.read(row, 0, texts.lengths[row])
        for part, wanted in zip((arrays[:3], arrays[3:]), held, strict=True):
            np.testing.assert_array_equal(unpacked(part, bits)[0], wanted)


@pytest.mark.parametrize(
    ("bits", "dtype", "error"), [(8, mx.float32, 1e-5), (4, mx.bfloat16, 2e-2)]
)
def test_the_product_of_other_devices_gives_the_same(small, bits, dtype, error, monkeypatch):
    """On a GPU it is MLX's product with quantised factors, which the CPU has too."""
    monkeypatch.setattr("mlx_parallm.system.device.traits.on_cpu", lambda: False)
    texts = Texts(KVFormat(bits, 64), dtype, 64)
    texts.add([30, 12])
    texts.add([40], count=3, shared=33)
    assert max(texts.step() for _ in range(2)) < error


@pytest.mark.not_gpu_like(reason="MLX's CPU adds half-precision numbers one after the other")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bits", [None, 8])
def test_half_precision_over_2000_positions_is_exact_and_finite(bits, dtype):
    """2,000 values around 40 add up to more than float16 holds, and to nothing good in bfloat16."""
    kv_format, shape = KVFormat(bits, 64), (1, 2, 2000, 64)
    keys, values, queries = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i in range(3)
    )
    arrays, queries = kv_format.pack(keys / 10, values + 40), queries[:, :, :2]
    found = finish(attend_partly(queries, *kv_format.factors(arrays), None, LOG2_E / 8))
    held = [np.array(array.astype(mx.float32), np.float64) for array in kv_format.unpack(arrays)]
    wanted = attention(queries[0], held[0][0], held[1][0], 1 / 8)
    np.testing.assert_allclose(np.array(found)[0], wanted, rtol=1e-2)
    # 64 · 40 · 40 is more than float16 holds; an eighth of it is not.
    even = attend_partly(
        mx.full(queries.shape, 40, dtype),
        *KVFormat().factors([mx.full(shape, 40, dtype)] * 2),
        None,
        0.1,
    )
    assert finish(even).min().item() == pytest.approx(40, rel=1e-2)


def mlx_lm_greedy(model, prompt, max_tokens, bits, group):
    """mlx-lm's model over its QuantizedKVCache: the prompt but for its last token is computed,
    then quantised."""
    caches = make_prompt_cache(model)
    if len(prompt) > 1:
        mx.eval(model(mx.array(prompt[:-1])[None], cache=caches))
    caches = [cache.to_quantized(group_size=group, bits=bits) for cache in caches]
    token, tokens = prompt[-1], []
    while len(tokens) < max_tokens and token != EOS:
        token = int(mx.argmax(model(mx.array([[token]]), cache=caches)[0, -1]).item())
        tokens.append(token)
    return tokens


@pytest.mark.parametrize(("bits", "ahead"), [(8, False), (8, True), (4, True)])
def test_the_engine_equals_mlx_lms_quantised_cache_token_by_token(small, bits, ahead):
    model = model_of_width()
    served = quantised(
        model, bits, max_rows=12, prefill_chunk=64, async_scheduling=ahead, prefix_cache_bytes=0
    )
    prompts = ragged_prompts(6, seed=bits, longest=70)
    requests = [
        request(f"r{i}", p, temperature=0.0, max_tokens=8 + 9 * (i % 3), n=1 + i % 3)
        for i, p in enumerate(prompts)
    ]
    outputs = run(served.engine, requests)
    full = 0
    for i, prompt in enumerate(prompts):
        wanted = mlx_lm_greedy(served.plain, prompt, 8 + 9 * (i % 3), bits, 64)
        for choice in outputs[f"r{i}"].completions:
            assert list(choice.token_ids) == wanted
        full += wanted == list(
            run(serve(model_of_width()).engine, [requests[i]])[f"r{i}"].completions[0].token_ids
        )
    assert full < len(prompts) or bits == 8, "four bits change an answer"
    assert served.engine.cache.token_bytes() == 2 * 2 * HEADS * WIDTH * (bits / 8 + 2 * 4 / 64)


def test_layers_may_have_different_heads(small):
    served = quantised(model_of("openelm"), 8)
    [prompt] = ragged_prompts(1, shortest=40, longest=40)
    found = run(
        served.engine,
        [
            request("r", prompt, n=2, temperature=0.0, max_tokens=6),
            request("s", [7], n=1, temperature=0.0, max_tokens=6),
        ],
    )
    for name, tokens in (("r", prompt), ("s", [7])):
        wanted = mlx_lm_greedy(served.plain, tokens, 6, 8, 32)
        assert all(list(choice.token_ids) == wanted for choice in found[name].completions)


def test_memory_is_what_the_bits_need():
    """A number takes 4 bits and two float32 for each 64: 4.0 / (0.5 + 0.125) = 6.4 times less
    than float32."""
    served = quantised(
        model_of_width(), 4, max_rows=8, prefill_chunk=2048, prefix_cache_bytes=1 << 20
    )
    cache, counters = served.engine.cache, served.engine.counters
    layers, numbers = 2, 2 * HEADS * WIDTH
    assert cache.token_bytes() == layers * numbers * 4 / 6.4
    assert cache.prefill_token_bytes() == layers * numbers * 4
    assert served.engine.scheduler.room.prefix_cache.max_tokens == (1 << 20) // cache.token_bytes()
    [prompt] = ragged_prompts(1, shortest=1201, longest=1201)
    served.engine.add(request("r", prompt, n=8, max_tokens=20, ignore_eos=True))
    while len(served.engine.scheduler.rows) < 8:
        served.engine.step()
    served.engine.step()
    assert cache.nbytes == counters.kv_bytes == (1200 + 8 * 64) * cache.token_bytes()
    assert counters.kv_bytes_shared == 7 * 1200 * cache.token_bytes()
    run(served.engine, [])
    stored = [segment for _, segment in served.engine.scheduler.room.prefix_cache._by_age.values()]
    held = sum(array.nbytes for segment in stored for array in segment.arrays)
    assert (
        held
        == served.engine.scheduler.room.prefix_cache.tokens * cache.token_bytes()
        > 1200 * cache.token_bytes()
    )


def test_a_hit_begins_a_prefill_with_unpacked_keys_and_values_and_a_publish_ends_it(small):
    """The prefix that is kept has the row's bits; what is computed after it sees what they stand
    for."""
    served = quantised(model_of_width(), 4, max_rows=8)
    cache, [prompt] = served.engine.cache, ragged_prompts(1, shortest=40, longest=40)
    first = run(served.engine, [request("a", prompt, temperature=0.0, max_tokens=9)])["a"]
    weights = served.engine._present.of(SimpleNamespace(adapter=None))
    chunks = served.engine.scheduler.room.prefix_cache.find((weights, None), tuple(prompt))
    assert chunks[-1].stop == 39
    begun = cache.new_prefill(50, [chunks, chunks])
    for layer, arrays in zip(begun, cache.kv_format.layers(chunks[0].segment.arrays), strict=True):
        for restored, held in ((layer.state[0], arrays[:3]), (layer.state[1], arrays[3:])):
            np.testing.assert_allclose(
                np.array(restored)[1, :, :39], unpacked(held, 4)[0, :, :39], atol=1e-6
            )
    computed = make_prompt_cache(served.plain)
    mx.eval(served.plain(mx.array(prompt[:-1])[None], cache=computed))
    for layer, arrays in zip(
        computed, cache.kv_format.layers(chunks[0].segment.arrays), strict=True
    ):
        wanted = rounded(layer.state[0][:, :, :39], cache.kv_format)
        np.testing.assert_allclose(unpacked(arrays[:3], 4)[:, :, :39], wanted, atol=1e-5)
    again = run(served.engine, [request("b", prompt, temperature=0.0, max_tokens=9)])["b"]
    assert again.completions[0].cached_tokens == 39 and first.completions[0].cached_tokens == 0
    assert again.completions[0].token_ids == first.completions[0].token_ids, (
        "the same bits are read"
    )
    served.weights.publish_parameters(
        dict(tree_flatten(qwen3_model(seed=1, head_dim=WIDTH).parameters()))
    )
    assert (
        run(served.engine, [request("c", prompt, max_tokens=9)])["c"].completions[0].cached_tokens
        == 0
    )


@pytest.mark.parametrize("length", [40, 600])
def test_what_a_hit_brings_keeps_its_bits(length):
    """Copied into a row (short), or read where it lies with the rest in a new segment; quantised
    a second time, some groups would have another scale."""
    served = quantised(model_of_width(), 4, max_rows=8, prefill_chunk=2048)
    cache, scheduler = served.engine.cache, served.engine.scheduler
    [prompt] = ragged_prompts(1, shortest=length, longest=length)
    run(served.engine, [request("a", prompt, temperature=0.0, max_tokens=9)])
    [kept] = scheduler.room.prefix_cache.find(
        (served.engine._present.of(SimpleNamespace(adapter=None)), None), (*prompt, 0)
    )
    wanted = [array[:, :, : kept.stop] for array in kept.segment.arrays]
    kept_positions, others = kept.stop, ragged_prompts(2, seed=1, shortest=1200, longest=1200)
    for i, rest in enumerate((others[0], others[1], prompt[:9])):
        served.engine.add(request(f"b{i}", [*prompt, *rest], max_tokens=20, ignore_eos=True))
    while len(scheduler.rows) < 3:
        served.engine.step()
    for row in range(3):
        held = cache.read(row, 0, kept_positions)
        assert all(
            mx.array_equal(array, bits).item() for array, bits in zip(held, wanted, strict=True)
        )
        assert scheduler.rows[row].cached_prompt_tokens == kept_positions
    run(served.engine, [])


def test_a_row_of_nan_fails_alone():
    """Quantising may lose a NaN, but its scale does not, nor do the logits; the row's next owner
    sees none of it."""
    served = quantised(model_of_width(), 8, max_rows=3, prefix_cache_bytes=0)
    poison = {
        path: LoraPair(pair.a, pair.b * mx.nan, pair.scale)
        for path, pair in random_adapter(served, 1).items()
    }
    served.weights.add_adapter("nan", poison)
    prompts = ragged_prompts(6, shortest=5, longest=20)
    requests = [
        request(f"r{i}", p, adapter="nan" if i % 3 == 1 else None, temperature=0.0, max_tokens=9)
        for i, p in enumerate(prompts)
    ]
    outputs = run(served.engine, requests)
    for i, prompt in enumerate(prompts):
        completion = outputs[f"r{i}"].completions[0]
        if i % 3 == 1:
            assert completion.finish_reason == "error" and "not finite" in completion.error
        else:
            assert list(completion.token_ids) == mlx_lm_greedy(served.plain, prompt, 9, 8, 64)
    assert not any(
        mx.isnan(array).any().item()
        for pool in served.engine.cache._pools.values()
        for array in pool.state
    )


def test_a_prompt_that_is_computed_counts_in_full():
    """200 positions in 4 bits: a prompt of 20 takes 20 · 6.4 while it is computed, then 20."""
    limits = RequestLimits(2048, VOCAB, 200, prompt_cost=6.4)
    assert limits.room(20) == 200 - 20 - 128 + 1
    token = quantised(model_of_width(), 4).engine.cache.token_bytes()
    served = quantised(model_of_width(), 4, kv_cache_bytes=600 * token, prefix_cache_bytes=0)
    # 600 / 6.4
    with pytest.raises(RequestError, match=r"93.*94"):
        served.engine.add(request("long", [1] * 94, prompt_logprobs=0, max_tokens=0))
    [scored] = run(
        served.engine, [request("s", [1] * 93, prompt_logprobs=0, max_tokens=0)]
    ).values()
    assert scored.prompt_logprobs is not None, "no row will hold it"
    scheduler = served.engine.scheduler
    assert (scheduler.room.max_tokens, scheduler.room.prompt_cost) == (600, 6.4)
    for i, prompt in enumerate(ragged_prompts(2, shortest=41, longest=41)):
        served.engine.add(request(f"r{i}", prompt, max_tokens=60, ignore_eos=True))
    served.engine.step()  # 40 · 6.4 + 128 positions fit once, and not twice beside each other
    assert len(scheduler.rows) == 1 and len(scheduler.waiting) == 1
    served.engine.step()
    assert len(scheduler.rows) == 2
    run(served.engine, [])


@pytest.mark.parametrize(
    ("name", "width", "reason"),
    [
        ("qwen3", 16, "its head dimension, 16, is not divisible by 32"),
        ("qwen3", 80, "its head dimension, 80, is not divisible by 32"),
        ("gemma3_text", None, "a layer needs RotatingKVCache"),
        ("mamba2", None, "no layer keeps keys and values"),
    ],
)
def test_a_model_without_a_quantised_path_is_refused_at_the_start(name, width, reason):
    with pytest.raises(ModelError) as error:
        quantised(model_of_width(width) if width else model_of(name), 8, architecture=name)
    assert (
        str(error.value)
        == f"server.kv_bits = 8 does not work for the architecture {name!r}: {reason}; leave it out"
    )


def test_the_largest_groups_that_divide_the_head_dimensions():
    assert KVFormat.fitting(4, [128, 64]) == KVFormat(4, 64)
    assert KVFormat.fitting(4, [128, 96]) == KVFormat(4, 32)
    assert KVFormat.fitting(4, [128, 80]) is None
