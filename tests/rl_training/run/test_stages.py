"""A run that fails on its way from one stage to the next: nothing is left running, nothing lies
about."""

import socket
import threading
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.daemon import training_run
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.scoring.reward_model import TrainedRewardModel
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.run import prepare, start
from mlx_parallm.rl_training.run.prepare import PreparedRun
from tests.models.test_reward_model import make_config, save


def configuration(directory: Path) -> Config:
    training = {
        "total_steps": 1,
        "batch_size": 8,
        "checkpoint_dir": str(directory),
        "run_name": "run",
        "atropos": {"rollout_batch_size": 8, "max_token_length": 64},
    }
    environment = {"kind": "tasks", "name": "reverse", "group_size": 8, "max_tokens": 4}
    return parse_config(
        {"server": {"port": 0}, "rl_training": training, "environments": [environment]}
    )


def begin(config: Config, stop: threading.Event | None = None) -> Any:
    """Start a run and close it; return what `start` returned, and the threads that are left."""

    def attempt() -> tuple[Any, set[threading.Thread]]:
        before = set(threading.enumerate())
        run = training_run(
            config,
            resume=None,
            stop=stop or threading.Event(),
            console=Console(file=StringIO()),
        )
        try:
            started = run.start()
        except CheckpointError as error:
            started = error
        finally:
            run.close()
        with socket.socket() as free:  # nobody listens any more
            free.bind(("127.0.0.1", run.prepared.serving.port))  # type: ignore[attr-defined]
        return started, set(threading.enumerate()) - before

    return in_mlx_thread(attempt)


@pytest.mark.parametrize("late", ["open_files", "open_serving", "make_parts"])
def test_a_start_that_fails_leaves_no_thread_and_no_directory(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointError("half way")

    monkeypatch.setattr(start, late, fails)
    error, left = begin(configuration(tmp_path))
    assert str(error) == "half way" and not left
    assert list(tmp_path.iterdir()) == []


def test_a_stop_while_it_starts_leaves_no_thread_and_no_directory(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    started, left = begin(configuration(tmp_path), stop)
    assert started is None and not left and list(tmp_path.iterdir()) == []


def test_a_run_that_was_started_keeps_its_directory(tmp_path: Path) -> None:
    started, left = begin(configuration(tmp_path))
    assert started.config.rl_training.total_steps == 1 and not left
    assert (tmp_path / "run/config.toml").is_file()


def test_a_start_lends_the_base_to_the_models_of_its_rewards(
    tmp_path: Path, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "judge" / "final", tiny_tokenizer, make_config(tmp_path))
    judge, lent = str(tmp_path / "judge"), []
    load = TrainedRewardModel.load

    def noted(path: Path, *, loaded: LoadedModel | None) -> TrainedRewardModel:
        lent.append((path, loaded and loaded.name))
        return load(path, loaded=loaded)

    monkeypatch.setattr(TrainedRewardModel, "load", noted)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Sum: 1+2"}\n{"prompt": "Sum: 2+2"}\n')
    environment = {
        "kind": "dataset",
        "data": str(tmp_path / "rows.jsonl"),
        "heldout_fraction": 0,
        "rewards": ["builtin:reward_model"],
        "reward_options": {"reward_model": {"path": judge}},
        "max_tokens": 4,
    }
    plain = configuration(tmp_path / "runs").model_dump()
    begin(parse_config(plain | {"environments": [environment]}))
    assert lent == [(tmp_path / "judge" / "final", "builtin:tiny")], "loaded before any rollout"


def test_a_run_without_a_port_ends_its_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    client = SimpleNamespace(close=lambda: closed.append("tools"))
    tools = SimpleNamespace(definitions=(), client=client)

    def serve(config: Config) -> Any:
        raise ConfigError("the port is taken")

    monkeypatch.setattr(prepare, "open_tools", lambda config: tools)
    with pytest.raises(ConfigError, match="taken"):
        PreparedRun(
            configuration(tmp_path),
            resume=None,
            stop=threading.Event(),
            console=Console(file=StringIO()),
            serve=serve,
            source_kinds=(),
        )
    assert closed == ["tools"]


def test_a_budget_of_reasoning_that_cannot_be_ended_stops_the_start(tmp_path: Path) -> None:
    closed: list[str] = []
    serving = SimpleNamespace(
        tokenizer=lambda: SimpleNamespace(think_markers=None),
        close=lambda: closed.append("serving"),
    )
    config = configuration(tmp_path)
    bounded = config.environments[0].model_copy(update={"thinking_token_budget": 5})
    with pytest.raises(ConfigError, match=r"environments: reverse: thinking_token_budget: this"):
        PreparedRun(
            config.model_copy(update={"environments": (bounded,)}),
            resume=None,
            stop=threading.Event(),
            console=Console(file=StringIO()),
            serve=lambda config: serving,
            source_kinds=(),
        )
    assert closed == ["serving"]
