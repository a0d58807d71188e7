"""Whose trainer an Atropos API has: at the start, after its restart, beside another run
(fake_run_api.py)."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.atropos.api import AtroposClient
from mlx_parallm.faces.atropos.client import AtroposPoller
from scripts.server_process import free_port
from tests.atropos.fake_run_api import RunApi, serving
from tests.atropos.groups import scored_data
from tests.atropos.polling import (
    FAST,
    REGISTRATION,
    eventually,
    groups,
    info,
    polling,
    register_environment,
    register_other_run,
)
from tests.rollout_store.groups import make_group


def test_the_uuid_of_a_registration_has_128_bits(either):
    async def uuids() -> list[int]:
        client = AtroposClient(either.url)
        found = [await client.register(REGISTRATION) for _ in range(20)]
        await client.close()
        return found

    assert max(asyncio.run(uuids())) >= 2**64


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


def test_a_run_api_that_restarts_gets_its_trainer_back_and_environments_go_on(either, store):
    """Also while the store is full and /batch is not asked: environments wait for the trainer
    until then."""
    with polling(either.url, store) as poller:
        assert poller.wait_until_registered(20)
        eventually(lambda: register_environment(either)["status"] == "success")
        store.add(make_group("blocks", size=4), source="local")
        either.restart()
        eventually(lambda: register_environment(either).get("env_id") == 0)
        store.take(["blocks"], 1)
        for group in groups(2, env_id=0):
            either.post_group(group)
        assert store.wait_for_groups(20, at_least=2)
        eventually(lambda: poller.health() is None)
    assert info(either) == (4, 32)


def test_a_run_api_is_looked_at_while_the_store_is_full(api, url, store):
    """At most so often, but again and again: a look that was not due yet does not put off the
    next one."""
    with polling(url, store) as poller:
        assert poller.wait_until_registered(20)
        store.add(make_group("blocks", size=4), source="local")
        eventually(lambda: api.calls[-3:] == ["/info"] * 3)
        api.restart()
        eventually(lambda: api.state.started)


def test_a_run_api_that_comes_back_poisoned_gets_its_trainer_back(either, store):
    """An environment that outlived the restart sends before the trainer is registered again."""
    with polling(either.url, store, poll_interval_s=1.0) as poller:
        assert poller.wait_until_registered(20)
        either.restart()
        either.post_group(scored_data())
        eventually(lambda: info(either) == (4, 32))
        for group in groups(2):
            either.post_group(group)
        assert store.wait_for_groups(20, at_least=2)


def test_a_poisoned_registration_is_reset(either, store):
    """Data that came before any trainer makes the API ignore registrations for ever."""
    either.post_group(scored_data())
    with polling(either.url, store) as poller:
        assert poller.wait_until_registered(20)
        assert info(either) == (4, 32)


def test_an_api_that_is_poisoned_again_and_again_is_told_and_tried(api, url, store, monkeypatch):
    """Environments of an earlier run send faster than one can register."""
    state = type(api.state)

    class Poisoned(state):
        def __init__(self) -> None:
            super().__init__()
            self.queue = []

    api.state = Poisoned()
    monkeypatch.setattr("tests.atropos.fake_run_api.RunApiState", Poisoned)
    with polling(url, store) as poller:
        eventually(lambda: "ignores this run's registration" in (poller.health() or ""))
        assert not poller.wait_until_registered(0.01)
        monkeypatch.setattr("tests.atropos.fake_run_api.RunApiState", state)
        assert poller.wait_until_registered(20)
        eventually(lambda: poller.health() is None)


def test_an_idle_registration_of_another_run_is_replaced(either, store):
    register_other_run(either)
    with polling(either.url, store) as poller:
        assert poller.wait_until_registered(20)
    assert info(either) == (4, 32)


@pytest.mark.parametrize("in_use_by", ["a queue", "an environment"])
def test_a_registration_that_is_in_use_is_an_error_that_says_what_to_do(either, store, in_use_by):
    register_other_run(either)
    if in_use_by == "a queue":
        either.post_group(scored_data())
    else:
        assert register_environment(either)["status"] == "success"
    with polling(either.url, store) as poller:
        with pytest.raises(ConfigError, match=r"batch_size.*rollout_batch_size"):
            poller.wait_until_registered(20)
        assert "serves another run" in poller.health()
    assert info(either) == (64, 32)


def test_a_restarted_api_that_another_run_took_is_told_and_does_not_end_this_one(api, store):
    """Nor are the other's batches taken away from it."""
    port, other = free_port(), RunApi()
    with serving(api.app(), port) as url:
        poller = AtroposPoller(AtroposClient(url), store, REGISTRATION, **FAST)
        poller.start()
        assert poller.wait_until_registered(20)
    other.state.queue, other.state.registration = (
        [scored_data()] * 32,
        {"batch_size": 64, "max_token_len": 32},
    )
    with serving(other.app(), port):
        eventually(lambda: "serves another run" in (poller.health() or ""))
        poller.check()
        assert "/batch" not in other.calls
        httpx.get(url + "/reset_data")
        eventually(lambda: poller.health() is None)
        assert other.state.registration["batch_size"] == 4
        poller.stop()


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
