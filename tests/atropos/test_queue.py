from dataclasses import replace
from functools import reduce

import pytest

from mlx_parallm.errors import RefusedError, RolloutRejectedError
from mlx_parallm.faces.atropos import queue as queue_module
from mlx_parallm.faces.atropos.queue import (
    SILENT_AFTER_S,
    STALLED_AFTER_S,
    AtroposQueue,
    EnvironmentEntry,
)
from mlx_parallm.rollout_store.store import RolloutStore
from tests.atropos.groups import ATROPOS_SETTINGS, scored_data
from tests.clock import Clock
from tests.rollout_store.groups import VOCAB_SIZE, make_group


@pytest.fixture
def clock():
    return Clock(1000.0)


def make_queue(store: RolloutStore, clock: Clock, **changes) -> AtroposQueue:
    return AtroposQueue(
        store,
        replace(ATROPOS_SETTINGS, **changes),
        current_step=lambda: 5,
        policy_version=lambda: 3,
        clock=clock,
    )


@pytest.fixture
def queue(store, clock):
    return make_queue(store, clock)


def register(
    queue: AtroposQueue, name: str = "sums", *, group_size: int = 2, weight: float = 1.0
) -> EnvironmentEntry:
    return queue.register_environment(
        name, max_token_length=32, weight=weight, group_size=group_size
    )


def test_a_good_group_is_stored_with_its_sender_version_and_temperature(store, clock):
    queue = make_queue(store, clock, temperature=0.7)
    register(queue, "other")
    env_id = register(queue).env_id
    assert queue.submit(scored_data(env_id=env_id)) is True
    (group,) = store.waiting()
    assert group.environment == "sums_0"
    assert group.rollouts[0].policy_versions == (-1, -1, 3, 3, 3)
    assert group.rollouts[0].temperature == 0.7
    assert list(store.waiting_by_source()) == ["atropos:1"]
    assert queue.latest_example() == scored_data(env_id=env_id) | {
        "distill_token_ids": None,
        "distill_logprobs": None,
    }


def test_a_group_that_is_sent_twice_counts_once(queue, store):
    assert queue.submit(scored_data()) is True
    assert queue.submit(scored_data()) is False
    assert store.counts().waiting == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (scored_data(tokens=[[1, 2, VOCAB_SIZE]], masks=[[-100, 2, VOCAB_SIZE]], scores=[1.0],
                     inference_logprobs=[[1.0, -1.0, -1.0]]), "outside the vocabulary"),
        (scored_data(prompt=20, sampled=13), "max_token_length = 32"),
        (scored_data(scores=[float("nan"), None]), "no sequence of the group has a score"),
        (scored_data(size=9), "9 sequences in one group, but a batch has 8"),
        (scored_data(inference_logprobs=None), "no inference_logprobs"),
        ([1, 2], "a scored group is a JSON object, not list"),
    ],
)  # fmt: skip
def test_what_may_not_be_trained_on_goes_to_quarantine_with_the_reason(queue, store, data, reason):
    with pytest.raises(RolloutRejectedError) as caught:
        queue.submit(data)
    assert reason in str(caught.value)
    assert store.counts().waiting == 0
    (reject,) = store.rejects()
    assert reject.reason == str(caught.value)
    assert reject.source == "atropos"
    assert str(reject.payload) == str(data)


def test_ids_and_names_are_atroposlibs(queue):
    entries = [register(queue, "sums"), register(queue, "words"), register(queue, "sums")]
    assert [entry.env_id for entry in entries] == [0, 1, 2]
    assert [entry.name for entry in entries] == ["sums_0", "words_0", "sums_1"]


def test_an_environment_that_comes_back_gets_its_old_id(queue, clock):
    register(queue), register(queue)
    clock.now += SILENT_AFTER_S + 1
    queue.environment_status(1)  # the second one still calls
    assert register(queue, group_size=4) == EnvironmentEntry(0, "sums", "sums_0", 32, 1.0, 4)
    assert queue.disconnect_environment(1) is True
    assert register(queue).env_id == 1
    assert register(queue).env_id == 2


def test_environments_survive_a_restart_of_the_daemon(queue, store, clock):
    register(queue, "sums"), register(queue, "words", group_size=4)
    again = make_queue(store, clock)
    assert again.environments() == queue.environments()
    assert again.environment_status(1)["env_weight"] == 1.0  # the other one has not called yet
    assert register(again, "sums").env_id == 0


def test_unknown_environments_have_no_status(queue):
    assert queue.environment_status(0) is None
    register(queue)
    assert queue.environment_status(-1) is None
    assert queue.environment_status(1) is None
    assert queue.disconnect_environment(-1) is False
    assert queue.disconnect_environment(1) is False


