"""The poller against a real HTTP server that behaves like atroposlib's run-api, and against
run-api where it is there (fake_run_api.py; `scripts/setup_atropos` installs it)."""

import asyncio
import os
import threading
import time

import httpx
from fastapi import FastAPI

from mlx_parallm.faces.atropos.api import AtroposClient
from mlx_parallm.faces.atropos.client import AtroposPoller
from mlx_parallm.rl_training import atropos_client
from scripts.server_process import free_port
from tests.atropos.fake_run_api import serving
from tests.atropos.polling import (
    FAST,
    REGISTRATION,
    eventually,
    groups,
    polling,
    register_environment,
)
from tests.rollout_store.groups import make_group


def test_the_promised_path_of_the_client_is_kept():
    assert (atropos_client.AtroposClient, atropos_client.AtroposPoller) == (
        AtroposClient,
        AtroposPoller,
    )


def test_registers_polls_and_stores(api, url, store):
    with polling(url, store, temperature=0.9) as poller:
        assert poller.wait_until_registered(20)
        for group in groups(2, env_id=1):
            api.post_group(group)
        assert store.wait_for_groups(20, at_least=2)
        assert poller.health() is None
        eventually(lambda: poller.groups_received == 2)
    first, second = store.waiting()
    assert {first.rollouts[0].tokens[0], second.rollouts[0].tokens[0]} == {0, 10}
    assert first.environment == "env_1"
    assert first.rollouts[0].policy_versions == (-1, -1, 3, 3, 3)
    assert first.rollouts[0].temperature == 0.9
    assert api.registrations == [
        {
            "wandb_group": "",
            "wandb_project": "",
            "batch_size": 4,
            "max_token_len": 32,
            "checkpoint_dir": "checkpoints/run",
            "save_checkpoint_interval": 50,
            "starting_step": 7,
            "num_steps": 1000,
        }
    ]
    assert api.accepted_encodings == {"identity"}
    assert list(store.waiting_by_source()) == [f"atropos:{url}"]


def test_the_first_batch_call_comes_even_with_a_full_store(api, url, store):
    """It starts the environments; then the store's batch keeps further ones at the API."""
    store.add(make_group("old", size=4), source="before the restart")
    with polling(url, store) as poller:
        assert api.batch_calls.acquire(timeout=20)
        assert api.state.started
        for group in groups(4):
            api.post_group(group)
        assert not api.batch_calls.acquire(timeout=0.2)
        store.take(["old"], 8)
        assert store.wait_for_groups(20, at_least=2)
        eventually(lambda: poller.groups_received == 2)
        api.batch_calls.acquire(blocking=False)
        # one batch waits: the second stays where it is seen
        assert not api.batch_calls.acquire(timeout=0.2)
    assert store.counts().waiting == 2
    assert len(api.state.formed) == 1


def test_a_starved_trainer_gets_more_than_one_batch(api, url, store):
    """Its batch cannot be made of the sizes that wait."""
    store.add(make_group("odd", size=5), source="local")
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        for group in groups(2):
            api.post_group(group)
        assert store.wait_for_groups(20, at_least=3)


