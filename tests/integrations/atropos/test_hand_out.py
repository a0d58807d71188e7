import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import ConfigError, RolloutRejectedError, StoreError
from mlx_parallm.integrations.atropos.hand_out import HandOutQueue, oldest_that_sum_to
from mlx_parallm.integrations.atropos.queue import SILENT_AFTER_S, AtroposSettings
from mlx_parallm.rollout_store.store import RolloutStore, StoreCounts
from tests.integration.atropos_comparison import oldest_mix
from tests.rollout_store.groups import make_group, scored_data

TRAINER = AtroposSettings(batch_size=8, max_token_length=64, checkpoint_dir="c", checkpoint_interval=5, total_steps=9)


@pytest.fixture
def queue(store):
    return registered(store)


def registered(store: RolloutStore, *, batch_size: int = 8, kept: RolloutsConfig | None = None) -> HandOutQueue:
    queue = HandOutQueue(store, kept or RolloutsConfig())
    queue.register_trainer(AtroposSettings(batch_size=batch_size, max_token_length=64), 0)
    assert queue.batch() == {"batch": None}
    return queue


def register(queue: HandOutQueue, name: str, group_size: int, share: float | None = None) -> int:
    entry = queue.register_environment(
        name, max_token_length=64, weight=1.0, group_size=group_size, min_batch_allocation=share
    )
    return entry.env_id


def send(queue: HandOutQueue, *sizes: int, env_id: int | None = None) -> None:
    for size in sizes:
        queue.submit(scored_data(size=size, env_id=env_id))


def handed_out(queue: HandOutQueue) -> list[int] | None:
    batch = queue.batch()["batch"]
    return None if batch is None else [len(group["tokens"]) for group in batch]


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 24))
def test_the_oldest_groups_that_make_a_batch(sizes, total):
    assert oldest_that_sum_to(sizes, total) == (oldest_mix(sizes, total) or [])


def test_a_group_that_does_not_divide_the_batch_blocks_nobody(queue):
    send(queue, 3, 2, 2, 4, 2)
    assert handed_out(queue) == [2, 2, 4]
    assert handed_out(queue) is None
    send(queue, 3)
    assert handed_out(queue) == [3, 2, 3]


def test_a_group_goes_out_as_it_came(queue):
    sent = scored_data(size=8, images={"any": [1]}, inference_logprobs=None, env_id=7, advantages=[[0.5]] * 8)
    queue.submit(sent)
    (group,) = queue.batch()["batch"]
    assert group == sent | {"distill_token_ids": None, "distill_logprobs": None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"masks": [[1] * 5]}, "1 masks for 2 sequences"),
        ({"inference_logprobs": [[1.0] * 5, [1.0] * 4]}, "sequence 1: 4 inference_logprobs for 5 tokens"),
        ({"tokens": [], "masks": [], "scores": []}, "the group has no sequences"),
        ({"scores": [1.0, float("inf")]}, "scores holds NaN or an infinity"),
        ({"group_overrides": {"deep": [float("nan")]}}, "group_overrides holds NaN or an infinity"),
        ({"tokens": [[2**63] * 5, [1] * 5]}, "does not fit 64 bits"),
        ({"tokens": None}, "tokens: "),
    ],
)
def test_what_no_trainer_could_use_is_refused_and_kept_with_the_reason(queue, store, changes, reason):
    with pytest.raises(RolloutRejectedError) as caught:
        queue.submit(scored_data() | changes)
    assert reason in str(caught.value)
    assert store.rejects()[0].reason == str(caught.value)
    assert store.counts().waiting == 0


def test_a_restart_loses_nothing_and_repeats_nothing(tmp_path: Path):
    store = RolloutStore(tmp_path / "q.sqlite")
    queue = HandOutQueue(store, RolloutsConfig())
    assert not queue.started
    queue.register_trainer(TRAINER, 4)
    assert not queue.started
    assert handed_out(queue) is None
    register(queue, "sums", 2)
    send(queue, 2, 2, 4, 2)
    assert handed_out(queue) == [2, 2, 4]
    store.close()

    store = RolloutStore(tmp_path / "q.sqlite")
    again = HandOutQueue(store, RolloutsConfig())
    assert again.started
    assert again.settings == TRAINER
    assert again.status() == {"current_step": 5, "queue_size": 1}
    assert [entry.name for entry in again.environments()] == ["sums_0"]
    assert handed_out(again) is None
    send(again, 6)
    assert handed_out(again) == [2, 6]
    store.close()


