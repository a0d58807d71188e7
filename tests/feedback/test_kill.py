"""A daemon that learns from chats is killed with -9 under load, and continues: no rating that was
acknowledged is lost, and none counts twice."""

import threading
from pathlib import Path

import httpx
import pytest

from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.systems.feedback.config import SignalRewards
from mlx_parallm.systems.feedback.store import FEEDBACK_FILE, FeedbackStore
from tests.integration.processes import free_port, train

CONFIG = """
[server]
port = {port}
[rl_training]
total_steps = 100000
learning_rate = 1e-5
batch_size = 4
max_staleness = 1000
blocks_per_eval = 0
checkpoint_interval = 3
checkpoint_dir = "{directory}"
run_name = "run"
[rl_training.atropos]
rollout_batch_size = 4
max_token_length = 64
[feedback]
enabled = true
settle_s = 0
"""
ENOUGH, BATCH = 40, 4
READY_S = 120.0


class People:
    """They rate every answer, until the daemon is gone."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.rated: set[str] = set()
        self.enough = threading.Event()

    def talk(self, user: str, most: int | None = None) -> None:
        headers = {"X-Feedback": "learn", "X-Feedback-User": user}
        with httpx.Client(base_url=self._url, timeout=60, headers=headers) as client:
            number = 0
            try:
                while most is None or number < most:
                    body = {"messages": [{"role": "user", "content": f"Sum: {number}+{user[-1]}"}]}
                    answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 4})
                    rating = {"id": answer.json()["id"], "rating": "up" if number % 3 else "down"}
                    if client.post("/v1/feedback", json=rating).status_code == 200:
                        self.rated.add(rating["id"])
                    number += 1
                    if len(self.rated) >= ENOUGH:
                        self.enough.set()
            except httpx.HTTPError:
                return  # killed


@pytest.mark.slow
@pytest.mark.long
def test_a_kill_loses_no_acknowledged_rating(tmp_path: Path) -> None:
    config, run = tmp_path / "use.toml", tmp_path / "runs" / "run"
    config.write_text(CONFIG.format(port=free_port(), directory=tmp_path / "runs"))
    with train(config) as daemon:
        people = People(daemon.url)
        daemon.wait_until_ready(READY_S)
        threads = [
            threading.Thread(target=people.talk, args=(f"user-{n}",), daemon=True) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        assert people.enough.wait(READY_S)
        daemon.process.kill()
        daemon.wait()
        for thread in threads:
            thread.join(30)
    with train(config, "--resume", str(run)) as daemon:
        daemon.wait_until_ready(READY_S)
        people.talk("user-9", 4)  # wakes the worker, and shows that it continues
        daemon.process.terminate()
        assert daemon.wait() == 0, daemon.output
    released = states_of(run, people.rated)
    store = RolloutStore(run / "rollouts.sqlite", min_free_bytes=0)
    try:
        stored = {name.removeprefix("feedback-") for name in store.known_ids()}
        # one that the kill kept from being acknowledged may be there too
        assert released == stored & people.rated
    finally:
        store.close()


def states_of(run: Path, rated: set[str]) -> set[str]:
    """Return the answers that were released; all that were rated are there, and the last batch is
    not full."""
    feedback = FeedbackStore(run / FEEDBACK_FILE, settle_s=0, weights=SignalRewards().model_dump())
    try:
        kept = {answer: feedback.find(answer) for answer in rated}
        feedback.decide(review=False, decay=0.95, keep_s=1e6)
        assert len(feedback.ready(100)) < 2 * BATCH
    finally:
        feedback.close()
    states = {answer: None if each is None else each.state for answer, each in kept.items()}
    assert set(states.values()) <= {"open", "ready", "released"}
    return {answer for answer, state in states.items() if state == "released"}
