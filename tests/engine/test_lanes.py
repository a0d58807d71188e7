"""Chats beside rollouts: who gets a token in which step."""

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.engine import lanes as lanes_module
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.lanes import LANE_LENGTH, LANE_ROWS, LANE_SHARE, Lanes, divided
from mlx_parallm.engine.live_requests import Finished
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import RequestError
from mlx_parallm.system.serve_priority import REST, Turns
from mlx_parallm.types import Request
from tests.engine.helpers import (
    ByteTokenizer,
    collect,
    engine_options,
    qwen3_model,
    request,
    run,
    serve,
)

PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def _each_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(lanes_module, "perf_counter", lambda: float(next(seconds)))


def two_lanes(**options: Any) -> Lanes:
    main, lane = divided(engine_options(**options))
    served = serve(qwen3_model(), **vars(main))
    others, model = served.engine, served.engine._runner.forward.model
    chats = Engine(
        model, ByteTokenizer(), served.weights, served.lora, lane, grammars=others.grammars
    )
    return Lanes(others, chats)


def chat(name: str, length: int = 4, **params: Any) -> Request:
    return replace(request(name, PROMPT, max_tokens=length, ignore_eos=True, **params), priority=-1)


def rollouts(count: int = 3, length: int = 8) -> list[Request]:
    return [
        request(f"r{number}", [number, 2, 3], max_tokens=length, ignore_eos=True)
        for number in range(count)
    ]


def begun(**options: Any) -> Lanes:
    """Two lanes with three rollouts after their first token."""
    lanes = two_lanes(**options)
    for item in rollouts():
        lanes.add(item)
    lanes.step()
    return lanes


def thread_of(lanes: Lanes, models: ServedModels, turns: Turns | None = None) -> EngineThread:
    return EngineThread(lambda: lanes.others, models, turns, chats=lambda others: lanes.chats)


def check(lanes: Lanes) -> None:
    for engine in lanes:
        engine.check_integrity()


def made(lanes: Lanes) -> list[int]:
    """Tokens made so far for the others, and for chats."""
    return [engine.counters.generation_tokens for engine in lanes]


def test_rollouts_rest_until_the_chat_has_ended() -> None:
    lanes = begun()
    lanes.add(chat("c", length=4))
    assert lanes.serves_chats
    assert [(lanes.step(), made(lanes))[1] for _ in range(6)] == [
        *([3, number] for number in range(1, 5)),
        [3, 4],  # its row is freed
        [6, 4],
    ]
    assert not lanes.serves_chats
    assert set(collect(lanes)) == {"r0", "r1", "r2"}
    check(lanes)


def test_chats_without_a_pause_leave_the_others_their_share_of_the_time() -> None:
    lanes = begun()
    lanes.add(chat("c", length=4 * int(REST)))
    before, whose = made(lanes), ""
    for _ in range(2 * int(REST)):
        lanes.step()
        after = made(lanes)
        whose += "o" if after[0] > before[0] else "c"
        before = after
    rests = int(REST) - 1  # the clock is read once more at the end of the others' step
    assert whose[: 2 * (rests + 1)] == ("c" * rests + "o") * 2


def test_a_chat_gets_the_tokens_that_it_gets_alone() -> None:
    item = chat("c", length=12, seed=3)
    alone = run(serve(qwen3_model()).engine, [item])["c"].completions[0]
    lanes = two_lanes()
    for each in [*rollouts(), item]:
        lanes.add(each)
    beside = collect(lanes)["c"].completions[0]
    check(lanes)
    assert alone.token_ids == beside.token_ids
    assert alone.logprobs == pytest.approx(beside.logprobs, abs=1e-5)


def test_only_requests_with_a_negative_priority_are_chats() -> None:
    lanes = two_lanes()
    for item in rollouts():
        lanes.add(item)
    lanes.add(replace(chat("later"), priority=5))
    lanes.add(replace(chat("scored"), params=replace(chat("x").params, prompt_logprobs=1)))
    assert not lanes.serves_chats
    outputs = collect(lanes)
    assert made(lanes)[1] == 0
    assert outputs["scored"].prompt_logprobs is not None


def test_a_chat_that_the_lane_has_no_memory_for_waits_with_the_others() -> None:
    token_bytes = two_lanes().others.cache.token_bytes()
    lanes = two_lanes(kv_cache_bytes=64 * LANE_SHARE * token_bytes)
    lanes.add(chat("long", length=100))
    assert not lanes.serves_chats
    lanes.add(chat("short", length=20))
    assert lanes.serves_chats
    assert set(collect(lanes)) == {"long", "short"}
    with pytest.raises(RequestError, match=r"kv_cache_bytes|memory|positions"):
        lanes.add(chat("endless", length=1000))


def test_no_answer_is_cut_because_the_lane_has_little_memory() -> None:
    token_bytes = two_lanes().others.cache.token_bytes()
    lanes = two_lanes(kv_cache_bytes=64 * LANE_SHARE * token_bytes)
    unbounded = chat("c")
    unbounded = replace(unbounded, params=replace(unbounded.params, max_tokens=None))
    lanes.add(unbounded)  # the others' memory holds an answer of hundreds of tokens
    assert not lanes.serves_chats
    outputs = collect(lanes)
    assert len(outputs["c"].completions[0].token_ids) > 64
    roomy = two_lanes(kv_cache_bytes=2 * LANE_LENGTH * LANE_SHARE * token_bytes)
    roomy.add(unbounded)
    assert roomy.serves_chats


