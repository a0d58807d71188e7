"""Which adapter `model.lora_path` gives a run."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.errors import AdapterError, ConfigError
from tests.tiny_models import lora_config
from mlx_parallm.models.lora import adapter_layers, inject_lora, save_adapter
from mlx_parallm.rl_training.checkpoints.resume import initial_adapter
from tests.tiny_models import make_model


def config(tmp_path: Path, path: str, **training: Any) -> Config:
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


def test_one_that_training_will_make_starts_anew(tmp_path: Path) -> None:
    assert initial_adapter(config(tmp_path, f"{tmp_path}/checkpoints/latest/lora_weights.safetensors")) is None


def test_also_when_the_checkpoints_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("disk")
    assert initial_adapter(config(tmp_path, f"{tmp_path}/checkpoints/latest/lora_weights.safetensors")) is None


def test_anything_else_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no adapter at"):
        initial_adapter(config(tmp_path, f"{tmp_path}/elsewhere/lora_weights.safetensors"))
    (tmp_path / "checkpoints" / "final").mkdir(parents=True)
    with pytest.raises(AdapterError, match="no adapter at"):  # something is there, but no adapter
        initial_adapter(config(tmp_path, f"{tmp_path}/checkpoints/final"))


def test_the_last_runs_adapter_is_taken_when_it_fits(tmp_path: Path) -> None:
    own = config(tmp_path, f"{tmp_path}/checkpoints/latest/lora_weights.safetensors")
    save_run(tmp_path, own)
    layers = initial_adapter(own)
    assert layers is not None
    assert len(layers) == 14


def test_the_last_run_was_of_another_model(tmp_path: Path) -> None:
    """The quickstart's adapter must not stop the run of a real model whose lora_path is checkpoints/latest/…"""
    path = f"{tmp_path}/checkpoints/latest/lora_weights.safetensors"
    save_run(tmp_path, config(tmp_path, path, lora={"rank": 2, "target_modules": ["q_proj"]}))
    assert initial_adapter(config(tmp_path, path)) is None


def test_full_weights_take_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains all weights"):
        initial_adapter(config(tmp_path, f"{tmp_path}/checkpoints/x", lora={"enabled": False}))
