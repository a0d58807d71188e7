"""LoopThread ends its callers' waits, whatever the work does."""

import asyncio
from concurrent.futures import CancelledError

import pytest

from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.system.loop_thread import LoopThread

WAIT_S = 20


async def leave():
    raise SystemExit(1)


async def cancel_itself():
    raise asyncio.CancelledError


def test_work_that_ends_the_loop_leaves_nobody_waiting():
    loop = LoopThread("test", "the test")
    waiting = loop.submit(asyncio.sleep(3600))
    with pytest.raises(SystemExit):
        loop.submit(leave()).result(WAIT_S)
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    with pytest.raises(EngineUnavailableError, match="the test is closed"):
        loop.run(asyncio.sleep(0))
    assert loop.stop(timeout_s=WAIT_S)


def test_work_that_cancels_itself_does_not_pass_for_a_closed_loop():
    loop = LoopThread("test")
    with pytest.raises(CancelledError):
        loop.run(cancel_itself())
    assert loop.run(asyncio.sleep(0, "alive")) == "alive"
    assert loop.stop(timeout_s=WAIT_S)
    with pytest.raises(EngineUnavailableError):
        loop.run(asyncio.sleep(0))