def test_batches_of_several_rounds_newest_first_and_steps_that_jump(either, store):
    """All three batches are formed at the first /batch: the API's step is three further, the
    newest comes first."""
    with polling(either.url, store, poll_interval_s=0.2) as poller:
        assert poller.wait_until_registered(20)
        # so the first /batch is over
        eventually(lambda: register_environment(either)["status"] == "success")
        store.add(make_group("blocks", size=4), source="local")
        time.sleep(0.5)  # a poll that was under way
        for group in groups(6):
            either.post_group(group)
        store.take(["blocks"], 1)
        seen: list[int] = []
        while len(seen) < 6:
            assert store.wait_for_groups(20, at_least=2)
            batch = store.waiting()
            store.take([group.group_id for group in batch], 1)
            seen += [group.rollouts[0].tokens[0] // 10 for group in batch]
    assert seen == [4, 5, 2, 3, 0, 1]
    assert httpx.get(either.url + "/status").json() == {"current_step": 7 + 3, "queue_size": 0}


def test_rejected_groups_are_kept_with_the_reason_and_the_rest_goes_on(api, url, store):
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        for group in (*groups(1), *groups(1, first=1, inference_logprobs=None)):
            api.post_group(group)
        eventually(lambda: poller.groups_rejected == 1 and poller.groups_received == 1)
    assert "no inference_logprobs" in store.rejects()[0].reason
    assert store.counts().waiting == 1


def test_a_policy_version_that_was_never_served_is_rejected(api, url, store):
    with polling(url, store) as poller:  # serves version 3
        assert poller.wait_until_registered(20)
        (good,) = groups(1)
        for first, version in enumerate((3, 4)):
            versions = [[version] * len(row) for row in good["tokens"]]
            (group,) = groups(1, first=first, policy_versions=versions)
            api.post_group(group)
        eventually(lambda: poller.groups_rejected == 1 and poller.groups_received == 1)
    assert "policy version 4" in store.rejects()[0].reason


def test_a_nan_makes_the_api_lose_a_batch_which_is_told_and_survived(either, store):
    """500 and a closed socket; /info is still ours, so nobody registers again."""
    with polling(either.url, store, poll_interval_s=0.2) as poller:
        assert poller.wait_until_registered(20)
        for group in groups(2, scores=[0.0, float("nan")]):
            either.post_group(group)
        eventually(
            lambda: (
                "lost the batch, the 1. so far: an environment sends NaN" in (poller.health() or "")
            )
        )
        for group in groups(2, first=2):
            either.post_group(group)
        assert store.wait_for_groups(20, at_least=2)
        eventually(lambda: poller.health() is None)
        assert poller.batches_lost == 1


def test_500_again_and_again_is_survived(api, url, store):
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        api.crashes = 2
        eventually(lambda: api.crashes == 0)
        for group in groups(2):
            api.post_group(group)
        assert store.wait_for_groups(20, at_least=2)
        eventually(lambda: poller.health() is None)
    assert len(api.registrations) == 1  # /info still was ours


def test_a_connection_that_the_server_closed_is_replaced(store):
    """Every reply is followed by a close without notice: the next call on the pooled connection
    must not fail."""
    app = FastAPI()

    @app.middleware("http")
    async def drop(request, call_next):
        await call_next(request)
        raise ConnectionError  # after the 500 uvicorn closes the socket

    app.get("/info")(lambda: {"batch_size": 1, "max_token_len": 2})

    async def statuses() -> list[int]:
        client = AtroposClient(url)
        replies = [await client._send("GET", "/info") for _ in range(5)]
        await client.close()
        return [reply.status_code for reply in replies]

    with serving(app, free_port()) as url:
        assert asyncio.run(statuses()) == [500] * 5


def test_a_full_disk_holds_the_batch_until_it_fits(api, url, store):
    noise = [[{"role": "user", "content": os.urandom(40_000).hex()}]] * 2
    pages = store.database.connection.execute("PRAGMA page_count").fetchone()[0]
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        store.database.connection.execute(f"PRAGMA max_page_count = {pages}")
        for group in groups(2, messages=noise):
            api.post_group(group)
        eventually(lambda: "is the disk full?" in (poller.health() or ""))
        store.database.connection.execute("PRAGMA max_page_count = 100000")
        assert store.wait_for_groups(20, at_least=2)
        eventually(lambda: poller.health() is None)


def test_stop_joins_soon_though_a_request_hangs(api, url, store):
    api.hold_batches = threading.Event()
    with polling(url, store) as poller:
        eventually(lambda: "/batch" in api.calls)
        poller.stop(grace_s=0.05)
        assert not poller._loop._thread.is_alive()
    api.hold_batches.set()


def test_stop_waits_a_moment_for_the_batch_in_flight(api, url, store):
    api.hold_batches = threading.Event()
    with polling(url, store) as poller:
        eventually(lambda: "/batch" in api.calls)
        for group in groups(2):
            api.post_group(group)
        stopping = threading.Thread(target=poller.stop, kwargs={"grace_s": 20.0})
        stopping.start()
        eventually(lambda: poller._stopping)
        api.hold_batches.set()
        stopping.join()
    assert store.counts().waiting == 2


def test_stop_before_start_and_twice_is_harmless(url, store):
    AtroposPoller(AtroposClient(url), store, REGISTRATION, **FAST).stop()
    with polling(url, store) as poller:
        poller.stop()


def test_a_poller_that_failed_is_reported(api, url, store):
    def broken() -> int:
        raise AssertionError

    with polling(url, store, policy_version=broken) as poller:
        assert poller.wait_until_registered(20)
        for group in groups(2):
            api.post_group(group)
        eventually(lambda: "has died" in (poller.health() or ""))
