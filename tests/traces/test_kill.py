"""A server that records is killed with -9 under load: every turn that a client was answered is
on the disk."""

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlx_parallm.systems.traces.session import COMPLETE, read_sessions
from tests.integration.processes import Daemon, free_port
from tests.traces.messages import user

pytestmark = pytest.mark.slow


def test_a_kill_loses_no_acknowledged_turn(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "serve.toml"
    config.write_text(f'[server]\nport = {port}\n[traces]\ndirectory = "{tmp_path / "traces"}"\n')
    answered: dict[str, set[str]] = {f"s{number}": set() for number in range(8)}
    enough = threading.Event()

    def talk(name: str) -> None:
        url = f"http://127.0.0.1:{port}/sessions/{name}/v1"
        messages: list[Any] = [user("Sum: 2+3")]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            try:
                while True:
                    answer = client.chat.completions.create(
                        model="default", messages=messages[-5:], max_tokens=4
                    )
                    answered[name].add(answer.id)
                    messages += [answer.choices[0].message, user("Sum: 1+1")]
                    if sum(map(len, answered.values())) >= 60:
                        enough.set()
            except (openai.APIError, httpx.HTTPError):
                return  # killed

    with Daemon("mlx_parallm_serve", "--config", str(config), port=port) as daemon:
        daemon.wait_until_ready()
        threads = [threading.Thread(target=talk, args=(name,), daemon=True) for name in answered]
        for thread in threads:
            thread.start()
        assert enough.wait(60)
        daemon.process.kill()
        daemon.wait()
        for thread in threads:
            thread.join(30)
    sessions = {session.name: session for session in read_sessions(tmp_path / "traces")}
    for name, ids in answered.items():
        turns = [turn for turn in sessions[name].turns.values() if turn.status == COMPLETE]
        recorded = [turn.response_id for turn in turns]
        assert ids <= set(recorded) and len(recorded) == len(set(recorded))
        assert all(turn.tokens is not None for turn in turns)
