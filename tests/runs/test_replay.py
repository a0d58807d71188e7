"""mlx_parallm_replay: other settings on a run's rollouts; on a run that was written by hand, and
on a real one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm import cli as cli_tools
from mlx_parallm.config.load import parse_config
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile, complete
from mlx_parallm.runs.replay import replay
from mlx_parallm.types import RolloutGroup
from tests.rl_training.rollouts import make_rollout

CONFIG: dict[str, Any] = {
    "rl_training": {
        "learning_rate": 1e-3,
        "batch_size": 4,
        "total_steps": 3,
        "blocks_per_eval": 0,
        "run_name": "run",
        "lora": {"rank": 2, "alpha": 4},
        "atropos": {"rollout_batch_size": 8, "max_token_length": 64},
    }
}
STEPS = (1, 2, 3)


def group(number: int) -> RolloutGroup:
    generator = np.random.default_rng(number)
    rollouts = tuple(
        make_rollout(
            generator.integers(3, 300, 5).tolist(),
            prompt=generator.integers(3, 300, 4).tolist(),
            reward=float(reward),
            logprob=-5.0,
            version=number // 2,
        )
        for reward in (0, 1, 1, 0)
    )
    return RolloutGroup(f"g{number}", "test", rollouts, index=number)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of two groups each; one more group was dropped, one waits."""
    run = tmp_path / "checkpoints" / "run"
    store = RolloutStore(run / "rollouts.sqlite")
    for number in range(8):
        store.add(group(number), source="test")
    for step in STEPS:
        store.take([f"g{2 * step - 2}", f"g{2 * step - 1}"], step)
    store.drop(["g6"], 3, "no variance")
    store.close()
    metrics = MetricsFile(run / METRICS_FILE)
    for step in STEPS:
        values = {
            "step": step,
            "policy_version": step,
            "loss": 7.0,
            "reward_mean": 0.5,
            "groups": 2,
        }
        metrics.append(complete(values | {"eval/score": 0.3}))
    (run / "config.toml").write_text(parse_config(CONFIG).to_toml())
    return run


def test_it_trains_on_what_the_steps_took_and_leaves_the_run_alone(run: Path) -> None:
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    found = replay(run)
    assert [line["loss"] for line in found.run] == [7.0] * 3
    [variant] = found.variants
    assert variant.directory == run.with_name("run-replay")
    lines = list(MetricsFile(variant.directory / METRICS_FILE).read())
    assert lines == variant.lines
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["tokens"] for line in lines] == [40, 40, 40]
    assert [line["optimizer_updates"] for line in lines] == [2, 2, 2]
    assert [line["reward_mean"] for line in lines] == [0.5] * 3, (
        "the data's own numbers are the run's"
    )
    assert all(np.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    assert (variant.directory / "final" / "adapters.safetensors").is_file()
    assert (variant.directory / "config.toml").is_file()
    assert not (run.parent / "latest").exists(), (
        "a replay is not a run that something could continue from"
    )
    after = {
        file.name: file.read_bytes()
        for file in run.iterdir()
        if file.is_file() and "sqlite-" not in file.name
    }
    assert after == {name: content for name, content in before.items() if "sqlite-" not in name}


def test_variants_differ_where_their_settings_do(run: Path) -> None:
    found = replay(
        run, [(), ("rl_training.learning_rate=1e-2",), ("rl_training.advantage=mean",)], steps=2
    )
    plain, fast, mean = (variant.lines for variant in found.variants)
    assert [variant.directory.name for variant in found.variants] == [
        "run-replay",
        "run-replay-2",
        "run-replay-3",
    ]
    assert [len(lines) for lines in (plain, fast, mean)] == [2, 2, 2]
    # rewards 0, 1, 1, 0: their standard deviation is 1/2, so "std" has advantages twice those of
    # "mean"
    assert mean[0]["loss"] != pytest.approx(plain[0]["loss"], rel=1e-3)
    assert fast[0]["update_norm"] == pytest.approx(10 * plain[0]["update_norm"], rel=0.2)
    assert fast[1]["loss"] != plain[1]["loss"]


def test_the_table_has_the_run_and_its_variants_side_by_side(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli_tools.replay([str(run), "--steps", "1", "--variant", "rl_training.learning_rate=1e-2"])
        == 0
    )
    told = capsys.readouterr()
    [loss] = [line.split() for line in told.out.splitlines() if line.startswith("loss")]
    assert loss[1] == "7"
    assert float(loss[2]) == pytest.approx(
        json.loads((run.with_name("run-replay") / METRICS_FILE).read_text())["loss"]
    )
    assert "answers that it would not have given" in " ".join(told.out.split())
    assert "step 1: loss" in told.err and "eval/" not in told.out


@pytest.mark.parametrize(
    ("overrides", "start", "error", "message"),
    [
        (
            ("model.base_path=/elsewhere",),
            None,
            ConfigError,
            "model may not change: the rollouts of",
        ),
        (
            ("rl_training.lora.quantize_base=true",),
            None,
            ConfigError,
            "quantize_base may not change",
        ),
        ((), "step_000002", CheckpointError, "has no such checkpoint. There are: none"),
        (("rl_training.learning_rat=1",), None, ConfigError, "did you mean"),
    ],
)
def test_what_cannot_be_replayed(
    run: Path, overrides: tuple[str, ...], start: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        replay(run, [overrides], start=start)
    assert not run.with_name("run-replay").exists()


def test_pruned_rollouts_are_named(run: Path) -> None:
    store = RolloutStore(run / "rollouts.sqlite")
    store.prune(1, always_up_to_step=1, max_bytes=0)
    store.close()
    with pytest.raises(ConfigError, match=r"step 1 .*--from"):
        replay(run)
    assert not run.with_name("run-replay").exists()


def test_a_run_without_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / METRICS_FILE).unlink()
    assert cli_tools.replay([str(run)]) == 2
    assert "nothing to replay" in capsys.readouterr().err
    assert cli_tools.replay([str(run.parent)]) == 2
    assert "runs in it: run" in capsys.readouterr().err
