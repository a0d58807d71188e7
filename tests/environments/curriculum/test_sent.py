"""The draws of environments that keep their rows: groups that are lost, names, a full disk."""

import threading
from types import SimpleNamespace

import pytest

from mlx_parallm.config.environment import AdaptiveConfig
from mlx_parallm.environments.curriculum import sent
from mlx_parallm.environments.curriculum.log import DrawLog
from mlx_parallm.environments.curriculum.pass_rates import PassRates
from mlx_parallm.environments.curriculum.sent import SentDraws
from mlx_parallm.errors import CheckpointError

SELDOM = AdaptiveConfig(floor=0.001)  # no turn through all rows


def group(row, rewards=(0.0, 1.0)):
    rollouts = [SimpleNamespace(scores={"reward": r}, is_scored=True, segments=()) for r in rewards]
    return SimpleNamespace(metadata={"row": row}, rollouts=rollouts)


def named(path, *rows, levels=False):
    draws = SentDraws(path, seed=0)
    name_rows(draws, *rows, levels=levels)
    return draws


def name_rows(draws, *rows, levels=False):
    draws.name_rows("sums", rows, SELDOM, group_size=2, levels=levels)


def rows_of(draws):
    return sum(sum(n["rows_by_environment"]["sums"].values()) for n in draws.numbers())


def test_a_row_whose_group_is_lost_is_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sent, "MOST_IN_FLIGHT", 8)
    draws = named(tmp_path, "a", "b", "c", "d")
    [lost], later = draws.draw("sums", 1), []
    for _ in range(40):
        later += draws.draw("sums", 1)
        draws.earned("sums", group(later[-1], (1.0, 1.0)))
    assert lost not in later[:7] and lost in later[7:]
    assert len(draws._senders["sums"].draws._groups) <= 8


def test_when_the_group_of_a_row_comes_its_older_draws_bar_it_no_more(tmp_path):
    draws = named(tmp_path, "a")
    draws.draw("sums", 3)
    draws.earned("sums", group("a"))
    sender = draws._senders["sums"]
    assert (sender.in_flight, +sender.draws._in_flight) == ({}, {})
    draws.earned("sums", group("a"))  # one of them comes after all
    assert (sender.in_flight, +sender.draws._in_flight) == ({}, {})
    name_rows(draws, "a", levels=True)  # whose groups hinder no others
    draws.draw("sums", 3)
    draws.earned("sums", group("a"))
    assert len(draws._senders["sums"].in_flight) == 2


def test_who_has_named_its_rows_has_no_others(tmp_path, warned):
    draws = named(tmp_path, "a", "b")
    for row in ("typo", "another"):
        draws.earned("sums", group(row))
    assert rows_of(draws) == 2
    assert set(draws.draw("sums", 20)) == {"a", "b"}
    [line] = warned
    assert "rows beyond those that are known" in line["event"] and line["row"] == "typo"
    assert named(tmp_path, "a", "b").numbers() == draws.numbers()


def test_unnamed_rows_have_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(sent, "MOST_ROWS", 2)
    draws = SentDraws(tmp_path, seed=0)
    for row in "abc":
        draws.earned("sums", group(row))
    assert rows_of(draws) == 2


def test_the_order_of_rows_does_not_matter_that_of_levels_does(tmp_path):
    draws = named(tmp_path, "a", "b")
    before = draws._senders["sums"]
    name_rows(draws, "b", "a")
    assert draws._senders["sums"] is before
    name_rows(draws, "b", "a", levels=True)
    name_rows(draws, "a", "b", levels=True)
    assert draws._senders["sums"].draws.keys == ["a", "b"]


def test_a_file_is_read_whole_once(tmp_path, monkeypatch):
    first = SentDraws(tmp_path, seed=0)
    for environment in ("sums", "words"):
        first.earned(environment, group("a", (1.0, 1.0)))
    again = SentDraws(tmp_path, seed=0)
    again.check()
    monkeypatch.setattr(DrawLog, "_read_all", None)
    for environment in ("sums", "words", "new"):
        again.earned(environment, group("a", (1.0, 1.0)))
    first.earned("sums", group("a", (1.0, 1.0)))
    first.earned("words", group("a", (1.0, 1.0)))
    assert again.numbers()[:2] == first.numbers()
    again.name_rows("new", ["a"], SELDOM, group_size=2)  # what was written since is read too
    assert again._senders["new"].draws.kinds().easy == 1


