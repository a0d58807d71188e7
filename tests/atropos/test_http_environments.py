"""Environments that come over HTTP: the specification's own configuration, trained from an
Atropos-style client."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.http_environment import ROWS, HttpEnvironment
from tests.integration.processes import (
    Daemon,
    free_port,
    metrics,
    train,
    wait_for_step,
    write_config,
)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def specification(tmp_path: Path) -> list[str]:
    """train_configs/grpo_qwen3_lora.toml as written, but for the model, the place and the
    length."""
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


@pytest.mark.long
def test_the_specifications_configuration_trains_from_an_http_environment(
    tmp_path: Path, specification: list[str]
) -> None:
    port = free_port()
    run = tmp_path / "checkpoints" / "spec"
    with Daemon(
        "mlx_parallm_train", *specification, "--set", f"server.port={port}", port=port
    ) as daemon:
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
    assert sum(lines[-1]["rows_by_environment"]["sorting_0"].values()) == len(ROWS)
    assert lines[-1]["rows_unseen"] < lines[0]["rows_unseen"] < len(ROWS)
    assert (tmp_path / "checkpoints" / "final" / "adapters.safetensors").is_file()


def test_with_a_key_the_queue_takes_basic_auth_and_every_route_is_guarded(
    tmp_path: Path, specification: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "secret-key")
    port = free_port()
    with Daemon(
        "mlx_parallm_train", *specification, "--set", f"server.port={port}", port=port
    ) as daemon:
        daemon.wait_until_ready()
        for path in ("/v1/models", "/metrics", "/atropos/status", "/openapi.json"):
            assert httpx.get(daemon.url + path).status_code == 401, path
        assert (
            httpx.get(daemon.url.replace("//", "//env:wrong@") + "/atropos/status").status_code
            == 401
        )
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


@pytest.mark.long
def test_an_environment_over_http_leaves_and_comes_back_beside_in_process_ones(
    tmp_path: Path,
) -> None:
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
        lines = wait_for_steps(
            lambda lines: sum(trained_groups(line, "sorting_0") > 0 for line in lines) > 3
        )
        parts = [trained_groups(line, "sorting_0") for line in lines]
        assert min(parts[next(i for i, part in enumerate(parts) if part) + 1 :]) >= 2, parts
        assert any(trained_groups(line, "sort") + trained_groups(line, "reverse") for line in lines)
        first.leave()
        # Which of the two a step's few groups come from is chance, so both must come within several
        # steps.
        wait_for_steps(
            lambda lines: all(
                sum(
                    trained_groups(line, name) > 0 and not trained_groups(line, "sorting_0")
                    for line in lines
                )
                > 1
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