def test_queue_size_is_in_groups_of_the_asking_environment(queue, store):
    small, large = register(queue, "small", group_size=2), register(queue, "large", group_size=4)
    for number in range(3):
        queue.submit(scored_data(env_id=small.env_id, size=2, first_token=50 * number))
    queue.submit(scored_data(env_id=large.env_id, size=4))
    store.add(make_group("in-process", size=3), source="local")
    status = queue.environment_status(small.env_id)
    assert status == {
        "current_step": 5,
        "queue_size": (6 + 4 + 4) // 2,  # the others' in packs of the largest group
        "unallocated_fraction": 1.0,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.5,
    }
    assert queue.environment_status(large.env_id)["queue_size"] == (4 + 8 + 4) // 4
    assert queue.environment_status(large.env_id)["self_queue_size"] == 1
    assert queue.status() == {"current_step": 5, "queue_size": 5}


def test_only_waiting_groups_count(queue, store):
    env_id = register(queue).env_id
    queue.submit(scored_data(env_id=env_id))
    queue.submit(scored_data(env_id=env_id, first_token=60))
    first, second = (group.group_id for group in store.waiting())
    store.take([first], 6)
    assert queue.environment_status(env_id)["queue_size"] == 1
    store.drop([second], 6, "stale")
    assert queue.environment_status(env_id)["queue_size"] == 0


def test_a_group_larger_than_registered_raises_the_unit(queue):
    env_id = register(queue, group_size=2).env_id
    queue.submit(scored_data(env_id=env_id, size=6))
    queue.submit(scored_data(env_id=env_id, size=6, first_token=60))
    assert queue.environment_status(env_id)["queue_size"] == 2


def test_a_trainer_that_cannot_use_what_waits_gets_more(queue, store, monkeypatch):
    """Sizes that do not add up must not end with environments and trainer waiting for each
    other."""
    env_id = register(queue, group_size=3).env_id
    monkeypatch.setattr(store, "starved", lambda: True)
    for number in range(2):
        queue.submit(scored_data(env_id=env_id, size=3, first_token=50 * number))
    # less than a batch: simply not enough yet
    assert queue.environment_status(env_id)["queue_size"] == 2
    queue.submit(scored_data(env_id=env_id, size=3, first_token=100))
    assert queue.environment_status(env_id)["queue_size"] == 0
    monkeypatch.undo()
    assert queue.environment_status(env_id)["queue_size"] == 3


def test_weights_are_shares_of_the_environments_that_are_there(queue, clock):
    (
        register(queue, "a", weight=3.0),
        register(queue, "b", weight=1.0),
        register(queue, "c", weight=0.0),
    )
    weights = [queue.environment_status(env_id)["env_weight"] for env_id in range(3)]
    assert weights == [0.75, 0.25, 0.01]
    clock.now += SILENT_AFTER_S + 1
    assert queue.environment_status(1)["env_weight"] == 1.0
    assert queue.environment_status(2)["env_weight"] == 0.01


def test_a_minimum_counts_while_its_environment_delivers(queue, clock):
    env_id = queue.register_environment(
        "sure", max_token_length=32, weight=1.0, group_size=3, min_batch_allocation=0.5
    ).env_id
    register(queue, "other")
    assert queue.environment_status(1)["unallocated_fraction"] == 0.5
    assert queue.minimums() == {}
    queue.submit(scored_data(env_id=env_id, size=3))
    assert queue.minimums() == {"sure_0": (6, 3)}, "4 of 8 sequences, in whole groups of 3"
    clock.now += SILENT_AFTER_S + 1
    queue.environment_status(env_id)
    assert queue.minimums() == {}, "it calls, but sends nothing"


def test_reset_drops_what_waits_from_environments_and_says_why(queue, store):
    env_id = register(queue).env_id
    queue.submit(scored_data(env_id=env_id))
    queue.submit(scored_data(first_token=60))
    store.add(make_group("in-process"), source="local")
    assert queue.reset() == 2
    assert [group.group_id for group in store.waiting()] == ["in-process"]
    assert store.drop_reasons() == {"dropped by /atropos/reset_data": 2}
    assert queue.environment_status(env_id)["self_queue_size"] == 0


