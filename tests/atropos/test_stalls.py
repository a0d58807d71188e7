"""Why no batch comes of an Atropos API, in words: one test a sentence (fake_run_api.py)."""

import itertools
import threading
import time
from dataclasses import replace

import pytest

from mlx_parallm.faces.atropos.api import AtroposClient, why_no_batch
from mlx_parallm.faces.atropos.client import AtroposPoller
from tests.atropos.groups import scored_data
from tests.atropos.polling import (
    FAST,
    REGISTRATION,
    eventually,
    groups,
    polling,
    register_environment,
)
from tests.rollout_store.groups import make_group


def test_no_environment_and_then_no_group_is_told(either, store):
    with polling(either.url, store) as poller:
        eventually(lambda: "no environment has registered at http" in (poller.health() or ""))
        register_environment(either)
        eventually(lambda: "1 environments are registered at http" in (poller.health() or ""))
        for group in groups(2):
            either.post_group(group)
        eventually(lambda: poller.health() is None)


def test_groups_of_another_size_than_registered_are_told(either, store):
    """The API holds them back where nobody sees them."""
    with polling(either.url, store) as poller:
        eventually(lambda: register_environment(either)["status"] == "success")
        either.post_group(scored_data(size=1, env_id=0))
        eventually(
            lambda: "have their groups the size that they registered?" in (poller.health() or "")
        )


STALLS = {
    "too large": (
        [2, 2, 8],
        {},
        "from the 3 groups queued there: one has 8, and blocks the rest until run-api is",
    ),
    "no divisor": (
        [3, 3],
        {},
        "no batch of 4 sequences from the 2 groups queued there: the largest has 3, which does",
    ),
    "share": (
        [2, 2],
        {"min_batch_allocation": 0.5},
        "50% of it is reserved (min_batch_allocation), and environment 0",
    ),
    "too few": ([2], {}, "from the 1 groups queued there: they are too few, and none has come for"),
}


@pytest.mark.parametrize("name", STALLS)
def test_a_queue_that_never_makes_a_batch_is_told_with_the_reason(either, store, name):
    sizes, registration, expected = STALLS[name]
    with polling(either.url, store, poll_interval_s=0.2) as poller:
        eventually(lambda: register_environment(either, **registration)["status"] == "success")
        for size in sizes:
            either.post_group(scored_data(size=size))
        eventually(lambda: expected in (poller.health() or ""))
        assert store.counts().waiting == 0


def test_sizes_that_never_add_up_are_told(either, store):
    """3 + 3 sequences of a batch of 6 could be had, but a pair is not packed into a run of 3."""
    registration = replace(REGISTRATION, batch_size=6)
    with polling(either.url, store, poll_interval_s=0.2, registration=registration) as poller:
        eventually(lambda: register_environment(either)["status"] == "success")
        for size in (2, 3, 2, 2):
            either.post_group(scored_data(size=size))
        expected = (
            "group sizes must divide the batch size and each other; environments"
            " wait meanwhile, for the queue"
        )
        eventually(lambda: expected in (poller.health() or ""))


def test_without_environments_nothing_is_said_about_sizes():
    """All have disconnected: /status-env fails, and the sizes are not known."""
    assert "group sizes must divide" in why_no_batch("http://api", 4, 3, [], 60.0)
    assert "the largest" not in why_no_batch("http://api", 4, 3, [], 60.0)


def test_a_queue_that_grows_is_no_stall(api, url, store):
    """Environments are slow, not stuck: each time that one asks, there is one group more."""
    sizes = itertools.count(1)

    async def growing() -> int:
        return next(sizes)

    client = AtroposClient(url)
    client.queue_size = growing
    poller = AtroposPoller(client, store, REGISTRATION, **FAST | {"status_every_s": 0.01})
    poller.start()
    heard = set()
    while next(sizes) < 100:
        heard.add(poller.health())
        time.sleep(0.005)
    poller.stop()
    assert heard == {None}


def test_a_full_store_is_not_a_stall(api, url, store):
    store.add(make_group("old", size=4), source="local")
    with polling(url, store) as poller:
        assert api.batch_calls.acquire(timeout=20)
        assert not threading.Event().wait(0.5)
        assert poller.health() is None
