import re
import threading
import time

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments import scheduler
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.errors import (
    CheckpointError,
    EndpointError,
    EnvironmentFailedError,
    RolloutRejectedError,
)
from mlx_parallm.system.log import FILE_ONLY
from tests.environments.managing import WAIT_S, Inbox, two_tasks, until
from tests.environments.scripted_client import ScriptedClient


def test_nothing_starts_without_demand_and_exactly_the_demand_arrives(managed, tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "12")
    manager, inbox = managed(client)
    assert client.calls == []
    manager.request_groups(3)
    manager.request_groups(2)
    groups = inbox.wait(groups=5)
    manager.stop()
    assert [group.group_id for group in groups] == [f"sum-0-{index}" for index in range(5)]
    assert {len(group.rollouts) for group in groups} == {4}
    assert len({request.params.seed for request in client.requests}) == 5
    assert manager.in_flight == 0
    # "1", "2", EOS
    assert (
        sum(rollout.sampled_tokens for group in groups for rollout in group.rollouts) == 5 * 4 * 3
    )
    assert manager.state()["next_group"] == {"sum": 5}


def test_many_groups_are_in_flight_but_no_more_than_allowed(managed, tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "1", gate=lambda request: None)
    manager, _ = managed(client, num_parallel=12)
    manager.request_groups(10)
    until(lambda: len(client.requests) == 3)
    time.sleep(0.02)
    assert manager.in_flight == len(client.requests) == 3


def test_short_answers_are_not_preferred(managed, tokenizer):
    """Long answers take longer; what arrives first must still be a fair draw, in every stretch
    of the output."""

    def length(request):
        return 40 if int(request.request_id.rsplit("-", 1)[1]) % 2 else 1

    client = ScriptedClient(
        tokenizer,
        lambda request, _: "a" * length(request),
        gate=lambda request: 5 * length(request),
    )
    manager, inbox = managed(client, num_parallel=32)
    manager.request_groups(40)
    groups = list(inbox.wait(groups=16)[:16])
    lengths = [group.rollouts[0].sampled_tokens for group in groups]
    assert lengths.count(max(lengths)) == 8
    assert inbox.wait(groups=40) and inbox.ids == [f"sum-0-{index}" for index in range(40)]


def test_fixed_order_submits_each_demand_in_one_call_and_repeats_itself(managed, tokenizer):
    def run():
        client = ScriptedClient(
            tokenizer,
            lambda request, choice: str(choice),
            gate=lambda request: request.params.seed % 7,
        )
        manager, inbox = managed(client, fixed_order=True, sources=two_tasks(sum=1.0, sort=1.0))
        manager.request_groups(4)
        manager.request_groups(3)
        inbox.wait(groups=7)
        manager.stop()
        requests = [
            (request.request_id, request.prompt_token_ids, request.params)
            for request in client.requests
        ]
        return client.calls, inbox.groups, requests

    first, second = run(), run()
    assert first == second
    calls, groups, _ = first
    assert [len(call) for call in calls] == [4, 3]
    assert [group.index for group in groups] == list(range(7))
    assert [name for call in calls for name in call] == [group.group_id for group in groups]


def test_fixed_order_waits_for_the_call_before(managed, tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "1", gate=lambda request: None)
    manager, _ = managed(client, fixed_order=True)
    manager.request_groups(2)
    manager.request_groups(2)
    until(lambda: client.calls)
    time.sleep(0.02)
    assert client.calls == [["sum-0-0", "sum-0-1"]]


def test_a_restored_manager_goes_on_where_the_state_was_taken(managed, tokenizer):
    def fresh():
        return ScriptedClient(tokenizer, lambda request, choice: str(choice))

    sources = two_tasks(sum=2.0, sort=1.0)
    whole, everything = managed(fresh(), sources=sources)
    whole.request_groups(12)
    everything.wait(groups=12)
    first, part = managed(fresh(), sources=sources)
    first.request_groups(5)
    part.wait(groups=5)
    first.stop()
    state = first.state()
    second, rest = managed(fresh(), sources=sources, start=False)
    second.restore(state)
    second.start()
    second.request_groups(7)
    rest.wait(groups=7)
    for name in ("sum", "sort"):
        own = [
            [g for g in groups if g.environment == name]
            for groups in (part.groups, rest.groups, everything.groups)
        ]
        assert own[0] + own[1] == own[2], (
            "each environment continues where it stood, in its own order"
        )


