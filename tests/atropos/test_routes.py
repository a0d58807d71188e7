import asyncio
import gzip
import json
import os
import re
import threading
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from mlx_parallm.faces.atropos import routes as routes_atropos
from mlx_parallm.faces.atropos.queue import AtroposQueue
from mlx_parallm.faces.atropos.routes import create_atropos_router
from mlx_parallm.faces.atropos.rows import AskedRows
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.server.middleware import BodyLimitMiddleware
from mlx_parallm.system.foreign_json import MAX_CONTAINERS
from tests.atropos.groups import ATROPOS_SETTINGS, scored_data
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server
from tests.soak.fuzz_openapi import atropos, fuzz, tiny_server

SETTINGS = replace(ATROPOS_SETTINGS, wandb_group="group", wandb_project="project")
JSON = {"Content-Type": "application/json"}
ENVIRONMENT = {
    "max_token_length": 32,
    "desired_name": "sums",
    "weight": 1.0,
    "group_size": 2,
    "min_batch_allocation": None,
}


def routes_over(queue):
    return create_atropos_router(queue, AskedRows(queue, queue.store.path.parent, seed=0))


@pytest.fixture
def app(store):
    queue = AtroposQueue(store, SETTINGS, current_step=lambda: 5, policy_version=lambda: 3)
    app = FastAPI()
    app.include_router(routes_over(queue).router)
    return app


@pytest.fixture
def client(app):
    with TestClient(app) as client:
        yield client


def status_of(client: TestClient, env_id: int):
    return client.request("GET", "/atropos/status-env", json={"env_id": env_id})


def test_while_the_model_loads_an_environment_waits(store):
    """A BaseEnv gives up after three errors."""
    queue = AtroposQueue(store, SETTINGS, current_step=lambda: 5, policy_version=lambda: 3)
    added = [routes_over(queue)]
    with (
        running_server(FakeEngine(), None, loaded=False, routers=added) as server,
        server.http() as http,
    ):
        reply = http.post("/atropos/register-env", json={})
        assert (reply.status_code, reply.json()) == (200, {"status": "wait for trainer to start"})
        assert http.get("/atropos/info").status_code == 503


def test_the_calls_of_a_base_env_in_their_order(client, store):
    """register-env at once (the trainer is here), /info, then status-env and scored_data in
    turns."""
    assert client.get("/atropos/wandb_info").json() == {"group": "group", "project": "project"}
    assert client.post("/atropos/register-env", json=ENVIRONMENT).json() == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "sums_0",
        "checkpoint_dir": "checkpoints/run",
        "starting_step": 5,
        "checkpoint_interval": 50,
        "num_steps": 1000,
    }
    assert client.get("/atropos/info").json() == {"batch_size": 8, "max_token_len": 32}
    assert status_of(client, 0).json() == {
        "current_step": 5,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 1.0,
    }
    reply = client.post("/atropos/scored_data", json=scored_data(env_id=0))
    assert (reply.status_code, reply.json()) == (200, {"status": "received"})
    status = status_of(client, 0).json()
    assert status["queue_size"] == 1
    assert not [
        key
        for key in ("queue_size", "self_queue_size", "max_group_size")
        if not isinstance(status[key], int)
    ]
    assert client.get("/atropos/status").json() == {"current_step": 5, "queue_size": 1}
    assert [group.environment for group in store.waiting()] == ["sums_0"]
    assert client.post("/atropos/disconnect-env", json={"env_id": 0}).json() == {
        "status": "success"
    }
    assert client.post("/atropos/disconnect-env", json={"env_id": 4}).json()["status"] == "failure"


def test_received_means_on_disk(client, store, tmp_path):
    assert client.post("/atropos/scored_data", json=scored_data()).json() == {"status": "received"}
    # another connection sees only what was committed
    reader = RolloutStore(tmp_path / "rollouts.sqlite")
    assert reader.counts().waiting == 1
    reader.close()


def test_liveness(client):
    for path in ("/atropos", "/atropos/"):
        assert client.get(path).json() == {"message": "AtroposLib API"}


def test_a_guaranteed_share_is_told_to_the_others(client):
    client.post("/atropos/register-env", json=ENVIRONMENT | {"min_batch_allocation": 0.25})
    client.post("/atropos/register-env", json=ENVIRONMENT)
    assert status_of(client, 1).json()["unallocated_fraction"] == 0.75


@pytest.mark.parametrize(
    "change",
    [
        {"min_batch_allocation": 1e308},
        {"min_batch_allocation": -0.1},
        {"weight": 1e308},
        {"weight": -1},
        {"group_size": 10**400},
        {"max_token_length": 10**400},
        {"desired_name": "x" * 257},
    ],
    ids=str,
)
def test_a_registration_beyond_its_bounds_registers_nobody(client, change):
    assert client.post("/atropos/register-env", json=ENVIRONMENT | change).status_code == 422
    assert status_of(client, 0).status_code == 404


