"""One environment that hangs, dies or blocks its thread is the others' business no more."""

import asyncio
import threading
import time

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments import queues
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.errors import EnvironmentFailedError
from mlx_parallm.rewards.base import exact_match
from tests.environments.managing import two_tasks, until
from tests.environments.scripted_client import ScriptedClient


def hangs(name):
    """A gate that never opens for the groups of `name`."""
    return lambda request: None if request.request_id.startswith(f"{name}-") else 0


class Door(ScriptedClient):
    """The groups of "sort" wait until `opened` is set."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, lambda *_: "1")
        self.opened = threading.Event()

    async def _one(self, request):
        while request.request_id.startswith("sort-") and not self.opened.is_set():  # noqa: ASYNC110  a thread sets it
            await asyncio.sleep(0.005)
        return await super()._one(request)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(queues, "LEAST_PATIENCE_S", 0.05)


def test_one_environment_that_hangs_is_named_and_the_others_make_its_groups(
    managed, tokenizer, impatient
):
    client = ScriptedClient(tokenizer, lambda *_: "1", gate=hangs("sort"))
    manager, inbox = managed(client, sources=two_tasks(sum=1.0, sort=1.0), num_parallel=8)
    manager.request_groups(40)
    inbox.wait(groups=40)
    assert {group.environment for group in inbox.groups} == {"sum"}
    hanging = [request for request in client.requests if request.request_id.startswith("sort")]
    assert len(hanging) <= 4, "what hangs holds no more than all places, and gets no new ones"
    until(lambda: "sort delivers nothing" in (manager.health() or ""))
    assert f"{hanging[0].request_id} " in manager.health()
    assert f" {len(hanging)} groups" in manager.health()
    position = manager.state()["next_group"]
    assert int(hanging[0].request_id.rsplit("-", 1)[1]) == position["sort"] < position["sum"]


def test_an_environment_that_comes_back_gets_its_share_again_and_does_not_catch_up(
    managed, tokenizer, impatient, monkeypatch
):
    client = Door(tokenizer)
    manager, inbox = managed(client, sources=two_tasks(sum=1.0, sort=1.0), num_parallel=8)
    manager.request_groups(40)
    inbox.wait(groups=40)
    client.opened.set()
    until(lambda: manager.health() is None)
    # a busy machine makes nobody late from here on
    monkeypatch.setattr(queues, "LEAST_PATIENCE_S", 60.0)
    late = len(inbox.wait(groups=41)) - 40
    manager.request_groups(40)
    inbox.wait(groups=80 + late)
    environments = [group.environment for group in inbox.groups[40:]]
    assert 0.35 < environments.count("sort") / len(environments) < 0.65
    assert manager.health() is None


def test_one_environment_that_dies_is_named_and_the_others_go_on(managed, tokenizer):
    def answer(request, choice):
        return RuntimeError("sandbox gone") if request.request_id.startswith("sort-") else "1"

    manager, inbox = managed(
        ScriptedClient(tokenizer, answer), sources=two_tasks(sum=1.0, sort=1.0), num_parallel=16
    )
    manager.request_groups(200)
    inbox.wait(groups=200, failures=3)
    assert {group.environment for group in inbox.groups} == {"sum"}
    assert len(inbox.failures) < 20, "it is tried with one group at a time, after pauses"
    assert "environment sort: " in manager.health()
    assert manager.health().endswith("sandbox gone")
    manager.check()


def test_an_environment_that_blocks_its_thread_does_not_block_the_others(
    managed, tokenizer, impatient
):
    release = threading.Event()

    class Blocking(EnvironmentSource):
        def task(self, index, split="train"):
            release.wait()
            return Task("k", ({"role": "user", "content": "x"},), exact_match("1"))

    blocking = Blocking(EnvironmentConfig(kind="x", name="x"), seed=0)
    sources = [*two_tasks(sum=1.0), blocking]
    manager, inbox = managed(ScriptedClient(tokenizer, lambda *_: "1"), sources=sources)
    manager.request_groups(30)
    inbox.wait(groups=30)
    until(lambda: "x delivers nothing" in (manager.health() or ""))
    with pytest.raises(EnvironmentFailedError, match="environment x"):
        manager.stop(timeout_s=0.5)
    release.set()


def test_with_a_fixed_order_nothing_depends_on_a_clock(managed, tokenizer, impatient):
    client = Door(tokenizer)
    manager, inbox = managed(client, sources=two_tasks(sum=1.0, sort=1.0), fixed_order=True)
    manager.request_groups(4)
    manager.request_groups(4)
    time.sleep(0.2)  # far more than the patience
    assert len(client.calls) == 1
    assert manager.health() is None
    client.opened.set()
    assert [group.index for group in inbox.wait(groups=8)] == list(range(8))