def test_groups_that_were_there_first_are_kept_and_too_large_ones_dropped(store):
    queue = HandOutQueue(store, RolloutsConfig())
    send(queue, 2, 9, 6)
    assert queue.batch()["status"] == "error"
    queue.register_trainer(TRAINER, 0)
    assert store.drop_reasons() == {"more sequences than a batch has (8)": 1}
    assert handed_out(queue) == [2, 6]


def test_a_reset_forgets_trainer_and_environments(queue, store):
    register(queue, "sums", 2)
    send(queue, 2, 2)
    assert queue.reset() == 2
    assert queue.environments() == ()
    assert not queue.started
    assert queue.batch()["status"] == "error"
    queue.register_trainer(TRAINER, 1)
    send(queue, 8)
    assert handed_out(queue) == [8]
    assert queue.status() == {"current_step": 2, "queue_size": 0}


def test_full_queues_do_not_wait_for_each_other(queue):
    """Sizes 3 and 5 make 8; the first alone would never: its full queue must not keep the second out."""
    threes, fives = register(queue, "threes", 3), register(queue, "fives", 5)
    send(queue, 3, 3, 3, env_id=threes)
    assert queue.environment_status(fives)["queue_size"] > 0
    assert handed_out(queue) is None
    assert queue.environment_status(fives)["queue_size"] == 0
    send(queue, 5, env_id=fives)
    assert handed_out(queue) == [3, 5]
    assert queue.environment_status(fives)["queue_size"] > 0


def test_sizes_that_never_add_up_do_not_fill_the_disk(store):
    queue = registered(store)
    threes = register(queue, "threes", 3)
    send(queue, *[3] * 23, env_id=threes)
    assert handed_out(queue) is None, "8 cannot be made of 3s"
    assert queue.environment_status(threes)["queue_size"] > 0


def test_an_environments_minimum_comes_first_while_it_delivers(store):
    queue = registered(store)
    now = [1000.0]
    queue._clock = lambda: now[0]
    small, sure = register(queue, "small", 2), register(queue, "sure", 2, 0.5)
    send(queue, 2, 2, 2, 2, env_id=small)
    send(queue, 2, 2, env_id=sure)
    batch = queue.batch()["batch"]
    assert sorted(group["env_id"] for group in batch) == [small, small, sure, sure]
    send(queue, 2, 2, env_id=small)
    assert handed_out(queue) is None, "its minimum is waited for"
    now[0] += SILENT_AFTER_S + 1
    assert handed_out(queue) == [2, 2, 2, 2], "but not for ever"


def test_no_group_goes_to_two_callers(store):
    queue = registered(store)
    send(queue, *[2] * 40)
    found: list[int] = []

    def fetch() -> None:
        while (sizes := handed_out(queue)) is not None:
            found.append(len(sizes))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4] * 10
    assert queue.status() == {"current_step": 10, "queue_size": 0}


def test_what_was_handed_out_is_pruned_and_stays_in_the_ledger(store):
    queue = registered(store, kept=RolloutsConfig(keep=1))
    taken: list[str] = []
    for _ in range(2):
        send(queue, 8)
        taken += store.waiting_ids()
        assert handed_out(queue) == [8]
    assert store.groups(taken[1:])[0].rollouts
    with pytest.raises(StoreError):
        store.groups(taken[:1])
    assert store.counts().taken == 2


def test_a_training_runs_store_is_not_handed_out(store):
    store.add(make_group(), source="environments")
    with pytest.raises(ConfigError, match="belongs to a training run"):
        HandOutQueue(store, RolloutsConfig())


def test_a_batch_size_beyond_all_memory_is_no_batch(store):
    queue = registered(store, batch_size=10**15)
    send(queue, 2)
    assert queue.batch() == {"batch": None}


def test_half_a_character_in_an_environments_name_hurts_only_its_own_groups(queue, store):
    env_id = register(queue, "\ud800", 2)
    with pytest.raises(RolloutRejectedError, match="half a character"):
        send(queue, 2, env_id=env_id)
    send(queue, 2)
    assert store.counts() == StoreCounts(waiting=1, taken=0, dropped=0, rejected=1)
