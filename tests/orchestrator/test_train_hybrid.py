"""The command line of the specification: what it writes, and what it says to bad input."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from examples.hybrid.train_hybrid_grpo import command, parse
from mlx_parallm.config.load import load_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.systems.experts import save_expert
from mlx_parallm.systems.experts.registry import physics_controller

PROGRAM = str(Path(__file__).parents[2] / "examples" / "hybrid" / "train_hybrid_grpo.py")


def words(tmp_path: Path, *more: str) -> list[str]:
    mx.random.seed(0)
    save_expert(tmp_path / "best.safetensors", physics_controller())
    # either suffix finds it
    own = ["--model", "builtin:tiny", "--physics-expert", str(tmp_path / "best.npz")]
    return command(parse([*own, "--checkpoint-dir", str(tmp_path / "run"), *more]))


def test_the_run_that_it_begins(tmp_path: Path) -> None:
    more = ("--iterations", "7", "--group-size", "8", "--lr", "2e-4", "--set", "server.port=0")
    given = words(tmp_path, *more)
    assert given == [
        "train",
        "--config",
        str(tmp_path / "run" / "hybrid.toml"),
        "--set",
        "server.port=0",
    ]
    config = load_config(given[2], ["server.port=0"])
    assert (config.rl_training.total_steps, config.rl_training.learning_rate) == (7, 2e-4)
    [environment] = config.environments
    assert (environment.kind, environment.group_size, environment.options["learn"]) == (
        "hybrid",
        8,
        "both",
    )
    assert list(environment.options["experts"]) == ["physics_controller"]
    assert config.tools.mcp[0].command[-1] == "mlx_parallm.systems.orchestrator.tool_server"
    assert config.rl_training.atropos.rollout_batch_size == 128
    assert words(tmp_path, "--resume") == ["train", "--resume", str(tmp_path / "run" / "run")]


def test_the_numbers_of_the_specification(tmp_path: Path) -> None:
    config = load_config(words(tmp_path)[2])
    # the rate by the size of the model, as DPO's script does
    assert (config.rl_training.total_steps, config.rl_training.learning_rate) == (500, 1e-3)
    assert config.environments[0].group_size == 4


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="group-size"):
        words(tmp_path, "--group-size", "1")


@pytest.mark.slow
def test_no_expert_is_one_line(tmp_path: Path) -> None:
    given = [
        sys.executable,
        PROGRAM,
        "--model",
        "builtin:tiny",
        "--physics-expert",
        str(tmp_path / "none.npz"),
    ]
    ended = subprocess.run(
        given, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert (
        ended.returncode == 2
        and ended.stderr.startswith("error: ")
        and ended.stderr.count("\n") == 1
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
def test_it_trains_in_an_empty_directory(tmp_path: Path) -> None:
    mx.random.seed(0)
    save_expert(tmp_path / "best.safetensors", physics_controller())
    empty = tmp_path / "empty"
    empty.mkdir()
    given = [
        sys.executable,
        PROGRAM,
        "--model",
        "builtin:tiny",
        "--physics-expert",
        str(tmp_path / "best.npz"),
    ]
    short = ["--no-instructions", "--max-tokens", "8", "--max-token-length", "96"]
    given += ["--iterations", "1", "--prompts", "2", *short, "--set", "server.port=0"]
    ended = subprocess.run(
        given, capture_output=True, text=True, timeout=120, cwd=empty, check=False
    )
    assert ended.returncode == 0, ended.stderr
    run = empty / "checkpoints" / "hybrid_grpo" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["sequences"]) for line in lines] == [(1, 8)]
    assert (run / "final/adapters.safetensors").is_file()
    assert (run / "final/learners/hybrid/physics_controller/expert.safetensors").is_file()
