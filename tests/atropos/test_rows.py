"""Environments over HTTP that ask which of their rows to play, and those whose groups say it."""

import json
import random
import uuid
from collections import Counter
from dataclasses import replace

import pytest

from mlx_parallm.environments.curriculum import sent
from mlx_parallm.environments.curriculum.sent import SENT_DRAWS_FILE
from mlx_parallm.errors import CheckpointError
from mlx_parallm.faces.atropos.queue import AtroposQueue
from mlx_parallm.faces.atropos.routes import create_atropos_router
from mlx_parallm.faces.atropos.rows import AskedRows
from mlx_parallm.rl_training.sources import together
from tests.atropos.groups import ATROPOS_SETTINGS, scored_data
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server

SIZE = 4
RATES = {f"hopeless-{n}": 0.0 for n in range(24)} | {f"solved-{n}": 1.0 for n in range(8)}
RATES |= {f"learnable-{n}": 0.5 for n in range(8)}


class Sender:
    """An environment with rows whose pass rates it knows."""

    def __init__(self, http, name="sums", seed=0):
        self.http, self.random = http, random.Random(seed)
        body = {"desired_name": name, "group_size": SIZE, "weight": 1.0, "max_token_length": 32}
        self.env_id = http.post("/atropos/register-env", json=body).json()["env_id"]

    def ask(self, **body):
        return self.http.post("/atropos/next-rows", json={"env_id": self.env_id, **body})

    def send(self, *rows, rate=None, **changes):
        groups = [self.group(row, rate, changes) for row in rows]
        return self.http.post("/atropos/scored_data_list", json=groups).status_code

    def group(self, row, rate, changes):
        rate = RATES.get(row, 0.5) if rate is None else rate
        scores = [float(self.random.random() < rate) for _ in range(SIZE)]
        group = scored_data(size=SIZE, scores=scores, env_id=self.env_id, row=row)
        return group | {"group_id": str(uuid.uuid4()), **changes}


class Process:
    """A server that trains, with what is kept in a directory."""

    def __init__(self, store):
        queue = AtroposQueue(
            store,
            replace(ATROPOS_SETTINGS, vocab_size=1000),
            current_step=lambda: 0,
            policy_version=lambda: 1,
        )
        self.rows = AskedRows(queue, store.path.parent, seed=0)
        self.rows.start()
        self.server = running_server(
            FakeEngine(), None, routers=[create_atropos_router(queue, self.rows)]
        )

    def __enter__(self):
        self.running = self.server.__enter__()
        self.http = self.running.http()
        return self

    def __exit__(self, *error):
        self.http.close()
        self.server.__exit__(*error)

    def numbers(self):
        return together(self.rows.numbers())


def test_an_environment_plays_the_rows_that_teach_and_a_restart_knows_them(store):
    drawn = Counter()
    with Process(store) as process:
        sender = Sender(process.http)
        for number in range(55):
            rows = sender.ask(rows=list(RATES), groups=4).json()["rows"]
            drawn.update(row.partition("-")[0] for row in rows if number >= 25)
            assert sender.send(*rows) == 200
        assert drawn["learnable"] > 70  # of 120; a fifth of the rows
        assert drawn["hopeless"] > 0
        numbers = process.numbers()
        assert numbers["rows_unseen"] < 6 and 6 <= numbers["rows_learnable"] <= 10
        assert list(numbers["rows_by_environment"]) == ["sums_0"]
    with Process(store) as process:
        sender = Sender(process.http)
        reply = sender.ask()
        assert (reply.status_code, "no rows of sums_0 are known" in reply.text) == (404, True)
        assert sender.ask(rows=list(RATES)).status_code == 200
        assert process.numbers() == numbers
        sender.ask(rows=[*list(RATES)[:5], "new"])  # its data has changed
        assert sum(process.numbers()["rows_by_environment"]["sums_0"].values()) == 6
        assert sender.send("another", rate=0.0) == 200  # which it had not named
        assert process.numbers()["rows_unseen"] == 1
        assert sum(process.numbers()["rows_by_environment"]["sums_0"].values()) == 6


