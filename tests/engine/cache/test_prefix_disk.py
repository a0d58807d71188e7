"""Prefixes on disk (server.prefix_disk_bytes): a new process answers as the old one without
computing its prompts, and nothing wrong is ever read."""

import os
import random
import subprocess
import sys
import textwrap
from dataclasses import replace
from threading import Event, Thread, current_thread
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.engine.prefix_disk import arrivals as arrivals_module
from mlx_parallm.engine.prefix_disk import disk as disk_module
from mlx_parallm.engine.prefix_disk import files as files_module
from mlx_parallm.engine.prefix_disk import opening as opening_module
from mlx_parallm.engine.prefix_disk.disk import Raw
from mlx_parallm.engine.prefix_disk.files import BLOCK, BlockFiles, block_names
from mlx_parallm.engine.prefix_disk.opening import model_name
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.recurrent.layers import use_chunks
from tests.engine.cache.stored_prefixes import NAME, PROMPT, answer, files_of, started
from tests.engine.helpers import (
    Served,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
    short_segments,
)
from tests.engine.test_architectures import model_of

FLIPS = int(os.environ.get("FLIPPED_BITS", "200"))


def halved():
    model = qwen3_model()
    model.update(tree_map(lambda each: each.astype(mx.bfloat16), model.parameters()))
    return model


def with_states(name: str):
    model = model_of(name)
    use_chunks(model)
    return model