def test_ids_aborts_pauses_and_prefixes_reach_both() -> None:
    lanes = begun()
    lanes.add(chat("c"))
    with pytest.raises(RequestError, match="in use"):
        lanes.add(chat("r0"))
    with pytest.raises(RequestError, match="in use"):
        lanes.add(replace(chat("c"), priority=0))
    for engine in lanes:
        engine.pause("someone", freeze=True)
    assert not lanes.serves_chats
    assert not lanes.has_work
    for engine in lanes:
        engine.resume("someone")
    lanes.step()
    for engine in lanes:
        engine.abort("c")
    ended = [event for event in lanes.take_events() if isinstance(event, Finished)]
    assert [event.request_id for event in ended] == ["c"]
    for engine in lanes:
        assert engine.counters.requests_aborted == (engine is lanes.chats)
    collect(lanes)
    for engine in lanes:
        engine.reset_prefix_cache()
        engine.release_memory()
    assert [engine.cache.nbytes for engine in lanes] == [0, 0]
    assert lanes.idle


def test_grammars_of_chats_are_not_compiled_again_on_the_engines_thread() -> None:
    lanes = two_lanes()
    assert lanes.chats.grammars is lanes.others.grammars  # `EngineInfo` has these: prepared there


def test_a_failing_chat_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = begun()
    lanes.add(chat("c"))
    lanes.step()
    lane = lanes.chats
    monkeypatch.setattr(lane, "step", lambda ahead=True: mx.zeros(3).reshape(2))
    with pytest.raises(ValueError, match="reshape"):
        lanes.step()
    ended = lanes.last.fail_active("it failed")
    assert [event.request_id for event in ended if isinstance(event, Finished)] == ["c"]
    assert set(collect(lanes)) == {"r0", "r1", "r2"}


def test_the_memory_is_divided() -> None:
    whole = engine_options(kv_cache_bytes=8001, prefix_cache_bytes=1602)
    main, lane = divided(whole)
    assert (main.kv_cache_bytes, lane.kv_cache_bytes) == (7001, 1000)
    assert (main.prefix_cache_bytes, lane.prefix_cache_bytes) == (1402, 200)
    assert (main.max_rows, lane.max_rows) == (whole.max_rows, LANE_ROWS)
    assert divided(engine_options(kv_cache_bytes=None))[1].kv_cache_bytes is None


def test_the_trainer_hears_of_chats_and_stats_count_them() -> None:
    heard: list[bool] = []

    class Heard(Turns):
        def chats(self, served: bool) -> None:
            heard.append(served)
            super().chats(served)

    lanes = two_lanes()
    models = ServedModels("m", adapter_versions=dict, version=lambda: 0)
    thread = thread_of(lanes, models, Heard("chat"))
    thread.start()
    try:
        asyncio.run(thread.client.generate_many([*rollouts(1, 6), chat("c")]))
        stats = thread.client.stats()
    finally:
        thread.stop()
    assert True in heard
    assert heard[-1] is False
    assert stats.generation_tokens == 6 + 4
    assert stats.requests_finished == 2


def test_a_frozen_chat_does_not_keep_the_trainer_waiting() -> None:
    begun = threading.Event()

    class Heard(Turns):
        def chats(self, served: bool) -> None:
            super().chats(served)
            if served:
                begun.set()

    lanes, turns = two_lanes(), Heard("chat")
    models = ServedModels("m", adapter_versions=dict, version=lambda: 0)
    thread = thread_of(lanes, models, turns)
    thread.start()

    async def freeze() -> None:
        answer = asyncio.ensure_future(thread.client.generate(chat("c", length=1500)))
        await asyncio.to_thread(begun.wait, 10)
        thread.client.pause_admission("someone", freeze=True)
        rested = await asyncio.to_thread(turns._no_chat.wait, 10)
        thread.client.resume_admission("someone")
        assert rested
        answer.cancel()

    try:
        asyncio.run(freeze())
    finally:
        thread.stop()


def test_steps_of_others_do_not_hide_that_one_lane_fails_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = begun()
    lanes.add(chat("c"))
    lanes.step()
    lane, failures = lanes.chats, 0

    def fail(ahead: bool = True) -> Any:
        nonlocal failures
        failures += 1
        raise ValueError("it fails, and not when it is computed alone")

    monkeypatch.setattr(lane, "step", fail)
    # the others' rest is over whenever the lane has failed
    monkeypatch.setattr(lanes_module, "REST", 2.0)
    models = ServedModels("m", adapter_versions=dict, version=lambda: 0)
    thread = thread_of(lanes, models)
    before = made(lanes)[0]
    for _ in range(12):
        thread._step(lanes)
    assert made(lanes)[0] > before
    assert failures == 2
    assert not lane.has_work
