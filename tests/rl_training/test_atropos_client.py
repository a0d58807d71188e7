"""The poller against a real HTTP server that behaves like atroposlib's run-api (fake_run_api.py)."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fastapi import FastAPI

from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.atropos_client import AtroposClient, AtroposPoller, TrainerRegistration
from mlx_parallm.rollout_store.store import RolloutStore
from tests.rl_training.fake_run_api import RunApi, free_port, serving
from tests.rollout_store.groups import VOCAB_SIZE, make_group, scored_data

REGISTRATION = TrainerRegistration(
    wandb_group="",
    wandb_project="",
    batch_size=4,
    max_token_len=32,
    checkpoint_dir="checkpoints/run",
    save_checkpoint_interval=50,
    starting_step=7,
    num_steps=1000,
)


@pytest.fixture
def api() -> RunApi:
    return RunApi()


@pytest.fixture
def url(api: RunApi) -> Iterator[str]:
    with serving(api.app(), free_port()) as url:
        yield url


@contextlib.contextmanager
def polling(url: str, store: RolloutStore, **changes) -> Iterator[AtroposPoller]:
    options = {
        "registration": REGISTRATION,
        "vocab_size": VOCAB_SIZE,
        "policy_version": lambda: 3,
        "poll_interval_s": 0.01,
        "stalled_after_s": 0.2,
        "status_every_s": 0.05,
    } | changes
    poller = AtroposPoller(AtroposClient(url), store, **options)
    poller.start()
    try:
        yield poller
    finally:
        poller.stop()


def groups(count: int, *, size: int = 2, first: int = 0, **changes) -> list[dict]:
    return [scored_data(size=size, first_token=10 * (first + number), **changes) for number in range(count)]


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """For states that no event announces: what `health` says, what the fake was asked."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


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
        assert not api.batch_calls.acquire(timeout=0.2)  # one batch waits: the second stays where it is seen
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


def test_batches_of_several_rounds_newest_first(api, url, store):
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        for group in groups(6):
            api.post_group(group)
        seen: list[str] = []
        while len(seen) < 6:
            assert store.wait_for_groups(20)
            batch = [group.group_id for group in store.waiting()]
            store.take(batch, 1)
            seen += batch
    assert len(set(seen)) == 6


def test_rejected_groups_are_kept_with_the_reason_and_the_rest_goes_on(api, url, store):
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        for group in (*groups(1), *groups(1, first=1, inference_logprobs=None)):
            api.post_group(group)
        eventually(lambda: poller.groups_rejected == 1 and poller.groups_received == 1)
    assert "no inference_logprobs" in store.rejects()[0].reason
    assert store.counts().waiting == 1


def test_500_with_a_closed_socket_is_survived(api, url, store):
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
    """Every reply is followed by a close without notice: the next call on the pooled connection must not fail."""
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


def test_an_api_that_restarts_is_registered_again(api, url, store):
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        api.restart()  # /batch: 200 with an error and an empty list
        eventually(lambda: api.state.started)
        api.state = type(api.state)()
        api.state.was_reset = True  # someone called /reset_data: /batch is 500
        eventually(lambda: api.state.started)
        for group in groups(2):
            api.post_group(group)
        assert store.wait_for_groups(20, at_least=2)
    assert len(api.registrations) == 3


def test_a_poisoned_registration_is_reset(api, url, store):
    """Data that came before any trainer makes the API ignore registrations for ever."""
    api.post_group(scored_data())
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        assert api.state.registration["batch_size"] == 4
    assert api.calls.count("/reset_data") == 1


def test_an_idle_registration_of_another_run_is_replaced(api, url, store):
    api.state.queue, api.state.registration = [], {"batch_size": 64, "max_token_len": 32, "starting_step": 0}
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
    assert api.state.registration["batch_size"] == 4


@pytest.mark.parametrize("in_use_by", ["a queue", "an environment"])
def test_a_registration_that_is_in_use_is_an_error_that_says_what_to_do(api, url, store, in_use_by):
    api.state.queue, api.state.registration = [], {"batch_size": 64, "max_token_len": 32, "starting_step": 0}
    if in_use_by == "a queue":
        api.post_group(scored_data())
    else:
        api.state.environments.append({"queue_size": 0})
    with polling(url, store) as poller:
        with pytest.raises(ConfigError, match=r"batch_size 64.*wants 4 and 32.*rollout_batch_size.*/reset_data"):
            poller.wait_until_registered(20)
        assert "serves another run" in poller.health()
    assert "/reset_data" not in api.calls
    assert api.state.registration["batch_size"] == 64


def test_an_api_that_is_not_up_yet_is_waited_for(api, store):
    port = free_port()
    with polling(f"http://127.0.0.1:{port}", store) as poller:
        eventually(lambda: "does not answer" in (poller.health() or ""))
        assert poller.wait_until_registered(0.01) is False
        with serving(api.app(), port):
            assert poller.wait_until_registered(20) is True
            assert poller.health() is None
        eventually(lambda: "does not answer" in (poller.health() or ""))


def test_what_is_no_atropos_api_is_said(store):
    app = FastAPI()
    app.post("/register")(lambda: ["hello"])
    with serving(app, free_port()) as url, polling(url, store) as poller:
        eventually(lambda: "is this an Atropos API?" in (poller.health() or ""))


def test_no_groups_at_all_is_told(api, url, store):
    with polling(url, store) as poller:
        eventually(lambda: "no environment has sent a group" in (poller.health() or ""))
        for group in groups(2):
            api.post_group(group)
        eventually(lambda: poller.health() is None)


def test_a_queue_that_never_makes_a_batch_is_told(api, url, store):
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        api.post_group(scored_data(size=3))
        expected = "has 1 groups queued but makes no batch of 4 sequences: group sizes must divide the batch size"
        eventually(lambda: expected in (poller.health() or ""))


def test_a_full_store_is_not_a_stall(api, url, store):
    store.add(make_group("old", size=4), source="local")
    with polling(url, store) as poller:
        assert api.batch_calls.acquire(timeout=20)
        assert not threading.Event().wait(0.5)
        assert poller.health() is None


def test_a_full_disk_holds_the_batch_until_it_fits(api, url, store):
    noise = [[{"role": "user", "content": os.urandom(40_000).hex()}]] * 2
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        for group in groups(2, messages=noise):
            api.post_group(group)
        eventually(lambda: "is the disk full?" in (poller.health() or ""))
        store._connection.execute("PRAGMA max_page_count = 100000")
        assert store.wait_for_groups(20, at_least=2)
        eventually(lambda: poller.health() is None)


def test_stop_joins_soon_though_a_request_hangs(api, url, store):
    api.hold_batches = threading.Event()
    with polling(url, store) as poller:
        eventually(lambda: "/batch" in api.calls)
        started = time.monotonic()
        poller.stop(grace_s=0.05)
        assert time.monotonic() - started < 10
        assert not poller._thread.is_alive()
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
    AtroposPoller(
        AtroposClient(url), store, replace(REGISTRATION), vocab_size=VOCAB_SIZE, policy_version=lambda: 0
    ).stop()
    with polling(url, store) as poller:
        poller.stop()


def test_a_thread_that_died_is_told(api, url, store, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken() -> int:
        raise AssertionError

    with polling(url, store, policy_version=broken) as poller:
        assert poller.wait_until_registered(20)
        for group in groups(2):
            api.post_group(group)
        eventually(lambda: "has died" in (poller.health() or ""))
