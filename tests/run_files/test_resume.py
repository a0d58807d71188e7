"""What a resume may change, and which adapter `model.lora_path` gives a run."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.load import Config, load_config, parse_config
from mlx_parallm.errors import AdapterError, CheckpointError, ConfigError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import adapter_layers, inject_lora, save_adapter
from mlx_parallm.rl_training.initial_adapter import initial_adapter
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.directory import checkpoint_at
from mlx_parallm.run_files.resume import (
    MAY_CHANGE,
    check_resume,
    note_base,
    refuse_redacted,
    what_to_resume,
)
from mlx_parallm.run_files.trainer_state import STATE_FILE, TrainerState
from mlx_parallm.system.log import configure_logging
from tests.tiny_models import lora_config, make_model

ROWS = '[[environments]]\nkind = "tasks"\nname = "sort"\n'


def config(tmp_path: Path, *settings: str) -> Config:
    file = tmp_path / "own.toml"
    file.write_text(ROWS)
    return load_config(file, list(settings))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoints" / "run"
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(config(tmp_path, "model.base_path=/data/Tiny").to_toml())
    return directory


def check(tmp_path: Path, run: Path, *settings: str) -> None:
    check_resume(
        config(tmp_path, *(settings or ("model.base_path=/data/Tiny",))), run, run / "config.toml"
    )


def base(*settings: str) -> tuple[str, ...]:
    return ("model.base_path=/data/Tiny", *settings)


@pytest.mark.parametrize(
    "setting",
    [
        "server.port=1",
        "server.batch_size=4",
        'logging.trackers=["wandb"]',
        "rl_training.total_steps=7",
        "rl_training.learning_rate=1e-6",
        "rl_training.kl_beta=0.1",
        "rl_training.checkpoint_dir=/elsewhere",
        "rl_training.weight_updates.lock_timeout_ms=500",
        "rl_training.atropos.api_url=http://u:KEY@host",
        "environments.0.max_tokens=999",
        "model.quantized_cache=/elsewhere",
        "model.tool_parser=off",
    ],
)
def test_may_change(tmp_path: Path, run: Path, setting: str) -> None:
    check(tmp_path, run, *base(setting))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rl_training.lora.rank=8", r"rl_training\.lora\.rank \(16 → 8\)"),
        ("rl_training.batch_size=8", r"rl_training\.batch_size \(32 → 8\)"),
        ("rl_training.seed=1", r"rl_training\.seed \(0 → 1\)"),
        ("model.revision=main", r"model\.revision \(not set → main\)"),
        ("environments.0.name=reverse", r"environments\.0\.name \(sort → reverse\)"),
        ("environments.0.options.length=9", r"environments\.0\.options\.length \(not set → 9\)"),
        (
            "environments.0.options.max_tokens=9",
            r"environments\.0\.options\.max_tokens \(not set → 9\)",
        ),
    ],
)
def test_may_not_change(tmp_path: Path, run: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(tmp_path, run, *base(setting))
    assert f"model.lora_path={run}/latest" in str(caught.value)


def test_all_that_are_wrong_are_named_together(tmp_path: Path, run: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"lora\.rank.*, rl_training\.lora\.alpha|lora\.alpha.*lora\.rank"
    ):
        check(tmp_path, run, *base("rl_training.lora.rank=8", "rl_training.lora.alpha=8"))


def test_a_model_may_lie_elsewhere(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.base_path"):
        check(tmp_path, run, f"model.base_path={tmp_path}/there/Tiny")  # nothing is there
    (tmp_path / "there" / "Tiny").mkdir(parents=True)
    check(tmp_path, run, f"model.base_path={tmp_path}/there/Tiny")
    (tmp_path / "there" / "Other").mkdir()
    with pytest.raises(ConfigError, match=r"model\.base_path"):
        check(tmp_path, run, f"model.base_path={tmp_path}/there/Other")


def test_the_list_names_keys_that_there_are() -> None:
    def leaves(value: Any, key: str = "") -> list[str]:
        fields = type(value).model_fields if hasattr(type(value), "model_fields") else None
        if fields is None:
            return [key]
        return [
            leaf
            for name in fields
            for leaf in leaves(getattr(value, name), f"{key}.{name}" if key else name)
        ]

    known = set(leaves(Config()))
    plain = {key for key in MAY_CHANGE if "*" not in key}
    assert plain <= known


def test_a_secret_has_to_be_given_again(tmp_path: Path) -> None:
    written = config(
        tmp_path, "rl_training.atropos.api_url=http://env:KEY@host", "server.api_key=x"
    ).to_toml()
    (tmp_path / "saved.toml").write_text(written)
    with pytest.raises(ConfigError, match=r"rl_training.atropos.api_url.*--set"):
        refuse_redacted(load_config(tmp_path / "saved.toml").model_dump(mode="json"))
    again = ["rl_training.atropos.api_url=http://env:KEY@host"]
    refuse_redacted(load_config(tmp_path / "saved.toml", again).model_dump(mode="json"))


def adapter_of(config: Config) -> dict[str, LoraPair] | None:
    training = config.rl_training
    return initial_adapter(config.model, training.lora, training.checkpoint_dir)


def starting_config(tmp_path: Path, path: str, **training: Any) -> Config:
    section = {"checkpoint_dir": str(tmp_path / "checkpoints"), "lora": {"rank": 2}} | training
    return parse_config({"model": {"lora_path": path}, "rl_training": section})


def save_run(tmp_path: Path, config: Config, name: str = "old") -> None:
    """checkpoints/<name>/step_000001 with an adapter, and checkpoints/latest → it."""
    run = tmp_path / "checkpoints" / name
    (run / "step_000001").mkdir(parents=True)
    tree = copy.deepcopy(make_model())
    mx.random.seed(0)
    inject_lora(tree, lora_config(2, 32.0))
    save_adapter(run / "step_000001", adapter_layers(tree), num_layers=2)
    (run / "latest").symlink_to("step_000001")
    (tmp_path / "checkpoints" / "latest").symlink_to(f"{name}/latest")
    (run / "config.toml").write_text(config.to_toml())


@pytest.mark.parametrize("link", [False, True])
def test_an_adapter_that_training_will_make_starts_anew(link: bool, tmp_path: Path) -> None:
    if link:
        (tmp_path / "disk").mkdir()
        (tmp_path / "checkpoints").symlink_to("disk")
    assert (
        adapter_of(
            starting_config(tmp_path, f"{tmp_path}/checkpoints/latest/lora_weights.safetensors")
        )
        is None
    )


def test_anything_else_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no adapter at"):
        adapter_of(starting_config(tmp_path, f"{tmp_path}/elsewhere/lora_weights.safetensors"))
    (tmp_path / "checkpoints" / "final").mkdir(parents=True)
    with pytest.raises(AdapterError, match="no adapter at"):  # something is there, but no adapter
        adapter_of(starting_config(tmp_path, f"{tmp_path}/checkpoints/final"))


def test_the_last_runs_adapter_is_taken_when_it_fits(tmp_path: Path) -> None:
    own = starting_config(tmp_path, f"{tmp_path}/checkpoints/latest/lora_weights.safetensors")
    save_run(tmp_path, own)
    configure_logging(level="info")
    with capture_logs() as logged:
        layers = adapter_of(own)
    [said] = logged
    assert "continues from an adapter" in said["event"] and said["of_run"] == "old", (
        "a second run of the same file began there without a word"
    )
    assert layers is not None
    assert len(layers) == 14


def test_the_last_run_was_of_another_model(tmp_path: Path) -> None:
    """The quickstart's adapter must not stop the run of a real model whose lora_path is
    checkpoints/latest/…"""
    path = f"{tmp_path}/checkpoints/latest/lora_weights.safetensors"
    save_run(
        tmp_path, starting_config(tmp_path, path, lora={"rank": 2, "target_modules": ["q_proj"]})
    )
    assert adapter_of(starting_config(tmp_path, path)) is None


def test_full_weights_take_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains all weights"):
        adapter_of(starting_config(tmp_path, f"{tmp_path}/checkpoints/x", lora={"enabled": False}))


@pytest.mark.parametrize("resume", ["auto", "{}/run"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(resume: str, tmp_path: Path) -> None:
    """It did, and removed the lines of all its steps from metrics.jsonl."""
    run = config(tmp_path, f"rl_training.checkpoint_dir={tmp_path}", "rl_training.run_name=run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rollouts.sqlite").touch()
    resume = resume.format(tmp_path)
    assert what_to_resume(run, resume)[1:] == (None, True), "it was killed before its first one"
    (tmp_path / "run/latest").symlink_to("step_000040")
    with pytest.raises(CheckpointError, match="step_000040"):
        what_to_resume(run, resume)


def test_another_base_under_the_same_name_is_told(tmp_path: Path) -> None:
    """Weights that were changed in place went unseen: the adapter continued, on another model."""
    model, store = tmp_path / "model", RolloutStore(tmp_path / "rollouts.sqlite")
    model.mkdir()
    weights = bytearray(300_000)
    (model / "model.safetensors").write_bytes(weights)
    configure_logging(level="info")
    with capture_logs() as logged:
        note_base(store, model)
        note_base(store, model)
    assert logged == []
    weights[150_000:160_000] = bytes([1]) * 10_000
    (model / "model.safetensors").write_bytes(weights)
    with capture_logs() as logged:
        note_base(store, model)
    assert [(line["log_level"], line["path"]) for line in logged] == [("warning", str(model))]
    store.close()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("rl_training.learning_rate=1e-4", {}),
        ("rl_training.learning_rate=7e-4", {"rl_training.learning_rate": "0.0003 → 0.0007"}),
    ],
)
def test_a_setting_that_was_changed_live_is_not_told_as_changed_back(
    setting: str, told: dict[str, str], tmp_path: Path
) -> None:
    """The run continued with the 3e-4 of the dashboard, and the log said 0.0003 → 0.0001."""
    place = (f"rl_training.checkpoint_dir={tmp_path}", "rl_training.run_name=run")
    checkpoint = tmp_path / "run/step_000004"
    checkpoint.mkdir(parents=True)
    saved = config(tmp_path, "rl_training.learning_rate=3e-4", *place)
    (tmp_path / "run/config.toml").write_text(saved.to_toml())
    changes = [{"step": 3, "settings": {"learning_rate": [1e-4, 3e-4]}}]
    state = TrainerState(step=4, policy_version=4, versions=[[4, 4]], changes=changes)
    (checkpoint / STATE_FILE).write_text(state.to_text())
    configure_logging(level="info")
    with capture_logs() as logged:
        what_to_resume(config(tmp_path, setting, *place), "auto")
    lines = [line for line in logged if line["event"] == "changed on resume"]
    assert [{key: line[key] for key in line if "." in key} for line in lines] == (
        [told] * bool(told)
    )


def test_a_newest_step_without_its_state_is_not_passed_over(tmp_path: Path) -> None:
    """An older one would be taken without a word, and its later steps be written over."""
    for step in (2, 4):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / f"step_{step:06d}" / "trainer_state.json").write_text("{}")
    (tmp_path / "latest").symlink_to("step_000004")
    assert checkpoint_at(tmp_path) == (tmp_path / "step_000004").resolve()
    (tmp_path / "latest").unlink()
    assert checkpoint_at(tmp_path) == (tmp_path / "step_000004").resolve()
    (tmp_path / "latest").symlink_to("step_000004")
    (tmp_path / "step_000004" / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_000004.*trainer_state"):
        checkpoint_at(tmp_path)
    assert checkpoint_at(tmp_path / "step_000002") == (tmp_path / "step_000002").resolve()