def test_groups_that_name_their_row_are_estimated_though_nobody_asks(store):
    with Process(store) as process:
        sender = Sender(process.http)
        assert [sender.send(*RATES), sender.send(*RATES)] == [200, 200]
        assert sender.send(None) == 200  # of no row
        nobody = {"env_id": None, "environment": "sums_0"}
        assert [sender.send("x", **nobody), sender.send("x", env_id=None)] == [200, 200]
        twice = {"group_id": "x"}
        assert [sender.send("solved-0", **twice), sender.send("solved-0", **twice)] == [200, 200]
        numbers = process.numbers()
        assert numbers["rows_easy"] == 8
        assert numbers["rows_hopeless"] >= 24
        assert numbers["rows_unseen"] == 0
        assert sum(numbers["rows_by_environment"]["sums_0"].values()) == len(RATES)
        assert list(numbers["rows_by_environment"]) == ["sums_0"]
        assert sender.ask().status_code == 404
    with Process(store) as process:
        assert Sender(process.http).send("solved-0", rate=1.0) == 200
        assert process.numbers() == numbers


def test_levels_rise_with_what_is_right(store):
    levels = ["one", "two", "three"]
    with Process(store) as process:
        sender = Sender(process.http)
        for able, expected in ((0, "one"), (2, "three")):
            last = Counter()
            for number in range(20):
                asked = sender.ask(levels=levels, groups=2, adaptive={"half_life": 5})
                for level in asked.json()["rows"]:
                    place = levels.index(level)
                    sender.send(level, rate=0.5 if place == able else float(place < able))
                    last[level] += number > 8
            assert last.most_common(1)[0][0] == expected
        assert sender.send("four") == 200  # none of them: trained on, not estimated
        assert sum(process.numbers()["rows_by_environment"]["sums_0"].values()) == 3


def test_a_row_is_free_again_when_its_group_does_not_come(store, monkeypatch):
    monkeypatch.setattr(sent, "MOST_IN_FLIGHT", 4)
    with Process(store) as process:
        sender, rows = Sender(process.http), ["a", "b", "c", "d", "e", "f"]
        first = sender.ask(rows=rows, groups=4).json()["rows"]
        assert len(set(first)) == 4
        assert not set(sender.ask(groups=2).json()["rows"]) & set(first[1:])
        assert len(sender.ask(groups=200).json()["rows"]) == 200
        Sender(process.http, name="other")
        assert Sender(process.http).env_id != sender.env_id  # its former one still calls
        assert process.numbers()["rows_unseen"] == 6


REFUSED = [
    ({"env_id": 7, "rows": ["a"]}, 404, "no environment 7"),
    ({}, 404, "send all of them as `rows`"),
    ({"rows": []}, 422, "at least 1"),
    ({"rows": ["a", "a"]}, 422, "two have one name"),
    ({"rows": ["a"], "levels": ["b"]}, 422, "contradict"),
    ({"rows": ["\ud800"]}, 422, ""),
    ({"rows": ["a"], "groups": 0}, 422, "greater than or equal to 1"),
    ({"rows": ["a"], "adaptive": {"floor": 0}}, 422, "floor"),
    ({"rows": ["a"], "adaptive": {"reward": "x"}}, 422, "one reward"),
    ({"adaptive": {"floor": 0.5}}, 422, "comes with rows"),
    ({"row": ["a"]}, 422, "row"),
    ({"rows": ["a"], "groups": True}, 422, "valid integer"),
    ({"rows": ["a"], "groups": "2"}, 422, "valid integer"),
    ({"rows": ["a"], "env_id": False}, 422, "valid integer"),
]


def test_what_cannot_be_asked_is_said(store):
    with Process(store) as process:
        sender = Sender(process.http)
        for body, status, words in REFUSED:
            content = json.dumps({"env_id": sender.env_id, **body})
            headers = {"Content-Type": "application/json"}
            reply = process.http.post("/atropos/next-rows", content=content, headers=headers)
            assert (reply.status_code, words in reply.text) == (status, True), reply.text
        assert sender.send("x" * 257) == 422
        (file := store.path.parent / SENT_DRAWS_FILE).mkdir()  # cannot be written
        reply = sender.ask(rows=["a"])
        assert (reply.status_code, "cannot be written" in reply.text) == (503, True)
        file.rmdir()
        assert sender.ask(rows=["a"]).status_code == 200


def test_a_damaged_file_is_named_before_training(store):
    (store.path.parent / SENT_DRAWS_FILE).write_text("nonsense\n")
    with pytest.raises(CheckpointError, match=r"draws_http\.jsonl:1"):
        Process(store)
