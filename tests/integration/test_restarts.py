"""`--restarts`: the daemon is aborted in the middle of a step and comes back from its checkpoint."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.integration.processes import metrics, train, wait_for_step, write_config

pytestmark = pytest.mark.slow


class Client(threading.Thread):
    """Asks again and again, without retries; its own log says when which request went how."""

    def __init__(self, client: openai.OpenAI) -> None:
        super().__init__(daemon=True)
        self.client, self.ended = client, threading.Event()
        self.log: list[tuple[float, float, str]] = []  # begin, end, "" or the error

    def run(self) -> None:
        while not self.ended.is_set():
            began, error = time.monotonic(), ""
            try:
                messages = [{"role": "user", "content": "Reverse: abc"}]
                self.client.chat.completions.create(model="default", messages=messages, max_tokens=4)
            except openai.OpenAIError as failure:
                error = repr(failure)
                self.ended.wait(0.02)
            self.log.append((began, time.monotonic(), error))


def ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
def test_an_abort_in_mid_step_costs_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=9, interval=3)
    run = tmp_path / "checkpoints" / "run"
    with train(config, "--restarts", "2") as daemon:
        asking = Client(daemon.wait_until_ready().client())
        asking.start()
        wait_for_step(daemon, run, 4)
        [child] = psutil.Process(daemon.process.pid).children()
        aborted = time.monotonic()
        os.kill(child.pid, signal.SIGABRT)
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.005)
        while not ready(daemon.url):
            assert daemon.process.poll() is None
            time.sleep(0.02)
        back = time.monotonic()
        wait_for_step(daemon, run, 8)
        asking.ended.set()
        asking.join()
        assert daemon.wait() == 0, daemon.output
    assert [line["step"] for line in metrics(run)] == list(range(1, 10))
    assert (run / "final").is_dir()
    failed = [(begin, end, error) for begin, end, error in asking.log if error]
    assert failed
    assert not [entry for entry in failed if entry[1] < aborted or entry[0] > back], "only while it was down"
    answered = [begin for begin, _, error in asking.log if not error]
    assert min(answered) < aborted and max(answered) > back
    assert "the daemon died of SIGABRT" in daemon.output
    assert "from step_00000" in daemon.output
    events = [json.loads(line)["event"] for line in (run / "run.log").read_text().splitlines()]
    assert sum("SIGABRT" in event for event in events) == 1


def test_a_signal_to_the_parent_ends_both_with_a_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=500, interval=400)
    run = tmp_path / "checkpoints" / "run"
    with train(config, "--restarts", "2") as daemon:
        daemon.wait_until_ready()
        wait_for_step(daemon, run, 1)
        [child] = psutil.Process(daemon.process.pid).children()
        daemon.send(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0, daemon.output
    assert not child.is_running()
    assert (run / "latest").exists()
    assert "died" not in daemon.output
