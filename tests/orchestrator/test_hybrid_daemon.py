"""A whole run: planner and expert learn, /v1/hybrid answers, a stopped run continues bit for bit."""

import json
import sys
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
import tomli_w
from openai import BadRequestError, OpenAI
from rich.console import Console

from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.environments.state import State
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.rl_training.events import StepFinished
from mlx_parallm.systems.experts import load_expert, save_expert
from mlx_parallm.systems.experts.registry import physics_controller
from mlx_parallm.systems.orchestrator.environment import HybridEnvironment

SERVER = {"command": [sys.executable, "-m", "mlx_parallm.systems.orchestrator.tool_server"]}
EXPERT = "final/learners/hybrid/aim/expert.safetensors"


class Delegates(HybridEnvironment):
    """Whatever the planner writes becomes a delegation, then an answer; its text decides the
    target."""

    def update_state(self, state: State, response: str) -> State:
        action = (
            "ANSWER: done"
            if state.step_count
            else f"DELEGATE: aim(target={50 + len(response) % 100}, wind=1)"
        )
        return super().update_state(state, action)


def configuration(tmp_path: Path, name: str, **options: Any) -> Path:
    expert = tmp_path / "aim.safetensors"
    if not expert.exists():
        mx.random.seed(1)
        in_mlx_thread(lambda: save_expert(expert, physics_controller("aim")))
    environment = {
        "kind": f"python:{__file__}:Delegates",
        "name": "hybrid",
        "group_size": 4,
        "max_tokens": 6,
        "options": {
            "experts": {"aim": str(expert)},
            "instructions": "",
            "max_steps": 2,
            "learn": "both",
            "min_steps": 16,
            "ppo": {"epochs": 2, "batch_size": 64},
            **options,
        },
    }
    training = {
        "total_steps": 4,
        "batch_size": 8,
        "deterministic": True,
        "max_staleness": 0,
        "dynamic_sampling": False,
        "checkpoint_interval": 2,
        "checkpoint_dir": str(tmp_path),
        "run_name": name,
        "atropos": {"rollout_batch_size": 8, "max_token_length": 96},
    }
    config = {
        "model": {"base_path": "builtin:tiny"},
        "server": {"port": 0},
        "rl_training": training,
    }
    config["tools"] = {"mcp": [SERVER]}
    path = tmp_path / f"{name}.toml"
    path.write_text(tomli_w.dumps(config | {"environments": [environment]}))
    return path


def train(path: Path, *, resume: str | None = None, at_step: Any = None) -> None:
    """Run in this process. `at_step`: called with the run after each step."""

    def run() -> None:
        stop = threading.Event()
        made = training_run(
            load_config(path), resume=resume, stop=stop, console=Console(file=StringIO())
        )
        if at_step is not None:
            made.prepared.events.subscribe(StepFinished, lambda event: at_step(made, stop, event))
        try:
            made.execute()
        finally:
            made.close()

    in_mlx_thread(run)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in mx.load(str(path)).items()}


@pytest.mark.slow
@pytest.mark.long
def test_a_stopped_run_goes_on_and_the_server_answers_meanwhile(tmp_path: Path) -> None:
    replies: list[Any] = []

    def ask(made: Any, stop: threading.Event, event: StepFinished) -> None:
        if event.line["step"] == 1:
            client = OpenAI(base_url=f"{made.prepared.serving.url}/v1/hybrid", api_key="none")
            messages: Any = [{"role": "user", "content": "Sum: 1+2"}]
            replies.append(
                client.chat.completions.create(model="default", messages=messages, max_tokens=4)
            )
            with pytest.raises(BadRequestError, match="stream"):
                client.chat.completions.create(model="default", messages=messages, stream=True)
            wrong = httpx.post(
                f"{made.prepared.serving.url}/v1/hybrid/chat/completions", json={"messages": []}
            )
            assert wrong.status_code == 400 and "messages" in wrong.json()["error"]["message"]
        if event.line["step"] == 2:
            stop.set()

    train(configuration(tmp_path, "through"))
    train(configuration(tmp_path, "stopped"), at_step=ask)
    assert [line["step"] for line in lines(tmp_path / "stopped")] == [1, 2]
    train(tmp_path / "stopped.toml", resume=str(tmp_path / "stopped"))

    [reply] = replies
    assert reply.choices[0].finish_reason in ("stop", "length") and len(reply.steps) <= 2
    assert {"kind", "name", "written", "result", "error"} == set(reply.steps[0])

    assert lines(tmp_path / "through")[0]["tools/calls"] > 0
    through, stopped = lines(tmp_path / "through"), lines(tmp_path / "stopped")
    learned = [key for key in through[-1] if key.startswith("experts/aim/")]
    assert {"experts/aim/return", "experts/aim/learned_steps", "experts/aim/policy_loss"} <= set(
        learned
    )
    for one, other in zip(through, stopped, strict=True):
        assert [one.get(key) for key in [*learned, "reward_mean"]] == [
            other.get(key) for key in [*learned, "reward_mean"]
        ]
        # Turns that come after tools reach the engine in other company, which changes the last
        # bits.
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-6)
    assert load_expert(tmp_path / "through" / EXPERT).config.name == "aim"
    start, end, again = (
        weights(tmp_path / name)
        for name in ("aim.safetensors", f"through/{EXPERT}", f"stopped/{EXPERT}")
    )
    assert any((end[name] != start[name]).any() for name in end)
    assert all((end[name] == again[name]).all() for name in end)


@pytest.mark.slow
def test_the_planner_stays_while_the_experts_learn(tmp_path: Path) -> None:
    train(configuration(tmp_path, "experts", learn="experts"))
    made = lines(tmp_path / "experts")
    assert [line["optimizer_updates"] for line in made] == [0] * 4 and made[-1][
        "policy_version"
    ] == 0
    assert all(line["sequences"] == 8 and line["reward_mean"] is not None for line in made)
    assert made[-1]["experts/aim/learned_steps"] > 0