class TestHealth:
    def test_nobody_came_and_nobody_else_makes_rollouts(self, queue, clock):
        assert queue.health() is None
        clock.now += SILENT_AFTER_S + 1
        nowhere = (
            "no environment has registered at /atropos and nothing came to /v1/rewards for 61 s"
        )
        assert queue.health() == f"{nowhere}: nothing makes rollouts"
        queue.note_reward()
        assert queue.health() is None
        register(queue)
        assert queue.health() is None

    def test_the_time_in_which_the_model_loads_does_not_count(self, queue, clock):
        clock.now += SILENT_AFTER_S + 1
        queue.begin_waiting()
        assert queue.health() is None
        clock.now += SILENT_AFTER_S + 1
        assert "for 61 s: nothing makes rollouts" in queue.health()

    def test_nothing_wrong(self, store, clock):
        queue = make_queue(store, clock, other_group_sizes=(2,))
        assert queue.health() is None
        # nobody is registered: in-process environments may do all the work
        clock.now += STALLED_AFTER_S + 1
        assert queue.health() is None
        register(queue)
        queue.submit(scored_data())
        assert queue.health() is None

    def test_a_source_that_comes_later_makes_the_rollouts(self, store, clock):
        sizes: list[int] = []
        queue = make_queue(store, clock, other_group_sizes=sizes)
        clock.now += SILENT_AFTER_S + 1
        assert "nothing makes rollouts" in queue.health()
        sizes.append(1)
        assert queue.health() is None

    def test_an_environment_went_silent(self, queue, clock):
        env_id = register(queue).env_id
        clock.now += SILENT_AFTER_S + 1
        assert queue.health() == "environment sums_0 has not called for 61 s: is it still running?"
        queue.disconnect_environment(env_id)
        assert "no environment has registered" in queue.health()

    def test_an_environment_sends_nothing(self, queue, clock):
        env_id = register(queue).env_id
        clock.now += STALLED_AFTER_S + 1
        queue.environment_status(env_id)
        assert "none has sent a group for 601 s" in queue.health()
        queue.submit(scored_data(env_id=env_id))
        assert queue.health() is None

    def test_most_groups_are_rejected(self, queue):
        for number in range(4):
            queue.submit(scored_data(first_token=60 * number))
        for _ in range(4):
            assert queue.health() is None
            with pytest.raises(RolloutRejectedError):
                queue.submit(scored_data(inference_logprobs=None))
        assert queue.health().startswith(
            "4 of the last 8 groups from environments were rejected: no inference_logprobs"
        )

    def test_group_sizes_that_never_make_a_batch(self, queue, store, clock):
        register(queue, group_size=3)
        assert (
            queue.health()
            == "no mix of groups of 3 sequences makes a batch of 8 (rollout_batch_size)"
        )
        assert make_queue(store, clock, other_group_sizes=(5,)).health() is None
        register(queue, "other", group_size=5)
        assert queue.health() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"generation_params": {"temperature": 10**400}}, "is not a number"),
        ({"generation_params": {"temperature": "x" * 10**6}}, "is not a number"),
        (
            {"generation_params": reduce(lambda inner, _: {"a": inner}, range(5000), {})},
            "nested too deep",
        ),
        ({"group_id": "x" * 10**6}, "bytes, more than"),
        ({"policy_versions": [[-1, -1, 3, 3, 4]] * 2}, "policy version 4 has not been served yet"),
    ],
    ids=["no-float-holds-it", "long", "deep", "long-id", "from-the-future"],
)
def test_what_a_liar_sends_is_a_short_reason_in_quarantine(queue, store, changes, reason):
    with pytest.raises(RolloutRejectedError, match=reason):
        queue.submit(scored_data(**changes))
    (reject,) = store.rejects()
    assert reason in reject.reason and len(reject.reason) < 1001
    assert store.counts().waiting == 0


def test_a_group_without_an_id_is_known_by_all_that_is_trained_on(queue):
    first = scored_data()
    other = [
        first | {"scores": [1.0, 0.0]},
        first | {"inference_logprobs": [[1.0, 1.0, -1.0, -1.0, -1.0]] * 2},
    ]
    other += [
        first | {"masks": [[-100] * 3 + row[3:] for row in first["masks"]]},
        scored_data(first_token=21),
    ]
    assert [queue.submit(data) for data in (first, *other, *other)] == [True] * 5 + [False] * 4


@pytest.mark.parametrize(
    "change", [{"min_batch_allocation": 1e308}, {"group_size": 10**400}, {"weight": 1e308}]
)
def test_a_registration_that_an_older_version_kept_ends_no_resume(store, clock, change):
    register(make_queue(store, clock))
    [entry] = store.recall("atropos_environments")
    store.remember("atropos_environments", [entry | change])
    queue = make_queue(store, clock)
    queue.submit(scored_data(env_id=0))
    assert queue.minimums() == {} and queue.environment_status(0)["unallocated_fraction"] == 1.0
    assert register(queue).env_id == 0, "it comes back under its old name"


def test_the_number_of_registrations_is_bounded(queue, monkeypatch):
    monkeypatch.setattr(queue_module, "MOST_ENVIRONMENTS", 2)
    first = register(queue, "a")
    register(queue, "b")
    with pytest.raises(RefusedError, match="2 environments"):
        register(queue, "c")
    queue.disconnect_environment(first.env_id)
    assert register(queue, "a").env_id == 0
