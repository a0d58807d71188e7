"""Which prefixes stay on disk: the beginning of a text longer than its end, states with their blocks,
and what was lost is given again with the next turn, of that text alone."""

import errno
import os

import numpy as np

from mlx_parallm.engine.prefix_disk import disk as disk_module
from mlx_parallm.engine.prefix_disk import files as files_module
from mlx_parallm.engine.prefix_disk.disk import STATE, Raw, StoredPiece
from mlx_parallm.engine.prefix_disk.files import BLOCK, BlockFiles, block_names
from tests.altered import Altered
from tests.engine.cache.stored_prefixes import NAME, PROMPT, answer, files_of, started
from tests.engine.helpers import ragged_prompts, request


def size_of(served) -> int:
    return served.engine.on_disk.arrivals.disk.files.bytes


def test_of_a_text_that_the_bound_does_not_hold_the_beginning_stays(tmp_path):
    whole = started(tmp_path / "whole")
    answer(whole, PROMPT)
    bound = size_of(whole) * 6 // 9
    answer(started(tmp_path / "part", most=bound), PROMPT)
    kept = answer(started(tmp_path / "part", most=bound), PROMPT).cached_tokens
    assert 3 * BLOCK <= kept < 9 * BLOCK


def test_the_end_of_a_conversation_goes_before_its_beginning(tmp_path):
    served = started(tmp_path)
    first = answer(served, PROMPT)
    turn = [*PROMPT, *first.token_ids, *PROMPT[:100]]
    answer(served, turn)
    ages = {path.stem: path.stat().st_mtime_ns for path in files_of(tmp_path)}
    root = served.engine.on_disk.arrivals._place_of(
        served.engine._maker.make(request("a", PROMPT), None)[0]
    ).root
    names = block_names(root, turn)
    assert len(names) == len(ages) > 9
    assert sorted(names, key=ages.__getitem__, reverse=True) == names


def test_a_prefix_that_memory_holds_is_used_on_disk_too(tmp_path):
    whole = started(tmp_path / "whole")
    answer(whole, PROMPT)
    served = started(tmp_path / "own", most=3 * size_of(whole))
    answer(served, PROMPT)
    for seed in range(10, 16):
        answer(served, ragged_prompts(1, seed=seed, shortest=300, longest=300)[0])
        answer(served, PROMPT)
        assert served.engine.on_disk.hit_tokens == 0
    assert answer(started(tmp_path / "own", most=1 << 26), PROMPT).cached_tokens == 288


def test_a_state_that_is_used_stays_with_its_block(tmp_path):
    files = BlockFiles(tmp_path, 1 << 26)
    disk = disk_module.PrefixDisk(files, "this model", recurrent=True)
    values = [Raw("float32", np.zeros((1, 1, 64, 4), np.float32))]
    tokens = tuple(range(64))
    states = disk_module.States(64, [Raw("float32", np.zeros(3, np.float32))])
    disk.write("root", tokens, [StoredPiece(0, 64, values)], states)
    disk.settle()
    for path in files_of(tmp_path):
        os.utime(path, (0, 0))
    assert disk.read("root", tokens, 0).ended.wait(20)
    disk.close()
    ages = {path.name: path.stat().st_mtime_ns for path in files_of(tmp_path)}
    assert len(ages) == 3 and min(ages.values()) > 0
    assert any(STATE in name for name in ages)


def test_a_block_of_before_is_not_written_behind_a_clearing(tmp_path, monkeypatch):
    """The writer has taken the block up, and the folder is cleared before it writes."""
    files = BlockFiles(tmp_path, 1 << 26)
    disk = disk_module.PrefixDisk(files, "this model", recurrent=False)
    arrays = disk_module._arrays

    def slow(raws):
        disk.clear().result(20)
        return arrays(raws)

    monkeypatch.setattr(disk_module, "_arrays", slow)
    values = [Raw("float32", np.zeros((1, 1, 32, 4), np.float32))]
    disk.write("root", tuple(range(32)), [StoredPiece(0, 32, values)], None)
    disk.settle()
    disk.close()
    assert not files_of(tmp_path)


def test_a_prompt_that_is_not_there_does_not_wait_until_a_long_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "PART", 1)
    files = BlockFiles(tmp_path, 1 << 26)
    disk = disk_module.PrefixDisk(files, "this model", recurrent=False)
    tokens = tuple(range(BLOCK * (disk_module.MOST_PARTS + 2)))
    values = [Raw("float32", np.zeros((1, 1, len(tokens), 4), np.float32))]
    disk.write("root", tokens, [StoredPiece(0, len(tokens), values)], None)
    disk.settle()
    long = disk.read("root", tokens, 0)
    assert disk.read("root", tokens[1 : BLOCK + 1], 0).ended.wait(20)
    assert not long.ended.is_set(), "nobody takes its parts"
    disk.close()
    assert long.ended.is_set()


def test_what_was_lost_is_given_again_for_that_text_alone(tmp_path, monkeypatch):
    served = started(tmp_path)
    disk = served.engine.on_disk.arrivals.disk
    given, write = [], disk.write

    def noted(root, tokens, pieces, states):
        given.append(min([piece.start for piece in pieces], default=None))
        write(root, tokens, pieces, states)

    monkeypatch.setattr(disk, "write", noted)
    first, other = PROMPT, ragged_prompts(1, seed=9, shortest=300, longest=300)[0]
    sound = [*other, *answer(served, other).token_ids, *PROMPT[:40]]
    monkeypatch.setattr(files_module, "os", Altered(os, open=refused(tmp_path)))
    turn = [*first, *answer(served, first).token_ids, *PROMPT[:64]]
    monkeypatch.setattr(files_module, "os", os)
    disk.files._rests_until = 0.0
    given.clear()
    answer(served, sound)
    assert 0 not in given, "nothing of it is lacking"
    answer(served, turn)
    assert given.count(0) == 1, "given once"
    assert answer(started(tmp_path), turn).cached_tokens == (len(turn) - 1) // BLOCK * BLOCK


def refused(folder):
    def full(path, flags, mode=0o777, **options):
        if files_module.TEMPORARY in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.open(path, flags, mode, **options)

    return full


def test_what_another_server_has_removed_is_written_again(tmp_path):
    served = started(tmp_path)
    turn = PROMPT
    for _ in range(3):
        turn = [*turn, *answer(served, turn).token_ids, *PROMPT[:64]]
        if len(turn) < 400:
            BlockFiles(tmp_path, 1 << 26).clear()
    answer(served, turn)
    assert answer(started(tmp_path), turn).cached_tokens == (len(turn) - 1) // BLOCK * BLOCK


def test_what_is_stuck_is_counted_until_it_is_gone(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, 1 << 26)
    assert files.write(NAME, {"0.float32": np.zeros(8, np.float32)})
    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "_remove", lambda *_: False)
        files.clear()
    assert files.stuck == 1
    files.count()
    assert files.stuck == 1, "it is there, and not read"
    files.max_bytes, files._files = 1, None  # it would be asked for the files
    files.count_if_due()
    del files._files
    files.max_bytes = 1 << 26
    for path in files_of(tmp_path):
        path.unlink()
    files.count()
    assert files.stuck == 0