def test_a_reward_that_would_overflow_is_refused(client, store):
    """It was "received", and ended the trainer and each resume."""
    reply = client.post("/atropos/scored_data", json=scored_data(scores=[1e308, 0]))
    assert reply.status_code == 422 and "at most ±1e+09" in reply.json()["detail"][0]["msg"]
    assert store.counts().waiting == 0


def test_a_rejected_group_is_answered_with_the_reason(client, store):
    reply = client.post("/atropos/scored_data", json=scored_data(inference_logprobs=None))
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["type"] == "rollout_rejected"
    assert "no inference_logprobs" in reply.json()["detail"][0]["msg"]
    assert store.counts().rejected == 1


@pytest.mark.parametrize("none", [None, float("nan")])
def test_a_sequence_without_a_score_is_kept_and_counts_nowhere(client, store, none):
    body = json.dumps(scored_data(size=3, scores=[none, 1.0, 0.0]))
    reply = client.post("/atropos/scored_data", content=body, headers=JSON)
    assert reply.status_code == 200
    [group] = store.waiting(9)
    assert [rollout.is_scored for rollout in group.rollouts] == [False, True, True]
    body = json.dumps(scored_data(scores=[none, none]))
    reply = client.post("/atropos/scored_data", content=body, headers=JSON)
    assert reply.status_code == 422
    assert "no sequence of the group has a score" in reply.json()["detail"][0]["msg"]


def test_a_list_keeps_its_good_groups_and_names_the_bad_ones(client, store):
    items = [scored_data(), scored_data(scores=[1.0]), scored_data(first_token=60), "nonsense"]
    reply = client.post("/atropos/scored_data_list", json=items)
    assert reply.status_code == 422
    assert reply.json()["groups_processed"] == 2
    assert [fault["loc"] for fault in reply.json()["detail"]] == [["body", 1], ["body", 3]]
    assert store.counts().waiting == 2
    good = client.post("/atropos/scored_data_list", json=[scored_data(first_token=90)])
    assert (good.status_code, good.json()) == (200, {"status": "received", "groups_processed": 1})
    assert client.post("/atropos/scored_data_list", json={}).status_code == 422


def test_gzip_bodies_as_base_env_sends_them(client, store):
    body = gzip.compress(json.dumps(scored_data()).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert client.post("/atropos/scored_data", content=body, headers=headers).json() == {
        "status": "received"
    }
    listed = gzip.compress(json.dumps([scored_data(first_token=60)]).encode())
    assert (
        client.post("/atropos/scored_data_list", content=listed, headers=headers).status_code == 200
    )
    small = gzip.compress(json.dumps(ENVIRONMENT).encode())
    assert (
        client.post("/atropos/register-env", content=small, headers=headers).json()["status"]
        == "success"
    )
    assert store.counts().waiting == 2


def test_a_gzip_bomb_is_413(client, monkeypatch):
    monkeypatch.setattr(routes_atropos, "MAX_UNPACKED_BYTES", 1000)
    bomb = gzip.compress(b" " * 100_000)
    reply = client.post("/atropos/scored_data", content=bomb, headers={"Content-Encoding": "gzip"})
    assert reply.status_code == 413


def test_lists_of_nothing_are_refused_before_they_are_made(client, store):
    """65 KB that became 3.5 GB."""
    content = gzip.compress(b'{"tokens":[' + b"[]," * MAX_CONTAINERS + b"[]]}")
    reply = client.post(
        "/atropos/scored_data", content=content, headers=JSON | {"Content-Encoding": "gzip"}
    )
    assert reply.status_code == 413 and store.counts().rejected == 1


async def test_few_bodies_are_unpacked_at_once(app, monkeypatch):
    """The others wait; a sender who is slow with his body holds no place."""
    at_once, most, free = 0, 0, threading.Event()

    def unpack(body: bytes) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        free.wait(0.05)
        at_once -= 1
        return b"{}"

    monkeypatch.setattr(routes_atropos, "_gunzip", unpack)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        sent = [
            client.post(
                "/atropos/scored_data",
                content=b"packed",
                headers=JSON | {"Content-Encoding": "gzip"},
            )
            for _ in range(12)
        ]
        replies = await asyncio.gather(*sent)
    assert {reply.status_code for reply in replies} == {422}
    assert most <= routes_atropos.GROUPS_AT_ONCE


@pytest.mark.parametrize("path", ["scored_data", "scored_data_list"])
@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (b"{", JSON, 422, "JSON decode error"),
        (b"\xff{", JSON, 400, "There was an error parsing the body"),
        (b"[" * 100_000, JSON, 400, "There was an error parsing the body"),
        (b"{}", {}, 422, "valid list|not bytes"),
        (b"", JSON, 422, "Field required"),
        (b"not gzip", JSON | {"Content-Encoding": "gzip"}, 400, "Invalid gzip payload"),
        (
            gzip.compress(b"{}" * 100, mtime=0)[:-10],
            JSON | {"Content-Encoding": "gzip"},
            400,
            "Invalid gzip payload",
        ),
        (
            gzip.compress(b"{}", mtime=0) + b"garbage",
            JSON | {"Content-Encoding": "gzip"},
            400,
            "Invalid gzip payload",
        ),
    ],
)
def test_what_never_becomes_a_group_is_refused_and_counted(
    client, store, path, body, headers, status, reason
):
    reply = client.post(f"/atropos/{path}", content=body, headers=headers)
    assert reply.status_code == status
    assert re.search(reason, reply.text)
    assert store.counts().rejected == 1
    assert re.search(reason, store.rejects()[0].reason)


