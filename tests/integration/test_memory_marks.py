"""Memory that grows to the marks: requests wait, then the run saves and ends in order."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.engine.client import MEMORY
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.errors import MemoryShortError
from mlx_parallm.system import footprint
from mlx_parallm.system.footprint import machine_bytes
from mlx_parallm.weights import SharedWeights
from tests.integration.in_process import train_here
from tests.integration.processes import metrics
from tests.waiting import until

MARGIN = 200 << 20
CONFIG = """
[server]
port = 0

[rl_training]
total_steps = 100000
batch_size = 8
max_staleness = 0
run_name = "run"

[rl_training.atropos]
rollout_batch_size = 8
max_token_length = 32

[[environments]]
kind = "python:tests.integration.test_memory_marks:Growing"
group_size = 8
max_tokens = 4
"""
held: list[mmap.mmap] = []
episodes: list[str] = []


class Growing(BaseEnvironment):
    """An environment that takes memory in its third group."""

    rewards_turns = True

    def reset(self, seed: int = 0) -> State:
        return State(prompt=[{"role": "user", "content": "a"}])

    def update_state(self, state: State, response: str) -> State:
        episodes.append(response)
        if len(episodes) == 20:
            held.append(taken(3 * MARGIN))
        state = super().update_state(state, response)
        state.turn_reward, state.done = float(len(episodes) % 2), True
        return state


def taken(size: int) -> mmap.mmap:
    """Memory that is really there, and goes back to the system when it is closed."""
    pages = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):
        pages[start] = 1
    return pages


@contextmanager
def mark_above_now(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The share of the memory that MARGIN more than now would be."""
    monkeypatch.setattr(footprint, "LOOK_S", 0.02)
    try:
        yield (footprint.process_bytes() + MARGIN) / machine_bytes()
    finally:
        while held:
            held.pop().close()


def test_new_requests_wait_while_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with mark_above_now(monkeypatch) as mark:
        stop = threading.Event()
        serving = Serving(
            Config.model_validate({"server": {"port": 0, "memory_pause": mark}}), stop=stop
        )
        try:
            serving.listen()
            loaded = serving.load()
            serving.open(
                loaded, SharedWeights(loaded.model, keep_versions=1), adapters={}, main_adapter=None
            )
            with httpx.Client(base_url=serving.url, timeout=60) as http:

                def numbers() -> dict[str, float]:
                    lines = http.get("/metrics").text.splitlines()
                    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("mlx_par")]
                    return {name.removeprefix("mlx_parallm_"): float(n) for name, n in pairs}

                before = numbers()
                assert before["memory_paused"] == 0 and before['memory_mark{mark="stop"}'] == 0.95
                held.append(taken(3 * MARGIN))
                until(lambda: MEMORY in serving.client.stats().holders)
                during = numbers()
                grown = 'footprint_bytes{place="process"}'
                assert during[grown] - before[grown] > MARGIN and during["memory_paused"] == 1
                assert http.get("/health").json()["paused"] is True
                assert "new requests wait" in (serving.memory_health() or "")
                answers: list[httpx.Response] = []
                body = {"prompt": "a", "max_tokens": 2}
                asking = threading.Thread(
                    target=lambda: answers.append(http.post("/v1/completions", json=body))
                )
                asking.start()
                until(lambda: serving.client.stats().waiting)
                held.pop().close()
                asking.join(20)
            assert [answer.status_code for answer in answers] == [200] and not stop.is_set()
            assert serving.memory_health() is None
            serving.check_memory()
        finally:
            serving.close()


def test_a_run_saves_and_ends_before_the_system_kills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    episodes.clear()
    with mark_above_now(monkeypatch) as mark:
        marks = (f"server.memory_pause={mark}", f"server.memory_stop={mark}")
        with pytest.raises(MemoryShortError, match="memory_stop"):
            train_here(config, f'rl_training.checkpoint_dir="{tmp_path}"', *marks)
    done = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "latest").resolve().name.startswith(f"step_{done:06d}")
    assert metrics(tmp_path / "run")[-1]["footprint_gb"] > 0
