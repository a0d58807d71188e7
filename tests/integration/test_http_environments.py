"""Environments that come over HTTP: the specification's own configuration, trained from an Atropos-style client."""

import gzip
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.environments.kinds.tasks import make_problem, score
from tests.integration.processes import Daemon, free_port, metrics, train, wait_for_step, write_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
GROUP_SIZE = 8


class HttpEnvironment(threading.Thread):
    """What an environment derived from atroposlib's BaseEnv does on the wire, with server_type vllm."""

    def __init__(self, url: str, *, key: str | None = None, least: float | None = None) -> None:
        """`least`: the part of every batch that it wants."""
        super().__init__(daemon=True)
        self._least = least
        self._generate = httpx.Client(
            base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        queue = url.replace("http://", f"http://env:{key}@") if key else url
        self._queue = httpx.Client(base_url=queue + "/atropos/", timeout=60)
        self.ended = threading.Event()
        self.replies: list[str] = []
        self.failure: str | None = None

    def run(self) -> None:
        try:
            self._register()
            for number in range(10_000):
                if self.ended.is_set():
                    return
                self._post_group(number)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if not self.ended.is_set():
                self.failure = repr(error)

    def _register(self) -> None:
        body = {"max_token_length": 256, "desired_name": "sorting", "weight": 1.0, "group_size": GROUP_SIZE}
        body |= {"min_batch_allocation": self._least}
        registered = self._queue.post("register-env", json=body).raise_for_status().json()
        assert registered["status"] == "success", registered
        self.env_id: int = registered["env_id"]

    def leave(self) -> None:
        """Ends after the group at hand, and says so to the queue."""
        self.ended.set()
        self.join()
        self._queue.post("disconnect-env", json={"env_id": self.env_id}).raise_for_status()

    def _post_group(self, number: int) -> None:
        problem = make_problem("sort", number, seed=1, split="train")
        prompt = self._generate.post("/tokenize", json={"messages": list(problem.messages)}).raise_for_status()
        ids = prompt.json()["tokens"]
        body = {
            "prompt": {"prompt_token_ids": ids},
            "n": GROUP_SIZE,
            "max_tokens": 12,
            "temperature": 1.0,
            "logprobs": 0,
        }
        answer = self._generate.post("/generate", json=body).raise_for_status().json()
        data = self._scored(problem, ids, answer)
        content = gzip.compress(json.dumps(data).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        reply = self._queue.post("scored_data", content=content, headers=headers).raise_for_status()
        self.replies.append(reply.json()["status"])

    def _scored(self, problem: Any, ids: list[int], answer: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = {
            "tokens": [],
            "masks": [],
            "scores": [],
            "inference_logprobs": [],
            "env_id": self.env_id,
        }
        for text, positions in zip(answer["text"], answer["logprobs"], strict=True):
            pairs = [next(iter(position[0].items())) for position in positions]
            output = [int(token) for token, _ in pairs]
            data["tokens"].append(ids + output)
            data["masks"].append([-100] * len(ids) + output)
            data["inference_logprobs"].append([1.0] * len(ids) + [logprob for _, logprob in pairs])
            data["scores"].append(score(problem, text) + 0.01 * random.random())
        return data


@pytest.fixture
def specification(tmp_path: Path) -> list[str]:
    """train_configs/grpo_qwen3_lora.toml as written, but for the model, the place and the length."""
    settings = {
        "model.base_path": "builtin:tiny",
        "model.lora_path": f"{tmp_path}/checkpoints/latest/lora_weights.safetensors",
        "rl_training.checkpoint_dir": f"{tmp_path}/checkpoints",
        "rl_training.run_name": "spec",
        "rl_training.total_steps": "2",
        "rl_training.atropos.api_url": "embedded",
    }
    flags = ["--config", str(ROOT / "train_configs" / "grpo_qwen3_lora.toml")]
    return flags + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def test_the_specifications_configuration_trains_from_an_http_environment(
    tmp_path: Path, specification: list[str]
) -> None:
    port = free_port()
    run = tmp_path / "checkpoints" / "spec"
    with Daemon("mlx_parallm_train", *specification, "--set", f"server.port={port}", port=port) as daemon:
        daemon.wait_until_ready()
        environment = HttpEnvironment(daemon.url)
        environment.start()
        wait_for_step(daemon, run, 2, timeout=170)
        environment.ended.set()
        assert daemon.wait() == 0, daemon.output
    assert environment.failure is None
    assert set(environment.replies) == {"received"}
    assert "training starts with a new adapter" in daemon.output
    assert daemon.output.count("lora.dropout is off") == 1
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert 0 < lines[0]["kl"] < 1e-2  # the adapter began as nothing; 16 updates move it a little
    assert lines[1]["kl"] > 0
    assert lines[0]["optimizer_updates"] == 4 * 4  # 4 epochs of 128 / 32 mini-batches
    assert (tmp_path / "checkpoints" / "final" / "adapters.safetensors").is_file()


def test_with_a_key_the_queue_takes_basic_auth_and_every_route_is_guarded(
    tmp_path: Path, specification: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "secret-key")
    port = free_port()
    with Daemon("mlx_parallm_train", *specification, "--set", f"server.port={port}", port=port) as daemon:
        daemon.wait_until_ready()
        for path in ("/v1/models", "/metrics", "/atropos/status", "/openapi.json"):
            assert httpx.get(daemon.url + path).status_code == 401, path
        assert httpx.get(daemon.url.replace("//", "//env:wrong@") + "/atropos/status").status_code == 401
        environment = HttpEnvironment(daemon.url, key="secret-key")
        environment.start()
        deadline = threading.Event()
        for _ in range(600):
            if environment.replies or environment.failure:
                break
            deadline.wait(0.1)
        assert environment.replies[0] == "received", environment.failure
        environment.ended.set()
    saved = (tmp_path / "checkpoints" / "spec" / "config.toml").read_text()
    assert "secret-key" not in saved
    assert "secret-key" not in daemon.output


def trained_groups(line: dict[str, Any], environment: str) -> float:
    return float(line["environments"].get(environment, {}).get("trained_groups", 0))


def test_an_environment_over_http_leaves_and_comes_back_beside_in_process_ones(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=100_000, interval=100_000)
    run = tmp_path / "checkpoints" / "run"

    def wait_for_steps(enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """The steps after those that were there, as soon as there are enough."""
        before = len(metrics(run))
        deadline = time.monotonic() + 90
        while not enough(lines := metrics(run)[before:]):
            assert time.monotonic() < deadline, lines[-1:]
            time.sleep(0.02)
        return lines

    with train(config, "--set", "rl_training.max_staleness=2") as daemon:
        daemon.wait_until_ready()
        first = HttpEnvironment(daemon.url, least=0.5)  # two of the four groups of a batch
        first.start()
        lines = wait_for_steps(lambda lines: sum(trained_groups(line, "sorting_0") > 0 for line in lines) > 3)
        parts = [trained_groups(line, "sorting_0") for line in lines]
        assert min(parts[next(i for i, part in enumerate(parts) if part) + 1 :]) >= 2, parts
        assert any(trained_groups(line, "sort") + trained_groups(line, "reverse") for line in lines)
        first.leave()
        # Which of the two a step's few groups come from is chance, so both must come within several steps.
        wait_for_steps(
            lambda lines: all(
                sum(trained_groups(line, name) > 0 and not trained_groups(line, "sorting_0") for line in lines) > 1
                for name in ("sort", "reverse")
            )
        )
        second = HttpEnvironment(daemon.url)
        second.start()
        wait_for_steps(lambda lines: any(trained_groups(line, "sorting_0") for line in lines))
        second.leave()
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.output
    assert (first.failure, second.failure, second.env_id) == (None, None, first.env_id)
