"""`mlx_parallm_train --model M --data D --reward R`: what it amounts to, and what is said when
it cannot work."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm import cli
from mlx_parallm.cli.dataset_config import (
    count_rows,
    dataset_toml,
    find_hidden_size,
    learning_rate_for,
    parameters_of,
    sizes_for,
)
from mlx_parallm.config.load import load_config
from mlx_parallm.system.hardware import GIB, Hardware
from tests.cli.test_cli import call

ROOT = Path(__file__).parents[2]


OWN = ["--model", "model", "--data", "rows.jsonl", "--reward", "score.py:correct"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"text_config": {"hidden_size": 1024}})
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    (tmp_path / "score.py").write_text(
        "def correct(completions, answer):\n    return [0.0 for _ in answer]\n"
    )
    return tmp_path


def test_the_flags_amount_to_a_configuration(here: Path) -> None:
    given = call("train", *OWN, "--set", "rl_training.total_steps=7", cwd=here)
    config = given["config"]
    [entry] = config["environments"]
    assert config["model"]["base_path"] == str(here / "model")
    assert (entry["kind"], entry["name"], entry["data"]) == (
        "dataset",
        "rows",
        str(here / "rows.jsonl"),
    )
    assert entry["rewards"] == [f"python:{here / 'score.py'}:correct"]
    training = config["rl_training"]
    assert (training["total_steps"], training["learning_rate"], training["blocks_per_eval"]) == (
        7,
        2e-4,
        None,
    )
    assert training["run_name"].startswith("rows-2")
    assert given["resume"] is None


@pytest.mark.slow
@pytest.mark.long
def test_resume_auto_keeps_what_the_run_was_started_with(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hub model's size is guessed from its name until it is here; the run must not change its
    rate then."""
    run = here / "checkpoints" / "rows"
    run.mkdir(parents=True)
    assert cli.train([*OWN, "--write-config", str(run / "config.toml")]) == 0
    text = (run / "config.toml").read_text()
    assert "learning_rate = 2.0e-04" in text
    (run / "config.toml").write_text(
        text.replace("2.0e-04", "1.3e-05").replace("steps = 200", "steps = 90")
    )
    given = call("train", *OWN, "--resume", "auto", "--set", "rl_training.total_steps=91", cwd=here)
    training = given["config"]["rl_training"]
    assert (training["learning_rate"], training["total_steps"], training["run_name"]) == (
        1.3e-5,
        91,
        "rows",
    )
    (here / "score.py").write_text((here / "score.py").read_text().replace("correct", "other"))
    assert cli.train([*OWN[:-1], "score.py:other", "--resume", "auto"]) == 2
    assert "--reward is " in capsys.readouterr().err


def test_the_written_file_is_the_same_configuration(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.train([*OWN, "--write-config", "run.toml"]) == 0
    assert "mlx_parallm train --config run.toml" in capsys.readouterr().out
    assert load_config("run.toml") == load_config(
        None, text=dataset_toml("model", "rows.jsonl", ["score.py:correct"])
    )
    text = dataset_toml("model", "my rows.jsonl", ["score.py:correct"])
    assert "--data 'my rows.jsonl' --reward score.py:correct\n" in text, (
        "the command in it can be run again"
    )
    assert cli.train([*OWN, "--write-config", "run.toml"]) == 2
    assert "File exists" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_model_beside_a_configuration_replaces_its_model(here: Path) -> None:
    given = call("train", "--config", "quickstart", "--model", "model", cwd=here)
    assert given["config"]["model"]["base_path"] == "model"
    assert len(given["config"]["environments"]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "rows.jsonl"], "--model is missing"),
        (["--model", "model", "--reward", "score.py:correct"], "--data is missing"),
        (
            ["--model", "model", "--data", "rows.jsonl"],
            "needs a reward function: --reward score.py:function",
        ),
        (["--config", "quickstart", "--data", "rows.jsonl"], "two ways to say one thing"),
        (["--resume", "x", "--data", "rows.jsonl"], "brings its own configuration"),
        (
            [
                "--model",
                "model",
                "--data",
                "r",
                "--reward",
                "s.py:f",
                "--write-config",
                "x",
                "--set",
                "a.b=1",
            ],
            "--set",
        ),
        (["--model", "model"], "--config is required"),
        (
            [*OWN, "--algorithm", "dpo"],
            "--algorithm dpo learns from the rows alone: leave out --reward",
        ),
        ([*OWN, "--algorithm", "grop"], "did you mean 'grpo'"),
        ([*OWN, "--algorithm", "GRPO"], "did you mean 'grpo'"),
        ([*OWN[:4], "--algorithm", "dop"], "did you mean 'dpo'"),
        ([*OWN, "--algorithm", "rloo"], "--set rl_training.algorithm=rloo"),
    ],
)
def test_flags_that_do_not_fit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.train(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "hidden_size"),
    [
        ("builtin:tiny", 128),
        ("model", 1024),
        ("Qwen/Qwen3-0.6B-not-in-the-cache", 1022),
        ("mlx-community/nothing-4B-4bit", 2640),
        ("someone/of-no-known-size", 2560),
    ],
)
def test_the_size_of_a_model(model: str, hidden_size: int) -> None:
    assert find_hidden_size(model) == hidden_size


