"""RolloutManager.collect_rollouts against a scripted policy."""

import asyncio
import dataclasses
import signal
import threading
import time

import pytest

from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.state import BaseEnvironment, State, StateSource
from mlx_parallm.errors import ConfigError, EnvironmentFailedError
from tests.environments.managing import WAIT_S, two_tasks, until
from tests.environments.scripted_client import ScriptedClient


class Walk(BaseEnvironment):
    """Task i takes 1 + 3 i mod `longest` turns."""

    def __init__(self, longest=10):
        super().__init__()
        self.longest = longest

    def reset(self, index=0):
        return State(prompt=f"{index}:", metadata={"turns": 1 + 3 * index % self.longest})

    def build_prompt(self, state):
        return state.prompt + "".join(turn["response"] for turn in state.history)

    def is_terminal(self, state):
        return state.step_count >= state.metadata["turns"]


@pytest.fixture
def manager_of(tokenizer):
    managers = []

    def make(client, environment=None, *, callbacks=None, inference=None, **settings):
        config = RolloutConfig(**{"max_token_length": 512, **settings})
        manager = RolloutManager(
            environment or Walk(),
            config,
            client=client,
            tokenizer=tokenizer,
            inference=inference,
            **(callbacks or {}),
        )
        managers.append(manager)
        return manager

    yield make
    for manager in managers:
        manager.close()


def prompts(trajectories):
    return [trajectory.prompt for trajectory in trajectories]


@pytest.mark.parametrize("removed", [{"offload_to_disk": "spool"}, {"max_trajectory_buffer": 10}])
def test_a_removed_option_is_refused_by_name(removed):
    with pytest.raises(
        ConfigError, match=f"{next(iter(removed))}.*has been removed.*iterate_rollouts"
    ):
        RolloutConfig(**removed)
    assert dataclasses.replace(RolloutConfig(), seed=3) == RolloutConfig(seed=3)


@pytest.mark.parametrize("kept_up", [False, True])
def test_short_episodes_are_not_preferred(manager_of, tokenizer, kept_up):
    """Every turn takes a while, so short episodes finish first; what a call returns is a fair
    draw anyway."""
    client = ScriptedClient(tokenizer, lambda *_: "x", gate=lambda request: 3)
    manager = manager_of(client, Walk(longest=50), num_parallel=20, maintain_parallel_count=kept_up)
    collected = manager.collect_rollouts(50)
    assert prompts(collected) == [f"{index}:" for index in range(50)]
    assert sum(t.step_count for t in collected) / 50 == pytest.approx(25.5, rel=0.05)
    again = manager.collect_rollouts(50)
    assert prompts(again) == [f"{index}:" for index in range(50, 100)]
    assert sum(t.step_count for t in again) / 50 == pytest.approx(25.5, rel=0.05)


def test_each_prompt_comes_group_size_times_side_by_side(manager_of, tokenizer):
    client = ScriptedClient(tokenizer, lambda *_: "x")
    manager = manager_of(client, num_parallel=8)
    collected = manager.collect_rollouts(10, group_size=4)
    assert prompts(collected) == [f"{index}:" for index in range(3) for _ in range(4)]
    assert [t.group_id for t in collected] == [
        f"Walk-0-{index}" for index in range(3) for _ in range(4)
    ]
    assert prompts(manager.collect_rollouts(2)) == ["3:", "4:"]


def test_nothing_is_in_flight_after_a_call_unless_it_is_kept_up(manager_of, tokenizer):
    begun = []
    callbacks = {"on_rollout_start": begun.append}
    client = ScriptedClient(tokenizer, lambda *_: "x")
    manager = manager_of(client, num_parallel=4, callbacks=callbacks)
    manager.collect_rollouts(6)
    assert begun == [f"Walk-0-{index}/0" for index in range(6)]
    assert manager.in_flight == 0


def test_what_is_in_flight_goes_on_and_is_returned_by_the_next_call(manager_of, tokenizer):
    """The second episode's later turns wait until the first call has returned, and have a later
    version."""
    later = threading.Event()

    class Waiting(ScriptedClient):
        async def _one(self, request):
            while "/" in request.request_id and not later.is_set():  # noqa: ASYNC110  another thread sets it
                await asyncio.sleep(0.001)
            return await super()._one(request)

    client = Waiting(tokenizer, lambda *_: "x")
    manager = manager_of(client, num_parallel=2, maintain_parallel_count=True)
    [first] = manager.collect_rollouts(1)
    assert (first.prompt, first.step_count) == ("0:", 1)
    until(lambda: any(request.request_id == "Walk-0-1" for request in client.requests))
    client.version = 5
    later.set()
    [second] = manager.collect_rollouts(1)
    versions = [
        v for v, bit in zip(second.rollout.policy_versions, second.rollout.mask, strict=True) if bit
    ]
    assert (second.prompt, second.step_count) == ("1:", 4)
    assert versions == [0] * 2 + [5] * 6  # "x" and EOS, four times


