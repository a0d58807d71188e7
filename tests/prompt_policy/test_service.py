"""The service over real HTTP: routes, errors, feedback, checkpoints, and what survives."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.cli import main
from mlx_parallm.errors import CheckpointError, StoreError
from mlx_parallm.models import threads
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.systems.prompt_policy import demo, service
from mlx_parallm.systems.prompt_policy.embeddings import HashedEmbedder
from mlx_parallm.systems.prompt_policy.store import ExperienceStore
from tests.prompt_policy.helpers import (
    SIZE,
    SMALL,
    experience_body,
    serving,
    small_server,
    vector,
)
from tests.soak.fuzz_openapi import fuzz, policy_server

POLITE = "Could you please write a Python function that sorts a list? Thank you so much!"


def test_the_routes_of_the_specification(tmp_path: Path) -> None:
    state = vector().tolist()
    with serving(tmp_path) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/stats").json() == {"message": "No training data yet"}
        assert client.post("/update").json()["message"].startswith("Not enough experiences: 0 of 8")
        chosen = client.post(
            "/select_action", json={"embedding": state, "deterministic": True}
        ).json()
        spread = client.post("/get_distribution", json={"embedding": state}).json()
        assert spread["mutation_types"][1] == "context-reduction"
        assert sum(spread["probabilities"]) == pytest.approx(1, abs=1e-6)
        assert chosen["action"] == max(range(5), key=spread["probabilities"].__getitem__)
        assert chosen["mutation_type"] == spread["mutation_types"][chosen["action"]]
        assert spread["uncertainty"] == pytest.approx(1)
        only = client.post(
            "/get_distribution", json={"embedding": state, "allowed": ["expansion"]}
        ).json()
        assert only["probabilities"] == [0, 0, 1, 0, 0]
        for number in range(8):
            stored = client.post(
                "/store_experience", json=experience_body(number, reward=number / 8)
            ).json()
        assert stored == {"stored": True, "buffer_size": 8}
        learned = client.post("/update").json()
        assert (
            learned["update_count"] == 1
            and learned["buffer_size"] == 0
            and learned["first_ratio"] == 1.0
        )
        stats = client.get("/stats").json()
        assert stats["avg_reward"] == pytest.approx(3.5 / 8) and stats["max_reward"] == 0.875
        assert stats["total_episodes"] == 8 and stats["mutations"]["try-catch-style"] == 8
        assert (
            0
            < client.post("/get_distribution", json={"embedding": state}).json()["uncertainty"]
            < 1
        )
        text = client.get("/metrics").text
        assert 'mlx_parallm_prompt_policy_experiences_total{mutation="try-catch-style"} 8.0' in text


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/select_action", {"embedding": [0.0] * 3}, 400, "has 3 numbers, and the policy reads 16"),
        (
            "/select_action",
            {"embedding": [0.0] * 16, "allowed": ["shout"]},
            400,
            "there is no mutation 'shout'",
        ),
        ("/store_experience", experience_body(action=5), 400, "'action' is 5; there are 0 to 4"),
        (
            "/store_experience",
            experience_body(allowed=["expansion"]),
            400,
            "which 'allowed' does not name",
        ),
        ("/store_experience", experience_body(state=[1e39] * 16), 400, "state"),
        ("/save", {"path": "../outside"}, 400, "'path' is the name of a checkpoint in"),
        ("/load", {"path": "/etc/passwd"}, 400, "'path' is the name of a checkpoint in"),
        ("/load", {"path": "nothing"}, 404, "File not found"),
        ("/feedback", {"id": "nobody", "reward": 1}, 404, "there is no open mutation 'nobody'"),
        ("/feedback", {"id": "nobody"}, 400, "send 'reward', or 'score' from 1 to 5"),
        (
            "/feedback",
            {"id": "nobody", "reward": 1, "next_prompt": "Go on."},
            400,
            "needs the 'episode_id'",
        ),
        ("/mutate", {"prompt": "\ud800"}, 400, "prompt"),
        ("/mutate", {"prompt": "a", "mutation": "shout"}, 400, "there is no mutation 'shout'"),
        ("/embed", {"input": ["a" * 20_000] * 21}, 400, "'input' has 420000 characters"),
        ("/nowhere", {}, 404, "Not Found"),
    ],
)
def test_what_is_refused(
    shared_client: httpx.Client, path: str, body: Any, status: int, says: str
) -> None:
    reply = shared_client.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == status, reply.text
    assert says in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("policy")) as client:
        yield client


def test_a_mutation_and_its_reward(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        changed = client.post(
            "/mutate", json={"prompt": POLITE, "mutation": "context-reduction"}
        ).json()
        assert changed["prompt"] == "Write a Python function that sorts a list."
        assert (
            changed["mutation_type"] == "context-reduction"
            and changed["category"] == "CODE_GENERATION"
        )
        assert changed["expected_impact"]["cost"] == "decrease"
        assert changed["probability"] == 1.0  # the only one that could be chosen
        rewarded = client.post("/feedback", json={"id": changed["id"], "score": 4})
        assert rewarded.json() == {"stored": True, "buffer_size": 1}
        assert client.get("/stats").json()["avg_reward"] == 0.75
        assert client.post("/feedback", json={"id": changed["id"], "score": 4}).status_code == 404
        careful = client.post(
            "/mutate", json={"prompt": "A prompt of another kind", "conservative": True}
        ).json()
        assert careful["id"] is None and careful["prompt"] == "A prompt of another kind"
        assert careful["uncertainty"] > 0.5
        nothing = client.post(
            "/mutate", json={"prompt": "Sort: ba", "mutation": "context-reduction"}
        ).json()
        assert nothing["id"] is None and "would change it" in nothing["change_description"]


def test_steps_of_an_episode_are_kept_with_what_they_led_to(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        ids = [client.post("/mutate", json={"prompt": POLITE}).json()["id"] for _ in range(2)]
        step = {"reward": 0, "episode_id": "e"}
        assert (
            client.post(
                "/feedback", json={"id": ids[0], **step, "next_prompt": "Sort it."}
            ).status_code
            == 200
        )
        assert client.post("/feedback", json={"id": ids[1], **step}).status_code == 200
    kept = ExperienceStore(tmp_path / "experiences.sqlite", SIZE, 5, open_decisions=9, added=print)
    first, last = kept.unused()
    kept.close()
    assert (first.episode_id, first.done, last.episode_id, last.done) == ("e", False, "e", True)
    [after] = HashedEmbedder(SIZE).embed(["Sort it."])
    assert np.array_equal(first.next_state, after) and not np.array_equal(first.state, after)


def test_restart_goes_on_where_it_stood(tmp_path: Path) -> None:
    """Weights to the bit, waiting experiences, open mutations and counts; a named checkpoint
    loads again."""
    ask = {"embedding": vector().tolist()}
    with serving(tmp_path) as client:
        for number in range(8):
            client.post("/store_experience", json=experience_body(number, reward=number % 2))
        client.post("/update")
        before = client.post("/get_distribution", json=ask).json()
        with (
            pytest.raises(CheckpointError, match="in use"),
            serving(tmp_path),
        ):
            pass
        assert client.post("/save", json={"path": "one"}).json() == {"saved": True, "path": "one"}
        changed = client.post("/mutate", json={"prompt": POLITE}).json()
        client.post("/store_experience", json=experience_body(9))
    with serving(tmp_path) as client:
        assert (
            client.post("/get_distribution", json=ask).json()["probabilities"]
            == before["probabilities"]
        )
        assert client.get("/stats").json()["total_experiences"] == 9
        assert (
            client.post("/feedback", json={"id": changed["id"], "reward": 1}).json()["buffer_size"]
            == 2
        )
        for number in range(8):
            client.post("/store_experience", json=experience_body(number, action=1))
        assert client.post("/update").json()["experiences"] == 10
        assert client.post("/get_distribution", json=ask).json() != before
        assert client.post("/load", json={"path": "one"}).json() == {"loaded": True, "path": "one"}
        assert client.post("/get_distribution", json=ask).json() == before
    with serving(tmp_path) as client:
        assert client.post("/get_distribution", json=ask).json() == before


@pytest.mark.slow
def test_a_checkpoint_of_another_service_costs_no_experience(tmp_path: Path) -> None:
    """Sequence numbers count within one database: also after /load of a foreign checkpoint, and
    with a new database beside an old `latest`."""
    with serving(tmp_path / "a") as client:
        for number in range(20):
            client.post("/store_experience", json=experience_body(number))
        client.post("/update")
        client.post("/save", json={"path": "foreign"})
    shutil.copytree(tmp_path / "a" / "foreign", tmp_path / "b" / "foreign")
    (tmp_path / "a" / "experiences.sqlite").unlink()
    for directory in ("a", "b"):
        with serving(tmp_path / directory) as client:
            client.post("/load", json={"path": "foreign"})
            for number in range(7):
                client.post("/store_experience", json=experience_body(number))
        with serving(tmp_path / directory) as client:
            assert client.get("/stats").json()["buffer_size"] == 7, directory
    with pytest.raises(StoreError, match="other mutations"):
        ExperienceStore(
            tmp_path / "b" / "experiences.sqlite", SIZE, 0, open_decisions=9, added=print
        )


def test_a_save_replaces_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "adapters.safetensors").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    with serving(tmp_path) as client:
        for name in ("run1", "notes.txt", "Experiences.sqlite", "LOCK"):
            assert client.post("/save", json={"path": name}).status_code == 400, name
        assert client.post("/save", json={"path": "one"}).status_code == 200
        monkeypatch.setattr(service, "MOST_CHECKPOINTS", 1)
        assert client.post("/save", json={"path": "one"}).status_code == 200  # it is there
        assert (
            "holds 1 checkpoints"
            in client.post("/save", json={"path": "two"}).json()["error"]["message"]
        )
    assert (tmp_path / "run1" / "adapters.safetensors").read_bytes() == b"mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_after_a_kill_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mlx_parallm",
        "prompt-policy",
        "--server",
        "0",
        "--checkpoint-dir",
        str(tmp_path),
    ]
    with subprocess.Popen(
        [*command, *(word for key in SMALL for word in ("--set", key))], stdout=subprocess.PIPE
    ) as it:
        try:
            assert it.stdout is not None
            url = next(
                words[-1]
                for line in it.stdout
                if b"started at" in line and (words := line.decode().split())
            )
            with httpx.Client(base_url=url, timeout=30) as client:
                for number in range(13):
                    assert (
                        client.post("/store_experience", json=experience_body(number)).status_code
                        == 200
                    )
                    if number == 7:
                        assert client.post("/update").json()["experiences"] == 8
                opened = client.post("/mutate", json={"prompt": POLITE}).json()["id"]
        finally:
            it.kill()  # SIGKILL
    with serving(tmp_path) as client:
        stats = client.get("/stats").json()
        assert (stats["buffer_size"], stats["total_experiences"], stats["total_updates"]) == (
            5,
            13,
            1,
        )
        assert client.post("/feedback", json={"id": opened, "reward": 1}).json()["buffer_size"] == 6


def test_a_damaged_optimizer_and_a_pipe_are_refused(tmp_path: Path) -> None:
    """Before anything has changed: the service learns on from what it has."""
    with serving(tmp_path) as client:
        for number in range(8):
            client.post("/store_experience", json=experience_body(number))
        client.post("/update")
        client.post("/save", json={"path": "good"})
        good = next(tmp_path.rglob("good"))
        file = good / "optimizer.safetensors"
        whole = dict(mx.load(str(file)))
        name = next(name for name in whole if name.endswith(".v"))
        damages: dict[str, Any] = {
            "missing": {key: value for key, value in whole.items() if key != name},
            "shape": whole | {name: mx.zeros((3,))},
            "infinite": whole | {name: mx.full(whole[name].shape, float("nan"))},
            "negative": whole | {name: mx.full(whole[name].shape, -1.0)},
            "unknown": whole | {"0.more": mx.zeros((1,))},
            "empty": {},
        }
        for place, tensors in damages.items():
            shutil.copytree(good, good.with_name(place))
            mx.save_safetensors(str(good.with_name(place) / file.name), tensors)
        state = json.loads((good / "state.json").read_text())
        odd = {
            "history": {"through": None},
            "novelty": {"input_dim": math.inf},
            "order": {"uinteger": -1},
        }
        for part, change in odd.items():
            shutil.copytree(good, good.with_name(part))
            changed = json.dumps(state | {part: state[part] | change})
            (good.with_name(part) / "state.json").write_text(changed)
            damages[part] = None
        for part in (file.name, "state.json"):
            place = f"pipe-{part}"
            shutil.copytree(good, good.with_name(place))
            (good.with_name(place) / part).unlink()
            os.mkfifo(good.with_name(place) / part)
            damages[place] = None
        for place in damages:
            reply = client.post("/load", json={"path": place})
            assert reply.status_code == 409, (place, reply.text)
        assert client.post("/load", json={"path": "good"}).status_code == 200
        for number in range(8, 16):
            client.post("/store_experience", json=experience_body(number))
        assert client.post("/update").status_code == 200


def test_a_service_that_shuts_down_is_not_healthy(tmp_path: Path) -> None:
    server = small_server(tmp_path)
    server.start()
    server._state.draining = True
    assert httpx.get(f"{server.url}/health").status_code == 503
    server.close()


def test_errors_of_other_servers_and_of_checkpoints_are_declared(
    shared_client: httpx.Client,
) -> None:
    paths = shared_client.get("/openapi.json").json()["paths"]
    for path, status in (
        ("/load", "409"),
        ("/mutate", "502"),
        ("/embed", "502"),
        ("/rollout", "422"),
    ):
        assert "Error" in str(paths[path]["post"]["responses"][status]), path


def test_many_clients_lose_nothing(tmp_path: Path) -> None:
    """50 at once, while updates run by themselves: each experience is counted once, learned from
    or waiting."""
    with serving(
        tmp_path, "prompt_policy.ppo.buffer_size=64", "prompt_policy.ppo.n_epochs=1"
    ) as client:

        def send(number: int) -> int:
            return client.post("/store_experience", json=experience_body(number)).status_code

        with ThreadPoolExecutor(50) as threads:
            assert set(threads.map(send, range(200))) == {200}
        client.post("/update")  # after those that began by themselves
        stats = client.get("/stats").json()
        assert stats["total_experiences"] == 200 and stats["total_updates"] >= 2


@pytest.mark.slow
def test_no_request_makes_it_fail() -> None:
    """Right and wrong requests made from the OpenAPI document: no 500, nothing that the document
    does not declare."""
    with policy_server() as url:
        findings = fuzz(url, 80)
    assert findings.problems == {}
    assert findings.cases >= 80 and 200 in findings.statuses["POST /store_experience"]


def test_an_api_key_guards_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "a-long-enough-key")
    with serving(tmp_path) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/stats").status_code == 401
        assert (
            client.get("/stats", headers={"Authorization": "Bearer a-long-enough-key"}).status_code
            == 200
        )


def test_pages_of_this_machine_may_read(shared_client: httpx.Client) -> None:
    ours, foreign = {"Origin": "http://localhost:5173"}, {"Origin": "https://example.org"}
    assert (
        shared_client.get("/stats", headers=ours).headers["access-control-allow-origin"]
        == ours["Origin"]
    )
    assert shared_client.get("/stats", headers=foreign).status_code == 403


def test_the_networks_are_computed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever MLX's device is. The second device stands for a GPU; all threads have the same."""
    used: list[mx.Device] = []
    # it would end the streams of this thread, which has other tests to run
    monkeypatch.setattr(threads, "mlx_thread", nullcontext)
    monkeypatch.setattr(
        demo, "demonstrate", lambda config: used.append(in_mlx_thread(mx.default_device))
    )
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu, 1))
    try:
        assert main(["prompt-policy"]) == 0
    finally:
        mx.set_default_device(before)
    assert used == [mx.Device(mx.cpu, 0)]
