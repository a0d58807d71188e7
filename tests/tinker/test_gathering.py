"""An answer of retrieve_futures holds what ends together: a group of samples takes one poll, not
one each."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from mlx_parallm.faces.tinker import sampling
from mlx_parallm.faces.tinker.bodies import FuturesTarget
from mlx_parallm.faces.tinker.promises import Promise, PromiseResult
from mlx_parallm.faces.tinker.sampling import Sampling
from mlx_parallm.faces.tinker.sessions import Completions, Sampler

LONG_S = 60.0


async def test_an_answer_waits_for_what_ends_next_and_no_longer_than_anything_runs(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(sampling, "GATHER_S", LONG_S)
    line, poll = _polled(running=2)
    _end(line, "a")
    await asyncio.sleep(0)
    assert not poll.done()  # one runs
    _end(line, "b")
    events, cursor = await asyncio.wait_for(poll, LONG_S / 2)
    assert ([event["request_id"] for event in events], cursor) == (["a", "b"], 2)


async def test_an_answer_does_not_wait_long_for_a_sample_that_goes_on() -> None:
    line, poll = _polled(running=2)
    started = time.monotonic()
    _end(line, "a")
    events, cursor = await poll
    assert ([event["request_id"] for event in events], cursor) == (["a"], 1)
    assert time.monotonic() - started >= sampling.GATHER_S


def _polled(running: int) -> tuple[Completions, "asyncio.Task[tuple[list[Any], int]]"]:
    """The line of a sampling client with so many samples, and a poll that has begun to wait for
    it."""
    sampler = Sampler("s:sample:1", "base")
    service: Any = SimpleNamespace(sampling={sampler.sampler_id: sampler})
    line = sampler.line(0)
    line.running = running
    target = FuturesTarget(sampling_session_id=sampler.sampler_id)
    return line, asyncio.create_task(
        Sampling(service).completions(target, 0, LONG_S, lambda: False)
    )


def _end(line: Completions, request_id: str) -> None:
    sampling._completed(line, Promise(request_id, result=PromiseResult(b"")))