def test_groups_cut_off_by_stop_are_played_again(managed, tokenizer):
    held = {"sum-0-1"}
    client = ScriptedClient(
        tokenizer, lambda *_: "1", gate=lambda request: None if request.request_id in held else 0
    )
    manager, inbox = managed(client)
    manager.request_groups(3)
    inbox.wait(groups=1)
    manager.stop()
    assert client.aborted == ["sum-0-1"]
    assert inbox.ids == ["sum-0-0"]  # group 2 may be finished, but 1 is not settled
    assert manager.state()["next_group"] == {"sum": 1}


def test_groups_that_the_store_holds_are_not_played_again(managed, tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "1")
    manager, inbox = managed(client, start=False)
    manager.skip({"sum-0-0", "sum-0-2", "elsewhere"})
    manager.start()
    manager.request_groups(3)
    inbox.wait(groups=3)
    assert inbox.ids == ["sum-0-1", "sum-0-3", "sum-0-4"]
    assert [request.request_id for request in client.requests] == inbox.ids
    assert manager.state()["next_group"] == {"sum": 5}


def test_groups_that_fail_or_that_the_sink_refuses_or_knows_are_replaced(managed, tokenizer):
    inbox = Inbox()

    def answer(request, choice):
        return RuntimeError("row lost") if request.request_id == "sum-0-1" else "1"

    def sink(group):
        if group.group_id == "sum-0-0":
            raise RolloutRejectedError("token 999 is out of range")
        inbox.sink(group)
        return group.group_id != "sum-0-2"  # this one is known

    manager, _ = managed(ScriptedClient(tokenizer, answer), inbox=inbox, sink=sink)
    manager.request_groups(1)
    inbox.wait(groups=2, failures=2)
    assert manager.health() is None  # two failures are not rate
    manager.stop()
    assert inbox.failures == [
        ("sum-0-0", "token 999 is out of range"),
        ("sum-0-1", "RuntimeError: row lost"),
    ]
    assert inbox.ids == ["sum-0-2", "sum-0-3"]


def test_the_health_line_tells_of_failures_and_of_a_stall_but_not_of_waiting(managed, tokenizer):
    now = [100.0]

    def answer(request, choice):
        return (
            RuntimeError("row lost")
            if request.request_id in ("sum-0-0", "sum-0-1", "sum-0-2")
            else "1"
        )

    failing, inbox = managed(ScriptedClient(tokenizer, answer))
    failing.request_groups(2)
    inbox.wait(groups=2, failures=3)
    assert re.search("sum: 3 of .* 5 .*row lost", failing.health())
    waiting, inbox = managed(ScriptedClient(tokenizer, lambda *_: "1"), clock=lambda: now[0])
    waiting.request_groups(1)
    inbox.wait(groups=1)
    waiting.stop()
    client = ScriptedClient(tokenizer, lambda *_: "1", gate=lambda request: None)
    stalled, _ = managed(client, stall_after_s=60.0, clock=lambda: now[0])
    stalled.request_groups(2)
    until(lambda: stalled.in_flight == 2)
    now[0] += 60.0
    assert stalled.health() is None
    now[0] += 15.0
    assert re.search("sum stalled: .* 75 s .* 2 .*sum-0-0", stalled.health())
    now[0] += 1000.0
    assert waiting.health() is None, "for demand"


@pytest.mark.parametrize(
    ("reason", "groups", "shown_after"),
    [("broken {0}", 5, 10), ("broken", 3, 10), ("broken", 3, 0)],
)
def test_failure_after_failure_ends_the_manager_sooner_where_all_fail_alike(
    managed, tokenizer, monkeypatch, warned, reason, groups, shown_after
):
    monkeypatch.setattr(scheduler, "SHOWN_AFTER_S", shown_after)
    monkeypatch.setattr(scheduler, "FAILURES_IN_A_ROW", 5)
    monkeypatch.setattr(scheduler, "ALIKE_FROM_THE_START", 3)
    answer = lambda request, _: RuntimeError(reason.format(request.request_id))  # noqa: E731
    manager, inbox = managed(ScriptedClient(tokenizer, answer))
    manager.request_groups(1)
    inbox.wait(failures=groups)
    manager._thread.join(WAIT_S)
    assert f"environments stopped: {groups} groups in a row failed" in manager.health()
    with pytest.raises(EnvironmentFailedError, match="RuntimeError: broken"):
        manager.check()
    dropped = [line for line in warned if line["event"] == "group dropped"]
    shown = [line["event"] for line in warned if FILE_ONLY not in line]
    # once: by the end, or at its beginning where the end takes longer
    assert len(dropped) == groups and shown == (["group dropped"] if not shown_after else [])


