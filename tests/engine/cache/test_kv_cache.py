"""Slot cache: the protocol, rows in place, growth, the masks, and what it refuses to serve."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.engine.cache.batch import BatchCache
from mlx_parallm.engine.cache.rectangle import SlotCache
from mlx_parallm.engine.cache.sharing import PromptRows
from mlx_parallm.models.mlx_lm_api import KVCache
from tests.active_memory import active_memory
from tests.engine.helpers import qwen3_model, ragged_prompts, request, run, serve

HEADS, WIDTH = 2, 8


def tokens_of(rows: int, seed: int) -> mx.array:
    return mx.random.normal((rows, HEADS, 1, WIDTH), key=mx.random.key(seed))


def decode(
    slots: SlotCache, positions: list[int], seed: int
) -> tuple[mx.array, mx.array, mx.array]:
    slots.begin_step(positions)
    new = tokens_of(len(positions), seed)
    keys, values = slots.layers[0].update_and_fetch(new, -new)
    mx.eval(keys, values)
    return new, keys, values


def test_each_row_is_written_at_its_own_position_and_nowhere_else():
    slots = SlotCache(1, max_rows=4, max_positions=512)
    decode(slots, [0, 3, 40], 0)
    before = np.array(slots.layers[0].keys)
    new, keys, values = decode(slots, [1, 4, 41], 1)
    after = np.array(slots.layers[0].keys)
    assert keys.shape == (3, HEADS, 64, WIDTH) and values.shape == keys.shape
    for row, position in enumerate([1, 4, 41]):
        np.testing.assert_array_equal(after[row, :, position], np.array(new)[row, :, 0])
        np.testing.assert_array_equal(np.array(values)[row, :, position], -np.array(new)[row, :, 0])
        before[row, :, position] = after[row, :, position]
    np.testing.assert_array_equal(before, after)
    assert slots.layers[0].offset.tolist() == [1, 4, 41]


def test_masks_show_each_row_its_own_past_and_window():
    slots = SlotCache(1, max_rows=4, max_positions=512)
    slots.begin_step([0, 5, 40])
    mask = np.array(slots.layers[0].make_mask(1))
    assert mask.shape == (3, 1, 1, 64)
    assert [row.sum() for row in mask] == [1, 6, 41]
    assert mask[1, 0, 0, :6].all()
    window = np.array(slots.layers[0].make_mask(1, return_array=True, window_size=4))
    assert [row.sum() for row in window] == [1, 4, 4]
    assert window[1, 0, 0, 2:6].all()


def test_rows_at_one_position_read_up_to_it_without_a_mask():
    slots = SlotCache(1, max_rows=2, max_positions=512)
    _, keys, _ = decode(slots, [40, 40], 1)
    assert keys.shape[2] == 41
    assert slots.layers[0].make_mask(1) is None
    assert slots.layers[0].make_mask(1, window_size=41) is None
    assert np.array(slots.layers[0].make_mask(1, window_size=40)).sum() == 2 * 40
    assert slots.layers[0].make_mask(1, return_array=True).all()


def test_steps_moves_and_admissions_copy_no_cache():
    """Peak memory over each stays far below the cache's own size: the writes happen in place."""
    slots = SlotCache(2, max_rows=32, max_positions=2048)
    slots.make_room(32, 1024)

    def step(positions: list[int]) -> None:
        slots.begin_step(positions)
        for layer in slots.layers:
            keys, values = layer.update_and_fetch(tokens_of(32, 0), tokens_of(32, 1))
            mx.eval(keys.sum(), values.sum())

    step([900] * 32)
    total = slots.nbytes
    prefill = [KVCache(), KVCache()]
    for cache in prefill:
        cache.update_and_fetch(*(mx.zeros((2, HEADS, 64, WIDTH)),) * 2)
    mx.eval([cache.state for cache in prefill])

    def admit() -> None:
        slots.write_prefixes(prefill, (PromptRows(0, 1, 64), PromptRows(1, 2, 64)), 29)
        mx.eval(slots.state)

    def move() -> None:
        slots.move_rows([31, 30], [2, 5], 128)
        mx.eval(slots.state)

    for action in (admit, move, lambda: slots.scrub_row(3)):
        base = active_memory()
        mx.reset_peak_memory()
        action()
        assert mx.get_peak_memory() - base < total / 8
    base = active_memory()
    mx.reset_peak_memory()
    step([901] * 32)
    # keys.sum() reads a view; what may appear is one contiguous copy of a view, never a second
    # cache
    assert mx.get_peak_memory() - base < total / 2


def test_growth_keeps_the_rows_and_doubles():
    slots = SlotCache(1, max_rows=8, max_positions=3000)
    decode(slots, [5], 0)
    first = np.array(slots.layers[0].keys)[0, :, :6]
    decode(slots, [6, 700], 1)
    assert slots.row_capacity == 2 and slots.position_capacity == 1024
    np.testing.assert_array_equal(np.array(slots.layers[0].keys)[0, :, :6], first)
    decode(slots, [7, 2999, 1], 2)
    assert slots.row_capacity == 4 and slots.position_capacity == 3000
    slots.check_integrity([8, 3000, 2])
    slots.clear()
    assert slots.nbytes == 0 and slots.layers[0].keys is None


def test_shrinking_gives_memory_back_and_keeps_the_rows():
    slots = SlotCache(1, max_rows=8, max_positions=3000)
    decode(slots, [5, 1800, 3, 4, 5, 6], 0)
    rows = np.array(slots.layers[0].keys)[:2, :, :6]
    large = slots.nbytes
    slots.shrink_to([5, 1699, 3, 4])
    assert slots.nbytes == large, "still needed"
    slots.shrink_to([5, 99])
    assert slots.nbytes < large / 8
    np.testing.assert_array_equal(np.array(slots.layers[0].keys)[:2, :, :6], rows)
    slots.check_integrity([6, 100])


def test_integrity_check_sees_wrong_counts():
    slots = SlotCache(1, max_rows=8, max_positions=512)
    decode(slots, [5], 0)
    slots.check_integrity([6])
    with pytest.raises(AssertionError):
        slots.check_integrity([129])
    with pytest.raises(AssertionError):
        slots.check_integrity([1, 1, 1])


def test_the_engine_gives_its_cache_back_when_idle():
    served = serve(qwen3_model())
    run(
        served.engine,
        [request(f"r{i}", prompt, max_tokens=3) for i, prompt in enumerate(ragged_prompts(8))],
    )
    assert served.engine.cache.nbytes > 0
    served.engine.release_memory()
    assert served.engine.cache.nbytes == 0


def test_prefill_caches_are_allocated_at_once():
    model = qwen3_model()
    caches = BatchCache(model, 1, 700).new_prefill(700)
    for start in (0, 512):
        model(mx.zeros((1, min(512, 700 - start)), mx.int32), cache=caches)
    assert {cache.keys.shape[2] for cache in caches} == {700}