def test_a_full_disk_is_503_so_that_the_environment_sends_again(client, store):
    pages = store.database.connection.execute("PRAGMA page_count").fetchone()[0]
    store.database.connection.execute(f"PRAGMA max_page_count = {pages}")
    large = scored_data(messages=[[{"role": "user", "content": os.urandom(40_000).hex()}]] * 2)
    reply = client.post("/atropos/scored_data", json=large)
    assert reply.status_code == 503
    assert "disk" in reply.json()["detail"]
    store.database.connection.execute("PRAGMA max_page_count = 100000")
    assert client.post("/atropos/scored_data", json=large).json() == {"status": "received"}


def test_an_unknown_environment_is_404_and_a_query_is_422(client):
    assert status_of(client, 0).status_code == 404
    assert client.get("/atropos/status-env", params={"env_id": 0}).status_code == 422


def test_half_a_character_in_a_name_is_422_and_registers_nobody(client):
    body = b'{"max_token_length": 9, "desired_name": "\\ud800", "weight": 1, "group_size": 2}'
    reply = client.post("/atropos/register-env", content=body, headers=JSON)
    assert reply.status_code == 422 and status_of(client, 0).status_code == 404


def test_the_latest_example_comes_back_as_it_was_sent(client):
    empty = client.get("/atropos/latest_example").json()
    assert empty["tokens"] == [] and empty["images"] == []
    data = scored_data()
    client.post("/atropos/scored_data", json=data)
    example = client.get("/atropos/latest_example").json()
    for field in ("tokens", "masks", "scores", "inference_logprobs", "advantages", "ref_logprobs"):
        assert example[field] == data[field]


def test_reset_drops_with_a_reason_and_keeps_environments(client, store):
    client.post("/atropos/register-env", json=ENVIRONMENT)
    client.post("/atropos/scored_data", json=scored_data(env_id=0))
    reply = client.get("/atropos/reset_data")
    assert (reply.status_code, reply.text) == (200, "Reset successful")
    assert store.counts().waiting == 0
    assert store.drop_reasons() == {"dropped by /atropos/reset_data": 1}
    assert status_of(client, 0).json()["queue_size"] == 0


def test_the_openapi_document_shows_every_route_and_the_groups_fields(client):
    document = client.get("/openapi.json").json()
    paths = {
        path.removeprefix("/atropos/") for path in document["paths"] if path.startswith("/atropos/")
    }
    assert paths == {
        "", "register-env", "disconnect-env", "wandb_info", "info", "status", "status-env",
        "scored_data", "scored_data_list", "latest_example", "reset_data", "next-rows",
    }  # fmt: skip
    body = document["paths"]["/atropos/scored_data"]["post"]["requestBody"]
    assert "inference_logprobs" in body["content"]["application/json"]["schema"]["properties"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_lies_in_quarantine(app, store, announced):
    client = TestClient(BodyLimitMiddleware(app, max_bytes=1500))
    content = b"[" * 2000 if announced else iter([b"[" * 900, b"[" * 1100])
    assert client.post("/atropos/scored_data", content=content, headers=JSON).status_code == 413
    assert "larger than 1500 bytes" in store.rejects()[0].reason
    assert client.post("/atropos/scored_data", json=scored_data()).status_code == 200


@pytest.mark.slow
def test_made_up_requests_are_never_a_500_and_never_surprise():
    """The short form of tests/soak/fuzz_openapi.py, for these routes."""
    with tiny_server(added=atropos) as serving:
        findings = fuzz(serving.url, cases=30, prefix="/atropos")
    assert findings.problems == {} and findings.cases >= 30
