"""`serve_priority` reaches both threads: the engine's steps and the trainer's evaluations take
their turns by it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mlx_parallm import daemon as serving
from mlx_parallm.config.load import parse_config
from mlx_parallm.daemon import training_run
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.system.serve_priority import Turns
from tests.engine.helpers import qwen3_model, request, serve


class Counted(Turns):
    def __init__(self, priority: str = "balanced") -> None:
        super().__init__(priority)  # type: ignore[arg-type]
        self.priority, self.steps, self.evaluations, self.trainings = priority, 0, 0, 0
        self.idle = threading.Event()

    @contextmanager
    def step(self) -> Iterator[None]:
        self.idle.clear()
        with super().step():
            yield
        self.steps += 1

    def engine_idle(self) -> None:
        super().engine_idle()
        self.idle.set()

    @contextmanager
    def training(self) -> Iterator[None]:
        self.trainings += 1
        with super().training():
            yield

    def after_evaluation(self) -> None:
        super().after_evaluation()
        self.evaluations += 1


def test_the_engine_takes_turns_and_says_when_it_is_idle() -> None:
    turns = Counted("serve")
    served = serve(qwen3_model(), max_rows=4)
    thread = EngineThread(
        lambda: served.engine, ServedModels("m", adapter_versions=dict, version=lambda: 0), turns
    )
    thread.start()
    try:
        asyncio.run(
            thread.client.generate_many([request("a", [1, 2, 3], max_tokens=8, ignore_eos=True)])
        )
        assert turns.idle.wait(10)
        assert turns.steps >= 8
    finally:
        thread.stop()


@pytest.mark.slow
def test_a_run_has_the_configured_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counted] = []
    monkeypatch.setattr(
        serving, "Turns", lambda priority: made.append(Counted(priority)) or made[-1]
    )
    training = {
        "serve_priority": "serve",
        "total_steps": 1,
        "batch_size": 8,
        "checkpoint_dir": str(tmp_path),
    }
    training |= {"run_name": "run", "atropos": {"rollout_batch_size": 16, "max_token_length": 64}}
    environment = {"kind": "tasks", "name": "reverse", "group_size": 8, "max_tokens": 8}
    config = parse_config(
        {"server": {"port": 0}, "rl_training": training, "environments": [environment]}
    )

    def run() -> None:
        started = training_run(
            config, resume=None, stop=threading.Event(), console=Console(file=StringIO())
        )
        try:
            started.execute()
        finally:
            started.close()

    in_mlx_thread(run)
    [turns] = made
    assert turns.priority == "serve"
    assert turns.trainings == 1
    assert turns.evaluations > 8  # block by block
    assert turns.steps >= 2