@pytest.mark.parametrize(("status", "groups"), [(None, 5), (503, 5), (401, 3)])
@pytest.mark.parametrize("where", ["reward", "episode"])
def test_another_server_that_is_away_at_the_start_may_come_yet(
    managed, tokenizer, monkeypatch, status, groups, where
):
    monkeypatch.setattr(scheduler, "FAILURES_IN_A_ROW", 5)
    monkeypatch.setattr(scheduler, "ALIKE_FROM_THE_START", 3)

    async def ask(*_):
        try:
            raise EndpointError("http://judge: away", status=status)
        except EndpointError as error:
            raise RolloutRejectedError("judge: away") from error

    class Asks(EnvironmentSource):
        def task(self, index, split="train"):
            return Task(str(index), ({"role": "user", "content": "?"},), ask)

        async def play(self, episode, task, max_steps):
            await super().play(episode, task, max_steps)
            if where == "episode":
                await ask()

    entry = EnvironmentConfig(kind="asks", name="asks", group_size=2)
    manager, inbox = managed(
        ScriptedClient(tokenizer, lambda *_: "1"), sources=[Asks(entry, seed=0)]
    )
    manager.request_groups(1)
    inbox.wait(failures=groups)
    manager._thread.join(WAIT_S)
    assert f"environments stopped: {groups} groups in a row failed" in manager.health()


def test_a_sink_that_breaks_ends_the_manager_and_keeps_the_cursor(managed, tokenizer):
    def full(group):
        raise OSError(28, "No space left on device")

    manager, _ = managed(ScriptedClient(tokenizer, lambda *_: "1"), sink=full)
    manager.request_groups(1)
    manager._thread.join(WAIT_S)
    assert manager.state()["next_group"] == {"sum": 0}
    with pytest.raises(EnvironmentFailedError, match="No space left"):
        manager.check()


def test_what_was_cancelled_is_not_in_flight(managed, tokenizer):
    held, all_held = [], threading.Event()

    def gate(request):
        held.append(request)
        if len(held) == 2:
            all_held.set()

    manager, inbox = managed(
        ScriptedClient(tokenizer, lambda *_: "1", gate=lambda r: gate(r) if len(held) < 2 else 0)
    )
    manager.request_groups(2)
    assert all_held.wait(WAIT_S)
    assert manager.in_flight == 2
    manager.cancel()
    assert manager.in_flight == 0
    manager.start()
    manager.request_groups(2)
    inbox.wait(groups=2)
    until(lambda: manager.in_flight == 0)


def test_states_that_are_not_ours_are_refused(managed, tokenizer):
    manager, _ = managed(ScriptedClient(tokenizer, lambda *_: "1"), start=False)
    broken = {"version": 2, "turn": 1, "next_group": {"sum": "x"}, "seed": 0}
    for state in (
        {},
        {"version": 99, "next_group": 1},
        {"version": 1, "next_group": 1, "seed": 0},
        broken,
    ):
        with pytest.raises(CheckpointError):
            manager.restore(state)
    manager.start()
    with pytest.raises(RuntimeError, match="before start"):
        manager.restore({"version": 2, "seed": 0, "turn": 1, "next_group": {"sum": 1}})


def test_stop_before_start_and_twice(managed, tokenizer):
    manager, _ = managed(ScriptedClient(tokenizer, lambda *_: "1"), start=False)
    manager.stop()
    manager, _ = managed(ScriptedClient(tokenizer, lambda *_: "1"))
    manager.stop()
    manager.stop()
    manager.request_groups(1)  # after the end: nobody listens, nothing breaks