def test_a_failed_episode_is_a_result_and_nothing_but_failures_is_an_error(manager_of, tokenizer):
    def answer(request, choice):
        return RuntimeError("broken") if request.request_id.startswith("Walk-0-2") else "x"

    manager = manager_of(ScriptedClient(tokenizer, answer))
    collected = manager.collect_rollouts(5)
    assert prompts(collected) == ["0:", "1:", "", "3:", "4:"]
    assert [t.error for t in collected] == [None, None, "RuntimeError: broken", None, None]
    statistics = manager.get_statistics()
    assert (statistics["total_trajectories"], statistics["failed_trajectories"]) == (5, 1)
    broken = manager_of(ScriptedClient(tokenizer, lambda *_: RuntimeError("no luck")))
    with pytest.raises(EnvironmentFailedError, match="RuntimeError: no luck"):
        broken.collect_rollouts(5)


def test_the_step_limit_holds_for_the_call(manager_of, tokenizer):
    manager = manager_of(ScriptedClient(tokenizer, lambda *_: "x"))
    limited = manager.collect_rollouts(10, max_steps_per_rollout=3)
    assert [(t.step_count, t.truncated) for t in limited] == [
        (min(n, 3), n > 3) for n in (1, 4, 7, 10, 3, 6, 9, 2, 5, 8)
    ]
    assert not any(t.truncated for t in manager.collect_rollouts(10))


def test_cancel_ends_what_is_in_flight_and_the_next_call_plays_it(manager_of, tokenizer):
    stuck, two, release, done = threading.Event(), threading.Event(), [], []

    def count(trajectory):
        done.append(trajectory)
        if len(done) == 2:
            two.set()

    def gate(request):
        if request.request_id.startswith("Walk-0-2") and not release:
            stuck.set()
            return None
        return 0

    client = ScriptedClient(tokenizer, lambda *_: "x", gate=gate)
    manager = manager_of(client, callbacks={"on_rollout_complete": count})
    collected = []
    thread = threading.Thread(target=lambda: collected.extend(manager.collect_rollouts(4)))
    thread.start()
    assert stuck.wait(WAIT_S)
    assert two.wait(WAIT_S)
    manager.cancel()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert client.aborted == ["Walk-0-2"]
    assert prompts(collected) == ["0:", "1:"]
    release.append(True)
    assert prompts(manager.collect_rollouts(2)) == ["2:", "3:"]
    manager.stop()
    assert prompts(manager.collect_rollouts(1)) == ["4:"]
    manager.close()
    with pytest.raises(RuntimeError, match="this manager is closed"):
        manager.collect_rollouts(1)


def test_a_manager_is_closed_though_a_thread_is_blocked(tokenizer):
    release, blocked = threading.Event(), threading.Event()

    class Blocking(Walk):
        def reset(self, index=0):
            blocked.set()
            release.wait()
            return super().reset(index)

    manager = RolloutManager(
        Blocking(), client=ScriptedClient(tokenizer, lambda *_: "x"), tokenizer=tokenizer
    )
    manager.start()
    manager.request_groups(1)
    assert blocked.wait(WAIT_S)
    stop = manager.stop
    manager.stop = lambda: stop(timeout_s=0.05)
    with pytest.raises(EnvironmentFailedError, match="blocks its thread"):
        manager.close()
    with pytest.raises(RuntimeError, match="this manager is closed"):
        manager.start()
    release.set()


def test_an_interrupt_frees_the_engine(manager_of, tokenizer, heeded_interrupt):
    def gate(request):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    client = ScriptedClient(tokenizer, lambda *_: "x", gate=gate)
    manager = manager_of(client, num_parallel=1)
    with pytest.raises(KeyboardInterrupt):
        manager.collect_rollouts(1)
    assert client.aborted == ["Walk-0-0"]


def test_several_environments_come_in_the_order_in_which_they_were_started(manager_of, tokenizer):
    client = ScriptedClient(
        tokenizer,
        lambda *_: "1",
        gate=lambda request: 40 if request.request_id.startswith("sum") else 0,
    )
    begun = []
    manager = manager_of(
        client,
        two_tasks(sum=1.0, sort=1.0),
        callbacks={"on_rollout_start": begun.append},
        num_parallel=8,
    )
    collected = manager.collect_rollouts(20)
    assert [f"{t.group_id}/{number % 2}" for number, t in enumerate(collected)] == begun
    assert {t.rollout.reward for t in collected} <= {0.0, 1.0}  # sources score