def test_others_draw_and_earn_while_a_long_file_is_replayed(tmp_path, monkeypatch):
    draws = named(tmp_path, "a", "b")
    draws.earned("sums", group("a"))
    draws.name_rows("words", ["x"], SELDOM, group_size=2)
    read, inside, go_on = DrawLog.read, threading.Event(), threading.Event()

    def slowly(log, environment, after=0):
        for entry in read(log, environment, after):
            inside.set()
            assert go_on.wait(60)
            yield entry

    monkeypatch.setattr(DrawLog, "read", slowly)
    changing = threading.Thread(target=name_rows, args=(draws, "a", "b", "c"))
    changing.start()
    assert inside.wait(60)
    assert draws.draw("words", 1) == ["x"]
    draws.earned("words", group("x"))
    draws.earned("sums", group("b", (1.0, 1.0)))  # under the rows before; the new ones know it too
    assert len(draws.numbers()) == 2
    go_on.set()
    changing.join()
    known = draws._senders["sums"].draws
    assert (known.keys, known.kinds().easy, known.kinds().unseen) == (["a", "b", "c"], 1, 1)


def test_a_replay_estimates_once(tmp_path, monkeypatch):
    """And ends where the draws are that were never interrupted, to the bit."""
    rows, estimates = [str(n) for n in range(40)], []
    live = named(tmp_path, *rows)
    version = [0]
    monkeypatch.setattr(sent, "newest_version", lambda _: version[0])
    for version[0] in range(1, 60):
        for row in live.draw("sums", 2):
            live.earned("sums", group(row, (float(int(row) % 3 == 0), float(int(row) % 2))))
    estimate = PassRates.estimate
    monkeypatch.setattr(
        PassRates, "estimate", lambda *args: (estimates.append(1), estimate(*args))[1]
    )
    again = named(tmp_path, *rows)
    assert len(estimates) == 2, "of the file, and of what was added meanwhile"
    now, then = (each._senders["sums"].draws for each in (again, live))
    assert now._rates.teaches.tobytes() == then._rates.teaches.tobytes()
    assert now._weights._sums.tobytes() == then._weights._sums.tobytes()
    assert again.draw("sums", 6) == live.draw("sums", 6)


def test_an_environment_that_begins_again_may_be_asked_all_rows(tmp_path):
    rows = ["a", "b", "c", "d", "e", "f"]
    draws = named(tmp_path, *rows)
    assert sorted(draws.draw("sums", 6)) == rows
    draws.begin_again("sums")
    assert sorted(draws.draw("sums", 6)) == rows


def test_what_a_full_disk_stops_is_in_flight_no_more(tmp_path, monkeypatch):
    rows, append, room = ["a", "b", "c", "d"], DrawLog.append, [2]

    def with_room(log, entry):
        if not room[0]:
            raise CheckpointError("the disk is full")
        room[0] -= 1
        append(log, entry)

    monkeypatch.setattr(DrawLog, "append", with_room)
    draws = named(tmp_path, *rows)
    with pytest.raises(CheckpointError, match="full"):
        draws.draw("sums", 4)
    room[0] = 4
    assert sorted(draws.draw("sums", 4)) == rows  # also the two of which nobody was told
    draws.earned("sums", group("a"))  # not kept
    sender = draws._senders["sums"]
    assert len(sender.in_flight) == len(sender.draws._in_flight) == 4
    room[0] = 1
    draws.earned("sums", group("a"))
    assert sender.draws._weights.draw(0.5) == 0, "the only one that nobody plays"


def test_it_is_said_when_most_groups_never_come(tmp_path, monkeypatch, warned):
    monkeypatch.setattr(sent, "MOST_IN_FLIGHT", 8)
    draws = named(tmp_path, *(str(n) for n in range(30)))
    for number in range(30):
        [row] = draws.draw("sums", 1)
        if number % 2 == 0:
            draws.earned("sums", group(row))
    assert not warned  # half of them come
    draws.draw("sums", 30)
    [line] = warned
    assert "never came" in line["event"] and line["environment"] == "sums"