def test_smaller_steps_for_larger_models() -> None:
    rates = [learning_rate_for(size) for size in (16, 128, 1024, 2560, 4096)]
    assert rates == pytest.approx([1e-3, 1e-3, 2e-4, 5.06e-5, 2.5e-5], rel=0.01)


@pytest.mark.parametrize(("algorithm", "rate", "rows"), [("dpo", 8e-6, 32), ("sft", 4e-4, 16)])
def test_an_algorithm_that_learns_from_the_rows_needs_no_reward_and_is_known_again(
    here: Path, algorithm: str, rate: float, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "model", "--data", "rows.jsonl", "--algorithm", algorithm]
    (here / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 50)
    run = here / "checkpoints" / "rows"
    run.mkdir(parents=True)
    assert cli.train([*flags, "--write-config", str(run / "config.toml")]) == 0
    resumed = ("--resume", "auto", "--set", "rl_training.total_steps=7")
    config = call("train", *flags, *resumed, cwd=here)["config"]
    assert (config["data"]["path"], config["environments"]) == (str(here / "rows.jsonl"), [])
    training = config["rl_training"]
    assert (training["algorithm"], training["total_steps"]) == (algorithm, 7)
    assert (training["learning_rate"], training["batch_size"]) == (pytest.approx(rate), rows)
    assert cli.train([*flags[:-1], "kto", "--resume", "auto"]) == 2
    assert "--algorithm is kto" in capsys.readouterr().err


SMOL, QWEN = (576, 1.345e8), (1024, 6e8)


@pytest.mark.parametrize(
    ("model", "rows", "backend", "cores", "sizes", "reasons"),
    [
        (SMOL, 5000, "cpu", 2, (32, 64, 81), ("59 min", "512 would take 12 min a step")),
        # as on a GPU, and an hour of steps
        (SMOL, 5000, "cpu", 64, (64, 512, 163), ("60 min", "")),
        (SMOL, 5000, "cuda", 2, (64, 512, 200), ("", "")),
        (QWEN, 5000, "metal", 8, (64, 512, 200), ("", "")),
        (QWEN, 48, "metal", 8, (64, 512, 60), ("10 passes over 48 rows", "")),
        (QWEN, 3, "cuda", 8, (64, 512, 20), ("at least 20 steps", "")),
        # rows on the hub are not counted
        (QWEN, None, "cpu", 2, (32, 64, 20), ("CPU cores", "512 would take")),
        ((128, 1e6), 5000, "cpu", 2, (128, 64, 80), ("", "")),
    ],
    ids=["two cores", "many cores", "cuda", "metal", "few rows", "three rows", "hub", "toy"],
)
def test_sizes_follow_the_machine_and_the_rows(
    model: tuple[int, float],
    rows: int | None,
    backend: Any,
    cores: int,
    sizes: tuple[int, int, int],
    reasons: tuple[str, str],
) -> None:
    """64 answers of 512 tokens, 200 steps of them: 2.87 hours on two cores, even with 48 tokens."""
    found = sizes_for(*model, rows, Hardware(backend, "x86_64", cores, 16 * GIB, 8 * GIB))
    assert (found.rollouts, found.max_tokens, found.steps) == sizes
    assert (
        reasons[0] in found.why_steps
        and reasons[1] in found.why
        and bool(found.why) == bool(reasons[1])
    )


def test_each_size_has_its_reason_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Hardware("metal", "arm64", 8, 16 * GIB, 8 * GIB)
    monkeypatch.setattr("mlx_parallm.cli.dataset_config.detect", lambda: mac)
    text = dataset_toml("model", "rows.jsonl", ["score.py:correct"])
    for key in ("total_steps", "rollout_batch_size", "max_tokens", "group_size", "batch_size"):
        assert all("#" in line for line in text.splitlines() if line.startswith(f"{key} ="))
    assert "about 10 passes over 3 rows, and at least 20 steps" in text


def test_a_model_has_about_so_many_parameters(here: Path) -> None:
    config = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
    (here / "model" / "config.json").write_text(json.dumps(config))
    assert parameters_of("model", 576) == pytest.approx(1.48e8, rel=0.01), "SmolLM2 has 134.5 M"
    assert parameters_of("Qwen/Qwen3-0.6B", 1024) == 0.6e9
    assert parameters_of("someone/model", 2560) == pytest.approx(3.76e9, rel=0.01)
    (here / "model" / "config.json").write_text("[1]")
    assert parameters_of("model", 1320) == 1e9
    assert count_rows("rows.jsonl") == 3 and count_rows("hf:a/b") is None


@pytest.mark.parametrize(
    ("rows", "algorithm", "batch_size"),
    [
        (200, "dpo", 32),
        (35, "dpo", 16),
        (35, "sft", 16),
        (18, "dpo", 8),
        (9, "sft", 4),
        (1, "dpo", 1),
        (2, "kto", 2),
    ],
)
def test_a_batch_is_no_larger_than_the_rows_that_are_trained_on(
    here: Path, rows: int, algorithm: str, batch_size: int
) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"}
    (here / "few.jsonl").write_text(f"{json.dumps(row)}\n" * rows)
    text = dataset_toml("model", str(here / "few.jsonl"), [], algorithm)
    assert tomllib.loads(text)["rl_training"]["batch_size"] == batch_size