def test_a_reward_that_fails_marks_its_group(manager_of, tokenizer):
    [built] = two_tasks(sum=1.0)
    task = built.task

    def failing(responses):
        raise OSError("gone")

    def without_reward(index, split="train"):
        return dataclasses.replace(task(index, split), reward=failing if index == 1 else None)

    built.task = without_reward
    collected = manager_of(ScriptedClient(tokenizer, lambda *_: "1"), built).collect_rollouts(4)
    assert [t.error for t in collected] == [
        None,
        None,
        "reward: OSError: gone",
        "reward: OSError: gone",
    ]


def test_statistics_count_what_was_taken(manager_of, tokenizer):
    manager = manager_of(ScriptedClient(tokenizer, lambda *_: "x"))
    assert manager.get_statistics()["avg_trajectory_length"] == 0.0
    manager.collect_rollouts(10)
    statistics = manager.get_statistics()
    assert (statistics["total_trajectories"], statistics["total_steps"]) == (10, 55)
    assert statistics["avg_trajectory_length"] == 5.5
    assert statistics["std_trajectory_length"] == pytest.approx(8.25**0.5)
    assert (statistics["min_trajectory_length"], statistics["max_trajectory_length"]) == (1, 10)
    assert statistics["length_histogram"] == {str(length): 1 for length in range(1, 11)}
    assert statistics["sampled_tokens"] == 2 * 55  # "x" and EOS
    assert statistics["trajectories_per_second"] == pytest.approx(10 / statistics["seconds"])


def test_the_adapter_is_the_inferences_own_at_each_call(manager_of, tokenizer):
    """Training that begins between two calls names an adapter."""
    client = ScriptedClient(tokenizer, lambda *_: "x")

    class Engine:
        adapter = None

    engine = Engine()
    engine.client, engine.tokenizer = client, tokenizer
    environment = Walk()
    environment.inference = engine
    manager = RolloutManager(environment, num_parallel=2)
    assert manager.inference is engine
    manager.collect_rollouts(1)
    engine.adapter = "policy"
    manager.collect_rollouts(1)
    manager.close()
    assert [request.adapter for request in client.requests][:1] == [None]
    assert {r.adapter for r in client.requests if r.request_id.startswith("Walk-0-1")} == {"policy"}


def test_what_cannot_be_collected_is_told(manager_of, tokenizer, managed):
    with pytest.raises(ConfigError, match="no engine in this process"):
        RolloutManager(Walk())
    for wrong in (Walk, [Walk], [3]):
        with pytest.raises(ConfigError, match="no instance"):
            RolloutManager(wrong)
    with pytest.raises(ConfigError, match="num_parallel"):
        RolloutConfig(num_parallel=0)
    with_sink, _ = managed(ScriptedClient(tokenizer, lambda *_: "x"))
    with pytest.raises(RuntimeError, match="sink"):
        with_sink.collect_rollouts(1)


def test_to_close_waits_for_what_frees_the_states(manager_of, tokenizer, monkeypatch):
    joining, freed, join = threading.Event(), [], StateSource.join

    class Holds(Walk):
        blocking = True

        def end_episode(self, state):
            freed.append(joining.wait(WAIT_S))

    def joined(source, deadline):
        joining.set()
        join(source, deadline)

    monkeypatch.setattr(StateSource, "join", joined)
    manager = manager_of(ScriptedClient(tokenizer, lambda *_: "x"), Holds())
    manager.collect_rollouts(2)
    assert not freed
    manager.close()
    assert len(freed) >= 2 and all(freed)


def test_what_a_step_returns_after_its_time_is_freed(manager_of, tokenizer):
    release, freed = threading.Event(), []

    class Opens(Walk):
        def step(self, state):
            release.wait(WAIT_S)
            return State(prompt="", metadata={"opened": "late"})

        def end_episode(self, state):
            freed.append(state.metadata.get("opened"))

    environment = Opens()
    source = StateSource(
        RolloutConfig(timeout_s=0.05).environment_config("Opens"), lambda: environment, seed=0
    )
    manager = manager_of(ScriptedClient(tokenizer, lambda *_: "x"), source)
    with pytest.raises(EnvironmentFailedError, match="not finished within"):
        manager.collect_rollouts(1)
    release.set()
    source.join(time.monotonic() + WAIT_S)
    assert freed and set(freed) == {"late"}


def test_threads_that_were_left_behind_are_in_the_health_line(manager_of, tokenizer):
    release = threading.Event()

    class Blocks(Walk):
        def step(self, state):
            release.wait(WAIT_S)

    manager = manager_of(ScriptedClient(tokenizer, lambda *_: "x"), Blocks(), timeout_s=0.05)
    with pytest.raises(EnvironmentFailedError, match="timeout_s"):
        manager.collect_rollouts(2)
    assert "Blocks: 2 threads" in manager.health()
    release.set()


def test_a_progress_bar_is_for_terminals(manager_of, tokenizer, capsys):
    manager_of(
        ScriptedClient(tokenizer, lambda *_: "x"), enable_progress_bar=True
    ).collect_rollouts(2)
    assert capsys.readouterr() == ("", "")