MODELS = {
    "attention": (qwen3_model, {}),
    "eight bits": (lambda: qwen3_model(head_dim=32), {"kv_bits": 8}),
    "a rectangle": (qwen3_model, {"by_tokens": False}),
    "half precision": (halved, {}),
    "windows": (lambda: model_of("gemma3_text"), {}),
    "states": (lambda: with_states("mamba2"), {}),
    "both": (lambda: with_states("falcon_h1"), {}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_new_process_computes_one_block_at_most_and_answers_alike(kind, tmp_path):
    make, options = MODELS[kind]
    options = {"prefill_chunk": 64, **options}
    on_disk = {**options, "recurrent": kind in ("states", "both")}
    prompt = [token % 60 for token in PROMPT]  # small vocabularies have them
    with short_segments():
        wanted = answer(serve(make(), **options), prompt)
        first = started(tmp_path, make(), **on_disk)
        assert answer(first, prompt).token_ids == wanted.token_ids
        assert first.engine.on_disk.hit_tokens == 0
        again = started(tmp_path, make(), **on_disk)
        done = answer(again, prompt)
        assert done.token_ids == wanted.token_ids
        in_memory = serve(make(), **options)
        answer(in_memory, [*prompt[:288], 1])  # keys and values that lie in memory do the same
        answered = answer(in_memory, prompt)
        exact = answered.cached_tokens == 288  # no state of a recurrent layer lies just there
        np.testing.assert_allclose(done.logprobs, answered.logprobs, atol=1e-6 if exact else 1e-4)
        assert again.engine.on_disk.hit_tokens == done.cached_tokens == 288
        assert again.engine.counters.prefill_tokens == 12
        turn = [*prompt, *done.token_ids, 5, 6, 7]
        assert answer(again, turn).token_ids == answer(in_memory, turn).token_ids
    assert {path.stat().st_mode & 0o777 for path in files_of(tmp_path)} == {0o600}


def test_a_prompt_that_parts_reads_what_it_has_in_common_and_adds_its_own(tmp_path):
    other = [*PROMPT[:170], *PROMPT[:80]]
    answer(started(tmp_path), PROMPT)
    before = len(files_of(tmp_path))
    served = started(tmp_path)
    done = answer(served, other)
    assert done.cached_tokens == served.engine.on_disk.hit_tokens == 160
    assert done.token_ids == answer(serve(qwen3_model()), other).token_ids
    assert len(files_of(tmp_path)) == before + (len(other) + 5) // BLOCK - 5
    third = started(tmp_path)
    answer(third, PROMPT)
    told = answer(third, other)  # memory holds the beginning, the disk the rest
    assert third.engine.on_disk.hit_tokens == 288 + (250 // BLOCK * BLOCK - 170)
    np.testing.assert_allclose(told.logprobs, done.logprobs, atol=1e-5)


def test_many_texts_that_part_anywhere_are_read_as_they_were(tmp_path):
    """Of trees of random texts, over several processes: each answer is that without a disk."""
    draw = random.Random(0)
    texts = [list(PROMPT[: draw.randrange(20, 100)])]
    for _ in range(24):
        stem = draw.choice(texts)
        own = [draw.randrange(290) for _ in range(draw.randrange(1, 90))]
        texts.append(stem[: draw.randrange(1, len(stem))] + own)
    plain = serve(qwen3_model(), prefix_cache_bytes=0)
    read = 0
    for process in range(4):
        served = started(tmp_path)
        for text in draw.sample(texts, 8):
            done, wanted = answer(served, text), answer(plain, text)
            np.testing.assert_allclose(done.logprobs, wanted.logprobs, atol=1e-4)
            assert done.token_ids == wanted.token_ids, process
        read += served.engine.on_disk.hit_tokens
    assert read > 10 * BLOCK


def test_weights_adapters_and_salts_share_nothing_unless_they_are_the_same(tmp_path):
    def process(seed: int) -> Served:
        served = started(tmp_path)
        served.weights.add_adapter("mine", random_adapter(served, seed))
        return served

    first = process(1)
    answer(first, PROMPT, salt="alice")
    answer(first, PROMPT, adapter="mine", salt="alice")
    same, other = process(1), process(2)
    assert answer(same, PROMPT, salt="bob").cached_tokens == 0
    assert answer(same, PROMPT, salt="alice").cached_tokens == 288
    assert answer(same, PROMPT, adapter="mine", salt="alice").cached_tokens == 288
    adapted = answer(other, PROMPT, adapter="mine", salt="alice")
    assert adapted.cached_tokens == 0
    plain = serve(qwen3_model())
    plain.weights.add_adapter("mine", random_adapter(plain, 2))
    assert adapted.token_ids == answer(plain, PROMPT, adapter="mine").token_ids
    other.weights.add_adapter("mine", random_adapter(other, 1))  # in the other's place
    assert answer(other, PROMPT, adapter="mine", salt="alice").cached_tokens == 288


def test_what_a_training_publishes_is_neither_written_nor_read(tmp_path):
    answer(started(tmp_path), PROMPT)
    served = started(tmp_path, policy="policy", keep_versions=2)
    trained = qwen3_model(seed=1)
    served.weights.publish_parameters(dict(tree_flatten(trained.parameters())))
    written = len(files_of(tmp_path))
    done = answer(served, PROMPT)
    assert done.cached_tokens == 0 and len(files_of(tmp_path)) == written
    assert done.token_ids == answer(serve(trained), PROMPT).token_ids

    learner = started(tmp_path / "of a policy")
    learner.weights.policy = "policy"
    learner.weights.add_adapter("policy", random_adapter(learner, 1))
    answer(learner, PROMPT, adapter="policy")
    written = len(files_of(tmp_path / "of a policy"))
    assert written, "an adapter to begin with is as any other"
    learner.weights.publish_adapter(random_adapter(learner, 2))
    answer(learner, PROMPT, adapter="policy")
    assert len(files_of(tmp_path / "of a policy")) == written


def test_a_publish_while_a_prefix_is_read(tmp_path, monkeypatch):
    """It was read for weights that are gone: nothing of it is used."""
    answer(started(tmp_path), PROMPT)
    served = started(tmp_path)
    served.engine.add(request("a", PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True))
    served.engine.on_disk.arrivals.wait(10)
    trained = qwen3_model(seed=1)
    served.weights.publish_parameters(dict(tree_flatten(trained.parameters())))
    [done] = run(served.engine, [])["a"].completions
    assert done.cached_tokens == 0
    assert done.token_ids == answer(serve(trained), PROMPT).token_ids[:4]


def test_an_adapter_that_is_replaced_while_a_prefix_is_read(tmp_path):
    def loaded(seed: int) -> Served:
        served = started(tmp_path)
        served.weights.add_adapter("own", random_adapter(served, seed))
        return served

    first, second = (answer(loaded(seed), PROMPT, adapter="own").token_ids for seed in (1, 2))
    assert first != second
    served = loaded(1)
    asked = request("a", PROMPT, adapter="own", max_tokens=6, temperature=0.0, ignore_eos=True)
    served.engine.add(asked)
    served.engine.on_disk.arrivals.waiting[0].reading.ended.wait()
    served.weights.add_adapter("own", random_adapter(served, 2))
    [done] = run(served.engine, [])["a"].completions
    assert done.cached_tokens == served.engine.on_disk.hit_tokens == 0
    assert done.token_ids in (first, second)
    served.engine.on_disk.arrivals.disk.settle()
    for seed, wanted in ((1, first), (2, second)):
        again = answer(loaded(seed), PROMPT, adapter="own")
        assert again.token_ids == wanted and again.cached_tokens == 288


def test_versions_of_the_policy_are_neither_written_nor_read(tmp_path):
    served = started(tmp_path, policy="policy", keep_versions=2)
    served.weights.add_adapter("policy", random_adapter(served, 1))
    served.weights.publish_adapter(random_adapter(served, 2))
    for name in ("policy@0", "policy@1", "policy"):
        assert answer(served, PROMPT, adapter=name).cached_tokens == 0
    assert not files_of(tmp_path)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    """`FLIPPED_BITS=5000` tries so many."""
    files = BlockFiles(tmp_path, 1 << 20)
    draw = np.random.default_rng(0)
    arrays = {
        "0.float32": draw.normal(size=(1, 2, BLOCK, 8)).astype(np.float32),
        "1.bfloat16": draw.integers(0, 1 << 16, (1, 2, BLOCK, 8)).astype(np.uint16),
        "2.none": np.zeros(0, np.uint8),
    }
    assert files.write(NAME, arrays)
    [path] = files_of(tmp_path)
    sound = path.read_bytes()
    places = [*random.Random(0).sample(range(8 * len(sound)), FLIPS - 64), *range(64)]
    for place in places:
        damaged = bytearray(sound)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        found = files.read(NAME)
        assert found is None, place
        assert not path.exists()
    assert files.corrupt == len(places)
    for cut in (
        b"",
        sound[:7],
        sound[:-1],
        sound + b"x",
        b"\xff" * 100,
        sound.replace(b"F32", b"I32"),
    ):
        path.write_bytes(cut)
        assert files.read(NAME) is None
    path.write_bytes(sound)
    path.rename(path.with_name(f"{NAME[::-1]}.safetensors"))
    assert files.read(NAME[::-1]) is None, "another text's name"


def test_a_damaged_block_is_computed_and_written_again(tmp_path):
    answer(started(tmp_path), PROMPT)
    served = started(tmp_path)
    root = served.engine.on_disk.arrivals._place_of(
        served.engine._maker.make(request("a", PROMPT), None)[0]
    ).root
    names = block_names(root, PROMPT)
    path = served.engine.on_disk.arrivals.disk.files._path(names[4])
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    done = answer(served, PROMPT)
    assert done.cached_tokens == 4 * BLOCK
    assert done.token_ids == answer(serve(qwen3_model()), PROMPT).token_ids
    assert answer(started(tmp_path), PROMPT).cached_tokens == 288, "it is whole again"


def test_the_oldest_prefixes_go_and_the_bound_holds(tmp_path):
    one = started(tmp_path)
    answer(one, PROMPT)
    size = one.engine.on_disk.arrivals.disk.files.bytes
    assert size == sum(-(-path.stat().st_size // 4096) * 4096 for path in files_of(tmp_path))
    others = [ragged_prompts(1, seed=seed, shortest=300, longest=300)[0] for seed in range(10, 16)]
    served = started(tmp_path, most=3 * size)
    for number, prompt in enumerate(others):
        answer(served, prompt)
        if number < 2:
            served.engine.scheduler.forget_prefixes()
            assert answer(served, PROMPT).cached_tokens >= 256, "it is used, so it stays"
    assert served.engine.on_disk.arrivals.disk.files.bytes <= 3 * size
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 3 * size
    last = started(tmp_path, most=3 * size)
    assert answer(last, others[-1]).cached_tokens == 288
    assert answer(last, others[0]).cached_tokens < 288
    smaller = started(tmp_path, most=size).engine.on_disk.arrivals.disk
    smaller.settle()
    assert smaller.files.bytes <= size, "a new bound holds at once"


def test_what_is_read_waits_for_its_engine_and_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "PART", 1)
    answer(started(tmp_path), PROMPT)
    served = started(tmp_path)
    served.engine.pause("somebody", freeze=True)
    served.engine.add(request("a", PROMPT, max_tokens=4))
    [arrival] = served.engine.on_disk.arrivals.waiting
    while arrival.reading.parts.qsize() < disk_module.MOST_PARTS:
        assert not arrival.reading.ended.is_set()
    served.engine.on_disk.close()
    assert arrival.reading.ended.is_set()
    assert arrival.reading.parts.qsize() == disk_module.MOST_PARTS < len(PROMPT) // BLOCK


def test_more_than_the_disk_keeps_up_with_is_kept_later(tmp_path, monkeypatch):
    """A text of any length is kept if nothing waits; of one that was not, the next turn brings
    the beginning again."""
    monkeypatch.setattr(disk_module, "MOST_WAITING", 1000)
    warnings, goes_on = [], Event()
    log = SimpleNamespace(warning=lambda event, **values: warnings.append(event))
    monkeypatch.setattr(disk_module, "log", log)
    served, own = started(tmp_path), PROMPT[1:]
    disk = served.engine.on_disk.arrivals.disk
    answer(served, PROMPT)
    disk._writer.do(goes_on.wait)
    asked = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    run(served.engine, [request("waits", PROMPT[2:], **asked)])
    assert not warnings and not disk.dropped_bytes
    done = run(served.engine, [request("is not kept", own, **asked)])["is not kept"]
    assert warnings == ["prefixes_not_kept"] and disk.dropped_bytes > 1000
    goes_on.set()
    disk.settle()
    turn = [*own, *done.completions[0].token_ids, *PROMPT[:64]]
    for text in (PROMPT, PROMPT[2:]):
        assert answer(started(tmp_path), text).cached_tokens == 288
    answer(served, turn)
    assert answer(started(tmp_path), turn).cached_tokens == (len(turn) - 1) // BLOCK * BLOCK


def test_the_bound_holds_for_two_processes_and_a_clock_that_was_set_back(tmp_path):
    one, other = (BlockFiles(tmp_path, 40 * 8192) for _ in range(2))
    values = {"0.float32": np.zeros(1024, np.float32)}  # with its header two pages
    for number in range(60):
        (one, other)[number % 2].write(f"{number:040d}", values)
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 44 * 8192
    left = files_of(tmp_path)
    for path in left[:-5]:
        os.utime(path, (2e10, 2e10))  # used before the clock went back
    for number in range(60, 90):
        one.write(f"{number:040d}", values)
        assert one.has(f"{number:040d}") and all(path.exists() for path in left[-5:])


def test_a_server_that_only_reads_counts_what_others_write(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "COUNTED", 0.0)
    served = started(tmp_path)
    answer(started(tmp_path), PROMPT)
    assert served.engine.on_disk.used_bytes == 0
    answer(served, PROMPT)
    assert served.engine.on_disk.used_bytes == sum(
        -(-path.stat().st_size // 4096) * 4096 for path in files_of(tmp_path)
    )


def test_adapters_are_hashed_where_they_are_loaded(tmp_path, monkeypatch):
    threads = []
    content_of = arrivals_module.content_of

    def noted(layers):
        threads.append(current_thread().name)
        return content_of(layers)

    monkeypatch.setattr(arrivals_module, "content_of", noted)
    plain = serve(qwen3_model())
    plain.weights.add_adapter("first", random_adapter(plain, 1))
    assert not threads, "without a disk nothing is hashed"
    plain.weights.note_contents(noted)
    assert threads == [current_thread().name], "what was there before the disk"
    served = started(tmp_path)
    loader = Thread(
        target=lambda: served.weights.add_adapter("mine", random_adapter(served, 2)), name="loader"
    )
    loader.start()
    loader.join()
    answer(served, PROMPT, adapter="mine")
    assert threads[1:] == ["loader"] and files_of(tmp_path)


@pytest.mark.parametrize("make", [qwen3_model, halved])
def test_the_engine_copies_nothing_for_the_disk(make, tmp_path, monkeypatch):
    """It hands over views; they are cut, hashed and written in the writer's thread."""
    given, threads = [], set()
    served = started(tmp_path, make())
    disk = served.engine.on_disk.arrivals.disk
    write, stacked = disk.write, disk_module._stacked
    monkeypatch.setattr(disk, "write", lambda *args: given.append(args) or write(*args))
    monkeypatch.setattr(
        disk_module, "_stacked", lambda each: threads.add(current_thread().name) or stacked(each)
    )
    answer(served, PROMPT)
    answer(served, [*PROMPT[:170], *PROMPT[:80]])
    pieces = [piece for _, _, parts, _ in given for piece in parts]
    assert len(pieces) >= 3 and threads == {"prefix-writer"}
    for piece in pieces:
        for raw in piece.arrays:
            assert not raw.values.flags.owndata
            assert raw.values.shape[2] == piece.stop - piece.start, "only what is to be written"


def test_clearing_takes_the_disk_along_and_what_waits_to_be_written(tmp_path):
    served = started(tmp_path)
    answer(served, PROMPT)
    disk = served.engine.on_disk.arrivals.disk
    served.engine.reset_prefix_cache()
    assert answer(served, PROMPT).cached_tokens == 0, "what is removed behind it is not read"
    disk.clear()
    disk.settle()
    assert not files_of(tmp_path)
    many = [Raw("float32", np.zeros((1, 1, 6400, 8), np.float32))]
    disk.write("root", tuple(range(6400)), [disk_module.StoredPiece(0, 6400, many)], None)
    disk.clear()
    disk.settle()
    assert not files_of(tmp_path)


def test_clearing_while_a_prefix_is_read(tmp_path):
    """Nothing of it gets into the cache that was just emptied."""
    wanted = answer(started(tmp_path), PROMPT).token_ids
    served = started(tmp_path)
    disk = served.engine.on_disk.arrivals.disk
    for name in ("reads", "waits for it"):
        item = request(name, PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True)
        served.engine.add(item)
    served.engine.on_disk.arrivals.waiting[0].reading.ended.wait()
    served.engine.reset_prefix_cache()
    found = run(served.engine, [])
    assert [found[name].completions[0].token_ids for name in found] == [wanted] * 2
    assert found["reads"].completions[0].cached_tokens == served.engine.on_disk.hit_tokens == 0
    disk.settle()


def test_processes_of_one_number_write_beside_each_other(tmp_path, monkeypatch):
    """Two containers that share a volume may both have the number 7."""
    one, other = (BlockFiles(tmp_path, 1 << 26) for _ in range(2))
    values, save = {"0.float32": np.zeros(8, np.float32)}, files_module.save_file

    def saved(arrays, path, metadata):
        save(arrays, path, metadata)
        if files_module.save_file is saved:
            monkeypatch.undo()
            assert other.write(NAME, values)

    monkeypatch.setattr(files_module, "save_file", saved)
    assert one.write(NAME, values) and not one.refused
    assert one.read(NAME) is not None and len(files_of(tmp_path)) == 1


def test_a_count_brings_no_stale_total_back(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, 1 << 26)
    assert files.write(NAME, {"0.float32": np.zeros(8, np.float32)})
    clearing, listed = Thread(target=files.clear), files._files

    def slow():
        found = listed()
        if current_thread() is not clearing:
            clearing.start()
            clearing.join(0.05)  # which waits for the count
        return found

    monkeypatch.setattr(files, "_files", slow)
    files.count()
    clearing.join()
    assert files.bytes == 0 and not files_of(tmp_path)


def test_an_abort_while_it_reads_and_a_memory_that_is_too_small(tmp_path):
    answer(started(tmp_path), PROMPT)
    served = started(tmp_path)
    served.engine.add(request("gone", PROMPT, n=3, max_tokens=4))
    assert len([*served.engine.on_disk]) == 3
    served.engine.abort("gone")
    run(served.engine, [])
    assert not served.engine.on_disk and served.engine.on_disk.hit_tokens == 0
    token = served.engine._token_bytes
    small = started(tmp_path, prefix_cache_bytes=100 * token)
    assert answer(small, PROMPT).token_ids == answer(serve(qwen3_model()), PROMPT).token_ids
    none = started(tmp_path, prefix_cache_bytes=0)
    assert answer(none, PROMPT).cached_tokens == 0


def test_requests_with_one_beginning_arrive_together(tmp_path, monkeypatch):
    answer(started(tmp_path), PROMPT)
    served = started(tmp_path)
    files, names = served.engine.on_disk.arrivals.disk.files, []
    read = files.read
    monkeypatch.setattr(files, "read", lambda name: names.append(name) or read(name))
    requests = [
        request(f"r{i}", [*PROMPT[: 100 + 50 * i], i], n=2, max_tokens=5, temperature=0.0, seed=i)
        for i in range(4)
    ]
    outputs = run(served.engine, requests)
    plain = run(serve(qwen3_model()).engine, requests)
    for name, output in outputs.items():
        for mine, its in zip(output.completions, plain[name].completions, strict=True):
            assert mine.token_ids == its.token_ids
    assert served.engine.on_disk.hit_tokens == 250 // BLOCK * BLOCK, "each block once"
    assert len(names) == len({*names}) == 250 // BLOCK, "and read once"
    assert served.engine.on_disk.seconds_saved != 0.0


def test_requests_with_one_beginning_that_is_not_there_do_not_wait_for_each_other(tmp_path):
    served = started(tmp_path)
    for number in range(5):
        served.engine.add(request(f"{number}", [*PROMPT[:200], number], max_tokens=1))
    arrivals = served.engine.on_disk.arrivals
    arrivals.waiting[0].reading.ended.wait()
    assert len(arrivals.arrived()) == 5 and not arrivals


def test_a_reading_whose_request_is_aborted_is_taken_over(tmp_path):
    answer(started(tmp_path), PROMPT)
    served = started(tmp_path)
    names = ["gone", "first", "second"]
    for name in names:
        served.engine.add(request(name, PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True))
    served.engine.abort("gone")
    found = run(served.engine, [])
    assert all(found[name].completions[0].cached_tokens >= 288 for name in names[1:])
    assert served.engine.on_disk.hit_tokens == 288


WRITER = """
    import sys
    from pathlib import Path
    import numpy as np
    from mlx_parallm.engine.prefix_disk.files import BlockFiles
    files = BlockFiles(Path(sys.argv[1]), 40 << 20)
    draw = np.random.default_rng(int(sys.argv[2]))
    print("ready", flush=True)
    number = 0
    while True:
        name = f"{draw.integers(0, 200):040d}"
        values = np.full((1, 1, 32, 4096), int(name), np.float32)
        files.write(name, {"0.float32": values})
        found = files.read(f"{draw.integers(0, 200):040d}")
        assert files.corrupt == 0
"""


@pytest.mark.slow
def test_processes_that_share_a_directory_and_are_killed_leave_only_whole_files(tmp_path):
    for round_ in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), str(2 * round_ + i)],
                stdout=subprocess.PIPE,
            )
            for i in range(2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        count = len(files_of(tmp_path))
        while len(files_of(tmp_path)) < min(count + 15, 60):
            assert all(writer.poll() is None for writer in writers)
        for writer in writers:
            writer.kill()
            writer.wait()
    files = BlockFiles(tmp_path, 40 << 20)
    names = [path.stem for path in files_of(tmp_path) if path.name[0] != "."]
    for name in names:
        found = files.read(name)
        assert found is not None and (found["0.float32"] == int(name)).all()
    assert files.bytes <= 44 << 20 and len(names) >= 20


def test_the_name_of_a_model_covers_its_files_arrays_and_configuration(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    loaded = LoadedModel(qwen3_model(), {"rope_theta": 1.0}, tmp_path, 100)
    name = model_name(loaded, None)
    assert name == model_name(LoadedModel(qwen3_model(), {"rope_theta": 1.0}, tmp_path, 9), None)
    changed = [
        model_name(loaded, 8),
        model_name(replace(loaded, config={"rope_theta": 2.0}), None),
        model_name(replace(loaded, model=qwen3_model(seed=1)), None),
        model_name(replace(loaded, model=halved()), None),
    ]
    (tmp_path / "model.safetensors").write_bytes(b"weighty")
    changed.append(model_name(loaded, None))
    monkeypatch.setattr(opening_module, "version", lambda package: f"another {package}")
    changed.append(model_name(loaded, None))
    monkeypatch.setattr(opening_module, "kind_of_numbers", lambda: "another device")
    changed.append(model_name(loaded, None))
    assert len({name, *changed}) == 8
